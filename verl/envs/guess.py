"""Guess: find a hidden number from "higher" and "lower". Bandit: find the arm that pays best."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.envs.game import TextGame, answer_of, choice_of

_NUMBER = re.compile(r"[+-]?\d{1,9}")


class Guess(TextGame):
    """A hidden whole number; after each guess the policy reads on which side of it the number lies.

    Args:
        low, high: the smallest and the largest number there may be.
        is_compared: False: a wrong guess is called wrong and no more.
        words: of a number that is higher, lower, and of neither.
        step_reward, goal_reward: of each valid guess, and added to it for the right one.
        options: see `TextGame`.

    A row's task may bring ``number``.
    """

    name = "Guess"
    task_keys = ("number",)

    def __init__(
        self,
        low: int = 1,
        high: int = 10,
        is_compared: bool = True,
        words: Sequence[str] = ("higher", "lower", "wrong"),
        step_reward: float = 0.0,
        goal_reward: float = 1.0,
        **options: Any,
    ):
        super().__init__(**options)
        self.require(low < high, "high", high, f"must be above low={low}")
        self.words = self.named("words", words, 3, "must be three different words, for higher, lower and wrong")
        self.low, self.high, self.is_compared = low, high, is_compared
        self.step_reward, self.goal_reward = step_reward, goal_reward
        self.number = low
        self.guesses: list[int] = []

    def begin(self, task: Mapping[str, Any]) -> None:
        number = task.get("number")
        self.number = int(self.random.integers(self.low, self.high + 1)) if number is None else int(number)
        if not self.low <= self.number <= self.high:
            raise ValueError(
                f"Guess: number={number} of the row's task is not from low={self.low} to high={self.high}. Correct one."
            )
        self.guesses = []

    def read(self, text: str) -> int | None:
        answer = answer_of(text, self.answer)
        found = _NUMBER.findall(answer or "") if self.answer == "mention" else [answer or ""]
        if not found or not _NUMBER.fullmatch(found[-1]):
            return None
        return number if self.low <= (number := int(found[-1])) <= self.high else None

    def play(self, action: int) -> tuple[float, bool, dict[str, Any]]:
        self.guesses.append(action)
        is_right = action == self.number
        return self.step_reward + self.goal_reward * is_right, is_right, {"success": is_right}

    def view(self) -> str:
        return "\n".join(f"{guess}: {self._told(guess)}" for guess in self.guesses) or "?"

    def feedback(self, action: int | None) -> str:
        if action is not None or self.prompt == "terse":
            return ""
        return f"That is no whole number from {self.low} to {self.high}."

    def rules(self) -> str:
        known = (
            f" After each guess you read whether it is {self.words[0]} or {self.words[1]}." if self.is_compared else ""
        )
        return f"Guess a whole number from {self.low} to {self.high}.{known}\n" + self.answer_rule(
            "one number", str(self.low)
        )

    @property
    def state_id(self) -> str:
        """Bounds and counts known from the guesses so far, whatever their order."""
        return f"{sorted(set(self.guesses))} {[self._told(guess) for guess in sorted(set(self.guesses))]}"

    def random_action(self, generator: np.random.Generator) -> str:
        """Return a number of the range, as text."""
        return self.written(str(int(generator.integers(self.low, self.high + 1))))

    def solve(self) -> list[str]:
        """Return the right guess, as text."""
        return [self.written(str(self.number))]

    def frame(self) -> str:
        return f"{super().frame()}\nThe number is {self.number}."

    def _told(self, guess: int) -> str:
        if guess == self.number:
            return "right"
        return self.words[2 if not self.is_compared else 0 if self.number > guess else 1]


class Bandit(TextGame):
    """Arms that pay 1 or 0, each with its own hidden probability; the episode is a number of pulls.

    Args:
        arms: their names; ``AB`` stands for two of one letter.
        num_pulls: turns of an episode, those without a valid action included.
        probabilities: of the arms; each episode mixes them. None: random, uniform from 0 to 1.
        options: see `TextGame`. ``max_steps`` is ``num_pulls``.
    """

    name = "Bandit"

    def __init__(
        self,
        arms: Sequence[str] = ("A", "B"),
        num_pulls: int = 5,
        probabilities: Sequence[float] | None = (0.1, 0.9),
        **options: Any,
    ):
        self.require("max_steps" not in options, "max_steps", options.get("max_steps"), "is num_pulls of this game")
        self.require(num_pulls > 0, "num_pulls", num_pulls, "must be above 0")
        super().__init__(**options)
        self.arms = self.named("arms", arms, max(len(arms), 2), "must be two or more different names")
        is_given = (
            probabilities is None or len(probabilities) == len(self.arms) and all(0 <= p <= 1 for p in probabilities)
        )
        self.require(
            is_given, "probabilities", probabilities, f"must be one for each of the arms {self.arms}, from 0 to 1"
        )
        self.num_pulls, self.probabilities = num_pulls, probabilities
        self.chances: list[float] = []
        self.pulls: list[tuple[int, int]] = []

    def begin(self, task: Mapping[str, Any]) -> None:
        given = self.random.random(len(self.arms)) if self.probabilities is None else self.probabilities
        self.chances = self.random.permutation(np.asarray(given, float)).tolist()
        self.pulls = []

    def read(self, text: str) -> int | None:
        return choice_of(text, self.arms, self.answer)

    def play(self, action: int) -> tuple[float, bool, dict[str, Any]]:
        # one number a turn, whichever arm: the payments of an arm do not hang on the choices before
        luck = self.random.random(len(self.arms))[action]
        paid = int(luck < self.chances[action])
        self.pulls.append((action, paid))
        return paid, False, {"success": self.chances[action] == max(self.chances)}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        self.is_over = self.turns >= self.num_pulls
        return observation, reward, self.is_over, False, info

    def view(self) -> str:
        return "\n".join(f"{self.arms[arm]}: {paid}" for arm, paid in self.pulls) or "?"

    def rules(self) -> str:
        return (
            f"Each arm of a machine pays 1 or 0 with a probability of its own. You have {self.num_pulls} pulls; win as "
            f"much as you can.\nArms are {', '.join(self.arms)}. " + self.answer_rule("one arm", self.arms[0])
        )

    def random_action(self, generator: np.random.Generator) -> str:
        """Return an arm, as text."""
        return self.written(self.arms[int(generator.integers(len(self.arms)))])

    def solve(self) -> list[str]:
        """Return the best arm as often as pulls are left, as texts."""
        best = int(np.argmax(self.chances))
        return [self.written(self.arms[best])] * (self.num_pulls - self.turns)

    def frame(self) -> str:
        return f"{super().frame()}\nProbabilities are {self.chances}."
