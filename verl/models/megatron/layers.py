"""Norm and attention of megatron-core's layers where Transformer Engine is absent.

megatron-core's own modules for that case take neither packed rows nor context parallelism, and its norm no sequence
parallelism. These go into its layer specification, a public hook; nothing of it is patched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from verl.models.attention.kernels import AttentionOptions, Packing, attend


@dataclass
class PackedRows(PackedSeqParams):
    """Boundaries of packed rows, for megatron-core's rotary embedding and for ``Attention``."""

    packing: Packing | None = None

    @classmethod
    def of(cls, packing: Packing) -> PackedRows:
        """The rows of a micro-batch."""
        longest = max(packing.q_lengths)
        return cls("thd", packing.cu_q, packing.cu_q, max_seqlen_q=longest, max_seqlen_kv=longest, packing=packing)


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradient is summed over tensor-parallel ranks where each has a part of the sequence."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # read by finalize_model_grads
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no attribute of torch's


class Attention(MegatronModule):
    """Causal attention over padded rows (l, b, heads, D), packed rows (T, heads, D), or this rank's part of padded rows
    with context parallelism."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention_dropout={dropout} with strategy=megatron: without Transformer Engine attention has no "
                "dropout. Leave it out of model.override_config."
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRows | None = None,
    ) -> Tensor:
        if packed_seq_params is not None:
            return attend(query, key, value, packed_seq_params.packing, AttentionOptions(self.scale)).flatten(1)
        mask = None
        if self.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = _GatherSequence.apply(key, group), _GatherSequence.apply(value, group)
            positions = context_positions(key.shape[0], group.rank(), group.size(), key.device)
            mask = positions[:, None] >= torch.arange(key.shape[0], device=key.device)[None]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None and query.shape[2] > 1,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def context_positions(length: int, rank: int, size: int, device: torch.device | str = "cpu") -> Tensor:
    """Positions of a sequence of ``length`` tokens that a context-parallel rank has, (length / size,): its chunks
    ``rank`` and ``2 size - 1 - rank`` of 2 x size, so that causal attention is as much work on every rank."""
    first, second = rank, 2 * size - 1 - rank
    chunk = length // (2 * size)
    start = torch.arange(chunk, device=device)
    return torch.cat([start + first * chunk, start + second * chunk])


class _GatherSequence(torch.autograd.Function):
    """(l / cp, ...) of each rank -> (l, ...) in the order of the sequence; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        halves = [part.chunk(2, 0) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)], 0)

    @staticmethod
    def backward(ctx, grad):
        size, rank = ctx.group.size(), ctx.group.rank()
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        chunks = grad.chunk(2 * size, 0)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 0), None


def use_own_layers(spec: Any) -> Any:
    """Put ``Norm`` and ``Attention`` into the specification of a block of layers; returns it."""
    for layer in spec.layer_specs:
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = Norm
        attention = modules.self_attention.submodules
        attention.core_attention = Attention
        for name in ("q_layernorm", "k_layernorm"):
            if getattr(attention, name, None) not in (None, IdentityOp):
                setattr(attention, name, Norm)
    spec.layer_norm = Norm
    return spec
