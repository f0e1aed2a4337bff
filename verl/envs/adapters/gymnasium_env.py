"""Environments of gymnasium, as text: ``gymnasium:FrozenLake-v1``."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from verl.envs.game import TextGame, answer_of, choice_of
from verl.utils.py_functional import nearest_name

_COLORED = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_COLORS = {"31": "red", "32": "green", "33": "yellow", "34": "blue", "35": "magenta", "36": "cyan"}
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")


class GymnasiumEnvironment(TextGame):
    """An environment of gymnasium whose actions are numbers or words, and whose states can be written.

    Args:
        name: its ID, as ``FrozenLake-v1``; ``module:ID`` imports the module first.
        observation: ``ansi``: the text that the environment renders; ``obs``: the observation, written as numbers;
            ``both``. None: ``ansi`` where it can draw text. A mark that is a color there becomes ``[X]`` or
            ``blue(X)``.
        actions: names of a discrete space's actions, in order. None: their numbers.
        instructions: the rules, which gymnasium does not tell. None: the form of an action alone.
        success_return: the sum of rewards from which an episode counts as success. None: ``info`` of the environment
            tells (``success`` or ``is_success``), or nothing does.
        prompt, answer, max_steps, invalid_reward: see `TextGame`. An invalid action is no step of the environment.
        options: arguments of ``gymnasium.make``.

    A row's task becomes ``reset(options=...)``. Spaces of actions: Discrete, MultiDiscrete, Box and Text.
    """

    name = "gymnasium"
    task_keys = None

    def __init__(
        self,
        name: str,
        observation: Literal["ansi", "obs", "both"] | None = None,
        actions: Sequence[str] | None = None,
        success_return: float | None = None,
        prompt: Literal["full", "terse"] = "full",
        instructions: str | None = None,
        answer: Literal["tag", "plain", "mention"] = "tag",
        max_steps: int | None = None,
        invalid_reward: float = 0.0,
        **options: Any,
    ):
        super().__init__(
            prompt=prompt, instructions=instructions, answer=answer, max_steps=max_steps, invalid_reward=invalid_reward
        )
        self.id = name
        kinds = ("ansi", "obs", "both", None)
        self.require(observation in kinds, "observation", observation, "is unknown; it is ansi, obs or both")
        can_render = "ansi" in _modes(name)
        is_rendered = can_render if observation is None else observation != "obs"
        self.require(
            can_render or not is_rendered, "observation", observation, f"cannot be: {name} renders no text; use obs"
        )
        self.env = gymnasium.make(name, **{**({"render_mode": "ansi"} if is_rendered else {}), **options})
        self.is_rendered, self.is_written = is_rendered, not is_rendered or observation == "both"
        self.space: Any = self.env.action_space
        known = (spaces.Discrete, spaces.MultiDiscrete, spaces.Box, spaces.Text)
        if not isinstance(self.space, known):
            raise ValueError(
                f"gymnasium:{name}: actions of the space {self.space} cannot be written as text; Discrete, "
                "MultiDiscrete, Box and Text can. Wrap it in an environment of your own (docs/environments.md)."
            )
        self.actions: list[str] | None = None
        if isinstance(self.space, spaces.Discrete):
            count, start = int(self.space.n), int(self.space.start)
            names = [str(start + index) for index in range(count)] if actions is None else actions
            self.actions = self.named("actions", names, count, f"must be {count} different names, one an action")
        else:
            self.require(actions is None, "actions", actions, f"has no effect: {name} has actions of {self.space}")
            self.require(answer != "mention", "answer", answer, f"finds no action of {self.space}; use tag or plain")
        self.success_return, self.total, self.observed = success_return, 0.0, None
        # a success that nobody tells is not a failure: then the metric is not there
        self.tells_success = success_return is not None

    def begin(self, task: Mapping[str, Any]) -> None:
        self.observed, _ = self.env.reset(seed=self.seed, options=dict(task) or None)
        self.total = 0.0

    def read(self, text: str) -> Any:
        if self.actions is not None:
            index = choice_of(text, self.actions, self.answer)
            return None if index is None else int(self.space.start) + index
        answer = answer_of(text, self.answer) or ""
        if isinstance(self.space, spaces.Text):
            return answer if self.space.contains(answer) else None
        # numbers with spaces, commas or brackets around them
        words = re.split(r"[\s,;\[\]()]+", answer.strip(" \t\n[]()"))
        if len(words) != int(np.prod(self.space.shape)) or not all(map(_NUMBER.fullmatch, words)):
            return None
        numbers = np.array([float(word) for word in words])
        if not np.issubdtype(self.space.dtype, np.floating) and (numbers != np.round(numbers)).any():
            return None
        action = numbers.astype(self.space.dtype).reshape(self.space.shape)
        return action if self.space.contains(action) else None

    def play(self, action: Any) -> tuple[float, bool, dict[str, Any]]:
        self.observed, reward, terminated, truncated, info = self.env.step(action)
        self.is_truncated = bool(truncated)
        self.total += float(reward)
        numbers = {key: value for key, value in info.items() if isinstance(value, (bool, int, float, np.number))}
        if self.success_return is not None:
            numbers["success"] = self.total >= self.success_return
        elif "is_success" in info:
            numbers["success"] = bool(info["is_success"])
        return float(reward), bool(terminated), numbers

    def view(self) -> str:
        rendered = _plain(str(self.env.render())).strip("\n") if self.is_rendered else ""
        return "\n".join(filter(None, (rendered, _written(self.observed) if self.is_written else "")))

    def rules(self) -> str:
        if self.actions is not None:
            return f"Actions are {', '.join(self.actions)}. " + self.answer_rule("one action", self.actions[0])
        if isinstance(self.space, spaces.Text):
            return self.answer_rule("your action", "text")
        low, high = (np.ravel(value).tolist() for value in _bounds(self.space))
        ranges = ", ".join(f"{least:.4g} to {most:.4g}" for least, most in zip(low, high, strict=True))
        return f"An action is {len(low)} numbers, from {ranges}. " + self.answer_rule(
            "them, with spaces between", " ".join(f"{least:.4g}" for least in low)
        )

    @property
    def state_id(self) -> str:
        """The observation, written; environments that hide a part of their state repeat it."""
        return _written(self.observed)

    def random_action(self, generator: np.random.Generator) -> str:
        """Return an action of the space, as text."""
        if self.actions is not None:
            return self.written(self.actions[int(generator.integers(len(self.actions)))])
        self.space.seed(int(generator.integers(2**31)))
        action = self.space.sample()
        return self.written(action if isinstance(action, str) else " ".join(str(one) for one in np.ravel(action)))

    def close(self) -> None:
        self.env.close()


def _modes(name: str) -> Sequence[str]:
    """Return the render modes of an ID, without making the environment.

    Raises:
        ValueError: gymnasium knows no such ID.
    """
    try:
        spec = gymnasium.spec(name)
    except gymnasium.error.Error as error:
        ids = sorted(gymnasium.registry)
        raise ValueError(
            f"gymnasium:{name}: {error}{nearest_name(name, ids)} `verl env list` lists the known IDs; module:ID "
            "imports a module first."
        ) from None
    maker: Any = spec.entry_point
    if isinstance(maker, str):
        maker = gymnasium.envs.registration.load_env_creator(maker)
    return getattr(maker, "metadata", {}).get("render_modes", ())


def _plain(text: str) -> str:
    """Return rendered text without terminal codes: ``[X]`` for a highlighted X, ``blue(X)`` for a colored one."""

    def mark(match: re.Match) -> str:
        codes, inner = match[1].split(";"), match[2]
        if any(code[:1] == "4" and len(code) == 2 for code in codes):
            return f"[{inner}]"
        color = next((_COLORS[code] for code in codes if code in _COLORS), None)
        return f"{color}({inner})" if color else inner

    return _ESCAPE.sub("", _COLORED.sub(mark, text))


def _written(value: Any) -> str:
    """Return an observation as text: numbers with four digits, parts of a tuple or dict one by one."""
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {_written(part)}" for key, part in value.items())
    if isinstance(value, tuple):
        return " ".join(map(_written, value))
    if isinstance(value, np.ndarray):
        return " ".join(f"{number:.4g}" for number in np.ravel(value).tolist())
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def _bounds(space: Any) -> tuple[Any, Any]:
    return (space.low, space.high) if isinstance(space, spaces.Box) else (space.start, space.start + space.nvec - 1)
