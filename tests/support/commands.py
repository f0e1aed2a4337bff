"""The command lines of training that a shell script would run, found by running it with a Python that takes notes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
    for name in ("python", "python3"):
        stub = folder / name
        stub.write_text(NOTE_TAKER)
        stub.chmod(0o755)
    env = {**os.environ, **(environment or {}), "PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls)}
    subprocess.run(["bash", str(script), *arguments], check=True, env=env, cwd=ROOT, capture_output=True, text=True)
    return [call.splitlines() for call in calls.read_text().split("== call\n")[1:]]


def main_ppo_overrides(calls: list[list[str]]) -> list[list[str]]:
    """The overrides of those calls that run main_ppo, or main_agentic, which takes the same."""
    jobs = ("verl.trainer.main_ppo", "verl.trainer.main_agentic")
    return [call[2:] for call in calls if call[:1] == ["-m"] and call[1] in jobs]
