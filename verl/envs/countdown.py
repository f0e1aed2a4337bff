"""Countdown: reach a target with given numbers and + - * /, in several attempts."""

from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from verl.envs.game import TextGame, answer_of
from verl.rewards.scorers.short_answers import equation_value

_TRIES = 1000
"""Sets of numbers that are tried before the options are refused."""


class Countdown(TextGame):
    """Numbers, and a target that an equation with each of them once gives. A wrong equation is answered with its value.

    Args:
        num_numbers: numbers of a task.
        low, high: the smallest and the largest number.
        max_target: the largest target; the smallest is 1.
        operations: those of ``+-*/`` by which targets are made. An answer may use all four.
        goal_reward: for an equation that gives the target.
        wrong_reward: of a turn whose equation is valid and gives something else.
        max_steps: attempts.
        options: see `TextGame`.

    A row's task may bring ``numbers`` and ``target``.
    """

    name = "Countdown"
    task_keys = ("numbers", "target")

    def __init__(
        self,
        num_numbers: int = 3,
        low: int = 1,
        high: int = 20,
        max_target: int = 100,
        operations: str = "+-*/",
        goal_reward: float = 1.0,
        wrong_reward: float = 0.0,
        max_steps: int | None = 3,
        **options: Any,
    ):
        super().__init__(max_steps=max_steps, **options)
        self.require(num_numbers >= 2, "num_numbers", num_numbers, "must be at least 2")
        self.require(1 <= low < high, "low", low, f"must be at least 1 and below high={high}")
        self.require(max_target >= 1, "max_target", max_target, "must be at least 1")
        is_known = bool(operations) and set(operations) <= set("+-*/")
        self.require(is_known, "operations", operations, "must be some of + - * /")
        self.require(self.answer != "mention", "answer", self.answer, "finds no equation; use tag or plain")
        self.num_numbers, self.low, self.high, self.max_target = num_numbers, low, high, max_target
        self.operations, self.goal_reward, self.wrong_reward = operations, goal_reward, wrong_reward
        self.numbers: list[int] = []
        self.target = 0
        self.solution: str | None = None
        self.attempts: list[str] = []

    def begin(self, task: Mapping[str, Any]) -> None:
        self.attempts = []
        if task:
            self.numbers, self.target = [int(number) for number in task["numbers"]], int(task["target"])
            self.solution = None
            return
        for _ in range(_TRIES):
            self.numbers = self.random.integers(self.low, self.high + 1, self.num_numbers).tolist()
            value, self.solution = self._combined()
            if value.denominator == 1 and 1 <= value <= self.max_target and value not in self.numbers:
                self.target = int(value)
                return
        raise ValueError(
            f"Countdown: no target up to max_target={self.max_target} was found for {self.num_numbers} numbers from "
            f"{self.low} to {self.high} with {self.operations}. Raise max_target, or lower high."
        )

    def read(self, text: str) -> tuple[str, Fraction] | None:
        equation = (answer_of(text, self.answer) or "").split("=")[0].strip()
        try:
            value, used = equation_value(equation)
        except (ValueError, ZeroDivisionError):
            return None
        return (equation, value) if used == Counter(self.numbers) else None

    def play(self, action: tuple[str, Fraction]) -> tuple[float, bool, dict[str, Any]]:
        equation, value = action
        is_right = value == self.target
        self.attempts.append(f"{equation} = {value}")
        return self.goal_reward if is_right else self.wrong_reward, is_right, {"success": is_right}

    def view(self) -> str:
        return "\n".join([f"{' '.join(map(str, self.numbers))} -> {self.target}", *self.attempts])

    def feedback(self, action: Any) -> str:
        if action is not None or self.prompt == "terse":
            return ""
        return "That is no equation with each of the numbers once."

    def rules(self) -> str:
        return (
            "Write an equation that uses each of the numbers before the arrow once, with + - * / and brackets, and "
            "gives the number behind it.\n" + self.answer_rule("one equation", "(1 + 2) * 3")
        )

    def random_action(self, generator: np.random.Generator) -> str:
        """Return an equation with each number once, as text."""
        signs = "+-*"
        words = [str(self.numbers[index]) for index in generator.permutation(len(self.numbers))]
        return self.written("".join(word + signs[int(generator.integers(3))] for word in words)[:-1])

    def solve(self) -> list[str]:
        """Return the equation by which the target was made, as text; none for a task of the row."""
        return [self.written(self.solution)] if self.solution else []

    def _combined(self) -> tuple[Fraction, str]:
        """Combine two random numbers by a random operation until one is left."""
        parts = [(Fraction(number), str(number)) for number in self.numbers]
        while len(parts) > 1:
            one, other = self.random.choice(len(parts), 2, replace=False).tolist()
            (left, left_text), (right, right_text) = parts[one], parts[other]
            sign = self.operations[int(self.random.integers(len(self.operations)))]
            if sign == "/" and (right == 0 or (left / right).denominator != 1):
                sign = "+"
            value = {
                "+": left + right,
                "-": left - right,
                "*": left * right,
                "/": left / right if sign == "/" else left,
            }
            rest = [part for index, part in enumerate(parts) if index not in (one, other)]
            parts = [*rest, (value[sign], f"({left_text} {sign} {right_text})")]
        return parts[0][0], parts[0][1].removeprefix("(").removesuffix(")")
