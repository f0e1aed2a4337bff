"""A ROLL file in this package's options: every key becomes something, or is named with the reason why not."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import ConfigError
from verl.config.command_line import locate
from verl.config.ppo import PPOConfig
from verl.config.roll.batch import Roll, batches, devices
from verl.config.roll.environments import environments
from verl.config.roll.sections import rewards, strategy
from verl.config.roll.table import (
    ROLES,
    WORKER_TABLES,
    Idle,
    Note,
    Outcome,
    Refuse,
    Secret,
    Set,
    listed,
    row_outcomes,
    rows,
    section_outcomes,
    word,
)
from verl.config.tree import at_key, overlay, show

# -- From a file to one plain tree: its ``defaults`` laid under it, its ``${...}`` filled in --------------------------


def read_roll(path: str, words: Sequence[str] = ()) -> tuple[dict[str, Any], set[str]]:
    """The tree of a ROLL configuration, and the top-level names that are there only to be referred to.

    Args:
        words: ``key=value`` of ROLL's own keys, laid over the file before ``${...}`` is filled in.

    Raises:
        ConfigError: no such file, no YAML, a ``defaults`` entry that is nowhere, or ``${...}`` that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError([f"{path} does not exist (looked in {Path.cwd()}). Give ROLL's YAML file."])
    tree = _with_defaults(file, [])
    given = OmegaConf.to_container(OmegaConf.from_dotlist([text.lstrip("+") for text in words]))
    overlay(tree, given if isinstance(given, dict) else {})
    # Before they are filled in: a helper that others refer to is no unknown key.
    referred = set(re.findall(r"\$\{([A-Za-z_]\w*)[.}]", str(tree)))
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        if whole := unbuilt(tree):  # says more than that a name is missing
            raise ConfigError([whole]) from error
        key, reason = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{path}: {f'{key} ' if key else ''}cannot be filled in: {reason}."]) from error
    return {str(name): value for name, value in plain.items()} if isinstance(plain, dict) else {}, referred


def _with_defaults(file: Path, seen: list[Path]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from yaml import YAMLError

    if file in seen:
        raise ConfigError([f"{file} names itself in its defaults, by way of {', '.join(map(str, seen))}."])
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file))  # reads 1e-6 as a number, which plain YAML does not
    except (YAMLError, OSError) as error:
        raise ConfigError([f"{file} is no YAML: {' '.join(str(error).split())}."]) from error
    if not isinstance(loaded, Mapping):
        raise ConfigError([f"{file} holds no mapping of keys to values."])
    own = {str(name): value for name, value in loaded.items()}
    tree: dict[str, Any] = {}
    for entry in own.pop("defaults", None) or []:
        if entry == "_self_":
            overlay(tree, own)
            own = {}
        else:
            _lay_group(tree, entry, file, [*seen, file])
    overlay(tree, own)
    return tree


def _lay_group(tree: dict[str, Any], entry: Any, file: Path, seen: list[Path]) -> None:
    """Lay a ``defaults`` entry over ``tree``: ``../config/name@_here_``, ``name@place``, or ``{group: name}``."""
    if isinstance(entry, Mapping):
        ((group, name),) = entry.items()
        if str(group).startswith("override ") or name is None:
            return  # hydra's own groups: logging, launcher
        name, place = f"{str(group).partition('@')[0]}/{name}", str(group).partition("@")[2]
    else:
        name, _, place = str(entry).partition("@")
    found, base = (file.parent / name).with_suffix(".yaml"), Path(name).name
    presets = listed("presets")
    if found.is_file():
        content = _with_defaults(found, seen)
    elif base in presets:
        # ROLL's DeepSpeed files hold their settings under their own name.
        content = {base: presets[base]} if base.startswith("deepspeed") else presets[base]
    else:
        raise ConfigError([f"{file}: defaults names {entry}, but there is no {found}. Copy it there, or leave it out."])
    if place and place not in ("_here_", "_global_", "_group_"):
        content = {place: content}
    overlay(tree, content)


def unbuilt(tree: dict[str, Any]) -> str | None:
    """One sentence about the pipeline a file is for, if it is not built; None: it is for RLVR."""
    pipelines = listed("pipelines")
    kind, keys = "", list[str]()
    name = at_key(tree, "actor_train.strategy_args.strategy_name")
    if str(name).startswith("diffusion"):
        kind, keys = "diffusion", [f"actor_train.strategy_args.strategy_name={name}"]
    for other, pipeline in pipelines.items():
        if not kind and (keys := [key for key in pipeline["keys"] if tree.get(key) not in (None, {}, False)]):
            kind = other
    for key in ("use_opd", "is_pure_opd", "opsd_mode"):
        if not kind and tree.get(key) is True:
            kind, keys = "distill", [key]
    if not kind:
        return None
    named, instead = pipelines[kind]["name"], pipelines[kind]["instead"]
    return f"{', '.join(keys)}: this file is for {named}, which is not built. {instead}."


# -- From the tree to options ----------------------------------------------------------------------------------------


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
    # Quotes of hydra's grammar are no part of the value.
    given = {text.partition("=")[0].lstrip("+"): text.partition("=")[2].strip("'\"") for text in words}
    tree, refused = _in_shape(tree)
    roll = Roll(tree, given)
    chosen: dict[str, Any] = {}
    notes: list[str] = []
    idle: list[str] = []
    environment: dict[str, str] = {}
    for outcome in _outcomes(roll, set(referred)):
        if isinstance(outcome, Set):
            # Nobody would read an option of a role that takes no part.
            if outcome.key.startswith("critic."):
                is_read = roll.has_critic
            else:
                is_read = roll.has_reference or not outcome.key.startswith("actor_rollout_ref.ref.")
            if is_read:
                chosen[outcome.key] = outcome.value
        elif isinstance(outcome, Note):
            notes.append(outcome.text)
        elif isinstance(outcome, Idle):
            idle.append(outcome.key)
        elif isinstance(outcome, Secret):
            environment[outcome.variable] = outcome.value
            why = f"{outcome.key} is not put on a command line, which others can read"
            notes.append(f"{why}: it is {outcome.variable} in the environment of the run")
        elif not given.keys() & {outcome.key, *_keys_of(outcome)}:
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


def _keys_of(refusal: Refuse) -> set[str]:
    return {part.partition("=")[0] for text in refusal.instead for part in text.split()}


def _sentence(refusal: Refuse) -> str:
    added = " or ".join(text if "=" in text else f"{text}=..." for text in refusal.instead)
    return f"{refusal.key}={show(refusal.value)}: {refusal.why}.{f' Add {added} to the command.' if added else ''}"


def _in_shape(tree: Mapping[str, Any], place: str = "") -> tuple[dict[str, Any], list[Refuse]]:
    """The tree without what has the wrong shape: a text where a section stands, a text where a number does."""
    shapes = listed("shapes")
    # Its files, below strategy_config or a section of the user's that is referred to, have "auto" for numbers.
    is_of_deepspeed = "strategy_config." in place or place and place.partition(".")[0] not in shapes["sections"]
    kept: dict[str, Any] = {}
    refused = []
    for name, value in tree.items():
        key = f"{place}{name}"
        is_section = key in shapes["sections"] or name in shapes["inner"] or place == "rewards."
        rule = None
        # YAML reads None as a text, and ROLL's files write it for null.
        if value in (None, "None", "null") or is_section and value == []:
            kept |= {} if is_section else {name: None}
            continue
        is_auto = value == "auto" and is_of_deepspeed
        if name in shapes["counts"] and not is_auto and (type(value) is not int or value < 1):
            rule = "is a whole number from 1 on"
        elif name in shapes["numbers"] and type(value) not in (int, float):
            rule = "is a number"
        elif name in shapes["names"] and not isinstance(value, str):
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


def _outcomes(roll: Roll, referred: set[str]) -> Iterator[Outcome]:
    unread = ("hydra", "rewards", "train_env_manager", "val_env_manager", "custom_envs", "custom_env")
    for key, value in roll.tree.items():
        if key in ROLES:
            yield from _worker(key, value or {}, roll)
        elif key == "validation":
            yield from section_outcomes(f"{key}.", value or {}, rows(*WORKER_TABLES), roll)
        elif key in unread or key in listed("presets") or (key in referred and key not in rows("top")):
            continue
        else:
            yield from section_outcomes("", {key: value}, rows("top"), roll)
    yield from _defaults(roll)
    yield from devices(roll)
    yield from batches(roll)
    yield from environments(roll)
    yield from [] if roll.is_agentic else rewards(roll)


def _worker(key: str, section: Mapping[str, Any], roll: Roll) -> Iterator[Outcome]:
    if key == "critic" and not roll.has_critic:
        yield Note(f"critic: there is none with adv_estimator={roll.get('adv_estimator')}")
        return
    if key == "reference" and not roll.has_reference:
        yield Note("reference: it takes no part without use_kl_loss or add_token_level_kl")
        return
    section = dict(section)
    chosen = section.pop("strategy_args", {"strategy_name": "fsdp2_train"} if key == "actor_train" else None)
    if chosen is not None:
        yield from strategy(f"{key}.strategy_args", chosen, roll)
    # Workers of all roles share processes here, and so the environment.
    if envs := section.pop("system_envs", None):
        yield from row_outcomes(rows("top")["system_envs"], "system_envs", envs, roll, rows("top"))
    worker_cls = str(section.get("worker_cls") or "roll.")
    if not worker_cls.startswith("roll."):
        why = "a worker of yours is a class of another contract: docs/extend.md"
        yield Refuse(f"{key}.worker_cls", worker_cls, why, (f"{key}.worker_cls=null",))
    yield from section_outcomes(f"{key}.", section, rows(*WORKER_TABLES), roll)


def _defaults(roll: Roll) -> Iterator[Outcome]:
    """ROLL's own defaults, where ours differ, of keys the file leaves out."""
    is_needed = {"lambd": roll.has_critic, "init_kl_coef": bool(roll.get("add_token_level_kl"))}
    for key, row in rows("top").items():
        if row.default is not None and at_key(roll.tree, key) is None and is_needed.get(key, True):
            yield from row_outcomes(row, key, row.default, roll, rows("top"))
    for role in ("actor_train", *(["critic"] if roll.has_critic else [])):
        for key, row in rows("worker").items():
            if role in roll.tree and row.default is not None and at_key(roll.tree, f"{role}.{key}") is None:
                yield from row_outcomes(row, f"{role}.{key}", row.default, roll, rows("worker"))
    has_files = roll.get("validation.data_args.file_name") or roll.get("actor_train.data_args.eval_file_name")
    if not has_files and not roll.is_agentic:
        yield Set("trainer.test_freq", -1)
        yield Set("trainer.val_before_train", False)
        if (files := roll.get("actor_train.data_args.file_name")) is not None:
            yield Set("data.val_files", files)
        yield Note("there is no validation section: nothing is validated")
    if not roll.get("actor_infer.generating_args.top_p"):
        ours = "responses are sampled from the whole distribution, top_p=1 and top_k=-1"
        theirs = "ROLL samples with 0.7 and 50 where nothing is said, and trains another policy than it samples"
        yield Note(f"{ours}; {theirs}")
