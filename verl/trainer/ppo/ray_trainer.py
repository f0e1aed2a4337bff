"""RayPPOTrainer: the training loop of PPO and its relatives, driven from a single process.

The driver holds prompts, rewards and advantages; models live in worker groups. Every stage is a method to override;
another estimator needs only a registered function. The same loop runs on Ray and on the local controller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.aggregate import agg_loss, agg_rows
from verl.algorithms.kl import get_kl_controller
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column
from verl.checkpoint import run_state as checkpoint
from verl.checkpoint.run_state import RunCheckpoints, saved_groups
from verl.config.unused_options import check_unused_options
from verl.data.loader import build_dataset, build_train_loader, build_val_loader
from verl.protocol import DataProto
from verl.rewards.managers.early import early_scoring
from verl.rewards.managers.episode import reward_of_episodes
from verl.rewards.managers.rule import RuleRewardManager
from verl.rewards.managers.scoring import (
    compute_reward,
    error_counts,
    reward_column,
    without_failed,
    without_failed_episodes,
)
from verl.rewards.reward_model import by_style, check_texts, is_judged, judge_metrics
from verl.single_controller import get_controller
from verl.single_controller.background import BackgroundCall
from verl.telemetry.memory import MemoryReport, RunMemory
from verl.telemetry.metric import reduce_metrics
from verl.telemetry.profiler import marked_timer
from verl.trainer.buffer.rollout_buffer import RolloutBuffer, check_agent_names, engine_metrics, shown_tools, uids
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.checkpoint_callback import build_checkpoint_callback
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.trainer.ppo.early_stop import EarlyStop
from verl.trainer.ppo.experience import (
    Shaping,
    apply_kl_penalty,
    attach_reward,
    balance_metrics,
    check_estimator_waits,
    compute_advantage,
    compute_response_mask,
    difficulty_of,
    gigpo_metrics,
    keep_model_inputs,
    partition_plan,
    row_cost,
)
from verl.trainer.ppo.health import HealthMonitor
from verl.trainer.ppo.metric_utils import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    validate,
)
from verl.trainer.ppo.nonfinite import NonFiniteGuard
from verl.trainer.ppo.placement import (
    ResourcePoolManager,
    Role,
    WorkerType,
    need_critic,
    need_ref_log_prob,
    need_reference_policy,
    ref_in_actor,
    start_worker_groups,
)
from verl.trainer.ppo.profiles import StepProfiles
from verl.trainer.ppo.recipe_names import RecipeNames
from verl.trainer.ppo.rollout_correction import (
    MismatchMonitor,
    bypass_old_log_probs,
    check_correction,
    reject_tokens,
    weigh_tokens,
)
from verl.trainer.ppo.run_log import RunLog, texts
from verl.trainer.ppo.step_bundle import StepRecorder
from verl.trainer.ppo.teachers import Teachers, served_reward_model
from verl.trainer.ppo.trajectories import JoinedTrajectories, resampled_by_score
from verl.trainer.restarts import note_step
from verl.utils.config import adopt_config, typed_config
from verl.utils.import_utils import import_users_modules
from verl.utils.py_functional import derive_seed

_timer = marked_timer  # its name until v0.4

__all__ = [
    "AdvantageEstimator",
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "WorkerType",
    "agg_loss",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_data_metrics",
    "compute_response_mask",
    "compute_reward",
    "compute_throughout_metrics",
    "compute_timing_metrics",
    "core_algos",
    "marked_timer",
    "reduce_metrics",
]


class RayPPOTrainer(RecipeNames):
    """PPO and its relatives on worker groups.

    Args:
        config: the whole tree, as ``load_ppo_config`` or as hydra gives it; of the latter, ``self.config`` is a checked
            copy.
        tokenizer, processor: of the policy.
        role_worker_mapping: role -> worker class.
        resource_pool_manager: role -> pool of devices.
        ray_worker_group_cls: a worker-group class; it decides the controller. None: that of ``trainer.controller``.
        reward_fn, val_reward_fn: reward managers for training and validation.
        train_dataset, val_dataset, collate_fn, train_sampler: sources of prompts. None: as ``data`` says;
            without ``data.val_files`` nothing is validated.
        device_name: overrides ``trainer.device``.
    """

    options: Any = None
    """``config`` as typed sections, which verl itself reads. A script may change ``config`` before `init_workers`."""

    generates_ahead = False
    """Whether the stages of this class may run while the next batch is generated: ``rollout.max_staleness``."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: dict[Role, WorkerType],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type | None = None,
        processor: Any = None,
        reward_fn: Callable | None = None,
        val_reward_fn: Callable | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        self.config = adopt_config(config)
        self.options = config = typed_config(self.config)
        self.early_stop = EarlyStop(config.trainer)
        import_users_modules(config.actor_rollout_ref.model.external_lib)
        if config.actor_rollout_ref.generates_ahead and not self.generates_ahead:
            raise ValueError(
                f"actor_rollout_ref.rollout.max_staleness={config.actor_rollout_ref.rollout.staleness}: "
                f"{type(self).__name__} generates each batch when it is needed. Let it inherit from "
                "verl.trainer.ppo.ray_trainer.OneStepOffTrainer, or set 0."
            )
        self.tokenizer, self.processor = tokenizer, processor
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.controller = get_controller(getattr(ray_worker_group_cls, "controller", config.trainer.controller))
        resource_pool_manager.controller = self.controller
        self.ray_worker_group_cls = ray_worker_group_cls
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.device_name = device_name or config.trainer.device
        self.use_critic = need_critic(config)
        self.skips_old_log_probs = config.actor_rollout_ref.actor.skip_old_log_probs
        if self.skips_old_log_probs:
            check_estimator_waits(config.algorithm.adv_estimator)
            _ = self.options.actor_rollout_ref.rollout.log_prob_split  # not unread because the pass is left out
        check_correction(config)
        self.correction = config.algorithm.rollout_correction
        self.row_cost = row_cost(config.actor_rollout_ref.model.path)
        self.use_reference_policy = need_reference_policy(config)
        self.ref_in_actor = ref_in_actor(config)
        self.use_rm, self.teachers = config.reward_model.enable, Teachers(config.distillation)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        rollout = config.actor_rollout_ref.rollout
        self.shaping = Shaping(config.algorithm, rollout.response_length, config.data.reward_fn_key)
        self.run_log = RunLog(config, tokenizer)
        self.say = self.run_log.say
        self.mismatch = MismatchMonitor(config, tokenizer.decode)
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)
        self.teachers.check_sources([self.train_dataset])
        self.teachers.check_servers(self.tokenizer)
        check_agent_names(config, [self.train_dataset, self.val_dataset])
        self.steps_per_epoch = len(self.train_dataloader)
        self.buffer = RolloutBuffer(config, self.train_dataloader, self.say)
        self.checkpoints = RunCheckpoints(config, self.say, self.timed)
        self.checkpoint_callback = build_checkpoint_callback(self.config)
        keys = config.trainer
        self.nonfinite_guard = NonFiniteGuard(keys.nonfinite_tolerance, keys.on_nonfinite, tokenizer.decode)
        self.recorder = StepRecorder(keys, self.say)
        self.profiles = StepProfiles(config.profile_plan, keys.default_local_dir, self.say)
        self.health = HealthMonitor(config, self.total_training_steps)
        self.token_entropy: float | None = None
        self.has_warned_unused_reward = self.has_warned_single_turns = self.has_checked_keys = False
        self.memory_report = MemoryReport(self.say)
        ledger = Path(config.trainer.default_local_dir).expanduser() / "memory.jsonl"
        self.run_memory = RunMemory(ledger if config.trainer.memory_ledger else None)
        self.global_steps = 0
        self.bytes_sent = 0
        self.validations: list[tuple[int, dict[str, float]]] = []
        self.metrics: dict[str, float] = {}
        self.timing: dict[str, float] = {}
        self.pending_reward: BackgroundCall | None = None
        self.worker_groups: dict[Role, Any] = {}

    def _create_dataloader(self, train_dataset: Any, val_dataset: Any, collate_fn: Any, train_sampler: Any) -> None:
        """Set the loaders, and ``total_training_steps``."""
        data, trainer = self.config.data, self.config.trainer
        schemas = shown_tools(self.config.actor_rollout_ref.rollout)

        def dataset(given: Any, files: Any, is_train: bool) -> Any:
            if given is not None:
                return given
            return build_dataset(data, files, self.tokenizer, self.processor, is_train, tool_schemas=schemas)

        has_validation = val_dataset is not None or typed_config(self.config).data.has_validation

        self.train_dataset = dataset(train_dataset, data.train_files, True)
        self.val_dataset = dataset(val_dataset, data.val_files, False) if has_validation else None
        self.train_dataloader = build_train_loader(data, self.train_dataset, collate_fn, train_sampler, self.seed)
        self.val_dataloader = None
        if has_validation:
            self.val_dataloader = build_val_loader(data, self.val_dataset, collate_fn, self.seed)
        self.total_training_steps = trainer.total_training_steps or len(self.train_dataloader) * trainer.total_epochs
        if self.config is not self.options:  # a script's tree: it may hand the sections to workers itself
            for optim in (self.config.actor_rollout_ref.actor.optim, self.config.critic.optim):
                if optim.total_training_steps <= 0:
                    optim.total_training_steps = self.total_training_steps

    @property
    def seed(self) -> int:
        return self.config.trainer.seed

    @property
    def last_checkpoint(self) -> Path | None:
        """Folder of the newest complete checkpoint."""
        return self.checkpoints.last

    # -- the algorithm ------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Run all `steps`."""
        deque(self.steps(), maxlen=0)

    def steps(self) -> Iterator[tuple[int, DataProto]]:
        """PPO (Schulman et al. 2017, arXiv:1707.06347) with the roles of HybridFlow (arXiv:2409.19256).

        Sample responses, score them, evaluate them under the policy, the reference and the critic, estimate how much
        better than expected each was, and improve the critic and the policy. Yields each finished step and its batch.
        """
        self.start()
        for step, prompts in self.prompt_batches():
            with self.profiles.step(step, self.idle_groups), self.timed("step"), self.recorder.step(self):
                batch = self.rollout(prompts)  # y ~ pi_old(.|x), n per prompt
                batch = self.score(batch)  # r(x, y)
                batch = self.choose_groups(batch)  # with filter_groups: those whose rewards differ, drawing more
                batch = self.evaluate(batch)  # log pi_old, log pi_ref, V
                batch = self.estimate_advantages(batch)  # KL in reward, then GAE | GRPO | RLOO | ...
                self.improve(batch)  # critic, then actor once past critic_warmup
            self.finish_step(step, batch)  # validate, save, log
            yield step, batch
        self.stop()

    def rollout(self, prompts: DataProto) -> DataProto:
        """Sample n responses a prompt from the newest policy; adds row 1 of the data flow."""
        n = self.config.actor_rollout_ref.rollout.n
        with self.timed("gen"):
            rollouts = self.buffer.rollouts(prompts, n, self.global_steps)
            prompts, batch = rollouts.prompts, rollouts.batch
            self.metrics.update(rollouts.metrics)
            self.timing.update(rollouts.timing | batch.meta_info.pop("timing", {}))
        self.metrics.update(self.engine_metrics())
        if self.config.algorithm.adv_estimator == "remax":
            with self.timed("gen_max"):
                number = {uid: place for place, uid in enumerate(prompts.non_tensor_batch["uid"])}
                rows = [number[uid] for uid in batch.non_tensor_batch["uid"]]
                batch.put("reward_baselines", self.greedy_rewards(prompts)[rows])
        if "response_mask" not in batch.keys():
            batch.put("response_mask", compute_response_mask(batch))
        self.divide_batch(batch)
        return batch

    def divide_batch(self, batch: DataProto) -> None:
        """Give the batch its partition plan, and its metadata the number of tokens of each row."""
        self.recorder.take(batch)
        self.balance_batch(batch, self.metrics)
        batch.meta_info["global_token_num"] = batch.ragged("attention_mask").layout.lengths.tolist()

    def choose_groups(self, batch: DataProto) -> DataProto:
        """With ``algorithm.filter_groups``, sample until ``data.train_batch_size`` groups differ in reward."""
        group_filter = self.buffer.group_filter
        if group_filter is None:
            return batch
        while not group_filter.add(batch, self.global_steps):
            batch = self.score(self.rollout(self.buffer.more_prompts(self.global_steps)))
        batch, metrics = group_filter.finish()
        self.metrics.update(metrics)
        self.divide_batch(batch)
        return batch

    def balance_batch(self, batch: DataProto, metrics: dict, logging_prefix: str = "global_seqlen") -> None:
        """Plan which rows make each optimizer step, and their partition among ranks; the rows stay in order."""
        plan = batch.partition_plan = partition_plan(self.options, self.row_cost, self.global_steps)
        if self.config.trainer.balance_batch:
            ranks = len(self.actor_wg.mesh("actor").sources)
            metrics.update(balance_metrics(batch, plan, self.row_cost, ranks, logging_prefix))

    def score(self, batch: DataProto) -> DataProto:
        """Reward every response; adds ``token_level_scores`` (B, R) and the reward function's extra columns.

        Where responses are scored as they end, or with ``reward_model.launch_reward_fn_async``, a thread waits for the
        last scores, and `estimate_advantages` for the thread.
        """
        with self.timed("reward"):
            self.warn_unused_reward(batch)
            is_late, is_served = self.rewards_come_late, self.buffer.early_scoring is not None and self.use_rm
            if self.use_rm and not (is_late and is_served):
                batch = self.judged(batch)
                self.metrics.update(judge_metrics(batch))
            if not is_late:
                return self.rewarded(batch, *reward_column(batch, self.episode_reward_fn))
            snapshot = batch.select(deepcopy=False)  # later stages add columns meanwhile

            def scored() -> tuple[DataProto, Column, dict[str, list]]:
                rows = self.judged(snapshot) if is_served else snapshot
                added = [name for name in rows.keys() if name not in snapshot.keys()]
                return rows.select(added, [], []), *reward_column(rows, self.episode_reward_fn)

            self.pending_reward = BackgroundCall(scored)
            return batch

    @property
    def rewards_come_late(self) -> bool:
        """Whether log-probs and values are computed while the last rewards are awaited."""
        if self.buffer.group_filter is not None:
            return False
        # a stage of a subclass may read the rewards of the one before
        stages = ("score", "choose_groups", "evaluate")
        are_ours = all(getattr(type(self), name) is getattr(RayPPOTrainer, name) for name in stages)
        is_early = self.buffer.early_scoring is not None and are_ours
        return is_early or self.config.reward_model.launch_reward_fn_async

    @property
    def episode_reward_fn(self) -> Any:
        """The reward manager, with the environment's rewards as ``env.reward`` says."""
        return reward_of_episodes(self.reward_fn, self.options.env.reward)

    def warn_unused_reward(self, batch: DataProto) -> None:
        """Warn once if agent loops return rewards, so that the user's reward model or function is not called."""
        asks_function = self.options.env.reward in ("function", "sum")
        if self.has_warned_unused_reward or asks_function or "rm_scores" not in batch.keys():
            return
        self.has_warned_unused_reward = True
        path, model = self.config.custom_reward_function.path, self.config.reward_model
        unused = [f"custom_reward_function.path={path}"] * (path is not None and not self.use_rm)
        unused += [f"reward_model.enable=true ({model.model.path})"] * self.use_rm
        if unused and isinstance(self.reward_fn, RuleRewardManager):
            self.say(
                f"step {self.global_steps}: the agent loops return rewards (AgentLoopOutput.reward_score), so "
                f"{unused[0]} is not called in training. Take one of them out"
            )

    def rewarded(self, batch: DataProto, scores: Column, extra: dict[str, list]) -> DataProto:
        """Return the batch with the reward manager's scores and extra columns."""
        for name, count in error_counts(extra).items():
            self.metrics[name] = self.metrics.get(name, 0) + count
        return attach_reward(batch, scores, extra)

    def judged(self, batch: DataProto) -> DataProto:
        """Return the batch with the reward model's ``rm_scores``, unless agent loops returned rewards."""
        if "rm_scores" in batch.keys():
            return batch
        check_texts(batch)
        return batch.union(self.rm_wg.compute_rm_score(batch))

    def evaluate(self, batch: DataProto) -> DataProto:
        """Add log-probabilities under the policy that sampled and under the reference, and the critic's values.

        With ``algorithm.rollout_correction.rollout_is`` also ``rollout_is_weights`` (B, R), factors of the policy loss.
        """
        keep_model_inputs(batch)
        if self.correction.bypass_mode:
            bypass_old_log_probs(batch)
        elif not (self.skips_old_log_probs and self.updates_actor):
            with self.timed("old_log_prob"):
                batch = self.with_log_probs(batch, self.actor_wg.compute_log_prob(batch))
        self.check_finite(batch)  # before weights, which are normalized over the batch
        self.metrics.update(weigh_tokens(batch, self.correction))
        if self.use_reference_policy and need_ref_log_prob(self.options):
            with self.timed("ref"):
                batch = batch.union(self.ref_wg.compute_ref_log_prob(batch))
        if self.teachers.score_rows:
            with self.timed("teacher"):
                batch, metrics = self.teachers.score(batch, self.teacher_wg)  # log pi_teacher
                self.metrics.update(metrics)
        if self.use_critic:
            with self.timed("values"):
                batch = batch.union(self.critic_wg.compute_values(batch))
        self.check_finite(batch)
        return batch

    def check_finite(self, batch: DataProto) -> None:
        """Find rows with NaN or infinity, and do as ``trainer.on_nonfinite`` says."""
        for name, rows in self.nonfinite_guard.check_columns(batch, self.global_steps).items():
            self.metrics[name] = self.metrics.get(name, 0) + rows

    def with_log_probs(self, batch: DataProto, scored: DataProto) -> DataProto:
        """Add ``old_log_probs`` (B, R) as the actor has ``scored`` them, and record entropy and mismatch."""
        shared = self.config.actor_rollout_ref
        mask = batch.ragged("response_mask")
        given, counts = "entropy_sums" in scored, valid_tokens(mask).lengths.double()
        sums = scored.column("entropy_sums") if given else scored.ragged("entropys").row_sums(mask)
        entropy = agg_rows(sums, counts, shared.actor.loss_agg_mode, shared.rollout.response_length)
        self.metrics["actor/entropy"] = entropy.item()
        self.token_entropy = agg_rows(sums, counts, "token-mean", 1.0).item() if counts.any() else None
        batch = batch.union(scored.select([name for name in scored.keys() if not name.startswith("entropy")]))
        if "rollout_log_probs" in batch.keys():
            metrics, warning = self.mismatch(batch, self.global_steps)
            self.metrics.update(metrics)
            if warning:
                self.say(warning)
        return batch

    def estimate_advantages(self, batch: DataProto) -> DataProto:
        """Add ``token_level_rewards``, ``advantages`` and ``returns``, each (B, R).

        The order: scores are shaped, KL is charged, responses are masked, advantages are estimated and shaped.
        """
        algorithm = self.config.algorithm
        if self.pending_reward is not None:
            with self.timed("reward"):
                pending, self.pending_reward = self.pending_reward, None
                columns, *rewards = pending.get()
                if columns.keys():  # of a reward model
                    batch = batch.union(columns)
                    self.metrics.update(judge_metrics(batch))
                batch = self.rewarded(batch, *rewards)
        trajectories = JoinedTrajectories(batch)  # the batch itself, where each row is a trajectory
        batch = trajectories.batch
        with self.timed("adv"), without_failed(batch, self.config.reward_model.on_error):
            self.metrics.update(self.shaping.shape_scores(batch))
            if algorithm.use_kl_in_reward:
                shaped = "token_level_rewards"
                batch, kl = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty, scores=shaped)
                self.metrics.update(kl)
            self.metrics.update(self.shaping.finish_rewards(batch))
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
            )
            if algorithm.adv_estimator == "gigpo":
                self.metrics.update(turns := gigpo_metrics(batch))
                is_agent = self.config.actor_rollout_ref.rollout.mode == "async"
                if is_agent and turns["gigpo/turns_per_response"] <= 1 and not self.has_warned_single_turns:
                    self.has_warned_single_turns = True
                    self.say(
                        f"algorithm.adv_estimator=gigpo: no response of step {self.global_steps} has a second turn, so "
                        "that advantages are those of grpo times episode_weight + step_weight"
                    )
            self.metrics.update(self.shaping.shape_advantages(batch))
        return trajectories.split()

    def improve(self, batch: DataProto) -> None:
        """Fit the critic to the returns, and move the policy along the advantages.

        Neither sees tokens that ``algorithm.rollout_correction`` rejects.
        """
        self.recorder.before_update(self)
        self.metrics.update(reject_tokens(batch, self.correction))
        batch.meta_info["global_steps"] = self.global_steps
        if self.config.algorithm.use_pf_ppo:
            batch = self.resampled(batch)
        if self.use_critic:
            with self.timed("update_critic"):
                self.record(self.critic_wg.update_critic(batch))
        if self.updates_actor:
            if self.config.actor_rollout_ref.actor.difficulty_loss_weight:
                batch.put("difficulty", difficulty_of(batch))
            with self.timed("update_actor"):
                updated = self.actor_wg.update_actor(batch)
                self.record(updated)
            if self.skips_old_log_probs:
                batch = self.with_log_probs(batch, updated.select(meta_info_keys=()))
                self.check_finite(batch)  # its gradient was not finite either, so no weight has changed

    def resampled(self, batch: DataProto) -> DataProto:
        """Return as many rows, sampled with replacement by their scores as ``algorithm.pf_ppo`` says."""
        seed = derive_seed(self.seed, "pf_ppo", self.global_steps)
        batch, metrics = resampled_by_score(batch, self.config.algorithm.pf_ppo, seed)
        self.metrics.update(metrics)
        return batch

    @property
    def updates_actor(self) -> bool:
        """Whether this step updates the policy: not while only the critic learns."""
        return self.global_steps > self.config.trainer.critic_warmup or not self.use_critic

    @property
    def validates(self) -> bool:
        """Whether there are prompts to validate with, and a reward manager that scores their responses."""
        return self.val_reward_fn is not None and self.val_dataset is not None

    # -- prompts and samples ------------------------------------------------------------------------------------------

    def prompt_batches(self) -> Iterator[tuple[int, DataProto]]:
        """Yield batches of prompts until ``total_training_steps``; each begins a step."""
        for step, prompts in self.buffer.prompt_batches(self.global_steps, self.total_training_steps):
            self.global_steps = step
            note_step(step)
            self.metrics, self.timing = {}, {}
            self.early_stop.begin_step()
            yield step, prompts
            if self.early_stop.reason is not None and step in self.checkpoints.steps:
                return

    def generate(self, prompts: DataProto, n: int, **options: Any) -> DataProto:
        """Return responses to ``prompts`` in this step; see `RolloutBuffer.generate`."""
        if self.buffer.engine is None:  # a recipe's own init_workers
            self.buffer.engine = self.actor_wg
        return self.buffer.generate(prompts, n, self.global_steps, **options)

    def engine_metrics(self) -> dict[str, float]:
        """Return what the rollout engines counted since the last call, as ``rollout/engine/*``.

        Nothing while they generate ahead: the call would wait for their responses.
        """
        return {} if self.buffer.generates_ahead else engine_metrics(self.rollout_wg or self.actor_rollout_wg)

    def greedy_rewards(self, prompts: DataProto) -> torch.Tensor:
        """Return the reward of each prompt's greedy response, (b,), for ReMax (Li et al. 2023, arXiv:2310.10505)."""
        baseline = self.generate(prompts.select(deepcopy=True), 1, do_sample=False)
        scores, _ = compute_reward(self.judged(baseline) if self.use_rm else baseline, self.episode_reward_fn)
        return scores.sum(-1)

    # -- start, validate, save, log, stop -----------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the worker processes and load the models."""
        self.options = typed_config(self.config)  # a script may have changed its tree since
        self.checkpoints.describe_run(self.options, self.train_dataset)
        groups = start_worker_groups(
            self.options,
            self.role_worker_mapping,
            self.resource_pool_manager,
            self.controller,
            self.total_training_steps,
            self.device_name,
            self.ray_worker_group_cls,
        )
        for group in groups.values():
            group.init_model()
        self.use_worker_groups(groups)

    def use_worker_groups(self, groups: dict[Role, Any]) -> None:
        """Use these worker groups, whose models are loaded."""
        self.worker_groups = groups
        self.actor_wg = self.actor_rollout_wg = groups.get(Role.ActorRollout) or groups[Role.Actor]
        self.rollout_wg = groups.get(Role.Rollout)
        self.critic_wg = groups.get(Role.Critic)
        self.rm_wg, self.teacher_wg = groups.get(Role.RewardModel), groups.get(Role.Teacher)
        if self.options.reward_model.asks_servers:
            self.rm_wg = served_reward_model(self.options.reward_model, self.rm_wg, self.tokenizer, self.actor_wg)
        self.ref_wg = self.ref_policy_wg = groups.get(Role.RefPolicy, self.actor_wg if self.ref_in_actor else None)
        self.buffer.connect(
            self.options, self.actor_wg, self.rollout_wg, self.tokenizer, self.processor, trainer_config=self.config
        )
        scorer = self.rm_wg if self.use_rm else self.reward_fn
        self.buffer.early_scoring = early_scoring(self.options, scorer, self.controller.driver_host)
        if self.buffer.agent_loops is not None:
            self.async_rollout_mode, self.async_rollout_manager = True, self.buffer.agent_loops  # names recipes know

    def start(self) -> None:
        """Open the loggers, resume, and validate once before training."""
        trainer = self.config.trainer
        if not self.worker_groups:
            self.use_worker_groups(self.own_worker_groups())
        self.run_log.open(self.total_training_steps)
        self.load_checkpoint()
        if self.global_steps >= self.total_training_steps and not trainer.val_only:
            self.say(
                f"nothing is left to train: {self.global_steps} steps are done, this run asks for "
                f"{self.total_training_steps}. Raise trainer.total_training_steps or trainer.total_epochs to go on."
            )
            return
        if (trainer.val_before_train or trainer.val_only) and self.validates:
            metrics = self.validate()
            self.run_log.log(self.global_steps, metrics)
            self.run_log.progress.validated(self.global_steps, metrics)
        if trainer.val_only:
            self.total_training_steps = self.global_steps

    def finish_step(self, step: int, batch: DataProto) -> None:
        """Validate and save when it is time, dump samples, and log this step's numbers."""
        trainer = self.config.trainer
        last = step >= self.total_training_steps
        for group in self.worker_groups.values():
            if hasattr(group, "release_batches"):  # a user's may lack it
                group.release_batches()
        if without_gradient := self.nonfinite_guard.roles_without_gradient(self.metrics):
            self.recorder.without_gradient(self, without_gradient)
        self.nonfinite_guard.check(step, without_gradient)
        if trainer.rollout_data_dir:
            with self.timed("dump_rollout_generations"):
                self.run_log.dump(step, batch)
        if self.run_log.trace is not None:
            with self.timed("trace"):
                self.run_log.record(step, batch, self.timing.get("generate_sequences", self.timing.get("gen", 0.0)))
        is_test = trainer.test_freq > 0 and self.validates and (last or step % trainer.test_freq == 0)
        # an early end leaves no time to validate
        is_test = is_test and (last or not self.early_stop.is_due())
        if is_test:
            with self.timed("testing"):
                validation = self.validate()
            self.metrics.update(validation)
            self.run_log.progress.validated(step, validation)
        self.finish_saving(wait=False)
        # a curriculum sampler, a dataset with on_batch_end, and health: their state is part of the checkpoint
        for listener, method in ((self.train_dataloader.sampler, "update"), (self.train_dataset, "on_batch_end")):
            if hasattr(listener, method):
                getattr(listener, method)(batch=batch)
        self.metrics.update(compute_data_metrics(batch=batch, use_critic=self.use_critic))
        self.note_health(step)
        ends = self.early_stop.is_due() and not last
        if ends or trainer.save_freq > 0 and (last or step % trainer.save_freq == 0):
            with self.timed("save_checkpoint"):
                self.save_checkpoint()
            self.early_stop.saved(self.timing["save_checkpoint"])
        n_gpus = self.resource_pool_manager.get_n_gpus()
        if trainer.memory_ledger:
            self.metrics.update(self.memory_report.metrics(self.idle_groups.values()))
        epoch = (self.buffer.batches_read(step) - 1) // self.steps_per_epoch
        self.metrics.update({"training/global_step": step, "training/epoch": epoch})
        self.metrics.update(compute_timing_metrics(batch=batch, timing_raw=self.timing))
        self.metrics.update(compute_throughout_metrics(batch=batch, timing_raw=self.timing, n_gpus=n_gpus))
        self.metrics.update(self.traffic_metrics(batch))
        if last or ends or is_test or step % trainer.log_freq == 0:
            self.run_log.log(step, self.metrics)
        self.run_log.step_done(step, self.metrics, batch)
        self.health.check(step, self.last_checkpoint)
        if self.updates_actor and not self.has_checked_keys:  # every role has run: trainer.unread_keys
            self.has_checked_keys = True
            groups = [*self.worker_groups.values(), *self.buffer.worker_groups]
            if all(hasattr(group, "options_read") for group in groups):  # workers of a user's own may lack it
                read = {key for group in groups for keys in group.options_read() for key in keys}
                check_unused_options(self.options, read, self.say)

    def traffic_metrics(self, batch: DataProto) -> dict[str, float]:
        """Return ``perf/bytes_per_token``: bytes between driver and workers since the last step, for each valid token.

        Generation and validation count too. Nothing where the only rank lives in the driver.
        """
        groups = [group for group in self.worker_groups.values() if hasattr(group, "traffic")]  # a user's may lack it
        total = sum(traffic.nbytes for traffic in {id(group.traffic): group.traffic for group in groups}.values())
        new, self.bytes_sent = total - self.bytes_sent, total
        return {"perf/bytes_per_token": new / sum(batch.meta_info["global_token_num"])} if new > 0 else {}

    def note_health(self, step: int) -> None:
        """Record the memory of the run's processes, and say which rules of ``trainer.health`` the step broke."""
        self.metrics.update(self.run_memory.note(step, self.worker_groups))
        found = self.health.note(self.metrics, self.token_entropy, self.run_memory.own_MiB, self.run_memory.free_MiB)
        self.metrics.update(self.health.metrics)
        for sentence in found:
            self.say(f"step {step}: {sentence}")

    def stop(self) -> None:
        """Finish saving, and close the loggers."""
        self.profiles.end(self.global_steps)
        self.finish_saving()
        if message := self.health.summary():
            self.say(message)
        self.run_log.close()

    def validate(self) -> dict[str, float]:
        """Sample ``val_kwargs.n`` responses to every validation prompt and score them."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        folder = self.config.trainer.validation_data_dir
        metrics, samples = validate(
            self.validation_responses(n),
            self.validation_rewards,
            partial(texts, tokenizer=self.tokenizer),
            Path(folder) if folder else None,
            self.global_steps,
            self.config.data.reward_fn_key,
            self.tokenizer.batch_decode,
            self.run_log.token_columns,
            self.config.trainer.rollout_data_tokens,
        )
        self.engine_metrics()  # those of validation are not the next step's
        self.validations.append((self.global_steps, metrics))
        self.run_log.show(self.global_steps, samples)
        return metrics

    def validation_responses(self, n: int) -> Iterator[DataProto]:
        """Yield n responses to each validation prompt, a batch at a time; independent of the batch size."""
        first = 0
        for rows in self.val_dataloader:
            prompts = DataProto.from_single_dict(rows)
            prompts.non_tensor_batch["uid"] = uids("val", len(prompts), first)
            batch = self.generate(prompts.repeat(n, interleave=True), n, validate=True, first=first)
            yield from by_style(without_failed_episodes(batch)) if self.use_rm else [batch]
            first += len(prompts)

    def validation_rewards(self, batch: DataProto) -> tuple[torch.Tensor, dict[str, list]]:
        """Call `compute_reward`; the reward model scores rows whose ``reward_model.style`` is ``model``."""
        if self.use_rm and is_judged(batch):
            batch = self.judged(batch)
        return compute_reward(batch, reward_of_episodes(self.val_reward_fn, self.options.env.reward))

    def save_checkpoint(self) -> None:
        """Write models, optimizers, the loader's position and the driver's state; marked complete once all is written.

        With ``checkpoint.async_save`` that is later, but for the last step.
        """
        self.finish_saving()
        groups = saved_groups(self.worker_groups)
        folder = self.checkpoints.begin(self.global_steps, groups)
        state = {
            "kl_ctrl_in_reward": self.kl_ctrl_in_reward.state_dict(),
            "running_scores": self.shaping.state_dict(),
            "health": self.health.state_dict(),
            "validations": self.validations[:1] + self.validations[1:][-1:],  # which the closing summary compares
            "saved_steps": self.checkpoints.steps,
        }
        checkpoint.save_driver_state(folder, self.buffer.position(), state, self.buffer.responses_ahead())
        checkpoint.save_options(folder, self.options.to_dict())
        self.buffer.save(folder)
        self.checkpoints.unfinished = self.global_steps
        if not self.checkpoints.in_background(groups) or self.global_steps >= self.total_training_steps:
            self.finish_saving()

    def finish_saving(self, wait: bool = True) -> None:
        """Mark the last saved step complete, and call the user's callback; without ``wait`` only if all is written."""
        step = self.checkpoints.unfinished
        self.checkpoints.finish(saved_groups(self.worker_groups), wait)
        if step is not None and self.last_checkpoint == (folder := self.checkpoints.folder(step)):
            with self.timed("checkpoint_callback"):
                self.checkpoint_callback.on_save(trainer=self, global_step=step, checkpoint_dir=str(folder))

    def load_checkpoint(self) -> None:
        """Continue where ``trainer.resume_mode`` says, at the same prompt, weights and random numbers."""
        folder = checkpoint.folder_to_resume(self.config.trainer)
        if folder is None:
            return
        groups = saved_groups(self.worker_groups)
        folder = self.checkpoints.good_one(folder.absolute(), groups)
        self.checkpoints.compare(folder, self.options)
        remarks = self.checkpoints.load_groups(folder, groups)
        state = checkpoint.load_driver_state(folder, self.train_dataloader)
        self.global_steps = checkpoint.step_of(folder)
        remarks.append(self.buffer.load(folder, self.global_steps))
        if "kl_ctrl_in_reward" in state:
            self.kl_ctrl_in_reward.load_state_dict(state["kl_ctrl_in_reward"])
        self.shaping.load_state_dict(state.get("running_scores", {}))
        self.health.load_state_dict(state.get("health", {}))
        self.validations = [(step, metrics) for step, metrics in state.get("validations", [])]
        self.checkpoints.loaded(folder, state.get("saved_steps", []), groups)
        done = f"{self.global_steps} of {self.total_training_steps} steps are done"
        self.say(f"resumed from {folder}: {done}{''.join(remarks)}")

    def record(self, result: DataProto) -> None:
        """Record the metrics of an update, averaged over its optimizer steps."""
        self.metrics.update(reduce_metrics(result.meta_info["metrics"]))

    def timed(self, name: str) -> Any:
        """Count the seconds of a block as ``timing_s/{name}``."""
        return self.run_log.timed(name, self.timing)


class OneStepOffTrainer(RayPPOTrainer):
    """One-step-off-policy training (``rollout.max_staleness=1``): the next batch is generated while one is trained on.

    Step k trains on responses of the weights after step k - 2. ``old_log_probs`` are computed at step k, so that the
    ratio a loss clips is that of the update; the rollout's own are in ``rollout_log_probs``.

    Source: Noukhovitch et al. 2024, Asynchronous RLHF (arXiv:2410.18252).
    """

    generates_ahead = True
