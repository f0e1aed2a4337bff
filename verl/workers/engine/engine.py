"""Engine: one model on one mesh that scores batches and takes optimizer steps in micro-batches.

Everything numerical that backends share is here: results do not depend on the split into micro-batches. A backend
decides where the weights are and how gradients are reduced.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from enum import Flag, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.algorithms.losses import nonfinite_columns
from verl.batch import WHOLE, MicroBatching
from verl.batch.balancing import plan_micro_batches
from verl.batch.ragged import Ragged
from verl.checkpoint.checkpoint_manager import random_state, set_random_state
from verl.config.engine import FSDPConfig, OptimConfig
from verl.models.activation_memory import ActivationOffload, Recompute
from verl.models.attention.kernels import use_short_sequence_attention
from verl.models.attention.packed import check_packable
from verl.models.compilation import compile_layers
from verl.models.distributions import TopTokens
from verl.models.heads import OutputHead, check_score_head, detect_output_head, score_layer
from verl.models.loader import ModelSpec, source_dtype
from verl.models.multimodal import VISION_INPUTS, is_vision_language, modality_tokens, vision_positions
from verl.models.token_outputs import ReferenceStates, TokenScores
from verl.protocol import DataProto
from verl.telemetry.flight_recorder import flight_recorder
from verl.utils.config import typed_section
from verl.utils.distributed import all_reduce_numbers
from verl.workers.engine.micro_batch import (
    VISION_COLUMN,
    MicroBatch,
    MicroBatches,
    add_dummy_images,
    check_vision_rows,
    find_shared_prompts,
    row_names,
    split_batch,
)
from verl.workers.engine.model_check import check_forward_passes, raises_model_error
from verl.workers.engine.optim import build_optimizer, build_schedule, warn_of_endless_warmup
from verl.workers.engine.state import EngineState
from verl.workers.engine.train_step import Gather, LossFn, Reference, TrainStep, plan_step, weighted_means

logger = logging.getLogger(__name__)


BEST_TOKENS = {"cpu": 1024}
"""Tokens of a micro-batch beyond which a device gains nothing: on CPU activations then fall out of its caches."""


class Want(Flag):
    """Results of ``infer``."""

    LOG_PROBS = auto()
    ENTROPY = auto()
    VALUES = auto()
    SUM_PI_SQUARED = auto()
    """Sum over the vocabulary of squared probabilities, at each response token."""
    TOP_LOG_PROBS = auto()
    """Log-probs of the k likeliest tokens at each response token, (B, R, k)."""
    TOP_IDS = auto()
    """Those tokens, (B, R, k) int32."""


class Outputs(NamedTuple):
    """Options of a forward pass: temperature, and the outputs to compute next to log-probs (or values)."""

    temperature: float = 1.0
    entropy: bool = False
    sum_pi_squared: bool = False
    states: bool = False
    """Return only the inputs of the last layer."""
    top: TopTokens | None = None
    ids: str | None = None
    """Column with the tokens (b, r, k) whose log-probs to compute."""


class Engine(EngineState):
    """One model, perhaps sharded over ranks, that can score tokens and take gradient steps.

    All ranks of ``topology`` make every call together, each with its part of the rows; the numbers of rows may differ.

    Args:
        engine_config: the ``fsdp_config`` section, a mapping of its entries, or None for defaults.
        optim_config: the ``optim`` section; None: the engine only scores.
        backend_config: the section of the backend's own options, or None for defaults.
        total_steps, grad_clip, l2_coef, device, seed, sp_size: as in ``build_engine``.

    Attributes:
        version: grows by one with every change of the weights.
    """

    supports_l2_coef = False
    """Whether ``optimizer_step`` adds the gradient of ``l2_coef``."""
    head: OutputHead

    def __init__(
        self,
        spec: ModelSpec,
        engine_config: FSDPConfig | Mapping[str, Any] | None = None,
        optim_config: OptimConfig | None = None,
        *,
        backend_config: Any = None,
        total_steps: int = -1,
        grad_clip: float | None = None,
        l2_coef: float = 0.0,
        device: str = "cpu",
        seed: int = 0,
        sp_size: int = 1,
    ) -> None:
        self.spec = spec
        self.grad_clip = grad_clip
        self.l2_coef = l2_coef
        self.version = 0
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule: torch.optim.lr_scheduler.LambdaLR | None = None
        self.one_row_per_micro_batch = False
        """Set by the check at the start where padded rows influence each other."""
        self.modules_in_eval_mode: list[nn.Module] = []
        """Modules that stay in inference mode during training, because their train mode is random."""
        self._on_device = {"model": False, "optimizer": False}
        self._row_names: list[str] = []
        self._optim_config, self._total_steps = optim_config, total_steps
        section = typed_section({} if engine_config is None else engine_config, FSDPConfig)
        for name in ("param_offload", "optimizer_offload"):
            if device == "cpu" and section[name]:  # verl.config.checks tells the user, once for all processes
                logger.info("fsdp_config.%s has no effect on a CPU device", name)
        self._load_and_place(section, backend_config, device, seed, sp_size)
        self.move(to_host=True, model=True, optimizer=True)

    @classmethod
    def choose(cls, spec: ModelSpec, backend_config: Any, is_trained: bool) -> type[Engine]:
        """Return the class for these options: this one, unless a backend has several."""
        return cls

    @property
    def is_trained(self) -> bool:
        """Whether the engine was built with an optimizer section."""
        return self._optim_config is not None

    @property
    def model_config(self) -> Any:
        """The model's Hugging Face config."""
        return self.module.config

    @property
    def source_dtype(self) -> torch.dtype | None:
        """The precision in the model's config; None where it has none."""
        return source_dtype(self.spec)

    # -- called by roles ------------------------------------------------------------------------------------------

    def infer(
        self,
        data: DataProto,
        want: Want,
        split: MicroBatching = WHOLE,
        temperature: float = 1.0,
        top: TopTokens | None = None,
    ) -> DataProto:
        """Score every response token, without gradients.

        Args:
            data: ``input_ids``, ``attention_mask``, ``responses`` and, if they do not count from 0, ``position_ids``;
                ``multi_modal_inputs`` if rows have images.
            split: size of the micro-batches; changes memory and time only.
            temperature: logits are divided by it, as in sampling.
            top: number of ``TOP_LOG_PROBS`` and ``TOP_IDS``, which are wanted together.

        Returns:
            Packed response columns: ``log_probs`` and ``entropy`` of each token given those before it, or ``values``,
            the return expected before each (of a reward model: the score of the text up to and with each); rows in the
            order given.

        Raises:
            ValueError: if this model's head cannot compute ``want``.
        """
        supported = Want.VALUES if self.spec.head != "lm" else ~Want.VALUES
        if want & ~supported or not want:
            raise ValueError(f"a model with head={self.spec.head!r} gives {supported}, not {want}")
        if self.module.training:
            self.module.eval()
        # ranks with fewer rows run idle micro-batches at the end, whose results are dropped
        batches, local = self._split(data, split, ())
        outputs = Outputs(temperature, Want.ENTROPY in want, Want.SUM_PI_SQUARED in want, top=top)
        with torch.no_grad():
            with self._rows_noted(batches, data):
                results = self.run(batches.micro_batches, outputs)[:local]
        self._after_infer()
        return self._as_columns(batches, results, want)

    def train_step(
        self,
        data: DataProto,
        loss: LossFn,
        split: MicroBatching = WHOLE,
        temperature: float = 1.0,
        reference: Reference | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step on the loss over all rows of all ranks.

        The gradient is that of ``loss`` on all rows at once: each micro-batch counts by its mean's divisor.

        Args:
            reference: model whose KL over the whole vocabulary the loss reads; one more forward pass of each
                micro-batch.

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
        """Take a ``train_step``, and return also what ``infer`` would before it, from the step's own forward passes.

        Args:
            want: of ``LOG_PROBS`` and ``ENTROPY``; none: the second result has no rows.
        """
        if self.optimizer is None:
            raise RuntimeError("this engine was built without an optimizer: it can score, not train")

        # a forward pass of the whole batch, which only a loss that asks for it pays
        gather = Gather(
            lambda: self.infer(data, Want.LOG_PROBS, split, temperature).ragged("log_probs"),
            reference is not None,
            self.topology,
            lambda: self.infer(data, Want.VALUES, split).ragged("values"),
        )
        batch, is_sum = loss.prepare(data, gather)
        missing = [name for name in loss.columns if name not in batch]
        if missing:
            raise ValueError(f"the loss reads column {missing[0]!r}, which the batch has not: it has {batch.keys()}")
        # after ``prepare``, which may have scored the batch in inference mode
        if not self.module.training:
            self.train_mode()
        batches, local = self._split(batch, split, (*loss.columns, *loss.extra_columns))
        step, tokens_saved, tokens_run = plan_step(batches.micro_batches, local, loss, is_sum, reference, self)
        self._start_gradients()
        ids = getattr(loss, "ids_column", None)
        outputs = Outputs(temperature, Want.ENTROPY in want or loss.want_entropy, ids=ids)
        with self._rows_noted(batches, batch):
            results = self.run(batches.micro_batches, outputs, step)
        if reference is not None:
            reference.engine._after_infer()
        grad_norm = self.optimizer_step()
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.version += 1
        else:
            reason = nonfinite_columns(batch, loss.columns)
            logger.warning("gradient norm is %s (%s): this optimizer step is skipped", grad_norm, reason)
        metrics = {**weighted_means(step.metrics, self.topology), "grad_norm": grad_norm}
        metrics["nonfinite_steps"] = 0.0 if is_finite else 1.0
        if self.spec.share_prompts:
            metrics["prefix_tokens_saved"] = tokens_saved / (tokens_saved + tokens_run)
        # results of idle micro-batches, the last ones, belong to no row
        return metrics, self._as_columns(batches, results[:local], want) if want else DataProto()

    @contextmanager
    def _rows_noted(self, batches: MicroBatches, data: DataProto) -> Iterator[None]:
        """Have `run` note the rows of the micro-batch it is at; after an error the note stays, for the report."""
        self._row_names = row_names(batches, data)
        yield
        self._row_names = []
        flight_recorder().note(micro_batch=None, rows=None)

    def run(
        self, micro_batches: Sequence[MicroBatch], outputs: Outputs, step: TrainStep | None = None
    ) -> list[TokenScores]:
        """Run the micro-batches forward and, with ``step``, backward; returns their scores, without gradients.

        A backend with a schedule of its own, as pipeline parallelism has, overrides this as a whole.
        """
        results = []
        for number, micro in enumerate(micro_batches):
            rows = self._row_names[number] if number < len(self._row_names) else None
            flight_recorder().note(micro_batch=f"{number + 1} of {len(micro_batches)}", rows=rows)
            flight_recorder().tick()  # a sign of progress, for the driver that waits
            if step is None:
                results.append(self._score(micro, outputs))
                continue
            compared = None if step.reference is None else step.reference.states(micro)
            # ranks that share a sequence each run their part of it
            tokens = micro.input_ids.numel() // self.topology.sp_size
            if self._recompute.is_on != (tokens > self._recompute.most_kept_tokens):
                self._recompute.switch()
            with self._activations():
                scores = self._score(micro, outputs, compared)
            kept = scores._replace(top_log_probs=None)  # of no use later, and k times as large as the others
            results.append(TokenScores(*(part if part is None else part.detach() for part in kept)))
            self._run_backward(step.scaled_loss(number, micro, scores), is_last=number + 1 == len(micro_batches))
        return results

    def states(self, micro: MicroBatch) -> Tensor:
        """Inputs of the last layer at the valid positions of ``micro`` on this rank, (t', H); without gradients."""
        trains = self.module.training
        self.module.eval()
        with torch.no_grad():
            hidden = self._score(micro, Outputs(states=True)).states
        if trains:
            self.train_mode()
        return hidden

    def train_mode(self) -> None:
        """Switch to train mode, except the modules whose train mode is random."""
        self.module.train()
        for module in self.modules_in_eval_mode:
            module.training = False

    def step_schedule(self) -> None:
        """Advance the learning-rate schedule: once per training step, however many optimizer steps that had."""
        self.schedule.step()

    def learning_rate(self) -> float:
        """The rate of the next optimizer step."""
        return float(self.schedule.get_last_lr()[0])

    @contextmanager
    def on_device(self, optimizer: bool = False) -> Iterator[None]:
        """Bring the weights (with ``optimizer``, its state too) to the device; offload them after where configured.

        The only path of offload. Blocks may nest: what an outer one loaded stays until its end.
        """
        loaded = {"model": not self._on_device["model"], "optimizer": optimizer and not self._on_device["optimizer"]}
        if any(loaded.values()):
            self.move(to_host=False, **loaded)
        self._on_device.update({part: True for part, is_new in loaded.items() if is_new})
        try:
            yield
        finally:
            self._on_device.update({part: False for part, is_new in loaded.items() if is_new})
            if any(loaded.values()):
                self.move(to_host=True, **loaded)

    # -- implemented by backends ----------------------------------------------------------------------------------

    @abstractmethod
    def _load_and_place(
        self, engine_config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int
    ) -> None:
        """Set ``topology``, ``device`` and ``module``; call ``_prepare`` and ``_build_optimizer``."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, step if the gradient is finite, drop the gradient; returns its norm before clipping."""

    @abstractmethod
    def move(self, to_host: bool, *, model: bool, optimizer: bool) -> None:
        """Move weights and optimizer state to host memory, or back to the device, where offload is configured."""

    def _start_gradients(self) -> None:  # noqa: B027 - not every backend needs it
        """Called before the first backward pass of a step."""

    def _run_backward(self, loss: Tensor, is_last: bool) -> None:
        """Add the gradient of ``loss`` to that of the step, of whose micro-batches this may be the last."""
        loss.backward()

    def _after_infer(self) -> None:  # noqa: B027
        """Called after the forward passes of ``infer``."""

    # -- shared by backends ---------------------------------------------------------------------------------------

    def _build_optimizer(self, parameters: list[Tensor]) -> None:
        if self._optim_config is not None:
            self.optimizer = build_optimizer(parameters, self._optim_config)
            self.schedule = build_schedule(self.optimizer, self._optim_config, self._total_steps)
            if self.topology.rank == 0:
                warn_of_endless_warmup(self._optim_config, self._total_steps)

    def _prepare(self) -> None:
        """Adapt the module to its device, detect its output head, and check its forward passes."""
        if self.spec.remove_padding:
            check_packable(self.module, self.topology.sp_size)
        if self.device.type == "cpu":
            use_short_sequence_attention(self.module)
        self._recompute = Recompute(self.module, always=self.device.type != "cpu")
        offloads = self.spec.activation_offload and self.device.type != "cpu"
        # what runs around each forward pass of a step: activations stay on the device, or go to host memory
        self._activations: Callable[[], AbstractContextManager[Any]] = nullcontext
        if offloads:
            self._activations = partial(ActivationOffload, self.device)
        self._reads_images = is_vision_language(self.module.config)
        compiled = self.spec.use_torch_compile and self.device.type == "cuda"
        if self.spec.use_torch_compile and not compiled:
            logger.debug("use_torch_compile has no effect on %s: plain torch is used", self.device.type)
        if self.spec.head != "lm":
            score_layer(self.module)
            self.head = OutputHead("value")
            check_score_head(self.module, self.device, self.head)
        else:
            with raises_model_error(self.module):
                head = detect_output_head(self.module, self.device, compiled)
            triton, excluded = self.spec.head_backend == "triton", modality_tokens(self.module.config)
            self.head = replace(head, triton=triton, excluded_tokens=excluded)
        state = random_state(self.device)
        check_forward_passes(self)
        set_random_state(state, self.device)
        if self.spec.compile_layers:  # not before: the passes above would each compile graphs of their own
            compile_layers(self.module)

    def shard_sequence(self, micro: MicroBatch) -> MicroBatch:
        """Return ``micro`` on the device, with this rank's shard of its sequence."""
        topology = self.topology
        if topology.sp_size > 1:
            micro = micro.sharded_over(topology.sp_group, topology.sp_rank, topology.sp_size)
        return micro.to(self.device)

    def reduce(self, values: list[float], op: str) -> list[float]:
        """All-reduce numbers over the data-parallel ranks."""
        if self.topology.dp_size == 1:
            return values
        return all_reduce_numbers(values, op, self.topology.dp_group, self.device)

    def _split(self, data: DataProto, split: MicroBatching, columns: Sequence[str]) -> tuple[MicroBatches, int]:
        """Split the rows into as many micro-batches on every rank; returns also the number that are this rank's own.

        A rank with fewer runs idle micro-batches of two tokens and no weight: sharded weights are gathered by all
        ranks together.
        """
        sp_size, best = self.topology.sp_size, BEST_TOKENS.get(self.device.type)
        if self.one_row_per_micro_batch:
            split = MicroBatching(size=1)
        if split.max_tokens is not None:
            # the token budget is one device's, and sp_size devices share a sequence
            split = split._replace(max_tokens=split.max_tokens * sp_size)
        packed, prompts = self.spec.remove_padding, find_shared_prompts(data) if self.spec.share_prompts else None
        plan = partial(
            plan_micro_batches,
            data.ragged("input_ids").layout.lengths.tolist(),
            split,
            best_tokens=best and best * sp_size,
            packed=packed,
            prompts=prompts,
        )
        groups = plan() if len(data) else []  # a rank may have no row that is scored here
        has_vision = self._reads_images or VISION_COLUMN in data.non_tensor_batch
        kinds = check_vision_rows(self.module, data) if has_vision else (False, False)
        most, *with_vision = map(int, self.reduce([len(groups), *kinds], "max"))
        if groups and most > len(groups):
            groups = plan(at_least=most)
        # sequences are sharded in host memory
        batches = split_batch(data, groups, columns, self.device if sp_size == 1 else "cpu", packed, prompts)
        micro_batches = batches.micro_batches
        if most > len(groups):
            micro_batches.extend(self._idle_micro_batches() * (most - len(groups)))
        if any(with_vision) and self.topology.world_size > 1:
            names = [kind for kind, has_some in zip(VISION_INPUTS, with_vision, strict=True) if has_some]
            micro_batches[:] = [add_dummy_images(micro, self.module.config, names) for micro in micro_batches]
        if self.spec.head == "reward":
            # a score belongs to the token itself, everything else is predicted by the token before
            shifted = [replace(micro, valid_positions=micro.valid_positions + 1) for micro in micro_batches]
            micro_batches[:] = shifted
        if sp_size > 1:
            micro_batches[:] = map(self.shard_sequence, micro_batches)
        return batches, len(groups)

    def _idle_micro_batches(self) -> list[MicroBatch]:
        """One micro-batch of a row of two tokens."""
        tokens = torch.zeros(2, dtype=torch.long)
        row = {"input_ids": Ragged.from_rows([tokens], 2), "responses": Ragged.from_rows([tokens[:1]], 1)}
        device = self.device if self.topology.sp_size == 1 else "cpu"
        return split_batch(DataProto.from_ragged(row), [[0]], (), device, self.spec.remove_padding).micro_batches

    def _score(
        self,
        micro: MicroBatch,
        outputs: Outputs = Outputs(),  # noqa: B008
        reference: ReferenceStates | None = None,
        **attention_kwargs: Any,
    ) -> TokenScores:
        positions = micro.position_ids
        if micro.vision_inputs:
            of_images, _ = vision_positions(self.module, micro.input_ids, micro.vision_inputs, packing=micro.packing)
            positions = positions if of_images is None else of_images
        parts = {"packing": micro.packing, "shard": micro.shard}
        attention_kwargs |= {name: value for name, value in parts.items() if value is not None}
        return self.module.token_outputs(
            micro.input_ids,
            positions,
            micro.valid_positions,
            micro.targets,
            self.head,
            outputs.temperature,
            outputs.entropy,
            outputs.sum_pi_squared,
            micro.vision_inputs,
            attention_kwargs,
            reference,
            outputs.states,
            outputs.top,
            None if outputs.ids not in micro.columns else micro.columns[outputs.ids].values,
        )

    def _as_columns(self, batches: MicroBatches, results: list[TokenScores], want: Want) -> DataProto:
        """The results of the micro-batches as columns, named as the flags; rows in the order of the batch."""
        names = [str(flag.name).lower() for flag in Want if flag in want]
        if not results:  # no rows of this rank's
            return DataProto()
        return DataProto.from_ragged({name: batches.restore([getattr(s, name) for s in results]) for name in names})
