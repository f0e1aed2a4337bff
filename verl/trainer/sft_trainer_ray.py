"""Supervised fine-tuning on Ray: ``python -m verl.trainer.sft_trainer_ray key=value ...``.

``verl.trainer.sft_trainer`` with ``trainer.controller=ray``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.trainer.sft.job import main as run_command
from verl.trainer.sft.job import run_sft

__all__ = ["main", "run_sft"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    words = sys.argv[1:] if arguments is None else arguments
    run_command(["trainer.controller=ray", *words], "verl.trainer.sft_trainer")


if __name__ == "__main__":
    main()
