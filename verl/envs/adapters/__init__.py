"""Environments of other packages, by their names: ``gymnasium:ID``, ``textarena:ID``, and others of `ADAPTERS`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from verl.utils.distribution import install_command
from verl.utils.import_utils import is_package_available, load_class_from_fqn

ADAPTERS: dict[str, tuple[str, str, str, str]] = {
    "gymnasium": ("verl.envs.adapters.gymnasium_env.GymnasiumEnvironment", "gymnasium", "gym", "FrozenLake-v1"),
    "textarena": ("verl.envs.adapters.textarena_env.TextArenaEnvironment", "textarena", "textarena", "Mastermind-v0"),
    "reasoning_gym": (
        "verl.envs.adapters.reasoning_gym_env.ReasoningGymEnvironment",
        "reasoning_gym",
        "reasoning-gym",
        "chain_sum",
    ),
    "openenv": ("verl.envs.adapters.openenv_env.OpenEnvEnvironment", "openenv", "openenv", "http://127.0.0.1:8000"),
}
"""What stands before the colon -> class of the adapter, package that it needs, extra that brings it, a name."""

_RUN_THE_MODEL = ("verifiers", "atropos")


def adapted(kind: str) -> Callable[..., Any] | None:
    """Return what makes the environment of a type such as ``gymnasium:ID``; None: it is of no adapter.

    Raises:
        ImportError: the package is not installed.
        ValueError: the package's environments cannot be stepped, or no name follows the colon.
    """
    prefix, colon, name = kind.partition(":")
    if not colon:
        return None
    if prefix in _RUN_THE_MODEL:
        raise ValueError(
            f"environment type {kind!r}: an environment of {prefix} calls the model itself, and cannot be stepped. Run "
            "it as an agent outside, with the rollout server's URL as its OpenAI base URL."
        )
    if prefix not in ADAPTERS:
        return None
    path, package, extra, example = ADAPTERS[prefix]
    if not name:
        raise ValueError(f"environment type {kind!r} names no environment. Write it as {prefix}:{example}.")
    if not is_package_available(package):
        raise ImportError(
            f"environment type {kind!r} needs the package {package}, which is not installed. Install it with "
            f"{install_command(extra)}"
        )
    return partial(load_class_from_fqn(path, "the environment"), name)


_LOCK = threading.Lock()


class OwnRandomState:
    """The global generators of ``random`` and ``numpy`` as one environment leaves them; others see nothing of it.

    For packages that seed and use the global ones: without it, two episodes in a process would disturb each other.
    """

    def __init__(self) -> None:
        self._states: tuple[Any, Any] | None = None

    @contextmanager
    def entered(self, seed: int | None = None) -> Iterator[None]:
        """Have the environment's state in force. One environment of the process at a time."""
        import random

        import numpy as np

        with _LOCK:
            before = random.getstate(), np.random.get_state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
            elif self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            try:
                yield
            finally:
                self._states = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])
