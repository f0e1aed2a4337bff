"""Engine on DeepSpeed's ZeRO: optimizer state, gradients and weights sharded, by the stage.

Micro-batches, weights of means, schedules and checkpoints are those of ``Engine``. Only DeepSpeed's collectives, its
sharded optimizer, and the hooks that gather weights are used.

Source: Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054); Ren et al. 2021, ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from verl.checkpoint.shards import check_names, flat_piece
from verl.config.engine import DeepSpeedConfig, FSDPConfig, MixedPrecisionConfig, deepspeed_conflicts
from verl.models.heads import score_layer
from verl.models.loader import ModelSpec, check_finite, empty_model, load_model
from verl.models.token_outputs import TokenScores, token_outputs
from verl.models.weight_files import WeightFiles
from verl.utils.config import typed_section
from verl.utils.device import current_device, empty_cache, has_own_memory
from verl.utils.distributed import Topology, ensure_process_group
from verl.utils.distribution import install_command
from verl.utils.py_functional import unchanged_environment
from verl.utils.torch_functional import PrecisionType
from verl.workers.engine.engine import Engine
from verl.workers.engine.gather import Wait, one_ahead, start_adding, start_gathering
from verl.workers.engine.local import ReplicaEngine
from verl.workers.engine.registry import register_engine
from verl.workers.engine.zero import Part, ZeroOffload, find_fragments, flat_optimizer_state, load_flat_optimizer_state

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def import_deepspeed(device: torch.device) -> ModuleType:
    """The library, set up for ``device``.

    Raises:
        ImportError: it is not installed.
    """
    os.environ["DS_ACCELERATOR"] = device.type  # or it would guess from what the machine has
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
    except ImportError as error:
        raise ImportError(
            f"strategy=deepspeed needs the package deepspeed, which cannot be imported ({error}). Install it with "
            f"`{install_command('deepspeed')}`, or use strategy=fsdp2."
        ) from error
    if get_accelerator().device_name() != device.type:  # another library imported it before, and it guessed
        accelerator = import_module(f"deepspeed.accelerator.{device.type}_accelerator")
        set_accelerator(getattr(accelerator, f"{device.type.upper()}_Accelerator")())
    # names of collectives that torch has renamed and this release still calls, at every step
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    # its collective over shared memory is compiled at first use, for minutes; gloo needs no compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def deepspeed_settings(
    config: DeepSpeedConfig,
    device: torch.device,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    grad_clip: float | None,
    numbers: int,
) -> dict[str, Any]:
    """DeepSpeed's own configuration.

    Args:
        config: the section ``deepspeed`` of a role.
        reduce_dtype: in which gradients are summed over ranks.
        numbers: parameters of the model; a bucket of more would be memory for nothing.

    Raises:
        ValueError: if ``config.config`` has a key that is decided here.
    """
    stage, host = config.zero_stage, {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": config.contiguous_gradients,
        "reduce_bucket_size": min(config.reduce_bucket_size, numbers),
        "allgather_bucket_size": config.allgather_bucket_size,
        # it would replace torch's linear layer in the whole process
        "memory_efficient_linear": False,
    }
    names = [
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
    ]
    for name in ("overlap_comm", *names * (stage == 3)):
        if config[name] is not None:
            zero[name] = config[name]
    if config.offload_optimizer:
        zero["offload_optimizer"] = host
    if stage == 3:
        zero["zero_hpz_partition_size"] = config.zero_hpz_partition_size
        if config.offload_param:
            zero["offload_param"] = host
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip if grad_clip is not None and math.isfinite(grad_clip) else 0.0,
        "communication_data_type": _NAMES[reduce_dtype],
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if compute_dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
    if compute_dtype == torch.float16:
        settings["fp16"] = {"enabled": True}
    for key, value, way_out in deepspeed_conflicts(config.config):
        raise ValueError(f"deepspeed.config.{key}={value!r} is decided by verl: {way_out}")
    return _merged(settings, config.config)


def _merged(own: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(own)
    for name, value in changes.items():
        nested = isinstance(value, Mapping)
        merged[name] = _merged(dict(own.get(name) or {}), value) if nested else value
    return merged


_MAX_WHOLE_NUMBERS = 1 << 28
"""Parameters that are whole on a rank at a time while a model is sharded."""


@register_engine("deepspeed")
class DeepSpeedEngine(Engine):
    """ZeRO stages 1 (optimizer state sharded), 2 (and gradients) and 3 (and weights; also for a model only scored).

    The module holds weights in the compute precision, the sharded optimizer in fp32.
    """

    _files: WeightFiles | None = None
    """The model's files, while it is loaded from them."""

    @classmethod
    def choose(cls, spec: ModelSpec, backend_config: Any, is_trained: bool) -> type[Engine]:
        """Return this class, or that of whole models where the stage leaves nothing to shard."""
        # of a mapping too, whose entries are not checked before
        stage = 2 if backend_config is None else backend_config.get("zero_stage", 2)
        if stage not in (0, 1, 2, 3):
            raise ValueError(f"deepspeed.zero_stage={stage!r} is not a stage of ZeRO: use 0, 1, 2 or 3")
        if stage == 0 or (stage < 3 and not is_trained):
            return ReplicaEngine
        if is_trained and spec.param_torch_dtype != torch.float32:
            raise ValueError(
                f"model_dtype={spec.param_dtype} with strategy=deepspeed: the sharded optimizer keeps the weights in "
                "fp32. Set model_dtype=fp32; mixed_precision.param_dtype is the format of forward and backward"
            )
        return cls

    def _load_and_place(self, config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int) -> None:
        ensure_process_group(device)
        self.device = current_device(device)
        self.topology = Topology.of_ranks(sp_size, device)
        zero = _section(backend_config)
        self._stage = zero.zero_stage
        self._is_sliced = self._stage == 3
        self._library = import_deepspeed(self.device)
        # DeepSpeed reads the number of its device from its launcher's environment
        with unchanged_environment("LOCAL_RANK"):
            os.environ["LOCAL_RANK"] = str(self.device.index or 0)
            kept = self._load(seed, train=self.is_trained)
            settings = deepspeed_settings(
                zero,
                self.device,
                self.spec.compute_torch_dtype,
                PrecisionType.to_dtype((config.mixed_precision or MixedPrecisionConfig()).reduce_dtype),
                self.grad_clip,
                sum(parameter.numel() for parameter in self.module.parameters()),
            )
            self._place(settings)
            self._build_optimizer(list(self.module.parameters()))
            if self.optimizer is not None and type(self.optimizer) is not AdamW:
                raise ValueError(
                    f"strategy=deepspeed shards the state of AdamW, and this optimizer is "
                    f"{type(self.optimizer).__name__}: set optim.optimizer=AdamW, or use strategy=fsdp2"
                )
            self._names = {parameter: name for name, parameter in self.module.named_parameters()}
            groups = self.optimizer.param_groups if self.optimizer is not None else ()
            self._groups = [[self._names[parameter] for parameter in group["params"]] for group in groups]
            self._start(settings)
        if kept is not None:
            self._set_masters(self._first_masters(kept))
        self._files = None
        # what DeepSpeed keeps in host memory anyway does not move between phases
        parts: list[Part] = []
        if has_own_memory(self.device):
            if config.param_offload and not (self._is_sliced and zero.offload_param):
                parts.append("weights")
            if config.optimizer_offload and self.optimizer is not None and not zero.offload_optimizer:
                parts.append("state")
        self._offload = ZeroOffload(
            self._library, parts, self.module, self._zero.optimizer, self.optimizer, self.device
        )
        self._prepare()

    # -- loading: rank 0 reads one weight after another, every rank takes its part -----------------------------------

    def _load(self, seed: int, train: bool) -> dict[str, Tensor] | None:
        """Build the module with its weights in their files; where that cannot be, on rank 0 with them, else without.

        Returns:
            Weights outside of the files as they came, where the module's will be rounded to the compute precision.
        """
        spec, is_source = self.spec, self.topology.rank == 0
        dtype = spec.param_torch_dtype if train else spec.compute_torch_dtype
        if (stored := self._stored_model(seed, dtype)) is not None:
            self.module, self._files = stored
        else:
            self.module = load_model(spec, seed, dtype) if is_source else empty_model(spec)
        if dtype == spec.compute_torch_dtype:
            return None
        return {n: p.detach() for n, p in self.module.named_parameters() if p.requires_grad and not p.is_meta}

    def _place(self, settings: Mapping[str, Any]) -> None:
        """Bring the module to the device, in the compute precision; with stage 3 in slices, a part at a time."""
        placed: dict[nn.Parameter, nn.Parameter] = {}
        whole: list[nn.Parameter] = []
        for place, owner in self.module.named_modules():
            for name, parameter in owner._parameters.items():
                if parameter is not None and parameter not in placed:
                    value = parameter.detach()
                    if self._is_stored(full_name := f"{place}.{name}" if place else name):
                        value = self._read(full_name, value) if self.topology.rank == 0 else value
                    value = self._from_source(value, self.spec.compute_torch_dtype)
                    placed[parameter] = nn.Parameter(value, parameter.requires_grad)
                    whole.append(placed[parameter])
                owner._parameters[name] = placed.get(parameter)
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    owner._buffers[name] = self._from_source(buffer, buffer.dtype)
            if sum(parameter.numel() for parameter in whole) > _MAX_WHOLE_NUMBERS:
                whole = self._sliced(whole, settings)
        self._sliced(whole, settings)

    def _is_stored(self, name: str) -> bool:
        return self._files is not None and name in self._files

    def _read(self, name: str, like: Tensor) -> Tensor:
        assert self._files is not None
        value = self._files.rows(name, 0, like.shape[0] if like.ndim else 1, self.spec.compute_torch_dtype)
        check_finite(self.spec, name, value)
        return value

    def _from_source(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Rank 0's ``tensor``, on the device of every rank."""
        if self.topology.rank == 0:
            tensor = tensor.to(self.device, dtype)
        else:
            tensor = torch.empty(tensor.shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, src=0)
        return tensor

    def _first_masters(self, kept: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        """Yield (name, value in fp32) of every trained weight: this rank's numbers from the files, or the whole."""
        for name, parameter in self.module.named_parameters():
            fragment = self._fragments.get(name)
            if not parameter.requires_grad:
                continue
            if not self._is_stored(name):
                shape = torch.empty(_shape(parameter), device="meta")
                yield name, self._from_source(kept.get(name, shape), torch.float32)
            elif fragment is not None:
                assert self._files is not None
                row = fragment.shape[1:].numel()
                first, last = fragment.start // row, -(-(fragment.start + fragment.count) // row)
                rows = self._files.rows(name, first, last, torch.float32).reshape(-1)
                flat = rows.narrow(0, fragment.start - first * row, fragment.count)
                yield name, flat_piece(flat, fragment.start, fragment.shape)

    def _sliced(self, parameters: list[nn.Parameter], settings: Mapping[str, Any]) -> list[nn.Parameter]:
        if not self._is_sliced:
            return parameters
        if parameters:
            self._library.zero.Init(module=nn.ParameterList(parameters), config_dict_or_path=dict(settings))
        return []

    # -- DeepSpeed's engine ---------------------------------------------------------------------------------------

    def _start(self, settings: Mapping[str, Any]) -> None:
        scorer = _Scorer(self.module)
        if self._is_sliced:
            layer = score_layer(self.module) if self.spec.head != "lm" else self.module.get_output_embeddings()
            for weight in () if layer is None else layer.parameters():
                self._library.zero.register_external_parameter(scorer, weight)
        self._zero, *_ = self._library.initialize(model=scorer, optimizer=self.optimizer, config=dict(settings))
        self.module.token_outputs = self._run
        trains = self.optimizer is not None
        self._fragments = find_fragments(self.module, self._zero.optimizer, self._is_sliced) if trains else {}

    def _run(self, *args: Any, **kwargs: Any) -> TokenScores:
        # by name, since DeepSpeed takes positional arguments apart in search of tensors
        return TokenScores(*self._zero(args=args, named=kwargs))

    def _run_backward(self, loss: Tensor, is_last: bool) -> None:
        self._zero.set_gradient_accumulation_boundary(is_last)
        self._zero.backward(loss, scale_wrt_gas=False)

    def _after_infer(self) -> None:
        if self._is_sliced:
            self._zero.empty_partition_cache()

    def optimizer_step(self) -> float:
        self._zero.step()  # leaves out a gradient that is not finite, and calls its norm inf
        return float(self._zero.get_global_grad_norm())

    # -- weights --------------------------------------------------------------------------------------------------

    def parameter_counts(self) -> tuple[int, int]:
        sizes = [(_shape(parameter).numel(), parameter.requires_grad) for parameter in self.module.parameters()]
        return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        with self.on_device() if "weights" in self._offload.offloaded else nullcontext():
            yield from self._full_tensors(dtype, leave_out)

    def _full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in one_ahead(self._slices(dtype, leave_out)):
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    def _slices(
        self, dtype: torch.dtype | None, leave_out: Collection[str]
    ) -> Iterator[tuple[str, Callable[[], Wait]]]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, tensor in self.module.state_dict().items():
            if name in parameters and name not in leave_out:
                yield name, partial(self._start_gathering, parameters[name], dtype)
            elif name not in leave_out:
                yield name, partial(_held, tensor)

    def _start_gathering(self, parameter: Any, dtype: torch.dtype | None = None) -> Wait:
        """Begin to gather a weight: the optimizer's fp32 copy, or the module's where it is equal."""
        shape = _shape(parameter)
        is_rounded = self.optimizer is not None and parameter.dtype != torch.float32
        if is_rounded and parameter.requires_grad and parameter.dtype != dtype:
            # the optimizer's fp32 copy, joined from the parts of all ranks
            whole = torch.zeros(shape.numel(), device=self.device)
            if (fragment := self._fragments.get(self._names[parameter])) is not None:
                whole[fragment.start : fragment.start + fragment.count] = fragment.view(fragment.flat.detach())
            wait = start_adding(whole)
        elif self._is_sliced:
            wait = start_gathering(parameter.ds_tensor.detach().to(self.device), parameter.ds_process_group)
        else:
            return parameter.detach
        return lambda: wait()[: shape.numel()].view(shape)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        return f"zero{self._stage} {self.spec.compute_torch_dtype}"

    def model_state(self) -> dict[str, Any]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        state: dict[str, Any] = {}
        for name, tensor in self._saved(self.module.state_dict()).items():
            parameter = parameters.get(name)
            if parameter is None:
                state[name] = tensor
            elif not parameter.requires_grad:
                state[name] = self._start_gathering(parameter)()
            elif (fragment := self._fragments.get(self._names[parameter])) is not None:
                state[name] = fragment.piece(fragment.flat)
            else:  # other ranks have all of it
                state[name] = {"flat": torch.empty(0), "start": 0, "shape": tuple(_shape(parameter))}
        return state

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Any]) -> None:
        own = self._saved(self.module.state_dict())
        check_names(own, state)
        for name, buffer in self.module.named_buffers():
            if name in own:
                buffer.copy_(state[name])
        for name, parameter in self.module.named_parameters():
            if name in own and not parameter.requires_grad:
                with self._library.zero.GatheredParameters([parameter], modifier_rank=0, enabled=self._is_sliced):
                    parameter.copy_(state[name])
        self._set_masters((name, state[name]) for name in self._fragments)

    @torch.no_grad()
    def _set_masters(self, values: Iterable[tuple[str, Any]]) -> None:
        """Set trained weights, whole or this rank's piece, and round the module's copy from them."""
        for name, value in values:
            fragment = self._fragments.get(name)
            if fragment is not None:
                fragment.view(fragment.flat.data).copy_(fragment.local_part(name, value))
        zero_optimizer = self._zero.optimizer
        if not self._is_sliced:
            zero_optimizer.update_lp_params()
            return
        self._zero.empty_partition_cache()
        for number in range(len(zero_optimizer.fp32_partitioned_groups_flat)):
            zero_optimizer._reassign_or_swap_out_partitioned_parameters(number)

    def optimizer_state(self) -> dict[str, Any]:
        return flat_optimizer_state(self.optimizer, self._fragments, self._groups)

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        load_flat_optimizer_state(self.optimizer, self._fragments, self._groups, state)

    # -- between host and device ----------------------------------------------------------------------------------

    def move(self, to_host: bool, *, model: bool, optimizer: bool) -> None:
        parts: dict[Part, bool] = {"weights": model, "state": optimizer}
        if to_host:
            self._after_infer()
        if self._offload.move(to_host, [part for part, is_meant in parts.items() if is_meant]) and to_host:
            empty_cache(self.device)


class _Scorer(nn.Module):
    """The model as DeepSpeed sees it: its forward pass is ``token_outputs``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *, args: tuple, named: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        return tuple(token_outputs(self.model, *args, **named))


def _shape(parameter: nn.Parameter) -> torch.Size:
    """Of the whole weight, which may be in slices."""
    return getattr(parameter, "ds_shape", parameter.shape)


def _held(tensor: Tensor) -> Wait:
    """A tensor that every rank has, as if it were gathered."""
    return lambda: tensor


def _section(config: Any) -> DeepSpeedConfig:
    """The section ``deepspeed``, of a mapping of its entries too; None: the defaults."""
    return typed_section({} if config is None else config, DeepSpeedConfig)
