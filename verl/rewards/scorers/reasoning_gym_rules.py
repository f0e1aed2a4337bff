"""The rules of reasoning-gym's tasks. Runs in a child process only (``reasoning_gym_tasks.py``)."""

import json

import reasoning_gym


def score(task: str, answer: str, entry: str) -> float | None:
    """The task's score of an answer, 0 to 1; None if there is no such task."""
    try:
        rule = reasoning_gym.get_score_answer_fn(task)
    except ValueError:
        return None
    return float(rule(answer, json.loads(entry)))
