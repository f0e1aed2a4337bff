"""Validators of batch arithmetic: prompts, mini-batches, micro-batches and token budgets."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import (
    ACTOR,
    REF,
    RM,
    ROLLOUT,
    IsGiven,
    problem,
    scoring_roles,
    trained_roles,
    unused,
    validator,
)
from verl.config.ppo import PPOConfig


@validator("error")
def mini_batch_size_divides_train_batch_size(config: PPOConfig) -> Iterator[Problem]:
    prompts = config.prompts_per_update
    has_other = config.data.gen_batch_size and not config.algorithm.filter_groups.enable
    source = "data.gen_batch_size" if has_other else "data.train_batch_size"
    for key, role, _ in trained_roles(config):
        name, mini = f"{key}.ppo_mini_batch_size", role.ppo_mini_batch_size
        if mini > prompts:
            yield problem(
                config,
                name,
                f"is larger than {source}={prompts}: no mini-batch could be filled. "
                f"Lower the first or raise the second.",
                source,
            )
        elif prompts % mini:
            yield problem(
                config,
                name,
                f"does not divide {source}={prompts}: {prompts % mini} prompts would be left "
                f"over at every step. Choose a divisor of {prompts}.",
                source,
            )


@validator("error")
def micro_batch_size_within_mini_batch_of_a_rank(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, ranks = role.ppo_micro_batch_size_per_gpu, config.dp_size(role)
        rows = -(-role.ppo_mini_batch_size * n // ranks)
        if not role.use_dynamic_bsz and micro and micro > rows:
            yield problem(
                config,
                f"{key}.ppo_micro_batch_size_per_gpu",
                f"is larger than the {rows} responses of a rank's mini-batch ({key}.ppo_mini_batch_size="
                f"{role.ppo_mini_batch_size} x {ROLLOUT}.n={n} / {ranks} data-parallel ranks). Lower it to {rows}, or "
                "raise ppo_mini_batch_size.",
                f"{key}.ppo_mini_batch_size",
                f"{ROLLOUT}.n",
            )


@validator("error")
def micro_batch_size_given_once(config: PPOConfig) -> Iterator[Problem]:
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
                f"doubt, or set {switch}=true and split by tokens ({budget}).",
            )


def _switch(name: str) -> str:
    section = name.rpartition(".")[0]
    return f"{section}.log_prob_use_dynamic_bsz" if section == REF else f"{section}.use_dynamic_bsz"


@validator("error")
def token_budget_holds_longest_sequence(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.longest_sequence
    for name, budget, dynamic, _ in scoring_roles(config):
        section = name.rpartition(".")[0]
        # old log-probs are the actor's to compute
        sp = get_path(config, ACTOR if section == ROLLOUT else section).ulysses_sequence_parallel_size
        if dynamic and get_path(config, budget) * sp < longest:
            shared = f"x ulysses_sequence_parallel_size={sp} " if sp > 1 else ""
            yield problem(
                config,
                budget,
                f"{shared}cannot hold one row of {rollout.prompt_length} prompt and {rollout.response_length} "
                f"response tokens = {longest}. Raise it to {-(-longest // sp)} or more, or shorten "
                f"data.max_prompt_length or data.max_response_length.",
                "data.max_prompt_length",
                "data.max_response_length",
            )


@validator("error")
def skip_old_log_probs_requires_one_optimizer_step(config: PPOConfig) -> Iterator[Problem]:
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.skip_old_log_probs"
    if not actor.skip_old_log_probs:
        return
    steps = config.prompts_per_update // actor.ppo_mini_batch_size * actor.ppo_epochs
    if steps > 1:
        yield problem(
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
            yield problem(config, key, f"with {early}=true: {why}. Set one of them to false.", early)


@validator("error")
def prefix_sharing_requires_remove_padding(config: PPOConfig) -> Iterator[Problem]:
    switches = {"actor_rollout_ref.model": f"{ACTOR}.use_remove_padding"}
    if config.uses_critic:
        switches["critic.model"] = "critic.model.use_remove_padding"
    for model, switch in switches.items():
        if get_path(config, model).use_prefix_sharing and not get_path(config, switch):
            yield problem(
                config,
                f"{model}.use_prefix_sharing",
                f"with {switch}=false: padded rows do not share tokens, and each runs its own prompt. "
                f"Set {model}.use_remove_padding=true too.",
                switch,
            )


# -- Batch sizes and budgets that nothing reads ----------------------------------------------------------------------


@validator("warning")
def micro_batch_size_or_token_budget_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    shared, critic = config.actor_rollout_ref, config.critic
    cuts = [
        (shared.actor.use_dynamic_bsz, f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
        *(
            (
                section.log_prob_use_dynamic_bsz,
                f"{key}.log_prob_micro_batch_size_per_gpu",
                f"{key}.log_prob_max_token_len_per_gpu",
            )
            for key, section in ((ROLLOUT, shared.rollout), *([(REF, shared.ref)] if config.scores_reference else []))
        ),
        *(
            (critic.use_dynamic_bsz, f"critic.{kind}_micro_batch_size_per_gpu", f"critic.{kind}_max_token_len_per_gpu")
            for kind in (("ppo", "forward") if config.uses_critic else ())
        ),
    ]
    rm = config.reward_model
    if rm.enable:
        cuts.append((rm.use_dynamic_bsz, f"{RM}.micro_batch_size_per_gpu", f"{RM}.forward_max_token_len_per_gpu"))
    by_tokens = [size for dynamic, size, _ in cuts if dynamic]
    leader = f"{ACTOR}.ppo_max_token_len_per_gpu"  # others follow it: it is read if any of them is
    by_count = [budget for dynamic, _, budget in cuts if not dynamic and budget != leader]
    if not any(dynamic for dynamic, _, _ in cuts):
        by_count.append(leader)
    yield from unused(config, by_tokens, is_given, "micro-batches are split by tokens (use_dynamic_bsz)")
    yield from unused(config, by_count, is_given, "micro-batches are split by count (use_dynamic_bsz=false)")


@validator("warning")
def log_prob_batching_unused_with_bypass_mode(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.algorithm.rollout_correction.bypass_mode:
        names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
        why = "algorithm.rollout_correction.bypass_mode=true computes no old log-probs"
        keys = [key for key in (f"{ROLLOUT}.log_prob_{name}" for name in names) if get_path(config, key) is not None]
        yield from unused(config, keys, is_given, why)


@validator("warning")
def prefix_sharing_without_shared_prompts(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    """Of one response a prompt there is nothing to share, and in micro-batches of one row none meets another."""
    shared, critic = config.actor_rollout_ref, config.critic
    passes = {
        "actor_rollout_ref.model": [shared.actor.update_split, shared.rollout.log_prob_split],
        "critic.model": [critic.update_split, critic.forward_split] if config.uses_critic else [],
    }
    if config.scores_reference:
        passes["actor_rollout_ref.model"].append(shared.ref.log_prob_split)
    for model, splits in passes.items():
        key = [f"{model}.use_prefix_sharing"] if get_path(config, model).use_prefix_sharing else []
        if shared.rollout.n == 1:
            yield from unused(config, key, is_given, f"{ROLLOUT}.n=1 response a prompt has nothing to share with")
        elif splits and all(split.size == 1 for split in splits):
            yield from unused(config, key, is_given, "micro-batches of one row have nothing to share with")


@validator("warning")
def mini_batch_smaller_than_dp_size(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        rows, ranks = role.ppo_mini_batch_size * n, config.dp_size(role)
        if rows < ranks:
            text = (
                f"{key}.ppo_mini_batch_size={role.ppo_mini_batch_size} x {ROLLOUT}.n={n} = {rows} responses a "
                f"mini-batch on {ranks} data-parallel ranks: {ranks - rows} of them have nothing to do at each step"
            )
            yield Problem(f"{key}.ppo_mini_batch_size", text)


@validator("warning")
def max_response_length_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    length = config.actor_rollout_ref.rollout.response_length
    if length != config.data.max_response_length:
        yield from unused(config, ["data.max_response_length"], is_given, f"{ROLLOUT}.response_length={length} decides")


@validator("warning")
def filter_groups_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.algorithm.filter_groups.enable:
        names = ("metric", "low", "high", "min_std", "max_num_gen_batches")
        keys = [f"algorithm.filter_groups.{name}" for name in names]
        yield from unused(config, keys, is_given, "algorithm.filter_groups.enable=false trains on every group")
    elif config.reward_model.launch_reward_fn_async:
        why = "algorithm.filter_groups chooses groups by their rewards before anything else is computed"
        yield from unused(config, [f"{RM}.launch_reward_fn_async"], is_given, why)
