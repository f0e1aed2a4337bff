"""Ends of a run before its last step: a signal, ``trainer.max_time``, the end of an elastic instance.

Each lets the run finish the step it is in and save it. Knows clocks and signals, not what a step is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from verl.telemetry.flight_recorder import flight_recorder
from verl.utils.exit_codes import ExitCode
from verl.utils.process import Terminated

EXPIRY_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Environment variables in which a provider says when an elastic instance ends, in seconds since 1970."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stalled(Terminated):
    """SIGTERM of this process's own watchdog: the step will never end."""

    exit_class = ExitCode.WORKER


class EarlyStop:
    """Whether a run ends after the step it is in, and why.

    Args:
        trainer: section of the configuration; ``trainer.max_time`` counts from now.

    Attributes:
        reason: why it ends, for a sentence; None as long as it goes on.
        is_training: whether a step is under way; before the first one there is nothing to finish.
    """

    def __init__(self, trainer: Any) -> None:
        self.reason: str | None = None
        self.is_training = False
        self._can_save = trainer.save_freq > 0
        self._limits = list(_limits(trainer))
        self._step_begin = 0.0
        self._longest_step = self._longest_save = 0.0

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Answer the first SIGINT or SIGTERM in this block by ending after the step, the second by ending at once.

        At once also where no step is under way, and where ``trainer.save_freq`` saves none: nothing would be kept.
        """
        if threading.current_thread() is not threading.main_thread():  # Python delivers signals to that one only
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if "ended" in flight_recorder().notes:
            raise Stalled
        if self.reason is not None or not (self.is_training and self._can_save):
            raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
        self.reason = f"{name} was received"
        with suppress(OSError):  # not print: the signal may have come in the middle of one
            os.write(2, f"\n{name}: the run ends when this step is saved. A second signal ends it at once.\n".encode())

    def begin_step(self) -> None:
        """Note that a step begins; what came since the last one, validation for example, belongs to that."""
        now = time.monotonic()
        if self.is_training:
            self._longest_step = max(self._longest_step, now - self._step_begin)
        self.is_training, self._step_begin = True, now

    def saved(self, seconds: float) -> None:
        """Note how long a save took."""
        self._longest_save = max(self._longest_save, seconds)

    def is_due(self) -> bool:
        """Whether the run ends after the step that is being finished.

        It does where another step and a save, each as long as the longest yet, would not be over in time. Before the
        first save one is taken to be as long as a step.
        """
        step = max(self._longest_step, time.monotonic() - self._step_begin)
        needed = step + (self._longest_save or step)
        for ends_at, clock, why in self._limits if self.reason is None else ():
            if clock() + needed > ends_at:
                self.reason = why
                break
        return self.reason is not None


def _limits(trainer: Any) -> Iterator[tuple[float, Any, str]]:
    """Yield limits of time: when the run must be over, the clock of that, and why."""
    if trainer.max_time is not None:
        yield (
            time.monotonic() + trainer.max_time,
            time.monotonic,
            f"trainer.max_time={trainer.max_time:g} s allows no other step",
        )
    for name in EXPIRY_VARIABLES:
        if not (value := os.environ.get(name)):
            continue
        try:
            expiry = float(value)
        except ValueError:
            raise ValueError(
                f"{name}={value} is not a number: it says when this instance ends, in seconds since 1970. Set it to "
                "such a number, or unset it."
            ) from None
        redundant = trainer.esi_redundant_time
        why = f"this instance ends soon ({name}, trainer.esi_redundant_time={redundant})"
        yield expiry - redundant, time.time, why
