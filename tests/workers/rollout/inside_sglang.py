"""What tests have done inside SGLang's scheduler process, where the model and its memory are.

Each function gets `verl.workers.rollout.sglang_scheduler.Inside`.
"""

from __future__ import annotations

import torch

HERE = "tests.workers.rollout.inside_sglang"


def untie_head(inside) -> None:
    """Let the output layer compute with a copy of the embedding, as an engine that packs its weights would."""
    model = inside.model
    inside.tied_head = model.lm_head
    model.lm_head = type("Head", (torch.nn.Module,), {"quant_method": inside.tied_head.quant_method})()
    model.lm_head.weight = torch.nn.Parameter(inside.tied_head.weight.detach().clone(), requires_grad=False)


def tie_head(inside) -> None:
    inside.model.lm_head = inside.tied_head


def spoil_loads(inside) -> None:
    """Flip a bit of layer 0's keys after every load."""
    load_weights = type(inside.model).load_weights

    def loads_and_spoils(weights):
        load_weights(inside.model, weights)
        inside.model.model.layers[0].self_attn.qkv_proj.weight.view(torch.int32)[-1, 3] ^= 1

    inside.model.load_weights = loads_and_spoils


def mend_loads(inside) -> None:
    del inside.model.load_weights


def spoil_head(inside) -> None:
    inside.model.model.embed_tokens.weight.fill_(torch.nan)


def all_nan(inside) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in inside.model.parameters())


def cached_tokens(inside) -> int:
    return inside.scheduler.tree_cache.total_size()


def held(inside) -> int:
    """Elements of all weights of this rank."""
    return sum(parameter.numel() for parameter in inside.model.parameters())


def dtypes(inside) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in inside.model.parameters()})
