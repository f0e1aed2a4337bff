"""What every rule may use: the registry, the roles there are, the form of a problem."""

from collections.abc import Callable, Iterator
from typing import Any

from verl.config.base import Problem, get_path, leaves
from verl.config.build import show
from verl.config.ppo import PPOConfig

Rule = Callable[[PPOConfig], Iterator[Problem]]

RULES: list[Rule] = []

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"

RM = "reward_model"

SHAPING = "algorithm.reward_shaping"

TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")

CORRECTION = "algorithm.rollout_correction"


def rule(function: Rule) -> Rule:
    """Collect a rule."""
    RULES.append(function)
    return function


def problem(config: PPOConfig, key: str, text: str, *also: str) -> Problem:
    """``key=value text``, the key to blame and others it speaks of."""
    return Problem(key, f"{key}={show(get_path(config, key))} {text}", also)


def trained_roles(config: PPOConfig) -> Iterator[tuple[str, Any, int]]:
    """(key, section, responses per prompt) of the roles that take gradient steps."""
    yield ACTOR, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    if config.uses_critic:
        yield "critic", config.critic, config.critic.rollout_n


def scoring_roles(config: PPOConfig) -> Iterator[tuple[str, str, bool, int]]:
    """(key of the global micro-batch size, key of the token budget, cut by tokens?, ranks) of every kind of forward."""
    shared = config.actor_rollout_ref
    ranks = config.dp_size(shared.actor)
    yield f"{ACTOR}.ppo_micro_batch_size", f"{ACTOR}.ppo_max_token_len_per_gpu", shared.actor.use_dynamic_bsz, ranks
    log_probs = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
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
    if config.reward_model.enable:
        ranks, dynamic = config.dp_size(config.reward_model), config.reward_model.use_dynamic_bsz
        yield f"{RM}.micro_batch_size", f"{RM}.forward_max_token_len_per_gpu", dynamic, ranks


def models(config: PPOConfig) -> dict[str, Any]:
    """Key -> section of every role that runs a model of its own."""
    shared = config.actor_rollout_ref
    sections: dict[str, Any] = {ACTOR: shared.actor}
    sections |= {REF: shared.ref} if config.uses_reference else {}
    sections |= {"critic": config.critic} if config.uses_critic else {}
    sections |= {"reward_model": config.reward_model} if config.reward_model.enable else {}
    return sections


def sharded(config: PPOConfig) -> dict[str, str]:
    """Role -> its section about sharding, of the roles there are."""
    return {key: f"{key}.fsdp_config" if key in (ACTOR, REF) else f"{key}.model.fsdp_config" for key in models(config)}


def reward_shaping_keys(config: PPOConfig) -> list[str]:
    """Keys under ``algorithm.reward_shaping`` that change a reward."""
    shaping = config.algorithm.reward_shaping
    asked = {
        "overlong_buffer.enable": shaping.overlong_buffer.enable,
        "norm.mean": shaping.norm.mean,
        "norm.std": shaping.norm.std,
        "scale": shaping.scale != 1,
        "shift": shaping.shift,
        "clip_range": shaping.clip_range is not None,
        "clip": shaping.clip is not None,
        "whiten": shaping.whiten,
    }
    return [f"{SHAPING}.{name}" for name, is_asked in asked.items() if is_asked]


# -- What every notice may use: the registry, and the form of a setting that nothing reads ---------------------------


IsGiven = Callable[[str], bool]

Check = Callable[[PPOConfig, IsGiven], Iterator[str]]

CHECKS: list[Check] = []


def notice(function: Check) -> Check:
    """Collect a check."""
    CHECKS.append(function)
    return function


def unused(config: PPOConfig, keys: list[str], is_given: IsGiven, why: str) -> Iterator[str]:
    """One sentence about those of ``keys`` the user gave."""
    given = [f"{key}={show(get_path(config, key))}" for key in keys if is_given(key)]
    if given:
        yield f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {why}"


def given_below(key: str, config: PPOConfig, is_given: IsGiven) -> list[str]:
    """The options of a section that the user gave."""
    return [name for name, _ in leaves(get_path(config, key), f"{key}.") if is_given(name)]
