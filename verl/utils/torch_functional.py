"""Small functions on tensors: masked statistics, log-probs of tokens, padding, learning-rate schedules.

Imports torch and leaves only. What an engine uses to get log-probs without full logits is in
``verl/models/token_outputs.py``.
Letters: B rows, L length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.utils.device import get_device_name, get_torch_device

ROWS_PER_CHUNK = 1024
"""Rows of logits turned to float32 at a time: bounds the extra memory to 1024 x V x 4 bytes."""


# ---------------------------------------------------------------------------------------------- masked statistics
@torch.no_grad()
def nonfinite_numbers(tensor: Tensor) -> str:
    """How many numbers of a tensor are NaN and infinite, in words; empty if none is."""
    # NaN goes through aminmax, which reads memory once and is thirty times as fast as isfinite().all()
    if not tensor.is_floating_point() or not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor)):
        return ""
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return f"{nan:,} NaN and {infinite:,} infinite of {tensor.numel():,} numbers"


_BLOCK_NUMBERS = 1 << 18
"""Numbers that are cast at a time: they stay in a core's cache."""


def add_to_wider(total: Tensor, part: Tensor) -> None:
    """Add ``part`` to ``total`` of a wider dtype, in place.

    On CPU in blocks of rows: torch would cast all of ``part`` first, and new memory costs more than the sum.
    """
    if total.device.type != "cpu" or total.dtype == part.dtype or total.ndim < 2 or total.numel() <= _BLOCK_NUMBERS:
        total.add_(part)
        return
    rows = max(1, _BLOCK_NUMBERS * len(total) // total.numel())
    for target, values in zip(total.split(rows), part.split(rows), strict=True):
        target.add_(values)


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum ``values`` where ``mask`` is 1, over ``axis`` (None: all). Masked values are not read, be they NaN."""
    return torch.where(mask.bool(), values, 0).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of ``values`` where ``mask`` is 1, over ``axis`` (None: all); zero where nothing is."""
    return masked_sum(values, mask, axis) / (mask.sum(axis) + 1e-8)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of ``values`` where ``mask`` is 1.

    Raises:
        ValueError: ``unbiased`` and fewer than two values.
    """
    variance = masked_mean((values - masked_mean(values, mask)).square(), mask)
    if not unbiased:
        return variance
    n = mask.sum()
    if n < 2:
        raise ValueError(
            f"masked_var: the mask selects {int(n)} value(s), and an unbiased variance needs at least two. "
            f"Use a larger batch, or unbiased=False."
        )
    return variance * n / (n - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale ``values`` to unbiased variance 1, and with ``shift_mean`` shift to mean 0, as measured over ``mask``.

    Masked values are transformed along with the others; multiply by ``mask`` to clear them.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clamp with tensors as bounds; where they cross, ``tensor_min`` wins."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


# ------------------------------------------------------------------------------------------------ from logits
def gather_from_labels(data: Tensor, label: Tensor) -> Tensor:
    """Pick one entry of the last dim per label: (..., V) and (...) to (...)."""
    return data.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of each label: (..., V) logits and (...) labels to (...) float32 (float64 stays).

    Args:
        inplace_backward: accepted for callers of verl; has no effect here.
    """
    flat, targets = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    chunks = [
        -F.cross_entropy(_at_least_float32(rows), target, reduction="none")
        for rows, target in zip(flat.split(ROWS_PER_CHUNK), targets.split(ROWS_PER_CHUNK), strict=True)
    ]
    return torch.cat(chunks).view(labels.shape)


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """The definition, log-softmax and gather in the dtype given: an oracle for tests."""
    return gather_from_labels(F.log_softmax(logits, dim=-1), labels)


logprobs_from_logits_v2 = logprobs_from_logits


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Log-probs of the last ``response_length`` tokens, from (B, L) ids and (B, L, V) logits: (B, response_length)."""
    return logprobs_from_logits(logits[:, -response_length - 1 : -1], input_ids[:, -response_length:])


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of each distribution, in nats: (..., V) to (...)."""
    log_probs = F.log_softmax(_at_least_float32(logits), dim=-1)
    return -(log_probs.exp() * log_probs.clamp(min=torch.finfo(log_probs.dtype).min)).sum(-1)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """``entropy_from_logits``, ``chunk_size`` rows at a time, to bound the memory of the float32 copy."""
    flat = logits.reshape(-1, logits.shape[-1])
    return torch.cat([entropy_from_logits(rows) for rows in flat.split(chunk_size)]).view(logits.shape[:-1])


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ------------------------------------------------------------------------------------------- padding and cutting
def get_response_mask(response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype=torch.int64) -> Tensor:
    """Mark each response up to and including its first end token: (B, R) ids to (B, R); all ones if there is none."""
    is_end = torch.isin(response_id, torch.tensor(eos_token, device=response_id.device)).long()
    return (is_end.cumsum(-1) - is_end == 0).to(dtype)


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: int | float, left_pad: bool = False
) -> Tensor:
    """Pad the last dim to ``max_seq_len``, on the right unless ``left_pad``; longer tensors stay as they are."""
    missing = max(max_seq_len - tensors.shape[-1], 0)
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def pad_2d_list_to_length(
    response: Sequence[Sequence], pad_token_id: int | float, max_length: int | None = None
) -> Tensor:
    """Rows of unequal length to (B, longest or ``max_length``, whichever is greater), padded on the right."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([list(row) + [pad_token_id] * (width - len(row)) for row in response])


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Bring tokenised text to one length.

    Args:
        input_ids, attention_mask: (B, L).
        max_length: tokens.
        truncation: what to do with longer rows: ``left`` keeps the end, ``right`` the start, ``middle`` half of each,
            ``error`` raises.

    Returns:
        the two, (B, max_length).

    Raises:
        ValueError: a row is too long and truncation is ``error``; or unknown truncation.
    """
    length = input_ids.shape[-1]
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"truncation={truncation} is not known. Known: left, right, middle, error.")
    if length > max_length:
        if truncation == "error":
            raise ValueError(
                f"A sequence of {length} tokens is longer than max_length={max_length}. Raise the length, drop such "
                f"rows (data.filter_overlong_prompts=True), or set data.truncation to left, right or middle."
            )
        head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
        keep = torch.cat([torch.arange(head), torch.arange(length - (max_length - head), length)])
        input_ids, attention_mask = input_ids[:, keep], attention_mask[:, keep]
    return (
        pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
        pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
    )


def tokenize_and_postprocess_data(
    prompt: str, tokenizer: Any, max_length: int, pad_token_id: int, left_pad: bool = True, truncation: str = "error"
) -> tuple[Tensor, Tensor]:
    """``postprocess_data`` of one text: two (1, max_length) tensors."""
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        tokens["input_ids"], tokens["attention_mask"], max_length, pad_token_id, left_pad, truncation
    )


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """The real ids of each left-padded row: (B, L) to lists."""
    return [ids[len(ids) - int(mask.sum()) :].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)]


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return flat indices (T,) of the ones of a (B, L) mask, offsets of rows (B + 1,) int32, and the longest row."""
    lengths = attention_mask.sum(-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    return indices, F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list:
    """Cut a TensorDict, or a dict of tensors, into parts of ``batch_size`` rows.

    Raises:
        ValueError: the rows do not divide.
    """
    rows = len(next(iter(tensors.values()))) if isinstance(tensors, dict) else tensors.batch_size[0]
    if rows % batch_size:
        raise ValueError(f"{rows} rows do not divide into batches of {batch_size}. Choose a divisor of {rows}.")
    if hasattr(tensors, "split"):
        return list(tensors.split(batch_size))
    return [{k: v[i : i + batch_size] for k, v in tensors.items()} for i in range(0, rows, batch_size)]


# ----------------------------------------------------------------------------------------------------- gradients
def compute_grad_norm(model: torch.nn.Module) -> float:
    """*Square* of the gradients' L2 norm over all parameters of this process."""
    return sum(p.grad.detach().float().square().sum().item() for p in model.parameters() if p.grad is not None)


# --------------------------------------------------------------------------------------------------- collectives
def broadcast_dict_tensor(tensors: Mapping[str, Tensor], src: int, group: Any) -> None:
    """Overwrite every tensor with rank ``src``'s."""
    for key in sorted(tensors.keys()):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(tensors: Mapping[str, Tensor], size: int, group: Any, dim: int = 0) -> dict[str, Tensor]:
    """Concatenate every tensor over the ``size`` ranks of ``group`` along ``dim``; shapes must agree."""
    gathered = {}
    for key in sorted(tensors.keys()):
        parts = [torch.empty_like(tensors[key]) for _ in range(size)]
        dist.all_gather(parts, tensors[key].contiguous(), group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    return gathered


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Mean over the unmasked values of all ranks."""
    both = torch.stack([masked_sum(local_tensor, local_mask), local_mask.sum().to(local_tensor.dtype)])
    dist.all_reduce(both)
    return both[0] / both[1]


@contextmanager
def check_device_is_available() -> Iterator[None]:
    """Within the block modules may be imported that want the device at once.

    Raises:
        RuntimeError: torch cannot use it.
    """
    if not get_torch_device().is_available():
        raise RuntimeError(f"torch cannot use the device {get_device_name()!r}. Look at its driver, or use the CPU.")
    yield


# ------------------------------------------------------------------------------------------ learning-rate schedules
def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Rise from zero over ``num_warmup_steps``, then stay at the optimizer's rate."""
    return LambdaLR(optimizer, lambda step: _warmup(step, num_warmup_steps), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float | None = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Rise from zero over ``num_warmup_steps``, then follow a cosine down to ``min_lr_ratio`` of the optimizer's rate.

    Args:
        num_cycles: waves of the cosine between warm-up and the end; 0.5 goes down once.

    Raises:
        ValueError: ``min_lr_ratio`` outside [0, 1].
    """
    floor = min_lr_ratio or 0.0
    if not 0 <= floor <= 1:
        raise ValueError(f"min_lr_ratio={min_lr_ratio} must lie in [0, 1]: it is a share of the learning rate.")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return _warmup(step, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = math.cos(2 * math.pi * num_cycles * progress)
        return max(floor, (1 + floor) / 2 + wave * (1 - floor) / 2)

    return LambdaLR(optimizer, factor, last_epoch)


def _warmup(step: int, num_warmup_steps: int) -> float:
    return min(1.0, step / num_warmup_steps) if num_warmup_steps > 0 else 1.0


# -- Names of floating point types: what a user may write, and the torch dtype it means ------------------------------

_NAMES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float32: ("fp32", "float32", "float", "32", "32-true"),
    torch.bfloat16: ("bf16", "bfloat16", "bf16-mixed", "bf16-true"),
    torch.float16: ("fp16", "float16", "half", "16", "16-mixed", "16-true"),
    torch.float64: ("fp64", "float64", "double", "64"),
}


class PrecisionType:
    """Translate between names of precisions and torch dtypes."""

    @staticmethod
    def to_dtype(precision: str | int | torch.dtype) -> torch.dtype:
        """The dtype of a name such as ``"bf16"``; a dtype is returned as it is.

        Raises:
            ValueError: for an unknown name.
        """
        if isinstance(precision, torch.dtype):
            return precision
        name = str(precision).removeprefix("torch.").lower()
        for dtype, names in _NAMES.items():
            if name in names:
                return dtype
        known = ", ".join(names[0] for names in _NAMES.values())
        raise ValueError(f"precision {precision!r} is unknown: use one of {known}")

    @staticmethod
    def to_str(dtype: torch.dtype) -> str:
        """The short name of a dtype, as ``"bf16"``."""
        if dtype not in _NAMES:
            raise ValueError(f"dtype {dtype} has no name here: use one of {', '.join(map(str, _NAMES))}")
        return _NAMES[dtype][0]

    @staticmethod
    def supported_type(precision: str | int | torch.dtype) -> bool:
        """True if ``to_dtype`` understands it."""
        return precision in _NAMES or str(precision).removeprefix("torch.").lower() in PrecisionType.supported_types()

    @staticmethod
    def supported_types() -> list[str]:
        """Every name ``to_dtype`` understands."""
        return [name for names in _NAMES.values() for name in names]

    @staticmethod
    def is_fp16(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.float16

    @staticmethod
    def is_fp32(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.float32

    @staticmethod
    def is_bf16(precision: str | int | torch.dtype) -> bool:
        return PrecisionType.to_dtype(precision) is torch.bfloat16
