"""Checks that span options: each a small function named after its rule, all of them run, all problems told at once.

A rule reads the typed tree and yields ``Problem``s. To add one, write a function and decorate it with ``@rule``.
Range and choice of a single option are not rules: they stand with the option.
"""

from collections.abc import Callable, Iterator
from typing import Any

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.ppo import PPOConfig
from verl.config.sampling_names import BY_HF, DECIDED, OF_WHOLE_RESPONSES, OWN
from verl.utils.deepspeed_keys import conflicts

Rule = Callable[[PPOConfig], Iterator[Problem]]
RULES: list[Rule] = []

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
RM = "reward_model"
SHAPING = "algorithm.reward_shaping"
CORRECTION = "algorithm.rollout_correction"
_CORRECTIONS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold", "bypass_mode")
"""Options that switch a part of the rollout correction on."""
_TOKEN_BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")
_NEED_SIBLINGS = ("grpo", "rloo", "grpo_passk", "opo", "gpg", "gdpo", "gigpo", *_TOKEN_BASELINES)
_CLIPS_RATIOS = ("vanilla", "gspo", "clip_cov", "bypass_mode")
"""Losses that clip a ratio from below at 1 - clip_ratio_low. The others' lower bounds are of another kind."""


def rule(function: Rule) -> Rule:
    """Collect a rule."""
    RULES.append(function)
    return function


def broken_rules(config: PPOConfig) -> list[Problem]:
    """Every problem every rule finds, in the order of the rules."""
    return [problem for check in RULES for problem in check(config)]


def _problem(config: PPOConfig, key: str, text: str, *also: str) -> Problem:
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


# ---------------------------------------------------------------------------------------------- batch arithmetic


@rule
def mini_batch_fits_into_the_train_batch(config: PPOConfig) -> Iterator[Problem]:
    prompts = config.prompts_per_update
    has_other = config.data.gen_batch_size and not config.algorithm.filter_groups.enable
    source = "data.gen_batch_size" if has_other else "data.train_batch_size"
    for key, role, _ in trained_roles(config):
        name, mini = f"{key}.ppo_mini_batch_size", role.ppo_mini_batch_size
        if mini > prompts:
            yield _problem(
                config,
                name,
                f"is larger than {source}={prompts}: no mini-batch could be filled. "
                f"Lower the first or raise the second.",
                source,
            )
        elif prompts % mini:
            yield _problem(
                config,
                name,
                f"does not divide {source}={prompts}: {prompts % mini} prompts would be left "
                f"over at every step. Choose a divisor of {prompts}.",
                source,
            )


@rule
def micro_batch_fits_into_the_mini_batch_of_a_rank(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, ranks = role.ppo_micro_batch_size_per_gpu, config.dp_size(role)
        rows = -(-role.ppo_mini_batch_size * n // ranks)
        if not role.use_dynamic_bsz and micro and micro > rows:
            yield _problem(
                config,
                f"{key}.ppo_micro_batch_size_per_gpu",
                f"is larger than the {rows} responses of a rank's mini-batch ({key}.ppo_mini_batch_size="
                f"{role.ppo_mini_batch_size} x {ROLLOUT}.n={n} / {ranks} data-parallel ranks). Lower it to {rows}, or "
                "raise ppo_mini_batch_size.",
                f"{key}.ppo_mini_batch_size",
                f"{ROLLOUT}.n",
            )


@rule
def micro_batch_is_given_exactly_once(config: PPOConfig) -> Iterator[Problem]:
    for name, budget, dynamic, ranks in scoring_roles(config):
        local = f"{name}_per_gpu"
        total, per_gpu = get_path(config, name), get_path(config, local)
        if total is not None and per_gpu is not None:
            yield Problem(
                name,
                f"{name}={total} and {local}={per_gpu} are both set: they say the same thing, for all "
                f"{ranks} ranks and for one. Keep the second.",
                (local,),
            )
        elif not dynamic and total is None and per_gpu is None:
            switch = f"{ROLLOUT}.log_prob_use_dynamic_bsz" if name.startswith(ROLLOUT) else _switch(name)
            yield Problem(
                local,
                f"{local}=null leaves open how many responses one forward holds. Give it a number, 1 if in "
                f"doubt, or set {switch}=true and cut by tokens ({budget}).",
            )


def _switch(name: str) -> str:
    section = name.rpartition(".")[0]
    return f"{section}.log_prob_use_dynamic_bsz" if section == REF else f"{section}.use_dynamic_bsz"


@rule
def token_budget_holds_the_longest_row(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    for name, budget, dynamic, _ in scoring_roles(config):
        section = name.rpartition(".")[0]
        # old log-probs are the actor's to compute
        sp = get_path(config, ACTOR if section == ROLLOUT else section).ulysses_sequence_parallel_size
        if dynamic and get_path(config, budget) * sp < longest:
            shared = f"x ulysses_sequence_parallel_size={sp} " if sp > 1 else ""
            yield _problem(
                config,
                budget,
                f"{shared}cannot hold one row of {rollout.prompt_length} prompt and {rollout.response_length} "
                f"response tokens = {longest}. Raise it to {-(-longest // sp)} or more, or shorten "
                f"data.max_prompt_length or data.max_response_length.",
                "data.max_prompt_length",
                "data.max_response_length",
            )


# ------------------------------------------------------------------------------------------------------ sampling


@rule
def groups_have_siblings(config: PPOConfig) -> Iterator[Problem]:
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    if estimator in _NEED_SIBLINGS and rollout.n < 2:
        yield _problem(
            config,
            f"{ROLLOUT}.n",
            f"with algorithm.adv_estimator={estimator}: a response is judged by its "
            f"siblings, and there are none. Sample at least 2 responses per prompt, "
            f"or choose another estimator.",
            "algorithm.adv_estimator",
        )


@rule
def groups_can_be_chosen(config: PPOConfig) -> Iterator[Problem]:
    filtering, rollout = config.algorithm.filter_groups, config.actor_rollout_ref.rollout
    if not filtering.enable:
        return
    key = "algorithm.filter_groups.enable"
    if rollout.n < 2:
        text = f"with {ROLLOUT}.n=1: one response cannot differ from others. Sample at least 2, or set it to false."
        yield _problem(config, key, text, f"{ROLLOUT}.n")
    if rollout.async_ratio:
        yield _problem(
            config,
            key,
            f"with {ROLLOUT}.async_ratio={rollout.async_ratio}: how many prompts a step draws is known at its end "
            "only, and the next one's are drawn before. Set async_ratio=0, or enable=false.",
            f"{ROLLOUT}.async_ratio",
        )
    if rollout.over_sample_rate:
        yield _problem(
            config,
            key,
            f"with {ROLLOUT}.over_sample_rate={rollout.over_sample_rate}: a prompt would be put off several times in "
            f"one step, which {ROLLOUT}.max_postponements counts once. Set over_sample_rate=0, or enable=false.",
            f"{ROLLOUT}.over_sample_rate",
        )
    if filtering.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        yield _problem(
            config,
            "algorithm.filter_groups.metric",
            "with algorithm.use_kl_in_reward=true: every response has a KL of its own, so every group would differ. "
            "Use seq_reward, or put the KL into the loss (actor.use_kl_loss).",
            "algorithm.use_kl_in_reward",
        )


@rule
def siblings_differ(config: PPOConfig) -> Iterator[Problem]:
    for key in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        sampling = get_path(config, key)
        greedy = not sampling.do_sample or sampling.temperature == 0
        if sampling.n > 1 and greedy:
            cause = "do_sample=false" if not sampling.do_sample else "temperature=0"
            yield _problem(
                config,
                f"{key}.n",
                f"with {key}.{cause}: all responses of a prompt would be the same. Sample at random, or set {key}.n=1.",
                f"{key}.do_sample",
                f"{key}.temperature",
            )


@rule
def further_sampling_is_the_engines(config: PPOConfig) -> Iterator[Problem]:
    engine = config.actor_rollout_ref.rollout.name
    for place in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        for name, value in get_path(config, place).sampling_kwargs.items():
            key = f"{place}.sampling_kwargs.{name}"
            if name in OWN:
                way_out = f"set {ROLLOUT if name == 'ignore_eos' else place}.{name}, the key it has of its own"
            elif name in DECIDED or name.startswith("_"):
                way_out = DECIDED.get(name, "leave it out")
            elif engine == "hf" and name not in BY_HF:
                way_out = f"{ROLLOUT}.name=hf knows {', '.join(BY_HF)}; use another engine for others"
            else:
                continue
            text = f"{key}={show(value)} cannot be handed to the engine: {way_out}."
            yield Problem(key, text, (f"{place}.sampling_kwargs", f"{ROLLOUT}.name"))


@rule
def stop_texts_have_characters(config: PPOConfig) -> Iterator[Problem]:
    for place in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        stop = get_path(config, place).stop
        if "" in ([stop] if isinstance(stop, str) else stop or []):
            yield _problem(
                config, f"{place}.stop", "holds an empty text, which would end every response. Leave it out."
            )


@rule
def windows_agree(config: PPOConfig) -> Iterator[Problem]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.prompt_length != data.max_prompt_length:
        yield _problem(
            config,
            f"{ROLLOUT}.prompt_length",
            f"differs from data.max_prompt_length="
            f"{data.max_prompt_length}, the length prompts are padded to. Set only the latter.",
            "data.max_prompt_length",
        )


@rule
def model_length_holds_prompt_and_response(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield _problem(
            config,
            f"{ROLLOUT}.max_model_len",
            f"is shorter than prompt and response together "
            f"({rollout.prompt_length} + {rollout.response_length} = {longest}). Raise it, leave it null, "
            f"or shorten data.max_response_length.",
            "data.max_response_length",
        )


@rule
def rollout_copies_fit_the_workers(config: PPOConfig) -> Iterator[Problem]:
    rollout, workers = config.actor_rollout_ref.rollout, sum(config.rollout_processes)
    place = "trainer" if config.actor_rollout_ref.hybrid_engine else ROLLOUT
    stages = (rollout.engine_kwargs.get("vllm") or {}).get("pipeline_parallel_size") or 1
    stages = stages if rollout.name == "vllm" else 1
    if rollout.name != "hf" and workers % (rollout.tensor_model_parallel_size * stages):
        times = f"times engine_kwargs.vllm.pipeline_parallel_size={stages} " if stages != 1 else ""
        yield _problem(
            config,
            f"{ROLLOUT}.tensor_model_parallel_size",
            f"{times}does not divide the {workers} workers ({place}.nnodes x {place}.n_gpus_per_node). "
            f"Choose a divisor of {workers}.",
            f"{place}.n_gpus_per_node",
            f"{ROLLOUT}.engine_kwargs",
        )


@rule
def rollout_apart_has_devices(config: PPOConfig) -> Iterator[Problem]:
    if not config.actor_rollout_ref.hybrid_engine and not config.actor_rollout_ref.rollout.nnodes:
        yield _problem(
            config,
            f"{ROLLOUT}.nnodes",
            "with actor_rollout_ref.hybrid_engine=false: nothing would sample. Give the rollout at least one machine, "
            "or leave hybrid_engine true.",
            "actor_rollout_ref.hybrid_engine",
        )


@rule
def drawing_ahead_has_devices_of_its_own(config: PPOConfig) -> Iterator[Problem]:
    shared, key = config.actor_rollout_ref, f"{ROLLOUT}.async_ratio"
    if shared.rollout.async_ratio and shared.hybrid_engine:
        yield _problem(
            config,
            key,
            "with actor_rollout_ref.hybrid_engine=true: sampling and training take turns on the same devices, so "
            f"nothing can be drawn ahead. Set hybrid_engine=false and give the rollout devices ({ROLLOUT}.nnodes, "
            f"{ROLLOUT}.n_gpus_per_node), or set async_ratio=0.",
            "actor_rollout_ref.hybrid_engine",
        )
    if shared.rollout.async_ratio and config.algorithm.adv_estimator == "remax":
        yield _problem(
            config,
            key,
            "with algorithm.adv_estimator=remax: its greedy baseline would come from newer weights than the responses. "
            "Set async_ratio=0, or take another estimator without critic, rloo for example.",
            "algorithm.adv_estimator",
        )


@rule
def requests_one_by_one_need_servers(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.over_sample_rate and rollout.async_ratio:
        yield _problem(
            config,
            f"{ROLLOUT}.over_sample_rate",
            f"with {ROLLOUT}.async_ratio={rollout.async_ratio}: which prompts a step trains on is known before it "
            "begins. Set over_sample_rate=0, or async_ratio=0.",
            f"{ROLLOUT}.async_ratio",
        )
    for name in ("over_sample_rate", "partial_rollout"):
        if rollout[name] and rollout.mode != "async":
            yield _problem(
                config,
                f"{ROLLOUT}.{name}",
                f"with {ROLLOUT}.mode={rollout.mode}: there, one call samples a whole batch, and no request can be "
                f"ended early. Set {ROLLOUT}.mode=async.",
                f"{ROLLOUT}.mode",
            )


@rule
def tokens_of_several_versions_keep_their_log_probs(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.partial_rollout and not rollout.calculate_log_probs:
        yield _problem(
            config,
            f"{ROLLOUT}.partial_rollout",
            f"with {ROLLOUT}.calculate_log_probs=false: a response drawn by several versions of the weights can only "
            f"be corrected by the log-probs it was drawn with. Set calculate_log_probs=true.",
            f"{ROLLOUT}.calculate_log_probs",
        )


@rule
def a_response_that_goes_on_is_drawn_as_if_never_cut(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if not (rollout.partial_rollout and rollout.over_sample_rate):
        return
    for name in sorted(set(OF_WHOLE_RESPONSES).intersection(rollout.sampling_kwargs)):
        key, value = f"{ROLLOUT}.sampling_kwargs.{name}", rollout.sampling_kwargs[name]
        if value:
            text = (
                f"{key}={show(value)} with {ROLLOUT}.partial_rollout=true: it looks at the response from its start, "
                "and an engine that goes on with one takes what was drawn before for prompt. Leave it out, or set "
                "partial_rollout=false."
            )
            yield Problem(key, text, (f"{ROLLOUT}.sampling_kwargs", f"{ROLLOUT}.partial_rollout"))


# ----------------------------------------------------------------------------------------------- roles and losses


@rule
def gae_has_a_critic(config: PPOConfig) -> Iterator[Problem]:
    if config.critic.enable is False and config.algorithm.adv_estimator == "gae":
        yield _problem(
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
        yield _problem(
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
        yield _problem(
            config,
            "critic.rollout_n",
            f"differs from {ROLLOUT}.n={n}, which it follows. Set only the latter.",
            f"{ROLLOUT}.n",
        )


@rule
def reward_model_reads_conversations(config: PPOConfig) -> Iterator[Problem]:
    if config.rewrites_for_reward_model and not config.data.return_raw_chat:
        yield _problem(
            config,
            "data.return_raw_chat",
            f"with {RM}.model.input_tokenizer={config.reward_model.model.input_tokenizer}: the reward model reads each "
            f"conversation in its own chat template, and the messages are left out. Set data.return_raw_chat=true or, "
            f"if the reward model has the policy's tokens and template, {RM}.model.input_tokenizer=null.",
            f"{RM}.model.input_tokenizer",
        )


@rule
def reward_model_reads_whole_responses(config: PPOConfig) -> Iterator[Problem]:
    rm, rollout = config.reward_model, config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if not rm.enable or rm.max_length is None:
        return
    if not rm.model.input_tokenizer and rm.max_length < longest:
        yield _problem(
            config,
            f"{RM}.max_length",
            f"is shorter than prompt and response together ({rollout.prompt_length} + {rollout.response_length} = "
            f"{longest}), and token ids are passed on whole ({RM}.model.input_tokenizer=null). Leave it null, or "
            f"shorten data.max_response_length.",
            "data.max_response_length",
        )
    elif rm.model.input_tokenizer and rm.use_dynamic_bsz:
        budget = rm.forward_max_token_len_per_gpu * rm.ulysses_sequence_parallel_size
        if budget < rm.max_length:
            yield _problem(
                config,
                f"{RM}.forward_max_token_len_per_gpu",
                f"cannot hold one conversation of {RM}.max_length={rm.max_length} tokens. Raise the first or lower "
                f"the second.",
                f"{RM}.max_length",
            )


@rule
def clip_range_keeps_the_ratio_positive(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    name = "clip_ratio_low" if actor.clip_ratio_low is not None else "clip_ratio"
    if actor.policy_loss.loss_mode in _CLIPS_RATIOS and actor[name] >= 1:
        yield _problem(config, f"{ACTOR}.{name}", "allows ratios down to 0 or less: it must be less than 1.")


@rule
def kept_batches_come_from_one_call(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    by_speed = "what such a batch holds depends on how fast responses came, so none can be found again"
    for name, why in {
        "over_sample_rate": by_speed,
        "partial_rollout": by_speed,
        "async_ratio": "such a batch is begun a step early, where none is kept or looked for",
    }.items():
        if rollout.skip_rollout and rollout[name]:
            yield _problem(
                config,
                f"{ROLLOUT}.skip_rollout",
                f"with {ROLLOUT}.{name}={show(rollout[name])}: {why}. Set one of them only.",
                f"{ROLLOUT}.{name}",
            )


@rule
def tis_knows_what_the_sampler_thought(config: PPOConfig) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    if shared.actor.policy_loss.loss_mode == "tis" and not shared.rollout.calculate_log_probs:
        yield _problem(
            config,
            f"{ACTOR}.policy_loss.loss_mode",
            f"weighs by the probabilities the sampler used, and {ROLLOUT}.calculate_log_probs=false does not keep "
            f"them. Set it to true.",
            f"{ROLLOUT}.calculate_log_probs",
        )


@rule
def old_log_probs_are_not_needed_before_the_update(config: PPOConfig) -> Iterator[Problem]:
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.skip_old_log_probs"
    if not actor.skip_old_log_probs:
        return
    steps = config.prompts_per_update // actor.ppo_mini_batch_size * actor.ppo_epochs
    if steps > 1:
        yield _problem(
            config,
            key,
            f"with {steps} optimizer steps a batch ({ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size} of "
            f"{config.prompts_per_update} prompts, {ACTOR}.ppo_epochs={actor.ppo_epochs}): after the first of them "
            "the policy is no longer the one that sampled. Set it to false, or make one step of the batch.",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.ppo_epochs",
        )
    for early, why in {
        "algorithm.use_kl_in_reward": "the reward then holds log pi_old - log pi_ref",
        f"{ACTOR}.calculate_sum_pi_squared": "the sums come from the pass that is left out",
        "algorithm.use_pf_ppo": "the update then sees some responses only, and some twice",
    }.items():
        if get_path(config, early):
            yield _problem(config, key, f"with {early}=true: {why}. Set one of them to false.", early)


@rule
def correction_knows_what_the_sampler_thought(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.calculate_log_probs:
        return
    for name in _CORRECTIONS:
        if config.algorithm.rollout_correction[name]:
            yield _problem(
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
            yield _problem(
                config,
                f"{CORRECTION}.{name}",
                f"with {ACTOR}.skip_old_log_probs=true: {why}. Set skip_old_log_probs=false.",
                f"{ACTOR}.skip_old_log_probs",
            )
        elif options[name] and options.bypass_mode and name != "bypass_mode":
            if actor.policy_loss.loss_mode == "bypass_mode":  # which makes r of the policy being trained
                continue
            yield _problem(
                config,
                f"{CORRECTION}.{name}",
                f"with {CORRECTION}.bypass_mode=true: the old log-probs are then the sampler's own, and every r would "
                f"be 1. Set bypass_mode=false, or {ACTOR}.policy_loss.loss_mode=bypass_mode, whose r is that of the "
                "policy being trained.",
                f"{CORRECTION}.bypass_mode",
                f"{ACTOR}.policy_loss.loss_mode",
            )
    if options.bypass_mode and actor.calculate_sum_pi_squared:
        yield _problem(
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
        yield _problem(
            config,
            mode,
            f"with {CORRECTION}.bypass_mode=false: the loss takes old log-probs for the sampler's, and they would be "
            "the trainer's. Set bypass_mode=true, or loss_mode=vanilla.",
            f"{CORRECTION}.bypass_mode",
        )
    if options.loss_type != "ppo_clip" and not bypasses:
        yield _problem(
            config,
            f"{CORRECTION}.loss_type",
            f"with {mode}={loss.loss_mode}: only bypass_mode reads it. Set {mode}=bypass_mode and "
            f"{CORRECTION}.bypass_mode=true, or {mode}=reinforce for a policy gradient from old log-probs.",
            mode,
        )
    if bypasses and options.rollout_is_batch_normalize:
        yield _problem(
            config,
            f"{CORRECTION}.rollout_is_batch_normalize",
            f"with {mode}=bypass_mode: weights are made in the loss, a micro-batch at a time, and their mean would "
            "depend on how batches are cut. Set it to false.",
            mode,
        )
    copy = loss.rollout_correction
    for name in options if bypasses else ():
        if copy[name] != options[name]:
            yield _problem(
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
        yield _problem(config, f"{CORRECTION}.rollout_is_threshold", f"is no threshold: {error}.")
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
        yield _problem(
            config,
            f"{CORRECTION}.rollout_is",
            f"with {ACTOR}.policy_loss.loss_mode=tis: that loss weighs by the ratio to the sampler itself, and tokens "
            "would be weighed twice. Set rollout_is=null, or take another loss, reinforce for example.",
            f"{ACTOR}.policy_loss.loss_mode",
        )
    if mode == "topr" and any(kind.strip().startswith("token") for kind in (options.rollout_rs or "").split(",")):
        yield _problem(
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
            yield _problem(
                config,
                f"{key}.{low}",
                f"is not below {key}.{high}={loss[high]}: nothing lies between them. Lower the first or raise the "
                f"second.",
                f"{key}.{high}",
            )


@rule
def gdpo_has_rewards_to_combine(config: PPOConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield _problem(
            config,
            "algorithm.gdpo_reward_keys",
            "with algorithm.adv_estimator=gdpo: it combines rewards it finds by name. List the names the reward "
            "function returns beside score, [accuracy,format] for example.",
            "algorithm.adv_estimator",
        )
    elif weights is not None and len(weights) != len(keys):
        yield _problem(
            config,
            "algorithm.gdpo_reward_weights",
            f"has {len(weights)} numbers for the {len(keys)} algorithm.gdpo_reward_keys. Give one weight a key, or "
            f"null for equal ones.",
            "algorithm.gdpo_reward_keys",
        )


@rule
def optimal_token_baseline_has_its_column(config: PPOConfig) -> Iterator[Problem]:
    key = f"{ACTOR}.calculate_sum_pi_squared"
    estimator = config.algorithm.adv_estimator
    if estimator in _TOKEN_BASELINES and not get_path(config, key):
        yield _problem(
            config,
            key,
            f"with algorithm.adv_estimator={estimator}: the estimator weighs tokens by the sum of squared "
            "probabilities. Set it to true.",
            "algorithm.adv_estimator",
        )


# -------------------------------------------------------------------------------------------------------- hardware


def shapes_scores(config: PPOConfig) -> list[str]:
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


@rule
def greedy_baseline_is_of_the_same_scale(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.adv_estimator == "remax":
        for key in shapes_scores(config):
            yield _problem(
                config,
                key,
                "changes the rewards of sampled responses, but not the score of the greedy one, with which "
                "algorithm.adv_estimator=remax compares them. Leave it out, or use rloo or reinforce.",
                "algorithm.adv_estimator",
            )


@rule
def scores_of_a_group_are_several(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.n == 1:
        for name in ("mean", "std"):
            if config.algorithm.reward_shaping.norm[name] == "group":
                yield _problem(
                    config,
                    f"{SHAPING}.norm.{name}",
                    f"compares responses to the same prompt, and {ROLLOUT}.n=1 draws one. Raise n, or choose batch or "
                    "running.",
                    f"{ROLLOUT}.n",
                )


@rule
def overlong_buffer_lies_in_the_response(config: PPOConfig) -> Iterator[Problem]:
    buffer, window = config.algorithm.reward_shaping.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and not 0 < buffer.len <= window:
        yield _problem(
            config,
            f"{SHAPING}.overlong_buffer.len",
            f"must be 1 to {ROLLOUT}.response_length={window}: the penalty grows over that many last tokens. Choose "
            f"e.g. {max(1, window // 4)}, or set {SHAPING}.overlong_buffer.enable=false.",
            f"{ROLLOUT}.response_length",
        )


@rule
def difficulty_is_a_band(config: PPOConfig) -> Iterator[Problem]:
    band = config.algorithm.sample_mask.difficulty
    if band is not None and (len(band) != 2 or not band[0] <= band[1]):
        yield _problem(
            config,
            "algorithm.sample_mask.difficulty",
            "is no [low, high]: two numbers, the first at most the second. Give e.g. [0.1,0.9], or null for no mask.",
        )


@rule
def bands_have_two_ends(config: PPOConfig) -> Iterator[Problem]:
    clip, filtering = config.algorithm.reward_shaping.clip_range, config.algorithm.filter_groups
    if clip is not None and (len(clip) != 2 or not clip[0] < clip[1]):
        yield _problem(
            config,
            f"{SHAPING}.clip_range",
            "is no [low, high]: two numbers, the first below the second. Give e.g. [-1,3], or null for no bounds.",
        )
    if filtering.low is not None and filtering.high is not None and not filtering.low < filtering.high:
        yield _problem(
            config,
            "algorithm.filter_groups.low",
            f"is not below algorithm.filter_groups.high={filtering.high}: no group lies between them. Lower the first "
            "or raise the second.",
            "algorithm.filter_groups.high",
        )


@rule
def some_responses_are_whole(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.sample_mask.drop_truncated and config.actor_rollout_ref.rollout.ignore_eos:
        yield _problem(
            config,
            "algorithm.sample_mask.drop_truncated",
            f"with {ROLLOUT}.ignore_eos=true leaves nothing to learn from: every response runs into the length limit. "
            "Set one of them to false.",
            f"{ROLLOUT}.ignore_eos",
        )


@rule
def sequence_parallel_size_divides_the_workers(config: PPOConfig) -> Iterator[Problem]:
    for key, role in _models(config).items():
        if config.trainer.world_size % role.ulysses_sequence_parallel_size:
            yield _problem(
                config,
                f"{key}.ulysses_sequence_parallel_size",
                f"does not divide the "
                f"{config.trainer.world_size} workers. Choose a divisor of {config.trainer.world_size}.",
                "trainer.n_gpus_per_node",
            )


def sharded(config: PPOConfig) -> dict[str, str]:
    """Role -> its section about sharding, of the roles there are."""
    return {key: f"{key}.fsdp_config" if key in (ACTOR, REF) else f"{key}.model.fsdp_config" for key in _models(config)}


def _models(config: PPOConfig) -> dict[str, Any]:
    """Key -> section of every role that runs a model of its own."""
    shared = config.actor_rollout_ref
    sections: dict[str, Any] = {ACTOR: shared.actor}
    sections |= {REF: shared.ref} if config.uses_reference else {}
    sections |= {"critic": config.critic} if config.uses_critic else {}
    sections |= {"reward_model": config.reward_model} if config.reward_model.enable else {}
    return sections


@rule
def reward_charges_sampled_tokens_only(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == "full":
        yield _problem(
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
        yield _problem(
            config,
            f"{REF}.{key}",
            f"differs from {ACTOR}.{key}={size} with {ACTOR}.kl_loss_type=full: actor and reference go through each "
            "micro-batch together. Set them equal, or use low_var_kl.",
            f"{ACTOR}.{key}",
        )


@rule
def ranks_share_packed_rows_only(config: PPOConfig) -> Iterator[Problem]:
    for key, role in _models(config).items():
        # the reference runs the actor's model, and runs it as the actor does
        switch = f"{ACTOR}.use_remove_padding" if key in (ACTOR, REF) else f"{key}.model.use_remove_padding"
        if role.ulysses_sequence_parallel_size > 1 and not get_path(config, switch):
            yield _problem(
                config,
                f"{key}.ulysses_sequence_parallel_size",
                f"with {switch}=false: ranks can share one packed sequence, not padded rows. Set it to true"
                f"{' (actor_rollout_ref.model.use_remove_padding)' if key in (ACTOR, REF) else ''}, or the size to 1.",
                switch,
            )


@rule
def sharding_group_divides_the_workers(config: PPOConfig) -> Iterator[Problem]:
    world = config.trainer.world_size
    for key in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config", f"{RM}.model.fsdp_config"):
        size = get_path(config, key).fsdp_size
        if size == 0 or size < -1 or (size > 0 and world % min(size, world)):
            yield _problem(
                config,
                f"{key}.fsdp_size",
                f"must be -1 (all ranks) or a divisor of the {world} workers.",
                "trainer.n_gpus_per_node",
            )


@rule
def fp16_is_not_trained_in(config: PPOConfig) -> Iterator[Problem]:
    for key, _, _ in trained_roles(config):
        place = f"{key}.model.fsdp_config" if key == "critic" else f"{key}.fsdp_config"
        sharding = get_path(config, place)
        formats = {"mixed_precision.param_dtype": sharding.compute_dtype, "model_dtype": sharding.master_dtype}
        for name, chosen in formats.items():
            if chosen == "fp16":
                text = f"{place}.{name}=fp16 loses small gradients, which no loss scaling keeps here. Use bf16 or fp32."
                yield Problem(f"{place}.{name}", text)


def runs_fsdp1(config: PPOConfig, role: str) -> bool:
    """Whether a role's ``strategy=fsdp`` is FullyShardedDataParallel."""
    section = get_path(config, role)
    sharding = section.model.fsdp_config if role in ("critic", RM) else section.fsdp_config
    shares = config.trainer.world_size > 1 and sharding.fsdp_size != 1
    return section.strategy == "fsdp" and config.trainer.device != "cpu" and shares


@rule
def offload_policy_is_of_fsdp2(config: PPOConfig) -> Iterator[Problem]:
    for role, place in sharded(config).items():
        if get_path(config, place).offload_policy and runs_fsdp1(config, role):
            yield _problem(
                config,
                f"{place}.offload_policy",
                f"needs fsdp2, and {role}.strategy=fsdp. Use {role}.strategy=fsdp2, or param_offload and "
                "optimizer_offload.",
                f"{role}.strategy",
            )


@rule
def l2_term_is_of_whole_weights(config: PPOConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.l2_coef and (actor.strategy == "deepspeed" or runs_fsdp1(config, ACTOR)):
        yield _problem(
            config,
            f"{ACTOR}.l2_coef",
            f"needs fsdp2 or local, and {ACTOR}.strategy={actor.strategy} keeps weights and gradients in flat pieces. "
            f"Use {ACTOR}.optim.weight_decay, or {ACTOR}.strategy=fsdp2.",
            f"{ACTOR}.strategy",
        )


@rule
def local_strategy_has_one_worker(config: PPOConfig) -> Iterator[Problem]:
    for key in _models(config):
        if get_path(config, key).strategy == "local" and config.trainer.world_size > 1:
            yield _problem(
                config,
                f"{key}.strategy",
                f"runs in one process, but there are {config.trainer.world_size} "
                f"workers (trainer.nnodes={config.trainer.nnodes} x trainer.n_gpus_per_node="
                f"{config.trainer.n_gpus_per_node}). Use fsdp2, or one worker.",
                "trainer.n_gpus_per_node",
            )


def zero_roles(config: PPOConfig) -> Iterator[tuple[str, Any, Any, bool]]:
    """(key, section, sharding section, trained?) of the roles that run on DeepSpeed."""
    shared = config.actor_rollout_ref
    found = [(ACTOR, shared.actor, shared.actor.fsdp_config, True)]
    if config.uses_reference:
        found.append((REF, shared.ref, shared.ref.fsdp_config, False))
    if config.uses_critic:
        found.append(("critic", config.critic, config.critic.model.fsdp_config, True))
    if config.reward_model.enable:
        found.append((RM, config.reward_model, config.reward_model.model.fsdp_config, False))
    return (entry for entry in found if entry[1].strategy == "deepspeed")


@rule
def zero_stage_has_what_is_offloaded(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, is_trained in zero_roles(config):
        zero, stage = role.deepspeed, f"{key}.deepspeed.zero_stage"
        if zero.offload_param and zero.zero_stage != 3:
            yield _problem(
                config,
                f"{key}.deepspeed.offload_param",
                f"with {stage}={zero.zero_stage}: weights that are whole on every rank cannot be kept in host memory "
                f"during training. Set {stage}=3, or fsdp_config.param_offload, which moves them between phases.",
                stage,
            )
        if zero.offload_optimizer and zero.zero_stage == 0 and is_trained:
            yield _problem(
                config,
                f"{key}.deepspeed.offload_optimizer",
                f"with {stage}=0: without ZeRO the optimizer is not DeepSpeed's. Set {stage} to 1, 2 or 3, or "
                "fsdp_config.optimizer_offload, which moves its state between updates.",
                stage,
            )


@rule
def zero_keeps_fp32_weights(config: PPOConfig) -> Iterator[Problem]:
    for key, role, sharding, is_trained in zero_roles(config):
        if is_trained and role.deepspeed.zero_stage and sharding.master_dtype != "fp32":
            name = f"{'critic.model' if key == 'critic' else key}.fsdp_config.model_dtype"
            yield _problem(
                config,
                name,
                f"with {key}.strategy=deepspeed: the sharded optimizer keeps the weights in fp32. Set it to fp32; "
                "mixed_precision.param_dtype is the format of forward and backward.",
                f"{key}.strategy",
            )


@rule
def zero_optimizer_can_leave_the_device(config: PPOConfig) -> Iterator[Problem]:
    for key, role, sharding, is_trained in zero_roles(config):
        leaves = sharding.param_offload or sharding.optimizer_offload
        zero = role.deepspeed
        if config.trainer.device != "cuda" or not is_trained or not leaves or zero.offload_optimizer:
            continue
        if zero.zero_stage == 1 and sharding.compute_dtype == "bf16":
            yield _problem(
                config,
                f"{key}.deepspeed.zero_stage",
                "in bf16 with fsdp_config.param_offload or optimizer_offload: DeepSpeed's optimizer of this stage "
                "stays on the device. Use zero_stage=2, or deepspeed.offload_optimizer=true.",
            )


@rule
def second_copies_of_slices_divide_the_workers(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, _ in zero_roles(config):
        size, world = role.deepspeed.zero_hpz_partition_size, config.trainer.world_size
        if role.deepspeed.zero_stage == 3 and world % size:
            yield _problem(
                config,
                f"{key}.deepspeed.zero_hpz_partition_size",
                f"does not divide the {world} workers. Choose a divisor of {world}, usually those of one machine.",
                "trainer.n_gpus_per_node",
            )


@rule
def deepspeed_config_leaves_alone_what_verl_decides(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _, _ in zero_roles(config):
        for name, value, way_out in conflicts(role.deepspeed.config):
            text = f"{key}.deepspeed.config.{name}={show(value)} is decided by verl: {way_out}."
            yield Problem(f"{key}.deepspeed.config", text)


@rule
def local_controller_has_one_node(config: PPOConfig) -> Iterator[Problem]:
    if config.trainer.controller != "local":
        return
    keys = ["trainer.nnodes"] + ([] if config.actor_rollout_ref.hybrid_engine else [f"{ROLLOUT}.nnodes"])
    for key in keys:
        if get_path(config, key) > 1:
            yield _problem(
                config,
                key,
                "with trainer.controller=local: forked processes stay on one machine. Use trainer.controller=ray.",
                "trainer.controller",
            )


@rule
def servers_of_several_nodes_can_be_reached(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    is_local = rollout.server_host in ("localhost", "::1") or rollout.server_host.startswith("127.")
    place = "trainer" if config.actor_rollout_ref.hybrid_engine else ROLLOUT
    nodes = len(config.rollout_processes)
    if rollout.mode == "async" and nodes > 1 and is_local:
        yield _problem(
            config,
            f"{ROLLOUT}.server_host",
            f"with {place}.nnodes={nodes}: the driver could not reach the rollout servers of other "
            "nodes. Use 0.0.0.0; the servers then ask for a key that the driver makes up.",
            f"{place}.nnodes",
        )


@rule
def an_adapter_alone_stays_within_its_process(config: PPOConfig) -> Iterator[Problem]:
    shared, key = config.actor_rollout_ref, f"{ROLLOUT}.lora_sync"
    if shared.model.lora_rank and shared.rollout.lora_sync == "adapter" and not shared.hybrid_engine:
        yield _problem(
            config,
            key,
            "with actor_rollout_ref.hybrid_engine=false: weights travel to devices of the rollout's own merged. Use "
            "merge or auto, which then means merge.",
            "actor_rollout_ref.hybrid_engine",
        )


@rule
def shared_prompts_are_packed(config: PPOConfig) -> Iterator[Problem]:
    switches = {"actor_rollout_ref.model": f"{ACTOR}.use_remove_padding"}
    if config.uses_critic:
        switches["critic.model"] = "critic.model.use_remove_padding"
    for model, switch in switches.items():
        if get_path(config, model).use_prefix_sharing and not get_path(config, switch):
            yield _problem(
                config,
                f"{model}.use_prefix_sharing",
                f"with {switch}=false: padded rows stand side by side and each runs its own prompt. "
                f"Set {model}.use_remove_padding=true too.",
                switch,
            )


@rule
def an_adapter_to_go_on_from_has_a_rank(config: PPOConfig) -> Iterator[Problem]:
    for model in ("actor_rollout_ref.model", *(["critic.model"] if config.uses_critic else [])):
        if get_path(config, model).lora_adapter_path and not get_path(config, model).lora_rank:
            yield _problem(
                config,
                f"{model}.lora_adapter_path",
                f"with {model}.lora_rank=0, which trains all weights: set lora_rank and lora_alpha to those of its "
                "adapter_config.json, or leave the path out.",
                f"{model}.lora_rank",
            )


@rule
def triton_kernels_have_a_cuda_device(config: PPOConfig) -> Iterator[Problem]:
    model, place = config.actor_rollout_ref.model, "actor_rollout_ref.model"
    wanted = {
        f"{place}.use_liger": (model.use_liger, "Set it to false"),
        f"{place}.fused_kernel_options.impl_backend": (
            model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton",
            "Use torch, which computes the same",
        ),
    }
    for key, (is_wanted, way_out) in wanted.items():
        if is_wanted and config.trainer.device != "cuda":
            yield _problem(
                config,
                key,
                f"with trainer.device={config.trainer.device}: liger's Triton kernels (`pip install 'verl[liger]'`) "
                f"run on CUDA devices only. {way_out}, or set trainer.device=cuda.",
                "trainer.device",
            )


# ------------------------------------------------------------------------------------------------- run and resume


@rule
def resume_path_is_a_step_folder(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in (trainer.resume_from_path or ""):
        yield _problem(
            config,
            "trainer.resume_from_path",
            "with trainer.resume_mode=resume_path: give the folder of one checkpoint, .../global_step_N.",
            "trainer.resume_mode",
        )


@rule
def resumable_checkpoints_hold_what_is_loaded(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        extra = [part for part in role.checkpoint.load_contents if part not in role.checkpoint.save_contents]
        if extra and config.trainer.save_freq > 0:
            yield _problem(
                config,
                f"{key}.checkpoint.load_contents",
                f"asks for {', '.join(extra)}, which "
                f"{key}.checkpoint.save_contents={role.checkpoint.save_contents} does not write: a run "
                f"could not resume from its own checkpoints.",
                f"{key}.checkpoint.save_contents",
            )


@rule
def custom_class_has_a_name(config: PPOConfig) -> Iterator[Problem]:
    for path, name in (
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("data.sampler.class_path", "data.sampler.class_name"),
        (f"{ROLLOUT}.agent.custom_async_server.path", f"{ROLLOUT}.agent.custom_async_server.name"),
    ):
        if get_path(config, path) and not get_path(config, name):
            yield _problem(
                config, name, f"with {path}={get_path(config, path)}: name the class to take from the file.", path
            )
