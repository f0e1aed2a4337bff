"""The registry of validators, what they share, and what is checked by a table or by what a field says of itself."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

from verl.config.actor import ActorConfig, FrozenModelConfig
from verl.config.base import Config, Problem, ReadIf, get_path, leaves, peek
from verl.config.critic import CriticConfig
from verl.config.engine import STRATEGIES, FSDPConfig, StrategyTraits
from verl.config.megatron import MegatronConfig
from verl.config.ppo import ACTOR, REF, RM, ROLLOUT, SHAPING, TEACHER, PPOConfig
from verl.config.reward import RewardModelConfig
from verl.config.tree import show

Severity = Literal["error", "warning", "advice"]
IsGiven = Callable[[str], bool]
"""Whether the user set the option at a dotted key."""
Role = ActorConfig | FrozenModelConfig | CriticConfig | RewardModelConfig
"""Section of a role that runs a model."""


class Validator(NamedTuple):
    """A registered check: a generator of ``Problem``s, and how grave they are."""

    name: str
    subject: str
    """Module that registers it."""
    function: Callable[..., Iterator[Problem]]
    severity: Severity
    arguments: tuple[str, ...]
    """Names of the function's arguments after ``config``: none, ``is_given`` or ``total_steps``."""


VALIDATORS: list[Validator] = []

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")


def validator(severity: Severity) -> Callable:
    """Register a check of a configuration.

    The function takes ``config`` and, if it names them, ``is_given`` (warnings) or ``total_steps`` (advice).

    Args:
        severity: ``error``: the run must not start. ``warning``: a setting has no effect, or another than its name
            says; warnings may assume that no error was found. ``advice``: the run would work and is probably not
            meant; reported by ``verl doctor`` only.
    """

    def register(function: Callable[..., Iterator[Problem]]) -> Callable[..., Iterator[Problem]]:
        # from the code object: inspect would be imported for nothing else here
        arguments = function.__code__.co_varnames[1 : function.__code__.co_argcount]
        VALIDATORS.append(Validator(function.__name__, function.__module__, function, severity, arguments))
        return function

    return register


class Setting(NamedTuple):
    """An option with some of its values, as in ``trainer.nnodes>1``."""

    key: str
    """Dotted key, or a property of the tree; what ``attrgetter`` takes."""
    sign: str
    """``=`` and ``!=``: one of ``values``, none of them; ``>``: more than it. Empty: not null, false, 0 or empty."""
    values: list[str]

    @classmethod
    def read(cls, text: str) -> "Setting":
        """Raise ValueError for a text of another form."""
        match = re.fullmatch(r"([\w.]+)(?:(=|!=|>)(.*))?", text)
        if match is None:
            raise ValueError(f"{text!r} is no setting: write KEY, KEY=a|b, KEY!=a or KEY>1")
        return cls(match[1], match[2] or "", (match[3] or "").split("|"))

    def holds(self, config: PPOConfig) -> bool:
        """Whether the option has one of the values."""
        # attrgetter, not get_path: a property, such as ``uses_critic``, is a setting too
        value = attrgetter(self.key)(config)
        if self.sign == ">":
            return value > float(self.values[0])
        return (show(value) in self.values) == (self.sign == "=") if self.sign else bool(value)


class Contradiction(NamedTuple):
    """Two settings of which one excludes the other, as a row of ``contradictions``."""

    settings: list[Setting]
    """The one to blame, the one it does not go with, and any without which the two get along."""
    text: str

    def find(self, config: PPOConfig) -> Iterator[Problem]:
        """Yield the problem if all settings hold."""
        first, second = self.settings[:2]
        if all(setting.holds(config) for setting in self.settings):
            between = "" if self.text[0] in ", " else ": "
            value = show(get_path(config, second.key))
            yield problem(config, first.key, f"with {second.key}={value}{between}{self.text}", second.key)


def contradictions(subject: str, rows: Mapping[str, str]) -> None:
    """Register as errors pairs of settings of which one excludes the other.

    Args:
        subject: ``__name__`` of the module.
        rows: ``SETTING with SETTING``, or ``... if SETTING, SETTING`` where more is needed -> the rest of the message,
            which begins with both options and their values: why, and what to do. The first option is to blame.
    """
    for row, text in rows.items():
        settings = [Setting.read(setting) for setting in re.split(" with | if |, ", row)]
        VALIDATORS.append(Validator(row, subject, Contradiction(settings, text).find, "error", ()))


def problem(config: PPOConfig, key: str, text: str, *also: str) -> Problem:
    """``key=value text``, the key to blame and others it speaks of."""
    return Problem(key, f"{key}={show(get_path(config, key))} {text}", also)


def trained_roles(config: PPOConfig) -> Iterator[tuple[str, ActorConfig | CriticConfig, int]]:
    """(key, section, responses per prompt) of the roles that take gradient steps."""
    yield ACTOR, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if config.uses_critic:
        yield "critic", config.critic, config.critic.rollout_n


def scoring_roles(config: PPOConfig) -> Iterator[tuple[str, str, bool, int]]:
    """(key of the global micro-batch size, key of the token budget, by tokens?, ranks) of every kind of forward."""
    shared = config.actor_rollout_ref
    ranks = config.dp_size(shared.actor)
    yield f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_max_token_len_per_gpu", shared.actor.use_dynamic_bsz, ranks
    log_probs = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
    # old log-probs are the actor's to compute, in batches of the size that the rollout's section names
    dynamic = shared.rollout.log_prob_use_dynamic_bsz
    if not config.algorithm.rollout_correction.bypass_mode:
        yield f"{ROLLOUT}.{log_probs[0]}", f"{ROLLOUT}.{log_probs[1]}", dynamic, ranks
    if config.scores_reference:
        dynamic = shared.ref.log_prob_use_dynamic_bsz
        yield f"{REF}.{log_probs[0]}", f"{REF}.{log_probs[1]}", dynamic, config.dp_size(shared.ref)
    if config.uses_critic:
        ranks = config.dp_size(config.critic)
        for kind in ("ppo", "forward"):
            budget = f"critic.{kind}_max_token_len_per_gpu"
            yield f"critic.{kind}_micro_batch_size", budget, config.critic.use_dynamic_bsz, ranks
    if config.distillation.uses_training_engine and not config.distillation.distillation_loss.is_full:
        teacher = config.distillation.teacher
        dynamic, ranks = teacher.log_prob_use_dynamic_bsz, config.dp_size(teacher)
        yield f"{TEACHER}.{log_probs[0]}", f"{TEACHER}.{log_probs[1]}", dynamic, ranks
    if config.reward_model.uses_engine:
        ranks, dynamic = config.dp_size(config.reward_model), config.reward_model.use_dynamic_bsz
        yield f"{RM}.micro_batch_size", f"{RM}.forward_max_token_len_per_gpu", dynamic, ranks


def models(config: PPOConfig) -> dict[str, Role]:
    """Key -> section of every role that runs a model of its own."""
    shared = config.actor_rollout_ref
    sections: dict[str, Role] = {ACTOR: shared.actor}
    sections |= {REF: shared.ref} if config.uses_reference else {}
    sections |= {"critic": config.critic} if config.uses_critic else {}
    sections |= {"reward_model": config.reward_model} if config.reward_model.uses_engine else {}
    sections |= {TEACHER: config.distillation.teacher} if config.distillation.uses_training_engine else {}
    return sections


def sharded(config: PPOConfig) -> dict[str, str]:
    """Role -> its section about sharding, of the roles there are."""
    places = {}
    for key, section in models(config).items():
        fsdp = "fsdp_config" if key in (ACTOR, REF, TEACHER) else "model.fsdp_config"
        places[key] = f"{key}.{'megatron' if section.strategy == 'megatron' else fsdp}"
    return places


class EngineRole(NamedTuple):
    """A role that runs a model of its own, and the engine that runs it."""

    key: str
    section: Role
    place: str
    """Key of its section about sharding, ``sharding``: ``fsdp_config``, or ``megatron``."""
    sharding: FSDPConfig | MegatronConfig
    is_trained: bool
    engine: StrategyTraits


def engine_roles(config: PPOConfig) -> list[EngineRole]:
    """The roles there are, with what is known of their engines."""
    found, places = models(config), sharded(config)
    return [
        EngineRole(
            key,
            section,
            places[key],
            get_path(config, places[key]),
            key in (ACTOR, "critic"),
            STRATEGIES.get(section.strategy, StrategyTraits()),
        )
        for key, section in found.items()
    ]


def reward_shaping_keys(config: PPOConfig) -> list[str]:
    """Keys under ``algorithm.reward_shaping`` that change a reward."""
    shaping = config.algorithm.reward_shaping
    switches = {
        "overlong_buffer.enable": shaping.overlong_buffer.enable,
        "norm.mean": shaping.norm.mean,
        "norm.std": shaping.norm.std,
        "scale": shaping.scale != 1,
        "shift": shaping.shift,
        "clip_range": shaping.clip_range is not None,
        "clip": shaping.clip is not None,
        "whiten": shaping.whiten,
    }
    return [f"{SHAPING}.{name}" for name, is_on in switches.items() if is_on]


def unused(config: PPOConfig, keys: list[str], is_given: IsGiven, why: str) -> Iterator[Problem]:
    """One sentence about those of ``keys`` that the user set and nothing reads."""
    given = [key for key in keys if is_given(key)]
    if given:
        values = ", ".join(f"{key}={show(get_path(config, key))}" for key in given)
        yield Problem(given[0], f"{values} {'has' if len(given) == 1 else 'have'} no effect: {why}", tuple(given[1:]))


def given_below(key: str, config: PPOConfig, is_given: IsGiven) -> list[str]:
    """The options of a section that the user gave."""
    return [name for name, _ in leaves(get_path(config, key), f"{key}.") if is_given(name)]


@validator("warning")
def options_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    """Options whose own field, or section, names what they need, and which the user set without it."""
    absent = [
        *(["critic."] if not config.uses_critic else []),  # whose options have a warning of their own
        *([f"{REF}."] if not config.uses_reference else []),
        *([f"{RM}.model."] if not config.reward_model.enable else []),
        f"{ACTOR}.policy_loss.rollout_correction.",  # a copy
    ]
    keys: dict[str, list[str]] = {}
    for key, why in _unread(config, config, ""):
        if not key.startswith(tuple(absent)):
            keys.setdefault(why, []).append(key)
    for why, names in keys.items():
        yield from unused(config, names, is_given, why)


def _unread(config: PPOConfig, section: Config, prefix: str) -> Iterator[tuple[str, str]]:
    """(key, why nothing reads it) of the options in a section and below."""
    for item in dataclasses.fields(section):
        key, value = f"{prefix}{item.name}", peek(section, item.name)
        if isinstance(value, Config):
            yield from _unread(config, value, f"{key}.")
            continue
        conditions = list(item.metadata.get("read_if", ()))
        if section._read_if is not None and section._read_if.key != item.name:
            # the section's condition first: if it is not met, what its options need of each other does not matter
            conditions.insert(0, section._read_if)
        reasons = filter(None, (_reason(config, condition, prefix) for condition in conditions))
        why = item.metadata.get("never_read") or next(reasons, None)
        if why:
            yield key, why


def _reason(config: PPOConfig, condition: ReadIf, prefix: str) -> str | None:
    """The condition that is not met, with the value there is; None if it is met."""
    key = condition.key if "." in condition.key else prefix + condition.key
    value = get_path(config, key)
    if show(value) in condition.values if condition.values else value:
        return None
    return f"{key}={show(value)} {condition.remark}".rstrip()
