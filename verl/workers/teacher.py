"""The teachers' worker: models larger or better than the policy that score its responses, one or several in turn.

A teacher runs in a training engine of the worker, or behind servers that the worker asks for its rows.
"""

from __future__ import annotations

import numpy as np
import torch

from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from verl.config.distillation import DistillationConfig
from verl.models.distributions import TopTokens
from verl.models.loader import load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import get_rank
from verl.utils.process import no_collection
from verl.workers.engine import Engine, Want
from verl.workers.model_worker import MADE, HybridWorker, model_spec
from verl.workers.roles import TOKENS
from verl.workers.teacher_server import ServedTeacher

TEACHER_INDEX = "teacher_index"
"""Column (B,) int64: which teacher scores a row, by its place in ``distillation.teacher_models``."""


class TeacherWorker(HybridWorker):
    """One rank of all teachers: each sharded over the ranks of the role, on the device while it scores, or on servers.

    Reads the policy's section for what the models have in common with it, and ``distillation`` for the rest.
    """

    role = "teacher"
    distillation: DistillationConfig  # without it there is no such worker
    policy_vocab: int
    """Outputs of the policy's last layer."""
    served: dict[str, ServedTeacher]
    """Teachers on servers; the others are in ``teachers``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers; call once."""
        options = self.distillation
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            teachers: dict[str, Engine] = {}
            self.served = {}
            for name, teacher in options.teachers().items():
                if teacher.is_served:
                    self.served[name] = ServedTeacher(name, teacher)
                    continue
                mesh = None if teachers else "teacher"  # the place of all is that of the first
                teachers[name] = self.frozen_model(options.teacher, mesh, path=teacher.model_path, is_policy=False)
            self.teachers = teachers
            if not teachers:
                self._register_dispatch_collect_info("teacher", dp_rank=get_rank(), is_collect=True)
        policy = load_config(model_spec(self.config.model, options.teacher.sharding, "lm"))
        self.policy_vocab = policy.get_text_config(decoder=True).vocab_size

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="teacher", reads=(*TOKENS, TEACHER_INDEX), balanced=True)
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """Score the responses under each row's teacher: adds ``teacher_log_probs`` (B, R).

        With ``loss_mode=..._topk`` also its likeliest tokens, ``teacher_topk_log_probs`` and ``teacher_topk_ids``
        (B, R, k).

        Raises:
            ValueError: a token id is outside of a teacher's vocabulary, or its server refuses a row.
            TeacherServerError: its servers do not answer.
        """
        data = self.image_inputs.filled(data)
        chosen = data.column(TEACHER_INDEX) if TEACHER_INDEX in data else torch.zeros(len(data), dtype=torch.int64)
        parts, order = [], []
        with self.ledger.phase("teacher"):
            for number, name in enumerate(self.distillation.teachers()):
                rows = (chosen == number).nonzero().flatten()
                part = data.select_idxs(rows)
                if name in self.teachers:
                    # every rank takes part, also one without rows: sharded weights are gathered by all together
                    part = self._scored(name, self.teachers[name], part)
                elif len(rows):
                    part = self._asked(self.served[name], part)
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
            top = TopTokens(self.top_k, self.policy_vocab)
        split = self.distillation.teacher.log_prob_split
        with engine.on_device():
            scored = engine.infer(data, want, split, temperature or self.config.rollout.temperature, top)
        if not len(data):
            return scored
        given = ["log_probs", *(["top_log_probs", "top_ids"] if top else [])]
        return scored.rename(given, [TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS][: len(given)])

    @property
    def top_k(self) -> int:
        """Likeliest tokens of each place that are compared, of all teachers the same number; 0: none."""
        loss = self.distillation.distillation_loss
        sizes = (self.policy_vocab, *(one.vocab_size for one in self.teachers.values()))
        return min(loss.topk, *sizes) if loss.is_topk else 0

    def _asked(self, teacher: ServedTeacher, data: DataProto) -> DataProto:
        """The columns of a teacher on servers, for its rows."""
        if any(data.non_tensor_batch.get(MADE, ())):
            raise ValueError(
                f"{teacher.key}.server_urls: rows with images cannot be scored by a server. Give a model_path alone."
            )
        responses = data.ragged("responses")
        texts = [row.tolist() for row in data.ragged("input_ids").rows()]
        found = teacher.score(texts, responses.layout.lengths.tolist(), self.top_k, self.policy_vocab)
        columns = {TEACHER_LOG_PROBS: np.concatenate([one.own for one in found])}
        if self.top_k:
            columns |= {TOP_LOG_PROBS: np.concatenate([one.top for one in found])}
            columns |= {TOP_IDS: np.concatenate([one.top_ids for one in found])}
        return DataProto.from_ragged({name: responses.like(torch.from_numpy(one)) for name, one in columns.items()})
