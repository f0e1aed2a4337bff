"""Teachers of on-policy distillation, as the driver sees them: which one scores a row, and what they found.

Knows columns and the ``distillation`` section; the models live in a worker group.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

import torch

from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS
from verl.config.distillation import DistillationConfig
from verl.data.table import distinct_values
from verl.protocol import DataProto
from verl.trainer.ppo.experience import response_column
from verl.workers.teacher import TEACHER_INDEX


def served_reward_model(section: Any, group: Any, tokenizer: Any, policy: Any = None) -> Any:
    """Connect the router of ``reward_model`` with its servers; returns what scores, as a worker group does.

    Args:
        section: ``reward_model``.
        group: of the judge or classifier in rollout engines; None: the servers run already.
        tokenizer: the policy's.
        policy: its group, with which an engine may share devices.
    """
    from verl.rewards.router import router_of  # imports aiohttp
    from verl.workers.reward_server import ServedRewardModel

    router = router_of(section)
    if group is not None:
        token = secrets.token_urlsafe(24)  # other users of this machine reach its loopback
        router.use([address for address in group.start_server(token) if address], token)
    if not section.enable:
        return group
    return ServedRewardModel(section, tokenizer, router, *((group, [policy]) if section.shares_devices else ()))


class Teachers:
    """The teachers of a run; without ``distillation.enabled`` there are none.

    Args:
        options: the ``distillation`` section.
    """

    def __init__(self, options: DistillationConfig) -> None:
        self.options = options
        self.teachers = teachers = options.teachers() if options.enabled else {}
        self.names = list(teachers)
        self.column = options.teacher_key
        self.number_of = {teacher.key: number for number, teacher in enumerate(teachers.values())}
        self.score_rows = options.enabled and not options.distillation_loss.is_full
        """Whether they score responses before the update, and not within it."""

    def check_sources(self, datasets: Iterable[Any]) -> None:
        """Refuse data with rows that no teacher is for, before any model is loaded.

        Raises:
            ValueError: such rows are there.
        """
        if self.names and None not in self.number_of:
            self._numbers(distinct_values([one for one in datasets if one is not None], self.column))

    def check_servers(self, tokenizer: Any) -> None:
        """Ask the servers of teachers whether they are there, with the policy's tokens, before any model is loaded.

        Raises:
            TeacherServerError: a server does not answer.
            ValueError: its tokens are others, or it refuses to give log-probs.
        """
        served = {name: one for name, one in self.teachers.items() if one.is_served}
        if served:
            from verl.workers.teacher_server import ServedTeacher  # imports aiohttp

            for name, teacher in served.items():
                ServedTeacher(name, teacher).check(tokenizer)

    def score(self, batch: DataProto, group: Any) -> tuple[DataProto, dict[str, float]]:
        """Add the teachers' columns, and measure the log-ratio to each teacher where there are several."""
        if len(self.names) == 1:
            return batch.union(group.compute_teacher_log_prob(batch)), {}
        sources = batch.non_tensor_batch.get(self.column)
        if sources is None:
            raise ValueError(
                f"distillation.teacher_key={self.column}: the batch has no such column, and it chooses between "
                f"{len(self.names)} teachers; columns are {list(batch.non_tensor_batch)}. Name one of them."
            )
        numbers = torch.tensor(self._numbers(sources))
        batch.put(TEACHER_INDEX, numbers)
        batch = batch.union(group.compute_teacher_log_prob(batch))
        if "old_log_probs" not in batch:
            return batch, {}
        ratio = response_column(batch, "old_log_probs") - response_column(batch, TEACHER_LOG_PROBS)
        mask = response_column(batch, "response_mask") != 0
        metrics = {}
        for number, name in enumerate(self.names):
            tokens = mask & (numbers == number)[:, None]
            if tokens.any():
                metrics[f"distill/kl/{name}"] = ratio[tokens].mean().item()
        return batch, metrics

    def _numbers(self, sources: Iterable[Any]) -> list[int]:
        """The teacher of each of ``sources``, by its place."""
        default = self.number_of.get(None)
        numbers = [self.number_of.get(source, default) for source in sources]
        if None in numbers:
            known = ", ".join(repr(key) for key in self.number_of)
            raise ValueError(
                f"{self.column}={list(sources)[numbers.index(None)]!r} is the key of no teacher; "
                f"distillation.teacher_models have the keys {known}. Add a teacher of that key, or one without a key, "
                "which takes all other rows."
            )
        return [number for number in numbers if number is not None]
