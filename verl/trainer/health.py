"""Health of a run, read off the metrics of its steps: rules that warn once, and that end a run by ``trainer.halt_on``.

Knows numbers and options only: no batch, no worker. What a rule looks at is a metric of the step, so that whoever
reads the metrics of a run can apply it again. The rules themselves are those of a kind of training:
`verl.trainer.ppo.health` and `verl.trainer.sft.health`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from verl.utils.exit_codes import ExitCode

WINDOW, MIN_COUNT = 10, 5
"""A cause is reported once it held in ``MIN_COUNT`` of the last ``WINDOW`` steps."""

SPAN, SETTLED = 50, 20
"""Steps over which a trend is looked for, and the fewest that show one."""


class UnhealthyRun(RuntimeError):
    """A run that was ended by a rule of ``trainer.halt_on``."""

    exit_class = ExitCode.UNHEALTHY


class Cause(NamedTuple):
    """Something wrong with a step."""

    rule: str
    """The name that ``trainer.halt_on`` knows it by."""
    name: str
    text: str
    """What was seen, and what to change; follows "in 5 of the last 7 steps"."""
    is_trend: bool = False
    """Whether ``text`` is of many steps already, and stands alone."""


class Health:
    """Report, once a cause, what keeps a run from learning or will end it, and what to change.

    A subclass yields the causes of a step (`causes`), and keeps in ``_past`` what it compares later steps with
    (`remember`).

    Args:
        trainer: the section with ``halt_on`` and ``health``, of which ``memory`` is read here.
        total_steps: length of the run.

    Attributes:
        metrics: of the last step noted: the rules it broke, and how fast memory grows.
    """

    def __init__(self, trainer: Any, total_steps: int = 0) -> None:
        self.halt_on, self.limits = list(trainer.halt_on), trainer.health
        self.total_steps = total_steps
        self.steps = 0
        self.halting: list[str] = []
        self.metrics: dict[str, float] = {}
        self._recent: dict[str, deque[bool]] = {}
        self._reported: set[str] = set()
        self._past: dict[str, deque[float]] = {}
        self._memory: dict[str, deque[float]] = {}

    def causes(self, metrics: Mapping[str, float]) -> Iterator[Cause]:
        """Yield every cause for which a step taught nothing, or the next will."""
        raise NotImplementedError

    def remember(self, metrics: Mapping[str, float]) -> dict[str, float | None]:
        """Return what later steps are compared with, by name; None and what is not finite are left out."""
        return {}

    def note(
        self, metrics: Mapping[str, float], *, memory: Mapping[str, float] | None = None, free_memory: float = 0.0
    ) -> list[str]:
        """Count a step; return the messages about it.

        Args:
            metrics: of the step.
            memory: MiB of each process of the run, by its name.
            free_memory: MiB that the machine has left.
        """
        self.steps += 1
        self.metrics = {}
        found = (*self.causes(metrics), *self._memory_growth(memory or {}, free_memory))
        causes = {cause.name: cause for cause in found}
        self.metrics["health/broken_rules"] = len({cause.rule for cause in found})
        for name, value in self.remember(metrics).items():
            if value is not None and np.isfinite(value):
                self._past.setdefault(name, deque(maxlen=SPAN)).append(float(value))
        sentences = []
        for name in dict.fromkeys((*self._recent, *causes)):
            recent = self._recent.setdefault(name, deque(maxlen=WINDOW))
            recent.append(name in causes)
            cause = causes.get(name)
            if cause is None or not (cause.is_trend or sum(recent) >= MIN_COUNT):
                continue
            seen = cause.text if cause.is_trend else f"in {sum(recent)} of the last {len(recent)} steps {cause.text}"
            if cause.rule in self.halt_on:
                self.halting.append(f"{cause.rule}: {seen}")
            if name not in self._reported:
                self._reported.add(name)
                sentences.append(seen)
        return sentences

    def check(self, step: int, checkpoint: Any = None) -> None:
        """End the run if a rule of ``trainer.halt_on`` asks for it.

        Args:
            checkpoint: folder of the newest complete one, if there is any.

        Raises:
            UnhealthyRun: with what was seen.
        """
        if not self.halting:
            return
        kept = f"The newest checkpoint is {checkpoint}." if checkpoint else "No checkpoint has been written."
        rules = ", ".join(self.halt_on)
        raise UnhealthyRun(
            f"step {step}: trainer.halt_on=[{rules}] ends the run. {'; '.join(self.halting)}. {kept} Mend the "
            "cause, or leave the rule out of trainer.halt_on, and start the same command again."
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint; memory is left out, since a resumed run has other processes."""
        return {
            "steps": self.steps,
            "recent": {name: list(flags) for name, flags in self._recent.items()},
            "reported": sorted(self._reported),
            "past": {name: list(values) for name, values in self._past.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; an empty state, of one without, changes nothing."""
        self.steps = state.get("steps", 0)
        self._recent = {name: deque(flags, WINDOW) for name, flags in state.get("recent", {}).items()}
        self._reported = set(state.get("reported", ()))
        self._past = {name: deque(values, SPAN) for name, values in state.get("past", {}).items()}

    def _memory_growth(self, memory: Mapping[str, float], free: float) -> Iterator[Cause]:
        """Yield that the run's memory will be more than the machine has before its last step."""
        sizes = {"": sum(memory.values()), **memory}  # under no name: of all, also of those that come and go
        self._memory = {name: self._memory.get(name, deque(maxlen=SPAN)) for name in sizes if memory}
        for name, past in self._memory.items():
            past.append(sizes[name])
        grown = {name: growth(list(past)) for name, past in self._memory.items()}
        total, left = grown.pop("", 0.0), max(0, self.total_steps - self.steps)
        self.metrics["perf/memory_growth_mb"] = total
        if self.limits.memory is None or not total or total * left <= self.limits.memory * free:
            return
        most = max(grown, key=lambda name: grown[name])
        yield Cause(
            "memory",
            "memory",
            f"the memory of the run grows by {total:.3g} MiB a step, most of all that of {most} "
            f"({grown[most]:.3g} MiB), and {free:.0f} MiB are left: too few for the {left} steps to come, enough for "
            f"about {free / total:.0f}. Save often enough to resume (trainer.save_freq), and look at memory.jsonl with "
            "trainer.memory_ledger=true",
            is_trend=True,
        )


def growth(sizes: list[float]) -> float:
    """Return the slope of a size a step; 0 where it does not stand out from its own noise.

    It is that of the half that grew less: what fills its caches, or takes memory once, is not growing in both. By least
    squares, and only if the line rises over all steps by more than three standard deviations of what lies beside it.
    """
    if len(sizes) < SETTLED:
        return 0.0

    def line(values: list[float]) -> tuple[float, float]:
        slope, start = np.polyfit(steps := np.arange(len(values)), values, 1)
        return float(slope), float(np.std(values - (start + slope * steps)))

    (slope, noise), half = line(sizes), len(sizes) // 2
    if slope * len(sizes) <= max(3 * noise, 1e-9):
        return 0.0
    return max(0.0, min(slope, line(sizes[:half])[0], line(sizes[half:])[0]))
