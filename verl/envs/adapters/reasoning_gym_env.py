"""Tasks of reasoning-gym, each an episode of one turn: ``reasoning_gym:chain_sum``."""

import json
from typing import Any

import reasoning_gym

from verl.envs.game import answer_of
from verl.rewards.scorers.reasoning_gym_tasks import PREFIX, compute_score


class ReasoningGymEnvironment:
    """A task of reasoning-gym; the seed makes its question, and its own rule scores the answer.

    Args:
        name: the data set, as ``chain_sum``.
        success_score: the score from which an answer is right.
        options: arguments of the data set.
    """

    def __init__(self, name: str, success_score: float = 1.0, **options: Any):
        self.id, self.success_score, self.options = name, success_score, options
        for key in ("seed", "size"):
            if key in options:
                raise ValueError(f"reasoning_gym:{name}: {key}={options[key]!r} is set by each episode. Leave it out.")
        self.entry: dict[str, Any] | None = None

    def reset(self, *, seed: int, **task: Any) -> tuple[str, dict[str, Any]]:
        """Make a question. ``task``: more arguments of the data set."""
        dataset = reasoning_gym.create_dataset(self.id, seed=seed, size=1, **{**self.options, **task})
        self.entry = dataset[0]
        return f"{self.entry['question']}\n\nEnd your answer with the solution in <answer></answer>.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score an answer."""
        if self.entry is None:
            raise RuntimeError(f"reasoning_gym:{self.id}: step() was called while no episode is under way.")
        entry = json.dumps(self.entry, default=str)
        score = compute_score(f"{PREFIX}{self.id}", action, self.entry["answer"], {"entry": entry})
        self.entry = None
        is_valid = answer_of(action, "tag") is not None
        return "", score, True, False, {"success": score >= self.success_score, "valid_action": is_valid}

    def solve(self) -> list[str]:
        """Return the right answer, where the data set gives one."""
        answer = self.entry and self.entry["answer"]
        return [] if answer is None else [f"<answer>{answer}</answer>"]
