"""Load of the replicas while a batch was generated: metrics of the bubble at the end of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One request on one replica; times in seconds on one clock."""

    replica: str
    submitted: float
    """Time the request was made."""
    started: float
    """Time it was sent to its replica."""
    ended: float


def occupancy(spans: Sequence[Span], num_replicas: int) -> dict[str, float]:
    """Metrics of one step, whose time runs from the first request made to the last one ended.

        rollout/bubble_share        share of the replicas' time in which they had no request at all
        rollout/idle_slot_share     1 - (sum over requests of their time) / (time x most requests a replica had at once)
        rollout/waiting_s/mean,max  seconds from a request made to a request sent

    Empty without spans.
    """
    if not spans:
        return {}
    total = max(span.ended for span in spans) - min(span.submitted for span in spans)
    by_replica: dict[str, list[Span]] = {}
    for span in spans:
        by_replica.setdefault(span.replica, []).append(span)
    busy = sum(_covered(own) for own in by_replica.values())
    slots = sum(_most_at_once(own) for own in by_replica.values())
    running = sum(span.ended - span.started for span in spans)
    waiting = [span.started - span.submitted for span in spans]
    return {
        "rollout/bubble_share": 1 - busy / (total * num_replicas) if total else 0.0,
        "rollout/idle_slot_share": 1 - running / (total * slots) if total and slots else 0.0,
        "rollout/waiting_s/mean": sum(waiting) / len(waiting),
        "rollout/waiting_s/max": max(waiting),
    }


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of them ran."""
    covered, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.started):
        covered += max(0.0, span.ended - max(span.started, until))
        until = max(until, span.ended)
    return covered


def _most_at_once(spans: Iterable[Span]) -> int:
    """The largest number that ran at one time; one that ends as another starts does not overlap it."""
    changes = sorted(change for span in spans for change in ((span.started, 1), (span.ended, -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most
