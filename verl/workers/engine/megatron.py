"""Engine on megatron-core: tensor, pipeline, context and expert parallel models.

megatron-core has the layers, the groups of ranks, the sums of gradients, the optimizer and the order in which pipeline
stages run; ``verl.models.megatron`` adapts them. Losses, weights of micro-batches, metrics and learning-rate schedules
are those of ``Engine``.

Sources: Shoeybi et al. 2019 (arXiv:1909.08053), Narayanan et al. 2021 (arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.batch import MicroBatching
from verl.checkpoint.shards import check_names, fill
from verl.config.engine import FSDPConfig
from verl.config.megatron import MegatronConfig
from verl.models.heads import OutputHead, stored_shapes
from verl.models.loader import ModelSpec, load_config
from verl.models.megatron.parallel import import_megatron, place_of_rank, start_groups, use_virtual_pipeline
from verl.models.token_outputs import TokenScores
from verl.protocol import DataProto
from verl.telemetry.flight_recorder import flight_recorder
from verl.utils.config import typed_section
from verl.utils.device import current_device, empty_cache, has_own_memory
from verl.utils.distributed import ensure_process_group, get_world_size
from verl.workers.engine.engine import Engine, Outputs
from verl.workers.engine.micro_batch import MicroBatch, MicroBatches
from verl.workers.engine.optim import build_schedule, warn_of_endless_warmup
from verl.workers.engine.registry import register_engine
from verl.workers.engine.train_step import TrainStep, to_floats

state = import_megatron()

from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402

from verl.models.megatron import bridge, checkpoint, training  # noqa: E402
from verl.models.megatron.layers import PackedRows, context_positions  # noqa: E402
from verl.models.megatron.scores import SumOverRanks, split_log_probs  # noqa: E402


class Pieces(nn.Module):
    """This rank's pieces of a model, with what is asked of a transformers model: its configuration."""

    def __init__(self, model: bridge.MegatronModel, spec: ModelSpec) -> None:
        super().__init__()
        self.pieces = nn.ModuleList(model.pieces)
        self.config = model.config
        self.architecture = architecture(spec, model.config)
        self.generation_config = generation_config(spec)


def architecture(spec: ModelSpec, config: Any) -> str:
    """Name of transformers' class for the model with its head."""
    from verl.models.loader import _auto_class

    chosen = _auto_class(spec, config)
    if hasattr(chosen, "_model_mapping"):
        chosen = chosen._model_mapping[type(config)]
    return chosen.__name__


def generation_config(spec: ModelSpec) -> Any:
    """Of the model's folder; None where it has none."""
    from transformers import GenerationConfig

    if not (Path(spec.folder) / "generation_config.json").exists():
        return None
    return GenerationConfig.from_pretrained(spec.folder)


@register_engine("megatron")
class MegatronEngine(Engine):
    """A model whose layers are split over tensor-parallel ranks, and shared out over pipeline stages.

    Ranks of one data-parallel number run the same rows. The last pipeline stage has the outputs of the model, and hands
    them to the other stages.
    """

    optimizer: Any
    """megatron-core's, which is none of torch's."""

    def _load_and_place(self, config: FSDPConfig, backend_config: Any, device: str, seed: int, sp_size: int) -> None:
        section = typed_section({} if backend_config is None else backend_config, MegatronConfig)
        ensure_process_group(device)
        self.device = current_device(device)
        mesh = section.mesh(get_world_size())
        start_groups(mesh, section.seed)
        self.topology = place_of_rank()
        self._mesh, self._section = mesh, section
        spec, hf_config = self.spec, load_config(self.spec)
        self._uses_virtual_pipeline = mesh.vpp
        use_virtual_pipeline(mesh.vpp)
        # weights that the folder does not hold are those of the seed
        model_parallel_cuda_manual_seed(section.seed, force_reset_rng=True)
        torch.manual_seed(section.seed)
        self.model = bridge.build(
            hf_config,
            spec.compute_torch_dtype,
            spec.head,
            spec.path,
            section.sequence_parallel,
            dict(section.transformer_overrides),
            section.override_mcore_model_config,
            head_bias=_has_bias(spec),
        )
        if section.use_dist_checkpointing:
            folder, prefix = Path(section.dist_checkpointing_path or "").expanduser(), section.dist_checkpointing_prefix
            checkpoint.load(folder, self.model, prefix=prefix)
        elif spec.load:
            bridge.load_hf(self.model, spec.folder)
        if self.is_trained:
            self._wrap(section)
        self.module = Pieces(self.model, spec)
        self.module.train(False)
        self.head = OutputHead("fused" if spec.head == "lm" else "value")
        self._reads_images = False
        self._plan_offload(section)

    def _wrap(self, section: MegatronConfig) -> None:
        training.wrap_pieces(self.model, section.use_distributed_optimizer, section.override_ddp_config)
        self.optimizer = training.build_optimizer(
            self.model, self._optim_config, self.grad_clip, section.use_distributed_optimizer
        )
        # the rate alone: megatron-core's optimizer is none of torch's, to which a schedule belongs
        self._clock = torch.optim.SGD([torch.zeros(1)], lr=self._optim_config.lr)
        self.schedule = build_schedule(self._clock, self._optim_config, self._total_steps)
        if self.topology.rank == 0:
            warn_of_endless_warmup(self._optim_config, self._total_steps)

    # -- micro-batches ------------------------------------------------------------

    def _split(self, data: DataProto, split: MicroBatching, columns: Sequence[str]) -> tuple[MicroBatches, int]:
        cp, pp = self._mesh.cp, self._mesh.pp
        if split.max_tokens is not None:
            # the token budget is one device's, and cp devices share a sequence
            split = split._replace(max_tokens=split.max_tokens * cp)
        batches, local = super()._split(data, split, columns)
        if self._mesh.vpp > 1:  # stages take turns with their pieces for as many micro-batches as there are stages
            missing = -len(batches.micro_batches) % pp
            batches.micro_batches.extend(self._idle_micro_batches() * missing)
        batches.micro_batches[:] = map(self._fitted, batches.micro_batches)
        return batches, local

    def _fitted(self, micro: MicroBatch) -> MicroBatch:
        """Pad the sequence to what tensor-parallel and context-parallel ranks can share evenly."""
        uneven = micro.position_ids if micro.packing is None else _uneven(micro)
        if uneven is not None:
            raise ValueError(
                "strategy=megatron: position_ids of a row do not count from 0, and megatron-core's rotary embedding "
                "counts so. Use strategy=fsdp2 for such rows."
            )
        core, mesh = self.model.transformer_config, self._mesh
        divisor = (mesh.tp if core.sequence_parallel else 1) * (2 * mesh.cp if mesh.cp > 1 else 1)
        rows, length = micro.input_ids.shape
        extra = -length % divisor
        if not extra:
            return micro
        input_ids = torch.cat([micro.input_ids, micro.input_ids.new_zeros(rows, extra)], 1)
        if micro.packing is not None:
            return replace(micro, input_ids=input_ids, packing=micro.packing.append_segment(extra))
        # of the flattened rows, which are longer now
        valid = micro.valid_positions + micro.valid_positions // length * extra
        return replace(micro, input_ids=input_ids, valid_positions=valid)

    # -- forward and backward ------------------------------------------------------------

    def run(
        self, micro_batches: Sequence[MicroBatch], outputs: Outputs, step: TrainStep | None = None
    ) -> list[TokenScores]:
        if outputs.states or outputs.top or outputs.ids or outputs.sum_pi_squared or (step and step.reference):
            raise ValueError(
                "strategy=megatron computes log-probabilities and entropy of sampled tokens, and values: its "
                "vocabulary is split over ranks. Use strategy=fsdp2 for what compares whole distributions."
            )
        if step is not None:
            # gradients of data-parallel ranks are summed, not averaged
            step = step._replace(ranks=1)
        use_virtual_pipeline(self._mesh.vpp)
        results: list[TokenScores | None] = [None] * len(micro_batches)
        pieces = list(self.module.pieces)
        batches = [iter(list(enumerate(micro_batches))) for _ in pieces]
        rows, length = micro_batches[0].input_ids.shape
        get_forward_backward_func()(
            forward_step_func=partial(self._forward, outputs=outputs, step=step, results=results),
            data_iterator=batches if len(pieces) > 1 else batches[0],
            model=pieces if len(pieces) > 1 else pieces[0],
            num_microbatches=len(micro_batches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=step is None,
        )
        if self._mesh.pp > 1:
            results = self._from_last_stage(micro_batches, results, outputs)
            if step is not None:
                self._metrics_from_last_stage(step)
        return results

    def _forward(
        self,
        batches: Iterator[tuple[int, MicroBatch]],
        piece: nn.Module,
        *,
        outputs: Outputs,
        step: TrainStep | None,
        results: list[TokenScores | None],
    ) -> tuple[Tensor, Any]:
        """One piece's forward pass of the next micro-batch; with the function that gives the last piece's loss."""
        number, micro = next(batches)
        rows = self._row_names[number] if number < len(self._row_names) else None
        flight_recorder().note(micro_batch=f"{number + 1} of {len(results)}", rows=rows)
        flight_recorder().tick()  # a sign of progress, for the driver that waits
        packed = None if micro.packing is None else PackedRows.of(micro.packing)
        input_ids = micro.input_ids
        if self._mesh.cp > 1:
            input_ids = input_ids.index_select(1, self._context_positions(micro))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden = piece(input_ids, positions, None, packed_seq_params=packed)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, dict]:
            scores = self._scores(hidden, micro, outputs)
            results[number] = TokenScores(*(part if part is None else part.detach() for part in scores))
            loss = hidden.new_zeros(()) if step is None else step.scaled_loss(number, micro, scores)
            # as a loss over all tokens, which is neither divided nor multiplied again
            return loss, torch.ones((), dtype=torch.int, device=hidden.device), {}

        return hidden, loss_of

    def _context_positions(self, micro: MicroBatch) -> Tensor:
        rank = state.get_context_parallel_rank()
        return context_positions(micro.input_ids.shape[1], rank, self._mesh.cp, self.device)

    def _scores(self, hidden: Tensor, micro: MicroBatch, outputs: Outputs) -> TokenScores:
        """Outputs at the valid positions from the inputs of the last layer, (b, l, H)."""
        positions, targets, here = micro.valid_positions, micro.targets, None
        if self._mesh.cp > 1:
            # of each position of the whole sequence the place on this rank, or none
            own, length = self._context_positions(micro), micro.input_ids.shape[1]
            place = torch.full((length,), -1, device=self.device).index_put_((own,), torch.arange(len(own)).to(own))
            row, column = positions // length, place[positions % length]
            here = (column >= 0).nonzero().flatten()
            positions, targets = (row * len(own) + column)[here], targets[here]
        hidden = hidden.flatten(0, 1).index_select(0, positions)
        if self.spec.head == "lm":
            weight, vocabulary = self.model.output_weight, self.model.vocabulary
            scored = split_log_probs(hidden, weight, targets, vocabulary, outputs.temperature, outputs.entropy)
            scores = TokenScores(*scored)
        else:
            layer = self.model.last.output_layer
            bias = None if layer.bias is None else layer.bias.float()
            # the head in fp32: a bf16 value has three digits, too few for a TD error
            values = nn.functional.linear(hidden.float(), layer.weight.float(), bias)
            scores = TokenScores(values=values.squeeze(-1))
        if here is None:
            return scores
        group, whole = state.get_context_parallel_group(), hidden.new_zeros(len(micro.targets), dtype=torch.float32)
        return TokenScores(
            *(part if part is None else SumOverRanks.apply(whole.index_copy(0, here, part), group) for part in scores)
        )

    def _from_last_stage(
        self, micro_batches: Sequence[MicroBatch], results: list[TokenScores | None], outputs: Outputs
    ) -> list[TokenScores]:
        """The scores on all pipeline stages: every rank goes on with the same numbers."""
        names = ["values"] if self.spec.head != "lm" else ["log_probs", "entropy"][: 1 + outputs.entropy]
        counts = [len(micro.targets) for micro in micro_batches]
        packed = torch.zeros(len(names), sum(counts), device=self.device)
        if state.is_pipeline_last_stage():
            packed = torch.stack([torch.cat([getattr(scores, name) for scores in results]) for name in names])
        source = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast(packed, source, group=state.get_pipeline_model_parallel_group())
        parts = [part.split(counts) for part in packed]
        return [TokenScores(**dict(zip(names, found, strict=True))) for found in zip(*parts, strict=True)]

    def _metrics_from_last_stage(self, step: TrainStep) -> None:
        values = iter(to_floats([value for _, metrics in step.metrics for value in metrics.values()]))
        found = [[(share, {name: next(values) for name in metrics}) for share, metrics in step.metrics]]
        source = state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(found, source, group=state.get_pipeline_model_parallel_group())
        step.metrics[:] = found[0]

    # -- the engine contract ------------------------------------------------------------

    def _start_gradients(self) -> None:
        for piece in self.model.pieces:
            piece.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            training.set_learning_rate(self.optimizer, self.learning_rate())
            self.optimizer.step()
            if self.model.pieces[0].ddp_config.overlap_param_gather:
                for piece in self.model.pieces:  # before anybody reads the weights
                    piece.start_param_sync(force_sync=True)
        self.optimizer.zero_grad()
        self._clock.step()  # nothing, but its schedule expects it
        return norm

    @torch.no_grad()
    def full_tensors(self, dtype: torch.dtype | None, leave_out: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            for name, tensor in bridge.export_hf(self.model, dtype):
                if name not in leave_out:
                    yield name, tensor

    def weights(self, dtype: torch.dtype | None = None, sharded: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        assert not sharded, "own_rows is empty"
        return self.full_tensors(dtype, ())

    def tensors_in_memory(self) -> dict[str, Iterable[Tensor]]:
        found: dict[str, Iterable[Tensor]] = {"weights": self.module.parameters()}
        if self.optimizer is not None:
            found["optimizer"] = training.optimizer_tensors(self.optimizer)
            found["gradients"] = training.gradient_buffers(self.model)
        return found

    def model_state(self) -> dict[str, Any]:
        """This rank's parameters by the number of their piece and their name in it."""
        pieces = enumerate(self.model.plain_pieces)
        return {f"{piece}.{name}": one.detach() for piece, part in pieces for name, one in part.named_parameters()}

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Any]) -> None:
        own = self.model_state()
        check_names(own, state)
        for name, tensor in own.items():
            fill(tensor, state[name], name)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    # -- checkpoints ------------------------------------------------------------

    @property
    def own_format(self) -> str:
        return "dist_ckpt"

    def write_own_format(self, folder: Path, parts: Collection[str]) -> None:
        with self.on_device(optimizer=True):
            checkpoint.save(folder, self.model, self.optimizer, parts)

    def read_own_format(self, folder: Path, parts: Collection[str]) -> None:
        with self.on_device(optimizer=True):
            checkpoint.load(folder, self.model, self.optimizer, parts)

    def pretrained_state(self, folder: Path) -> Mapping[str, Tensor]:
        return {f"{piece}.{name}": part for piece, name, part in bridge.local_weights(self.model, folder)}

    @property
    def layout(self) -> str:
        return f"megatron {self._mesh}"

    # -- between host and device ------------------------------------------------------------

    def _plan_offload(self, section: MegatronConfig) -> None:
        weights, moves = list(self.module.parameters()), has_own_memory(self.device)
        self._offloads: dict[str, list[training.Offload]] = {"model": [], "optimizer": []}
        if moves and section.param_offload:
            self._offloads["model"].append(training.Offload(lambda: weights, self.device))
        if moves and section.optimizer_offload and self.optimizer is not None:
            state = partial(training.optimizer_tensors, self.optimizer)
            self._offloads["optimizer"].append(training.Offload(state, self.device, others=weights))
        if moves and section.grad_offload and self.optimizer is not None:
            # between updates nobody reads them
            buffers = partial(training.gradient_buffers, self.model)
            self._offloads["optimizer"].append(training.Offload(buffers, self.device, keeps=False))

    def move(self, to_host: bool, *, model: bool, optimizer: bool) -> None:
        parts = [*self._offloads["model"] * model, *self._offloads["optimizer"] * optimizer]
        for part in parts:
            part.to_host() if to_host else part.to_device()
        if parts and to_host:
            empty_cache(self.device)


def _has_bias(spec: ModelSpec) -> bool:
    """Whether the layer with one output has a bias; a new one has, as in transformers' token classifiers."""
    shapes = stored_shapes(spec.folder) if spec.load else {}
    return "score.bias" in shapes or (spec.head == "value" and "score.weight" not in shapes)


def _uneven(micro: MicroBatch) -> Tensor | None:
    """Positions of packed rows that do not count each row from 0."""
    starts = micro.packing.cu_q[:-1].repeat_interleave(micro.packing.cu_q.diff())
    counted = torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device) - starts
    return None if torch.equal(counted, micro.position_ids[0]) else micro.position_ids
