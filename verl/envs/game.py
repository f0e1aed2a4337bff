"""TextGame: what the built-in games share. Rules in front, an action out of the policy's text, the count of turns.

An environment need not be one; it may have `reset` and `step` alone (`verl.envs.base`).
"""

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from verl.rewards.scorers.matching import last_tagged
from verl.utils.py_functional import nearest_name

AnswerStyle = Literal["tag", "plain", "mention"]
"""Place of an action in the policy's text: the last ``<answer>...</answer>``; all of the text; the last mention."""

MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Left, down, right, up, as (row, column): the order in which the games on a grid name their actions."""


def answer_of(text: str, style: AnswerStyle) -> str | None:
    """Return what a text answers; None: it has no ``<answer>`` tag, or nothing in it. ``mention`` leaves all text."""
    return (last_tagged(text) if style == "tag" else text.strip()) or None


def choice_of(text: str, names: Sequence[str], style: AnswerStyle) -> int | None:
    """Return the index of the name that a text answers, whatever its case; None: it answers none of them."""
    answer = answer_of(text, style)
    if answer is None:
        return None
    lowered = [name.lower() for name in names]
    if style == "mention":
        # the longest first: of "up" and "up left" the second is meant
        parts = "|".join(re.escape(name) for name in sorted(lowered, key=len, reverse=True))
        mentions = re.findall(rf"(?<!\w)(?:{parts})(?!\w)", answer.lower())
        return lowered.index(mentions[-1]) if mentions else None
    return lowered.index(answer.lower()) if answer.lower() in lowered else None


class TextGame(ABC):
    """A game of one player by text.

    Args:
        prompt: ``full``: rules and the form of an answer stand above the first observation; ``terse``: observations
            alone, for models that learn the rules from rewards.
        instructions: text instead of the rules.
        answer: where the action stands in the policy's text. ``plain``, with actions of one letter, suits tiny models.
        max_steps: turns after which the episode is truncated. None: it is not; ``env.registry.<tag>.max_steps`` may.
        invalid_reward: of a turn without a valid action; the game stays as it is.
    """

    name: ClassVar[str]
    task_keys: ClassVar[tuple[str, ...] | None] = ()
    """What a row's task may bring: all of it or nothing, and then the game makes a task. None: anything."""

    def __init__(
        self,
        *,
        prompt: Literal["full", "terse"] = "full",
        instructions: str | None = None,
        answer: AnswerStyle = "tag",
        max_steps: int | None = None,
        invalid_reward: float = 0.0,
        **unknown: Any,
    ):
        if unknown:
            known = sorted(self.options())
            raise TypeError(
                f"{self.name} got an unexpected keyword argument {next(iter(unknown))!r}."
                f"{nearest_name(next(iter(unknown)), known)} It takes {', '.join(known)}."
            )
        styles = AnswerStyle.__args__  # type: ignore[attr-defined]  # what Literal lists
        self.require(answer in styles, "answer", answer, f"is unknown; it is one of {', '.join(styles)}")
        self.require(
            max_steps is None or max_steps > 0, "max_steps", max_steps, "must be above 0, or null for no limit"
        )
        self.require(prompt in ("full", "terse"), "prompt", prompt, "is unknown; it is full or terse")
        self.prompt, self.instructions, self.answer = prompt, instructions, answer
        self.max_steps, self.invalid_reward = max_steps, invalid_reward
        self.seed = self.turns = 0
        self.is_over = True
        self.is_truncated = False
        self.tells_success = True
        self.random = np.random.default_rng(0)

    @classmethod
    def options(cls) -> set[str]:
        """Return the names of the arguments of this game and of all games."""
        signatures = (inspect.signature(one.__init__) for one in (cls, TextGame))
        named = inspect.Parameter.VAR_KEYWORD
        return {name for one in signatures for name, it in one.parameters.items() if it.kind != named} - {"self"}

    @classmethod
    def require(cls, is_met: bool, key: str, value: Any, rule: str) -> None:
        """Raise ValueError where an option breaks a rule."""
        if not is_met:
            raise ValueError(f"{cls.name}: {key}={value!r} {rule}. Set it in env.registry.<tag>.kwargs.{key}.")

    # -- what a game says -----------------------------------------------------------------------------------------
    @abstractmethod
    def begin(self, task: Mapping[str, Any]) -> None:
        """Make the first state; all randomness is of ``self.random``. ``task``: what the row of data says of it."""

    @abstractmethod
    def read(self, text: str) -> Any:
        """Return the action in a text; None: there is no valid one."""

    @abstractmethod
    def play(self, action: Any) -> tuple[float, bool, dict[str, Any]]:
        """Take an action that `read` returned. Returns (reward, terminated, info); may set ``is_truncated``."""

    @abstractmethod
    def view(self) -> str:
        """Return the state as the policy sees it."""

    @abstractmethod
    def rules(self) -> str:
        """Return the rules and the form of an answer, in a few sentences."""

    def answer_rule(self, what: str, example: str) -> str:
        """Return the sentence that tells the form of an answer; ``what``: an action, such as *one move*."""
        if self.answer == "mention":
            return f"The last {what.removeprefix('one ')} that you name is taken."
        if self.answer == "plain":
            return f"Answer with {what} and nothing else."
        return f"End your answer with {what}, as in {self.written(example)}."

    def feedback(self, action: Any) -> str:
        """Return a line above the view that follows a turn; ``action`` is None where there was no valid one."""
        return "" if action is not None or self.prompt == "terse" else "That is no valid action."

    @property
    def state_id(self) -> str:
        """Name of the present state."""
        return self.view()

    # -- the interface of an environment --------------------------------------------------------------------------
    def reset(self, *, seed: int, **task: Any) -> tuple[str, dict[str, Any]]:
        """Begin an episode; equal seeds, tasks and actions give equal episodes.

        Raises:
            ValueError: the task has other keys than ``task_keys``, or a value that the game cannot take.
        """
        if task and self.task_keys is not None and set(task) != set(self.task_keys):
            known = f"brings {' and '.join(self.task_keys)}, or nothing" if self.task_keys else "brings nothing"
            raise ValueError(f"{self.name}: the row's task has {', '.join(sorted(task))}; it {known}. Correct the row.")
        self.random = np.random.default_rng(seed)
        self.seed, self.turns, self.is_over, self.is_truncated = seed, 0, False, False
        self.begin(task)
        head = self.instructions or (self.rules() if self.prompt == "full" else "")
        return "\n\n".join(filter(None, (head, self.view()))), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the policy's text.

        Raises:
            RuntimeError: no episode is under way.
        """
        if self.is_over:
            raise RuntimeError(f"{self.name}: step() was called while no episode is under way. Call reset() first.")
        self.turns += 1
        move = self.read(action)
        reward, terminated, info = (self.invalid_reward, False, {}) if move is None else self.play(move)
        is_last = self.max_steps is not None and self.turns >= self.max_steps
        truncated = not terminated and (self.is_truncated or is_last)
        self.is_over = terminated or truncated
        observation = "\n".join(filter(None, (self.feedback(move), self.view())))
        info = {**({"success": False} if self.tells_success else {}), "valid_action": move is not None, **info}
        return observation, float(reward), terminated, truncated, info

    def named(self, key: str, names: Sequence[str], count: int, rule: str) -> list[str]:
        """Return names as a list, checked to be ``count`` different ones."""
        listed = [str(name) for name in names]
        self.require(len({name.lower() for name in listed}) == count == len(listed), key, names, rule)
        return listed

    def written(self, answer: str) -> str:
        """Return an answer in the form that `read` expects."""
        return f"<answer>{answer}</answer>" if self.answer == "tag" else answer

    def frame(self) -> str:
        """Return the state as people see it."""
        return f"{self.name}, turn {self.turns}\n{self.view()}"
