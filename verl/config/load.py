"""From a command line to the typed tree: hydra composes, the dataclasses decide, every problem is reported at once.

Nothing heavy is imported until the keys of the command line are known to exist: ``--help`` and a misspelt key do not
pay for hydra.
"""

import json
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.async_names import translate_async
from verl.config.base import MISSING, Config, ConfigError, ConfigWarning, Problem
from verl.config.command_line import check_overrides, locate, parse, print_help, print_tree, unknown_key
from verl.config.compose import CONFIG_DIR, compose, search_folders
from verl.config.conversations import hold_conversations
from verl.config.environments import follow_environments, follow_normalization
from verl.config.generation import adopt_short_names, long_words
from verl.config.legacy import (
    asks_for_nothing,
    set_features_aside,
    translate,
    translate_correction,
    translate_logger,
    translate_values,
)
from verl.config.megatron import follow_overrides
from verl.config.ppo import PPOConfig
from verl.config.staleness import follow_staleness
from verl.config.tree import (
    at_key,
    build,
    copy_tree,
    differing,
    fits,
    flatten,
    is_interpolation,
    is_text,
    pop_key,
    put_key,
    section_at,
    show,
)

# -- Other ways of saying the same thing, rewritten in the unresolved tree so that others may follow the result ------


_GLOBAL_SIZES = (
    # section, deprecated name (its successor adds _per_gpu), section whose ranks share it
    ("actor_rollout_ref.actor", "ppo_micro_batch_size", "actor_rollout_ref.actor"),
    ("actor_rollout_ref.rollout", "log_prob_micro_batch_size", "actor_rollout_ref.actor"),
    ("actor_rollout_ref.ref", "log_prob_micro_batch_size", "actor_rollout_ref.ref"),
    ("distillation.teacher", "log_prob_micro_batch_size", "distillation.teacher"),
    ("critic", "ppo_micro_batch_size", "critic"),
    ("critic", "forward_micro_batch_size", "critic"),
    ("reward_model", "micro_batch_size", "reward_model"),
)


def spread_global_sizes(tree: dict, composed: Any, problems: list[Problem]) -> list[str]:
    """Turn micro-batch sizes that count all ranks into sizes per rank, in place, before others follow them."""
    messages = []
    for place, name, ranks_of in _GLOBAL_SIZES:
        section = section_at(tree, place)
        total, local = section.get(name), section.get(f"{name}_per_gpu")
        if total is None or (is_interpolation(total) and name.startswith("forward")):
            continue  # not given, or following the critic's other size, which is treated on its own
        key = f"{place}.{name}"
        if local is not None and not is_interpolation(local):
            continue  # both given: a rule says so
        total = _peek(tree, composed, key)
        ranks = _ranks(tree, composed, ranks_of)
        if not isinstance(total, int) or ranks is None:
            continue  # the typed tree will complain
        # the size on one rank is a whole number, and the same on all of them
        if total % ranks:
            text = (
                f"{key}={total} does not spread evenly over {ranks} data-parallel ranks. Set {key}_per_gpu, the size "
                "on one rank, instead."
            )
            problems.append(Problem(key, text))
            continue
        section[f"{name}_per_gpu"], section[name] = total // ranks, None
        messages.append(f"{key}={total} counts all {ranks} ranks and became {key}_per_gpu={total // ranks}")
    return messages


def spread_clip_ratio(tree: dict, given: set[str]) -> None:
    """Let ``clip_ratio`` set both sides unless the user gave a side its own value: else it would do nothing."""
    actor, place = section_at(tree, "actor_rollout_ref.actor"), "actor_rollout_ref.actor"
    if f"{place}.clip_ratio" not in given:
        return
    for side in ("clip_ratio_low", "clip_ratio_high"):
        if f"{place}.{side}" not in given:
            actor[side] = actor.get("clip_ratio")


def drop_empty_requests(tree: dict, given: set[str], root: type[Config], defaults: Callable[[], dict]) -> list[str]:
    """Let null, false, {} and [] ask for nothing, in place, at options that cannot hold them.

    False becomes ``off``, null or 0, the first that the option can hold. What is left keeps its default.

    Args:
        defaults: the tree without anything of the user's.
    """
    kept = []
    for key, value in list(flatten(tree)):
        if not asks_for_nothing(value) or value == "":
            continue
        if fits(root, key, value) is not False and not (value is False and is_text(root, key)):
            continue
        # false means the option's own way to be off; null keeps the default where it cannot be held
        choices = ("off", None, 0) if value is False and not is_text(root, key) else (None,)
        meant = [choice for choice in choices if fits(root, key, choice)]
        if meant:
            put_key(tree, key, meant[0])
            continue
        default = at_key(defaults(), key)
        pop_key(tree, key)
        given.discard(key)
        if default is not None:
            put_key(tree, key, default)
        kept.append(f"{key}={show(value)} ({show(default)})")
    return [f"a value that asks for nothing keeps the default: {', '.join(kept)}"] if kept else []


def adopt_adapter(tree: dict, given: set[str], composed: Any) -> list[str]:
    """Let ``lora_adapter_path`` bring rank, scale and layers of its adapter, in place, where the user gave none."""
    messages = []
    for place in ("actor_rollout_ref.model", "critic.model"):
        section = section_at(tree, place)
        path = _peek(tree, composed, f"{place}.lora_adapter_path")
        if not isinstance(path, str) or section.get("lora_rank") or f"{place}.lora_rank" in given:
            continue
        try:
            adapter = json.loads((Path(path).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # whether the folder holds an adapter is looked at with the other files
        found = {"lora_rank": adapter.get("r"), "lora_alpha": adapter.get("lora_alpha")}
        found["target_modules"] = adapter.get("target_modules")
        brought = {name: value for name, value in found.items() if value and f"{place}.{name}" not in given}
        section.update(brought)
        messages.append(
            f"{place}.lora_adapter_path={path} brings "
            + ", ".join(f"{name}={show(value)}" for name, value in brought.items())
        )
    return messages


def open_servers(tree: dict, given: set[str], composed: Any) -> None:
    """Let servers that other nodes must reach listen on all addresses, unless the user named one."""
    rollout, key = section_at(tree, "actor_rollout_ref.rollout"), "actor_rollout_ref.rollout.server_host"
    together = _peek(tree, composed, "actor_rollout_ref.hybrid_engine")
    nodes = _peek(tree, composed, f"{'trainer' if together else 'actor_rollout_ref.rollout'}.nnodes")
    if key not in given and rollout.get("mode") == "async" and isinstance(nodes, int) and nodes > 1:
        rollout["server_host"] = "0.0.0.0"


def _selected(composed: Any, key: str) -> Any:
    """The plain value at ``key``, interpolations resolved. Raises an error of OmegaConf's where they lead nowhere."""
    from omegaconf import OmegaConf

    value = OmegaConf.select(composed, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _resolved(composed: Any, key: str) -> Any:
    """As ``_selected``; None for an interpolation that leads nowhere, which is reported when the whole is resolved."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        return _selected(composed, key)
    except OmegaConfBaseException:
        return None


def _peek(tree: dict, composed: Any, key: str) -> Any:
    """Value of one key of the tree, which may have changed since it was composed, or of what it follows."""
    raw = at_key(tree, key)
    return _resolved(composed, key) if is_interpolation(raw) else raw


def _ranks(tree: dict, composed: Any, place: str) -> int | None:
    sharing = [f"{place}.ulysses_sequence_parallel_size"]  # options whose product is the ranks that share rows
    if _peek(tree, composed, f"{place}.strategy") == "megatron":
        sharing = [f"{place}.megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")]
    has_own = place == "distillation.teacher" and _peek(tree, composed, "distillation.nnodes")
    owner = "distillation" if has_own else "trainer"
    numbers = [_peek(tree, composed, key) for key in (f"{owner}.nnodes", f"{owner}.n_gpus_per_node", *sharing)]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    nodes, per_node, *shared = numbers
    return max(1, nodes * per_node // prod(shared))


class LoadedConfig(NamedTuple):
    """A configuration composed from a command line: the typed tree, with problems and warnings."""

    config: Any
    """The typed tree."""
    tree: dict
    """The composed tree before interpolations were resolved, plain."""
    warnings: list[str]
    """Old names, and settings without effect."""
    problems: list[Problem]
    """Errors; empty if the configuration can run."""
    given: frozenset[str] = frozenset()
    """Dotted keys the user set."""


def load_ppo_config(
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
    *,
    root: type[PPOConfig] = PPOConfig,
) -> PPOConfig:
    """Compose, type and check a configuration.

    Args:
        overrides: ``key=value`` words in hydra's grammar. ``+key=value`` works on existing and free-form keys.
        config_path: folder of the user's YAML, searched before verl's own.
        config_name: name of the YAML file to start from, without suffix.
        root: class of the tree; a subclass of ``PPOConfig`` may add sections.

    Raises:
        ConfigError: (a ValueError) with every problem found.

    Warns:
        ConfigWarning: once for each old name used and each setting without effect.
    """
    loaded = load(overrides, config_path, config_name, root=root)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    for message in loaded.warnings:
        warnings.warn(message, ConfigWarning, stacklevel=2)
    return loaded.config


def load(
    overrides: Sequence[str] = (),
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
    *,
    config_dir: str | None = None,
    root: type[Config] = PPOConfig,
) -> LoadedConfig:
    """As ``load_ppo_config``, but returns problems and warnings instead of raising and warning.

    Raises:
        ConfigError: if hydra could not compose a tree at all.
    """
    folders, names = search_folders(config_path, config_dir), getattr(root, "short_names", {})
    overrides = long_words(overrides, names)
    checked = check_overrides(overrides, root, lambda name: any((folder / name).is_dir() for folder in folders))
    if checked.problems:
        raise ConfigError([problem.text for problem in checked.problems])
    composed, tree = compose(checked.overrides, folders, config_name, root)
    if adopt_short_names(tree, names):
        from omegaconf import OmegaConf

        composed = OmegaConf.create(tree)
    given = set(checked.given)
    if config_name.removesuffix(".yaml") not in (base_name(root), *OWN_NAMES) or len(folders) > 1:
        by_file = differing(tree, compose([], [CONFIG_DIR], base_name(root), root)[1])
        # a section that is null by default differs as a whole where the command line sets one of its options
        given |= {key for key in by_file if not any(own.startswith(f"{key}.") for own in checked.given)}
    return interpret(tree, given, root, composed=composed, stripped_prefix=checked.stripped_prefix)


OWN_NAMES = ("ppo_megatron_trainer", "fully_async_ppo_trainer")
"""YAML files of verl's own that choose other engines, or another schedule; what they set is not the user's."""


def base_name(root: type[Config]) -> str:
    """The YAML file of verl's own that a tree of this class begins with."""
    return getattr(root, "config_name", "ppo_trainer")


def interpret(
    tree: dict, given: set[str], root: type[Config] = PPOConfig, *, composed: Any = None, stripped_prefix: bool = False
) -> LoadedConfig:
    """Type and check a composed tree whose interpolations are not resolved yet.

    Args:
        tree: plain nested dict; it is changed.
        given: dotted keys the user set, for telling what has no effect.
        root: class of the tree.
        composed: ``tree`` as a DictConfig if there is one; it is changed too.
        stripped_prefix: whether ``backend_config.`` was already taken off a key.
    """
    from omegaconf import OmegaConf, open_dict

    composed = OmegaConf.create(tree) if composed is None else composed
    # what is rewritten below is copied into ``composed`` afterwards, for interpolations to follow
    before = copy_tree(tree)
    problems: list[Problem] = []
    messages = ["backend_config.* is read as the tree itself: leave the prefix out"] if stripped_prefix else []

    def defaults() -> dict:
        return compose([], [CONFIG_DIR], base_name(root), root)[1]

    notes = drop_empty_requests(tree, given, root, defaults)
    is_ppo = issubclass(root, PPOConfig)
    if is_ppo:
        messages += translate_async(tree, given, problems)
        messages += translate(tree, given, problems, partial(_resolved, composed))
        messages += translate_logger(tree) + translate_values(tree)
        messages += translate_correction(tree, given, problems)
    elif hasattr(root, "rewrite"):
        messages += root.rewrite(tree, given, problems, partial(_resolved, composed)) + translate_logger(tree)
    notes += drop_empty_requests(tree, given, root, defaults)  # which stood at another name
    if is_ppo:
        notes = _follow_others(tree, given, composed) + notes
        notes += set_features_aside(tree, given, problems, lambda key: locate(root, key).kind != "unknown")
        messages += spread_global_sizes(tree, composed, problems)
        spread_clip_ratio(tree, given)
    if messages:
        messages = ["old names were understood: " + "; ".join(dict.fromkeys(messages))]
    messages += notes
    for key in differing(tree, before):
        with open_dict(composed):
            OmegaConf.update(composed, key, at_key(tree, key), force_add=True)
    values = _resolve(tree, tree, composed, "", problems)
    config = build(root(), _known(values, root, problems), "", problems)

    def is_given(key: str) -> bool:
        return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in given)

    if not is_ppo and hasattr(config, "find"):  # a program with checks of its own
        problems = problems or list({found.text: found for found in config.find("error", is_given)}.values())
        messages += [] if problems else [found.text for found in config.find("warning", is_given)]
        return LoadedConfig(config, tree, messages, problems, frozenset(given))
    # validators of a tree that did not type would report the same mistake once more
    problems = _without_echoes(problems, tree)
    if isinstance(config, PPOConfig):
        problems = _without_echoes(problems + _errors(config, problems), tree)
        if not problems:
            from verl.config.checks import find

            messages += [warning.text for warning in find(config, "warning", is_given=is_given)]
    return LoadedConfig(config, tree, messages, problems, frozenset(given))


def _follow_others(tree: dict, given: set[str], composed: Any) -> list[str]:
    """Let options that the user did not set follow those that were, in place; returns sentences for the user."""
    # after old names became new ones, and before values are resolved: others may follow these
    messages = adopt_adapter(tree, given, composed)
    turned = hold_conversations(tree, given, partial(_peek, tree, composed))
    follow_environments(tree, given, partial(_peek, tree, composed))
    follow_normalization(tree, given, partial(_peek, tree, composed))
    turned += follow_staleness(tree, given, partial(_peek, tree, composed))
    open_servers(tree, given, composed)
    follow_overrides(tree, given)
    return [*messages, *turned]


def run_from_command_line(
    run: Callable[[Any], Any],
    arguments: Sequence[str] | None = None,
    *,
    config_name: str = "ppo_trainer",
    config_path: str | None = None,
    root: type[Config] = PPOConfig,
    examine: Callable[[LoadedConfig, dict[str, Any]], bool] | None = None,
) -> Any:
    """Call ``run(config)`` with what the command line says; what ``@hydra.main`` is to hydra.

    Args:
        run: gets the typed, checked tree.
        arguments: words after the program's name. None: this process's.
        config_name, config_path: used unless the command line names others.
        root: class of the tree.
        examine: looks at what was composed and at the flags, and says whether to call ``run``; None: contradictions
            and missing files are looked for.

    Returns:
        What ``run`` returns; None after ``--help``, ``--cfg`` and ``--check``.

    Raises:
        SystemExit: with code 2 and all problems on stderr if the configuration cannot run.
    """
    # not at the top: whoever imports a section need not wait for subprocess, socket and json
    from verl.utils.process import no_collection, plain_ending

    words = sys.argv[1:] if arguments is None else list(arguments)
    with plain_ending():
        try:
            with no_collection():
                examine = examine or stops_at_problems
                config = _config_to_run(words, config_name, config_path, root, run.__module__, examine)
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return None if config is None else run(config)


def _config_to_run(
    arguments: list[str],
    config_name: str,
    config_path: str | None,
    root: type[Config],
    module: str,
    examine: Callable[[LoadedConfig, dict[str, Any]], bool],
) -> Config | None:
    """The checked tree; None if the command line only asked for information, which is then on stdout."""
    flags, words = parse(arguments)
    if flags.get("help"):
        print_help(long_words(words, getattr(root, "short_names", {})), root, module)
        return None
    path, name = flags.get("config_path", config_path), flags.get("config_name", config_name)
    loaded = load(words, path, name, config_dir=flags.get("config_dir"), root=root)
    if "cfg" in flags:
        print_tree(loaded.tree, [problem.text for problem in loaded.problems], flags)
        return None
    if not examine(loaded, flags):
        return None
    if isinstance(loaded.config, PPOConfig):
        # watched from here on: what composed and checked the tree does not count as a reader
        from verl.config.unused_options import remember_given

        remember_given(loaded.config, loaded.tree, loaded.given, loaded.warnings)
    return loaded.config


def stops_at_problems(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    """Print the warnings and, with ``--check``, the batch arithmetic; return whether to go on after that.

    Raises:
        ConfigError: with every problem, missing files included.
    """
    from verl.config.checks.batch import batch_plan
    from verl.config.checks.run import missing_files
    from verl.telemetry.run_record import say_early

    problems = [*loaded.problems, *(missing_files(loaded.config) if isinstance(loaded.config, PPOConfig) else ())]
    if problems:
        raise ConfigError([problem.text for problem in problems])
    for message in loaded.warnings:
        say_early(f"note: {message}")
    if flags.get("check"):
        print(batch_plan(loaded.config))
    return not flags.get("check")


def check(config: PPOConfig) -> None:
    """Run every check on a tree made by hand. Raises ConfigError with all problems."""
    problems = _errors(config, [])
    if problems:
        raise ConfigError([problem.text for problem in problems])


def _errors(config: PPOConfig, earlier: list[Problem]) -> list[Problem]:
    """Errors of the validators, but for those about options that have a problem already."""
    from verl.config.checks import find

    blamed = {problem.key for problem in earlier}
    return [problem for problem in find(config, "error") if not problem.keys & blamed]


# -- From the composed tree to plain values --------------------------------------------------------------------------


_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\w+(?:\.\w+)+)(?:,[^{}]*)?\}")
_ABSENT = object()


def _referred(root: dict, value: Any) -> Any:
    """The scalar that a chain of references to whole keys leads to; ``_ABSENT`` for all else, which OmegaConf resolves.

    OmegaConf parses each reference again, which was a third of the time to load a configuration.
    """
    for _ in range(8):
        found = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            return _ABSENT if isinstance(value, dict | list) or is_interpolation(value) or value == MISSING else value
        node: Any = root
        for name in found[1].split("."):
            if not isinstance(node, dict) or name not in node:
                return _ABSENT
            node = node[name]
        value = node
    return _ABSENT


def _resolve(tree: dict, root: dict, composed: Any, prefix: str, problems: list[Problem]) -> dict:
    """``tree``, a section of ``root``, with every interpolation replaced by its value; those that lead nowhere become
    problems."""
    from omegaconf.errors import OmegaConfBaseException

    values = {}
    for name, raw in tree.items():
        key = f"{prefix}{name}"
        if isinstance(raw, dict):
            values[name] = _resolve(raw, root, composed, f"{key}.", problems)
            continue
        if not is_interpolation(raw):
            values[name] = raw
            continue
        if (found := _referred(root, raw)) is not _ABSENT:
            values[name] = found
            continue
        try:
            values[name] = _selected(composed, key)
        except OmegaConfBaseException as error:
            problems.append(Problem(key, f"{key}={raw} cannot be resolved: {str(error).splitlines()[0]}."))
    return values


def _known(values: dict, root: type[Config], problems: list[Problem], prefix: str = "") -> dict:
    """``values`` without keys that no section has, and mandatory options still open; both become problems."""
    kept = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        place = locate(root, key)
        if place.kind == "unknown":
            problems.append(Problem(key, unknown_key(root, key, place)))
        elif place.kind == "section" and isinstance(value, dict):
            kept[name] = _known(value, root, problems, f"{key}.")
        elif value == MISSING:
            problems.append(Problem(key, f"{key} must be given."))
        else:
            kept[name] = value
    return kept


_SOURCE = re.compile(r"\$\{\s*(?:oc\.select:\s*)?(\.*[\w.-]+)")


def _without_echoes(problems: list[Problem], tree: dict) -> list[Problem]:
    """Drop the problem of an option that only follows another one that is a problem itself, and exact repeats."""
    blamed = {problem.key for problem in problems}
    kept = [problem for problem in problems if not sources(tree, problem.key) & (blamed - {problem.key})]
    return list({problem.text: problem for problem in kept}.values())


def sources(tree: dict, key: str) -> set[str]:
    """Keys that the unresolved value at ``key`` follows, directly or through others."""
    found: set[str] = set()
    waiting = [key]
    while waiting:
        current = waiting.pop()
        parent, _, name = current.rpartition(".")
        raw = (section_at(tree, parent) if parent else tree).get(name)
        for source in _SOURCE.findall(raw) if isinstance(raw, str) else []:
            if source.startswith("."):  # one dot: the same section; each further dot: one section up
                ups = len(source) - len(source.lstrip(".")) - 1
                base = parent.split(".")[: len(parent.split(".")) - ups] if parent else []
                source = ".".join([*base, source.lstrip(".")])
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found
