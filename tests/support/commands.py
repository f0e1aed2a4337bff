"""The command lines of training that a shell script would run, found by running it with a Python that takes notes."""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.composing import Start

ROOT = Path(__file__).parents[2]
JOBS = ("verl.trainer.main_ppo", "verl.trainer.main_agentic")
# One argument a line after a line that starts the call.
NOTE_TAKER = '#!/bin/sh\necho "== call" >> "$CALLS"\nfor word in "$@"; do printf "%s\\n" "$word" >> "$CALLS"; done\n'


def calls_of(script: Path, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> list[list[str]]:
    """Arguments of each ``python``/``python3`` call that ``bash script arguments`` makes.

    Args:
        folder: where the stand-in for Python is put.
        environment: further environment variables.
    """
    calls = folder / "calls"
    calls.write_text("")
    for name in ("python", "python3", "torchrun"):
        stub = folder / name
        stub.write_text(NOTE_TAKER)
        stub.chmod(0o755)
    env = {**os.environ, **(environment or {}), "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["bash", str(script), *arguments], check=True, env=env, cwd=ROOT, capture_output=True, text=True)
    return [call.splitlines() for call in calls.read_text().split("== call\n")[1:]]


def main_ppo_overrides(calls: list[list[str]]) -> list[list[str]]:
    """The overrides of those calls that run main_ppo, or main_agentic, which takes the same."""
    return [call[2:] for call in calls if call[:1] == ["-m"] and call[1] in JOBS]


def training_call(calls: list[list[str]]) -> tuple[Start, list[str]]:
    """The configuration that the one call of a training job among ``calls`` starts from, and its overrides."""
    from tests.support.composing import Start
    from verl.config.ppo import PPOConfig

    found = [call[1:] for call in calls if call[:1] == ["-m"] and call[1].startswith((*JOBS, "recipe.", "examples."))]
    assert len(found) == 1, calls
    module, *words = found[0]
    if module in JOBS:
        name = "agentic_trainer" if module.endswith("main_agentic") else "ppo_trainer"
        named = [word for word in words if word.startswith("--config-name=")]
        words = [word for word in words if word not in named]
        return Start(config_name=named[-1].partition("=")[2] if named else name), words
    recipe = importlib.import_module(module).RECIPE
    return Start(recipe.config_path, recipe.config_name, recipe.root or PPOConfig), words
