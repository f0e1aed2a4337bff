"""Validators of the objective: estimators, losses, bounds, KL, corrections for the sampler."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import (
    TOKEN_BASELINES,
    IsGiven,
    contradictions,
    given_below,
    problem,
    trained_roles,
    unused,
    validator,
)
from verl.config.checks.support import all_options, options_read
from verl.config.ppo import ACTOR, CORRECTION, REF, ROLLOUT, PPOConfig
from verl.config.tree import show

_CORRECTIONS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
"""Options that switch a part of the rollout correction on."""

_LOSSES_WITH_CLIP_RATIO_LOW = ("vanilla", "gspo", "clip_cov", "bypass_mode")
"""Losses that clip a ratio from below at 1 - clip_ratio_low. The others' lower bounds are of another kind."""
_MODE, _ESTIMATOR = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator"
_FILTER, _SKIP = "algorithm.filter_groups", f"{ACTOR}.skip_old_log_probs"

_CONTRADICTIONS = {
    f"critic.enable=false with {_ESTIMATOR}=gae": (
        "GAE needs values. Leave critic.enable null, or choose an estimator without critic, grpo for example."
    ),
    f"algorithm.use_pf_ppo with {_ESTIMATOR}!=gae": (
        "policy filtration is defined for PPO with a critic. Set adv_estimator=gae, or use_pf_ppo=false; "
        "algorithm.filter_groups chooses among groups."
    ),
    f"{_FILTER}.enable with {ROLLOUT}.n=1": (
        "one response cannot differ from others. Sample at least 2, or set it to false."
    ),
    f"{_FILTER}.enable with {ROLLOUT}.max_staleness if actor_rollout_ref.hybrid_engine=false": (
        "how many prompts a step uses is known at its end only, and the next one's are generated before. Set "
        "max_staleness=0, or enable=false."
    ),
    f"{_FILTER}.enable with {ROLLOUT}.over_sample_rate": (
        f"a prompt would be deferred several times in one step, which {ROLLOUT}.max_postponements counts once. Set "
        "over_sample_rate=0, or enable=false."
    ),
    f"{_FILTER}.metric=seq_final_reward with algorithm.use_kl_in_reward if {_FILTER}.enable": (
        "every response has a KL of its own, so every group would differ. Use seq_reward, or put the KL into the loss "
        "(actor.use_kl_loss)."
    ),
    **{
        f"{CORRECTION}.{name} with {ROLLOUT}.calculate_log_probs=false": (
            "it compares with the probabilities the sampler used, which are not kept. Set calculate_log_probs=true."
        )
        for name in _CORRECTIONS
    },
    **{
        f"{CORRECTION}.{name} with {_SKIP}": (
            "the weights are needed before the update, which is what finds the old log-probs. Set "
            "skip_old_log_probs=false."
        )
        for name in _CORRECTIONS[:-1]
    },
    f"{CORRECTION}.bypass_mode with {_SKIP}": (
        "every ratio is then 1, not that to the sampler. Set skip_old_log_probs=false."
    ),
    **{
        f"{CORRECTION}.{name} with {CORRECTION}.bypass_mode if {_MODE}!=bypass_mode, {_SKIP}!=true": (
            f"the old log-probs are then the sampler's own, and every r would be 1. Set bypass_mode=false, or "
            f"{_MODE}=bypass_mode, whose r is that of the policy being trained."
        )
        for name in _CORRECTIONS[:-1]
    },
    f"{CORRECTION}.bypass_mode with {ACTOR}.calculate_sum_pi_squared": (
        "the sums come from the pass that is left out. Set one of them to false."
    ),
    f"{_MODE}=bypass_mode with {CORRECTION}.bypass_mode=false": (
        "the loss takes old log-probs for the sampler's, and they would be the trainer's. Set bypass_mode=true, or "
        "loss_mode=vanilla."
    ),
    f"{CORRECTION}.loss_type!=ppo_clip with {_MODE}!=bypass_mode": (
        f"only bypass_mode reads it. Set {_MODE}=bypass_mode and {CORRECTION}.bypass_mode=true, or {_MODE}=reinforce "
        "for a policy gradient from old log-probs."
    ),
    f"{CORRECTION}.rollout_is_batch_normalize with {_MODE}=bypass_mode": (
        "weights are made in the loss, a micro-batch at a time, and their mean would depend on how batches are cut. "
        "Set it to false."
    ),
    f"{CORRECTION}.rollout_is with {_MODE}=tis": (
        "that loss weighs by the ratio to the sampler itself, and tokens would be weighed twice. Set rollout_is=null, "
        "or take another loss, reinforce for example."
    ),
    f"{ACTOR}.calculate_sum_pi_squared=false with {_ESTIMATOR}={'|'.join(TOKEN_BASELINES)}": (
        "the estimator weighs tokens by the sum of squared probabilities. Set it to true."
    ),
    "algorithm.kl_penalty=full with algorithm.use_kl_in_reward": (
        "rewards are made from the log-probs of sampled tokens, and the full KL needs both distributions. Use kl, or "
        f"put it into the loss: {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full."
    ),
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def critic_rollout_n_equals_rollout_n(config: PPOConfig) -> Iterator[Problem]:
    n = config.actor_rollout_ref.rollout.n
    if config.uses_critic and config.critic.rollout_n != n:
        text = f"differs from {ROLLOUT}.n={n}, which it follows. Set only the latter."
        yield problem(config, "critic.rollout_n", text, f"{ROLLOUT}.n")


@validator("error")
def clip_ratio_low_below_one(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    name = "clip_ratio_low" if actor.clip_ratio_low is not None else "clip_ratio"
    if actor.policy_loss.loss_mode in _LOSSES_WITH_CLIP_RATIO_LOW and actor[name] >= 1:
        yield problem(config, f"{ACTOR}.{name}", "allows ratios down to 0 or less: it must be less than 1.")


@validator("error")
def tis_requires_rollout_log_probs(config: PPOConfig) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    if shared.actor.policy_loss.loss_mode == "tis" and not shared.rollout.calculate_log_probs:
        text = (
            f"weighs by the probabilities the sampler used, and {ROLLOUT}.calculate_log_probs=false does not keep "
            "them. Set it to true."
        )
        yield problem(config, f"{ACTOR}.policy_loss.loss_mode", text, f"{ROLLOUT}.calculate_log_probs")


@validator("error")
def bypass_mode_loss_follows_rollout_correction(config: PPOConfig) -> Iterator[Problem]:
    options, loss = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss
    copy = loss.rollout_correction
    # the loss reads the copy, which follows the other section unless somebody set it
    for name in options if loss.loss_mode == "bypass_mode" else ():
        if copy[name] != options[name]:
            text = f"is not {CORRECTION}.{name}={show(options[name])}, which it follows. Set the latter only."
            yield problem(config, f"{ACTOR}.policy_loss.rollout_correction.{name}", text, f"{CORRECTION}.{name}")


@validator("error")
def rollout_correction_thresholds_ordered(config: PPOConfig) -> Iterator[Problem]:
    options, bounds = config.algorithm.rollout_correction, []
    try:
        # thresholds may be text with both bounds, which only their property can read
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
        # equal bounds leave nothing between them either
        if lower >= upper:
            name = f"{CORRECTION}.rollout_{kind}_threshold"
            text = (
                f"{name}={upper:g} is not above the lower bound {lower:g} ({name}_lower; if null, 1 / upper): nothing "
                "lies between them. Raise the first or lower the second."
            )
            yield Problem(name, text, (f"{name}_lower", f"{CORRECTION}.rollout_{kind}"))


@validator("error")
def topr_excludes_token_rejection(config: PPOConfig) -> Iterator[Problem]:
    options, mode = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    # the score of a response lies on its last token, which token-wise rejection may take away
    if mode == "topr" and any(kind.strip().startswith("token") for kind in (options.rollout_rs or "").split(",")):
        text = (
            f"with {ACTOR}.policy_loss.loss_mode=topr: a response whose last token is rejected would lose the score by "
            "which that loss tells success from failure. Use sequence or geometric."
        )
        yield problem(config, f"{CORRECTION}.rollout_rs", text, f"{ACTOR}.policy_loss.loss_mode")


@validator("error")
def policy_loss_bounds_ordered(config: PPOConfig) -> Iterator[Problem]:
    loss, key = config.actor_rollout_ref.actor.policy_loss, f"{ACTOR}.policy_loss"
    for mode, low, high in (
        ("tis", "tis_lower_bound", "tis_upper_bound"),
        ("clip_cov", "clip_cov_lb", "clip_cov_ub"),
    ):
        if loss.loss_mode == mode and loss[low] >= loss[high]:
            text = (
                f"is not below {key}.{high}={loss[high]}: nothing lies between them. Lower the first or raise the "
                "second."
            )
            yield problem(config, f"{key}.{low}", text, f"{key}.{high}")


@validator("error")
def full_kl_loss_requires_equal_sequence_parallel_size(config: PPOConfig) -> Iterator[Problem]:
    shared, key = config.actor_rollout_ref, "ulysses_sequence_parallel_size"
    borrows = shared.model.lora_rank and not shared.ref.own_path
    size = shared.actor.ulysses_sequence_parallel_size
    if config.compares_distributions and not borrows and shared.ref.ulysses_sequence_parallel_size != size:
        text = (
            f"differs from {ACTOR}.{key}={size} with {ACTOR}.kl_loss_type=full: actor and reference go through each "
            "micro-batch together. Set them equal, or use low_var_kl."
        )
        yield problem(config, f"{REF}.{key}", text, f"{ACTOR}.{key}")


# -- Settings of estimators, losses, KL, correction and schedules that nothing reads ---------------------------------


_WHITEN = "algorithm.advantage.whiten"

_PUBLISHED_WITH = {
    "gspo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "kimi15": "seq-mean-token-sum",
}
"""loss_mode -> the loss_agg_mode of its paper, where that matters."""


@validator("warning")
def rollout_correction_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    options = config.algorithm.rollout_correction
    of_weights = ["rollout_is_threshold_lower", "rollout_is_mode", "rollout_is_batch_normalize"]
    if options.rollout_rs is None or options.rollout_rs_threshold is not None:
        of_weights.append("rollout_is_threshold")
    options_of = {"rollout_is": of_weights, "rollout_rs": ["rollout_rs_threshold", "rollout_rs_threshold_lower"]}
    for switch, names in options_of.items():
        if options[switch] is None:
            why = f"{CORRECTION}.{switch}=null"
            yield from unused(config, [f"{CORRECTION}.{name}" for name in names], is_given, why)


@validator("warning")
def stale_tokens_without_correction(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    shared, options, key = config.actor_rollout_ref, config.algorithm.rollout_correction, f"{CORRECTION}.rollout_is"
    actor, rollout = shared.actor, shared.rollout
    if options.rollout_is or options.rollout_rs or options.bypass_mode or actor.policy_loss.loss_mode == "tis":
        return
    steps = config.prompts_per_update // actor.ppo_mini_batch_size * actor.ppo_epochs
    bound, defers = f"{ROLLOUT}.max_staleness={rollout.staleness}", rollout.over_sample_rate and rollout.partial_rollout
    if not actor.rl_loss_coef or not rollout.staleness:
        return
    if shared.generates_continuously or defers:
        text = (
            f"{key}=null with {bound} and partial_rollout=true: tokens of earlier weights are trained on as if the "
            "newest had sampled them. rollout_is=token weighs each by pi_old / pi_rollout"
        )
        yield Problem(key, text)
    elif shared.generates_ahead and steps > 1 and not is_given(key):
        text = (
            f"{bound} with {steps} optimizer steps a batch: a batch was sampled that many optimizer steps before it is "
            f"trained on, which the ratio to old_log_probs does not show. {ROLLOUT}.calculate_log_probs=true and "
            f"{key}=token weigh its tokens by pi_old / pi_rollout; rollout_is=false says that this is not wanted"
        )
        yield Problem(key, text)


@validator("warning")
def policy_loss_rollout_correction_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    mode, place = config.actor_rollout_ref.actor.policy_loss.loss_mode, f"{ACTOR}.policy_loss.rollout_correction"
    if mode != "bypass_mode":
        keys = given_below(place, config, is_given)
        yield from unused(config, keys, is_given, f"{ACTOR}.policy_loss.loss_mode={mode} reads {CORRECTION}")


@validator("warning")
def kl_in_reward_with_bypass_mode(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.rollout_correction.bypass_mode and config.algorithm.use_kl_in_reward:
        text = (
            f"{CORRECTION}.bypass_mode=true with algorithm.use_kl_in_reward=true: the reward is charged for the "
            "sampler's distance from the reference, rounding of its kernels included; false measures the policy's"
        )
        yield Problem(f"{CORRECTION}.bypass_mode", text)


@validator("warning")
def critic_options_without_critic(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.uses_critic:
        read = ["critic.enable"]
        if config.reward_model.enable:  # follows these
            read += ["critic.use_dynamic_bsz", "critic.forward_max_token_len_per_gpu"]
            read += ["critic.ppo_max_token_len_per_gpu"]
        keys = [key for key in given_below("critic", config, is_given) if key not in read]
        keys += ["trainer.critic_warmup"] if config.trainer.critic_warmup else []
        why = f"there is no critic with algorithm.adv_estimator={config.algorithm.adv_estimator}"
        yield from unused(config, [*keys, "trainer.max_critic_ckpt_to_keep"], is_given, why)


@validator("warning")
def ref_options_without_reference(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.uses_reference:
        why = "there is no reference policy without actor.use_kl_loss or algorithm.use_kl_in_reward"
        yield from unused(config, given_below(REF, config, is_given), is_given, why)


@validator("warning")
def ref_log_prob_options_unused_with_full_kl(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.uses_reference and not config.scores_reference:
        keys = [key for key in given_below(REF, config, is_given) if key.startswith(f"{REF}.log_prob_")]
        why = f"with {ACTOR}.kl_loss_type=full the reference runs in the micro-batches of the actor's update"
        yield from unused(config, keys, is_given, why)


@validator("warning")
def kl_in_reward_and_kl_loss(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.use_kl_loss:
        text = f"algorithm.use_kl_in_reward and {ACTOR}.use_kl_loss are both on: the KL penalty counts twice"
        yield Problem("algorithm.use_kl_in_reward", text)


@validator("warning")
def lr_warmup_steps_ratio_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for key in (f"{ACTOR}.optim", *(["critic.optim"] if config.uses_critic else [])):
        optim = get_path(config, key)
        if optim.lr_warmup_steps is not None and optim.lr_warmup_steps >= 0:
            why = f"{key}.lr_warmup_steps={optim.lr_warmup_steps} decides"
            yield from unused(config, [f"{key}.lr_warmup_steps_ratio"], is_given, why)


@validator("warning")
def estimator_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    estimator = config.algorithm.adv_estimator
    # None: an estimator of the user's, which may read anything
    read = options_read("advantages").get(estimator)
    if read is not None:
        keys = [key for key in all_options("advantages") if key not in (*read, _WHITEN)]
        yield from unused(config, keys, is_given, f"algorithm.adv_estimator={estimator} does not read it")


@validator("warning")
def policy_loss_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    # None: a loss of the user's, which may read anything
    read = options_read("losses").get(mode)
    if read is not None:
        keys = [key for key in all_options("losses") if key not in read]
        yield from unused(config, keys, is_given, f"{ACTOR}.policy_loss.loss_mode={mode} does not read it")


@validator("warning")
def clip_ratio_unused_with_one_optimizer_step(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    # after a first optimizer step the ratio moves away from 1, and clipping acts
    if actor.ppo_epochs > 1 or actor.ppo_mini_batch_size < config.prompts_per_update:
        return
    if config.algorithm.rollout_correction.bypass_mode:  # then the ratio is that to the sampler
        return
    # all of them act on the ratio alone, or on its distance from 1
    names = ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]
    names += [f"policy_loss.{name}" for name in ("ppo_kl_coef", "kimi15_tau", "dro_beta")]
    read = options_read("losses").get(actor.policy_loss.loss_mode, ())
    keys = [f"{ACTOR}.{name}" for name in names if f"{ACTOR}.{name}" in read]
    why = "with one optimizer step per batch the policy is still the one that sampled, and its ratio is 1"
    yield from unused(config, keys, is_given, why)


@validator("warning")
def loss_agg_mode_differs_from_paper(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    mode = _PUBLISHED_WITH.get(actor.policy_loss.loss_mode, actor.loss_agg_mode)
    if actor.loss_agg_mode != mode:
        text = (
            f"{ACTOR}.policy_loss.loss_mode={actor.policy_loss.loss_mode} was published with "
            f"{ACTOR}.loss_agg_mode={mode}, and runs with {actor.loss_agg_mode}"
        )
        yield Problem(f"{ACTOR}.loss_agg_mode", text)


@validator("warning")
def advantage_whiten_is_estimator_default(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    estimator, whiten = config.algorithm.adv_estimator, config.algorithm.advantage.whiten
    read = options_read("advantages").get(estimator)
    if read is not None and whiten is (_WHITEN in read):
        habit = "does so" if whiten else "does not"
        yield from unused(config, ["algorithm.advantage.whiten"], is_given, f"{estimator} {habit} by itself")


@validator("warning")
def straight_through_kl_in_reward(config: PPOConfig) -> Iterator[Problem]:
    kind = config.algorithm.kl_penalty
    if config.algorithm.use_kl_in_reward and kind.endswith("+"):
        text = f"algorithm.kl_penalty={kind} is {kind[:-1]}: the + changes a gradient, and a reward has none"
        yield Problem("algorithm.kl_penalty", text)


@validator("warning")
def gigpo_with_single_turn_or_zero_weights(config: PPOConfig) -> Iterator[Problem]:
    gigpo = config.algorithm.gigpo
    if config.algorithm.adv_estimator != "gigpo":
        return
    if config.actor_rollout_ref.rollout.mode == "sync":
        text = (
            f"algorithm.adv_estimator=gigpo with {ROLLOUT}.mode=sync: every response is one turn, so that its "
            "advantages are those of grpo times algorithm.gigpo.episode_weight + step_weight"
        )
        yield Problem("algorithm.adv_estimator", text)
    if not gigpo.episode_weight + gigpo.step_weight:
        text = "algorithm.gigpo.episode_weight=0 and step_weight=0 make every advantage 0: nothing is learned"
        yield Problem("algorithm.gigpo.episode_weight", text)


@validator("warning")
def turn_discount_unused_with_single_turn(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    read = {
        "step_reinforce": "algorithm.step_gamma",
        "gigpo": "algorithm.step_gamma",
        "agentic_reinforce": "algorithm.gamma",
    }
    key = read.get(config.algorithm.adv_estimator)
    if key and config.actor_rollout_ref.rollout.mode == "sync":
        why = f"with {ROLLOUT}.mode=sync every response is one turn, after which no other comes"
        yield from unused(config, [key], is_given, why)


@validator("warning")
def cliprange_value_unused_with_one_optimizer_step(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    critic = config.critic
    if config.uses_critic and critic.ppo_epochs == 1 and critic.ppo_mini_batch_size >= config.prompts_per_update:
        why = "with one optimizer step per batch the values are still those the advantages were made with"
        keys = ["critic.cliprange_value"] if critic.cliprange_value is not None else []
        yield from unused(config, keys, is_given, why)


@validator("warning")
def rollout_correction_lower_bounds_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    if correction.rollout_is and "_" in str(correction.rollout_is_threshold):
        keys = [f"{CORRECTION}.rollout_is_threshold_lower", f"{CORRECTION}.rollout_is_mode"]
        why = f"{CORRECTION}.rollout_is_threshold={correction.rollout_is_threshold} has both bounds, as IcePop wants"
        yield from unused(config, keys, is_given, why)
    if correction.rollout_rs and all(kind.endswith(("k2", "k3")) for kind in correction.rollout_rs.split(",")):
        keys = [f"{CORRECTION}.rollout_rs_threshold_lower"]
        why = f"{CORRECTION}.rollout_rs={correction.rollout_rs} has no lower bound"
        yield from unused(config, keys, is_given, why)


@validator("warning")
def bypass_mode_loss_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    correction = config.algorithm.rollout_correction
    if config.actor_rollout_ref.actor.policy_loss.loss_mode != "bypass_mode":
        return
    if correction.loss_type == "ppo_clip":
        keys = [f"{CORRECTION}.rollout_is"] if correction.rollout_is else []
        why = f"with {CORRECTION}.loss_type=ppo_clip the clipped ratio is already that to the sampler"
        yield from unused(config, keys, is_given, why)
    else:
        names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
        why = f"{CORRECTION}.loss_type=reinforce does not clip"
        yield from unused(config, [f"{ACTOR}.{name}" for name in names], is_given, why)


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


_HIGHEST_LR = 1e-2


@validator("advice")
def unusual_learning_rates_and_coefficients(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        if role.optim.lr > _HIGHEST_LR:
            text = (
                f"is more than {_HIGHEST_LR:g}, at which no language model has been trained. Common are 1e-6 to 1e-4."
            )
            yield problem(config, f"{key}.optim.lr", text)
        if role.optim.betas[0] > role.optim.betas[-1]:
            text = "gives the mean of gradients a longer memory than that of their squares. Common is [0.9,0.999]."
            yield problem(config, f"{key}.optim.betas", text)
    actor = config.actor_rollout_ref.actor
    if abs(actor.entropy_coeff) > 0.1:
        text = "is more than a policy loss of about 1 can balance: the policy would become noise. Common are 0 to 0.01."
        yield problem(config, f"{ACTOR}.entropy_coeff", text)
    if actor.use_kl_loss and actor.kl_loss_coef > 1:
        yield problem(config, f"{ACTOR}.kl_loss_coef", "holds the policy where it is. Common are 1e-4 to 0.1.")


@validator("advice")
def zero_loss_coefficients(config: PPOConfig) -> Iterator[Problem]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        text = (
            f"with {ACTOR}.use_kl_loss=true: the reference runs at every step, for a metric alone. Set one or the "
            "other."
        )
        yield problem(config, f"{ACTOR}.kl_loss_coef", text, f"{ACTOR}.use_kl_loss")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        text = (
            "with algorithm.use_kl_in_reward=true: the reference runs at every step, for a metric alone. Set one or "
            "the other."
        )
        yield problem(config, "algorithm.kl_ctrl.kl_coef", text, "algorithm.use_kl_in_reward")
    if actor.rl_loss_coef == 0 and actor.sft_loss_coef == 0:
        text = f"with {ACTOR}.sft_loss_coef=0: nothing but the entropy bonus is left of the loss. Set one of them."
        yield problem(config, f"{ACTOR}.rl_loss_coef", text, f"{ACTOR}.sft_loss_coef")
