"""What every notice may use: the registry, and the form of a setting that nothing reads."""

from collections.abc import Callable, Iterator

from verl.config.base import get_path, leaves
from verl.config.build import show
from verl.config.ppo import PPOConfig

IsGiven = Callable[[str], bool]

Check = Callable[[PPOConfig, IsGiven], Iterator[str]]

CHECKS: list[Check] = []


def notice(function: Check) -> Check:
    """Collect a check."""
    CHECKS.append(function)
    return function


def unread(config: PPOConfig, keys: list[str], is_given: IsGiven, why: str) -> Iterator[str]:
    """One sentence about those of ``keys`` the user gave."""
    given = [f"{key}={show(get_path(config, key))}" for key in keys if is_given(key)]
    if given:
        yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}"


def given_below(key: str, config: PPOConfig, is_given: IsGiven) -> list[str]:
    """The options of a section that the user gave."""
    return [name for name, _ in leaves(get_path(config, key), f"{key}.") if is_given(name)]
