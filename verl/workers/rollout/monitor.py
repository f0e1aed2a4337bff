"""Monitor of a rollout engine: its current phase and requests, for errors and the watchdog, and its metrics.

Notes go to the flight recorder of the process, progress to its watchdog. Knows requests and completions, no engine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from verl.telemetry.flight_recorder import flight_recorder, watchdog

if TYPE_CHECKING:
    from verl.workers.rollout.base import Completion, Request


_NAMED = 4
"""Requests that a note names."""


_NOTE_S = 0.5
"""Seconds between two notes of an engine whose requests come and go."""


@contextmanager
def engine_phase(engine: str, phase: str) -> Iterator[None]:
    """Note that an engine is at ``phase``; the note stays if the block raises, for the error to quote."""
    recorder = flight_recorder()
    recorder.note(engine=engine, phase=phase, since=time.monotonic())
    yield
    recorder.note(engine=None, phase=None, since=None)


class EngineMonitor:
    """Progress and metrics of one engine.

    Attributes:
        engine: its name, as errors say it.
        stall_timeout_s: seconds a generation may go on without a finished step; 0: no limit.
        names: of the requests of the next generation, in their order; uids for example.
        reports_steps: the engine calls `tick` at each of its steps: a whole generation without one is a stall.
    """

    def __init__(self) -> None:
        self.engine = "?"
        self.stall_timeout_s = 0.0
        self.names: Sequence[Any] = ()
        self.reports_steps = False
        self._serves_since: float | None = None
        self._noted_at = 0.0
        self._sums = dict.fromkeys(("requests", "generated_tokens", "prompt_tokens", "steps", "seconds"), 0.0)
        self._gauges: dict[str, list[float]] = {}
        self._before: dict[str, float] = {}
        self._totals_before: dict[str, float] = {}

    # -- progress ------------------------------------------------------------------------------------------------------

    def phase(self, name: str) -> AbstractContextManager:
        """Note that the engine is at ``name``."""
        return engine_phase(self.engine, name)

    @contextmanager
    def generating(self, requests: Sequence[Request]) -> Iterator[None]:
        """Note the requests, and have the watchdog end this process if no `tick` comes for ``stall_timeout_s``."""
        recorder, dog, start = flight_recorder(), watchdog(), time.monotonic()
        if len(self.names) == len(requests):
            first = [str(name) for name in self.names[:_NAMED]]
        else:  # no two requests of a run share a seed
            first = [f"seed {request.seed}" for request in requests[:_NAMED]]
        longest = heapq.nlargest(_NAMED, (len(request.prompt_ids) for request in requests))
        details = {"requests": len(requests), "longest_prompts": longest, "first_requests": first}
        recorder.tick()
        recorder.note(engine=self.engine, phase="generate", since=start, **details)
        if self.reports_steps:
            dog.arm(self.stall_timeout_s, self._stalled)
        try:
            yield
        finally:
            dog.disarm()
            self._sums["seconds"] += time.monotonic() - start
            self.names = ()
        recorder.note(engine=None, phase=None, since=None, **dict.fromkeys(details))

    def serving(self, requests: Mapping[Any, Request]) -> None:
        """Note the running requests before a step of an engine that serves; the watchdog is armed while there are any.

        Args:
            requests: by name.
        """
        now, before = time.monotonic(), self._serves_since
        self._sums["seconds"] += now - before if before is not None else 0.0
        self._serves_since = now if requests else None
        flight_recorder().tick()
        if bool(requests) != (before is not None):
            if requests:
                watchdog().arm(self.stall_timeout_s, self._stalled)
            else:
                watchdog().disarm()
        elif now - self._noted_at < _NOTE_S:
            return
        self._noted_at = now
        longest = heapq.nlargest(_NAMED, (len(request.prompt_ids) for request in requests.values()))
        first = [str(name) for name in islice(requests, _NAMED)]
        details = {
            "requests": len(requests) or None,
            "longest_prompts": longest or None,
            "first_requests": first or None,
        }
        flight_recorder().note(engine=self.engine, phase="serve", since=now, **details)

    def stop_serving(self, failed: bool = False) -> None:
        """Disarm the watchdog after the last step; the notes of an engine that failed stay for the error to quote."""
        watchdog().disarm()
        self._serves_since = None
        if not failed:
            names = ("engine", "phase", "since", "requests", "longest_prompts", "first_requests")
            flight_recorder().note(**dict.fromkeys(names))

    def tick(self) -> None:
        """A step of the engine has finished."""
        self._sums["steps"] += 1
        flight_recorder().tick()

    def _stalled(self, waited: float) -> str:
        last = flight_recorder().notes
        return (
            f"the rollout engine {self.engine} has finished no step for {waited:.0f} s while generating "
            f"{last.get('requests', 0)} requests (longest prompts {last.get('longest_prompts')}, the first "
            f"{', '.join(last.get('first_requests', []))}), longer than "
            f"actor_rollout_ref.rollout.stall_timeout_s={self.stall_timeout_s:g} allows. Raise it if steps are just "
            f"slow; 0 waits for ever."
        )

    # -- metrics -------------------------------------------------------------------------------------------------------

    def count(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Add the requests and completions of a generation to the sums."""
        self._sums["requests"] += len(requests)
        self._sums["prompt_tokens"] += sum(len(request.prompt_ids) for request in requests)
        self._sums["generated_tokens"] += sum(len(completion.token_ids) for completion in completions)

    def gauge(self, **values: float) -> None:
        """Note levels after a step, such as ``running``; their mean and maximum become metrics."""
        for name, value in values.items():
            # number, sum and maximum of the values
            mean_max = self._gauges.setdefault(name, [0.0, 0.0, 0.0])
            mean_max[0] += 1
            mean_max[1] += value
            mean_max[2] = max(mean_max[2], value)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave out of the metrics whatever the engine does inside the block."""
        sums, gauges = dict(self._sums), {name: list(values) for name, values in self._gauges.items()}
        try:
            yield
        finally:
            self._sums, self._gauges = sums, gauges

    def totals(self) -> dict[str, float]:
        """Sums since the engine was built."""
        return dict(self._sums)

    def take_metrics(self, engine_totals: Mapping[str, float]) -> dict[str, float]:
        """The numbers since the last call, by the names of the metrics without their prefix.

        Args:
            engine_totals: counters of the engine's own since it was built; ``prefix_cache_queries`` and
                ``prefix_cache_hits`` become a rate.
        """
        new = {name: value - self._before.get(name, 0.0) for name, value in self._sums.items()}
        own = {name: value - self._totals_before.get(name, 0.0) for name, value in engine_totals.items()}
        self._before, self._totals_before = dict(self._sums), dict(engine_totals)
        gauges, self._gauges = self._gauges, {}
        seconds = new.pop("seconds")
        metrics = dict(new)
        # of the time in which requests ran, not of the whole step
        if seconds > 0:
            metrics["generated_tokens_per_s"] = new["generated_tokens"] / seconds
            metrics["prompt_tokens_per_s"] = new["prompt_tokens"] / seconds
        for name, (number, total, highest) in gauges.items():
            metrics |= {f"{name}_mean": total / number, f"{name}_max": highest}
        queries, hits = own.pop("prefix_cache_queries", 0.0), own.pop("prefix_cache_hits", 0.0)
        if queries > 0:
            metrics["prefix_hit_rate"] = hits / queries
        return metrics | own


# -- Load of the replicas while a batch was generated: metrics of the bubble at the end of a step --------------------


@dataclass(frozen=True)
class Span:
    """One request on one replica; times in seconds on one clock."""

    replica: str
    submitted: float
    """Time the request was made."""
    started: float
    """Time it was sent to its replica."""
    ended: float


def occupancy(spans: Sequence[Span], num_replicas: int, total_s: float | None = None) -> dict[str, float]:
    """Metrics of ``total_s`` seconds; None: those from the first request made to the last one ended.

        rollout/bubble_share        share of the replicas' time in which they had no request at all
        rollout/idle_slot_share     1 - (sum over requests of their time) / (time x most requests a replica had at once)
        rollout/waiting_s/mean,max  seconds from a request made to a request sent

    Empty without spans.
    """
    if not spans:
        return {}
    total = total_s or max(span.ended for span in spans) - min(span.submitted for span in spans)
    by_replica: dict[str, list[Span]] = {}
    for span in spans:
        by_replica.setdefault(span.replica, []).append(span)
    busy, slots = 0.0, 0
    for own in by_replica.values():
        # -1 before 1 at one time: a request that ends as another starts does not overlap it
        running = most = 0
        before = 0.0
        for now, change in sorted(change for span in own for change in ((span.started, 1), (span.ended, -1))):
            busy += now - before if running else 0.0
            running, before = running + change, now
            most = max(most, running)
        slots += most
    in_flight = sum(span.ended - span.started for span in spans)
    waiting = [span.started - span.submitted for span in spans]
    return {
        "rollout/bubble_share": 1 - busy / (total * num_replicas) if total else 0.0,
        "rollout/idle_slot_share": 1 - in_flight / (total * slots) if total and slots else 0.0,
        "rollout/waiting_s/mean": sum(waiting) / len(waiting),
        "rollout/waiting_s/max": max(waiting),
    }
