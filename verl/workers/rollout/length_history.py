"""How long the responses to each prompt were: what longest-first scheduling expects of the next ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """A prompt's name in the history, made of its tokens: the same in every epoch and after every restart."""
    return blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


class LengthHistory:
    """The exponential mean of response lengths, in tokens, by prompt.

    A response that was cut off at c tokens says only that it is longer: it counts as c or as what was expected,
    whichever is more.

    Args:
        weight: of the newest observation, in (0, 1].
    """

    def __init__(self, weight: float = 0.5) -> None:
        self.weight = weight
        self._means: dict[str, float] = {}
        self._sum = 0.0

    def __len__(self) -> int:
        return len(self._means)

    def expected(self, key: str) -> float:
        """Tokens of the next response to this prompt; of a new prompt the mean over the known ones, 0 at first."""
        return self._means.get(key, self._sum / len(self._means) if self._means else 0.0)

    def observe(self, key: str, ended: Sequence[int], cut: Sequence[int] = ()) -> None:
        """Learn from responses drawn together to one prompt: the lengths of those that ended and of those cut off.

        Their order does not matter.
        """
        if not ended and not cut:
            return
        known = self._means.get(key)
        lengths = [*ended, *(max(length, known or 0.0) for length in cut)]
        seen = sum(sorted(lengths)) / len(lengths)
        mean = seen if known is None else (1 - self.weight) * known + self.weight * seen
        self._sum += mean - (known or 0.0)
        self._means[key] = mean

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, exact."""
        return {"means": dict(self._means), "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means, self._sum = dict(state["means"]), state["sum"]
