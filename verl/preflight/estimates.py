"""Batch arithmetic of a run, from prompts to optimizer steps, and the batch that cannot be filled.

Prompts -> samples -> mini-batches -> micro-batches -> optimizer steps -> steps of the run. Every number comes with the
options it depends on. Needs a configuration that has passed its validators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.batch import MicroBatching
from verl.config.base import Problem, get_path
from verl.config.checks.base import models, sharded, trained_roles
from verl.config.checks.batch import counted, optimizer_steps
from verl.config.model_info import MODEL, ModelFacts, facts_of
from verl.config.ppo import ACTOR, REF, RM, ROLLOUT, PPOConfig
from verl.preflight.machine import Machine, gpu_memory_here
from verl.preflight.report import Finding, Number, PhaseMemory, Report, format_bytes
from verl.telemetry.memory import host_memory

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


# -- Estimate of the memory of each phase of a step on one device, part by part --------------------------------------


PROCESS = {"cpu": 560 << 20, "cuda": 600 << 20}


"""Bytes of a process before any model: libraries in host memory, or the CUDA context on a device."""


_KEEP_ON_CPU = 1 << 30


"""Largest activations that are stored on a CPU even with gradient checkpointing."""


_SMALL_BLOCK = 32 << 20


"""Smaller freed blocks stay with the C library until malloc_trim, before the rollout engine sleeps."""


_CERTAIN = 1.25


"""Ratio of estimate to memory above which it is an error; estimates were within 0.8 to 1.2 of measurements."""


_STAYS = {"checkpoint": 0.9, "rollout": 0.6}


"""Phase after an update -> measured share of such blocks that is still allocated."""


def tokens_of_forward(config: PPOConfig, split: MicroBatching, rows: int, sp: int) -> int:
    """Return the tokens of the largest forward pass on one device, padding included."""
    return rows_of_a_forward(config, split, rows, sp) * longest_row(config) // sp


def memory_plan(config: PPOConfig, gpu_bytes: int | None = None) -> list[PhaseMemory]:
    """Return the bytes on one device (on a CPU: of one process) in each phase; empty without a local config.json."""
    roles = {role.key: role for role in roles_memory(config)}
    actor = roles.get(ACTOR)
    if actor is None:
        return []
    device = "cpu" if config.trainer.device == "cpu" else "cuda"
    process = {"process": PROCESS[device]}
    shared, samples = config.actor_rollout_ref, config.prompts_per_update * config.actor_rollout_ref.rollout.n
    rollout = _rollout(config, actor.facts, gpu_bytes)
    awake = {} if shared.rollout.free_cache_engine or not shared.hybrid_engine else dict(rollout)
    rows = -(-samples // config.dp_size(shared.actor))
    freed = _freed(config, roles) if device == "cpu" else 0
    loading = sum(_small(role.facts, role.weights) for role in roles.values()) if device == "cpu" else 0
    phases = [PhaseMemory("start", process | _resident(roles, ACTOR, started=False) | {"freed": loading})]
    if shared.hybrid_engine:
        # the engine reuses freed blocks
        left = max(0, int(_STAYS["rollout"] * freed) - sum(rollout.values()))
        phases.append(PhaseMemory("rollout", process | _resident(roles, None) | rollout | {"freed": left}))
    passes = [("log-probs", ACTOR, shared.rollout.log_prob_split), ("ref log-probs", REF, shared.ref.log_prob_split)]
    if config.uses_critic:
        passes.append(("values", "critic", config.critic.forward_split))
    if config.reward_model.enable:
        passes.append(("reward model", RM, config.reward_model.forward_split))
    for name, key, split in passes:
        if key in roles:
            phases.append(
                PhaseMemory(
                    name, process | awake | _resident(roles, key) | _forward(config, roles[key], split, rows, device)
                )
            )
    for key in (ACTOR, "critic"):
        if key in roles:
            parts = process | awake | _resident(roles, key, updates=True) | _update(config, roles[key], device)
            phases.append(PhaseMemory(f"update {roles[key].name}", parts))
    saved = process | awake | _resident(roles, ACTOR)
    saved |= {f"{actor.name} optimizer": actor.optimizer, "freed": int(_STAYS["checkpoint"] * freed)}
    if shared.actor.checkpoint.async_save and device == "cpu":
        saved["copy to save"] = actor.weights + actor.optimizer
    if config.trainer.save_freq > 0:
        phases.append(PhaseMemory("checkpoint", saved))
    return [phase._replace(way_out=_way_out(config, phase)) for phase in phases]


def add_memory(report: Report, config: PPOConfig, machine: Machine) -> None:
    """Add the memory plan to a report, and a finding if it exceeds the memory there is."""
    gpu_bytes = machine.gpu_bytes or (
        gpu_memory_here() if machine.is_this and config.trainer.device == "cuda" else None
    )
    report.memory = memory_plan(config, gpu_bytes)
    if not report.memory:
        path = config.actor_rollout_ref.model.path
        report.memory_notes = [f"  not estimated: no local config.json of {MODEL}.path={path}"]
        return
    facts = facts_of(config, "actor")
    counted = "counted from the weights' headers" if facts.is_stored else "counted from config.json"
    report.memory_notes.append(f"  {facts.parameters / 1e6:,.1f}M parameters, {counted}")
    worst = max(report.memory, key=lambda phase: phase.total)
    if config.trainer.device == "cpu":
        workers = config.trainer.n_gpus_per_node * (1 if config.actor_rollout_ref.hybrid_engine else 2)
        needed, available = worst.total * workers, host_memory()
        report.memory_notes.append(f"  {workers} on this machine: {format_bytes(needed)} of {format_bytes(available)}")
        limit, key = f"{format_bytes(available)} of this machine", "trainer.n_gpus_per_node"
    elif gpu_bytes:
        needed, available = worst.total, gpu_bytes
        report.memory_notes.append(
            f"  at most {needed / available:.0%} of a GPU with {format_bytes(available)}, in phase {worst.phase}"
        )
        limit, key = f"{format_bytes(available)} of a GPU (--gpu-mem)", f"{ACTOR}.fsdp_config.param_offload"
    else:
        report.memory_notes.append("  add --gpu-mem 80GB (and --gpus 8) to compare this with a GPU")
        return
    if needed > available:
        level = "error" if machine.is_gpu_given or needed > _CERTAIN * available else "warning"
        text = (
            f"{MODEL}.path={config.actor_rollout_ref.model.path} needs about {format_bytes(needed)} in phase "
            f"{worst.phase}, "
            f"more than the {limit}. Most of it is {worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding(level, text, (f"{MODEL}.path", key, f"{ROLLOUT}.gpu_memory_utilization")))
    elif needed > 0.92 * available:
        text = (
            f"phase {worst.phase} needs about {format_bytes(needed)} of the {limit}: fragmentation may exceed it. "
            f"{worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding("warning", text, (f"{MODEL}.path", key)))


def _resident(
    roles: dict[str, RoleMemory], busy: str | None, updates: bool = False, started: bool = True
) -> dict[str, int]:
    """Return weights, gradients and optimizer states on the device while the role ``busy`` runs."""
    parts = {
        f"{role.name} weights": role.weights for key, role in roles.items() if key == busy or not role.leaves_weights
    }
    for key, role in roles.items():
        if key == busy and updates or started and role.keeps_gradients:
            parts[f"{role.name} gradients"] = role.gradients
        if started and (key == busy and updates or not role.leaves_optimizer):
            parts[f"{role.name} optimizer"] = role.optimizer
    return parts


def _forward(config: PPOConfig, role: RoleMemory, split: MicroBatching, rows: int, device: str) -> dict[str, int]:
    sp = get_path(config, role.key).ulysses_sequence_parallel_size
    tokens = tokens_of_forward(config, split, rows, sp)
    parts = {"copies of weights": role.gathered, "activations": passing(role.facts, role.compute, tokens)}
    return parts | (
        {"logits": logits(role.facts, role.compute, _responses(config, tokens), device, False)}
        if role.key in (ACTOR, REF)
        else {}
    )


def _freed(config: PPOConfig, roles: dict[str, RoleMemory]) -> int:
    """Return the bytes of small blocks that the updates free."""
    largest = 0
    for key in (ACTOR, "critic"):
        if key in roles:
            role, parts = roles[key], _update(config, roles[key], "cpu")
            freed = 0 if role.keeps_gradients else role.gradients
            largest = max(largest, _small(role.facts, freed + parts.get("sums of gradients", 0)) + parts["activations"])
    return largest


def _small(facts: ModelFacts, size: int) -> int:
    """Return the share of ``size`` bytes over all weights that lies in matrices below ``_SMALL_BLOCK``."""
    per_number = size / max(1, facts.parameters)
    outside = facts.embedding * (1 if facts.is_tied else 2)
    found = outside if facts.embedding * per_number < _SMALL_BLOCK else 0
    found += facts.parameters - outside if facts.hidden * facts.inner * per_number < _SMALL_BLOCK else 0
    return int(found * per_number)


def _responses(config: PPOConfig, tokens: int) -> int:
    """Return how many of ``tokens`` tokens of whole rows are response tokens."""
    return tokens * config.actor_rollout_ref.rollout.response_length // longest_row(config)


def _update(config: PPOConfig, role: RoleMemory, device: str) -> dict[str, int]:
    section = get_path(config, role.key)
    model = config.actor_rollout_ref.model if role.key == ACTOR else config.critic.model
    sp = section.ulysses_sequence_parallel_size
    rows = -(-section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // config.dp_size(section))
    tokens = tokens_of_forward(config, section.update_split, rows, sp)
    recomputes = model.enable_gradient_checkpointing
    if device == "cpu" and activations(role.facts, role.compute, tokens, False) <= _KEEP_ON_CPU:
        recomputes = False
    kept = activations(role.facts, role.compute, tokens, recomputes)
    if model.enable_activation_offload and device != "cpu":
        kept = kept_bytes_per_token(role.facts, role.compute) * tokens
    parts = {"copies of weights": role.gathered, "activations": kept}
    if device == "cpu" and section.strategy.startswith("fsdp") and rows * longest_row(config) > tokens * sp:
        # gradients of several micro-batches are summed unsharded, and reduced with the last
        parts["sums of gradients"] = trained_parameters(config, role.key, role.facts) * BYTES["fp32"]
    if role.key == ACTOR:
        parts["logits"] = logits(role.facts, role.compute, _responses(config, tokens), device, True)
    return parts


def _rollout(config: PPOConfig, facts: ModelFacts, gpu_bytes: int | None) -> dict[str, int]:
    rollout = config.actor_rollout_ref.rollout
    size = BYTES.get(rollout.dtype, 2)
    parts_of = 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size * pipeline_stages(config)
    weights = facts.parameters * size // parts_of
    replicas = max(1, sum(config.rollout_processes) // parts_of)
    rows = -(-config.data.prompts_per_step * rollout.n // replicas)
    cache = min(rows, rollout.max_num_seqs) * longest_row(config) * facts.cached_numbers_per_token * size // parts_of
    if config.trainer.device != "cpu" and rollout.name != "hf" and gpu_bytes:
        # the engine allocates its share of the device, however little the samples need
        cache = max(0, int(gpu_bytes * rollout.gpu_memory_utilization) - weights)
    elif config.trainer.device != "cpu" and gpu_bytes:
        cache = min(cache, int(gpu_bytes * rollout.gpu_memory_utilization))
    return {"rollout weights": weights, "cache": cache}


def checkpoint_bytes(config: PPOConfig) -> int | None:
    """Return the bytes of one checkpoint of all trained roles on disk; None without a local config.json."""
    total = 0
    for role in roles_memory(config):
        if role.key not in (ACTOR, "critic"):
            continue
        section, facts = get_path(config, role.key), role.facts
        contents, trained = section.checkpoint.save_contents, trained_parameters(config, role.key, facts)
        sharding = section.model.fsdp_config if role.key == "critic" else section.fsdp_config
        kept = BYTES[sharding.master_dtype]
        total += trained * kept * ("model" in contents) + facts.parameters * kept * ("hf_model" in contents)
        total += 2 * trained * kept * ("optimizer" in contents)
    return total or None


def _way_out(config: PPOConfig, phase: PhaseMemory) -> str:
    """Return the options that reduce the largest part of a phase."""
    critic_is_busy = phase.phase in ("values", "update critic") or phase.largest.startswith("critic")
    key, model = ("critic", "critic.model") if critic_is_busy else (ACTOR, MODEL)
    section, place = get_path(config, key), "critic.model.fsdp_config" if critic_is_busy else f"{ACTOR}.fsdp_config"
    budget = "ppo_max_token_len_per_gpu" if section.use_dynamic_bsz else "ppo_micro_batch_size_per_gpu"
    recompute = f", or set {model}.enable_gradient_checkpointing=true"
    recompute = "" if get_path(config, model).enable_gradient_checkpointing else recompute
    on_cpu = config.trainer.device == "cpu"
    fewer = (
        f"a smaller {model}.path, or {model}.lora_rank"
        if on_cpu
        else f"more GPUs (trainer.n_gpus_per_node), or {model}.lora_rank"
    )
    offload = {name: "" if on_cpu else f"{place}.{name}_offload=true, " for name in ("param", "optimizer")}
    ways = {
        "process": "",
        "activations": f"lower {key}.{budget}{recompute}",
        "logits": f"lower {key}.{budget}",
        "copies of weights": fewer,
        "rollout weights": f"raise {ROLLOUT}.tensor_model_parallel_size, or set {ROLLOUT}.dtype=bfloat16",
        "cache": f"lower {ROLLOUT}.gpu_memory_utilization or {ROLLOUT}.max_num_seqs, or data.max_response_length",
        "freed": fewer,
        "sums of gradients": fewer,
        "copy to save": f"{ACTOR}.checkpoint.async_save=false",
        # of any role
        "weights": f"{offload['param']}{fewer}",
        "gradients": fewer,
        "optimizer": f"{offload['optimizer']}{key}.optim.optimizer=AdamW8bit, {fewer}",
    }
    return ways[phase.largest] if phase.largest in ways else ways[phase.largest.rpartition(" ")[2]]


# -- the parts: one role on one rank, one forward pass, from shapes alone --------------------------------------------
BYTES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}


_NORMED_HEADS = ("qwen3", "gemma3", "olmo2")


"""Families that normalise queries and keys."""


_LOGITS_CHUNK = {"cpu": 64 << 20, "cuda": 512 << 20}


class RoleMemory(NamedTuple):
    """Bytes of one role's engine on one rank."""

    name: str
    key: str
    weights: int
    """As they are stored."""
    gathered: int
    """Temporary copies of weights while layers compute."""
    gradients: int
    optimizer: int
    facts: ModelFacts
    compute: int
    """Bytes of a number in forward and backward."""
    leaves_weights: bool
    """Whether weights are offloaded to the host while the role is idle."""
    leaves_optimizer: bool
    keeps_gradients: bool
    """Whether their memory stays allocated between updates."""


def roles_memory(config: PPOConfig) -> list[RoleMemory]:
    """Return every role with its own model and a local config.json."""
    names = {ACTOR: "actor", REF: "ref", "critic": "critic", RM: "reward_model"}
    found = []
    for key, place in sharded(config).items():
        facts = facts_of(config, names[key])
        borrows = (
            key == REF
            and config.actor_rollout_ref.model.lora_rank
            and not (config.actor_rollout_ref.ref.model or {}).get("path")
        )
        if facts is not None and not borrows:
            found.append(_role(config, key, place, facts))
    return found


def trained_parameters(config: PPOConfig, key: str, facts: ModelFacts) -> int:
    """Return the number of trained parameters of a role."""
    if key not in (ACTOR, "critic"):
        return 0
    rank = get_path(config, MODEL if key == ACTOR else "critic.model").lora_rank
    if not rank:
        return facts.parameters
    wide, narrow = facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    sides = (facts.hidden + wide) * 2 + (facts.hidden + narrow) * 2 + 3 * (facts.hidden + facts.inner)
    return facts.layers * rank * sides


def _role(config: PPOConfig, key: str, place: str, facts: ModelFacts) -> RoleMemory:
    section, sharding = get_path(config, key), get_path(config, place)
    trained, numbers = trained_parameters(config, key, facts), facts.parameters
    compute = BYTES[sharding.compute_dtype]
    kept = BYTES[sharding.master_dtype] if trained else compute
    frozen_bytes = (numbers - trained) * compute if 0 < trained < numbers else 0
    own = frozen_bytes + trained * kept if trained else numbers * compute
    ranks = _shards(config, section, sharding)
    on_cpu = config.trainer.device == "cpu"
    moments = (2 if getattr(getattr(section, "optim", None), "optimizer", "") == "AdamW8bit" else 2 * kept) * trained
    gradients = trained * kept
    if section.strategy == "local":
        own, gathered = own + (numbers * compute if trained and compute != kept else 0), 0
    elif section.strategy == "deepspeed":
        own, gathered, gradients, moments = _zero(
            section.deepspeed, numbers, trained, compute, kept, ranks, bool(trained)
        )
        ranks = 1
    else:
        # the outermost unit stays gathered during a pass, and two layers are gathered at a time
        outside = facts.embedding * (1 if facts.is_tied else 2)
        needs_copy = ranks > 1 or compute != kept
        gathered = (outside + (2 if ranks > 1 else 1) * facts.layer) * compute if needs_copy else 0
    offloads = not on_cpu
    is_gone = offloads and sharding.offload_policy and section.strategy != "deepspeed"
    return RoleMemory(
        name={ACTOR: "actor", REF: "reference", RM: "reward model"}.get(key, key),
        key=key,
        weights=0 if is_gone else own // ranks,
        gathered=gathered,
        gradients=0 if is_gone else gradients // ranks,
        optimizer=0 if is_gone else moments // ranks,
        facts=facts,
        compute=compute,
        leaves_weights=offloads and sharding.param_offload,
        leaves_optimizer=offloads and sharding.optimizer_offload,
        keeps_gradients=on_cpu and section.strategy == "local" and compute != kept,
    )


def _shards(config: PPOConfig, section: Any, sharding: Any) -> int:
    world = config.trainer.world_size
    if section.strategy == "local":
        return 1
    if section.strategy == "deepspeed":
        return world
    return world if sharding.fsdp_size < 1 else min(sharding.fsdp_size, world)


def _zero(
    zero: Any, numbers: int, trained: int, compute: int, kept: int, ranks: int, trains: bool
) -> tuple[int, int, int, int]:
    """Return the bytes of (weights, gathered, gradients, optimizer with fp32 weights) of DeepSpeed on one rank."""
    stage = zero.zero_stage
    weights = numbers * compute // (ranks if stage == 3 else 1)
    if not trains:
        return weights, 0, 0, 0
    gradients = trained * compute // (ranks if stage >= 2 else 1)
    moments = trained * (8 + (kept if stage else 0)) // (ranks if stage else 1)
    gathered = (
        min(zero.reduce_bucket_size, trained) + min(zero.stage3_max_live_parameters, numbers) * (stage == 3)
    ) * compute
    return (
        0 if zero.offload_param else weights,
        gathered,
        gradients,
        0 if zero.offload_optimizer else moments,
    )


# -- what a forward pass takes ------------------------------------------------------------------------------------
def kept_bytes_per_token(facts: ModelFacts, compute: int) -> int:
    """Return the activation bytes of one layer per token.

    Norms store their input, twice in fp32; attention its input, queries, keys, values and output; the MLP its input
    and four vectors of its own width.
    """
    h, wide, narrow = facts.hidden, facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    norms = 2 * h * (2 * compute + 4)
    if facts.model_type.startswith(_NORMED_HEADS):
        norms += (wide + narrow) * (compute + 4)
    attention = (2 * wide + 2 * narrow + wide) * compute
    mlp = 4 * facts.inner * (facts.active_experts if facts.experts else 1) * compute
    return norms + attention + mlp


def activations(facts: ModelFacts, compute: int, tokens: int, recomputes: bool) -> int:
    """Return the activation bytes of ``tokens`` tokens stored between forward and backward."""
    layer = kept_bytes_per_token(facts, compute) * tokens
    if recomputes:
        return facts.layers * facts.hidden * compute * tokens + layer
    return facts.layers * layer


def passing(facts: ModelFacts, compute: int, tokens: int) -> int:
    """Return the peak bytes of a forward pass without gradients: the widest point of one layer."""
    wide = max(3 * facts.inner * (facts.active_experts if facts.experts else 1), 4 * facts.heads * facts.head_size)
    return (wide + 4 * facts.hidden) * compute * tokens


def logits(facts: ModelFacts, compute: int, tokens: int, device: str, trains: bool) -> int:
    """Return the bytes of the chunks of logits of ``tokens`` tokens; in training also gradients of embeddings."""
    size = 4 if device == "cuda" else compute
    whole = tokens * facts.vocab * size
    chunk = min(_LOGITS_CHUNK[device], whole)
    copies = (4 if trains else 3) if device == "cuda" else 1
    if not trains:
        return copies * chunk
    # the head's gradient is summed over chunks in fp32; the input embedding has its own, even if the two are tied
    head = facts.embedding * (compute + (4 if whole > chunk else 0))
    return copies * chunk + head + facts.embedding * compute
