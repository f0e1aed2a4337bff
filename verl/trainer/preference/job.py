"""Runs of preference training: those of supervised fine-tuning with other trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl.config.preference import DPOConfig, RewardTrainConfig
from verl.trainer.sft.job import SFTJob

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import SFTTrainer


class DPOJob(SFTJob):
    """A run of ``verl dpo``."""

    root = DPOConfig

    @property
    def trainer_cls(self) -> type[SFTTrainer]:
        """The class of the trainer."""
        from verl.trainer.preference.trainer import DPOTrainer

        return DPOTrainer


class RewardJob(SFTJob):
    """A run of ``verl rm``."""

    root = RewardTrainConfig
    goes_on = "To score responses with it: reward_model.enable=true reward_model.model.path={}"

    @property
    def trainer_cls(self) -> type[SFTTrainer]:
        """The class of the trainer."""
        from verl.trainer.preference.trainer import RewardTrainer

        return RewardTrainer
