"""The batch arithmetic of a run in words: prompts -> responses -> mini-batches -> micro-batches -> optimizer steps."""

from typing import Any

from verl.batch.micro_batching import MicroBatching
from verl.config.checks.base import trained_roles
from verl.config.ppo import PPOConfig


def batch_plan(config: PPOConfig) -> str:
    """What one training step does, one line per stage. Assumes that the rules hold."""
    shared, prompts = config.actor_rollout_ref, config.prompts_per_update
    rows = prompts * shared.rollout.n
    workers = config.trainer.world_size
    lines = [
        f"one training step: {prompts} prompts x {shared.rollout.n} responses = {rows} rows on "
        f"{counted(workers, 'worker')}, {_each(rows, workers)}; at most {shared.rollout.prompt_length} + "
        f"{shared.rollout.response_length} tokens each"
    ]
    filtering = config.algorithm.filter_groups
    if filtering.enable:
        bound = f"at most {filtering.max_num_gen_batches}" if filtering.max_num_gen_batches else "without bound"
        drawn = f"{config.data.prompts_per_step} prompts x {shared.rollout.n} responses"
        lines.append(f"drawn: batches of {drawn}, {bound}, until {prompts} groups differ in {filtering.metric}")
    for key, role, n in trained_roles(config):
        ranks, split, mini = config.dp_size(role), role.update_split, role.ppo_mini_batch_size * n
        lines.append(
            f"{key.rpartition('.')[2]}: {counted(optimizer_steps(config, role), 'optimizer step')}, each over "
            f"{role.ppo_mini_batch_size} prompts x {n} = {mini} rows on {counted(ranks, 'rank')}"
            f"{_of_sp(role)}, {_each(mini, ranks, split)}, {_forwards(-(-mini // ranks), split)}"
        )
    scored = []
    if shared.actor.skip_old_log_probs:
        lines.append("old log-probs: those of the update's own forwards")
    elif config.algorithm.rollout_correction.bypass_mode:
        lines.append("old log-probs: those the responses were sampled with")
    else:
        scored.append(("old log-probs", shared.rollout.log_prob_split, config.dp_size(shared.actor)))
    if config.scores_reference:
        scored.append(("reference log-probs", shared.ref.log_prob_split, config.dp_size(shared.ref)))
    if config.uses_critic:
        scored.append(("values", config.critic.forward_split, config.dp_size(config.critic)))
    if config.reward_model.enable:
        scored.append(("reward model", config.reward_model.forward_split, config.dp_size(config.reward_model)))
    lines += [
        f"{what}: {rows} rows on {counted(ranks, 'rank')}, {_each(rows, ranks, split)}, "
        f"{_forwards(-(-rows // ranks), split)}"
        for what, split, ranks in scored
    ]
    return "\n".join(lines)


def optimizer_steps(config: PPOConfig, role: Any) -> int:
    """Optimizer steps of the ``actor`` or ``critic`` section in one training step."""
    return config.prompts_per_update // role.ppo_mini_batch_size * role.ppo_epochs


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _each(rows: int, ranks: int, split: MicroBatching | None = None) -> str:
    """How many rows a rank has. Forwards of so many tokens are balanced by cost, not by rows."""
    if ranks > 1 and split is not None and split.size is None:
        return f"about {rows / ranks:.3g} each"
    return f"{rows // ranks} each" if rows % ranks == 0 else f"{rows // ranks} or {rows // ranks + 1} each"


def _of_sp(role: Any) -> str:
    sp = role.ulysses_sequence_parallel_size
    return f" of {sp} workers" if sp > 1 else ""


def _forwards(rows: int, split: MicroBatching) -> str:
    if split.size is None:
        return f"in forwards of at most {split.max_tokens} tokens"
    return f"in {counted(-(-rows // split.size), 'forward')} of {min(split.size, rows)}"
