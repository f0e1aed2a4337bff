"""Settings of rewards and their shaping without effect."""

from collections.abc import Iterator

from verl.config.base import get_path
from verl.config.notices.base import IsGiven, given_below, notice, unread
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, RM, SHAPING, shapes_scores
from verl.config.support import built_names

_CENTRES_GROUPS = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Built-in estimators that see only how a score differs from those of its siblings."""


@notice
def reward_model_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.reward_model.enable:
        return
    of_functions = (
        "enable",
        "reward_manager",
        "reward_kwargs",
        "by_source",
        "sandbox",
        "self_test",
        "on_error",
        "max_errors",
        "launch_reward_fn_async",
        "sandbox_fusion",
        "judge",
    )
    keys = [key for key in given_below(RM, config, is_given) if key.split(".")[1] not in of_functions]
    yield from unread(config, keys, is_given, "there is no reward model with reward_model.enable=false")


@notice
def sandbox_is_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rm = config.reward_model
    if not rm.sandbox.enable:
        keys = [key for key in given_below(f"{RM}.sandbox", config, is_given) if not key.endswith(".enable")]
        yield from unread(config, keys, is_given, f"{RM}.sandbox.enable=false calls the function in the driver")
    elif rm.reward_manager in built_names(f"{RM}.reward_manager"):
        is_batch = rm.reward_manager == "batch"
        name, other = ("timeout_s", "batch_timeout_s") if is_batch else ("batch_timeout_s", "timeout_s")
        why = f"with {RM}.reward_manager={rm.reward_manager} {RM}.sandbox.{other} is the limit of a call"
        yield from unread(config, [f"{RM}.sandbox.{name}"], is_given, why)


@notice
def built_in_scorers_are_not_asked(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    places, path = (f"{RM}.sandbox_fusion", f"{RM}.judge"), config.custom_reward_function.path
    given = [key for place in places for key in given_below(place, config, is_given)]
    if path is not None and not config.reward_model.get("by_source", None):
        why = f"custom_reward_function.path={path} scores in place of the built-in scorers"
        yield from unread(config, given, is_given, why)
    elif config.reward_model.judge.url is None:
        of_judge = [key for key in given if key.startswith(places[1])]
        yield from unread(config, of_judge, is_given, f"there is no judge without {RM}.judge.url")
    if config.reward_model.sandbox_fusion.url is None:
        key = f"{RM}.sandbox_fusion.max_concurrent"
        yield from unread(config, [key], is_given, f"programs run on this machine without {places[0]}.url")


@notice
def reward_model_reads_ids_or_texts(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.reward_model.enable:
        return
    yield from unread(config, [f"{RM}.model.use_fused_kernels"], is_given, "a score needs no logits over tokens")
    if not config.reward_model.model.input_tokenizer:
        why = f"{RM}.model.input_tokenizer=null passes token ids on whole"
        yield from unread(config, [f"{RM}.max_length"], is_given, why)


@notice
def function_does_not_score_training(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rm = config.reward_model
    if not rm.enable or rm.reward_manager not in built_names(f"{RM}.reward_manager"):
        return
    if config.custom_reward_function.path is not None:
        yield (
            f"custom_reward_function.path={config.custom_reward_function.path} scores validation only, rows whose "
            f"reward_model.style is not model: with {RM}.enable=true the built-in manager {rm.reward_manager} gives "
            f"out the reward model's scores in training. Register a manager of your own to combine both"
        )
    scorers = [f"{RM}.{name}" for name in ("by_source", "judge.url", "sandbox_fusion.url")]
    given = [key for key in scorers if get_path(config, key)]
    if given:
        yield (
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} asked in validation only, of rows whose "
            f"reward_model.style is not model: with {RM}.enable=true the reward model scores the training"
        )
    if (rm.reward_kwargs.get("overlong_buffer_cfg") or {}).get("enable"):
        yield (
            f"{RM}.reward_kwargs.overlong_buffer_cfg has no effect in training: with {RM}.enable=true the built-in "
            f"manager {rm.reward_manager} gives out the reward model's scores as they are. {SHAPING}.overlong_buffer "
            "charges those"
        )
    yield from unread(config, [f"{RM}.self_test"], is_given, "the reward model scores, and no function is tried")
    why = f"the built-in manager {rm.reward_manager} gives out the reward model's scores, which are there by then"
    yield from unread(config, [f"{RM}.launch_reward_fn_async"] * rm.launch_reward_fn_async, is_given, why)


@notice
def reward_function_is_built_in(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.custom_reward_function.path is None:
        keys = ["custom_reward_function.name", "custom_reward_function.reward_kwargs"]
        yield from unread(config, keys, is_given, "custom_reward_function.path=null")


@notice
def reward_of_gdpo_has_no_kl(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo" and algorithm.use_kl_in_reward:
        why = f"gdpo reads algorithm.gdpo_reward_keys, not the reward with the KL in it; {ACTOR}.use_kl_loss works"
        yield from unread(config, ["algorithm.use_kl_in_reward"], is_given, why)


@notice
def reward_of_gdpo_is_not_shaped(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.adv_estimator == "gdpo":
        why = "gdpo reads algorithm.gdpo_reward_keys, and normalises each"
        yield from unread(config, shapes_scores(config), is_given, why)


@notice
def overlong_responses_cost_nothing(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.algorithm.reward_shaping.overlong_buffer.enable:
        keys = [f"{SHAPING}.overlong_buffer.{name}" for name in ("len", "penalty_factor")]
        yield from unread(config, keys, is_given, f"{SHAPING}.overlong_buffer.enable=false")


@notice
def estimator_centres_scores_again(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """A shift or factor common to a group, which the estimator takes out; a bound or a KL between them would show."""
    algorithm, shaping = config.algorithm, config.algorithm.reward_shaping
    compares = algorithm.adv_estimator in _CENTRES_GROUPS and config.actor_rollout_ref.rollout.n > 1
    if not compares or shaping.clip is not None or shaping.clip_range is not None or shaping.whiten:
        return
    keys = [key for key in shapes_scores(config) if key in (f"{SHAPING}.norm.mean", f"{SHAPING}.shift")]
    yield from unread(config, keys, is_given, f"{algorithm.adv_estimator} compares with siblings, shifted like it")
    divides = algorithm.adv_estimator in ("grpo", "grpo_passk") and algorithm.norm_adv_by_std_in_grpo
    if divides and not algorithm.use_kl_in_reward:
        keys = [key for key in shapes_scores(config) if key in (f"{SHAPING}.norm.std", f"{SHAPING}.scale")]
        why = f"{algorithm.adv_estimator} divides by the std of the group (algorithm.norm_adv_by_std_in_grpo)"
        yield from unread(config, keys, is_given, why)


@notice
def long_responses_are_charged_twice(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    buffer = config.reward_model.reward_kwargs.get("overlong_buffer_cfg") or {}
    if buffer.get("enable") and config.algorithm.reward_shaping.overlong_buffer.enable:
        yield (
            f"{RM}.reward_kwargs.overlong_buffer_cfg and {SHAPING}.overlong_buffer are both on: a long response is "
            "charged twice"
        )
