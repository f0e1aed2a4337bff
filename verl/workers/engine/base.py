"""Engine: one model on one mesh, scored and trained in micro-batches whose cut changes nothing.

Everything numerical that backends share is here. A backend says where the weights lie and how gradients meet.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Flag, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.algorithms.losses import TokenOutputs, nonfinite_columns
from verl.batch.balancing import plan_micro_batches
from verl.batch.micro_batching import WHOLE, MicroBatching
from verl.batch.ragged import Ragged
from verl.checkpoint.random_state import random_state, set_random_state
from verl.checkpoint.shards import FromRankZero
from verl.models.activation_memory import ActivationOffload, Recompute
from verl.models.attention.packed import check_packable, use_packed_attention
from verl.models.attention.short_sequence import use_short_sequence_attention
from verl.models.attention.varlen_kernels import AttentionOptions
from verl.models.loader import ModelSpec, load_model, source_dtype
from verl.models.multimodal import (
    VISION_INPUTS,
    check_placeholders,
    dummy_vision_inputs,
    has_images_and_videos,
    image_token,
    is_vision_language,
    modality_tokens,
    vision_positions,
)
from verl.models.scalar_head import check_score_head, score_layer
from verl.models.token_outputs import OutputHead, ReferenceStates, TokenScores, detect_output_head
from verl.models.weight_names import checkpoint_tensors, plain_name, tied_duplicates
from verl.protocol import DataProto
from verl.utils.distributed import all_gather_objects, all_reduce_numbers
from verl.workers.engine import model_check
from verl.workers.engine.means import WeightedMeans, numbers
from verl.workers.engine.micro_batch import (
    MicroBatch,
    MicroBatches,
    find_shared_prompts,
    row_lengths,
    split_batch,
    vision_rows,
)
from verl.workers.engine.optim import (
    build_optimizer,
    build_schedule,
    load_optimizer_state,
    optimizer_state,
    warn_of_endless_warmup,
)
from verl.workers.engine.reference import Reference
from verl.workers.engine.topology import Topology

logger = logging.getLogger(__name__)

LossFn = Callable[..., tuple[Tensor, dict[str, Any]]]
"""(outputs, columns of a micro-batch) -> (mean loss, metrics).

Has ``columns``, the names it reads; ``want_entropy``; ``weight(columns)``, what the mean divided by. May have
``extra_columns``, names it reads where the batch has them; ``scale(sum of weights)``, a factor from the mean over the
mini-batch to its loss; ``averaged_as_loss``, the metrics that are means by ``weight`` (all, if it has no such
attribute): the others are means over tokens; ``chooses_tokens`` with ``choose``, to single out tokens of the whole
mini-batch;
``response_facts`` with ``weigh``, to weigh the responses of the whole mini-batch; ``want_full_kl``, to be told the KL
to a ``Reference`` over the whole vocabulary.
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
        self.l2_coef = 0.0
        self.version = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        self.head: OutputHead | None = None
        self._there = {"model": False, "optimizer": False}
        self._inferring: list[nn.Module] = []
        self._rows_alone = False

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
            the return expected before each (of a reward model: the score of the text up to and with each); rows in the
            order given.

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
        return self._restored(cut, results, want)

    @staticmethod
    def _restored(cut: MicroBatches, results: list[TokenScores], want: Want) -> DataProto:
        """What was found of each micro-batch, as columns in the order of the batch."""
        names = [name for flag, name in _COLUMN_OF.items() if flag in want]
        return DataProto.from_ragged({name: cut.restore([getattr(s, name) for s in results]) for name in names})

    def train_step(
        self,
        data: DataProto,
        loss: LossFn,
        split: MicroBatching = WHOLE,
        temperature: float = 1.0,
        reference: Reference | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on the loss over all rows of all ranks.

        The gradient is that of ``loss`` on all rows at once: each micro-batch counts by what its mean divided by.

        Args:
            reference: what a loss with ``want_full_kl`` compares with; one more forward pass of each micro-batch.

        Returns:
            The loss's metrics, averaged in the same way; ``grad_norm`` before clipping; ``nonfinite_steps``, 1 where
            the gradient was not finite and the weights stayed as they were, else 0; where prompts are shared
            ``prefix_tokens_saved``, the share of the rows' tokens that did not run. Equal on all ranks.
        """
        return self.train_and_score(data, loss, Want(0), split, temperature, reference)[0]

    def train_and_score(
        self,
        data: DataProto,
        loss: LossFn,
        want: Want,
        split: MicroBatching = WHOLE,
        temperature: float = 1.0,
        reference: Reference | None = None,
    ) -> tuple[dict[str, float], DataProto]:
        """As ``train_step``, and what ``infer`` would have said before it, from the step's own forward passes.

        Args:
            want: of ``LOG_PROBS`` and ``ENTROPY``; none: the second result has no rows.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: it can score, not train")
        if getattr(loss, "want_full_kl", False) != (reference is not None):
            raise RuntimeError("a loss with want_full_kl needs a reference, and no other loss reads one")
        if getattr(loss, "chooses_tokens", False):
            data = self._with_selected_tokens(data, loss, split, temperature)
        if getattr(loss, "response_facts", ()):
            data = self._with_response_weights(data, loss)
        missing = [name for name in loss.columns if name not in data]
        if missing:
            raise ValueError(f"the loss reads column {missing[0]!r}, which the batch has not: it has {data.keys()}")
        if not self.module.training:
            model_check.train_mode(self.module, self._inferring)
        cut, own = self._cut(data, split, (*loss.columns, *getattr(loss, "extra_columns", ())))
        own_columns = [micro.columns for micro in cut.micro_batches[:own]]
        counted = own_columns if hasattr(loss, "averaged_as_loss") else []
        found = numbers([loss.weight(columns) for columns in own_columns] + [c["response_mask"].sum() for c in counted])
        weights, tokens = found[:own], found[own:]
        packings = [micro.packing for micro in cut.micro_batches[:own] if micro.packing]
        counts = [sum(weights), sum(p.tokens_saved for p in packings), sum(p.tokens for p in packings)]
        total, saved, run = self._reduce(counts, "sum")
        scale = loss.scale(total) if hasattr(loss, "scale") else 1.0
        idle = [0.0] * (len(cut.micro_batches) - own)
        shares = [weight / total if total else 0.0 for weight in weights] + idle
        tokens = [*(tokens or shares[:own]), *idle]
        self._start_gradients()
        metrics, results = WeightedMeans(), []
        for number, (micro, *counts) in enumerate(zip(cut.micro_batches, shares, tokens, strict=True)):
            self._before_backward(is_last=number + 1 == len(shares))
            want_entropy = Want.ENTROPY in want or getattr(loss, "want_entropy", False)
            scores = self._backward(micro, *counts, scale, loss, temperature, metrics, want_entropy, reference)
            results += [scores] if want else []
        if reference is not None:
            reference.engine._after_infer()
        grad_norm = self.optimizer_step()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.version += 1
        else:
            why = nonfinite_columns(data, loss.columns)
            logger.warning("gradient norm is %s (%s): this optimizer step is skipped", grad_norm, why)
        reduced = metrics.reduce(self.topology)
        numbers_of_step = {**reduced, "grad_norm": grad_norm, "nonfinite_steps": 0.0 if is_finite else 1.0}
        if self.spec.share_prompts:
            numbers_of_step["prefix_tokens_saved"] = saved / (saved + run)
        return numbers_of_step, self._restored(cut, results[:own], want)

    def states(self, micro: MicroBatch) -> Tensor:
        """What the last layer reads at the cells of ``micro`` that this rank runs, (t', H); without gradients."""
        trains = self.module.training
        self.module.eval()
        with torch.no_grad():
            hidden = self._score(micro, 1.0, False, want_states=True).states
        if trains:
            model_check.train_mode(self.module, self._inferring)
        return hidden

    @property
    def vocab_size(self) -> int:
        """How many tokens the last layer tells apart."""
        return self.module.get_output_embeddings().out_features

    def head_weight(self) -> Tensor:
        """The last layer's weight, (V, H) whole, in the compute precision; all ranks call it together."""
        weight = self.module.get_output_embeddings().weight
        named = self.module.named_parameters(remove_duplicate=False)
        names = {name for name, parameter in named if parameter is weight}
        names |= set(map(plain_name, names))
        found = [
            tensor for _, tensor in self.full_tensors(self.spec.compute_torch_dtype, set(self.tensor_names()) - names)
        ]
        return found[0]

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
        from verl.models.lora import merge_adapter

        # weights travel as they are kept, and are cast once the adapter is in
        named = merge_adapter(self.module, self.full_tensors(None, tied_duplicates(self.module)))
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
        """Write what is trained in peft's format; all ranks call it together.

        Args:
            is_writer: whether this rank writes.
        """
        from verl.models.lora import write_adapter

        named = list(self._trained_tensors(with_head=True))
        if is_writer:
            write_adapter(self.module, named, folder, self.spec.path)

    def parameter_counts(self) -> tuple[int, int]:
        """(numbers that are trained, numbers of the model), over all ranks."""
        parameters = list(self.module.parameters())
        return sum(p.numel() for p in parameters if p.requires_grad), sum(p.numel() for p in parameters)

    def _trained_tensors(self, with_head: bool) -> Iterator[tuple[str, Tensor]]:
        from verl.models.lora import is_adapter

        wanted = {name for name in self.parameter_names() if with_head or is_adapter(name)}
        return self.full_tensors(None, set(self.tensor_names()) - wanted)

    def _saved(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What of the module's tensors a checkpoint holds: all, or what is trained on top of ``model.path``."""
        if not self.has_adapter:
            return state
        trained = set(self.parameter_names())
        return {name: tensor for name, tensor in state.items() if name in trained}

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        """Bring the weights (with ``optimizer``, its state too) to the device; take them away after where configured.

        The only path of offload. Blocks may nest: what an outer one brought stays until its end.
        """
        brought = {"model": not self._there["model"], "optimizer": optimizer and not self._there["optimizer"]}
        if any(brought.values()):
            self.load(**brought)
        self._there.update({part: True for part, is_new in brought.items() if is_new})
        try:
            yield
        finally:
            self._there.update({part: False for part, is_new in brought.items() if is_new})
            if any(brought.values()):
                self.offload(**brought)

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

    @property
    def layout(self) -> str | None:
        """How ``state`` is cut over ranks: where layout and number of ranks are equal, each reads its own file.

        None: it cannot be said in a line, and every tensor is put together from all ranks' files.
        """
        return None

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from ``state``; parts that are not in it stay as they are.

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
        """The weights in a Hugging Face folder of this model as ``load_state`` takes them; all ranks call it together.

        Rank 0 reads the folder, in the precision weights are kept in.
        """
        module = None
        if self.topology.rank == 0:
            module = load_model(replace(self.spec, path=str(folder), load=True, lora=None))
        return FromRankZero(None if module is None else module.state_dict())

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
    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what ``model_state`` gave, or whole tensors under the same names."""

    @abstractmethod
    def load(self, *, model: bool, optimizer: bool) -> None:
        """Bring weights and optimizer state to the device, where offload is configured."""

    @abstractmethod
    def offload(self, *, model: bool, optimizer: bool) -> None:
        """Take weights and optimizer state off the device, where offload is configured."""

    def tensor_names(self) -> list[str]:
        """Names of the module's parameters and persistent buffers."""
        return list(self.module.state_dict())

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
            if self.topology.rank == 0:
                warn_of_endless_warmup(optim_config, total_steps)

    def _prepare(self, trains: bool) -> None:
        """Fit the module to its device, find out how its outputs are read, and try it.

        Args:
            trains: whether it will take gradient steps.
        """
        if self.spec.remove_padding:
            check_packable(self.module, self.topology.sp_size)
        if self.device.type == "cpu":
            use_short_sequence_attention(self.module)
        self._recompute = Recompute(self.module, always=self.device.type != "cpu")
        compiled = self.spec.use_torch_compile and self.device.type == "cuda"
        if self.spec.use_torch_compile and not compiled:
            logger.debug("use_torch_compile has no effect on %s: plain torch is used", self.device.type)
        if self.spec.head != "lm":
            score_layer(self.module)
            self.head = OutputHead("value")
            check_score_head(self.module, self.device, self.head)
        else:
            with model_check.runs_here(self.module):
                head = detect_output_head(self.module, self.device, compiled)
            triton, never = self.spec.head_backend == "triton", modality_tokens(self.model_config)
            self.head = replace(head, triton=triton, excluded_tokens=never)
        state = random_state(self.device)
        self._try(trains)
        set_random_state(state, self.device)

    @torch.no_grad()
    def _try(self, trains: bool) -> None:
        """Switch to packed rows where asked for, and make sure of what training takes for granted; mend or refuse."""
        self.module.eval()
        config, never, is_packed = self.model_config, self.head.excluded_tokens, self.spec.remove_padding
        must_repeat = trains and not self.spec.has_dropout
        with model_check.runs_here(self.module):
            expected = self._tried(model_check.alone(config, never, is_packed).to(self.device))
        if is_packed:
            use_packed_attention(self.module)
            micro = self._shared(model_check.packed(config, never, self.spec.share_prompts))
        else:
            micro = model_check.padded(config, never).to(self.device)
        with nullcontext() if is_packed else model_check.runs_here(self.module):
            is_right = must_repeat and not self._train_mode_differs(micro, expected)
            self.module.eval()
            if is_right:
                return
            found = self._tried(micro)
        self._check_rows_apart(expected, found)
        if must_repeat:
            self._make_deterministic(micro, found)
        elif trains and self.topology.rank == 0:
            logger.warning(
                "model.override_config switches dropout on: importance ratios are random even on the policy's own "
                "samples, so part of them is clipped"
            )

    def _check_rows_apart(self, expected: Tensor, found: Tensor) -> None:
        """Refuse packed rows that score otherwise than alone; have padded rows that do so go one by one."""
        dtype, name = self.spec.compute_torch_dtype, type(self.module).__name__
        apart = self._reduce([model_check.difference(expected, found)], "max")[0]
        if self.spec.remove_padding:
            model_check.check_packed(apart, dtype, name)
            return
        self._rows_alone = not apart <= model_check.tolerance(dtype)
        if self._rows_alone and self.topology.rank == 0:
            logger.warning(
                "model_type=%r: a row beside a longer one does not score as it does alone (they differ by %.1e of "
                "the scores' spread), so every micro-batch has one row",
                self.model_config.model_type,
                apart,
            )

    def _tried(self, micro: MicroBatch) -> Tensor:
        """Return a trial's scores, (t,); packed layers must ask for the windows that the model's config speaks of."""
        asked: list[AttentionOptions] = []
        told = {"record": asked.append} if micro.packing else {}
        scores = self._score(micro, 1.0, False, **told)
        if micro.packing:
            model_check.check_attention_options(self.model_config, asked, type(self.module).__name__)
        return scores.log_probs if self.spec.head == "lm" else scores.values

    def _make_deterministic(self, micro: MicroBatch, expected: Tensor) -> None:
        """Find the modules, if any, that must stay in inference mode for train mode to score as inference does."""
        if self._train_mode_differs(micro, expected):
            self.module.eval()
            name, kind = type(self.module).__name__, self.model_config.model_type
            if self._differs(micro, expected):
                model_check.refuse_random(name, kind, in_training=False)
            for modules in model_check.candidates(self.module):
                self._inferring = modules
                if not self._train_mode_differs(micro, expected):
                    break
            else:
                model_check.refuse_random(name, kind, in_training=True)
            if self.topology.rank == 0:
                what = "%s: train mode is random in modules of the class %s; they are trained in inference mode"
                logger.warning(what, name, model_check.classes_of(self._inferring))
        self.module.eval()

    def _train_mode_differs(self, micro: MicroBatch, expected: Tensor) -> bool:
        model_check.train_mode(self.module, self._inferring)
        return self._differs(micro, expected)

    def _differs(self, micro: MicroBatch, expected: Tensor) -> bool:
        """Whether a forward pass draws random numbers, or finds something else than ``expected``; on any rank."""
        before = random_state(self.device)
        apart = model_check.difference(expected, self._tried(micro))
        is_random = model_check.drew(before, random_state(self.device))
        strict = min(1e-2, model_check.tolerance(self.spec.compute_torch_dtype))
        return bool(self._reduce([float(is_random or not apart <= strict)], "max")[0])

    def _shared(self, micro: MicroBatch) -> MicroBatch:
        """``micro`` on the device, with this rank's share of its sequence."""
        place = self.topology
        if place.sp_size > 1:
            micro = micro.sharded_over(place.sp_group, place.sp_rank, place.sp_size)
        return micro.to(self.device)

    def _check_want(self, want: Want) -> None:
        able = Want.VALUES if self.spec.head != "lm" else Want.LOG_PROBS | Want.ENTROPY | Want.SUM_PI_SQUARED
        if want & ~able or not want:
            raise ValueError(f"a model with head={self.spec.head!r} gives {able}, not {want}")

    def _cut(self, data: DataProto, split: MicroBatching, reads: Collection[str]) -> tuple[MicroBatches, int]:
        """MicroBatches the rows, with as many micro-batches on every rank; returns the number that are this rank's own.

        A rank whose rows do not suffice goes along with the least there can be, which counts for nothing: sharded
        weights are gathered by all ranks together.
        """
        sp_size, best = self.topology.sp_size, BEST_TOKENS.get(self.device.type)
        if self._rows_alone:
            split = MicroBatching(size=1)
        if split.max_tokens is not None:
            # a budget is one device's, and so many share a sequence
            split = split._replace(max_tokens=split.max_tokens * sp_size)
        packed, prompts = self.spec.remove_padding, find_shared_prompts(data) if self.spec.share_prompts else None
        plan = partial(
            plan_micro_batches,
            row_lengths(data),
            split,
            best_tokens=best and best * sp_size,
            packed=packed,
            prompts=prompts,
        )
        groups = plan()
        agreed, *shown = map(int, self._reduce([len(groups), *self._kinds_shown(data)], "max"))
        if agreed > len(groups):
            groups = plan(at_least=agreed)
        # shared sequences are cut in host memory
        cut = split_batch(data, groups, reads, self.device if sp_size == 1 else "cpu", packed, prompts)
        if agreed > len(groups):
            cut.micro_batches.extend(self._idle_micro_batches() * (agreed - len(groups)))
        if any(shown) and self.topology.world_size > 1:
            self._show_to_all(cut, [kind for kind, is_shown in zip(VISION_INPUTS, shown, strict=True) if is_shown])
        if self.spec.head == "reward":
            # a score is read off a token itself, all else off the one before it
            cut.micro_batches[:] = [
                replace(micro, valid_positions=micro.valid_positions + 1) for micro in cut.micro_batches
            ]
        if sp_size > 1:
            cut.micro_batches[:] = map(self._shared, cut.micro_batches)
        return cut, len(groups)

    def _idle_micro_batches(self) -> list[MicroBatch]:
        """One micro-batch of a row of two tokens."""
        tokens = torch.zeros(2, dtype=torch.long)
        row = {"input_ids": Ragged.from_rows([tokens], 2), "responses": Ragged.from_rows([tokens[:1]], 1)}
        device = self.device if self.topology.sp_size == 1 else "cpu"
        return split_batch(DataProto.from_ragged(row), [[0]], (), device, self.spec.remove_padding).micro_batches

    def _kinds_shown(self, data: DataProto) -> tuple[bool, bool]:
        """Whether some row has images, and whether some has videos; for a model that sees, also checks that each row's
        are those it speaks of.
        """
        rows = vision_rows(data)
        if is_vision_language(self.model_config):
            check_placeholders(self.model_config, data.ragged("input_ids").rows(), rows)
        elif any(rows):
            raise ValueError(f"the batch has images, and {type(self.module).__name__} is a model of text only")
        return has_images_and_videos(rows)

    def _show_to_all(self, cut: MicroBatches, kinds: Sequence[str]) -> None:
        """Give micro-batches without images (or videos) a dummy of each kind that some rank has: all ranks gather the
        vision tower's weights together, once for images and once for videos.
        """
        config = self.model_config
        for number, micro in enumerate(cut.micro_batches):
            for kind in kinds:
                if VISION_INPUTS[kind][0] not in micro.vision_inputs:
                    micro = micro.with_dummy_row(image_token(config, kind), dummy_vision_inputs(config, kind))
            cut.micro_batches[number] = micro

    def _with_selected_tokens(
        self, data: DataProto, loss: LossFn, split: MicroBatching, temperature: float
    ) -> DataProto:
        """Let ``loss`` choose among the tokens of all ranks, by one more forward pass; adds ``selected_tokens``."""
        log_probs = self.infer(data, Want.LOG_PROBS, split, temperature).ragged("log_probs")
        # without old log-probs the policy is still the one that sampled
        old = data.ragged("old_log_probs") if "old_log_probs" in data else log_probs
        columns = [old.values, log_probs.values, data.ragged("advantages").values]
        is_own = data.ragged("response_mask").values.bool()
        mine = torch.stack([column[is_own].cpu().float() for column in columns])
        column = torch.zeros(len(is_own))
        column[is_own.cpu()] = self._among_all_ranks(mine, loss.choose).float()
        data = data.select(deepcopy=False)
        data.put("selected_tokens", log_probs.like(column))
        return data

    def _with_response_weights(self, data: DataProto, loss: LossFn) -> DataProto:
        """Let ``loss`` weigh the responses of all ranks against one another; adds ``response_weights``."""
        mask = data.ragged("response_mask")
        facts = {"lengths": mask.trim_padding().sum(-1)}
        if "difficulty" in loss.response_facts:
            if "difficulty" not in data:
                raise ValueError(
                    "actor_rollout_ref.actor.difficulty_loss_weight=true: the batch has no column 'difficulty', one "
                    f"number a response; it has {data.keys()}. Put it there, or set the option to false."
                )
            facts["difficulty"] = data.column("difficulty")
        mine = torch.stack([facts[name].cpu().float() for name in loss.response_facts])
        weights = self._among_all_ranks(mine, loss.weigh).to(mask.values.device)
        data = data.select(deepcopy=False)
        data.put("response_weights", mask.like(weights.repeat_interleave(mask.layout.lengths)))
        return data

    def _among_all_ranks(self, mine: Tensor, decide: Callable[..., Tensor]) -> Tensor:
        """What ``decide`` says of this rank's columns of ``mine`` (k, N), shown those of all ranks; (N,)."""
        ranks = [mine]
        if self.topology.dp_size > 1:
            ranks = [torch.from_numpy(part) for part in all_gather_objects(mine.numpy(), self.topology.dp_group)]
        decided = decide(*torch.cat(ranks, dim=1)).split([part.shape[1] for part in ranks])
        return decided[self.topology.dp_rank if self.topology.dp_size > 1 else 0]

    def _score(
        self,
        micro: MicroBatch,
        temperature: float,
        want_entropy: bool,
        want_squares: bool = False,
        reference: ReferenceStates | None = None,
        want_states: bool = False,
        **told: Any,
    ) -> TokenScores:
        positions = micro.position_ids
        if micro.vision_inputs:
            seen, _ = vision_positions(self.module, micro.input_ids, micro.vision_inputs, packing=micro.packing)
            positions = positions if seen is None else seen
        told |= {name: value for name in ("packing", "shard") if (value := getattr(micro, name)) is not None}
        return self.module.token_outputs(
            micro.input_ids,
            positions,
            micro.valid_positions,
            micro.targets,
            self.head,
            temperature,
            want_entropy,
            want_squares,
            micro.vision_inputs,
            told,
            reference,
            want_states,
        )

    def _backward(
        self,
        micro: MicroBatch,
        share: float,
        tokens: float,
        scale: float,
        loss: LossFn,
        temperature: float,
        metrics: WeightedMeans,
        want_entropy: bool,
        reference: Reference | None,
    ) -> TokenScores:
        """One forward and backward pass; returns its scores.

        Args:
            share, tokens: how much the micro-batch counts in means by the loss's weight, and in those over tokens.
        """
        compared = None if reference is None else reference.states(micro)
        self._recompute.choose(micro.input_ids.numel() // self.topology.sp_size)
        with self._activations():
            scores = self._score(micro, temperature, want_entropy, False, compared)
        found = TokenScores(*(part if part is None else part.detach() for part in scores))
        if share == 0.0:
            # idle, or nothing but masked tokens: other ranks wait in backward, so run it, on nothing
            self._run_backward(sum(part.sum() for part in scores if part is not None).mul(0.0))
            return found
        read = scores.log_probs, scores.entropy, scores.values, scores.full_kl
        outputs = TokenOutputs(*map(micro.to_rows, read))
        value, found_metrics = loss(outputs, micro.columns)
        # ranks' gradients are averaged, so each multiplies by their number to have them summed; ranks that share a
        # sequence have the same loss and find parts of its gradient
        ranks = self.topology.dp_size * self.topology.sp_size
        self._run_backward(value * (share * scale * ranks))
        # a share of tokens is a mean over tokens even where the loss is a mean over responses
        as_loss = getattr(loss, "averaged_as_loss", found_metrics)
        metrics.add({name: value for name, value in found_metrics.items() if name in as_loss}, share)
        metrics.add({name: value for name, value in found_metrics.items() if name not in as_loss}, tokens)
        return found

    def _activations(self) -> AbstractContextManager[Any]:
        """Around a forward pass: where what it leaves for the backward pass is kept."""
        if self.spec.activation_offload and self.device.type != "cpu":
            return ActivationOffload(self.device)
        return nullcontext()

    def _reduce(self, values: list[float], op: str) -> list[float]:
        if self.topology.dp_size == 1:
            return values
        return all_reduce_numbers(values, op, self.topology.dp_group, self.device)


def cast(named: Iterator[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Bring floating tensors to ``dtype``; None leaves them."""
    for name, tensor in named:
        yield name, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
