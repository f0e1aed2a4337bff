"""Names that recipes written for verl use on a trainer.

A recipe that overrides ``fit`` calls the older names; one that overrides ``_validate`` expects the loop to call it.
Nothing of verl itself uses this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.config.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.trainer.ppo.placement import Role
from verl.trainer.ppo.rollout_correction import weigh_tokens
from verl.trainer.ppo.run_log import RunLog, dump_samples

RENAMED = {
    "_validate": "validate",
    "_save_checkpoint": "save_checkpoint",
    "_load_checkpoint": "load_checkpoint",
    "_balance_batch": "balance_batch",
}
"""Older name -> name of the method. In a subclass, overriding one overrides the other."""


class RecipeNames:
    """Mixin of ``RayPPOTrainer``."""

    use_rm = False
    ref_in_actor = False
    async_rollout_mode = False
    hybrid_engine = True

    global_steps: int
    run_log: RunLog
    correction: RolloutCorrectionConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for pair in RENAMED.items():
            for given, other in (pair, pair[::-1]):
                if given in vars(cls) and other not in vars(cls):
                    setattr(cls, other, vars(cls)[given])

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        scores: Sequence[float],
        reward_extra_infos_dict: Mapping[str, Sequence],
        dump_path: str | Path,
        gts: Sequence[Any] | None = None,
    ) -> None:
        """Write samples to ``{dump_path}/{step}.jsonl``."""
        gts = [None] * len(inputs) if gts is None else gts
        dump_samples(dump_path, self.global_steps, inputs, outputs, scores, gts, reward_extra_infos_dict)

    def _maybe_log_val_generations(
        self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]
    ) -> None:
        """Show some samples in the loggers, if ``trainer.log_val_generations`` asks for it."""
        self.run_log.show(self.global_steps, list(zip(inputs, outputs, scores, strict=True)))

    def own_worker_groups(self) -> dict[Role, Any]:
        """Return the groups that a recipe's own ``init_workers`` has started, under the names it gives them."""
        names = {
            Role.ActorRollout: "actor_rollout_wg",
            Role.Critic: "critic_wg",
            Role.RefPolicy: "ref_policy_wg",
            Role.RewardModel: "rm_wg",
            Role.Teacher: "teacher_wg",
        }
        groups = {role: getattr(self, name, None) for role, name in names.items()}
        if groups[Role.ActorRollout] is None:
            raise ValueError(
                f"{type(self).__name__}.actor_rollout_wg is not set: no workers are there to train. Call "
                "init_workers() before fit(), and let one of your own set it."
            )
        return {role: group for role, group in groups.items() if group is not None}

    @property
    def idle_groups(self: Any) -> dict[Role, Any]:
        """Worker groups that answer a call at once: without a rollout that generates ahead."""
        busy = self.rollout_wg if self.buffer.generates_ahead else None
        return {role: group for role, group in self.worker_groups.items() if group is not busy}

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, dict]:
        """Weigh or reject tokens as ``algorithm.rollout_correction`` says: the batch, and the metrics of it."""
        return batch, weigh_tokens(batch, self.correction)

    def _start_profiling(self, do_profile: bool = True) -> None:
        """Have those worker groups begin to record that can: workers with a `DistProfilerExtension`."""
        for group in self.own_worker_groups().values() if do_profile else ():
            if hasattr(group, "start_profile"):
                group.start_profile()

    def _stop_profiling(self, do_profile: bool = True) -> None:
        """End what ``_start_profiling`` began."""
        for group in self.own_worker_groups().values() if do_profile else ():
            if hasattr(group, "stop_profile"):
                group.stop_profile()

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Take the prompts' columns out of a batch, as the input of ``generate_sequences``."""
        names = [name for name in ("raw_prompt_ids", "raw_prompt") if name in batch.non_tensor_batch]
        return batch.pop(["input_ids", "attention_mask", "position_ids"], names)
