"""Reasoning Gym's tasks, each scored by its own rule in the package (Stojanovski et al. 2025, arXiv:2505.24760).

Some of these rules hand the answer to sympy's parser, which evaluates Python: they run in a child process.
"""

import importlib.util
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verl.rewards.scorers.matching import after_thinking, last_tagged
from verl.sandbox.fork_server import fork_server
from verl.sandbox.outcomes import SandboxError
from verl.utils.distribution import install_command

SECONDS = 5.0
"""Seconds of scoring one answer."""

PREFIX = "reasoning_gym/"


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
) -> float:
    """The task's own score, 0 to 1, of the last ``<answer>``; 0 without one, and for one its rule cannot read.

    Args:
        data_source: ``reasoning_gym/<task>``.
        extra_info: holds ``entry``, the item that ``reasoning_gym`` made (question, answer, metadata), as JSON or dict.

    Raises:
        ImportError: reasoning-gym is not installed.
        ValueError: the row has no ``entry``, or the package has no such task.
    """
    _check_installed()
    task = (extra_info or {}).get("dataset") or data_source.removeprefix(PREFIX)
    entry = (extra_info or {}).get("entry")
    if not entry:
        raise ValueError(
            f"data_source={data_source!r}: extra_info holds no 'entry', which the task's rule reads. Write the item "
            'that reasoning_gym made into it, as JSON: {"question": ..., "answer": ..., "metadata": {...}}.'
        )
    answer = last_tagged(after_thinking(solution_str))
    if not answer:
        return 0.0
    # as text: arguments of a fork server travel as JSON, which has no mapping but dict
    entry = json.dumps(dict(entry)) if isinstance(entry, Mapping) else str(entry)
    try:
        score = fork_server("verl.rewards.scorers.reasoning_gym_rules:score", SECONDS)(task, answer, entry)
    except SandboxError:
        # the rule raised or hung on this answer, which is the answer's fault and must not end the run
        return 0.0
    if score is None:
        raise ValueError(f"data_source={data_source!r}: reasoning-gym knows no task {task!r}.")
    return score


@lru_cache(maxsize=1)
def _check_installed() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ImportError(
            "data_source='reasoning_gym/...' is scored by the package reasoning-gym, which is not installed: "
            f"{install_command('reasoning-gym')}."
        )
