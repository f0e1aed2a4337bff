"""Code: a program that passes tests, in several attempts; it runs in the sandbox under limits."""

import os
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from verl.envs.game import TextGame
from verl.rewards.scorers.matching import after_thinking, code_block
from verl.sandbox.code_runner import MEMORY_MB, Result, Tests, read_tests, run_tests
from verl.sandbox.outcomes import Outcome

_PROBLEMS: tuple[tuple[str, str, Callable[[list[int], int], Any]], ...] = (
    (
        "the sum of the numbers of a list that can be divided by {n}",
        "sum(x for x in values if x % {n} == 0)",
        lambda values, n: sum(x for x in values if x % n == 0),
    ),
    (
        "the number of values of a list that are above {n}",
        "sum(x > {n} for x in values)",
        lambda values, n: sum(x > n for x in values),
    ),
    (
        "a list of the values, each times {n}, from the last to the first",
        "[x * {n} for x in reversed(values)]",
        lambda values, n: [x * n for x in reversed(values)],
    ),
    ("the largest value of a list plus {n}", "max(values) + {n}", lambda values, n: max(values) + n),
)
"""What ``solve(values)`` returns, in words and in Python, for tasks without a row's problem."""


_NUMBERS: queue.SimpleQueue = queue.SimpleQueue()
for _number in range(max(2, os.cpu_count() or 1)):
    _NUMBERS.put(_number)


@contextmanager
def _free_number() -> Iterator[int]:
    """A fork server that no other episode of this process uses: one program that hangs holds up no other."""
    number = None
    while number is None:
        # in slices: a thread that is interrupted because nobody waits for it any more must not take one and be gone
        with suppress(queue.Empty):
            number = _NUMBERS.get(timeout=0.1)
    try:
        yield number
    finally:
        _NUMBERS.put(number)


class Code(TextGame):
    """A problem that a Python program solves. After a failure the policy reads what the first failed test found.

    Args:
        num_shown: tests whose failures are told in full; of the others only how many fail.
        share_reward: of the last attempt, times the share of its tests that pass. A program that passes all: 1.
        test_s, total_s, memory_mb: limits of one test, of all tests of an attempt, and of the program. Programs that
            wait for a processor count against ``env.step_timeout``.
        max_steps: attempts.
        options: see `TextGame`.

    A row's task may bring ``question`` and ``tests``: ``{"inputs": [...], "outputs": [...], "fn_name": ...}`` or
    ``{"assert_case": [...]}``, a dict or JSON. A turn without a block of code is no valid action.
    """

    name = "Code"
    task_keys = ("question", "tests")

    def __init__(
        self,
        num_shown: int = 2,
        share_reward: float = 0.0,
        test_s: float = 3.0,
        total_s: float = 10.0,
        memory_mb: int = MEMORY_MB,
        max_steps: int | None = 3,
        **options: Any,
    ):
        self.require("answer" not in options, "answer", options.get("answer"), "has no effect: code stands in a block")
        super().__init__(max_steps=max_steps, **options)
        self.require(num_shown >= 0, "num_shown", num_shown, "must not be negative")
        self.require(0 <= share_reward <= 1, "share_reward", share_reward, "must be from 0 to 1")
        for key, value in (("test_s", test_s), ("total_s", total_s), ("memory_mb", memory_mb)):
            self.require(value > 0, key, value, "must be above 0")
        self.num_shown, self.share_reward = num_shown, share_reward
        self.test_s, self.total_s, self.memory_mb = test_s, total_s, memory_mb
        self.question, self.solution = "", ""
        self.tests = Tests()
        self.results: list[Result] = []

    def begin(self, task: Mapping[str, Any]) -> None:
        self.results = []
        if task:
            self.question, self.tests, self.solution = task["question"], read_tests(task["tests"]), ""
            return
        n = int(self.random.integers(2, 6))
        what, expression, right = _PROBLEMS[int(self.random.integers(len(_PROBLEMS)))]
        what = what.format(n=n)
        self.question = f"Write a function solve(values) that returns {what}. A list has at least one whole number."
        self.solution = f"def solve(values):\n    return {expression.format(n=n)}\n"
        lists = [self.random.integers(-9, 10, int(self.random.integers(1, 7))).tolist() for _ in range(5)]
        self.tests = Tests(tuple([one] for one in lists), tuple(right(one, n) for one in lists), "solve")

    def read(self, text: str) -> str | None:
        answer = after_thinking(text)
        return code_block(answer) if "```" in answer else None

    def play(self, action: str) -> tuple[float, bool, dict[str, Any]]:
        with _free_number() as number:
            self.results = run_tests(action, self.tests, self.test_s, self.total_s, self.memory_mb, number=number)
        passed = sum(result.outcome is Outcome.PASSED for result in self.results)
        is_right, share = passed == len(self.results), passed / len(self.results)
        is_last = self.max_steps is not None and self.turns >= self.max_steps
        reward = 1.0 if is_right else self.share_reward * share * is_last
        return reward, is_right, {"success": is_right, "tests_passed": share}

    def view(self) -> str:
        return "" if self.turns else self.question

    def feedback(self, action: str | None) -> str:
        if action is None:
            return "No block of code was found. Write the program between ```python and ```."
        failed = [(number, one) for number, one in enumerate(self.results) if one.outcome is not Outcome.PASSED]
        if not failed:
            return ""
        lines = [f"{len(failed)} of {len(self.results)} tests fail."]
        number, first = failed[0]
        if number < self.num_shown:
            given = f" with the arguments {self.tests.inputs[number]}" if number < len(self.tests.inputs) else ""
            lines.append(f"Test {number + 1}{given}: {first.outcome.value}. {first.detail}".strip())
        return "\n".join(lines)

    @property
    def state_id(self) -> str:
        """The problem, and the outcomes of the last attempt."""
        return f"{self.question} {self.turns} {[result.outcome.value for result in self.results]}"

    def rules(self) -> str:
        return "Solve the problem in Python. Write the program between ```python and ```."

    def random_action(self, generator: np.random.Generator) -> str:
        """Return a program that returns one of a few values."""
        return f"```python\ndef solve(values):\n    return {int(generator.integers(-3, 4))}\n```"

    def solve(self) -> list[str]:
        """Return a right program; none for a problem of the row."""
        return [f"```python\n{self.solution}```"] if self.solution else []

    def frame(self) -> str:
        outcomes = ", ".join(result.outcome.value for result in self.results)
        return f"{self.name}, turn {self.turns}\n{self.question}\n{outcomes}".rstrip()
