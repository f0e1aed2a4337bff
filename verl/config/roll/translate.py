"""A ROLL tree in this package's options: every key becomes something, or is named with the reason why not."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl.config.base import did_you_mean
from verl.config.build import show
from verl.config.overrides import locate
from verl.config.ppo import PPOConfig
from verl.config.roll.batch import Roll, batches, devices, rewards
from verl.config.roll.environments import ENVIRONMENT, MANAGER
from verl.config.roll.read import PRESETS
from verl.config.roll.result import Note, Outcome, Refuse, Set, word
from verl.config.roll.strategies import strategy
from verl.config.roll.table import TOP, Row
from verl.config.roll.workers import DATA, GENERATION, ROLES, WORKER
from verl.config.tree import at_key

_GUIDE = "is no key of ROLL's guides"
_IGNORED = ("hydra", *PRESETS)
_REWARD_KEYS = ("rewards", "reward")


class Translation(NamedTuple):
    """A ROLL configuration, told in other words."""

    words: list[str]
    """``key=value``, those of the command line last."""
    notes: list[str]
    refusals: list[str]


def translate(tree: Mapping[str, Any], referred: Iterable[str] = (), words: Iterable[str] = ()) -> Translation:
    """Translate a plain ROLL tree.

    Args:
        tree: as ``read_roll`` returns it.
        referred: top-level names that other values refer to, the user's own helpers among them.
        words: ``key=value`` of our options, laid over what the tree says; they settle refusals.
    """
    words = list(words)
    overridden = {text.partition("=")[0].lstrip("+") for text in words}
    roll = Roll(tree, overridden, lambda key: locate(PPOConfig, key).kind != "unknown")
    chosen: dict[str, Any] = {}
    notes: list[str] = []
    refusals: list[str] = []
    for outcome in _outcomes(roll, set(referred)):
        if isinstance(outcome, Set) and not roll.knows(outcome.key):
            refusals.append(_no_option(roll, outcome))
        elif isinstance(outcome, Set) and _is_read(roll, outcome.key):
            chosen[outcome.key] = outcome.value
        elif isinstance(outcome, Note):
            notes.append(outcome.text)
        elif isinstance(outcome, Refuse) and not overridden & {outcome.key, *outcome.instead}:
            refusals.append(_sentence(outcome))
    own = [word(key, value) for key, value in chosen.items() if key not in overridden]
    return Translation([*own, *words], list(dict.fromkeys(notes)), list(dict.fromkeys(refusals)))


def _sentence(refusal: Refuse) -> str:
    way_out = f" Way out: {' or '.join(f'{key}=...' for key in refusal.instead)} behind the file." * bool(
        refusal.instead
    )
    return f"{refusal.key}={show(refusal.value)}: {refusal.why}.{way_out}"


def _no_option(roll: Roll, outcome: Set) -> str:
    why = f"there is no option {outcome.key} yet"
    if outcome.key.startswith("env."):
        why = "environments are not built; turns with one are an agent loop of yours (docs/async.md)"
    return f"{roll.at}={show(outcome.value)}: {why}."


def _is_read(roll: Roll, key: str) -> bool:
    """Whether the role an option belongs to takes part: else nobody would read it."""
    if key.startswith("critic."):
        return roll.get("adv_estimator", "gae") == "gae"
    return not key.startswith("actor_rollout_ref.ref.") or bool(
        roll.get("use_kl_loss") or roll.get("add_token_level_kl")
    )


def _outcomes(roll: Roll, referred: set[str]) -> Iterator[Outcome]:
    for key, value in roll.tree.items():
        if key in ROLES:
            yield from _worker(key, value or {}, roll)
        elif key == "validation":
            yield from _section(key, value or {}, {**DATA, **GENERATION}, roll)
        elif key in ("train_env_manager", "val_env_manager"):
            yield from _manager(key, value or {}, roll)
        elif key == "custom_envs":
            yield from _environments(value or {}, roll)
        elif key in _REWARD_KEYS:
            yield from rewards(roll) if key == "rewards" else ()
        elif key == "reward_normalization":
            for name, item in (value or {}).items():
                yield from _row(TOP.get(f"{key}.{name}"), f"{key}.{name}", item, roll, TOP)
        elif key in TOP:
            yield from _row(TOP[key], key, value, roll, TOP)
        elif key not in referred and key not in _IGNORED:
            yield Refuse(key, value, f"{_GUIDE}{did_you_mean(key, [*TOP, *ROLES]).rstrip('?')}")
    yield from _defaults(roll)
    yield from devices(roll)
    yield from batches(roll)


def _row(row: Row | None, key: str, value: Any, roll: Roll, known: Iterable[str]) -> Iterator[Outcome]:
    roll.at = key
    if row is None:
        near = did_you_mean(key.partition(".")[2] or key, known).rstrip("?")
        yield Refuse(key, value, f"{_GUIDE}{near}")
    elif row.to is None:
        if value not in row.harmless:
            yield Refuse(key, value, row.note, row.instead)
    elif callable(row.to):
        yield from row.to(key, value, roll)
    elif value is not None:
        yield from (Set(option, value) for option in ([row.to] if isinstance(row.to, str) else row.to))


def _section(key: str, section: Mapping, rows: Mapping[str, Row], roll: Roll) -> Iterator[Outcome]:
    """Keys of a section, two levels deep as the tables have them."""
    for name, value in section.items():
        if value is None and name.endswith("_args"):
            continue
        if isinstance(value, Mapping) and name.endswith("_args"):
            for inner, item in value.items():
                yield from _row(rows.get(f"{name}.{inner}"), f"{key}.{name}.{inner}", item, roll, rows)
        else:
            yield from _row(rows.get(name), f"{key}.{name}", value, roll, rows)


def _worker(key: str, section: Mapping, roll: Roll) -> Iterator[Outcome]:
    rows = {**WORKER, **(DATA if key == "actor_train" else {}), **(GENERATION if key == "actor_infer" else {})}
    section = dict(section)
    if (chosen := section.pop("strategy_args", None)) is not None:
        yield from strategy(f"{key}.strategy_args", chosen, roll)
    if envs := section.pop("system_envs", None):
        yield from _row(TOP["system_envs"], "system_envs", envs, roll, TOP)
    if key == "critic" and roll.get("adv_estimator", "gae") != "gae":
        yield Note(f"critic: there is none with adv_estimator={roll.get('adv_estimator')}")
        return
    worker_cls = str(section.get("worker_cls", "roll."))
    if not worker_cls.startswith("roll."):
        yield Refuse(
            f"{key}.worker_cls", worker_cls, "a worker of yours is a class of another contract: docs/extend.md"
        )
    yield from _section(key, section, rows, roll)


def _manager(key: str, section: Mapping, roll: Roll) -> Iterator[Outcome]:
    place = f"env.{key.partition('_')[0]}"
    for name, value in section.items():
        row = MANAGER.get(name)
        roll.at = f"{key}.{name}"
        if row is None:
            yield from _row(None, f"{key}.{name}", value, roll, MANAGER)
        elif name == "group_size" and place == "env.train":
            continue  # in rollout.n
        elif value is not None:
            option = "env.manager_cls" if row.to == "manager_cls" else f"{place}.{row.to}"
            yield Set(option, value)


def _environments(section: Mapping, roll: Roll) -> Iterator[Outcome]:
    for tag, entry in section.items():
        for name, value in (entry or {}).items():
            row = ENVIRONMENT.get(name)
            roll.at = f"custom_envs.{tag}.{name}"
            if row is None or row.to is None:
                yield from _row(
                    row and row._replace(harmless=(value,)), f"custom_envs.{tag}.{name}", value, roll, ENVIRONMENT
                )
            elif value is not None:
                yield Set(f"env.registry.{tag}.{row.to}", value)


def _defaults(roll: Roll) -> Iterator[Outcome]:
    """ROLL's own defaults, where ours differ, of keys the file leaves out."""
    for key, row in TOP.items():
        is_needed = {"lambd": roll.get("adv_estimator", "gae") == "gae", "init_kl_coef": roll.get("add_token_level_kl")}
        if row.default is not None and at_key(roll.tree, key) is None and is_needed.get(key, True):
            yield from _row(row, key, row.default, roll, TOP)
    for role in ("actor_train", "critic"):
        if role in roll.tree and (role == "actor_train" or roll.get("adv_estimator", "gae") == "gae"):
            for key, row in WORKER.items():
                if row.default is not None and at_key(roll.tree, f"{role}.{key}") is None:
                    yield from _row(row, f"{role}.{key}", row.default, roll, WORKER)
    if roll.get("validation") is None and not roll.is_agentic:
        yield Set("trainer.test_freq", -1)
        yield Set("trainer.val_before_train", False)
        if (files := roll.get("actor_train.data_args.file_name")) is not None:
            yield Set("data.val_files", files)
        yield Note("there is no validation section: nothing is validated")
    if not roll.get("actor_infer.generating_args.top_p"):
        yield Note("responses are drawn from the whole distribution, top_p=1 and top_k=-1; ROLL draws with 0.7 and 50 "
                   "where nothing is said, and trains another policy than it samples")  # fmt: skip
