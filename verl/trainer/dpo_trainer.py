"""Policies from preferences: ``python -m verl.trainer.dpo_trainer key=value ...``, or the same behind ``torchrun -m``.

The entry point only; the run is in ``verl/trainer/preference/``.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.preference.job import DPOJob
from verl.trainer.sft.job import main as run_command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    run_command(arguments, "verl.trainer.dpo_trainer", DPOJob)


if __name__ == "__main__":
    main()
