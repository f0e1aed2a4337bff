"""From a ROLL file to one plain tree: its ``defaults`` laid under it, its ``${...}`` filled in."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import ConfigError
from verl.config.tree import overlay

# -- Pipelines of ROLL that are not built here, and the keys by which a file is known to be for one ------------------


class Pipeline(NamedTuple):
    """A pipeline that is not built."""

    name: str
    keys: tuple[str, ...]
    instead: str


AGENTIC = Pipeline(
    "agentic training with environments",
    ("train_env_manager", "val_env_manager", "custom_envs", "custom_env", "env_manager_cls"),
    "Turns with an environment are an agent loop of yours (docs/async.md), given prompts by an RLVR file",
)
SFT = Pipeline(
    "supervised fine-tuning",
    ("sft_train",),
    "Fine-tune with another tool and name the model's folder with pretrain in an RLVR file",
)
DPO = Pipeline(
    "DPO",
    ("chosen_key", "rejected_key", "ipo", "beta", "label_smoothing"),
    "Train on preferences with another tool and name the model's folder with pretrain in an RLVR file, or give a "
    "reward model of them with reward_model.enable=true (docs/reward_model.md)",
)
DISTILL = Pipeline(
    "distillation from a teacher",
    ("student", "student_pretrain", "teacher_pretrain", "teacher", "student_train", "student_infer", "kd_objective"),
    "Distil with another tool and name the student's folder with pretrain in an RLVR file, or hold the policy near the "
    "teacher by use_kl_loss=true with the teacher as actor_rollout_ref.ref.model.path",
)
DIFFUSION = Pipeline("training of diffusion models", (), "Language models are trained here")
PIPELINES = (AGENTIC, SFT, DPO, DISTILL)


def unbuilt(tree: Mapping[str, Any]) -> str | None:
    """One sentence about the pipeline a file is for, if it is not built; None: it is for RLVR."""
    actor = tree.get("actor_train") if isinstance(tree.get("actor_train"), Mapping) else {}
    strategy = actor.get("strategy_args") if isinstance(actor.get("strategy_args"), Mapping) else {}
    if str(strategy.get("strategy_name")).startswith("diffusion"):
        return _sentence(DIFFUSION, [f"actor_train.strategy_args.strategy_name={strategy['strategy_name']}"])
    for pipeline in PIPELINES:
        if found := [key for key in pipeline.keys if tree.get(key) not in (None, {}, False)]:
            return _sentence(pipeline, found)
    data = actor.get("data_args") if isinstance(actor.get("data_args"), Mapping) else {}
    if tree.get("reward_normalization") and not data.get("file_name"):
        return _sentence(AGENTIC, ["reward_normalization"])
    for key in ("use_opd", "is_pure_opd", "opsd_mode"):
        if tree.get(key) is True:
            return _sentence(DISTILL, [key])
    return None


def _sentence(pipeline: Pipeline, keys: list[str]) -> str:
    return f"{', '.join(keys)}: this file is for {pipeline.name}, which is not built. {pipeline.instead}."


_BF16 = {"bf16": {"enabled": True}}
PRESETS: dict[str, dict] = {
    "deepspeed_zero": {"zero_optimization": {"stage": 0}, **_BF16},
    "deepspeed_zero2": {"zero_optimization": {"stage": 2}, **_BF16},
    "deepspeed_zero3": {"zero_optimization": {"stage": 3}, **_BF16},
    "deepspeed_zero3_cpuoffload": {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        **_BF16,
    },
    "deepspeed_zero2_cpuoffload": {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        **_BF16,
    },
    "envs": {},
}
"""Groups that ROLL's ``examples/config`` holds, for a file that was taken out of its folder."""


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
    overlay(tree, OmegaConf.to_container(OmegaConf.from_dotlist([text.lstrip("+") for text in words])))
    referred = set(re.findall(r"\$\{([A-Za-z_]\w*)[.}]", str(tree)))
    try:
        plain = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        if whole := unbuilt(tree):
            raise ConfigError([whole]) from error
        key, reason = getattr(error, "full_key", None), str(error).splitlines()[0]
        raise ConfigError([f"{path}: {f'{key} ' if key else ''}cannot be filled in: {reason}."]) from error
    return plain, referred


def _with_defaults(file: Path, seen: list[Path]) -> dict[str, Any]:
    from omegaconf import OmegaConf
    from yaml import YAMLError

    if file in seen:
        raise ConfigError([f"{file} names itself in its defaults, by way of {', '.join(map(str, seen))}."])
    try:
        own = OmegaConf.to_container(OmegaConf.load(file))  # reads 1e-6 as a number, which plain YAML does not
    except (YAMLError, OSError) as error:
        raise ConfigError([f"{file} is no YAML: {' '.join(str(error).split())}."]) from error
    if not isinstance(own, Mapping):
        raise ConfigError([f"{file} holds no mapping of keys to values."])
    own = {str(name): value for name, value in own.items()}
    tree: dict[str, Any] = {}
    entries = own.pop("defaults", None) or []
    for entry in entries:
        if entry == "_self_":
            overlay(tree, own)
            own = {}
        else:
            _lay_group(tree, entry, file, [*seen, file])
    overlay(tree, own)
    return tree


def _lay_group(tree: dict, entry: Any, file: Path, seen: list[Path]) -> None:
    """Lay a ``defaults`` entry over ``tree``: ``../config/name@_here_``, ``name@place``, or ``{group: name}``."""
    if isinstance(entry, Mapping):
        ((group, name),) = entry.items()
        if str(group).startswith("override ") or name is None:
            return  # hydra's own groups: logging, launcher
        name, place = f"{str(group).partition('@')[0]}/{name}", str(group).partition("@")[2]
    else:
        name, _, place = str(entry).partition("@")
    found = (file.parent / name).with_suffix(".yaml")
    if found.is_file():
        group = _with_defaults(found, seen)
    elif Path(name).name in PRESETS:
        base = Path(name).name
        group = {base: PRESETS[base]} if base.startswith("deepspeed") else PRESETS[base]
    elif "envs" in Path(name).name:
        return  # environments, of the agentic pipeline
    else:
        raise ConfigError([f"{file}: defaults names {entry}, but there is no {found}. Copy it there, or leave it out."])
    if place and place not in ("_here_", "_global_", "_group_"):
        group = {place: group}
    overlay(tree, group)
