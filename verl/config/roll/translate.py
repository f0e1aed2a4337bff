"""A ROLL tree in this package's options: every key becomes something, or is named with the reason why not."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from verl.config.command_line import locate
from verl.config.ppo import PPOConfig
from verl.config.roll.batch import Roll, batches, devices
from verl.config.roll.read import PRESETS, unbuilt
from verl.config.roll.result import Idle, Note, Outcome, Refuse, Secret, Set, word
from verl.config.roll.rewards import rewards
from verl.config.roll.strategies import strategy
from verl.config.roll.table import TOP, Row, row_outcomes
from verl.config.roll.workers import DATA, GENERATION, ROLES, WORKER
from verl.config.tree import at_key, show

_IGNORED = ("hydra", "rewards", *PRESETS)
_AGENTIC = ("train_env_manager", "val_env_manager", "custom_envs")


class Translation(NamedTuple):
    """A ROLL configuration, translated."""

    words: list[str]
    """``key=value``, those of the command line last."""
    notes: list[str]
    refusals: list[str]
    added: list[str]
    """Words that would settle the refusals, one each."""
    environment: dict[str, str]
    """Variables for secrets that the file holds."""


def is_ours(key: str) -> bool:
    """Whether a dotted key is an option of ours; ROLL's own may stand on the command line too."""
    return locate(PPOConfig, key).kind != "unknown"


def translate(tree: Mapping[str, Any], referred: Iterable[str] = (), words: Iterable[str] = ()) -> Translation:
    """Translate a plain ROLL tree.

    Args:
        tree: as ``read_roll`` returns it.
        referred: top-level names that other values refer to, the user's own helpers among them.
        words: ``key=value`` of our options, laid over what the tree says; they settle refusals.
    """
    words = list(words)
    given = {text.partition("=")[0].lstrip("+"): text.partition("=")[2].strip("'\"") for text in words}
    tree, refused = _in_shape(tree)
    roll = Roll(tree, given, is_ours)
    chosen: dict[str, Any] = {}
    notes: list[str] = []
    idle: list[str] = []
    environment: dict[str, str] = {}
    for outcome in _outcomes(roll, set(referred)):
        if isinstance(outcome, Set) and _is_read(roll, outcome.key):
            chosen[outcome.key] = outcome.value
        elif isinstance(outcome, Note):
            notes.append(outcome.text)
        elif isinstance(outcome, Idle):
            idle.append(outcome.key)
        elif isinstance(outcome, Secret):
            environment[outcome.variable] = outcome.value
            notes.append(f"{outcome.key} is not put on a command line, which others can read: it is {outcome.variable} "
                         "in the environment of the run")  # fmt: skip
        elif isinstance(outcome, Refuse) and not given.keys() & {outcome.key, *_keys_of(outcome)}:
            refused.append(outcome)
    if idle:
        roles = r"^(?:actor_train|actor_infer|reference|critic|validation)\."
        several = [re.sub(roles, "*.", re.sub(r"^rewards\.[^.]+", "rewards.*", key)) for key in idle]
        notes.append(f"without effect here (docs/roll.md says why): {', '.join(dict.fromkeys(several))}")
    own = [word(key, value) for key, value in chosen.items() if key not in given]
    whole = unbuilt(tree)
    refusals = [whole] if whole else list(dict.fromkeys(map(_sentence, refused)))
    added = [] if whole else list(dict.fromkeys(outcome.instead[0] for outcome in refused if outcome.instead))
    return Translation([*own, *words], list(dict.fromkeys(notes)), refusals, added, environment)


_SECTIONS = (*ROLES, "validation", "rewards", "dataset_filter", "train_infer_correction", "tracker_kwargs",
             "checkpoint_config", "system_envs", "router_args", "rollout_mock", "transfer_backend")  # fmt: skip
_INNER = ("model_args", "training_args", "data_args", "generating_args", "strategy_args", "strategy_config",
          "domain_interleave_probs", "query_filter_config", "filter_args", "system_envs",
          "model_config_kwargs")  # fmt: skip
_COUNTS = (
    "rollout_batch_size", "num_return_sequences_in_group", "prompt_length", "response_length", "sequence_length",
    "num_gpus_per_node", "num_gpus_per_worker", "world_size", "infer_batch_size", "ppo_epochs", "max_new_tokens",
    "per_device_train_batch_size", "gradient_accumulation_steps", "num_return_sequences", "model_update_frequency",
    "ulysses_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "tensor_parallel_size",
)  # fmt: skip
_NUMBERS = ("max_additional_running_prompts", "pg_clip", "async_generation_ratio", "warmup_steps", "temperature")
"""Keys that the arithmetic of batches and devices reads: whole numbers from 1 on, and others."""


def _in_shape(tree: Mapping[str, Any], place: str = "") -> tuple[dict[str, Any], list[Refuse]]:
    """The tree without what has the wrong shape: a text where a section stands, a text where a number does."""
    kept, refused = {}, []
    for name, value in tree.items():
        key = f"{place}{name}"
        is_section = key in _SECTIONS or name in _INNER or place == "rewards."
        rule = None
        if value in (None, "None", "null") or is_section and value == []:
            kept |= {} if is_section else {name: None}
            continue
        if name in _COUNTS and value != "auto" and (type(value) is not int or value < 1):
            rule = "is a whole number from 1 on"
        elif name in _NUMBERS and type(value) not in (int, float):
            rule = "is a number"
        elif name in ("lr_scheduler_type", "pg_variant") and not isinstance(value, str):
            rule = "is a name"
        elif is_section and not isinstance(value, Mapping):
            rule = "is a section, of keys and values"
        if rule is not None:
            refused.append(Refuse(key, value, rule, (f"{key}=null",)))
        elif isinstance(value, Mapping):
            kept[name], inner = _in_shape(value, f"{key}.")
            refused += inner
        else:
            kept[name] = value
    return kept, refused


def _keys_of(refusal: Refuse) -> set[str]:
    return {part.partition("=")[0] for text in refusal.instead for part in text.split()}


def _sentence(refusal: Refuse) -> str:
    added = " or ".join(text if "=" in text else f"{text}=..." for text in refusal.instead)
    return f"{refusal.key}={show(refusal.value)}: {refusal.why}.{f' Add {added} to the command.' if added else ''}"


def _is_read(roll: Roll, key: str) -> bool:
    """Whether there is such an option, and the role it belongs to takes part: else nobody would read it."""
    if key.startswith("critic."):
        return roll.get("adv_estimator", "gae") == "gae"
    if key.startswith("actor_rollout_ref.ref."):
        return _has_reference(roll)
    return not key.startswith("env.")


def _has_reference(roll: Roll) -> bool:
    return bool(roll.get("use_kl_loss") or roll.get("add_token_level_kl"))


def _outcomes(roll: Roll, referred: set[str]) -> Iterator[Outcome]:
    for key, value in roll.tree.items():
        if key in ROLES:
            yield from _worker(key, value or {}, roll)
        elif key == "validation":
            yield from _section(key, value or {}, {**WORKER, **DATA, **GENERATION}, roll)
        elif key in _AGENTIC or key in _IGNORED or (key in referred and key not in TOP):
            continue
        else:
            yield from _top(key, value, roll)
    yield from _defaults(roll)
    yield from devices(roll)
    yield from batches(roll)
    yield from [] if roll.is_agentic else rewards(roll)


def _top(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """A key of the top level, or the keys of a section there."""
    if isinstance(value, Mapping) and any(name.startswith(f"{key}.") for name in TOP):
        for name, item in value.items():
            yield from _top(f"{key}.{name}", item, roll)
    else:
        yield from row_outcomes(TOP.get(key), key, value, roll, TOP)


def _section(key: str, section: Mapping, rows: Mapping[str, Row], roll: Roll) -> Iterator[Outcome]:
    """Keys of a section, two levels deep as the tables have them."""
    for name, value in section.items():
        if isinstance(value, Mapping) and any(row.startswith(f"{name}.") for row in rows):
            for inner, item in value.items():
                yield from row_outcomes(rows.get(f"{name}.{inner}"), f"{key}.{name}.{inner}", item, roll, rows)
        else:
            yield from row_outcomes(rows.get(name), f"{key}.{name}", value, roll, rows)


def _worker(key: str, section: Mapping, roll: Roll) -> Iterator[Outcome]:
    if key == "critic" and roll.get("adv_estimator", "gae") != "gae":
        yield Note(f"critic: there is none with adv_estimator={roll.get('adv_estimator')}")
        return
    if key == "reference" and not _has_reference(roll):
        yield Note("reference: it takes no part without use_kl_loss or add_token_level_kl")
        return
    section = dict(section)
    if (chosen := section.pop("strategy_args", None)) is not None:
        yield from strategy(f"{key}.strategy_args", chosen, roll)
    elif key == "actor_train":
        yield from strategy(f"{key}.strategy_args", {"strategy_name": "fsdp2_train"}, roll)
    if envs := section.pop("system_envs", None):
        yield from row_outcomes(TOP["system_envs"], "system_envs", envs, roll, TOP)
    worker_cls = str(section.get("worker_cls") or "roll.")
    if not worker_cls.startswith("roll."):
        why = "a worker of yours is a class of another contract: docs/extend.md"
        yield Refuse(f"{key}.worker_cls", worker_cls, why, (f"{key}.worker_cls=null",))
    yield from _section(key, section, {**WORKER, **DATA, **GENERATION}, roll)


def _defaults(roll: Roll) -> Iterator[Outcome]:
    """ROLL's own defaults, where ours differ, of keys the file leaves out."""
    for key, row in TOP.items():
        is_needed = {"lambd": roll.get("adv_estimator", "gae") == "gae", "init_kl_coef": roll.get("add_token_level_kl")}
        if row.default is not None and at_key(roll.tree, key) is None and is_needed.get(key, True):
            yield from row_outcomes(row, key, row.default, roll, TOP)
    for role in ("actor_train", "critic"):
        if role in roll.tree and (role == "actor_train" or roll.get("adv_estimator", "gae") == "gae"):
            for key, row in WORKER.items():
                if row.default is not None and at_key(roll.tree, f"{role}.{key}") is None:
                    yield from row_outcomes(row, f"{role}.{key}", row.default, roll, WORKER)
    has_files = roll.get("validation.data_args.file_name") or roll.get("actor_train.data_args.eval_file_name")
    if not has_files and not roll.is_agentic:
        yield Set("trainer.test_freq", -1)
        yield Set("trainer.val_before_train", False)
        if (files := roll.get("actor_train.data_args.file_name")) is not None:
            yield Set("data.val_files", files)
        yield Note("there is no validation section: nothing is validated")
    if not roll.get("actor_infer.generating_args.top_p"):
        yield Note("responses are drawn from the whole distribution, top_p=1 and top_k=-1; ROLL draws with 0.7 and 50 "
                   "where nothing is said, and trains another policy than it samples")  # fmt: skip
