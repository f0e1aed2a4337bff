"""The verbs a driver can call, one class a role: policy, reference, value; those of the rollout are `RolloutRole`.

A verb says how its batch is split (``register``), which columns it reads, and what it adds. The workers at the end
are combinations of roles; backends differ in their engine, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import torch

from verl.algorithms.losses import PPOLoss, ValueLoss
from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS, DistillationLoss
from verl.batch.partition import MiniBatches
from verl.config.critic import CriticConfig
from verl.models.loader import ModelSpec
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import empty_cache
from verl.utils.process import no_collection
from verl.utils.py_functional import derive_seed
from verl.utils.torch_functional import PrecisionType
from verl.workers.engine import Engine, Reference, Want
from verl.workers.generation import RolloutRole, sends_adapter
from verl.workers.model_worker import EngineWorker, HybridWorker, MetricBag, mfu_metrics, model_spec
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import RolloutEngine

TOKENS = (
    *("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask"),
    *("multi_modal_inputs", "multi_modal_pixels", "multi_modal_data"),  # of rows with images
    "uid",  # by which a call that hangs or dies names its rows
)
"""Columns every forward pass over prompt and response needs."""

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
    "pairs",
    *(TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS),
)
"""Columns a loss may read."""


SCORES = ("old_log_probs", "entropys")
"""Columns that the driver reads for some options only."""


class TrainedRole(EngineWorker):
    """Verbs of a role whose engine is trained: its mini-batches and its checkpoints."""

    def mini_batches(self, data: DataProto, engine: Engine, default: MiniBatches) -> Iterator[DataProto]:
        """This rank's rows of each optimizer step, as many steps on every rank.

        The driver chooses them (``step_rows``). Where it does not, every rank splits its equal part in the same way.
        """
        steps, ranks = data.step_rows, engine.topology.dp_size
        if steps is None:
            if default.rows % ranks:
                raise ValueError(
                    f"a mini-batch of {default.rows} rows does not divide among {ranks} ranks, and this batch does not "
                    "say which rows each of them takes: call the trainer's balance_batch(batch, metrics) before the "
                    f"update, or make ppo_mini_batch_size x rollout.n a multiple of {ranks}."
                )
            seed = derive_seed(self.seed, "shuffle", int(data.meta_info.get("global_steps", 0)))
            # every rank shuffles with the same seed, so that their steps hold rows of the same positions
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
    def verify_checkpoint(self, local_path: str) -> tuple[dict[str, str], dict[str, str]]:
        """File -> what is wrong with it, of those `load_checkpoint` reads from ``local_path``; and of the others."""
        return self.checkpoints.verify(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> str:
        """Continue from the folder ``local_path``; returns a remark for the user, or nothing."""
        return self.checkpoints.load(local_path, del_local_after_load)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def delete_checkpoints(self, local_paths: list[str]) -> None:
        """Delete folders this role has saved, on every node."""
        self.checkpoints.delete(local_paths)


class ReferenceRole(HybridWorker):
    """Verbs of the frozen reference."""

    def init_reference(self) -> None:
        """Load the reference model: the actor's own starting point, or ``ref.model.path``."""
        self.reference = self.frozen_model(self.config.ref, "ref", path=self.config.ref.own_path)

    @property
    def base_model_is_reference(self) -> bool:
        """Whether the actor below its adapter is the reference."""
        return self.actor.has_adapter and not (self.config.ref.model and self.config.ref.model.path)

    def use_base_model_as_reference(self) -> None:
        """The actor below its adapter is the reference: no second copy of the model."""
        self.reference = None
        self.report_mesh("ref", self.actor)

    @contextmanager
    def comparison(self) -> Iterator[Reference]:
        """Let the policy's update compare whole distributions with the reference's, or the only teacher's, within the
        block, in which that is on the device.

        Raises:
            ValueError: no role of this process holds it.
        """
        teacher = self.distillation if self.distillation and self.distillation.distillation_loss.is_full else None
        if teacher is None and self.base_model_is_reference:
            yield Reference.of_base_model(self.actor)
            return
        option, role, engine = "actor.kl_loss_type=full", "ref", None
        options: dict[str, Any] = {}
        if teacher is not None:
            option, role = f"distillation.distillation_loss.loss_mode={teacher.distillation_loss.loss_mode}", "teacher"
            options = {"whose": role, "temperature": teacher.temperature, "beta": teacher.distillation_loss.beta}
        holder = self.fused_worker_dict.get(role)
        if isinstance(holder, HybridWorker):
            engine = holder.reference if teacher is None else next(iter(holder.teachers.values()))
        if engine is None:
            raise ValueError(
                f"{option}: the {'reference' if teacher is None else 'teacher'} is not in the actor's processes, and "
                f"its distributions do not travel. Map Role.{'RefPolicy' if teacher is None else 'Teacher'} to the "
                f"actor's resource pool, or use {'low_var_kl' if teacher is None else 'forward_kl_topk'}."
            )
        # both models are on the device at once: the update reads the reference's hidden states
        with engine.on_device():
            yield Reference.of(engine, self.actor, option, **options)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="ref", reads=TOKENS, balanced=True, stays=("ref_log_prob",))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under the reference: adds ``ref_log_prob`` (B, R)."""
        split, temperature = self.config.ref.log_prob_split, self.config.rollout.temperature
        data = self.image_inputs.filled(data)
        engine = self.reference or self.actor
        adapter_off = nullcontext() if self.reference else self.actor.without_adapter()
        with self.ledger.phase("ref_log_prob"), engine.on_device(), adapter_off:
            scored = engine.infer(data, Want.LOG_PROBS, split, temperature=temperature)
        return scored.rename("log_probs", "ref_log_prob")


class PolicyRole(ReferenceRole, TrainedRole):
    """Verbs of the policy being trained."""

    def policy_spec(self) -> ModelSpec:
        """The model to train."""
        return self.spec_with_head("lm")

    def spec_with_head(self, head: Literal["lm", "value", "reward"], new_head: bool = False) -> ModelSpec:
        """The model of the section with that head."""
        config = self.config
        spec = model_spec(
            config.model,
            config.actor.sharding,
            head,
            use_torch_compile=config.actor.use_torch_compile,
            freeze_vision_tower=config.actor.freeze_vision_tower,
            remove_padding=config.actor.use_remove_padding,
        )
        return self.sharing_prompts(replace(spec, new_head=new_head))

    def init_policy(self) -> None:
        """Load the model, shard it, and build its loss."""
        config = self.config
        self.actor = self.model_engine(
            self.policy_spec(),
            config.actor,
            mesh="actor",
            train=True,
        )
        self.ppo_loss = PPOLoss(config.actor, config.rollout.response_length)
        if self.distillation is not None:
            options = self.distillation.distillation_loss
            self.ppo_loss = DistillationLoss(config.actor, options, config.rollout.response_length)
        self.checkpoint_manager(
            self.actor,
            self.tokenizer_path or config.model.path,
            config.actor.checkpoint,
            config.model.trust_remote_code,
            config.model.custom_chat_template,
            lambda: self.tokenizer,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=TOKENS, balanced=True, stays=SCORES)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under the current policy: adds ``old_log_probs`` and ``entropys``, both (B, R).

        Also ``entropy_sums`` (B,) float64, each row's over the tokens of ``response_mask``, if the batch has that; with
        ``actor.calculate_sum_pi_squared`` also ``sum_pi_squared`` (B, R).
        """
        rollout, want = self.config.rollout, Want.LOG_PROBS | Want.ENTROPY
        if self.config.actor.calculate_sum_pi_squared:
            want |= Want.SUM_PI_SQUARED
        data = self.image_inputs.filled(data)
        with self.ledger.phase("log_prob"), self.actor.on_device():
            self.check_own_canaries()
            scored = self.actor.infer(data, want, rollout.log_prob_split, temperature=rollout.temperature)
        return _named_scores(scored, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=UPDATE_COLUMNS, balanced=True, stays=SCORES)
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
            self.check_own_canaries()  # where no log-probs were computed before
            for mini in self.mini_batches(data, self.actor, MiniBatches.of(config, self.config.rollout.n)):
                step, scored = self.actor.train_and_score(
                    mini, self.ppo_loss, want, config.update_split, temperature, reference
                )
                metrics.add(step, prefix="actor")
            metrics.add({"actor/lr": self.actor.learning_rate()})
            # one step of the schedule a batch, not a mini-batch: total_training_steps counts batches
            self.actor.step_schedule()
        metrics.add(self.ledger.metrics())
        scored.meta_info["metrics"] = metrics.lists()
        return _named_scores(scored, data) if want else scored


def _named_scores(scored: DataProto, data: DataProto) -> DataProto:
    """Return the engine's scores of ``data`` as the driver names them, with the sum of each row's entropy."""
    if "response_mask" in data:
        scored.put("entropy_sums", scored.ragged("entropy").row_sums(data.ragged("response_mask")))
    return scored.rename(["log_probs", "entropy"], ["old_log_probs", "entropys"])


class ValueRole(TrainedRole):
    """Verbs of the critic."""

    config: CriticConfig
    critic: Engine

    def init_critic(self) -> None:
        """Load the model with a value head, and build its loss."""
        config = self.config
        self.critic = self.model_engine(
            model_spec(config.model, config.sharding, "value", remove_padding=config.model.use_remove_padding),
            config,
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


class ActorRolloutRefWorker(PolicyRole, RolloutRole, ReferenceRole):
    """Policy, rollout and reference; its ``role`` names those that this process plays."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load what the role needs; call once."""
        if "rollout" in self.role:
            get_rollout_class(self.config.rollout.name)  # a missing package is reported before models load
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            if "rollout" in self.role:
                sends_adapter(self.config, self.device)  # and so is a sync that cannot be
            if "actor" in self.role:
                self.init_policy()
            if "rollout" in self.role:
                self.init_rollout()
            # needs no second copy of the weights, so it is asked before the reference is loaded
            if "actor" in self.role and self.base_model_is_reference:
                self.use_base_model_as_reference()
            elif "ref" in self.role:
                self.init_reference()


class GenerationWorker(RolloutRole):
    """A rollout engine with the weights of a model's folder, which stay as they are: nothing is trained."""

    weights_version = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model, hand its weights to the engine, and let go of it; call once."""
        config = self.config
        get_rollout_class(config.rollout.name)  # a missing package is reported before the model loads
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            sends_adapter(config, self.device)
            spec = model_spec(config.model, config.actor.sharding, "lm")
            if config.rollout.dtype != "auto":  # the engine's own: a wider copy would be cast on its way
                dtype = PrecisionType.to_str(PrecisionType.to_dtype(config.rollout.dtype))
                spec = replace(spec, param_dtype=dtype, compute_dtype=dtype)
            self.actor = self.model_engine(spec, config.actor, mesh="actor", train=False)
            self.init_rollout()
            with self.actor.on_device():
                with self.rollout_phase("wake"):
                    self.rollout.wake(("weights",))
                with self.rollout_phase("sync"):
                    self.sync_rollout()
                self.rollout.wake(("kv_cache",))
                self.weights_version = self.actor.version
                self.generate_canary(self.weights_version)
                self.check_own_canaries()
            del self.actor
        empty_cache(torch.device(self.device))

    @contextmanager
    def rollout_mode(self, timing: dict[str, float]) -> Iterator[RolloutEngine]:
        """The engine as it is: it has its device alone, and its weights stay."""
        timing["reshard"] = 0.0
        yield self.rollout

    def newest_version(self, meta: Mapping[str, Any]) -> int:
        """Version of the weights of the folder."""
        return self.weights_version


class CriticWorker(ValueRole):
    """The critic."""

    role = "critic"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the critic; call once."""
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.init_critic()
