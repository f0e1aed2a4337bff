"""The teachers' worker: models larger or better than the policy that score its responses, one or several in turn."""

from __future__ import annotations

import torch

from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from verl.config.distillation import DistillationConfig
from verl.models.distributions import TopTokens
from verl.models.loader import load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.process import no_collection
from verl.workers.engine import Engine, Want
from verl.workers.model_worker import HybridWorker, model_spec
from verl.workers.roles import TOKENS

TEACHER_INDEX = "teacher_index"
"""Column (B,) int64: which teacher scores a row, by its place in ``distillation.teacher_models``."""


class TeacherWorker(HybridWorker):
    """One rank of all teachers: each sharded over the ranks of the role, on the device while it scores.

    Reads the policy's section for what the models have in common with it, and ``distillation`` for the rest.
    """

    role = "teacher"
    distillation: DistillationConfig  # without it there is no such worker
    policy_vocab: int
    """Outputs of the policy's last layer."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers; call once."""
        options = self.distillation
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            teachers: dict[str, Engine] = {}
            for name, teacher in options.teachers().items():
                mesh = None if teachers else "teacher"  # the place of all is that of the first
                teachers[name] = self.frozen_model(options.teacher, mesh, path=teacher.model_path, is_policy=False)
            self.teachers = teachers
        policy = load_config(model_spec(self.config.model, options.teacher.sharding, "lm"))
        self.policy_vocab = policy.get_text_config(decoder=True).vocab_size

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="teacher", reads=(*TOKENS, TEACHER_INDEX), balanced=True)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under each row's teacher: adds ``teacher_log_probs`` (B, R).

        With ``loss_mode=..._topk`` also its likeliest tokens, ``teacher_topk_log_probs`` and ``teacher_topk_ids``
        (B, R, k).

        Raises:
            ValueError: a token id is outside of a teacher's vocabulary.
        """
        data = self.image_inputs.filled(data)
        chosen = data.column(TEACHER_INDEX) if TEACHER_INDEX in data else torch.zeros(len(data), dtype=torch.int64)
        parts, order = [], []
        with self.ledger.phase("teacher"):
            for number, (name, engine) in enumerate(self.teachers.items()):
                rows = (chosen == number).nonzero().flatten()
                # every rank takes part, also one without rows: sharded weights are gathered by all together
                part = self._scored(name, engine, data.select_idxs(rows))
                if len(rows):
                    parts.append(part)
                    order.append(rows)
        return DataProto.concat(parts).select_idxs(torch.cat(order).argsort()) if parts else DataProto()

    def _scored(self, name: str, engine: Engine, data: DataProto) -> DataProto:
        """The columns of one teacher for its rows; none for no rows."""
        loss, temperature = self.distillation.distillation_loss, self.distillation.temperature
        ids, vocab = data.ragged("input_ids").values, engine.vocab_size
        if len(ids) and int(ids.max()) >= vocab:
            raise ValueError(
                f"distillation.teacher_models.{name}.model_path={engine.spec.path} has a vocabulary of {vocab}, and a "
                f"row holds the token {int(ids.max())}: the models do not share their tokens. Name a teacher with the "
                "policy's tokenizer."
            )
        want, top = Want.LOG_PROBS, None
        if loss.is_topk:
            want |= Want.TOP_LOG_PROBS | Want.TOP_IDS
            smallest = min(self.policy_vocab, *(one.vocab_size for one in self.teachers.values()))
            top = TopTokens(min(loss.topk, smallest), self.policy_vocab)
        split = self.distillation.teacher.log_prob_split
        with engine.on_device():
            scored = engine.infer(data, want, split, temperature or self.config.rollout.temperature, top)
        if not len(data):
            return scored
        given = ["log_probs", *(["top_log_probs", "top_ids"] if top else [])]
        return scored.rename(given, [TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS][: len(given)])
