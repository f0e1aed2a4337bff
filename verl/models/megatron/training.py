"""What a trained model needs of megatron-core: data-parallel gradients, the optimizer over them, moves to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from verl.config.engine import OptimConfig
from verl.models.megatron.bridge import MegatronModel


def wrap_pieces(model: MegatronModel, distributed: bool, overrides: Mapping[str, Any]) -> None:
    """Let gradients be kept in fp32 buffers and summed over data-parallel ranks; changes ``model``.

    Args:
        distributed: whether the optimizer's state is spread over these ranks.
        overrides: entries of ``DistributedDataParallelConfig``.
    """
    given = {"grad_reduce_in_fp32": True, **overrides}
    config = _typed(DistributedDataParallelConfig, "override_ddp_config", given, use_distributed_optimizer=distributed)
    core = model.transformer_config
    model.pieces = [
        # pieces after the first are summed while the first is computed, without buckets
        DistributedDataParallel(core, config, piece, disable_bucketing=number > 0)
        for number, piece in enumerate(model.pieces)
    ]
    # the number of tokens is not used: the loss of a micro-batch has its share of the step already
    core.finalize_model_grads_func = lambda pieces, num_tokens=None, **options: finalize_model_grads(pieces, **options)
    if config.overlap_grad_reduce:
        waits = [piece.no_sync for piece in model.pieces]
        core.no_sync_func = waits if len(waits) > 1 else waits[0]


def build_optimizer(model: MegatronModel, config: OptimConfig, grad_clip: float | None, distributed: bool) -> Any:
    """megatron-core's AdamW over the wrapped pieces."""
    dtype = model.bridge.dtype
    beta1, beta2 = config.betas
    options = _typed(
        OptimizerConfig,
        "override_optimizer_config",
        config.override_optimizer_config or {},
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=beta1,
        adam_beta2=beta2,
        adam_eps=config.eps,
        clip_grad=grad_clip if grad_clip is not None and grad_clip != float("inf") else 0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    optimizer = get_megatron_optimizer(options, model.pieces)
    for inner in torch_optimizers(optimizer):
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            give_state(inner, parameter)
    return optimizer


def _typed(kind: type, option: str, given: Mapping[str, Any], **decided: Any) -> Any:
    unknown = sorted(set(given) - {entry.name for entry in fields(kind)})
    if unknown:
        raise ValueError(f"{option}.{unknown[0]} is no entry of megatron-core's {kind.__name__}: leave it out")
    both = sorted(set(given) & set(decided))
    if both:
        raise ValueError(f"{option}.{both[0]} is decided by verl: leave it out")
    return kind(**given, **decided)


def parts_of(optimizer: Any) -> list[Any]:
    """megatron-core's optimizers that ``optimizer`` is a chain of: one for experts, one for the rest."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizers that change weights."""
    for part in parts_of(optimizer):
        if part.optimizer is not None:  # None: this rank has no part of these weights
            yield part.optimizer


def give_state(inner: torch.optim.Optimizer, parameter: Tensor) -> None:
    """Give torch's AdamW the state of ``parameter`` before its first step, as megatron-core's checkpoints expect.

    Every parameter has a step of its own: AdamW raises it once for each.
    """
    if isinstance(inner, torch.optim.AdamW) and not inner.state[parameter]:
        zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        inner.state[parameter].update(step=torch.zeros((), dtype=torch.float32), **zeros)


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Use ``rate`` in the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)


def optimizer_tensors(optimizer: Any) -> Iterator[Tensor]:
    """fp32 weights and moments of this rank, beside the model's own parameters."""
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                yield parameter
                yield from (value for value in inner.state[parameter].values() if isinstance(value, Tensor))


def gradient_buffers(model: MegatronModel) -> Iterator[Tensor]:
    """fp32 sums of gradients of a wrapped model."""
    for piece in model.pieces:
        yield from (buffer.grad_data for buffer in (*piece.buffers, *piece.expert_parallel_buffers))


# -- memory of the device between phases ------------------------------------------------


class Offload:
    """Memory that is taken from the device and given back; views of it stay as they are, for megatron-core holds many.

    Args:
        tensors: gives them when memory is taken: an optimizer makes new ones as it loads its state. Distinct or not.
        keeps: whether the numbers are kept, in host memory; else they are zero afterwards.
        others: what shares its memory with these stays.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        keeps: bool = True,
        others: Iterable[Tensor] = (),
    ) -> None:
        self._tensors, self._device, self._keeps = tensors, device, keeps
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._taken: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._copies: dict[int, Tensor] = {}

    @torch.no_grad()
    def to_host(self) -> None:
        """Take the memory; nothing where it is taken already."""
        copies: dict[int, Tensor] = {}
        for storage in (tensor.untyped_storage() for tensor in self._tensors() if tensor.device == self._device):
            key, size = storage._cdata, storage.nbytes()
            if key in self._others or not size:
                continue
            if self._keeps:
                # made once, and used again
                copy = self._copies.get(key)
                if copy is None or len(copy) != size:
                    copy = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
                copies[key] = copy.copy_(self._bytes(storage))
            self._taken[key] = storage, size
            storage.resize_(0)
        self._copies.update(copies)

    @torch.no_grad()
    def to_device(self) -> None:
        """Give the memory back."""
        for key, (storage, size) in self._taken.items():
            storage.resize_(size)
            place = self._bytes(storage)
            place.copy_(self._copies[key], non_blocking=True) if self._keeps else place.zero_()
        self._copies = {key: copy for key, copy in self._copies.items() if key in self._taken}
        self._taken.clear()

    def _bytes(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
