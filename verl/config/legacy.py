"""Names of other releases, v0.1 to v0.9: what they are called here, why they were removed, what is not built.

They are understood wherever they come from, YAML or command line, and reported in one warning. ``old_keys.tsv`` holds
the names, ``release_keys.tsv`` all keys of verl's releases with their defaults, ``features.yaml`` what is not built.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.async_names import ASYNC_KEYS
from verl.config.base import Problem
from verl.config.features import Feature, FeatureKey, feature_of_backend, feature_of_key, not_built, prefixes
from verl.config.rollout import DECIDED, HANDED_ON
from verl.config.tree import at_key, flatten, is_interpolation, overlay, pop_key, put_key, section_at, show

OLD_TABLE, RELEASE_TABLE = (Path(__file__).with_name(name) for name in ("old_keys.tsv", "release_keys.tsv"))
RELEASES = ("v0.5.0", "2025-08", "v0.6.0", "v0.7.0", "v0.9.0", "2026-08")
PREFIX = "backend_config"
"""Launchers nest the whole tree under this name; it is stripped."""


def _rows(table: Path, header: str) -> Iterator[list[str]]:
    """Columns of a table's lines, without its comments and header."""
    for line in table.read_text(encoding="utf-8").splitlines():
        if not line.startswith(("#", header)):
            yield line.split("\t")


# -- Values, and the defaults of releases ----------------------------------------------------------------------------


class Default(NamedTuple):
    """Default of a key in a release."""

    value: Any
    """Interpolations resolved; ``???`` where the user must give it."""
    megatron: bool
    """Only its Megatron trainer has the key."""


@lru_cache(maxsize=1)
def release_keys() -> dict[str, tuple[Default | None, ...]]:
    """Dotted key -> its default in each of ``RELEASES``, None where a release does not have it."""
    table = {}
    for key, *defaults in _rows(RELEASE_TABLE, "key\t"):
        row: list[Default | None] = []
        for text in (*defaults, *["="] * (len(RELEASES) - len(defaults))):
            if text == "=":  # as in the release before
                row.append(row[-1])
            elif text == "-":
                row.append(None)
            else:
                row.append(Default(json.loads(text.removeprefix("M:")), text.startswith("M:")))
        table[key] = tuple(row)
    return table


def is_release_default(key: str, value: Any) -> bool:
    """Does some release give ``key`` this value? ``true`` is not 1."""
    return any(row is not None and same(row.value, value) for row in release_keys().get(key, ()))


def asks_for_nothing(value: Any) -> bool:
    """Is this null, false, or an empty list, mapping or text?"""
    return value is None or value is False or (isinstance(value, list | dict | str) and not value)


def same(one: Any, other: Any) -> bool:
    """Equality of plain values that tells truth values from numbers; 1 and 1.0 are the same number."""
    if isinstance(one, bool) or isinstance(other, bool):  # Python's True == 1
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    return bool(one == other)


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def _is_positive(value: Any) -> bool:
    try:
        return value is not None and not isinstance(value, bool) and float(value) > 0
    except (TypeError, ValueError):
        return False


# -- Options that have another name now, or none ---------------------------------------------------------------------

_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def _layers(value: Any) -> Any:
    """Megatron's names of layers as those of Hugging Face; an empty list as null; all of them as ``all-linear``."""
    if not isinstance(value, list):
        return value
    if set(value) == set(_MEGATRON_LAYERS):
        return "all-linear"
    return [name for layer in value for name in _MEGATRON_LAYERS.get(layer, (layer,))] or None


_TRUE = (True, "true", "True")
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda value: value,
    "alias": lambda value: value,
    "if_true": lambda value: True if value in _TRUE else None,
    "one_if_true": lambda value: 1 if value in _TRUE else None,
    "strict_if_true": lambda value: "strict" if value in _TRUE else "disable",
    "if_any": lambda value: value or None,
    "if_positive": lambda value: value if isinstance(value, int | float) and value > 0 else None,
    "unless_fcfs": lambda value: None if value == "fcfs" else value,  # the engine's own default
    "lower": lambda value: value.lower() if isinstance(value, str) else value,
    "layers": _layers,
}
"""Column ``how`` of ``old_keys.tsv`` -> the new value; None means: leave the new key alone."""


class Moved(NamedTuple):
    """An option that has another name now."""

    old: str
    new: tuple[str, ...]
    convert: Callable[[Any], Any]
    """One of ``CONVERSIONS``."""
    is_alias: bool
    """Not old: a second way to write the key, of which nothing is said."""


class RemovedOption(NamedTuple):
    """An option without successor. Values that ask for nothing are dropped with a warning, any other is an error."""

    old: str
    why: str
    harmless: tuple[Any, ...]
    """Values other than null, false and the releases' defaults that ask for what is done anyway."""

    def is_harmless(self, value: Any) -> bool:
        """Does this value ask for nothing? ``true`` is not 1."""
        is_listed = any(same(value, item) for item in self.harmless)
        return is_listed or asks_for_nothing(value) or is_release_default(self.old, value)


def read_names(table: Path) -> tuple[dict[str, str], list[Moved], list[RemovedOption]]:
    """The rows of a table of old names: sections, options with another name, options without successor."""
    sections: dict[str, str] = {}
    moved, removed = [], []
    for columns in _rows(table, "old\t"):
        old, new, how, why = (*columns, "", "")[:4]
        if how == "section":
            sections[old] = new
        elif how.startswith("["):
            removed.append(RemovedOption(old, why, tuple(json.loads(how))))
        else:
            moved.append(Moved(old, tuple(new.split(" ")), CONVERSIONS[how], how == "alias"))
    return sections, moved, removed


def _old_keys() -> tuple[dict[str, str], tuple[Moved, ...], tuple[RemovedOption, ...]]:
    sections, moved, removed = read_names(OLD_TABLE)
    known = {entry.old for entry in moved}
    for place in ("actor_rollout_ref.rollout", "actor_rollout_ref.rollout.val_kwargs"):
        for name in (*HANDED_ON, *DECIDED):  # parameters of the engines that are no options themselves
            if f"{place}.{name}" not in known:
                new = f"{place}.sampling_kwargs.{name}"
                moved.append(Moved(f"{place}.{name}", (new,), CONVERSIONS["alias"], True))
    return sections, tuple(moved), tuple(removed)


SECTIONS, MOVED, REMOVED = _old_keys()
ALIASES = tuple(entry.old for entry in MOVED if entry.is_alias)
"""Second ways to write a key."""
_BY_NAME: dict[str, Moved | RemovedOption] = {
    **{entry.old: entry for entry in MOVED},
    **{entry.old: entry for entry in REMOVED},
}


def rows_below(section: str) -> dict[str, Moved | RemovedOption]:
    """The rows of the old names that stand below a section."""
    return {old: entry for old, entry in _BY_NAME.items() if old.startswith(f"{section}.")}


def is_legacy(key: str) -> bool:
    """Is this a name that a release of verl has for an option, or for something that is not built?"""
    is_moved = today(key) != key or entry_of(key) is not None
    return is_moved or key in (*CORRECTION_KEYS, *ASYNC_KEYS) or feature_of_key(today(key)) is not None


def today(key: str) -> str:
    """``key`` with the present name of its section: ``critic.fsdp.x`` -> ``critic.model.fsdp_config.x``."""
    for old, new in SECTIONS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def entry_of(key: str) -> Moved | RemovedOption | None:
    """The row of an old name: its own, or that of the section it stands in."""
    return next((_BY_NAME[name] for name in prefixes(today(key)) if name in _BY_NAME), None)


def replacement(key: str) -> str | None:
    """Return a sentence with the replacement of another release's name; None for an unknown name."""
    key = strip_prefix(key)
    entry = entry_of(key)
    if isinstance(entry, Moved):
        return f"{key} is now called {' and '.join(entry.new)}."
    if entry:
        return f"{key} no longer exists: {entry.why}."
    if today(key) != key:
        return f"{key} is now called {today(key)}."
    found = feature_of_key(key)
    return not_built(key, found.feature) if found else None


def strip_prefix(key: str) -> str:
    """``backend_config.data.x`` -> ``data.x``."""
    return key.removeprefix(f"{PREFIX}.")


def translate(
    tree: dict, given: set[str], problems: list[Problem], resolved: Callable[[str], Any] = lambda key: None
) -> list[str]:
    """Rename old options in the unresolved ``tree``, in place; mark the new names as given.

    Args:
        resolved: the value behind the interpolation at an old key, None if it leads nowhere.

    Returns:
        One sentence per old name found. Clashes with a new name the user also gave go to ``problems``.
    """
    messages = []
    if isinstance(tree.get(PREFIX), dict):
        nested = tree.pop(PREFIX)
        overlay(tree, nested)
        given.update(key for key, _ in flatten(nested))
        messages.append(f"{PREFIX}.* is read as the tree itself: leave the prefix out")
    # Sections first: a key of one may have a row of its own under the section's present name.
    for old, new in SECTIONS.items():
        present, values = _take(tree, given, old)
        if not present:
            continue
        messages.append(f"{old} is now called {new}")
        for key, value in flatten(values, f"{old}.") if isinstance(values, dict) else ():
            if is_interpolation(value) and not feature_of_key(today(key)):
                value = resolved(key)
            if value not in (None, {}):
                _rename(tree, given, problems, key, value, today(key))
    return messages + rename(tree, given, problems, resolved, _BY_NAME)


def rename(
    tree: dict,
    given: set[str],
    problems: list[Problem],
    resolved: Callable[[str], Any],
    names: Mapping[str, Moved | RemovedOption],
) -> list[str]:
    """Rename the options of a table of old names, as `translate` does."""
    messages = []
    for old, entry in names.items():
        present, value = _take(tree, given, old)
        if not present:
            continue
        is_alias = isinstance(entry, Moved) and entry.is_alias
        if is_interpolation(value) and not is_alias:
            value = resolved(old)
        if isinstance(entry, RemovedOption):
            if entry.is_harmless(value):
                messages.append(f"{old} no longer exists and is ignored: {entry.why}")
            else:
                problems.append(Problem(old, f"{old}={show(value)} no longer exists: {entry.why}."))
            continue
        if not is_alias:
            messages.append(f"{old} is now called {' and '.join(entry.new)}")
        # An empty section is a composed file's, nothing a user asked for.
        converted = None if value == {} else entry.convert(value)
        for new in entry.new:
            if converted is not None or is_alias:
                _rename(tree, given, problems, old, converted, new, value)
    return messages


def _take(tree: dict, given: set[str], key: str) -> tuple[bool, Any]:
    """Remove ``key`` from the tree, and it and what stands below it from ``given``: (was it there, its value)."""
    present, value = pop_key(tree, key)
    if present:
        given -= {name for name in given if name == key or name.startswith(f"{key}.")}
    return present, value


def _rename(
    tree: dict, given: set[str], problems: list[Problem], old: str, value: Any, new: str, shown: Any = None
) -> None:
    """Put the value of an old key at its new one; the user's value of the new one goes before a mere default."""
    if new in given and not same(at_key(tree, new), value):
        shown = value if shown is None else shown
        if not is_release_default(old, shown):
            clash = f"{old}={show(shown)} and {new}={show(at_key(tree, new))} disagree"
            problems.append(Problem(new, f"{clash}: they are the same option. Keep the second."))
        return
    put_key(tree, new, value)
    given.add(new)


# -- How earlier releases asked for what is now ``algorithm.rollout_correction`` -------------------------------------

_NEW = "algorithm.rollout_correction"
_CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_GRADIENT = f"{_NEW}.use_policy_gradient"
_OF_060 = (
    *("rollout_is", "rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode"),
    *("rollout_is_veto_threshold", "rollout_is_batch_normalize"),
)
"""Keys of release 0.6.0, which stood below ``algorithm`` itself."""
CORRECTION_KEYS = (_CAP, *(f"algorithm.{name}" for name in _OF_060), _GRADIENT)
"""The old keys that are understood here."""


def translate_correction(tree: dict, given: set[str], problems: list[Problem]) -> list[str]:
    """Rename what older releases called the correction, in place; mark the new names as given.

    A cap of importance ratios (2025-08), the keys below ``algorithm`` of 0.6.0, and ``use_policy_gradient`` of 0.6.1.

    Returns:
        One sentence per old name found. Clashes with a new name the user also gave go to ``problems``.
    """
    meant: dict[str, Any] = {}
    messages = []
    # The newest name last: it goes before the older ones.
    is_there, cap = _take(tree, given, _CAP)
    if is_there and _is_positive(cap):
        meant |= {"rollout_is": "token", "rollout_is_threshold": cap}
        messages.append(f"{_CAP} is now {_NEW}.rollout_is=token with rollout_is_threshold={show(cap)}")
    elif is_there:
        messages.append(f"{_CAP}={show(cap)} is off, and no longer exists")
    found = {name: _take(tree, given, f"algorithm.{name}") for name in _OF_060}
    if old := {name: value for name, (is_there, value) in found.items() if is_there}:
        now = _of_release_060(old)
        meant |= now
        said = ", ".join(f"{name}={show(value)}" for name, value in now.items()) or "the defaults: nothing is corrected"
        messages.append(f"{', '.join(f'algorithm.{name}' for name in old)} became {_NEW}: {said}")
    is_there, value = _take(tree, given, _GRADIENT)
    if is_there:
        meant["loss_type"] = "reinforce" if _is_true(value) else "ppo_clip"
        messages.append(f"{_GRADIENT}={show(value)} is now {_NEW}.loss_type={meant['loss_type']}")
    for name, value in meant.items():
        key = f"{_NEW}.{name}"
        if key in given and at_key(tree, key) != value:
            text = f"{key}={show(at_key(tree, key))} and older names of the same ({show(value)}) disagree. Keep one."
            problems.append(Problem(key, text))
            continue
        put_key(tree, key, value)
        given.add(key)
    return messages


def _of_release_060(old: dict[str, Any]) -> dict[str, Any]:
    """A threshold switched all on: ``rollout_is`` then weighed, ``mask`` and the veto rejected without it too."""
    if not _is_positive(old.get("rollout_is_threshold")):
        return {}
    level, mode = old.get("rollout_is_level", "token"), old.get("rollout_is_mode", "truncate")
    upper, lower = old["rollout_is_threshold"], old.get("rollout_is_threshold_lower")
    now: dict[str, Any] = {}
    if _is_true(old.get("rollout_is")):
        now |= {"rollout_is": level, "rollout_is_threshold": upper}
        if _is_true(old.get("rollout_is_batch_normalize")):
            now["rollout_is_batch_normalize"] = True
    if mode == "mask":
        now |= {"rollout_rs": level, "rollout_rs_threshold": upper}
        if lower is not None:
            now["rollout_rs_threshold_lower"] = lower
    if _is_positive(old.get("rollout_is_veto_threshold")):
        now["rollout_token_veto_threshold"] = old["rollout_is_veto_threshold"]
    return now


# -- What is not built -----------------------------------------------------------------------------------------------

_BUILT = ("fsdp", "fsdp1", "fsdp2", "deepspeed", "local", "megatron")
"""Strategies that need no look into the table of features, which costs milliseconds at every start."""


def set_features_aside(
    tree: dict, given: set[str], problems: list[Problem], is_known: Callable[[str], bool]
) -> list[str]:
    """Take out of the unresolved ``tree``, in place, what belongs to features that are not built.

    A value that asks for nothing, or for what a release does anyway, is left out; any other goes to ``problems``,
    unless the feature is switched off, or changes no number.

    Args:
        is_known: is this dotted key an option or free-form?

    Returns:
        One sentence about values that ask for nothing, and one for each other that has no effect.
    """
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model"):
        name = section_at(tree, role).get("strategy")
        if not isinstance(name, str) or name in _BUILT or is_interpolation(name):
            continue
        if feature := feature_of_backend(name):
            problems.append(Problem(f"{role}.strategy", not_built(f"{role}.strategy={name}", feature)))
            del section_at(tree, role)["strategy"]
    quiet: dict[str, list[str]] = {}
    messages = []
    before = dict(flatten(tree))  # switches are looked up in it while keys are taken out of the tree
    for key, value in before.items():
        found = None if is_known(key) else feature_of_key(key)
        if found is None:
            continue
        pop_key(tree, key)
        given -= set(prefixes(key))  # a section may have been given as a whole
        feature = found.feature
        if key.endswith("._target_") or _is_idle(key, value, feature):
            quiet.setdefault(feature.name, []).append(key)
        elif feature.is_free or _is_off(found, key, before):
            off = "off, and not built" if feature.switches else "not built"
            effect = f"{key}={show(value)} has no effect: it is for {feature.name} ({off})"
            messages.append(f"{effect}. {feature.instead.rstrip('.')}")
        else:
            problems.append(Problem(key, not_built(f"{key}={show(value)}", feature)))
    if quiet:
        counted = (
            f"{name} ({', '.join(keys[:2])}{f' and {len(keys) - 2} more' if len(keys) > 2 else ''})"
            for name, keys in quiet.items()
        )
        messages.insert(0, f"not built, and not asked for: {'; '.join(counted)}")
    return messages


def _is_idle(key: str, value: Any, feature: Feature) -> bool:
    """Whether a value of a feature's key asks for nothing, or for what a release does anyway."""
    if is_interpolation(value):  # what it follows is judged itself
        return True
    said = value
    if isinstance(value, str):  # quoted on the command line
        value = {"true": True, "false": False, "null": None, "none": None}.get(value.lower(), value)
    if asks_for_nothing(value):
        return not any(same(value, item) for item in feature.asks)
    names = [key, *(old + key[len(new) :] for old, new in SECTIONS.items() if key.startswith(f"{new}."))]
    if value == 0 and any(is_release_default(name, False) for name in names):
        return True  # 0 at a switch
    if any(same(value, item) for item in feature.takes):
        return True
    return any(is_release_default(name, item) for name in names for item in (said, value))


def _is_off(found: FeatureKey, key: str, values: dict[str, Any]) -> bool:
    """Has the feature switches, all of them off, of which ``key`` is none?"""
    above = [place for place in prefixes(key)[1:] if place.startswith(f"{found.section}.")]
    places = [key.rpartition(".")[0] if key == found.section else found.section, *above]
    switches = [
        name
        for switch in found.feature.switches
        for name in ([f"{place}{switch}" for place in places] if switch.startswith(".") else [switch])
    ]
    if not switches or key in switches:
        return False
    return all(_is_idle(name, values.get(name), found.feature) for name in switches)


# -- Other names of values -------------------------------------------------------------------------------------------

_VALUES: dict[str, dict[str, str | None]] = {
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "actor_rollout_ref.actor.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "critic.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "actor_rollout_ref.ref.megatron.expert_tensor_parallel_size": {"None": None},  # as a text in v0.5.0
}
"""Option -> other names of its values: estimators that are vectorised here, Megatron's Adam with decoupled decay."""


def translate_values(tree: dict) -> list[str]:
    """Other names of what a value chooses, in the unresolved ``tree``, in place."""
    messages = []
    for key, names in _VALUES.items():
        value = at_key(tree, key)
        if isinstance(value, str) and value in names:
            put_key(tree, key, names[value])
            messages.append(f"{key}: {value} is called {show(names[value])}")
    return messages + _translate_reward_manager(tree)


_LIMITED = (
    "reward_model.router.max_concurrent, requests_per_minute and tokens_per_minute limit what a function asks of its "
    "argument reward_router_address"
)
_LOOP_MANAGERS = {
    "rate_limited": _LIMITED,
    "limited": _LIMITED,
    "remote": "functions run in reward_model.sandbox.workers processes of their own",
}
"""Managers of verl's reward loop that are ``naive`` here, and what does what they add."""


def _translate_reward_manager(tree: dict) -> list[str]:
    key = "reward_model.reward_manager"
    name = at_key(tree, key)
    if not isinstance(name, str) or name not in _LOOP_MANAGERS:
        return []
    # a manager of the user's may have the name, or get it from a module that is imported later
    has_modules = at_key(tree, "actor_rollout_ref.model.external_lib") or os.environ.get("VERL_USE_EXTERNAL_MODULES")
    registry = getattr(sys.modules.get("verl.rewards.managers.rule"), "REWARD_MANAGER_REGISTRY", ())
    if has_modules or name in registry:
        return []
    put_key(tree, key, "naive")
    return [f"{key}: {name} is called naive, and {_LOOP_MANAGERS[name]}"]


def translate_logger(tree: dict) -> list[str]:
    """``tracking``, the old name of the logger ``wandb``, in the unresolved ``tree``, in place."""
    logger = at_key(tree, "trainer.logger")
    names = [logger] if isinstance(logger, str) else list(logger or [])
    if "tracking" not in names:
        return []
    put_key(tree, "trainer.logger", list(dict.fromkeys("wandb" if name == "tracking" else name for name in names)))
    return ["trainer.logger: tracking is now called wandb"]
