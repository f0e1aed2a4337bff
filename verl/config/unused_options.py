"""Options the user set and nothing reads: found in a run after its first update, and in the source before it.

An option that a warning names already is left out, as is one with its default value.
"""

import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl.config.base import READ, Config, ConfigError, Problem, get_path, leaves, watch
from verl.config.tree import show

_GIVEN = "_given_options"
_PACKAGE = Path(__file__).parents[1]

_READ_LATER = (
    "trainer.log_freq", "trainer.save_freq", "trainer.test_freq", "trainer.nonfinite_tolerance",
    "trainer.worker_timeout", "trainer.max_*_ckpt_to_keep", "trainer.default_*_dir",
    "trainer.del_local_ckpt_after_load", "trainer.resume_from_path", "trainer.esi_redundant_time", "trainer.max_time",
    "trainer.halt_on", "trainer.health.*",
    "*.checkpoint.*",  # at a save, a resume, the end
    "trainer.log_val_generations", "trainer.validation_data_dir", "*.rollout.val_kwargs.*", "data.val_*",
    "data.validation_shuffle",  # at a validation
    "*.rollout.max_postponements", "*.rollout.max_staleness", "*.rollout.stall_timeout_s",
    "algorithm.filter_groups.*", "reward_model.on_error", "reward_model.sandbox*",
    "reward_model.judge.*", "reward_model.self_test", "reward_model.max_errors",  # when it happens
    "trainer.tracker_kwargs", "trainer.log_dir", "ray_init.*",  # by the loggers and Ray, who get copies
    "data.*", "custom_reward_function.*",  # in the processes that load rows and score responses
    "trainer.unread_keys", "*.rollout.tensor_model_parallel_size",  # 1 agrees with an engine that has no such thing
)  # fmt: skip
"""Options whose readers wait for an event the first step need not bring, or read in a process that does not report.
They count as read; that they have a reader at all is a test's promise."""

_FOLLOWED = {
    "actor_rollout_ref.actor.clip_ratio": ("actor_rollout_ref.actor.clip_ratio_low",),
    "env.reward_normalization.grouping": ("algorithm.reward_shaping.norm.mean",),
    "env.reward_normalization.method": ("algorithm.reward_shaping.norm.mean",),
}
"""Options that ``normalise`` copies to others: reading those is reading these."""


def remember_given(config: Config, tree: dict, given: Iterable[str], warnings: Iterable[str]) -> Config:
    """Watch ``config``, and keep with it what the user set; returns it.

    Args:
        config: the typed tree.
        tree: the composed tree, interpolations unresolved.
        given: dotted keys, of options or sections.
        warnings: sentences the user gets anyway.
    """
    from verl.config.load import sources  # which imports this floor's heavier half only when called

    # before the tree is watched: comparing with the defaults is no reading
    options = set_by_user(config, given, warnings)
    followers: dict[str, set[str]] = {key: {key, *_FOLLOWED.get(key, ())} for key in options}
    for key, _ in leaves(config):
        for source in sources(tree, key) & set(options):
            followers[source].add(key)
    watch(config)
    vars(config)[_GIVEN] = {key: sorted(names) for key, names in followers.items()}
    return config


def set_by_user(config: Config, given: Iterable[str], warnings: Iterable[str] = ()) -> dict[str, Any]:
    """Options with a value other than the default which the user gave and no warning names: key -> value."""
    given, text, defaults = set(given), " ".join(warnings), dict(leaves(type(config)()))

    def is_given(key: str) -> bool:
        return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in given)

    return {
        key: value
        for key, value in leaves(config)
        if value != defaults.get(key) and is_given(key) and not re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", text)
    }


def unused_in_run(config: Config, read: Iterable[str]) -> list[Problem]:
    """Options that the user set and that neither driver nor workers have ``read``; for after the first update.

    Options read only at a later event count as read. Empty for a configuration that was not loaded from a command line.
    """
    # workers report what they read; the driver's own readings are in this process
    read = set(read) | set(READ)
    missed = [
        key
        for key, names in vars(config).get(_GIVEN, {}).items()
        if not read.intersection(names) and not any(fnmatchcase(key, pattern) for pattern in _READ_LATER)
    ]
    return [_problem(config, key, read, "was read by nothing in this run") for key in missed]


def check_unused_options(config: Config, read: Iterable[str], say: Callable[[str], None]) -> None:
    """As ``trainer.unread_keys`` says, stop or warn about what `unused_in_run` finds.

    Raises:
        ConfigError: with one sentence an option.
    """
    found = [problem.text for problem in unused_in_run(config, read)] if config.trainer.unread_keys != "off" else []
    if found and config.trainer.unread_keys == "error":
        raise ConfigError(found)
    for sentence in found:
        say(f"warning: {sentence}")


def unused_in_source(config: Config, given: Iterable[str] | None = None, warnings: Iterable[str] = ()) -> list[Problem]:
    """Options that the user set and no line of verl reads, before anything runs.

    Args:
        config: the typed tree.
        given: dotted keys the user set. None: all that differ from the defaults.
        warnings: sentences the user gets anyway.
    """
    from verl.config.command_line import all_keys
    from verl.config.ppo import PPOConfig

    given = [key for key, _ in leaves(config)] if given is None else given
    options = set_by_user(config, given, warnings)
    missed = [key for key in options if not readers(key)]
    if missed and type(config) is not PPOConfig:  # a recipe reads options of its own in its own files
        missed = [key for key in missed if key in all_keys(PPOConfig)]
    read = [key for key, _ in leaves(config) if readers(key)] if missed else []
    return [_problem(config, key, read, "is read by nothing") for key in missed]


def given_to(config: Config) -> list[str]:
    """Options that the user set, of a configuration that was loaded from a command line; empty for another."""
    return list(vars(config).get(_GIVEN, {}))


def _problem(config: Config, key: str, read: Iterable[str], what: str) -> Problem:
    near = _nearest(config, key, read)
    return Problem(
        key,
        f"{key}={show(get_path(config, key))} {what}, so it has no effect"
        + (f"; the nearest option that is read is {near}" if near else "")
        + ". Leave it out, or set trainer.unread_keys=warn.",
    )


def _nearest(config: Config, key: str, read: Iterable[str]) -> str | None:
    from difflib import SequenceMatcher

    last = key.rpartition(".")[2]
    candidates = {name for name, _ in leaves(config)} & set(read) - {key}
    scored = [
        (SequenceMatcher(None, last, name.rpartition(".")[2]).ratio() + SequenceMatcher(None, key, name).ratio(), name)
        for name in candidates
    ]
    score, best = max(scored, default=(0.0, None))
    return best if score >= 1.2 else None


# ------------------------------------------------------------------------------------------------- in the source


def readers(key: str) -> list[str]:
    """Places in the source, ``path:line``, that read an option of this name: as an attribute, or by its name as text.

    Options of equal names in different sections share their places.
    """
    return list(_places().get(key.rpartition(".")[2], ()))


_READING = re.compile(r"\.([A-Za-z_]\w*)|[\"']([A-Za-z_]\w*)[\"']")


@lru_cache(maxsize=1)
def _places() -> dict[str, list[str]]:
    """Name -> where code outside the checks reads it; properties of the sections read on behalf of others."""
    from verl.config.command_line import all_keys
    from verl.config.ppo import PPOConfig

    names = {key.rpartition(".")[2] for key in all_keys(PPOConfig)}
    found: dict[str, list[str]] = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        place = path.relative_to(_PACKAGE.parent).as_posix()
        # a check reads every option and acts on none; sections count by their properties, which act for others
        is_check = place.startswith(("verl/config/", "verl/preflight/")) and place != "verl/preflight/command.py"
        if is_check and not _is_section(path):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.lstrip().startswith("#"):
                continue
            for match in _READING.finditer(line):
                name = match[1] or match[2]
                if name in names and (match[1] or not place.startswith("verl/config/")):
                    found.setdefault(name, []).append(f"{place}:{number}")
    return found


def _is_section(path: Path) -> bool:
    """Does a module of the configuration declare sections, whose properties read options?"""
    declares = re.search(r"^class \w+\(Config\)", path.read_text(encoding="utf-8"), re.M)
    return path.parent.name == "config" and declares is not None
