"""Supervised fine-tuning: ``python -m verl.trainer.fsdp_sft_trainer key=value ...``, or behind ``torchrun -m``.

The entry point only; the run is in ``verl/trainer/sft/``.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl.trainer.sft.job import main as run_command
from verl.trainer.sft.job import run_sft

__all__ = ["main", "run_sft"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    run_command(arguments, "verl.trainer.fsdp_sft_trainer")


if __name__ == "__main__":
    main()
