"""Partial rollouts: responses that are generated over several steps, and the progress log of each sample.

A sample sends one request or, in a conversation, several. Its progress log keeps every answer with the version of the
weights behind each token. To continue, the sample runs again from its start: answers in the log are returned at once,
the aborted one is continued, the rest is generated.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from verl.agents.episode import ReplyLog
from verl.config.rollout import AT_LEAST
from verl.utils.py_functional import derive_seed
from verl.workers.rollout.base import Completion, Request

# -- length history: the response lengths that longest-first scheduling expects ---------------------------------------


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """Return the key of a prompt, a hash of its tokens: the same in every epoch and after every restart."""
    return blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


class LengthHistory:
    """Exponential mean of response lengths, in tokens, by prompt.

    A response that was aborted at c tokens is at least that long: it counts as c or as the expected length, whichever
    is more.

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
        """Return the expected tokens of the next response; for a new prompt the mean over known ones, 0 at first."""
        return self._means.get(key, self._sum / len(self._means) if self._means else 0.0)

    def observe(self, key: str, complete: Sequence[int], aborted: Sequence[int] = ()) -> None:
        """Update the mean with the lengths of one step's responses to a prompt.

        Their order does not matter.
        """
        if not complete and not aborted:
            return
        known = self._means.get(key)
        lengths = [*complete, *(max(length, known or 0.0) for length in aborted)]
        newest = sum(sorted(lengths)) / len(lengths)
        mean = newest if known is None else (1 - self.weight) * known + self.weight * newest
        self._sum += mean - (known or 0.0)
        self._means[key] = mean

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, exact."""
        return {"means": dict(self._means), "sum": self._sum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means, self._sum = dict(state["means"]), state["sum"]


_FIRST_ABORT_WAIT_S, _LONGEST_ABORT_WAIT_S = 0.02, 1.0


class GenerationClient(Protocol):
    """Interface of a client of rollout servers that generates one response a call."""

    async def generate(
        self, request: Request, *, request_id: str, session: str | None = None, priority: int = 0
    ) -> Completion:
        """Generate it; higher ``priority`` first. An aborted request ends with ``finish_reason="abort"``."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort these requests, waiting or running, or all; their `generate` returns the tokens so far."""


@runtime_checkable
class RemoteSamplesClient(GenerationClient, Protocol):
    """A client whose samples run in other processes (`verl.agents.workers`), where their requests and logs are."""

    async def hold(self) -> None:
        """Have them send no request until `release`."""

    async def release(self, version: int) -> None:
        """Let them send requests again, under the weights of ``version``."""

    async def fetch_logs(self, samples: Mapping[str, SampleClient], interrupts: bool = False) -> None:
        """Bring the logs of samples, by id, to their newest state; ``interrupts``: end their requests first."""


class SampleStopped(asyncio.CancelledError):
    """The sample was stopped; its tokens are in its progress log. Not an Exception, which agent loops might catch."""


@dataclass
class PartialRollout:
    """One answer of the model, complete or not: its tokens, their log-probs, and the weights' version of each."""

    prompt: str
    """`prompt_key` of the request."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] | None = None
    versions: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "abort"] | None = None
    """None: not complete."""

    def __getstate__(self) -> dict[str, Any]:
        log_probs = None if self.log_probs is None else array("d", self.log_probs)
        return vars(self) | {
            "token_ids": array("i", self.token_ids), "log_probs": log_probs, "versions": array("q", self.versions)
        }  # fmt: skip

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        lists = {name: value.tolist() for name, value in state.items() if isinstance(value, array)}
        vars(self).update({**state, **lists})

    def add(self, completion: Completion, version: int) -> None:
        """Append tokens that the weights of ``version`` generated."""
        if completion.log_probs is not None:
            self.log_probs = (self.log_probs or []) + list(completion.log_probs)
        self.token_ids = self.token_ids + list(completion.token_ids)
        self.versions = self.versions + [version] * len(completion.token_ids)
        self.finish_reason = None if completion.finish_reason == "abort" else completion.finish_reason

    def drop_partial_stop(self, stop: Sequence[str]) -> None:
        """Drop the last tokens, as many as may begin a stop text: the continuation would not see it whole.

        A token stands for at least one byte. The number of dropped tokens does not depend on their values, so that the
        distribution of the kept ones is unchanged.
        """
        kept = max(0, len(self.token_ids) - max(len(text.encode()) for text in stop) + 1)
        self.token_ids, self.versions = self.token_ids[:kept], self.versions[:kept]
        self.log_probs = self.log_probs and self.log_probs[:kept]

    def continuation(self, request: Request) -> Request:
        """Return the request for the missing tokens: those so far join the prompt and count against the budget.

        Its seed depends on the sample's and on how many tokens there are, so that no random number is used twice.
        """
        num_tokens = len(self.token_ids)
        if not num_tokens:
            return request
        least = {name: max(0, n - num_tokens) for name, n in request.sampling.extra.items() if name in AT_LEAST and n}
        sampling = replace(
            request.sampling,
            max_tokens=request.sampling.max_tokens - num_tokens,
            first_token_temperature=None,
            extra={**request.sampling.extra, **least},
        )
        seed = derive_seed(request.seed, "continue", num_tokens)
        return replace(request, prompt_ids=(*request.prompt_ids, *self.token_ids), sampling=sampling, seed=seed)

    def completion(self) -> Completion:
        """Return the answer as one completion; its version is that of its last token."""
        last = self.versions[-1] if self.versions else None
        return Completion(list(self.token_ids), self.log_probs, self.finish_reason or "abort", last)


@dataclass
class ProgressLog:
    """Progress log of one sample, answer by answer; only the last may be incomplete."""

    turns: list[PartialRollout] = field(default_factory=list)
    replies: ReplyLog = field(default_factory=ReplyLog)
    """What tools, users or an environment answered."""

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def is_complete(self) -> bool:
        """Whether every answer is complete."""
        return all(turn.finish_reason is not None for turn in self.turns)

    @property
    def versions(self) -> list[int]:
        """Version of the weights of every generated token, in order."""
        return [version for turn in self.turns for version in turn.versions]

    def clear(self) -> int:
        """Discard all answers; return their number of tokens."""
        discarded, self.turns = self.num_tokens, []
        self.replies.truncate(0)
        return discarded

    def state(self) -> dict[str, Any]:
        """Return JSON values, exact."""
        return {"turns": [asdict(turn) for turn in self.turns], "replies": self.replies.state()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> ProgressLog:
        # a list of turns alone: a checkpoint from before there were answers
        whole = state if isinstance(state, Mapping) else {"turns": state, "replies": []}
        return cls([PartialRollout(**turn) for turn in whole["turns"]], ReplyLog.from_state(whole["replies"]))


class SampleClient:
    """Client of one sample: keeps its progress log, and continues the incomplete answer.

    Pickled it loses its client and its gate, until `attach`.

    Args:
        client: of the rollout servers.
        sample_id: names the sample; its requests are called ``{sample_id}/{number of the call}``.
        log: of the sample so far; grows.
        version: of the current weights; a completion that names its own takes precedence.
        priority: of its requests.
        gate: set while requests may be sent; one that is aborted is then continued. None: who aborts a request stops
            the sample.
    """

    def __init__(
        self,
        client: GenerationClient,
        sample_id: str,
        log: ProgressLog,
        version: int,
        priority: int = 0,
        gate: asyncio.Event | None = None,
    ) -> None:
        self.client = client
        self.gate = gate
        self.sample_id = sample_id
        self.log = log
        self.version = version
        self.priority = priority
        self.is_stopped = False
        """Whether further requests are refused (`stop`); abort the `running` one to end it now."""
        self.running: str | None = None
        """Id of the running request."""
        self.idle = asyncio.Event()
        """Set while no request runs."""
        self.idle.set()
        self._calls = 0
        self._at_gate: asyncio.Future | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (
            self.sample_id,
            self.log,
            self.version,
            self.priority,
            self.is_stopped,
            self.gate is not None,
        )

    def attach(self, client: GenerationClient, gate: asyncio.Event) -> None:
        """Use ``client``, and ``gate`` where the sample had one."""
        self.client = client
        self.gate = None if self.gate is None else gate

    @property
    def replies(self) -> ReplyLog:
        """Answers of the sample's environment."""
        return self.log.replies

    def stop(self) -> None:
        """Refuse further requests, also one that waits at the gate."""
        self.is_stopped = True
        if self._at_gate is not None:
            self._at_gate.cancel()

    def restart(self) -> None:
        """Start the sample again: an agent loop failed."""
        self.log.clear()
        self._calls = 0

    def reconnect(self, client: GenerationClient) -> None:
        """Run again with a client of other servers: the log has the answers so far."""
        self.client, self.is_stopped, self._calls = client, False, 0

    async def generate(
        self, request: Request, *, request_id: str | None = None, session: str | None = None, priority: int = 0
    ) -> Completion:
        """Return the next answer of this sample: from the log if it is there, else generated.

        Request ids are the sample's own; ``request_id`` and ``priority`` are not read. A session lasts as long as the
        weights: a replica's prefix cache is void under others.

        Raises:
            SampleStopped: ``is_stopped``, and the answer is not complete.
        """
        turn, name = self._current_turn(request), f"{self.sample_id}/{self._calls}"
        self._calls += 1
        while turn.finish_reason is None:
            if self.gate is not None and not self.gate.is_set():
                self._at_gate = asyncio.ensure_future(self.gate.wait())
                try:
                    await asyncio.wait({self._at_gate})
                finally:
                    self._at_gate.cancel()
            if self.is_stopped:
                raise SampleStopped(self.sample_id)
            self.running = name
            self.idle.clear()
            try:
                completion = await self.client.generate(
                    turn.continuation(request),
                    request_id=name,
                    session=session and f"{session}@{self.version}",
                    priority=self.priority,
                )
            finally:
                self.running = None
                self.idle.set()
            turn.add(completion, self.version if completion.version is None else completion.version)
            if turn.finish_reason is None and request.sampling.stop:
                turn.drop_partial_stop(request.sampling.stop)
            if self.gate is None and turn.finish_reason is None and not completion.token_ids and not self.is_stopped:
                raise RuntimeError(
                    f"request {name} was aborted, and not by its scheduler. Look for what else calls the rollout "
                    "servers' abort."
                )
        return turn.completion()

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort the running request."""
        if self.running is not None:
            await self.client.abort([self.running])

    def _current_turn(self, request: Request) -> PartialRollout:
        """Return the log's answer to this call. One that does not fit the request, and those after it, are dropped."""
        turns, number, key = self.log.turns, self._calls, prompt_key(request.prompt_ids)
        if number < len(turns):
            turn = turns[number]
            length = len(turn.token_ids) + (turn.finish_reason is None)
            if turn.prompt != key or length > request.sampling.max_tokens:
                del turns[number:]
                self.log.replies.truncate(number + 1)
        if number == len(turns):
            turns.append(PartialRollout(key))
        return turns[number]


def _detached(
    sample_id: str, log: ProgressLog, version: int, priority: int, is_stopped: bool, has_gate: bool
) -> SampleClient:
    """Return a `SampleClient` of another process, to be attached."""
    sample = SampleClient(None, sample_id, log, version, priority, asyncio.Event() if has_gate else None)
    sample.is_stopped = is_stopped
    return sample


async def stop_samples(samples: Sequence[SampleClient], client: GenerationClient) -> None:
    """Stop samples; return when none of them has a running request."""
    for sample in samples:
        sample.stop()
    await abort_running(samples, client)


async def abort_running(samples: Sequence[SampleClient], client: GenerationClient) -> None:
    """Abort the running requests of samples that send no other; return when there are none."""
    wait_s = _FIRST_ABORT_WAIT_S
    first = {sample: sample.running for sample in samples}
    # one that was stopped in another process may run again there at once, under another name
    while running := [one for one, name in first.items() if name is not None and one.running == name]:
        await client.abort([sample.running for sample in running])
        # abort again: a request that is on its way to its server is not known there yet
        waits = [asyncio.ensure_future(sample.idle.wait()) for sample in running]
        _, late = await asyncio.wait(waits, timeout=wait_s)
        for wait in late:
            wait.cancel()
        wait_s = min(2 * wait_s, _LONGEST_ABORT_WAIT_S)
