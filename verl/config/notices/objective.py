"""Settings of estimators, losses, KL, correction and schedules that nothing reads."""

from collections.abc import Iterator

from verl.config.base import get_path
from verl.config.notices.base import IsGiven, given_below, notice, unread
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, CORRECTION, REF, ROLLOUT
from verl.config.support import built_names

_CLIPPING = ("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl", "bypass_mode")

_READ_BY_LOSS: dict[str, tuple[str, ...]] = {
    "clip_ratio": _CLIPPING,
    "clip_ratio_low": _CLIPPING,
    "clip_ratio_high": _CLIPPING,
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl", "bypass_mode"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    **{f"policy_loss.{name}": ("clip_cov",) for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
    **{f"policy_loss.{name}": ("kl_cov",) for name in ("kl_cov_ratio", "ppo_kl_coef")},
    **{f"policy_loss.{name}": ("tis",) for name in ("tis_lower_bound", "tis_upper_bound")},
    **{f"policy_loss.{name}": ("topr",) for name in ("topr_pos_weight", "topr_neg_weight", "topr_ratio")},
    "policy_loss.kimi15_tau": ("kimi15",),
    "policy_loss.dro_beta": ("dro",),
}
"""Options of the actor -> the built-in losses that read them."""

_READ_BY_ESTIMATOR: dict[str, tuple[str, ...]] = {
    "algorithm.lam": ("gae",),
    "algorithm.gamma": ("gae", "reinforce_plus_plus", "reinforce", "step_reinforce", "agentic_reinforce"),
    "algorithm.step_gamma": ("step_reinforce", "gigpo"),
    **{f"algorithm.gigpo.{name}": ("gigpo",) for name in ("episode_weight", "step_weight", "mode")},
    "algorithm.norm_adv_by_std_in_grpo": ("grpo", "grpo_passk"),
    "algorithm.gdpo_reward_keys": ("gdpo",),
    "algorithm.gdpo_reward_weights": ("gdpo",),
    f"{ACTOR}.calculate_sum_pi_squared": ("optimal_token_baseline", "tir_optimal_token_baseline"),
}
"""Options -> the built-in estimators that read them."""

_WHITENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo")
"""Built-in estimators that whiten advantages unless told otherwise."""

_PUBLISHED_WITH = {
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "kimi15": "seq-mean-token-sum",
}
"""loss_mode -> the loss_agg_mode of its paper, where that matters."""


@notice
def nothing_is_compared(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        why = f"{ROLLOUT}.calculate_log_probs=false keeps no probabilities to compare"
        yield from unread(config, [f"{ROLLOUT}.mismatch_threshold"], is_given, why)
    elif config.algorithm.rollout_correction.bypass_mode:
        why = f"{CORRECTION}.bypass_mode=true computes no probabilities to compare with"
        yield from unread(config, [f"{ROLLOUT}.mismatch_threshold"], is_given, why)


@notice
def nothing_is_corrected(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    options = config.algorithm.rollout_correction
    of_weights = ["rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_batch_normalize"]
    if options.rollout_rs is None or options.rollout_rs_threshold is not None:
        of_weights.append("rollout_is_threshold")
    options_of = {"rollout_is": of_weights, "rollout_rs": ["rollout_rs_threshold", "rollout_rs_threshold_lower"]}
    for switch, names in options_of.items():
        if options[switch] is None:
            why = f"{CORRECTION}.{switch}=null"
            yield from unread(config, [f"{CORRECTION}.{name}" for name in names], is_given, why)


@notice
def the_losss_copy_of_the_correction_is_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    mode, place = config.actor_rollout_ref.actor.policy_loss.loss_mode, f"{ACTOR}.policy_loss.rollout_correction"
    if mode != "bypass_mode":
        keys = given_below(place, config, is_given)
        yield from unread(config, keys, is_given, f"{ACTOR}.policy_loss.loss_mode={mode} reads {CORRECTION}")


@notice
def kl_in_reward_is_the_samplers(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.rollout_correction.bypass_mode and config.algorithm.use_kl_in_reward:
        yield (
            f"{CORRECTION}.bypass_mode=true with algorithm.use_kl_in_reward=true: the reward is charged for the "
            "sampler's distance from the reference, rounding of its kernels included; false measures the policy's"
        )


@notice
def critic_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.uses_critic:
        read = ["critic.enable"]
        if config.reward_model.enable:  # follows these
            read += ["critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu"]
            read += ["critic.ppo_max_token_len_per_gpu"]
        keys = [key for key in given_below("critic", config, is_given) if key not in read]
        keys += ["trainer.critic_warmup"] if config.trainer.critic_warmup else []
        why = f"there is no critic with algorithm.adv_estimator={config.algorithm.adv_estimator}"
        yield from unread(config, [*keys, "trainer.max_critic_ckpt_to_keep"], is_given, why)


@notice
def reference_is_not_there(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.uses_reference:
        yield from unread(
            config,
            given_below(REF, config, is_given),
            is_given,
            "there is no reference policy without actor.use_kl_loss or algorithm.use_kl_in_reward",
        )


@notice
def reference_is_not_scored(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.uses_reference and not config.scores_reference:
        keys = [key for key in given_below(REF, config, is_given) if key.startswith(f"{REF}.log_prob_")]
        why = f"with {ACTOR}.kl_loss_type=full the reference runs in the micro-batches of the actor's update"
        yield from unread(config, keys, is_given, why)


@notice
def kl_in_reward_is_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    control = [f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")]
    if not config.algorithm.use_kl_in_reward:
        yield from unread(config, ["algorithm.kl_penalty", *control], is_given, "algorithm.use_kl_in_reward=false")
    elif config.algorithm.kl_ctrl.type == "fixed":
        yield from unread(config, control[2:], is_given, "algorithm.kl_ctrl.type=fixed")


@notice
def kl_loss_is_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.actor.use_kl_loss:
        keys = [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
        yield from unread(config, keys, is_given, f"{ACTOR}.use_kl_loss=false")


@notice
def kl_counts_twice(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        yield f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss are both on: the KL penalty counts twice"


@notice
def schedule_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key in (f"{ACTOR}.optim", *(["critic.optim"] if config.uses_critic else [])):
        optim = get_path(config, key)
        readers = {
            "min_lr_ratio": ("cosine", "linear", "wsd"),
            "num_cycles": ("cosine",),
            "lr_wsd_decay_steps": ("wsd",),
            "lr_wsd_decay_style": ("wsd",),
        }
        others = [f"{key}.{name}" for name, styles in readers.items() if optim.warmup_style not in styles]
        yield from unread(config, others, is_given, f"{key}.warmup_style={optim.warmup_style}")
        if optim.lr_warmup_steps is not None and optim.lr_warmup_steps >= 0:
            yield from unread(
                config,
                [f"{key}.lr_warmup_steps_ratio"],
                is_given,
                f"{key}.lr_warmup_steps={optim.lr_warmup_steps} decides",
            )


@notice
def estimator_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    estimator = config.algorithm.adv_estimator
    if estimator in built_names("algorithm.adv_estimator"):
        keys = [key for key, readers in _READ_BY_ESTIMATOR.items() if estimator not in readers]
        yield from unread(config, keys, is_given, f"algorithm.adv_estimator={estimator} does not read it")


@notice
def loss_does_not_read_it(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if mode in built_names(f"{ACTOR}.policy_loss.loss_mode"):
        keys = [f"{ACTOR}.{name}" for name, readers in _READ_BY_LOSS.items() if mode not in readers]
        yield from unread(config, keys, is_given, f"{ACTOR}.policy_loss.loss_mode={mode} does not read it")


@notice
def one_step_never_meets_a_bound(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.prompts_per_update:
        return
    if config.algorithm.rollout_correction.bypass_mode:  # then the ratio is that to the sampler
        return
    names = ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
    names += [f"policy_loss.{name}" for name in ("ppo_kl_coef", "kimi15_tau", "dro_beta")]
    keys = [f"{ACTOR}.{name}" for name in names if actor.policy_loss.loss_mode in _READ_BY_LOSS[name]]
    why = "with one optimizer step per batch the policy is still the one that sampled, and its ratio is 1"
    yield from unread(config, keys, is_given, why)


@notice
def loss_was_published_with_another_mean(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    mode = _PUBLISHED_WITH.get(actor.policy_loss.loss_mode, actor.loss_agg_mode)
    if actor.loss_agg_mode != mode:
        yield (
            f"{ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode} was published with "
            f"{ACTOR}.loss_agg_mode={mode}, and runs with {actor.loss_agg_mode}"
        )


@notice
def divisor_is_not_used(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if mode != "seq-mean-token-sum-norm":
        yield from unread(config, [f"{ACTOR}.loss_scale_factor"], is_given, f"{ACTOR}.loss_agg_mode={mode}")


@notice
def advantages_are_whitened_or_not_by_themselves(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    estimator, whiten = config.algorithm.adv_estimator, config.algorithm.advantage.whiten
    if estimator in built_names("algorithm.adv_estimator") and whiten is (estimator in _WHITENS):
        habit = "does so" if whiten else "does not"
        yield from unread(config, ["algorithm.advantage.whiten"], is_given, f"{estimator} {habit} by itself")


@notice
def a_reward_has_no_gradient(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    kind = config.algorithm.kl_penalty
    if config.algorithm.use_kl_in_reward and kind.endswith("+"):
        yield f"algorithm.kl_penalty={kind} is {kind[:-1]}: the + changes a gradient, and a reward has none"


@notice
def no_response_is_resampled(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    key, algorithm = "algorithm.pf_ppo", config.algorithm
    if not algorithm.use_pf_ppo:
        keys = [f"{key}.reweight_method", f"{key}.weight_pow"]
        yield from unread(config, keys, is_given, "algorithm.use_pf_ppo=false takes every response once")
    elif algorithm.pf_ppo.reweight_method != "pow":
        why = f"{key}.reweight_method={algorithm.pf_ppo.reweight_method} does not read it"
        yield from unread(config, [f"{key}.weight_pow"], is_given, why)


@notice
def gigpo_has_nothing_to_tell_apart(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    gigpo = config.algorithm.gigpo
    if config.algorithm.adv_estimator != "gigpo":
        return
    if config.actor_rollout_ref.rollout.mode == "sync":
        yield (
            f"algorithm.adv_estimator=gigpo with {ROLLOUT}.mode=sync: every response is one turn, so that its "
            "advantages are those of grpo times algorithm.gigpo.episode_weight + step_weight"
        )
    if not gigpo.episode_weight + gigpo.step_weight:
        yield "algorithm.gigpo.episode_weight=0 and step_weight=0 make every advantage 0: nothing is learned"


@notice
def no_turn_comes_after_the_first(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    read = {
        "step_reinforce": "algorithm.step_gamma",
        "gigpo": "algorithm.step_gamma",
        "agentic_reinforce": "algorithm.gamma",
    }
    key = read.get(config.algorithm.adv_estimator)
    if key and config.actor_rollout_ref.rollout.mode == "sync":
        why = f"with {ROLLOUT}.mode=sync every response is one turn, after which no other comes"
        yield from unread(config, [key], is_given, why)


@notice
def one_step_never_moves_a_value(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    critic = config.critic
    if config.uses_critic and critic.ppo_epochs == 1 and critic.ppo_mini_batch_size >= config.prompts_per_update:
        why = "with one optimizer step per batch the values are still those the advantages were made with"
        keys = ["critic.cliprange_value"] if critic.cliprange_value is not None else []
        yield from unread(config, keys, is_given, why)


@notice
def correction_bounds_itself(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    if correction.rollout_is and "_" in str(correction.rollout_is_threshold):
        keys = [f"{CORRECTION}.rollout_is_threshold_lower", f"{CORRECTION}.rollout_is_mode"]
        why = f"{CORRECTION}.rollout_is_threshold={correction.rollout_is_threshold} has both bounds, as IcePop wants"
        yield from unread(config, keys, is_given, why)
    if correction.rollout_rs and all(kind.endswith(("k2", "k3")) for kind in correction.rollout_rs.split(",")):
        keys = [f"{CORRECTION}.rollout_rs_threshold_lower"]
        why = f"{CORRECTION}.rollout_rs={correction.rollout_rs} has no lower bound"
        yield from unread(config, keys, is_given, why)


@notice
def bypassing_loss_decides_what_is_bounded(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    correction = config.algorithm.rollout_correction
    if config.actor_rollout_ref.actor.policy_loss.loss_mode != "bypass_mode":
        return
    if correction.loss_type == "ppo_clip":
        keys = [f"{CORRECTION}.rollout_is"] if correction.rollout_is else []
        why = f"with {CORRECTION}.loss_type=ppo_clip the clipped ratio is already that to the sampler"
        yield from unread(config, keys, is_given, why)
    else:
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
        why = f"{CORRECTION}.loss_type=reinforce does not clip"
        yield from unread(config, [f"{ACTOR}.{name}" for name in names], is_given, why)
