"""Engine: one model on one mesh, scored and trained in micro-batches whose cut changes nothing.

Everything numerical that backends share is here. A backend says where the weights lie and how gradients meet.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from enum import Flag, auto
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.algorithms.losses import TokenOutputs
from verl.models.attention import use_short_attention
from verl.models.loader import ModelSpec, source_dtype
from verl.models.multimodal import (
    check_placeholders,
    image_token,
    is_vision_language,
    modality_tokens,
    smallest_image,
    vision_positions,
)
from verl.models.recompute import Recompute
from verl.models.token_outputs import Head, TokenScores, probe_head, value_layer
from verl.models.weight_names import checkpoint_tensors, tied_duplicates
from verl.protocol import DataProto
from verl.utils.checkpoint.random_state import random_state, set_random_state
from verl.utils.distributed import all_gather_objects, all_reduce_numbers
from verl.utils.micro_batching import WHOLE, MicroBatching
from verl.utils.seqlen_balancing import plan_micro_batches
from verl.workers.engine.micro_batch import Cut, MicroBatch, cut_batch, row_lengths, vision_rows
from verl.workers.engine.optim import build_optimizer, build_schedule, load_optimizer_state, optimizer_state

logger = logging.getLogger(__name__)

LossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
"""(outputs, columns of a micro-batch) -> (mean loss, metrics).

Has ``columns``, the names it reads; ``want_entropy``; ``weight(columns)``, what the mean divided by. May have
``extra_columns``, names it reads where the batch has them; ``scale(sum of weights)``, a factor from the mean over the
mini-batch to its loss; ``chooses_tokens`` with ``choose``, to single out tokens of the whole mini-batch.
"""


BEST_TOKENS = {"cpu": 1024}
"""Cells of a micro-batch beyond which a device gains nothing: on CPU activations then fall out of its caches."""


class Want(Flag):
    """What ``infer`` should return."""

    LOG_PROBS = auto()
    ENTROPY = auto()
    VALUES = auto()
    SUM_PI_SQUARED = auto()
    """Of each response token's distribution, the sum over the vocabulary of squared probabilities."""


_COLUMN_OF = {
    Want.LOG_PROBS: "log_probs",
    Want.ENTROPY: "entropy",
    Want.VALUES: "values",
    Want.SUM_PI_SQUARED: "sum_pi_squared",
}


class Topology(NamedTuple):
    """Where this process stands among those that hold the model."""

    rank: int = 0
    world_size: int = 1
    dp_rank: int = 0
    """Which share of a batch it gets."""
    dp_size: int = 1
    is_output_rank: bool = True
    """Whether its results count; False on ranks that repeat another's work."""
    dp_group: dist.ProcessGroup | None = None
    """None: all ranks."""


class Engine(ABC):
    """One model, perhaps sharded over ranks, that can score tokens and take gradient steps.

    All ranks of ``topology`` make every call together, each with its share of the rows; the numbers of rows may differ.

    Attributes:
        version: grows by one with every change of the weights.
    """

    topology: Topology
    module: nn.Module
    device: torch.device

    def __init__(self, spec: ModelSpec, grad_clip: float | None) -> None:
        self.spec = spec
        self.grad_clip = grad_clip
        self.version = 0
        self.optimizer: torch.optim.AdamW | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        self.head: Head | None = None

    @property
    def model_config(self) -> Any:
        """The model's Hugging Face config."""
        return self.module.config

    @property
    def source_dtype(self) -> torch.dtype | None:
        """The precision the model came in; None where its config does not say."""
        return source_dtype(self.spec)

    # -- what roles call ------------------------------------------------------------------------------------------

    def infer(self, data: DataProto, want: Want, split: MicroBatching = WHOLE, temperature: float = 1.0) -> DataProto:
        """Score every response token, without gradients.

        Args:
            data: ``input_ids``, ``attention_mask``, ``responses`` and, if they do not count from 0, ``position_ids``;
                ``multi_modal_inputs`` if rows have images.
            split: how to cut the rows; changes memory and time only.
            temperature: logits are divided by it, as they were when sampling.

        Returns:
            Packed response columns: ``log_probs`` and ``entropy`` of each token given those before it, or ``values``,
            the return expected before each; rows in the order given.

        Raises:
            ValueError: if this model's head cannot answer ``want``.
        """
        self._check_want(want)
        if self.module.training:
            self.module.eval()
        cut, own = self._cut(data, split, ())
        results: list[TokenScores] = []
        with torch.no_grad():
            for number, micro in enumerate(cut.micro_batches):
                scores = self._score(micro, temperature, Want.ENTROPY in want, Want.SUM_PI_SQUARED in want)
                if number < own:
                    results.append(scores)
        self._after_infer()
        columns = {}
        for name in (name for flag, name in _COLUMN_OF.items() if flag in want):
            columns[name] = cut.restore([getattr(scores, name) for scores in results])
        return DataProto.from_ragged(columns)

    def train_step(
        self, data: DataProto, loss: LossFn, split: MicroBatching = WHOLE, temperature: float = 1.0
    ) -> dict[str, float]:
        """Take one optimizer step on the loss over all rows of all ranks.

        The gradient is that of ``loss`` on all rows at once: each micro-batch counts by what its mean divided by.

        Returns:
            The loss's metrics, averaged in the same way; ``grad_norm`` before clipping; ``nonfinite_steps``, 1 where
            the gradient was not finite and the weights stayed as they were, else 0. Equal on all ranks.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: it can score, not train")
        if getattr(loss, "chooses_tokens", False):
            data = self._with_selected_tokens(data, loss, split, temperature)
        missing = [name for name in loss.columns if name not in data]
        if missing:
            raise ValueError(f"the loss reads column {missing[0]!r}, which the batch has not: it has {data.keys()}")
        if not self.module.training:
            self.module.train()
        cut, own = self._cut(data, split, (*loss.columns, *getattr(loss, "extra_columns", ())))
        weights = numbers([loss.weight(micro.columns) for micro in cut.micro_batches[:own]])
        [total] = self._reduce([sum(weights)], "sum")
        scale = loss.scale(total) if hasattr(loss, "scale") else 1.0
        shares = [weight / total if total else 0.0 for weight in weights] + [0.0] * (len(cut.micro_batches) - own)
        self._start_gradients()
        metrics = WeightedMeans()
        for number, (micro, share) in enumerate(zip(cut.micro_batches, shares, strict=True)):
            self._before_backward(is_last=number + 1 == len(shares))
            self._backward(micro, share, scale, loss, temperature, metrics)
        grad_norm = self.optimizer_step()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.version += 1
        else:
            logger.warning("gradient norm is %s: this optimizer step is skipped", grad_norm)
        return {
            **metrics.reduce(self.topology),
            "grad_norm": grad_norm,
            "nonfinite_steps": 0.0 if is_finite else 1.0,
        }

    def step_schedule(self) -> None:
        """Advance the learning-rate schedule: once per training step, however many optimizer steps that had."""
        self.schedule.step()

    def learning_rate(self) -> float:
        """The rate of the next optimizer step."""
        return float(self.schedule.get_last_lr()[0])

    def weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight whole, one at a time, under its checkpoint name; all ranks iterate together.

        Tied weights come once. A tensor may be the model's own memory: copy what should outlive the next step.

        Args:
            dtype: cast floating point weights to it.
        """
        if not self.has_adapter:
            yield from checkpoint_tensors(self.module, self.full_tensors(dtype, tied_duplicates(self.module)))
            return
        from verl.models.lora import merged

        # weights travel as they are kept, and are cast once the adapter is in
        named = merged(self.module, self.full_tensors(None, tied_duplicates(self.module)))
        yield from checkpoint_tensors(self.module, cast(named, dtype))

    # -- adapters -------------------------------------------------------------------------------------------------

    @property
    def has_adapter(self) -> bool:
        """Whether the model is frozen but for a low-rank adapter (and a value head)."""
        return self.spec.lora is not None

    def without_adapter(self) -> AbstractContextManager[None]:
        """Within the block the engine scores as the model below its adapter: as a reference, without a second copy."""
        if not self.has_adapter:
            raise RuntimeError("this engine trains all of its weights: there is no adapter to switch off")
        from verl.models.lora import adapter_off

        return adapter_off(self.module)

    def base_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """As ``weights``, of the model below its adapter."""
        from verl.models.lora import is_adapter, without_wrapper

        leave_out = tied_duplicates(self.module) | set(filter(is_adapter, self.module.state_dict()))
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
        """Write what is trained in peft's format; all ranks call it together.

        Args:
            is_writer: whether this rank writes.
        """
        from verl.models.lora import write_adapter

        named = list(self._trained_tensors(with_head=True))
        if is_writer:
            write_adapter(self.module, named, folder, self.spec.path)

    def trained_share(self) -> tuple[int, int]:
        """(numbers that are trained, numbers of the model), over all ranks."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def _trained_tensors(self, with_head: bool) -> Iterator[tuple[str, Tensor]]:
        from verl.models.lora import is_adapter

        wanted = {name for name in self.parameter_names() if with_head or is_adapter(name)}
        return self.full_tensors(None, self.module.state_dict().keys() - wanted)

    def _saved(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the module's tensors a checkpoint holds: all, or what is trained on top of ``model.path``."""
        if not self.has_adapter:
            return state
        trained = set(self.parameter_names())
        return {name: tensor for name, tensor in state.items() if name in trained}

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        """Bring the weights (with ``optimizer``, its state too) to the device; take them away after where configured.

        The only path of offload.
        """
        self.load(model=True, optimizer=optimizer)
        try:
            yield
        finally:
            self.offload(model=True, optimizer=optimizer)

    def state(self, parts: Collection[str] = ("model", "optimizer", "extra")) -> dict[str, Any]:
        """This rank's share of what a checkpoint holds.

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

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; parts that are not in it stay as they are."""
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

    # -- what a backend supplies ----------------------------------------------------------------------------------

    @abstractmethod
    def parameter_names(self) -> list[str]:
        """Names of the parameters the optimizer holds, in its order."""

    @abstractmethod
    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (module name, full tensor) of every parameter and persistent buffer."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step if the gradient is finite, drop the gradient; returns its norm before clipping."""

    @abstractmethod
    def model_state(self) -> dict[str, Tensor]:
        """This rank's parameters and persistent buffers by module name."""

    @abstractmethod
    def load_model_state(self, state: dict[str, Tensor]) -> None:
        """Take back what ``model_state`` gave."""

    @abstractmethod
    def load(self, *, model: bool, optimizer: bool) -> None:
        """Bring weights and optimizer state to the device, where offload is configured."""

    @abstractmethod
    def offload(self, *, model: bool, optimizer: bool) -> None:
        """Take weights and optimizer state off the device, where offload is configured."""

    def optimizer_state(self) -> dict[str, Any]:
        """This rank's share of the optimizer's state, by parameter name."""
        return optimizer_state(self.optimizer, self.parameter_names())

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Take back what ``optimizer_state`` gave, or whole tensors in its place."""
        load_optimizer_state(self.optimizer, self.parameter_names(), state)

    def _start_gradients(self) -> None:  # noqa: B027 - not every backend needs it
        """Called before the first backward pass of a step."""

    def _before_backward(self, is_last: bool) -> None:  # noqa: B027
        """Called before each micro-batch's forward and backward pass."""

    def _run_backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss`` to what the step has so far."""
        loss.backward()

    def _after_infer(self) -> None:  # noqa: B027
        """Called after the forward passes of ``infer``."""

    # -- shared by backends ---------------------------------------------------------------------------------------

    def _build_optimizer(self, parameters: list[Tensor], optim_config: Any | None, total_steps: int) -> None:
        if optim_config is not None:
            self.optimizer = build_optimizer(parameters, optim_config)
            self.schedule = build_schedule(self.optimizer, optim_config, total_steps)

    def _prepare(self) -> None:
        """Fit the module to its device, and find out how its outputs are read."""
        if self.device.type == "cpu":
            use_short_attention(self.module)
        self._recompute = Recompute(self.module, always=self.device.type != "cpu")
        compiled = self.spec.use_torch_compile and self.device.type == "cuda"
        if self.spec.use_torch_compile and not compiled:
            logger.debug("use_torch_compile has no effect on %s: plain torch is used", self.device.type)
        if self.spec.head == "value":
            value_layer(self.module)
            self.head = Head("value")
        else:
            self.head = replace(
                probe_head(self.module, self.device, compiled), never=modality_tokens(self.model_config)
            )

    def _check_want(self, want: Want) -> None:
        able = Want.VALUES if self.spec.head == "value" else Want.LOG_PROBS | Want.ENTROPY | Want.SUM_PI_SQUARED
        if want & ~able or not want:
            raise ValueError(f"a model with head={self.spec.head!r} gives {able}, not {want}")

    def _cut(self, data: DataProto, split: MicroBatching, reads: Collection[str]) -> tuple[Cut, int]:
        """Cut the rows, with as many micro-batches on every rank; returns the number that are this rank's own.

        A rank whose rows do not suffice repeats its last micro-batch, whose results then count for nothing: sharded
        weights are gathered by all ranks together.
        """
        lengths, best = row_lengths(data), BEST_TOKENS.get(self.device.type)
        groups = plan_micro_batches(lengths, split, best_tokens=best)
        agreed, with_images = map(int, self._reduce([len(groups), self._has_images(data)], "max"))
        if agreed > len(groups):
            groups = plan_micro_batches(lengths, split, agreed, best)
        cut = cut_batch(data, groups, reads, self.device)
        if with_images and self.topology.world_size > 1:
            self._show_an_image_to_all(cut)
        cut.micro_batches.extend(cut.micro_batches[-1:] * (agreed - len(groups)))
        return cut, len(groups)

    def _has_images(self, data: DataProto) -> bool:
        """Whether some row has images; for a model that sees, also checks that each row's are those it speaks of."""
        rows = vision_rows(data)
        if is_vision_language(self.model_config):
            check_placeholders(self.model_config, data.ragged("input_ids").rows(), rows)
        elif any(rows):
            raise ValueError(f"the batch has images, and {type(self.module).__name__} is a model of text only")
        return any(rows)

    def _show_an_image_to_all(self, cut: Cut) -> None:
        """Give micro-batches without images a dummy: all ranks gather the vision tower's weights together."""
        for number, micro in enumerate(cut.micro_batches):
            if not micro.vision_inputs:
                config = self.model_config
                cut.micro_batches[number] = micro.with_dummy_row(image_token(config), smallest_image(config))

    def _with_selected_tokens(
        self, data: DataProto, loss: LossFn, split: MicroBatching, temperature: float
    ) -> DataProto:
        """Let ``loss`` choose among the tokens of all ranks, by one more forward pass; adds ``selected_tokens``."""
        log_probs = self.infer(data, Want.LOG_PROBS, split, temperature).ragged("log_probs")
        columns = [data.ragged("old_log_probs").values, log_probs.values, data.ragged("advantages").values]
        is_own = data.ragged("response_mask").values.bool()
        mine = torch.stack([column[is_own].cpu().float() for column in columns])
        ranks = [mine]
        if self.topology.dp_size > 1:
            ranks = [torch.from_numpy(part) for part in all_gather_objects(mine.numpy(), self.topology.dp_group)]
        selected = loss.choose(*torch.cat(ranks, dim=1)).split([part.shape[1] for part in ranks])
        column = torch.zeros(len(is_own))
        column[is_own.cpu()] = selected[self.topology.dp_rank if self.topology.dp_size > 1 else 0].float()
        data = data.select(deepcopy=False)
        data.put("selected_tokens", log_probs.like(column))
        return data

    def _score(
        self, micro: MicroBatch, temperature: float, want_entropy: bool, want_squares: bool = False
    ) -> TokenScores:
        positions = micro.position_ids
        if micro.vision_inputs:
            seen, _ = vision_positions(self.module, micro.input_ids, micro.vision_inputs)
            positions = positions if seen is None else seen
        return self.module.token_outputs(
            micro.input_ids,
            positions,
            micro.cells,
            micro.targets,
            self.head,
            temperature,
            want_entropy,
            want_squares,
            micro.vision_inputs,
        )

    def _backward(
        self, micro: MicroBatch, share: float, scale: float, loss: LossFn, temperature: float, metrics: WeightedMeans
    ) -> None:
        self._recompute.choose(micro.input_ids.numel())
        scores = self._score(micro, temperature, getattr(loss, "want_entropy", False))
        if share == 0.0:
            # a repeat, or nothing but masked tokens: other ranks wait in backward, so run it, on nothing
            self._run_backward(sum(part.sum() for part in scores if part is not None).mul(0.0))
            return
        outputs = TokenOutputs(*(micro.tight(part) for part in (scores.log_probs, scores.entropy, scores.values)))
        value, found = loss(outputs, micro.columns)
        # ranks' gradients are averaged, so each multiplies by their number to have them summed
        self._run_backward(value * (share * scale * self.topology.dp_size))
        metrics.add(found, share)

    def _reduce(self, values: list[float], op: str) -> list[float]:
        if self.topology.dp_size == 1:
            return values
        return all_reduce_numbers(values, op, self.topology.dp_group, self.device)


def cast(named: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Bring floating tensors to ``dtype``; None leaves them."""
    for name, tensor in named:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


class WeightedMeans:
    """Means over micro-batches and ranks, fetched from the device once, after the step."""

    def __init__(self) -> None:
        self._parts: list[tuple[float, dict[str, Any]]] = []

    def add(self, metrics: dict[str, Any], share: float) -> None:
        """Count ``metrics`` with weight ``share``."""
        kept = {name: value.detach() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._parts.append((share, kept))

    def reduce(self, topology: Topology) -> dict[str, float]:
        """The means over all ranks; a rank of nothing but masked tokens brings no names and no weight."""
        fetched = iter(numbers([value for _, kept in self._parts for value in kept.values()]))
        parts = [(share, {name: next(fetched) for name in kept}) for share, kept in self._parts]
        if topology.dp_size > 1:
            parts = [part for rank in all_gather_objects(parts, topology.dp_group) for part in rank]
        sums: dict[str, float] = {}
        shares: dict[str, float] = {}
        for share, metrics in parts:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + share * value
                shares[name] = shares.get(name, 0.0) + share
        return {name: sums[name] / shares[name] for name in sums}


def numbers(values: list[Any]) -> list[float]:
    """Python floats of numbers and scalar tensors; those on a device are fetched together, since each wait costs."""
    away = [isinstance(value, Tensor) and value.device.type != "cpu" for value in values]
    scalars = [value.detach().double().reshape(()) for value, is_away in zip(values, away, strict=True) if is_away]
    fetched = iter(torch.stack(scalars).tolist() if scalars else ())
    return [next(fetched) if is_away else float(value) for value, is_away in zip(values, away, strict=True)]
