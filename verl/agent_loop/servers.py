"""The rollout servers as one row's agent loop sees them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from verl.utils.seeding import derive_seed
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.client import RolloutClient
from verl.workers.rollout.messages import sampling_from_json

_OTHER_NAMES = {"logprobs": "want_log_probs", "max_new_tokens": "max_tokens"}


class AsyncLLMServerManager:
    """Draws tokens for one row. The seed of its k-th call comes from the row's seed and k, whatever else runs.

    Args:
        client: to all servers.
        seed: of the row; its first call takes it as it is.
        name: of the row, for the sessions it opens.
        priority: of the row's requests.
    """

    def __init__(self, client: RolloutClient, seed: int, name: str, priority: int = 0):
        self.seconds = 0.0
        """Time its calls took, waiting included."""
        self.last: Completion | None = None
        """What its last call drew."""
        self._client, self._seed, self._name, self._priority = client, seed, name, priority
        self._calls = 0

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
    ) -> Completion:
        """Draw what follows ``prompt_ids``.

        Args:
            request_id: of the conversation: its later turns go to the server that has read its beginning.
            sampling_params: fields of `SamplingParams`; an unknown one is refused by name.
            image_data: images that stand for the placeholders among ``prompt_ids``, in order.
        """
        seed = self._seed if self._calls == 0 else derive_seed(self._seed, "turn", self._calls)
        self._calls += 1
        media = {"image": list(image_data)} if image_data else None
        request = Request(tuple(prompt_ids), as_sampling(sampling_params), seed, media)
        start = time.perf_counter()
        try:
            self.last = await self._client.generate(
                request, session=f"{self._name}/{request_id}" if request_id else None, priority=self._priority
            )
            return self.last
        finally:
            self.seconds += time.perf_counter() - start


def as_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as a dict that may be changed."""
    return {field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}


def as_sampling(fields: Mapping[str, Any]) -> SamplingParams:
    """The inverse; ``logprobs`` and ``max_new_tokens`` are understood too."""
    return sampling_from_json({_OTHER_NAMES.get(name, name): value for name, value in fields.items()})
