"""Weights, adapter and checkpoint state of an engine, as rollout engines, references and checkpoints read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from verl.checkpoint.checkpoint_manager import random_state, set_random_state
from verl.checkpoint.shards import FromRankZero
from verl.models.loader import check_finite, load_model, stored_model
from verl.models.weight_names import checkpoint_tensors, plain_name, tied_duplicates
from verl.telemetry.memory import optimizer_tensors
from verl.utils.distributed import all_gather_objects, raised_together
from verl.workers.engine.optim import load_optimizer_state, optimizer_state

if TYPE_CHECKING:
    import torch

    from verl.models.loader import ModelSpec
    from verl.models.weight_files import WeightFiles
    from verl.utils.distributed import Topology


class EngineState(ABC):
    """The part of ``Engine`` that exports weights and saves and restores its state."""

    module: Any
    """transformers' model, or a wrapper that forwards its attributes."""
    spec: ModelSpec
    device: torch.device
    topology: Topology
    optimizer: torch.optim.Optimizer | None
    schedule: torch.optim.lr_scheduler.LambdaLR | None
    version: int

    # -- supplied by backends ---------------------------------------------------------------------------------------

    @abstractmethod
    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (module name, full tensor) of every parameter and persistent buffer."""

    @abstractmethod
    def model_state(self) -> dict[str, Any]:
        """This rank's parameters and persistent buffers by module name."""

    @abstractmethod
    def load_model_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``model_state``, or whole tensors under the same names."""

    @abstractmethod
    def on_device(self, optimizer: bool = False) -> AbstractContextManager[None]:
        """Bring the weights (with ``optimizer``, its state too) to the device within the block."""

    def parameter_names(self) -> list[str]:
        """Names of the parameters the optimizer holds, in its order."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def tensors_in_memory(self) -> dict[str, Iterable[Tensor]]:
        """Tensors of this rank by what they are for: ``weights``, ``optimizer``."""
        return {"weights": self.module.parameters(), "optimizer": optimizer_tensors(self.optimizer)}

    def tensor_names(self) -> list[str]:
        """Names of the module's parameters and persistent buffers."""
        return list(self.module.state_dict())

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's part of the optimizer's state, by parameter name."""
        return optimizer_state(self.optimizer, self.parameter_names())

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of ``optimizer_state``, or whole tensors in its place."""
        load_optimizer_state(self.optimizer, self.parameter_names(), state)

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, the outputs of the last layer."""
        return self.module.get_output_embeddings().out_features

    def head_weight(self) -> Tensor:
        """The last layer's weight, (V, H) whole, in the compute precision; all ranks call it together."""
        weight = self.module.get_output_embeddings().weight
        named = self.module.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if parameter is weight}
        names |= set(map(plain_name, names))
        others = set(self.tensor_names()) - names
        # all of them, though one is needed: the other ranks iterate to the end
        tensors = [tensor for _, tensor in self.full_tensors(self.spec.compute_torch_dtype, others)]
        return tensors[0]

    @property
    def own_rows(self) -> Mapping[str, tuple[int, int]]:
        """Checkpoint name -> (first row, number of rows) that this rank keeps of it, where ``weights`` can leave it
        sharded.
        """
        return {}

    def weights(self, dtype: torch.dtype | None = None, sharded: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, one at a time, under its checkpoint name; all ranks iterate together.

        Tied weights come once. A tensor may be the model's own memory: copy what should outlive the next step.

        Args:
            dtype: cast floating point weights to it.
            sharded: names in ``own_rows`` of which each rank gets its own rows only; equal on all ranks.
        """
        if not self.has_adapter:
            named = self.full_tensors(dtype, tied_duplicates(self.module), *([sharded] if sharded else []))
            yield from checkpoint_tensors(self.module, named)
            return
        from verl.models.lora import merge_adapter

        # merged in the precision of the weights, then cast
        named = merge_adapter(self.module, self.full_tensors(None, tied_duplicates(self.module)))
        yield from checkpoint_tensors(self.module, cast(named, dtype))

    def weights_to_sync(self, dtype: torch.dtype, sharded: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """As ``weights`` for who casts them: cast here where that spares something."""
        return self.weights(dtype, sharded)

    # -- adapters -------------------------------------------------------------------------------------------------

    @property
    def has_adapter(self) -> bool:
        """Whether only a low-rank adapter (and a value head) is trained."""
        return self.spec.lora is not None

    def without_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter within the block: the engine scores as the base model, without a second copy."""
        if not self.has_adapter:
            raise RuntimeError("this engine trains all of its weights: there is no adapter to switch off")
        from verl.models.lora import adapter_off

        return adapter_off(self.module)

    def base_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """``weights`` of the base model, without its adapter."""
        from verl.models.lora import is_adapter, without_wrapper

        leave_out = tied_duplicates(self.module) | set(filter(is_adapter, self.tensor_names()))
        named = ((without_wrapper(name), tensor) for name, tensor in self.full_tensors(dtype, leave_out))
        yield from checkpoint_tensors(self.module, named)

    def adapter_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield A and alpha / r times B of every adapted layer P, whole, as ``P.lora_A.weight``, ``P.lora_B.weight``.

        P is its checkpoint name. All ranks iterate together; nothing else is gathered.
        """
        from verl.models.lora import scaled_adapter

        named = scaled_adapter(self.module, self._trained_tensors(with_head=False))
        yield from checkpoint_tensors(self.module, cast(named, dtype))

    def save_adapter(self, folder: Path, is_writer: bool) -> None:
        """Write the trained tensors in peft's format; all ranks call it together.

        Args:
            is_writer: whether this rank writes.
        """
        from verl.models.lora import write_adapter

        named = list(self._trained_tensors(with_head=True))
        if is_writer:
            write_adapter(self.module, named, folder, self.spec.path)

    def parameter_counts(self) -> tuple[int, int]:
        """Return (trained parameters, all parameters), over all ranks."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def _trained_tensors(self, with_head: bool) -> Iterator[tuple[str, Tensor]]:
        from verl.models.lora import is_adapter

        names = {name for name in self.parameter_names() if with_head or is_adapter(name)}
        return self.full_tensors(None, set(self.tensor_names()) - names)

    def _saved(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of a checkpoint: all, or with an adapter only the trained ones."""
        if not self.has_adapter:
            return state
        trained = set(self.parameter_names())
        return {name: tensor for name, tensor in state.items() if name in trained}

    def state(self, parts: Collection[str] = ("model", "optimizer", "extra")) -> dict[str, Any]:
        """Return this rank's part of a checkpoint.

        Args:
            parts: of ``model``, ``optimizer`` and ``extra``: schedule, random generators, version.
        """
        state: dict[str, Any] = {}
        if "model" in parts:
            state["model"] = self.model_state()
        if "optimizer" in parts and self.optimizer is not None:
            state["optimizer"] = self.optimizer_state()
        if "extra" in parts:
            state["extra"] = {
                "lr_scheduler": None if self.schedule is None else self.schedule.state_dict(),
                "rng": random_state(self.device),
                "version": self.version,
            }
        return state

    @property
    def layout(self) -> str | None:
        """Sharding of ``state`` over ranks: with equal layout and number of ranks, each reads its own file.

        None: every tensor is joined from all ranks' files.
        """
        return None

    @property
    def own_format(self) -> str | None:
        """Name of the folder of a checkpoint to which all ranks write model and optimizer together, in a format of the
        backend's; None: each writes its ``state`` to files of its own."""
        return None

    def write_own_format(self, folder: Path, parts: Collection[str]) -> None:
        """Write ``parts`` of ``model`` and ``optimizer`` in the backend's format; all ranks call it together."""
        raise NotImplementedError

    def read_own_format(self, folder: Path, parts: Collection[str]) -> None:
        """Read what ``write_own_format`` wrote, by any number of ranks; all ranks call it together."""
        raise NotImplementedError

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore ``state``; parts that are not in it stay as they are.

        A tensor of the model or the optimizer may be this rank's piece, as ``state()`` gave it, or the whole.
        """
        # on the device, because an optimizer takes its state to where its parameters are
        with self.on_device(optimizer=True):
            if "model" in state:
                self.load_model_state(state["model"])
            if "optimizer" in state and self.optimizer is not None:
                self.load_optimizer_state(state["optimizer"])
        if "extra" in state:
            extra = state["extra"]
            if self.schedule is not None and extra.get("lr_scheduler"):
                self.schedule.load_state_dict(extra["lr_scheduler"])
            set_random_state(extra["rng"], self.device)
        # never a version that was already given out: a rollout engine takes equal versions for equal weights
        saved = state.get("extra", {}).get("version", 0)
        self.version = saved if saved > self.version else self.version + 1

    def pretrained_state(self, folder: Path) -> Mapping[str, Tensor]:
        """Read the weights of a Hugging Face folder for ``load_state``; all ranks call it together.

        Rank 0 reads the folder, in ``param_dtype``: a weight when it is asked for, or the whole model where
        `stored_model` has none.
        """
        if self.topology.rank != 0:
            return FromRankZero(None)
        spec = replace(self.spec, path=str(folder), load=True, lora=None)
        if (stored := stored_model(spec)) is None:
            return FromRankZero(load_model(spec).state_dict())
        module, files = stored

        def read(name: str, like: Tensor) -> Tensor:
            weight = files.rows(name, 0, like.shape[0] if like.ndim else 1, like.dtype)
            check_finite(spec, name, weight)
            return weight

        return FromRankZero(module.state_dict(), read)

    def _stored_model(self, seed: int, dtype: torch.dtype) -> tuple[Any, WeightFiles] | None:
        """The model with its weights left in their files; None unless every rank has the files."""
        with raised_together():
            stored = stored_model(self.spec, seed, dtype)
        if not all(all_gather_objects(stored is not None)):
            return None
        assert stored is not None
        for tensor in chain(stored[0].parameters(), stored[0].buffers()) if self.topology.world_size > 1 else ():
            if not tensor.is_meta:
                # another kind of processor may have made other numbers of the same seed
                sent = tensor.detach().to(self.device)
                dist.broadcast(sent, src=0)
                tensor.data.copy_(sent)
        return stored


def cast(named: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Cast floating point tensors to ``dtype``; None leaves them."""
    for name, tensor in named:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
