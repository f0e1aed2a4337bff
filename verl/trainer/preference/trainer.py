"""PreferenceTrainer: the loop of supervised fine-tuning on preference pairs, for policies and for reward models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.losses.preference import PairwiseLoss, policy_pair_loss, reward_model_loss
from verl.batch.partition import MiniBatches, PartitionPlan
from verl.config.preference import DPOConfig, RewardTrainConfig
from verl.data.preference_dataset import PreferenceDataset, pairs_to_batch
from verl.protocol import DataProto
from verl.telemetry.metric import reduce_metrics
from verl.trainer.sft.trainer import SFTTrainer
from verl.workers.preference import PreferenceWorker, RewardTrainWorker

_SPEAKS_AFTER_S, _SPEAKS_EVERY_S = 2.0, 10.0


class PreferenceTrainer(SFTTrainer):
    """What policies and reward models share: pairs stay together, and a step raises the chosen above the rejected."""

    scores = False
    """Whether the model scores whole texts."""
    loss: PairwiseLoss

    def read_examples(self, files: str | list[str], is_train: bool = True) -> Any:
        """The preference pairs of ``files``, as ``data`` says."""
        data = self.config.data
        most = data.train_max_samples if is_train else data.val_max_samples
        return PreferenceDataset(files, self.tokenizer, data, most, scores=self.scores)

    def collate(self, items: list) -> DataProto:
        """Join pairs into a batch of two rows each."""
        return pairs_to_batch(items)

    def partition_plan(self, method: str, mini_batches: MiniBatches | None = None) -> PartitionPlan:
        """How a call divides its pairs among the ranks."""
        return super().partition_plan(method, mini_batches)._replace(together=2)

    def update(self, batch: DataProto) -> None:
        """Take an optimizer step on the batch."""
        self.add_reference(batch)
        batch.partition_plan = self.partition_plan("update_pairs", MiniBatches(len(batch)))
        with self.timed("update_model"):
            result = self.model_wg.update_pairs(batch)
        self.metrics.update(reduce_metrics(result.meta_info["metrics"]))

    def add_reference(self, batch: DataProto) -> None:
        """Add what the loss reads of a reference."""

    def validate(self) -> dict[str, float]:
        """Return loss, accuracy, margin and rewards of the validation pairs, as those of a step are."""
        parts: list[Mapping[str, Tensor]] = []
        for batch in self.in_order(self.val_dataset):
            self.add_reference(batch)
            batch.partition_plan = self.partition_plan("measure_pairs")
            measured = self.model_wg.measure_pairs(batch)
            columns = {name: measured.column(name) for name in measured.keys()}
            if "margin" in batch:
                columns["margin"] = batch.column("margin")
            parts.append(columns)
        joined = {name: torch.cat([part[name] for part in parts]).double() for name in parts[0]}
        metrics = {f"val/{name}": value for name, value in self.loss.of_pairs(joined).items()}
        self.validations.append((self.global_steps, metrics))
        return metrics


class DPOTrainer(PreferenceTrainer):
    """Direct preference optimization, with a frozen reference, one that is read once, or none."""

    config: DPOConfig
    worker_cls = PreferenceWorker

    def __init__(self, config: DPOConfig, *args: Any, **kwargs: Any) -> None:
        self.loss = policy_pair_loss(config.algorithm)
        super().__init__(config, *args, **kwargs)

    def init_workers(self) -> None:
        """Start the ranks and load the model, and the reference that is kept."""
        super().init_workers()
        if self.config.algorithm.uses_reference:
            once = self.config.algorithm.precompute_ref
            self.model_wg.prepare_reference(before_training=once)
            if once:
                self.precompute_reference()

    def precompute_reference(self) -> None:
        """Score all pairs under the reference, before a checkpoint replaces the weights, and let go of it."""
        begin, speaks_at = time.monotonic(), time.monotonic() + _SPEAKS_AFTER_S
        for dataset in filter(None, (self.train_dataset, self.val_dataset)):
            found: list[list[Tensor]] = []
            for batch in self.in_order(dataset):
                rows = self.score_under_reference(batch).ragged("ref_log_prob").rows()
                both = [row.clone() for row in rows]
                found += [both[first : first + 2] for first in range(0, len(both), 2)]
                if time.monotonic() > speaks_at:
                    self.say(f"reference: scored {len(found):,} of {len(dataset):,} pairs")
                    speaks_at = time.monotonic() + _SPEAKS_EVERY_S
            dataset.ref_log_probs = found
        self.model_wg.drop_reference()
        if time.monotonic() - begin > _SPEAKS_AFTER_S:
            self.say(f"reference: scored in {time.monotonic() - begin:.0f} s, and not held from here on")

    def score_under_reference(self, batch: DataProto) -> DataProto:
        """Return ``ref_log_prob`` (B, R)."""
        batch.partition_plan = self.partition_plan("compute_ref_log_prob")
        return self.model_wg.compute_ref_log_prob(batch)

    def add_reference(self, batch: DataProto) -> None:
        """Add ``ref_log_prob``, if the loss reads it and the batch does not bring it."""
        if self.config.algorithm.uses_reference and "ref_log_prob" not in batch:
            with self.timed("reference"):
                batch.put("ref_log_prob", self.score_under_reference(batch).ragged("ref_log_prob"))


class RewardTrainer(PreferenceTrainer):
    """Training of a reward model on preference pairs."""

    config: RewardTrainConfig
    worker_cls = RewardTrainWorker
    scores = True

    def __init__(self, config: RewardTrainConfig, *args: Any, **kwargs: Any) -> None:
        self.loss = reward_model_loss(config.algorithm)
        super().__init__(config, *args, **kwargs)
