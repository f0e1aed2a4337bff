"""Math: a problem, a scorer of the package or of the user's, and further attempts after a wrong answer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from verl.envs.game import TextGame
from verl.rewards.scorers import default_compute_score, has_scorer, unknown
from verl.rewards.scorers.matching import after_thinking
from verl.sandbox.outcomes import to_number
from verl.utils.import_utils import load_extern_type, split_file_name

_ANSWER = "ANSWER"


class Math(TextGame):
    """A problem whose answer a rule scores; a wrong answer is answered with that, and may be corrected.

    Args:
        scorer: data source of a built-in scorer, as ``math`` or ``openai/gsm8k``, or ``path/file.py:function`` with the
            arguments of a reward function: (data_source, solution_str, ground_truth, extra_info).
        form: how an answer is written, with ANSWER in its place; the rules show it, and a turn without the text before
            ANSWER is no valid action. ``#### ANSWER`` for ``openai/gsm8k``.
        success_score: the score from which an answer is right.
        discount: the reward of an answer is its score times this to the power of the attempts before.
        max_operand: of the sums and products that are made where a row brings no problem.
        max_steps: attempts.
        options: see `TextGame`.

    A row's task may bring ``question`` and ``ground_truth``. The reward of an attempt that is wrong and not the last
    is 0; the last one's is its score.
    """

    name = "Math"
    task_keys = ("question", "ground_truth")

    def __init__(
        self,
        scorer: str = "math",
        form: str = "\\boxed{ANSWER}",
        success_score: float = 1.0,
        discount: float = 1.0,
        max_operand: int = 20,
        max_steps: int | None = 3,
        **options: Any,
    ):
        self.require("answer" not in options, "answer", options.get("answer"), "has no effect here: set form")
        super().__init__(max_steps=max_steps, **options)
        self.require(form.count(_ANSWER) == 1, "form", form, "must have ANSWER in the place of the answer, once")
        self.require(0 <= discount <= 1, "discount", discount, "must be from 0 to 1")
        self.require(max_operand >= 1, "max_operand", max_operand, "must be at least 1")
        self.scorer = _scorer(scorer)
        self.form, self.success_score, self.discount, self.max_operand = form, success_score, discount, max_operand
        self.question, self.ground_truth = "", ""
        self.attempts = 0

    def begin(self, task: Mapping[str, Any]) -> None:
        self.attempts = 0
        if task:
            self.question, self.ground_truth = task["question"], task["ground_truth"]
            return
        one, two, three = self.random.integers(1, self.max_operand + 1, 3).tolist()
        self.question, self.ground_truth = f"What is {one} * {two} + {three}?", str(one * two + three)

    def read(self, text: str) -> str | None:
        return text if self.form.partition(_ANSWER)[0] in after_thinking(text) else None

    def play(self, action: str) -> tuple[float, bool, dict[str, Any]]:
        score = to_number(self.scorer(solution_str=action, ground_truth=self.ground_truth, extra_info={}))
        is_right = score >= self.success_score
        is_last = self.max_steps is not None and self.turns >= self.max_steps
        reward = score * self.discount**self.attempts if is_right or is_last else 0.0
        self.attempts += 1
        return reward, is_right, {"success": is_right, "score": score}

    def view(self) -> str:
        return "" if self.turns else self.question

    def feedback(self, action: str | None) -> str:
        if action is None:
            return f"No answer of the form {self.form} was found."
        return "" if self.is_over else "That is not right. Find the mistake and answer again."

    @property
    def state_id(self) -> str:
        """The problem, and the attempts at it so far."""
        return f"{self.question} {self.turns}"

    def rules(self) -> str:
        return f"Solve the problem. Write your answer as {self.form}."

    def random_action(self, generator: np.random.Generator) -> str:
        """Return a number in the form of an answer."""
        return self.form.replace(_ANSWER, str(int(generator.integers(self.max_operand**2))))

    def solve(self) -> list[str]:
        """Return the ground truth in the form of an answer."""
        return [self.form.replace(_ANSWER, str(self.ground_truth))]

    def frame(self) -> str:
        return f"{self.name}, turn {self.turns}\n{self.question}\nThe answer is {self.ground_truth}."


def _scorer(name: str) -> Callable[..., Any]:
    if in_file := split_file_name(name):
        return partial(load_extern_type(*in_file), data_source=name)
    if not has_scorer(name):
        raise unknown(name)
    return partial(default_compute_score, data_source=name)
