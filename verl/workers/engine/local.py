"""The engine of one process: a plain module, no sharding. The laptop's engine, and the oracle of the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from verl.models.loader import ModelSpec, load_model
from verl.models.token_outputs import attach_token_outputs
from verl.utils.device import current_device, empty_cache
from verl.utils.distributed import get_world_size
from verl.utils.offload import move_optimizer_state, wants_offload
from verl.workers.engine.base import Engine, Topology
from verl.workers.engine.optim import clip_gradients


class LocalEngine(Engine):
    """All weights in one process.

    Where the model computes in another precision than it is kept in, the module holds the compute copy, made anew after
    each step, and the optimizer the master weights: no cast in any forward pass, and gradients of micro-batches are
    summed in the master's precision.
    """

    def __init__(
        self,
        spec: ModelSpec,
        engine_config: Any = None,
        optim_config: Any = None,
        *,
        total_steps: int = -1,
        grad_clip: float | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__(spec, grad_clip)
        self.topology = self._place()
        self.device = current_device(device)
        self._offload_params = wants_offload(engine_config, "param_offload", self.device)
        self._offload_optimizer = wants_offload(engine_config, "optimizer_offload", self.device)
        train = optim_config is not None
        self.module = load_model(spec, seed, dtype=None if train else spec.computed_in).to(self.device)
        attach_token_outputs(self.module)
        self._masters: dict[torch.nn.Parameter, Tensor] = {}
        self._stale: set[torch.nn.Parameter] = set()
        if train and spec.computed_in != spec.kept_in:
            self._split_masters(spec.computed_in)
        self._prepare()
        trained = [self._masters.get(p, p) for p in self.module.parameters()]
        self._build_optimizer(trained, optim_config, total_steps)
        self.offload(model=True, optimizer=True)

    def _place(self) -> Topology:
        if get_world_size() > 1:
            raise ValueError(
                f"strategy=local is for one process, and {get_world_size()} were started: use strategy=fsdp2, or "
                "trainer.n_gpus_per_node=1 and trainer.nnodes=1"
            )
        return Topology()

    # -- precision ------------------------------------------------------------------------------------------------

    def _split_masters(self, dtype: torch.dtype) -> None:
        for parameter in self.module.parameters():
            master = parameter.detach()
            parameter.data = master.to(dtype)
            if parameter.requires_grad:
                self._masters[parameter] = master.requires_grad_()
                master.grad = None
                parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: torch.nn.Parameter) -> None:
        """Add a finished gradient to the master's and free it, while it is still in the cache."""
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        elif parameter in self._stale:
            master.grad.copy_(parameter.grad)
        else:
            master.grad.add_(parameter.grad)
        self._stale.discard(parameter)
        parameter.grad = None

    def _start_gradients(self) -> None:
        # memory of the last step's gradients is written over rather than allocated anew
        self._stale = {parameter for parameter, master in self._masters.items() if master.grad is not None}

    # -- what the base asks for -----------------------------------------------------------------------------------

    def parameter_names(self) -> list[str]:
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _finish_gradients(self) -> None:
        """Called after the last backward pass of a step."""
        for parameter in self._stale:
            self._masters[parameter].grad.zero_()

    def optimizer_step(self) -> float:
        self._finish_gradients()
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = clip_gradients(trained, self.grad_clip)
        if math.isfinite(norm):
            self.optimizer.step()
            self._refresh()
        # host memory is cheap and slow to get: the gradients of masters stay allocated there
        if not self._masters or self.device.type != "cpu":
            self.optimizer.zero_grad()
        return norm

    @torch.no_grad()
    def _refresh(self) -> None:
        if self._masters:
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))

    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, tensor in self.module.state_dict().items():
            if name in leave_out:
                continue
            if tensor.is_floating_point() and tensor.dtype != dtype:
                tensor = self._masters.get(parameters.get(name), tensor).detach()
                tensor = tensor if dtype is None else tensor.to(dtype)
            yield name, tensor

    def model_state(self) -> dict[str, Tensor]:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        return {
            name: self._masters.get(parameters.get(name), tensor).detach()
            for name, tensor in self._saved(self.module.state_dict()).items()
        }

    @torch.no_grad()
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        own = self.model_state()
        if own.keys() != state.keys():
            odd = sorted(own.keys() ^ state.keys())
            raise ValueError(f"the saved weights differ from this model in {len(odd)} names, first {odd[0]!r}")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._refresh()

    def load(self, *, model: bool, optimizer: bool) -> None:
        if model and self._offload_params:
            self._move(self.device, masters=optimizer)
        if optimizer and self._offload_optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, self.device)

    def offload(self, *, model: bool, optimizer: bool) -> None:
        if model and self._offload_params:
            self._move(torch.device("cpu"), masters=optimizer)
        if optimizer and self._offload_optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, torch.device("cpu"))
        if self._offload_params or self._offload_optimizer:
            empty_cache(self.device)

    def _move(self, device: torch.device, masters: bool) -> None:
        """Move the module, and for an optimizer step the master weights too."""
        self.module.to(device)
        for master in self._masters.values() if masters else ():
            master.grad = None
            master.data = master.data.to(device)
