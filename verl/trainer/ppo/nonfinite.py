"""When to stop a run whose gradients are no numbers: ``trainer.nonfinite_tolerance``."""

from __future__ import annotations

from collections.abc import Mapping


class NonFiniteGuard:
    """Counts the steps in a row whose gradient was not finite.

    Args:
        tolerance: ``trainer.nonfinite_tolerance``; that many end the run.
    """

    def __init__(self, tolerance: int) -> None:
        self.tolerance = tolerance
        self.in_a_row = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a finished step by its metrics.

        Raises:
            FloatingPointError: it is one too many.
        """
        skipped = [name for name in ("actor", "critic") if metrics.get(f"{name}/nonfinite_steps", 0) > 0]
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self.tolerance:
            raise FloatingPointError(
                f"{' and '.join(skipped)}: the gradient was not finite in {self.in_a_row} steps in a row, as many as "
                f"trainer.nonfinite_tolerance={self.tolerance} allows (the last is step {step}; those optimizer steps "
                f"were skipped). Lower optim.lr, look for extreme rewards, or raise the tolerance."
            )
