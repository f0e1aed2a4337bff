"""Batch arithmetic of a run, from prompts to optimizer steps, and the batch that cannot be filled.

Prompts -> samples -> mini-batches -> micro-batches -> optimizer steps -> steps of the run. Every number comes with the
options it depends on. Needs a configuration that has passed its validators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl.batch.micro_batching import MicroBatching
from verl.config.base import Problem
from verl.config.checks.base import ACTOR, REF, RM, ROLLOUT, models, trained_roles
from verl.config.checks.batch import counted, optimizer_steps
from verl.config.ppo import PPOConfig
from verl.preflight.report import Number

if TYPE_CHECKING:
    from verl.preflight.data import Preview


CPU_TOKENS = 1024


"""Most tokens of a forward pass on a CPU, except for a single longer row."""


_WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")


def derivation(config: PPOConfig, data: Preview) -> list[Number]:
    """Return all numbers, from a prompt to the end of the run."""
    return [*_batch(config), *_workers(config), *_updates(config), *_scoring(config), *_run(config, data)]


def prompts_key(config: PPOConfig) -> str:
    """Return the option that sets the number of prompts of a step."""
    return "data.gen_batch_size" if config.data.gen_batch_size else "data.train_batch_size"


def longest_row(config: PPOConfig) -> int:
    """Return the most tokens of prompt and response together."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.prompt_length + rollout.response_length


def _batch(config: PPOConfig) -> Iterator[Number]:
    n, prompts = config.actor_rollout_ref.rollout.n, config.prompts_per_update
    key = "data.train_batch_size" if config.algorithm.filter_groups.enable else prompts_key(config)
    yield Number("prompts", prompts, f"{counted(prompts, 'prompt')} a step", (key,))
    if config.algorithm.filter_groups.enable:
        generated = config.data.prompts_per_step
        metric = config.algorithm.filter_groups.metric
        text = f"generated {generated} at a time, until {prompts} groups differ in {metric}"
        yield Number("generated", generated, text, (prompts_key(config), "algorithm.filter_groups.enable"))
    text = f"{prompts} prompts x {counted(n, 'response')} = {prompts * n:,} samples"
    yield Number("samples", prompts * n, text, (key, f"{ROLLOUT}.n"))
    longest = longest_row(config)
    text = (
        f"at most {config.data.max_prompt_length} + {config.actor_rollout_ref.rollout.response_length} = {longest} "
        f"tokens a sample, {prompts * n * longest:,} a step"
    )
    yield Number("tokens", longest, text, ("data.max_prompt_length", "data.max_response_length"))


def _workers(config: PPOConfig) -> Iterator[Number]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    text = f"{trainer.nnodes} x {trainer.n_gpus_per_node} = {counted(trainer.world_size, 'worker')} on {trainer.device}"
    yield Number("workers", trainer.world_size, text, _WORLD)
    for key, section in models(config).items():
        dp, sp = config.dp_size(section), section.ulysses_sequence_parallel_size
        text = (
            f"{counted(trainer.world_size, 'worker')} / {sp} to a sequence = {counted(dp, 'data-parallel rank')}; "
            f"{section.strategy}"
        )
        yield Number(f"{_short(key)} dp", dp, text, (*_WORLD, f"{key}.ulysses_sequence_parallel_size"))
    processes = sum(config.rollout_processes)
    tp = 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size
    pp = pipeline_stages(config)
    replicas = max(1, processes // (tp * pp))
    stages = f" x {pp} pipeline stages" if pp > 1 else ""
    text = (
        f"{counted(processes, 'worker')} / {tp} to a copy{stages} = {_many(replicas, 'copy', 'copies')} of "
        f"{rollout.name}"
    )
    keys = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node") if config.rollout_beside else _WORLD
    yield Number("rollout", replicas, text, (*keys, f"{ROLLOUT}.tensor_model_parallel_size"))
    rows = -(-config.data.prompts_per_step * rollout.n // replicas)
    text = f"{counted(rows, 'sample')} a copy, up to {rows * longest_row(config):,} tokens in its cache"
    yield Number("rollout load", rows, text, (prompts_key(config), f"{ROLLOUT}.n"))


def pipeline_stages(config: PPOConfig) -> int:
    """Pipeline-parallel size of the rollout engine."""
    rollout = config.actor_rollout_ref.rollout
    return (
        ((rollout.engine_kwargs.get("vllm") or {}).get("pipeline_parallel_size") or 1) if rollout.name == "vllm" else 1
    )


def _updates(config: PPOConfig) -> Iterator[Number]:
    for key, role, n in trained_roles(config):
        name, prompts, mini = _short(key), config.prompts_per_update, role.ppo_mini_batch_size
        ranks, steps, minis = config.dp_size(role), optimizer_steps(config, role), prompts // mini
        text = f"{prompts} prompts / {mini} = {_many(minis, 'mini-batch', 'mini-batches')}"
        yield Number(f"{name} mini", minis, text, (prompts_key(config), f"{key}.ppo_mini_batch_size"))
        text = (
            f"{_many(minis, 'mini-batch', 'mini-batches')} x {_many(role.ppo_epochs, 'pass', 'passes')} = "
            f"{counted(steps, 'optimizer step')} for each training step"
        )
        yield Number(f"{name} updates", steps, text, (f"{key}.ppo_mini_batch_size", f"{key}.ppo_epochs"))
        rows = -(-mini * n // ranks)
        text = f"{mini} prompts x {n} / {counted(ranks, 'rank')} = {counted(rows, 'sample')} a rank in each mini-batch"
        yield Number(f"{name} rows", rows, text, (f"{key}.ppo_mini_batch_size", f"{ROLLOUT}.n", *_WORLD))
        what, sp = "gradients are accumulated over", role.ulysses_sequence_parallel_size
        yield _micro(config, f"{name} micro", rows, role.update_split, sp, _update_keys(key, role), what)


def _update_keys(key: str, role: Any) -> tuple[str, ...]:
    if role.use_dynamic_bsz:
        return (f"{key}.use_dynamic_bsz", f"{key}.ppo_max_token_len_per_gpu")
    return (f"{key}.ppo_micro_batch_size_per_gpu",)


def rows_of_a_forward(config: PPOConfig, split: MicroBatching, rows: int, sp: int) -> int:
    """Return how many of ``rows`` rows of maximum length one forward pass holds; ``sp`` devices share it."""
    size = split.size if split.size is not None else (split.max_tokens or 0) * sp // longest_row(config)
    if config.trainer.device == "cpu":
        size = min(size, CPU_TOKENS // longest_row(config))
    return max(1, min(size, rows))


def _micro(
    config: PPOConfig, name: str, rows: int, split: MicroBatching, sp: int, keys: tuple[str, ...], what: str
) -> Number:
    size, longest = rows_of_a_forward(config, split, rows, sp), longest_row(config)
    passes = -(-rows // size)
    bound = "" if split.size is not None else f" (of at most {split.max_tokens:,})"
    capped = f"; a CPU takes {CPU_TOKENS:,} at a time" if config.trainer.device == "cpu" and size < rows else ""
    text = (
        f"{counted(rows, 'sample')} / {size} = {what} {_many(passes, 'micro-batch', 'micro-batches')}, each up "
        f"to {size * longest // sp:,} tokens a device{bound}{capped}"
    )
    return Number(name, passes, text, keys)


def _scoring(config: PPOConfig) -> Iterator[Number]:
    shared = config.actor_rollout_ref
    rows = config.prompts_per_update * shared.rollout.n
    passes = []
    if shared.actor.skip_old_log_probs:
        yield Number("old log-probs", 0, "those of the update's own forwards", (f"{ACTOR}.skip_old_log_probs",))
    elif config.algorithm.rollout_correction.bypass_mode:
        yield Number("old log-probs", 0, "those of the rollout engine", ("algorithm.rollout_correction.bypass_mode",))
    else:
        passes.append(("old log-probs", ROLLOUT, shared.rollout.log_prob_split, shared.actor, "log_prob"))
    if config.scores_reference:
        passes.append(("ref log-probs", REF, shared.ref.log_prob_split, shared.ref, "log_prob"))
    if config.uses_critic:
        passes.append(("values", "critic", config.critic.forward_split, config.critic, "forward"))
    if config.reward_model.enable:
        passes.append(("reward model", RM, config.reward_model.forward_split, config.reward_model, "forward"))
    for name, key, split, section, prefix in passes:
        rank_rows = -(-rows // config.dp_size(section))
        size = f"{key}.micro_batch_size_per_gpu" if key == RM else f"{key}.{prefix}_micro_batch_size_per_gpu"
        keys = (size,) if split.size is not None else (f"{key}.{prefix}_max_token_len_per_gpu",)
        yield _micro(config, name, rank_rows, split, section.ulysses_sequence_parallel_size, keys, "scored in")


def _run(config: PPOConfig, data: Preview) -> Iterator[Number]:
    trainer, prompts = config.trainer, config.data.prompts_per_step
    if data.train_rows is None:
        steps, epochs = trainer.total_training_steps, trainer.total_epochs
        text = (
            counted(steps, "step") if steps else f"{counted(epochs, 'epoch')}; the files' rows cannot be counted here"
        )
        yield Number("run", steps, text, ("trainer.total_training_steps" if steps else "trainer.total_epochs",))
        return
    per_epoch = data.train_rows // prompts
    left = data.train_rows - per_epoch * prompts
    text = f"{data.train_rows:,} rows / {prompts} prompts = {counted(per_epoch, 'step')} an epoch"
    text += f"; {left} rows are left over in each" if left else ""
    yield Number("epoch", per_epoch, text, ("data.train_files", prompts_key(config)))
    total = total_steps(config, data)
    if trainer.total_training_steps:
        text = f"{counted(total, 'step')}, {total / max(1, per_epoch):.2g} epochs"
        yield Number("run", total, text, ("trainer.total_training_steps",))
    else:
        text = f"{per_epoch} x {counted(trainer.total_epochs, 'epoch')} = {counted(total or 0, 'step')}"
        yield Number("run", total, text, ("trainer.total_epochs",))
    updates = optimizer_steps(config, config.actor_rollout_ref.actor)
    yield Number(
        "updates", (total or 0) * updates, f"{(total or 0) * updates:,} optimizer steps of the actor in all", ()
    )


def total_steps(config: PPOConfig, data: Preview) -> int | None:
    """Return the training steps of the run; None if the rows cannot be counted."""
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    if data.train_rows is None:
        return None
    return data.train_rows // config.data.prompts_per_step * config.trainer.total_epochs


def _many(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


def _short(key: str) -> str:
    return {ACTOR: "actor", REF: "reference", RM: "reward model"}.get(key, key)


def unfilled_batch(config: PPOConfig, data: Preview) -> Iterator[Problem]:
    """Find a batch that is larger than the data; a run would stop."""
    batch, count, prompts = prompts_key(config), data.train_rows, config.data.prompts_per_step
    if count is not None and 0 < count < prompts:
        yield Problem(
            batch,
            f"{batch}={prompts} is larger than the {count} rows of data.train_files: no batch could be filled. Lower "
            "it or add prompts.",
            ("data.train_files",),
        )
