"""The teachers' worker: models larger or better than the policy that score its responses, one or several in turn.

A teacher runs in a training engine of the worker, in a rollout engine on devices of its own, or behind servers that the
worker asks for its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_IDS, TOP_LOG_PROBS
from verl.config.distillation import DistillationConfig, TeacherModelConfig
from verl.models.distributions import TopTokens
from verl.models.loader import load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import get_rank
from verl.utils.fs import copy_to_local
from verl.utils.process import no_collection
from verl.workers.engine import Engine, Want
from verl.workers.model_worker import MADE, HybridWorker, model_spec
from verl.workers.roles import TOKENS
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, RolloutEngine, SamplingParams
from verl.workers.rollout.monitor import engine_phase

if TYPE_CHECKING:  # it imports aiohttp, which most runs do without
    from verl.workers.teacher_server import ServedTeacher, TokenLogProbs

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
    """Teachers on servers."""
    rollouts: dict[str, RolloutEngine]
    """Teachers in rollout engines; those in training engines are in ``teachers``."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the teachers; call once."""
        options = self.distillation
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            teachers: dict[str, Engine] = {}
            self.served, self.rollouts = {}, {}
            for name, teacher in options.teachers().items():
                if teacher.is_served:
                    from verl.workers.teacher_server import ServedTeacher

                    self.served[name] = ServedTeacher(name, teacher)
                    continue
                if name in options.in_rollout_engines:
                    self.rollouts[name] = self.rollout_engine(teacher)
                    continue
                mesh = None if teachers else "teacher"  # the place of all is that of the first
                teachers[name] = self.frozen_model(options.teacher, mesh, path=teacher.model_path, is_policy=False)
            self.teachers = teachers
            if not teachers:
                rank, size = get_rank(), max((one.tensor_parallel_size for one in self.rollouts.values()), default=1)
                self._register_dispatch_collect_info("teacher", dp_rank=rank // size, is_collect=rank % size == 0)
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
                    part = self._elsewhere(name, part)
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
        loss, sizes = self.distillation.distillation_loss, [self.policy_vocab]
        sizes += [engine.vocab_size for engine in self.teachers.values()]
        sizes += [rollout.vocab_size or self.policy_vocab for rollout in self.rollouts.values()]
        return min(loss.topk, *sizes) if loss.is_topk else 0

    def rollout_engine(self, teacher: TeacherModelConfig) -> RolloutEngine:
        """The engine of a teacher with ``inference``, with its weights."""
        model, options = self.config.model, teacher.rollout(self.config.rollout)
        path = copy_to_local(teacher.model_path, use_shm=model.use_shm)
        with engine_phase(options.name, "start"):
            return get_rollout_class(options.name)(path, options, self.device, model.trust_remote_code)

    def _elsewhere(self, name: str, data: DataProto) -> DataProto:
        """The columns of a teacher on servers, or in a rollout engine, for its rows."""
        if any(data.non_tensor_batch.get(MADE, ())):
            raise ValueError(
                f"distillation.teacher_models.{name}: rows with images are scored by teachers in the training engine "
                "alone. Give a model_path, and neither server_urls nor inference."
            )
        responses, k, vocab = data.ragged("responses"), self.top_k, self.policy_vocab
        texts = [row.tolist() for row in data.ragged("input_ids").rows()]
        counts = responses.layout.lengths.tolist()
        if name in self.served:
            found = self.served[name].score(texts, counts, k, vocab)
        else:
            found = _read(name, self.rollouts[name], texts, counts, k, vocab)
        columns = {TEACHER_LOG_PROBS: np.concatenate([one.own for one in found])}
        if k:
            columns |= {TOP_LOG_PROBS: np.concatenate([one.top for one in found])}
            columns |= {TOP_IDS: np.concatenate([one.top_ids for one in found])}
        return DataProto.from_ragged({column: responses.like(torch.from_numpy(one)) for column, one in columns.items()})


def _read(
    name: str, engine: RolloutEngine, texts: Sequence[Sequence[int]], counts: Sequence[int], k: int, vocab: int
) -> list[TokenLogProbs]:
    """As `ServedTeacher.score`, by a rollout engine of this process."""
    # a padded vocabulary ends later than the policy's: its tokens are left out, and others take their place
    more = min(128, max(0, (engine.vocab_size or vocab) - vocab)) if k else 0
    sampling = SamplingParams(1, do_sample=False, prompt_log_probs=k + more)
    from verl.workers.teacher_server import token_log_probs

    assert engine.version is not None, "it has read its weights"
    completions = engine.generate([Request(tuple(ids), sampling) for ids in texts], engine.version)
    found = []
    for ids, count, completion in zip(texts, counts, completions, strict=True):
        scored = completion.prompt_log_probs
        assert scored is not None, "the request asks for them"
        places = []
        for place in range(len(ids) - 1 - count, len(ids) - 1):
            top = zip(scored.top_ids[place], scored.top_log_probs[place], strict=True)
            own = {ids[place + 1]: (scored.log_probs[place], None)}
            places.append(own | {token: (value, None) for token, value in top})
        one = token_log_probs(places, k, vocab)
        if one is None:
            raise ValueError(
                f"distillation.teacher_models.{name}: of a text of {len(ids)} tokens fewer than {k} of the likeliest "
                f"{k + more} tokens are below {vocab}, where the policy's vocabulary ends. Lower "
                "distillation.distillation_loss.topk."
            )
        found.append(one._replace(top_ids=one.top_ids.reshape(count, k), top=one.top.reshape(count, k)))
    return found
