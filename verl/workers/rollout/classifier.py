"""Sequence classifiers with one output in rollout engines: token ids in, the output at the last token of each out.

The weights stay as they were read, also over a sleep. A classifier is an engine whose completions have a ``score`` and
no tokens, so that it is served as any other.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from verl.workers.rollout.base import (
    Bucket,
    Completion,
    ModelRollout,
    Receipt,
    Request,
    RolloutEngine,
    SamplingParams,
    WeightSyncError,
)


class Classifier(ModelRollout):
    """What the classifiers of all engines have in common: requests that wait are scored together, in one batch."""

    # those of engines that cannot be interrupted: a forward is the shortest piece of work there is
    step, abort, partial = RolloutEngine.step, RolloutEngine.abort, RolloutEngine.partial
    num_running = RolloutEngine.num_running
    totals = RolloutEngine.totals

    @abstractmethod
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """The model's output for each text, before any activation."""

    def submit(self, request: Request, expect_version: int) -> int:
        length = len(request.prompt_ids)
        if not 0 < length <= self.max_model_len:
            raise ValueError(
                f"A text of {length} tokens cannot be scored: it must have 1 to {self.max_model_len}. Set "
                "reward_model.max_length to that, or raise reward_model.rollout.max_model_len."
            )
        return RolloutEngine.submit(self, request, expect_version)

    def _generate(self, requests: list[Request]) -> list[Completion]:
        scores = self.scores([request.prompt_ids for request in requests])
        if not all(map(math.isfinite, scores)):
            raise FloatingPointError(
                "The reward model's scores are not finite: its weights are not, or overflow in reward_model.rollout."
                "dtype. Use dtype=float32."
            )
        return [Completion([], None, "stop", score=score) for score in scores]

    def check_sampling(self, sampling: SamplingParams) -> None:
        del sampling  # nothing is sampled

    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        raise WeightSyncError(f"{type(self).__name__} keeps the weights that it has read.")

    def read_back(self) -> dict[str, int]:
        return {}

    def invalidate(self) -> None:
        """Nothing: while it sleeps host memory keeps a copy of its weights, and on a CPU they stay where they are."""
