"""EngineWorker: the process that holds engines, the rollout and their files.

The verbs of each role are in ``roles.py`` and ``generation.py``; this module is what they share: the process group,
an engine built from its config section, checkpoints. Knows configs and engines, not algorithms or prompts.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch

from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.config.actor import ActorConfig, FrozenModelConfig
from verl.config.base import READ, Config
from verl.config.critic import CriticConfig, CriticModelConfig
from verl.config.distillation import DistillationConfig
from verl.config.engine import FSDPConfig, backend_of
from verl.config.megatron import MegatronConfig
from verl.config.ppo import SHARES_BY_DEFAULT, ActorRolloutRefConfig, ModelConfig
from verl.config.reward import RewardModelConfig, RewardModelModelConfig
from verl.config.trainer import CheckpointConfig
from verl.data.vision import media_inputs, media_of
from verl.models.loader import LoRASpec, ModelSpec, load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import TracedWorker
from verl.telemetry.memory import Entry, MemoryLedger, bytes_by_place
from verl.telemetry.metric import FlopsCounter, get_device_flops
from verl.utils.config import typed_section
from verl.utils.device import empty_cache, get_device_name, use_deterministic_algorithms
from verl.utils.distributed import all_gather_objects, ensure_process_group, get_world_size
from verl.utils.import_utils import import_users_modules
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.torch_functional import PrecisionType
from verl.workers.engine import Engine, Want, build_engine
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.weights.canary import Canary, compare_canaries, rounding_tolerance

# -- Tensors of images and videos, made in the worker with data.return_multi_modal_inputs=false ------------------------


MADE, RAW, PIXELS = "multi_modal_inputs", "multi_modal_data", "multi_modal_pixels"


class ImageInputs:
    """Fills the column ``multi_modal_inputs`` from ``multi_modal_pixels``, or ``multi_modal_data``, if it is not there.

    Less travels, since pixels weigh an eighth of what the processor makes of them; every call makes them again.

    Args:
        folder: of the model, with its processor.
    """

    def __init__(self, folder: str, trust_remote_code: bool = False):
        self.folder, self.trust_remote_code = folder, trust_remote_code
        self._processor: Any = None

    def filled(self, data: DataProto) -> DataProto:
        """``data`` with the column; as it is where it has the column, or no images."""
        rows = data.non_tensor_batch.get(PIXELS, data.non_tensor_batch.get(RAW))
        if rows is None or MADE in data.non_tensor_batch or not any(rows):
            return data
        if self._processor is None:
            self._processor = hf_processor(self.folder, trust_remote_code=self.trust_remote_code)
        made: dict[int, dict[str, Any]] = {}
        for row in rows:
            if row and id(row) not in made:  # the responses to one prompt share their images
                media = media_of(row) if PIXELS in data.non_tensor_batch else row
                made[id(row)] = media_inputs(self._processor, media)
        # a copy: the driver's batch, in the same process with the local controller, must not grow
        data = data.select()
        data.non_tensor_batch[MADE] = np.fromiter((made.get(id(row), {}) for row in rows), object, len(rows))
        return data


class EngineWorker(TracedWorker):
    """One rank of the roles it plays.

    Args:
        config: the section of its role (``actor_rollout_ref``, ``critic`` or ``reward_model``), typed or as hydra gives
            it.
        role: which parts to play, a name containing ``actor``, ``rollout``, ``ref``, ``critic`` or ``rm``.
        device: ``cpu`` or ``cuda``; None: ``cuda`` where this process has one.
        seed: the run's seed; every rank starts from it.
        total_training_steps: length of the learning-rate schedule, in calls of ``update_*``.
        response_length: tokens; the constant some losses divide by.
        sequence_length: tokens a prompt and its response may have together.
        timeout_s: seconds a collective may wait for a rank.
        tokenizer_path: where the policy's tokenizer is, if not in its model's folder.
        distillation: the section of that name; None: there is no teacher.
        profile_option: accepted for scripts that pass it; has no effect.
    """

    role = ""
    config: Any
    """The section of the role; a role's class narrows the type."""
    checkpoints: CheckpointManager
    """Of the engine that the role trains."""
    distillation: DistillationConfig | None = None

    def __init__(
        self,
        config: Any,
        role: str | None = None,
        device: str | None = None,
        seed: int = 1,
        total_training_steps: int = -1,
        response_length: int | None = None,
        sequence_length: int | None = None,
        timeout_s: float = 600.0,
        tokenizer_path: str | None = None,
        distillation: DistillationConfig | None = None,
        profile_option: Any = None,
    ) -> None:
        super().__init__()
        self.role = role or self.role
        self.config = typed_section(config, section_of_role(self.role))
        self.device = device or get_device_name()
        self.seed = seed
        self.total_training_steps = total_training_steps
        self.response_length = response_length
        self.sequence_length = sequence_length
        self.timeout_s = timeout_s
        self.tokenizer_path = tokenizer_path
        self.distillation = distillation
        self.ledger = MemoryLedger(self.memory_parts)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, settings: Mapping[str, Any]) -> None:
        """Set constructor arguments other than ``config`` and ``role``, for subclasses whose own takes only these."""
        vars(self).update(settings)

    def memory_parts(self) -> dict[str, int]:
        """Bytes on the device by what they are for; of engines that offload, what is there now."""
        found: dict[str, int] = {}
        engines = {name: getattr(self, name, None) for name in ("actor", "critic", "reference", "reward_model")}
        for name, engine in (engines | getattr(self, "teachers", {})).items():
            if engine is not None:
                for kind, tensors in engine.tensors_in_memory().items():
                    found[f"{name} {kind}"] = bytes_by_place(tensors, self.device)
        rollout = getattr(self, "rollout", None)
        return found | (rollout.memory_parts() if rollout is not None else {})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def free_memory(self) -> None:
        """Give back the device memory that torch keeps for later, before another process takes it."""
        empty_cache(torch.device(self.device))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_entries(self) -> list[Entry]:
        """Return the memory that each phase since the last call has left."""
        return self.ledger.take()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def options_read(self) -> list[str]:
        """Dotted keys of the options read in this process so far."""
        return list(READ)

    def start_process(self) -> None:
        """Seed this process and join the group of all ranks; the first role of a process does it for all of them."""
        # first: a module of the user's may register the model, the loss or the engine that is built next
        import_users_modules()
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        torch.manual_seed(self.seed)
        ensure_process_group(self.device, timeout_s=self.timeout_s)

    def model_engine(
        self,
        spec: ModelSpec,
        section: ActorConfig | CriticConfig | FrozenModelConfig | RewardModelConfig,
        mesh: str | None,
        train: bool,
    ) -> Engine:
        """Build the engine of one role and report its place on ``mesh``, if that is new, to the dispatcher."""
        if section.sharding.full_determinism:
            use_deterministic_algorithms()
        # without a positive number of its own the schedule is as long as the run
        steps = section.optim.total_training_steps if train else 0
        engine = build_engine(
            backend_of(section.strategy, self.device, get_world_size()),
            replace(spec, max_sequence_length=self.sequence_length),
            section.sharding,
            section.optim if train else None,
            total_steps=steps if steps > 0 else self.total_training_steps,
            grad_clip=section.grad_clip if train else None,
            l2_coef=getattr(section, "l2_coef", 0.0) if train else 0.0,
            device=self.device,
            seed=self.seed,
            sp_size=section.ulysses_sequence_parallel_size,
            # a role's section has a subsection named after its backend, such as `deepspeed`
            backend_config=getattr(section, section.strategy, None),
        )
        if mesh is not None:
            self.report_mesh(mesh, engine)
        if train and engine.has_adapter and engine.topology.rank == 0:
            trained, total = engine.parameter_counts()
            print(f"{mesh}: LoRA trains {trained:,} of {total:,} parameters ({trained / total:.2%})", flush=True)
        return engine

    @cached_property
    def image_inputs(self) -> ImageInputs:
        """Makes the image tensors of rows that bring images alone."""
        model = self.config.model
        return ImageInputs(model.path, model.trust_remote_code)

    def report_mesh(self, mesh: str, engine: Engine) -> None:
        """Register with the dispatcher which part of a batch this rank takes on ``mesh``, and if its result counts."""
        topology = engine.topology
        self._register_dispatch_collect_info(mesh, dp_rank=topology.dp_rank, is_collect=topology.is_output_rank)

    def checkpoint_manager(
        self,
        engine: Engine,
        model_path: str,
        contents: CheckpointConfig,
        trust_remote_code: bool,
        chat_template: str | None = None,
        read_tokenizer: Callable[[], Any] | None = None,
    ) -> None:
        """Prepare to write and read ``engine``'s files, with the tokenizer (or image processor) of ``model_path``.

        Args:
            read_tokenizer: returns the tokenizer, where there is no image processor. None: read it at ``model_path``.
        """
        reading: dict[str, Any] = {"trust_remote_code": trust_remote_code, "chat_template": chat_template}
        read_tokenizer = read_tokenizer or partial(hf_tokenizer, model_path, **reading)
        self.checkpoints = CheckpointManager(
            engine,
            hf_processor(model_path, **reading) or read_tokenizer(),
            save_contents=contents.save_contents,
            load_contents=contents.load_contents,
            in_background=contents.async_save,
        )


class HybridWorker(EngineWorker):
    """A worker of the section ``actor_rollout_ref``, with what its roles share; each holds the parts it plays."""

    config: ActorRolloutRefConfig
    actor: Engine
    """The policy being trained."""
    reference: Engine | None
    """The frozen reference; None: the actor below its adapter is the reference."""
    teachers: Mapping[str, Engine]
    """Teachers by name, in the order of the configuration."""
    rollout: RolloutEngine
    canary: Canary | None = None
    """Of the last sync to this process's rollout, until the actor has scored it."""
    canary_difference: float | None = None
    """Mean difference of log-probabilities that the last comparison found."""

    @cached_property
    def tokenizer(self) -> Any:
        """The policy's, read once: rollout and checkpoints do not change it."""
        model = self.config.model
        return hf_tokenizer(
            self.tokenizer_path or model.path,
            chat_template=model.custom_chat_template,
            trust_remote_code=model.trust_remote_code,
        )

    def frozen_model(
        self, section: FrozenModelConfig, mesh: str | None, path: str | None = None, is_policy: bool = True
    ) -> Engine:
        """Load a model that only scores responses: the reference, or a teacher.

        Args:
            path: its folder; None: the policy's own starting point.
            is_policy: whether ``model.override_config`` is meant for it, too.
        """
        spec = model_spec(
            self.config.model,
            section.sharding,
            "lm",
            path=path,
            use_torch_compile=section.use_torch_compile,
            remove_padding=self.config.actor.use_remove_padding,
        )
        # of entries that describe another model, only the choice of its kernel holds here
        own = {name: value for name, value in spec.override_config.items() if is_policy or name.startswith("attn_")}
        # it never has an adapter of its own
        spec = self.sharing_prompts(replace(spec, lora=None, override_config=own))
        return self.model_engine(spec, section, mesh=mesh, train=False)

    def sharing_prompts(self, spec: ModelSpec) -> ModelSpec:
        """``spec``, with packed rows that share prompts where ``model.use_prefix_sharing=null`` means that.

        The same for actor and reference, which run the same micro-batches where whole distributions are compared.
        """
        is_plain = self.device == "cpu" and spec.head == "lm" and self.distillation is None
        if not (is_plain and self.config.shares_prompts_by_default):
            return spec
        if load_config(spec).model_type not in SHARES_BY_DEFAULT:
            return spec
        return replace(spec, remove_padding=True, share_prompts=True)

    def check_own_canaries(self) -> None:
        """Compare the canaries of the rollouts in the actor's processes; `RolloutRole` has one."""

    def compare_canaries(self, canaries: Sequence[Canary]) -> None:
        """Score ``canaries`` under the actor's weights, on all ranks, and raise on all where a rollout has others."""
        self.canary_difference = compare_canaries(canaries, self.score_canaries, self.canary_tolerance(canaries))

    def score_canaries(self, batch: DataProto) -> list[float]:
        """The log-probabilities of rank 0, for all ranks: they must agree on what follows."""
        return all_gather_objects(self.actor.infer(batch, Want.LOG_PROBS).ragged("log_probs").values.tolist())[0]

    def canary_tolerance(self, canaries: Sequence[Canary]) -> float:
        """``rollout.canary_tolerance``, or what rounding in the types of the two sides explains."""
        dtype = PrecisionType.to_dtype(self.config.actor.sharding.compute_dtype)
        text = self.actor.model_config.get_text_config(decoder=True)
        derived = rounding_tolerance(
            {dtype, *(canary.dtype for canary in canaries)},
            getattr(text, "num_hidden_layers", None) or 32,
            getattr(text, "vocab_size", None) or 1 << 17,
        )
        given = self.config.rollout.canary_tolerance
        return derived if given is None else given


def model_spec(
    model: ModelConfig | CriticModelConfig | RewardModelModelConfig,
    sharding: FSDPConfig | MegatronConfig,
    head: Literal["lm", "value", "reward"],
    path: str | None = None,
    use_torch_compile: bool = False,
    freeze_vision_tower: bool = False,
    remove_padding: bool = False,
) -> ModelSpec:
    """The loader's description of a role's model, from its model section and the precision keys of its sharding."""
    spec = ModelSpec(
        path=path or model.path,
        head=head,
        param_dtype=sharding.master_dtype,
        compute_dtype=sharding.compute_dtype,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=False,
        use_shm=model.use_shm,
        external_lib=model.external_lib,
        use_torch_compile=use_torch_compile,
        freeze_vision_tower=freeze_vision_tower,
        remove_padding=remove_padding,
    )
    # a reward model is not trained, and its section lacks the options of training
    if isinstance(model, RewardModelModelConfig):  # it is not trained
        return spec
    spec = replace(
        spec,
        override_config=dict(model.override_config),
        gradient_checkpointing=model.enable_gradient_checkpointing,
        activation_offload=model.enable_activation_offload,
        lora=lora_spec(model, freeze_vision_tower),
        share_prompts=remove_padding and bool(model.use_prefix_sharing),
    )
    if isinstance(model, CriticModelConfig):
        return spec
    backend = model.fused_kernel_options.impl_backend if model.use_fused_kernels else "torch"
    return replace(spec, use_liger=model.use_liger, head_backend=backend, compile_layers=model.compile_layers)


def lora_spec(model: ModelConfig | CriticModelConfig, freeze_vision_tower: bool = False) -> LoRASpec | None:
    """The adapter that a role's model section asks for."""
    if not model.lora_rank:
        return None

    def hashable(names: str | list[str] | None) -> Any:
        return tuple(names) if isinstance(names, list) else names

    return LoRASpec(
        model.lora_rank,
        model.lora_alpha,
        target_modules=hashable(model.target_modules),
        exclude_modules=hashable(model.exclude_modules),
        adapter_path=model.lora_adapter_path,
        leaves_vision_tower=freeze_vision_tower,
    )


def section_of_role(role: str) -> type[Config]:
    """The class of the section that workers of a role are given.

    Raises:
        ValueError: the role has none.
    """
    for part, cls in (("critic", CriticConfig), ("rm", RewardModelConfig), ("reward", RewardModelConfig)):
        if part in role:
            return cls
    if not any(part in role for part in ("actor", "rollout", "ref", "teacher")):
        raise ValueError(f"role={role!r} names nothing a worker does: put actor, rollout, ref, critic or rm into it.")
    return ActorRolloutRefConfig


class MetricBag:
    """Metrics of several optimizer steps: name -> one number a step."""

    def __init__(self) -> None:
        self._lists: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, float], prefix: str = "") -> None:
        """Append each number; a name without a section (``grad_norm``) goes under ``prefix``."""
        for name, value in metrics.items():
            self._lists.setdefault(name if "/" in name else f"{prefix}/{name}", []).append(float(value))

    def lists(self) -> dict[str, list[float]]:
        return dict(self._lists)


@contextmanager
def mfu_metrics(name: str, engine: Engine, data: DataProto, epochs: int, metrics: MetricBag) -> Iterator[None]:
    """Add ``perf/mfu/{name}``: the share of the devices' peak that the updates in this block make use of.

    Tokens that shared prompts have saved did not run, and do not count. Left out where the peak is not known, on CPU
    for example, or the batch has no ``global_token_num``.
    """
    start = time.perf_counter()
    yield
    tokens, peak = data.meta_info.get("global_token_num"), get_device_flops(device=engine.device.type)
    if tokens and math.isfinite(peak):
        done, _ = FlopsCounter(engine.model_config).estimate_flops(tokens, time.perf_counter() - start)
        saved = metrics.lists().get(f"{name}/prefix_tokens_saved", [0.0])
        done *= 1 - sum(saved) / len(saved)
        metrics.add({f"perf/mfu/{name}": done * epochs / (peak * engine.topology.world_size)})
