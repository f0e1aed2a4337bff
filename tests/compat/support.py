"""Runs of the main job with files of a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.runs import overrides, run_job

FILES = Path(__file__).parent / "files"


def train(task: dict[str, str], *words: str, files: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Run the main job for a step; ``files`` are further keys with dots in them. Returns the trainer."""
    settings.setdefault("trainer__total_training_steps", 1)
    return run_job([*overrides({**task, **(files or {})}, **settings), *words])
