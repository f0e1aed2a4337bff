"""What tests have done inside SGLang's scheduler process, where the model and its memory are.

Each function gets `verl.workers.rollout.sglang.scheduler.SchedulerExtension`.
"""

from __future__ import annotations

import copy

import torch

HERE = "tests.workers.rollout.sglang.scheduler_functions"


def untie_head(extension) -> None:
    """Let the output layer compute with a copy of the embedding that no name leads to, as packed weights would be."""
    extension.tied_head = extension.model.lm_head
    head = copy.copy(extension.tied_head)
    head._parameters = dict(head._parameters)
    head.weight = torch.nn.Parameter(head.weight * 0.5, requires_grad=False)
    head.weight.weight_loader = lambda parameter, weight: None
    extension.model.lm_head = head


def tie_head(extension) -> None:
    extension.model.lm_head = extension.tied_head


def spoil_loads(extension) -> None:
    """Flip a bit of layer 0's keys after every load."""

    def loads_and_spoils(messages):
        problem = type(extension).load(extension, messages)
        extension.model.model.layers[0].self_attn.qkv_proj.weight.view(torch.int32)[-1, 3] ^= 1
        return problem

    extension.load = loads_and_spoils


def mend_loads(extension) -> None:
    del extension.load


def all_nan(extension) -> bool:
    return all(bool(parameter.isnan().all()) for parameter in extension.model.parameters())


def cached_tokens(extension) -> int:
    return extension.scheduler.tree_cache.evictable_size()


def held(extension) -> int:
    """Elements of all weights of this rank."""
    return sum(parameter.numel() for parameter in extension.model.parameters())


def dtypes(extension) -> list[str]:
    return sorted({str(parameter.dtype) for parameter in extension.model.parameters()})
