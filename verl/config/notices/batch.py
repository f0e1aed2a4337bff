"""Batch sizes and budgets that nothing reads."""

from collections.abc import Iterator

from verl.config.base import get_path
from verl.config.notices.base import IsGiven, notice, unread
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, REF, RM, ROLLOUT, trained_roles


@notice
def micro_batches_are_cut_by_tokens(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
    yield from unread(config, by_tokens, is_given, "micro-batches are cut by tokens (use_dynamic_bsz)")
    yield from unread(config, by_count, is_given, "micro-batches are cut by count (use_dynamic_bsz=false)")


@notice
def old_log_probs_are_the_samplers(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.algorithm.rollout_correction.bypass_mode:
        names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
        why = "algorithm.rollout_correction.bypass_mode=true computes no old log-probs"
        keys = [key for key in (f"{ROLLOUT}.log_prob_{name}" for name in names) if get_path(config, key) is not None]
        yield from unread(config, keys, is_given, why)


@notice
def no_prompt_is_shared(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
            yield from unread(config, key, is_given, f"{ROLLOUT}.n=1 response a prompt has nothing to share with")
        elif splits and all(split.size == 1 for split in splits):
            yield from unread(config, key, is_given, "micro-batches of one row have nothing to share with")


@notice
def some_ranks_have_no_rows(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key, role, n in trained_roles(config):
        rows, ranks = role.ppo_mini_batch_size * n, config.dp_size(role)
        if rows < ranks:
            yield (
                f"{key}.ppo_mini_batch_size={role.ppo_mini_batch_size} x {ROLLOUT}.n={n} = {rows} responses a "
                f"mini-batch on {ranks} data-parallel ranks: {ranks - rows} of them have nothing to do at each step"
            )


@notice
def response_window_is_the_rollouts(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    length = config.actor_rollout_ref.rollout.response_length
    if length != config.data.max_response_length:
        yield from unread(config, ["data.max_response_length"], is_given, f"{ROLLOUT}.response_length={length} decides")


@notice
def all_groups_are_trained_on(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.algorithm.filter_groups.enable:
        names = ("metric", "low", "high", "min_std", "max_num_gen_batches")
        keys = [f"algorithm.filter_groups.{name}" for name in names]
        yield from unread(config, keys, is_given, "algorithm.filter_groups.enable=false trains on every group")
    elif config.reward_model.launch_reward_fn_async:
        why = "algorithm.filter_groups chooses groups by their rewards before anything else is computed"
        yield from unread(config, [f"{RM}.launch_reward_fn_async"], is_given, why)
