"""Values and names that this release does not support: the one table of them, and the validators that read it.

A known option set to another value than its default is refused when nothing would read it ("not supported yet"), so
that no setting is silently ignored. To build a feature, delete its row. Names of estimators and losses, and the options
each reads, are found in their registrations.
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import Config, FreeDict, Problem, did_you_mean, get_path, leaves
from verl.config.checks.base import validator
from verl.config.ppo import ACTOR, ROLLOUT, PPOConfig
from verl.config.tree import show
from verl.utils.import_utils import split_file_name

# -- Built-in estimators and losses, from their registrations -------------------------------------------------------
# The config must be read without torch, which the methods import. So their modules are not imported: the calls of
# ``register_adv_est``, ``register_policy_loss``, ``builtin_estimator`` and ``builtin_policy_loss`` at the left margin
# are read as text, for the names they are given and the ``options`` they read. A test compares the result with the
# registries.

_PACKAGE = Path(__file__).parents[2]
_METHODS = _PACKAGE / "algorithms"


# one line, or the lines up to a parenthesis at the left margin, as the formatter leaves them
_REGISTRATION = re.compile(
    r"^@?((?:register_adv_est|register_policy_loss|builtin_(?:estimator|policy_loss))\((?:[^\n]*\)$|$(?s:.*?)^\)))",
    re.MULTILINE,
)


def registered(files: str, decorator: str) -> tuple[str, ...]:
    """Names that a decorator gives to classes of the package, in the order of the files.

    Args:
        files: pattern of paths below ``verl/``.
        decorator: pattern of its name.
    """
    texts = (path.read_text(encoding="utf-8") for path in sorted(_PACKAGE.glob(files)))
    calls = [call for text in texts for call in re.findall(rf"^@{decorator}\((.*)\)$", text, re.MULTILINE)]
    return tuple(name for call in calls for name in re.findall(r'"([\w-]+)"', call))


@cache
def options_read(kind: str) -> dict[str, tuple[str, ...]]:
    """Return name -> full keys of the options it reads, of every method of a folder.

    Args:
        kind: ``advantages`` or ``losses``.
    """
    methods: dict[str, tuple[str, ...]] = {}
    for path in sorted((_METHODS / kind).glob("*.py")):
        for text in re.findall(_REGISTRATION, path.read_text(encoding="utf-8")):
            call = ast.parse(text.strip(), mode="eval").body
            keys = _option_keys(call)
            # the first argument of ``builtin_estimator`` is its name, and all of the others
            names = call.args[:1] if text.startswith("builtin_estimator") else call.args
            methods |= {
                name.value: keys for name in names if isinstance(name, ast.Constant) and isinstance(name.value, str)
            }
    return methods


def all_options(kind: str) -> tuple[str, ...]:
    """Return every option that some method of the folder reads."""
    return tuple(dict.fromkeys(key for keys in options_read(kind).values() for key in keys))


def full_keys(options: str) -> tuple[str, ...]:
    """Expand the ``options`` of an ``About``: ``section.{a,b}`` is two keys, ``actor.`` is actor_rollout_ref.actor."""
    keys = []
    for word in options.split():
        section, _, names = word.partition("{")
        keys += [section + name for name in names.rstrip("}").split(",")]
    return tuple(re.sub(r"^actor\.", "actor_rollout_ref.actor.", key) for key in keys)


def _option_keys(call: ast.Call) -> tuple[str, ...]:
    texts = [
        str(keyword.value.value)
        for node in ast.walk(call)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("About", "builtin_estimator")
        for keyword in node.keywords
        if keyword.arg == "options" and isinstance(keyword.value, ast.Constant)
    ]
    return tuple(dict.fromkeys(key for text in texts for key in full_keys(text)))


# -- Values and names that this release does not support: the one table of them, and the validators that read it -----


class Limit(NamedTuple):
    """Values of one option that do not work yet."""

    key: str
    """Dotted key; ``section.*`` stands for every option in the section."""
    what: str
    """The missing feature."""
    instead: str
    """The way out."""
    works: tuple = ()
    """Values that work other than the default."""

    def options(self, config: Config) -> list[str]:
        """Dotted keys of the options meant."""
        place, star, _ = self.key.partition(".*")
        return [name for name, _ in leaves(get_path(config, place), f"{place}.")] if star else [self.key]


class Names(NamedTuple):
    """Values of an option that names an implementation; users may register more."""

    key: str
    what: str
    built: tuple[str, ...]
    planned: tuple[str, ...] = ()
    registry: tuple[str, str] | None = None
    """(module, its collection of registered names); looked into only if somebody imported the module."""
    may_be_in_file: bool = False
    """FILE.py:NAME names one too."""


LIMITS: tuple[Limit, ...] = (
    # backends
    Limit("trainer.device", "Ascend NPUs", "use cuda or cpu", ("cuda", "cpu")),
    # rollout
    Limit(
        f"{ROLLOUT}.load_format",
        "loading the engine's first weights another way",
        "leave it alone: the actor's weights are handed over before sampling",
        ("auto", "dummy", "dummy_hf", "dummy_megatron", "hf", "dtensor", "megatron", "safetensors"),
    ),
)

NAMES: tuple[Names, ...] = (
    Names(f"{ROLLOUT}.name", "rollout engine", ("hf", "vllm", "sglang"), ("sglang_async", "server", "trtllm")),
    Names(
        f"{ROLLOUT}.multi_turn.format",
        "format of tool calls",
        registered("agents/tool_formats.py", r"ToolParser\.register"),
        ("deepseek_v4", "gemma4", "kimi", "minimax", "seed"),
        registry=("verl.agents.tool_parser", "TOOL_FORMATS"),
        may_be_in_file=True,
    ),
    Names(
        "algorithm.adv_estimator",
        "advantage estimator",
        tuple(options_read("advantages")),
        registry=("verl.algorithms.advantages", "ADV_ESTIMATOR_REGISTRY"),
        may_be_in_file=True,
    ),
    Names(
        f"{ACTOR}.policy_loss.loss_mode",
        "policy loss",
        tuple(options_read("losses")),
        registry=("verl.algorithms.losses", "POLICY_LOSS_REGISTRY"),
        may_be_in_file=True,
    ),
    Names(
        "reward_model.reward_manager",
        "reward manager",
        registered("rewards/managers/*.py", "register"),
        registry=("verl.rewards.managers.rule", "REWARD_MANAGER_REGISTRY"),
        may_be_in_file=True,
    ),
    Names(
        "trainer.logger",
        "logger",
        registered("telemetry/track*.py", "register_backend"),
        planned=("vemlp_wandb",),
        registry=("verl.telemetry.tracking", "_BACKENDS"),
    ),
)


def built_names(key: str) -> tuple[str, ...]:
    """The implementations of ``key`` that come with this release."""
    return next(names.built for names in NAMES if names.key == key)


@validator("error")
def unsupported_values(config: PPOConfig) -> Iterator[Problem]:
    """Options set to a value that is not implemented."""
    defaults = type(config)()
    for limit in LIMITS:
        for key in limit.options(defaults):
            value, default = get_path(config, key), get_path(defaults, key)
            if value != default and value not in limit.works:
                text = f"is not supported yet ({limit.what}). {limit.instead[0].upper()}{limit.instead[1:]}."
                yield Problem(key, f"{key}={_shown(value, default)} {text}")


@validator("error")
def unknown_names(config: PPOConfig) -> Iterator[Problem]:
    """Names of implementations that neither this release nor a module of the user's has."""
    for names in NAMES:
        chosen = get_path(config, names.key)
        for value in chosen if isinstance(chosen, list) else [chosen]:
            text = _judge_name(names, value, config)
            if text:
                yield Problem(names.key, text)


def _shown(value: Any, default: Any) -> str:
    if isinstance(value, FreeDict) and isinstance(default, FreeDict):
        value = {name: item for name, item in value.items() if name not in default or item != default[name]}
    return show(value)


def _judge_name(names: Names, value: str, config: PPOConfig) -> str | None:
    # a name of the user's may have been registered since the table was made
    if value in names.built or value in _registered(names):
        return None
    if names.may_be_in_file and split_file_name(value):
        return None  # whether the file is there is seen with the other files, what is in it when it is loaded
    known = ", ".join(names.built)
    if value in names.planned:
        return f"{names.key}={value} is not supported yet ({names.what}). Supported: {known}."
    if config.actor_rollout_ref.model.external_lib or os.environ.get("VERL_USE_EXTERNAL_MODULES"):
        return None  # the module may register the name when it is imported; the registry judges then
    hint = did_you_mean(value, (*names.built, *_registered(names))).rstrip("?")
    return f"{names.key}={show(value)} is not a known {names.what}{hint}; known are {known}."


def _registered(names: Names) -> tuple[str, ...]:
    """Names users registered so far; a registry nobody imported has none."""
    if names.registry is None:
        return ()
    module, collection = names.registry
    # not imported for this: a registry that nobody imported holds no name of the user's
    return tuple(getattr(sys.modules.get(module), collection, ()))
