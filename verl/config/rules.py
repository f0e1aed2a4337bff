"""Checks that span options: each a small function named after its rule, all of them run, all problems told at once.

A rule reads the typed tree and yields ``Problem``s. To add one, write a function and decorate it with ``@rule``.
Range and choice of a single option are not rules: they stand with the option.
"""

from collections.abc import Callable, Iterator
from typing import Any

from verl.config.base import Config, Problem, get_path
from verl.config.build import show
from verl.config.ppo import PPOConfig
from verl.config.sampling_names import BY_HF, DECIDED, OF_WHOLE_RESPONSES, OWN
from verl.utils.deepspeed_keys import conflicts

Rule = Callable[[PPOConfig], Iterator[Problem]]
RULES: list[Rule] = []

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_NEED_SIBLINGS = ("grpo", "rloo", "grpo_passk", "opo", "gpg", "gdpo", "optimal_token_baseline")
_CLIPS_RATIOS = ("vanilla", "gspo", "clip_cov")
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
    if config.uses_reference:
        dynamic = shared.ref.log_prob_use_dynamic_bsz
        yield f"{REF}.{log_probs[0]}", f"{REF}.{log_probs[1]}", dynamic, config.dp_size(shared.ref)
    if config.uses_critic:
        ranks = config.dp_size(config.critic)
        for kind in ("ppo", "forward"):
            budget = f"critic.{kind}_max_token_len_per_gpu"
            yield f"critic.{kind}_micro_batch_size", budget, config.critic.use_dynamic_bsz, ranks


# ---------------------------------------------------------------------------------------------- batch arithmetic


@rule
def mini_batch_fits_into_the_train_batch(config: PPOConfig) -> Iterator[Problem]:
    prompts = config.data.prompts_per_step
    source = "data.gen_batch_size" if config.data.gen_batch_size else "data.train_batch_size"
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
def train_batch_spreads_evenly_over_workers(config: PPOConfig) -> Iterator[Problem]:
    trainer, n = config.trainer, config.actor_rollout_ref.rollout.n
    rows = config.data.prompts_per_step * n
    if rows % trainer.world_size:
        yield Problem(
            "data.train_batch_size",
            f"data.train_batch_size={config.data.train_batch_size} x {ROLLOUT}.n={n} = {rows} responses do not spread "
            f"evenly over {trainer.world_size} workers (trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}). Make the product a multiple of them.",
            ("data.gen_batch_size", f"{ROLLOUT}.n", "trainer.nnodes", "trainer.n_gpus_per_node"),
        )


@rule
def mini_batch_spreads_evenly_over_ranks(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        name, ranks = f"{key}.ppo_mini_batch_size", config.dp_size(role)
        if role.ppo_mini_batch_size * n % ranks:
            yield _problem(
                config,
                name,
                f"x {ROLLOUT}.n={n} = {role.ppo_mini_batch_size * n} responses do not spread evenly over "
                f"{ranks} data-parallel ranks. Make the product a multiple of {ranks}.",
                f"{ROLLOUT}.n",
                "trainer.nnodes",
                "trainer.n_gpus_per_node",
            )


@rule
def micro_batch_divides_the_mini_batch_of_a_rank(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, ranks = role.ppo_micro_batch_size_per_gpu, config.dp_size(role)
        if role.use_dynamic_bsz or not micro or role.ppo_mini_batch_size * n % ranks:
            continue
        name, rows = f"{key}.ppo_micro_batch_size_per_gpu", role.ppo_mini_batch_size * n // ranks
        also = (f"{key}.ppo_mini_batch_size", f"{ROLLOUT}.n")
        derivation = (
            f"({key}.ppo_mini_batch_size={role.ppo_mini_batch_size} x {ROLLOUT}.n={n} / {ranks} data-parallel ranks)"
        )
        if micro > rows:
            yield _problem(
                config,
                name,
                f"is larger than the {rows} responses of a rank's mini-batch {derivation}. "
                f"Lower it to {rows} or a divisor.",
                *also,
            )
        elif rows % micro:
            yield _problem(
                config,
                name,
                f"does not divide the {rows} responses of a rank's mini-batch {derivation}. "
                f"Choose a divisor of {rows}.",
                *also,
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
        sp = get_path(config, name.rpartition(".")[0]).get("ulysses_sequence_parallel_size", 1)
        if dynamic and get_path(config, budget) * sp < longest:
            yield _problem(
                config,
                budget,
                f"cannot hold one row of {rollout.prompt_length} prompt and {rollout.response_length} "
                f"response tokens = {longest}. Raise it to {longest} or more, or shorten data.max_prompt_length or "
                f"data.max_response_length.",
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
    if config.algorithm.adv_estimator == "optimal_token_baseline" and not get_path(config, key):
        yield _problem(
            config,
            key,
            "with algorithm.adv_estimator=optimal_token_baseline: the estimator weighs tokens by the sum of squared "
            "probabilities. Set it to true.",
            "algorithm.adv_estimator",
        )


# -------------------------------------------------------------------------------------------------------- hardware


@rule
def sequence_parallel_size_divides_the_workers(config: PPOConfig) -> Iterator[Problem]:
    sections: dict[str, Config] = {ACTOR: config.actor_rollout_ref.actor}
    if config.uses_reference:
        sections[REF] = config.actor_rollout_ref.ref
    if config.uses_critic:
        sections["critic"] = config.critic
    for key, role in sections.items():
        if config.trainer.world_size % role.ulysses_sequence_parallel_size:
            yield _problem(
                config,
                f"{key}.ulysses_sequence_parallel_size",
                f"does not divide the "
                f"{config.trainer.world_size} workers. Choose a divisor of {config.trainer.world_size}.",
                "trainer.n_gpus_per_node",
            )


@rule
def sharding_group_divides_the_workers(config: PPOConfig) -> Iterator[Problem]:
    world = config.trainer.world_size
    for key in (f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config", "critic.model.fsdp_config"):
        size = get_path(config, key).fsdp_size
        if size == 0 or size < -1 or (size > 0 and world % min(size, world)):
            yield _problem(
                config,
                f"{key}.fsdp_size",
                f"must be -1 (all ranks) or a divisor of the {world} workers.",
                "trainer.n_gpus_per_node",
            )


@rule
def local_strategy_has_one_worker(config: PPOConfig) -> Iterator[Problem]:
    sections = [ACTOR, *([REF] if config.uses_reference else []), *(["critic"] if config.uses_critic else [])]
    for key in sections:
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
