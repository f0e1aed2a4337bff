"""What tests have done inside SGLang's scheduler process, where the model and its memory are.

Each function gets `verl.workers.rollout.sglang.scheduler.Inside`.
"""

from __future__ import annotations

import copy

import torch

HERE = "tests.workers.rollout.sglang.inside_sglang"


def untie_head(inside) -> None:
    """Let the output layer compute with a copy of the embedding that no name leads to, as packed weights would be."""
    inside.tied_head = inside.model.lm_head
    head = copy.copy(inside.tied_head)
    head._parameters = dict(head._parameters)
    head.weight = torch.nn.Parameter(head.weight * 0.5, requires_grad=False)
    head.weight.weight_loader = lambda parameter, weight: None
    inside.model.lm_head = head


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


def all_nan(inside) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in inside.model.parameters())


def cached_tokens(inside) -> int:
    return inside.scheduler.tree_cache.evictable_size()


def held(inside) -> int:
    """Elements of all weights of this rank."""
    return sum(parameter.numel() for parameter in inside.model.parameters())


def dtypes(inside) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in inside.model.parameters()})
