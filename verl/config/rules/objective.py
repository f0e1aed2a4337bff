"""What is optimised: estimators, losses, bounds, KL, corrections for the sampler."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, CORRECTION, REF, ROLLOUT, TOKEN_BASELINES, problem, rule

_CORRECTIONS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
"""Options that switch a part of the rollout correction on."""

_CLIPS_RATIOS = ("vanilla", "gspo", "clip_cov", "bypass_mode")
"""Losses that clip a ratio from below at 1 - clip_ratio_low. The others' lower bounds are of another kind."""


@rule
def gae_has_a_critic(config: PPOConfig) -> Iterator[Problem]:
    if config.critic.enable is False and config.algorithm.adv_estimator == "gae":
        yield problem(
            config,
            "critic.enable",
            "with algorithm.adv_estimator=gae: GAE needs values. Leave "
            "critic.enable null, or choose an estimator without critic, grpo for example.",
            "algorithm.adv_estimator",
        )


@rule
def responses_are_resampled_beside_a_critic(config: PPOConfig) -> Iterator[Problem]:
    estimator = config.algorithm.adv_estimator
    if config.algorithm.use_pf_ppo and estimator != "gae":
        yield problem(
            config,
            "algorithm.use_pf_ppo",
            f"with algorithm.adv_estimator={estimator}: policy filtration is defined for PPO with a critic. Set "
            "adv_estimator=gae, or use_pf_ppo=false; algorithm.filter_groups chooses among groups.",
            "algorithm.adv_estimator",
        )


@rule
def critic_samples_agree(config: PPOConfig) -> Iterator[Problem]:
    n = config.actor_rollout_ref.rollout.n
    if config.uses_critic and config.critic.rollout_n != n:
        yield problem(
            config,
            "critic.rollout_n",
            f"differs from {ROLLOUT}.n={n}, which it follows. Set only the latter.",
            f"{ROLLOUT}.n",
        )


@rule
def groups_can_be_chosen(config: PPOConfig) -> Iterator[Problem]:
    filtering, rollout = config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    if not filtering.enable:
        return
    key = "algorithm.filter_groups.enable"
    if rollout.n < 2:
        text = f"with {ROLLOUT}.n=1: one response cannot differ from others. Sample at least 2, or set it to false."
        yield problem(config, key, text, f"{ROLLOUT}.n")
    if rollout.async_ratio:
        yield problem(
            config,
            key,
            f"with {ROLLOUT}.async_ratio={rollout.async_ratio}: how many prompts a step draws is known at its end "
            "only, and the next one's are drawn before. Set async_ratio=0, or enable=false.",
            f"{ROLLOUT}.async_ratio",
        )
    if rollout.over_sample_rate:
        yield problem(
            config,
            key,
            f"with {ROLLOUT}.over_sample_rate={rollout.over_sample_rate}: a prompt would be put off several times in "
            f"one step, which {ROLLOUT}.max_postponements counts once. Set over_sample_rate=0, or enable=false.",
            f"{ROLLOUT}.over_sample_rate",
        )
    if filtering.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield problem(
            config,
            "algorithm.filter_groups.metric",
            "with algorithm.use_kl_in_reward=true: every response has a KL of its own, so every group would differ. "
            "Use seq_reward, or put the KL into the loss (actor.use_kl_loss).",
            "algorithm.use_kl_in_reward",
        )


@rule
def clip_range_keeps_the_ratio_positive(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    name = "clip_ratio_low" if actor.clip_ratio_low is not None else "clip_ratio"
    if actor.policy_loss.loss_mode in _CLIPS_RATIOS and actor[name] >= 1:
        yield problem(config, f"{ACTOR}.{name}", "allows ratios down to 0 or less: it must be less than 1.")


@rule
def tis_knows_what_the_sampler_thought(config: PPOConfig) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    if shared.actor.policy_loss.loss_mode == "tis" and not shared.rollout.calculate_log_probs:
        yield problem(
            config,
            f"{ACTOR}.policy_loss.loss_mode",
            f"weighs by the probabilities the sampler used, and {ROLLOUT}.calculate_log_probs=false does not keep "
            f"them. Set it to true.",
            f"{ROLLOUT}.calculate_log_probs",
        )


@rule
def correction_knows_what_the_sampler_thought(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    for name in _CORRECTIONS:
        if config.algorithm.rollout_correction[name]:
            yield problem(
                config,
                f"{CORRECTION}.{name}",
                f"with {ROLLOUT}.calculate_log_probs=false: it compares with the probabilities the sampler used, "
                f"which are not kept. Set calculate_log_probs=true.",
                f"{ROLLOUT}.calculate_log_probs",
            )


@rule
def correction_has_old_log_probs_to_compare(config: PPOConfig) -> Iterator[Problem]:
    options, actor = config.algorithm.rollout_correction, config.actor_rollout_ref.actor
    for name in _CORRECTIONS:
        if options[name] and actor.skip_old_log_probs:
            why = "every ratio is then 1, not that to the sampler"
            if name != "bypass_mode":
                why = "the weights are needed before the update, which is what finds the old log-probs"
            yield problem(
                config,
                f"{CORRECTION}.{name}",
                f"with {ACTOR}.skip_old_log_probs=true: {why}. Set skip_old_log_probs=false.",
                f"{ACTOR}.skip_old_log_probs",
            )
        elif options[name] and options.bypass_mode and name != "bypass_mode":
            if actor.policy_loss.loss_mode == "bypass_mode":  # which makes r of the policy being trained
                continue
            yield problem(
                config,
                f"{CORRECTION}.{name}",
                f"with {CORRECTION}.bypass_mode=true: the old log-probs are then the sampler's own, and every r would "
                f"be 1. Set bypass_mode=false, or {ACTOR}.policy_loss.loss_mode=bypass_mode, whose r is that of the "
                "policy being trained.",
                f"{CORRECTION}.bypass_mode",
                f"{ACTOR}.policy_loss.loss_mode",
            )
    if options.bypass_mode and actor.calculate_sum_pi_squared:
        yield problem(
            config,
            f"{CORRECTION}.bypass_mode",
            f"with {ACTOR}.calculate_sum_pi_squared=true: the sums come from the pass that is left out. Set one of "
            "them to false.",
            f"{ACTOR}.calculate_sum_pi_squared",
        )


@rule
def bypassing_loss_has_the_samplers_log_probs(config: PPOConfig) -> Iterator[Problem]:
    options, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    mode, bypasses = f"{ACTOR}.policy_loss.loss_mode", loss.loss_mode == "bypass_mode"
    if bypasses and not options.bypass_mode:
        yield problem(
            config,
            mode,
            f"with {CORRECTION}.bypass_mode=false: the loss takes old log-probs for the sampler's, and they would be "
            "the trainer's. Set bypass_mode=true, or loss_mode=vanilla.",
            f"{CORRECTION}.bypass_mode",
        )
    if options.loss_type != "ppo_clip" and not bypasses:
        yield problem(
            config,
            f"{CORRECTION}.loss_type",
            f"with {mode}={loss.loss_mode}: only bypass_mode reads it. Set {mode}=bypass_mode and "
            f"{CORRECTION}.bypass_mode=true, or {mode}=reinforce for a policy gradient from old log-probs.",
            mode,
        )
    if bypasses and options.rollout_is_batch_normalize:
        yield problem(
            config,
            f"{CORRECTION}.rollout_is_batch_normalize",
            f"with {mode}=bypass_mode: weights are made in the loss, a micro-batch at a time, and their mean would "
            "depend on how batches are cut. Set it to false.",
            mode,
        )
    copy = loss.rollout_correction
    for name in options if bypasses else ():
        if copy[name] != options[name]:
            yield problem(
                config,
                f"{ACTOR}.policy_loss.rollout_correction.{name}",
                f"is not {CORRECTION}.{name}={show(options[name])}, which it follows. Set the latter only.",
                f"{CORRECTION}.{name}",
            )


@rule
def correction_leaves_room_between_its_bounds(config: PPOConfig) -> Iterator[Problem]:
    options, bounds = config.algorithm.rollout_correction, []
    try:
        upper, lower, mode = options.weighting
    except ValueError as error:
        yield problem(config, f"{CORRECTION}.rollout_is_threshold", f"is no threshold: {error}.")
        return
    if options.rollout_is is not None:
        bounds.append(("is", upper, (1 / upper if mode == "mask" else 0) if lower is None else lower))
    try:
        bounds += [("rs", upper, lower) for _, upper, lower in options.rejections if lower is not None]
    except ValueError as error:
        names = [f"{CORRECTION}.{name}" for name in ("rollout_rs", "rollout_rs_threshold")]
        text = " with ".join(f"{key}={show(get_path(config, key))}" for key in names)
        yield Problem(names[0], f"{text}: {error}.", (names[1],))
    for kind, upper, lower in bounds:
        if lower >= upper:
            name = f"{CORRECTION}.rollout_{kind}_threshold"
            text = (
                f"{name}={upper:g} is not above the lower bound {lower:g} ({name}_lower; if null, 1 / upper): nothing "
                "lies between them. Raise the first or lower the second."
            )
            yield Problem(name, text, (f"{name}_lower", f"{CORRECTION}.rollout_{kind}"))


@rule
def no_loss_is_corrected_twice(config: PPOConfig) -> Iterator[Problem]:
    options, mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if options.rollout_is and mode == "tis":
        yield problem(
            config,
            f"{CORRECTION}.rollout_is",
            f"with {ACTOR}.policy_loss.loss_mode=tis: that loss weighs by the ratio to the sampler itself, and tokens "
            "would be weighed twice. Set rollout_is=null, or take another loss, reinforce for example.",
            f"{ACTOR}.policy_loss.loss_mode",
        )
    if mode == "topr" and any(kind.strip().startswith("token") for kind in (options.rollout_rs or "").split(",")):
        yield problem(
            config,
            f"{CORRECTION}.rollout_rs",
            f"with {ACTOR}.policy_loss.loss_mode=topr: a response whose last token is rejected would lose the score "
            "by which that loss tells success from failure. Use sequence or geometric.",
            f"{ACTOR}.policy_loss.loss_mode",
        )


@rule
def bounds_of_a_policy_loss_leave_room(config: PPOConfig) -> Iterator[Problem]:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{ACTOR}.policy_loss"
    for mode, low, high in (
        ("tis", "tis_lower_bound", "tis_upper_bound"),
        ("clip_cov", "clip_cov_lb", "clip_cov_ub"),
    ):
        if loss.loss_mode == mode and loss[low] >= loss[high]:
            yield problem(
                config,
                f"{key}.{low}",
                f"is not below {key}.{high}={loss[high]}: nothing lies between them. Lower the first or raise the "
                f"second.",
                f"{key}.{high}",
            )


@rule
def optimal_token_baseline_has_its_column(config: PPOConfig) -> Iterator[Problem]:
    key = f"{ACTOR}.calculate_sum_pi_squared"
    estimator = config.algorithm.adv_estimator
    if estimator in TOKEN_BASELINES and not get_path(config, key):
        yield problem(
            config,
            key,
            f"with algorithm.adv_estimator={estimator}: the estimator weighs tokens by the sum of squared "
            "probabilities. Set it to true.",
            "algorithm.adv_estimator",
        )


@rule
def reward_charges_sampled_tokens_only(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full":
        yield problem(
            config,
            "algorithm.kl_penalty",
            "with algorithm.use_kl_in_reward=true: rewards are made from the log-probs of sampled tokens, and the full "
            f"KL needs both distributions. Use kl, or put it into the loss: {ACTOR}.use_kl_loss=true "
            f"{ACTOR}.kl_loss_type=full.",
        )


@rule
def distributions_are_compared_where_they_are_made(config: PPOConfig) -> Iterator[Problem]:
    shared, key = config.actor_rollout_ref, "ulysses_sequence_parallel_size"
    borrows = shared.model.lora_rank and not (shared.ref.model or {}).get("path")
    size = shared.actor.ulysses_sequence_parallel_size
    if config.compares_distributions and not borrows and shared.ref.ulysses_sequence_parallel_size != size:
        yield problem(
            config,
            f"{REF}.{key}",
            f"differs from {ACTOR}.{key}={size} with {ACTOR}.kl_loss_type=full: actor and reference go through each "
            "micro-batch together. Set them equal, or use low_var_kl.",
            f"{ACTOR}.{key}",
        )
