"""Environment: its interface, names, and how the environment of a name is made.

Knows no model, no tokenizer and no trainer: an environment reads text and answers with text.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verl.envs.adapters import ADAPTERS, adapted
from verl.utils.import_utils import load_class_from_fqn, load_extern_type, split_file_name
from verl.utils.py_functional import nearest_name

Message = Mapping[str, Any]
"""A chat message: ``role``, ``content``, ..."""

Observation = str | Sequence[Message]
"""What the policy reads next: text, which becomes one user message, or messages."""


@runtime_checkable
class Environment(Protocol):
    """One episode at a time: `reset` begins it, `step` answers each action until it is terminated or truncated.

    Both methods may be ``async``. All randomness comes from ``seed``: equal seeds and actions give equal episodes. An
    environment may further have ``close()``, ``frame() -> str`` (how it looks, for people),
    ``random_action(generator)`` (for ``verl env check``), ``solve() -> list of actions`` and the attribute
    ``state_id``, a name of the present state for ``gigpo`` (without it: the observation).

    ``info`` may have ``success`` (bool), ``valid_action`` (bool; False counts as a format error) and any other numbers:
    those of the last step become the metrics ``env/<tag>/*``. ``info["messages"]`` is refused: observations are
    messages.
    """

    def reset(self, *, seed: int, **task: Any) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode. ``task``: what the row of data says of it. Returns (observation, info)."""

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Take the policy's text. Returns (observation, reward, terminated, truncated, info)."""


_ENVIRONMENTS: dict[str, Callable[..., Environment]] = {}

# built in: imported when they are asked for
_BUILT_IN: dict[str, str] = {
    "FrozenLake": "verl.envs.frozen_lake.FrozenLake",
    "Sokoban": "verl.envs.sokoban.Sokoban",
    "Guess": "verl.envs.guess.Guess",
    "Bandit": "verl.envs.guess.Bandit",
    "Countdown": "verl.envs.countdown.Countdown",
    "Math": "verl.envs.math_task.Math",
    "Code": "verl.envs.code_task.Code",
}


def built_in_names() -> list[str]:
    """Names of the environments of the package."""
    return list(_BUILT_IN)


def known_names() -> list[str]:
    """Names of the environments of the package and of those registered."""
    return sorted({*_ENVIRONMENTS, *_BUILT_IN})


def register(name: str) -> Callable[[type], type]:
    """Class decorator: ``env.registry.<tag>.type=name`` means this class."""

    def enter(cls: type) -> type:
        _ENVIRONMENTS[name] = cls
        return cls

    return enter


def environment_class(kind: str) -> Callable[..., Environment]:
    """Return the class of a registered name, ``path/file.py:Class``, ``package.module.Class`` or ``gymnasium:ID``.

    Raises:
        ValueError: there is none; lists the known names.
    """
    if kind in _ENVIRONMENTS:
        return _ENVIRONMENTS[kind]
    if in_file := split_file_name(kind):
        return load_extern_type(*in_file)
    if (make_it := adapted(kind)) is not None:
        return make_it
    if kind in _BUILT_IN:
        return load_class_from_fqn(_BUILT_IN[kind], "env.registry.*.type")
    if "." in kind:
        return load_class_from_fqn(kind, "env.registry.*.type")
    known = known_names()
    example = ", ".join(f"{prefix}:{entry[3]}" for prefix, entry in ADAPTERS.items())
    raise ValueError(
        f"environment type {kind!r} is not known; known are {', '.join(known)}.{nearest_name(kind, known)} Give the "
        f"name of one, path/file.py:Class, package.module.Class, or {example}."
    )


def make(kind: str, **options: Any) -> Environment:
    """Return an environment of this type, made with ``options`` (``env.registry.<tag>.kwargs``)."""
    return environment_class(kind)(**options)
