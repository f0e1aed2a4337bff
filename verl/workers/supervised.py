"""Verbs of a model that learns from given examples: `SupervisedWorker`.

The model is the policy of ``roles.py``, with its engines and checkpoints; what a step minimises is its ``loss``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from verl.algorithms.losses.sft import SFTLoss
from verl.batch import MicroBatching
from verl.batch.partition import MiniBatches
from verl.checkpoint.checkpoint_manager import begin, publish
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import barrier
from verl.utils.process import no_collection
from verl.workers.engine import Want
from verl.workers.engine.train_step import LossFn
from verl.workers.model_worker import MetricBag, mfu_metrics
from verl.workers.roles import TOKENS, PolicyRole


class SupervisedWorker(PolicyRole):
    """One rank of a model that learns from examples."""

    role = "actor"
    loss: LossFn

    def build_loss(self) -> LossFn:
        """The loss of a step; a subclass that learns otherwise has another, and reads other columns."""
        return SFTLoss()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; call once."""
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.init_policy()
            self.loss = self.build_loss()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=TOKENS, balanced=True)
    def update_model(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the rows of all ranks; returns metrics only."""
        return self.take_step(data)

    @property
    def split(self) -> MicroBatching:
        """Limits of a micro-batch."""
        return self.config.actor.update_split

    def take_step(self, data: DataProto) -> DataProto:
        """Take the step of `update_model`, with ``loss``."""
        metrics, split = MetricBag(), self.split
        timed = mfu_metrics("actor", self.actor, data, 1, metrics)
        with self.ledger.phase("update_actor"), self.actor.on_device(optimizer=True), timed:
            for mini in self.mini_batches(data, self.actor, MiniBatches(len(data) * self.actor.topology.dp_size)):
                metrics.add({"train/lr": self.actor.learning_rate()})
                metrics.add(self.actor.train_step(mini, self.loss, split), prefix="train")
            self.actor.step_schedule()
        return DataProto(meta_info={"metrics": metrics.lists()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=TOKENS, balanced=True)
    def measure_loss(self, data: DataProto) -> DataProto:
        """Return of each row ``nll``, the negative log-likelihood of its marked tokens, and their number; (B,) each."""
        with self.ledger.phase("log_prob"), self.actor.on_device():
            scored = self.actor.infer(data, Want.LOG_PROBS, self.split)
        rows = zip(scored.ragged("log_probs").rows(), data.ragged("response_mask").rows(), strict=True)
        sums = [(-(log_probs.double() * mask).sum(), mask.sum()) for log_probs, mask in rows]
        columns = {"nll": torch.stack([nll for nll, _ in sums]), "tokens": torch.stack([count for _, count in sums])}
        return DataProto.from_dict(tensors=columns)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, local_path: str) -> None:
        """Write the model to ``local_path`` in Hugging Face format, an adapter merged."""
        final = Path(local_path).expanduser()
        with self.ledger.phase("save"), self.actor.on_device():
            staged, leads = begin(final)
            self.checkpoints.export(staged)
            barrier()
            if leads:
                publish(staged, final)
            barrier()
