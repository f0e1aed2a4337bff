"""The verbs a driver can call, one mixin a role: policy, rollout, reference, value.

A verb says how its batch is split (``register``), which columns it reads, and what it adds. The workers at the end
are combinations of roles on one ``EngineWorker``; backends differ in their engine, not here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from verl.algorithms.losses import PPOLoss, ValueLoss
from verl.batch.partition import STEP_ROWS, MiniBatches
from verl.models.loader import LoRASpec, ModelSpec, load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import empty_cache
from verl.utils.distributed import get_rank
from verl.utils.fs import copy_to_local
from verl.utils.process import no_collection
from verl.utils.py_functional import derive_seed
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine import Engine, Reference, Want
from verl.workers.model_worker import EngineWorker, MetricBag, mfu_metrics
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.assemble import assemble, sampling_params
from verl.workers.rollout.base import Request, RolloutEngine, SamplingParams
from verl.workers.rollout.memory import memory_errors
from verl.workers.rollout.monitor import engine_phase
from verl.workers.rollout.weights.sync import sync_adapter, sync_weights
from verl.workers.serving import ServingRole

TOKENS = (
    *("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask"),
    *("multi_modal_inputs", "multi_modal_data"),  # of rows with images
)
"""Columns every forward pass over prompt and response needs."""

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "seeds", "uid", "multi_modal_data")
"""Columns sampling reads, those of them that there are."""

UPDATE_COLUMNS = TOKENS + (
    "old_log_probs",
    "ref_log_prob",
    "rollout_log_probs",
    "advantages",
    "returns",
    "values",
    "token_level_rewards",
    "token_level_scores",
    "rollout_is_weights",
    "difficulty",
)
"""Columns a loss may read."""


def model_spec(model: Any, fsdp_config: Any, head: str, path: str | None = None, **switches: bool) -> ModelSpec:
    """What the loader needs, from a role's model section and the precision keys of its sharding section.

    Args:
        switches: ``use_torch_compile``, ``freeze_vision_tower``, ``remove_padding``.
    """
    share_prompts = switches.get("remove_padding", False) and getattr(model, "use_prefix_sharing", False)
    return ModelSpec(
        path=path or model.path,
        head=head,
        param_dtype=fsdp_config.master_dtype,
        compute_dtype=fsdp_config.compute_dtype,
        override_config=dict(getattr(model, "override_config", {})),  # a reward model is not trained and has neither
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=getattr(model, "enable_gradient_checkpointing", False),
        activation_offload=getattr(model, "enable_activation_offload", False),
        use_shm=model.use_shm,
        external_lib=model.external_lib,
        head_backend=head_backend(model),
        use_liger=getattr(model, "use_liger", False),
        lora=lora_spec(model, switches.get("freeze_vision_tower", False)),
        share_prompts=share_prompts,
        **switches,
    )


def head_backend(model: Any) -> str:
    """What computes log-probs from hidden states, as a role's model section says; a critic's says nothing."""
    return model.fused_kernel_options.impl_backend if getattr(model, "use_fused_kernels", False) else "torch"


def lora_spec(model: Any, freeze_vision_tower: bool = False) -> LoRASpec | None:
    """The adapter that a role's model section asks for."""
    if not getattr(model, "lora_rank", 0):
        return None
    names = {name: getattr(model, name) for name in ("target_modules", "exclude_modules")}
    names = {name: value if isinstance(value, str | None) else tuple(value) for name, value in names.items()}
    return LoRASpec(
        model.lora_rank,
        model.lora_alpha,
        **names,
        adapter_path=model.lora_adapter_path,
        leaves_vision_tower=freeze_vision_tower,
    )


def sends_adapter(config: Any, device: str) -> bool:
    """Whether a sync brings the adapter alone: as ``rollout.lora_sync`` says, or where it is the faster way.

    Args:
        config: the section ``actor_rollout_ref``.

    Raises:
        ValueError: it was asked for, of an engine that holds no adapter apart from the weights of this model.
    """
    model, rollout = config.model, config.rollout
    # weights that travel between groups travel merged
    if not model.lora_rank or rollout.lora_sync == "merge" or not config.hybrid_engine:
        return False
    if rollout.lora_sync == "auto" and (rollout.name != "vllm" or device != "cuda"):
        return False
    spec = ModelSpec(
        model.path,
        override_config=dict(model.override_config),
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
    )
    why = get_rollout_class(rollout.name).adapter_unsupported_reason(load_config(spec))
    if why and rollout.lora_sync == "adapter":
        raise ValueError(
            f"actor_rollout_ref.rollout.lora_sync=adapter: rollout.name={rollout.name} {why}. "
            "Use lora_sync=merge, which every engine takes."
        )
    return not why


class PolicyRole:
    """Verbs of the policy being trained. Needs ``self.actor`` (Engine) and ``self.config.actor``."""

    def init_policy(self) -> None:
        """Load the model, shard it, and build its loss."""
        config = self.config
        self.actor = self.model_engine(
            model_spec(
                config.model,
                config.actor.fsdp_config,
                "lm",
                use_torch_compile=config.actor.use_torch_compile,
                freeze_vision_tower=config.actor.freeze_vision_tower,
                remove_padding=config.actor.use_remove_padding,
            ),
            config.actor,
            config.actor.fsdp_config,
            mesh="actor",
            train=True,
        )
        self.ppo_loss = PPOLoss(config.actor, config.rollout.response_length)
        self.checkpoint_manager(
            self.actor,
            self.tokenizer_path or config.model.path,
            config.actor.checkpoint,
            config.model.trust_remote_code,
            config.model.custom_chat_template,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=TOKENS, balanced=True)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under the current policy: adds ``old_log_probs`` and ``entropys``, both (B, R).

        With ``actor.calculate_sum_pi_squared`` also ``sum_pi_squared`` (B, R).
        """
        rollout, want = self.config.rollout, Want.LOG_PROBS | Want.ENTROPY
        if self.config.actor.calculate_sum_pi_squared:
            want |= Want.SUM_PI_SQUARED
        data = self.image_inputs.filled(data)
        with self.ledger.phase("log_prob"), self.actor.on_device():
            scored = self.actor.infer(data, want, rollout.log_prob_split, temperature=rollout.temperature)
        return scored.rename(["log_probs", "entropy"], ["old_log_probs", "entropys"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=UPDATE_COLUMNS, balanced=True)
    def update_actor(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` over the batch in mini-batches, one optimizer step each; returns metrics.

        With ``actor.skip_old_log_probs`` also what ``compute_log_prob`` would have: the one step's own forward pass.
        """
        config, temperature = self.config.actor, self.config.rollout.temperature
        want = Want.LOG_PROBS | Want.ENTROPY if config.skip_old_log_probs else Want(0)
        data, metrics, scored = self.image_inputs.filled(data), MetricBag(), DataProto()
        timed = mfu_metrics("actor", self.actor, data, config.ppo_epochs, metrics)
        compared = self.comparison() if self.ppo_loss.want_full_kl else nullcontext()
        with self.ledger.phase("update_actor"), self.actor.on_device(optimizer=True), compared as reference, timed:
            for mini in self.mini_batches(data, self.actor, MiniBatches.of(config, self.config.rollout.n)):
                step, scored = self.actor.train_and_score(
                    mini, self.ppo_loss, want, config.update_split, temperature, reference
                )
                metrics.add(step, prefix="actor")
            metrics.add({"actor/lr": self.actor.learning_rate()})
            self.actor.step_schedule()
        metrics.add(self.ledger.metrics())
        scored.meta_info["metrics"] = metrics.lists()
        return scored.rename(["log_probs", "entropy"], ["old_log_probs", "entropys"]) if want else scored

    def mini_batches(self, data: DataProto, engine: Engine, default: MiniBatches) -> Iterator[DataProto]:
        """This rank's rows of each optimizer step, as many steps on every rank.

        The driver says which they are (``step_rows``). Where it does not, every rank cuts its equal share alike.
        """
        steps, ranks = data.meta_info.get(STEP_ROWS), engine.topology.dp_size
        if steps is None:
            if default.rows % ranks:
                raise ValueError(
                    f"a mini-batch of {default.rows} rows does not divide among {ranks} ranks, and this batch does not "
                    "say which rows each of them takes: call the trainer's balance_batch(batch, metrics) before the "
                    f"update, or make ppo_mini_batch_size x rollout.n a multiple of {ranks}."
                )
            seed = derive_seed(self.seed, "shuffle", int(data.meta_info.get("global_steps", 0)))
            steps = default._replace(rows=default.rows // ranks, seed=seed).steps(len(data))
        for rows in steps:
            yield data.select_idxs(rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write this role's checkpoint to the folder ``local_path``."""
        with self.ledger.phase("save"):
            self.checkpoints.save(local_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written in the background."""
        return self.checkpoints.is_saving()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written in the background; raises what went wrong in it."""
        self.checkpoints.finish_saving()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> str:
        """Continue from the folder ``local_path``; returns a remark for the user, or nothing."""
        return self.checkpoints.load(local_path, del_local_after_load)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def delete_checkpoints(self, local_paths: list[str]) -> None:
        """Delete folders this role has saved, on every node."""
        self.checkpoints.delete(local_paths)


class RolloutRole(ServingRole):
    """Verbs of sampling. Needs ``self.actor``, whose weights it samples with, and ``self.config.rollout``."""

    def init_rollout(self) -> None:
        """Build the rollout engine; its weights arrive from the policy at the first generation."""
        model, config = self.config.model, self.config.rollout
        self.tokenizer = hf_tokenizer(
            self.tokenizer_path or model.path,
            chat_template=model.custom_chat_template,
            trust_remote_code=model.trust_remote_code,
        )
        self.sends_adapter = sends_adapter(self.config, self.device)
        lora = lora_spec(model, self.config.actor.freeze_vision_tower)
        empty_cache(torch.device(self.device))  # what loading the actor left cached
        with memory_errors(config, "start"), engine_phase(config.name, "start"):
            self.rollout: RolloutEngine = get_rollout_class(config.name)(
                copy_to_local(model.path, use_shm=model.use_shm),
                config,
                device=self.device,
                trust_remote_code=model.trust_remote_code,
                override_config=dict(model.override_config),
                tokenizer_path=self.tokenizer_path or model.path,
                **({"lora": lora} if self.sends_adapter else {}),
            )
        self.rollout.monitor.engine, self.rollout.monitor.stall_timeout_s = config.name, config.stall_timeout_s
        for validate in (False, True):
            self.rollout.check_sampling(self.sampling(validate, do_sample=True))
        self.unseeded_calls = 0
        self.keeps_weights = False
        rank, ranks = get_rank(), self.rollout.tensor_parallel_size
        self._register_dispatch_collect_info("rollout", dp_rank=rank // ranks, is_collect=rank % ranks == 0)

    @contextmanager
    def rollout_phase(self, phase: str) -> Iterator[None]:
        """Note the phase of the engine: for the memory ledger, and for who asks what a dead worker was doing."""
        if phase == "wake":
            # memory that the last update left cached is free to this process alone, and SGLang wakes in another
            empty_cache(torch.device(self.device))
        with self.ledger.phase(f"rollout_{phase}"), self.rollout.monitor.phase(phase):
            with memory_errors(self.config.rollout, phase):
                yield

    @contextmanager
    def rollout_mode(self, timing: dict[str, float]) -> Iterator[RolloutEngine]:
        """Hand the newest weights to the rollout engine, and the device's memory with them."""
        start = time.perf_counter()
        with self.actor.on_device():
            with self.rollout_phase("wake"):
                self.rollout.wake(("weights",))
            if self.rollout.version != self.newest_version({}):
                with self.rollout_phase("sync"):
                    self.sync_rollout()
        with self.rollout_phase("wake_cache"):
            self.rollout.wake(("kv_cache",))
        timing["reshard"] = time.perf_counter() - start
        try:
            yield self.rollout
        finally:
            if self.config.rollout.free_cache_engine:
                # every wake is followed by a sync, so nothing need be kept but what the sync leaves out
                with self.rollout_phase("sleep"):
                    self.rollout.sleep(level=1 if self.sends_adapter else 2)

    def sync_rollout(self) -> None:
        """Bring the rollout, which is awake, to the actor's weights."""
        dtype, version = self.rollout.weights_dtype, self.actor.version
        bucket_bytes = self.config.rollout.update_weights_bucket_megabytes << 20
        if self.sends_adapter:
            adapter = self.actor.adapter_weights(dtype)
            sync_adapter(adapter, lambda: self.actor.base_weights(dtype), self.rollout, version, bucket_bytes)
        else:
            sync_weights(self.actor.weights(dtype), self.rollout, version, bucket_bytes)

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        mesh="rollout",
        reads=PROMPT_COLUMNS,
    )
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample one response a row: adds row 1 of the data flow (responses, masks, whole sequences).

        Reads ``raw_prompt_ids`` (or the real cells of ``input_ids``), ``multi_modal_data`` where prompts have images
        and ``seeds`` (B,) int64; a caller that gives no seeds gets others at every call and rank. The meta facts
        ``validate`` (validation prompts) and ``do_sample`` (False: greedy) choose the sampling parameters.
        """
        config, timing = self.config.rollout, {}
        facts = prompts.meta_info
        sampling = self.sampling(bool(facts.get("validate")), facts.get("do_sample", True))
        rows = prompts.non_tensor_batch.get("raw_prompt_ids")
        if rows is None:
            rows = [row.tolist() for row in prompts.ragged("input_ids").rows()]
        if "seeds" in prompts.keys():
            seeds = prompts.column("seeds").tolist()
        else:
            seeds = self.fresh_seeds(int(facts.get("global_steps", 0)), len(prompts))
        media = prompts.non_tensor_batch.get("multi_modal_data", [None] * len(rows))
        self.keeps_weights = self.may_keep_weights(facts)
        requests = [Request(tuple(i), sampling, s, m or None) for i, s, m in zip(rows, seeds, media, strict=True)]
        with self.rollout_mode(timing) as engine:
            start = time.perf_counter()
            engine.monitor.names = prompts.non_tensor_batch.get("uid", ())
            with self.rollout_phase("generate"):
                completions = engine.generate(requests, expect_version=self.newest_version(facts))
            version = engine.version
            timing["generate_sequences"] = time.perf_counter() - start
        batch = assemble(
            prompts,
            completions,
            prompt_length=config.prompt_length,
            response_length=config.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            version=version,
        )
        batch.meta_info["timing"] = timing
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_metrics(self) -> dict[str, float]:
        """The engine's numbers since the last call, by their names below ``rollout/engine``."""
        return self.rollout.monitor.take_metrics(self.rollout.totals())

    def newest_version(self, facts: Mapping[str, Any]) -> int:
        """Version of the weights that responses are to be drawn with."""
        return self.rollout.version if self.keeps_weights else self.actor.version

    def may_keep_weights(self, facts: Mapping[str, Any]) -> bool:
        """Whether ``trainer.weight_sync_freq`` lets the engine draw this batch with the weights it holds."""
        every, step = facts.get("weight_sync_freq", 1), int(facts.get("global_steps", 0))
        return self.rollout.version is not None and not facts.get("validate") and (step - 1) % every != 0

    def fresh_seeds(self, step: int, count: int) -> list[int]:
        """Seeds this rank never used before."""
        self.unseeded_calls += 1
        place = (self.seed, "unseeded", self._query_dispatch_info("rollout"), step, self.unseeded_calls)
        return [derive_seed(*place, i) for i in range(count)]

    def sampling(self, validate: bool, do_sample: bool) -> SamplingParams:
        """The sampling a training or validation prompt asks for; ``do_sample=False`` makes it greedy."""
        return sampling_params(self.config.rollout, self.tokenizer.eos_token_id, validate, do_sample)


class ReferenceRole:
    """Verbs of the frozen reference. Needs ``self.config.ref``."""

    def init_reference(self) -> None:
        """Load the reference model: the actor's own starting point, or ``ref.model.path``."""
        config = self.config
        spec = model_spec(
            config.model,
            config.ref.fsdp_config,
            "lm",
            path=(config.ref.model or {}).get("path"),
            use_torch_compile=config.ref.use_torch_compile,
            remove_padding=config.actor.use_remove_padding,
        )
        self.reference = self.model_engine(
            replace(spec, lora=None),
            config.ref,
            config.ref.fsdp_config,
            mesh="ref",
            train=False,
        )

    @property
    def base_model_is_reference(self) -> bool:
        """Whether the actor below its adapter is the reference."""
        return self.actor.has_adapter and not (self.config.ref.model or {}).get("path")

    def use_base_model_as_reference(self) -> None:
        """The actor below its adapter is the reference: no second copy of the model."""
        self.reference = None
        self.report_mesh("ref", self.actor)

    @contextmanager
    def comparison(self) -> Iterator[Reference]:
        """Within the block the policy's update can compare whole distributions with the reference's, on the device.

        Raises:
            ValueError: no role of this process holds the reference.
        """
        if self.base_model_is_reference:
            yield Reference.of_base_model(self.actor)
            return
        engine = getattr(self.fused_worker_dict.get("ref"), "reference", None)
        if engine is None:
            raise ValueError(
                "actor.kl_loss_type=full: the reference is not in the actor's processes, and its distributions do not "
                "travel. Map Role.RefPolicy to the actor's resource pool, or use low_var_kl."
            )
        with engine.on_device():
            yield Reference.of(engine, self.actor)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="ref", reads=TOKENS, balanced=True)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under the reference: adds ``ref_log_prob`` (B, R)."""
        split, temperature = self.config.ref.log_prob_split, self.config.rollout.temperature
        data = self.image_inputs.filled(data)
        engine, is_frozen = self.reference, nullcontext()
        if engine is None:
            engine, is_frozen = self.actor, self.actor.without_adapter()
        with self.ledger.phase("ref_log_prob"), engine.on_device(), is_frozen:
            scored = engine.infer(data, Want.LOG_PROBS, split, temperature=temperature)
        return scored.rename("log_probs", "ref_log_prob")


class ValueRole:
    """Verbs of the critic. Needs ``self.critic`` (Engine) and the critic's section as ``self.config``."""

    def init_critic(self) -> None:
        """Load the model with a value head, and build its loss."""
        config = self.config
        self.critic = self.model_engine(
            model_spec(config.model, config.model.fsdp_config, "value", remove_padding=config.model.use_remove_padding),
            config,
            config.model.fsdp_config,
            mesh="critic",
            train=True,
        )
        self.value_loss = ValueLoss(config, self.response_length)
        path = config.model.tokenizer_path or config.model.path
        self.checkpoint_manager(self.critic, path, config.checkpoint, config.model.trust_remote_code)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="critic", reads=TOKENS, balanced=True)
    def compute_values(self, data: DataProto) -> DataProto:
        """Estimate the return before each response token: adds ``values`` (B, R)."""
        with self.ledger.phase("values"), self.critic.on_device():
            return self.critic.infer(data, Want.VALUES, self.config.forward_split)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="critic", reads=UPDATE_COLUMNS, balanced=True)
    def update_critic(self, data: DataProto) -> DataProto:
        """Run ``ppo_epochs`` over the batch in mini-batches, one optimizer step each; returns metrics only."""
        config, metrics = self.config, MetricBag()
        timed = mfu_metrics("critic", self.critic, data, config.ppo_epochs, metrics)
        with self.ledger.phase("update_critic"), self.critic.on_device(optimizer=True), timed:
            for mini in self.mini_batches(data, self.critic, MiniBatches.of(config, config.rollout_n)):
                step = self.critic.train_step(mini, self.value_loss, config.update_split)
                metrics.add(step, prefix="critic")
            metrics.add({"critic/lr": self.critic.learning_rate()})
            self.critic.step_schedule()
        return DataProto(meta_info={"metrics": metrics.lists()})

    mini_batches = PolicyRole.mini_batches
    save_checkpoint = PolicyRole.save_checkpoint
    is_saving = PolicyRole.is_saving
    finish_saving = PolicyRole.finish_saving
    load_checkpoint = PolicyRole.load_checkpoint
    delete_checkpoints = PolicyRole.delete_checkpoints


class ActorRolloutRefWorker(PolicyRole, RolloutRole, ReferenceRole, EngineWorker):
    """Policy, rollout and reference; which of them this process plays is in its ``role``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load what the role needs; call once."""
        if "rollout" in self.role:
            get_rollout_class(self.config.rollout.name)  # an engine that is not installed is said before models load
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            if "rollout" in self.role:
                sends_adapter(self.config, self.device)  # nor is a sync that cannot be
            if "actor" in self.role:
                self.init_policy()
            if "rollout" in self.role:
                self.init_rollout()
            if "actor" in self.role and self.base_model_is_reference:
                self.use_base_model_as_reference()
            elif "ref" in self.role:
                self.init_reference()


class CriticWorker(ValueRole, EngineWorker):
    """The critic."""

    role = "critic"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the critic; call once."""
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.init_critic()
