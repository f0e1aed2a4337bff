"""Responses that are drawn over several steps: what a sample has so far, and how it goes on.

A sample may ask the model once or, in a conversation, several times. Its journal keeps every answer with the version
of the weights behind each token. To go on, the sample is run again from its start: answers in the journal are given at
once, the one that was cut off is continued, the rest is drawn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from verl.config.sampling_names import AT_LEAST
from verl.utils.seeding import derive_seed
from verl.workers.rollout.base import Completion, Request

# -- How long the responses to each prompt were: what longest-first scheduling expects of the next ones --------------


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


_FIRST_PATIENCE_S, _MOST_PATIENCE_S = 0.02, 1.0


class GenerationClient(Protocol):
    """What draws one response: a client of rollout servers, or anything that behaves like one."""

    async def generate(
        self, request: Request, *, request_id: str, session: str | None = None, priority: int = 0
    ) -> Completion:
        """Draw it; higher ``priority`` first. An aborted request ends with ``finish_reason="abort"``."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, waiting or running, or all of them; their `generate` returns what they had drawn."""


class SampleStopped(asyncio.CancelledError):
    """The sample was told to stop; what it has drawn stands in its journal. Not an Exception: nobody may catch it."""


@dataclass
class Draft:
    """One answer of the model, complete or not: its tokens and, for each, its log-prob and the weights that drew it."""

    prompt: str
    """`prompt_key` of what was asked."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """None: it goes on."""

    def add(self, completion: Completion, version: int) -> None:
        """Append what was drawn with the weights of ``version``."""
        if completion.log_probs is not None:
            self.log_probs = (self.log_probs or []) + list(completion.log_probs)
        self.token_ids = self.token_ids + list(completion.token_ids)
        self.versions = self.versions + [version] * len(completion.token_ids)
        self.finish_reason = None if completion.finish_reason == "abort" else completion.finish_reason

    def drop_begun_stop(self, stop: Sequence[str]) -> None:
        """Forget the last tokens, as many as may hold the begin of a stop text: whoever goes on would not see it whole.

        A token stands for at least one byte. How many are dropped does not depend on what they are, so those that
        stay are drawn as any others.
        """
        kept = max(0, len(self.token_ids) - max(len(text.encode()) for text in stop) + 1)
        self.token_ids, self.versions = self.token_ids[:kept], self.versions[:kept]
        self.log_probs = self.log_probs and self.log_probs[:kept]

    def rest(self, request: Request) -> Request:
        """The request for what is still to come: the tokens so far join the prompt and are off the budget.

        Its seed depends on the sample's and on how many tokens there are, so that no random number is used twice.
        """
        drawn = len(self.token_ids)
        if not drawn:
            return request
        least = {name: max(0, n - drawn) for name, n in request.sampling.extra.items() if name in AT_LEAST and n}
        sampling = replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - drawn,
            first_token_temperature=None,
            extra={**request.sampling.extra, **least},
        )
        seed = derive_seed(request.seed, "continue", drawn)
        return replace(request, prompt_ids=(*request.prompt_ids, *self.token_ids), sampling=sampling, seed=seed)

    def completion(self) -> Completion:
        """The answer as one completion; its version is that of its last token."""
        last = self.versions[-1] if self.versions else None
        return Completion(list(self.token_ids), self.log_probs, self.finish_reason or "abort", last)


@dataclass
class Journal:
    """What one sample has drawn, answer by answer; only the last may be incomplete."""

    drafts: list[Draft] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(draft.token_ids) for draft in self.drafts)

    @property
    def is_complete(self) -> bool:
        """Whether every answer came to its end."""
        return all(draft.finish_reason is not None for draft in self.drafts)

    @property
    def versions(self) -> list[int]:
        """Of every drawn token, in order."""
        return [version for draft in self.drafts for version in draft.versions]

    def clear(self) -> int:
        """Begin anew; returns how many tokens that discards."""
        discarded, self.drafts = self.num_tokens, []
        return discarded

    def state(self) -> list[dict[str, Any]]:
        """As JSON values, exact."""
        return [asdict(draft) for draft in self.drafts]

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> Journal:
        return cls([Draft(**draft) for draft in state])


class SampleClient:
    """The client as one sample sees it: keeps the sample's journal, and continues what stands there incomplete.

    Args:
        client: what draws.
        sample_id: names the sample; its requests are called ``{sample_id}/{number of the call}``.
        journal: what the sample drew before; grows.
        version: of the weights that draw now; a completion that names its own is believed.
        priority: of its requests.
    """

    def __init__(
        self, client: GenerationClient, sample_id: str, journal: Journal, version: int, priority: int = 0
    ) -> None:
        self.client = client
        self.sample_id = sample_id
        self.journal = journal
        self.version = version
        self.priority = priority
        self.is_stopped = False
        """Set it to let the sample get no further request; abort the `running` one to end it now."""
        self.running: str | None = None
        """Name of the request that is being drawn."""
        self.idle = asyncio.Event()
        """Set while there is none."""
        self.idle.set()
        self._calls = 0

    async def generate(
        self, request: Request, *, request_id: str | None = None, session: str | None = None, priority: int = 0
    ) -> Completion:
        """The next answer of this sample: from the journal if it is there, else drawn.

        The names of requests are the sample's own; ``request_id`` and ``priority`` are not read. A session lasts as
        long as the weights: what a replica has cached is worth nothing under others.

        Raises:
            SampleStopped: ``is_stopped``, and the answer is not complete.
        """
        draft, name = self._draft(request), f"{self.sample_id}/{self._calls}"
        self._calls += 1
        session = session and f"{session}@{self.version}"
        while draft.finish_reason is None:
            if self.is_stopped:
                raise SampleStopped(self.sample_id)
            self.running = name
            self.idle.clear()
            try:
                completion = await self.client.generate(
                    draft.rest(request), request_id=name, session=session, priority=self.priority
                )
            finally:
                self.running = None
                self.idle.set()
            draft.add(completion, self.version if completion.version is None else completion.version)
            if draft.finish_reason is None and request.sampling.stop:
                draft.drop_begun_stop(request.sampling.stop)
            if draft.finish_reason is None and not completion.token_ids and not self.is_stopped:
                raise RuntimeError(
                    f"request {name} was aborted, and not by its scheduler. Look for what else calls the rollout "
                    "servers' abort."
                )
        return draft.completion()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End the request that is being drawn."""
        if self.running is not None:
            await self.client.abort([self.running])

    def _draft(self, request: Request) -> Draft:
        """The journal's answer to this call. One that does not fit the question, and those after it, are dropped."""
        drafts, number, asked = self.journal.drafts, self._calls, prompt_key(request.prompt_ids)
        if number < len(drafts):
            draft = drafts[number]
            length = len(draft.token_ids) + (draft.finish_reason is None)
            if draft.prompt != asked or length > request.sampling.max_tokens:
                del drafts[number:]
        if number == len(drafts):
            drafts.append(Draft(asked))
        return drafts[number]


async def stop_samples(samples: Sequence[SampleClient], client: GenerationClient) -> None:
    """Tell samples to stop, and return when none of them has a request any more."""
    for sample in samples:
        sample.is_stopped = True
    patience_s = _FIRST_PATIENCE_S
    while running := [sample for sample in samples if sample.running is not None]:
        await client.abort([sample.running for sample in running])
        # once more if need be: a request that is on its way to its server is not known there yet
        waits = [asyncio.ensure_future(sample.idle.wait()) for sample in running]
        _, late = await asyncio.wait(waits, timeout=patience_s)
        for wait in late:
            wait.cancel()
        patience_s = min(2 * patience_s, _MOST_PATIENCE_S)
