"""Options of a rollout engine in a free-form section: ``reward_model.rollout``, and ``inference`` of a teacher.

Such a section has the names of ``actor_rollout_ref.rollout``, those of other releases among them: they go through the
same tables. What an engine that trains nothing does not read is said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from verl.config.base import Problem, plain
from verl.config.legacy import Moved, RemovedOption, is_release_default, rename, rows_below, same, set_features_aside
from verl.config.rollout import RolloutConfig
from verl.config.tree import build, fits, flatten, put_key, section_at, show

_POLICY = "actor_rollout_ref.rollout"

_PLACES = ("reward_model.rollout", "reward.reward_model.rollout", "distillation.teacher_models.teacher_model.inference")
"""Sections of verl's releases whose defaults ask for nothing."""

READ = (
    "name", "dtype", "load_format", "tensor_model_parallel_size", "gpu_memory_utilization", "free_cache_engine",
    "enforce_eager", "enable_chunked_prefill", "disable_log_stats", "prompt_length", "response_length", "max_model_len",
    "max_num_batched_tokens", "max_num_seqs", "engine_kwargs",
)  # fmt: skip
"""Options that every engine reads, in any role."""


def engine_options(
    base: RolloutConfig,
    given: Mapping[str, Any],
    key: str,
    problems: list[Problem] | None = None,
    notes: list[str] | None = None,
    reads: Sequence[str] = READ,
) -> RolloutConfig:
    """Options of an engine: ``base`` with a section laid over it.

    Args:
        given: content of the section.
        key: dotted key of the section, for messages.
        problems: receives unknown names, unfit values, and features that are not built.
        notes: receives a sentence about each old name, and about what has no effect.
        reads: options that are read; others are said to have no effect.
    """
    problems, notes = [] if problems is None else problems, [] if notes is None else notes
    values = {name: value for name, value in flatten(plain(given)) if not _is_default(name, value)}
    kept = [name for name, value in values.items() if value is None and fits(RolloutConfig, name, value) is False]
    if kept:
        notes.append(f"{key}: null keeps the default of {', '.join(kept)}")
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kept:
            put_key(tree, f"{_POLICY}.{name}", value)
    found: list[Problem] = []
    own = _follow_tables(tree, found, notes, lambda text: text.replace(_POLICY, key))
    problems += [Problem(one.key.replace(_POLICY, key), one.text.replace(_POLICY, key)) for one in found]
    wrong: list[Problem] = []
    options = build(base, own, key, wrong)
    problems += wrong
    notes += [] if wrong else _without_effect(options, own, key, reads)
    return options


def _is_default(name: str, value: Any) -> bool:
    """Whether a value of something that is no option of a rollout is what a release's section has, or null."""
    if name.partition(".")[0] in RolloutConfig.__dataclass_fields__:
        return False
    return value is None or value == {} or any(is_release_default(f"{place}.{name}", value) for place in _PLACES)


def _follow_tables(
    tree: dict, problems: list[Problem], notes: list[str], own_names: Callable[[str], str]
) -> dict[str, Any]:
    """Take old names and features that are not built out of ``tree``; return what is left of the section."""
    given = {name for name, _ in flatten(tree)}
    inside: dict[str, Moved | RemovedOption] = {}
    for old, entry in rows_below(_POLICY).items():
        if not isinstance(entry, Moved) or all(new.startswith(f"{_POLICY}.") for new in entry.new):
            inside[old] = entry
        elif old in given:  # an option of the whole run
            section, _, name = old.rpartition(".")
            value = section_at(tree, section).pop(name)
            given.discard(old)
            notes.append(own_names(f"{old}={show(value)} has no effect") + f": {' and '.join(entry.new)} is for all")
    said = rename(tree, given, problems, lambda name: None, inside)
    said += set_features_aside(tree, given, problems, _is_option)
    notes += map(own_names, said)
    return section_at(tree, _POLICY)


def _is_option(key: str) -> bool:
    return key.removeprefix(f"{_POLICY}.").partition(".")[0] in RolloutConfig.__dataclass_fields__


def _without_effect(options: RolloutConfig, own: Mapping[str, Any], key: str, reads: Sequence[str]) -> Iterator[str]:
    """Sentences about options with another value than the default that nothing reads."""
    default = RolloutConfig()
    unread = [
        f"{key}.{name}={show(value)}"
        for name, value in own.items()
        if name in default and name not in reads and not same(plain(options[name]), plain(default[name]))
    ]
    for engine, arguments in (own.get("engine_kwargs") or {}).items():
        usual = default.engine_kwargs.get(engine) or {}
        changed = {name: value for name, value in (arguments or {}).items() if value not in (None, usual.get(name))}
        if engine != options.name and changed:
            unread.append(f"{key}.engine_kwargs.{engine}={show(changed)}")
    if unread:
        yield f"{', '.join(unread)} {'has' if len(unread) == 1 else 'have'} no effect on the engine of {key}"
