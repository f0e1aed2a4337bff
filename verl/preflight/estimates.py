"""Estimates of a run from its configuration: batch arithmetic, and the memory of each phase of a step.

Prompts -> samples -> mini-batches -> micro-batches -> optimizer steps -> steps of the run; every number comes with the
options it depends on. Memory is that of one device, part by part: stored and gathered weights, gradients, optimizer
state, activations, chunks of logits, the rollout engine's weights and cache; on a CPU also freed memory that the C
library keeps. ``benchmarks/memory_estimate.py`` compares it with measurements. Needs a configuration that has passed
its validators.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.batch import MicroBatching
from verl.config.actor import ActorConfig
from verl.config.base import get_path
from verl.config.checks.base import models, sharded, trained_roles
from verl.config.checks.batch import counted, optimizer_steps
from verl.config.critic import CriticConfig
from verl.config.engine import MixedPrecisionConfig, ModelSizes, backend_of
from verl.config.model_info import ModelShape, shape_of, teachers
from verl.config.ppo import ACTOR, MODEL, REF, RM, ROLLOUT, TEACHER, PPOConfig
from verl.preflight.engines import activation_ranks, rank_memory, recomputes_layers, row_ranks, zero_memory
from verl.preflight.report import Number, PhaseMemory
from verl.telemetry.memory import host_memory

if TYPE_CHECKING:
    from verl.preflight.data import Preview

CPU_TOKENS = 1024
"""Most tokens of a forward pass on a CPU, except for a single longer row."""

_WORLD = ("trainer.nnodes", "trainer.n_gpus_per_node")
_NAMES = {ACTOR: "actor", REF: "reference", TEACHER: "teacher", RM: "reward model", "critic": "critic"}


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
    rollout, filters, prompts = (
        config.actor_rollout_ref.rollout,
        config.algorithm.filter_groups,
        config.prompts_per_update,
    )
    key = "data.train_batch_size" if filters.enable else prompts_key(config)
    if config.env.makes_rows:
        groups = config.env.train.n_groups
        episodes = counted(config.data.train_batch_size // groups, "episode")
        text = f"{counted(groups, 'environment group')} of {', '.join(config.env.train.tags)}, {episodes} of each"
        yield Number("environments", groups, text, ("env.train.n_groups", "env.train.tags"))
    yield Number("prompts", prompts, f"{counted(prompts, 'prompt')} a step", (key,))
    if filters.enable:
        generated = config.data.prompts_per_step
        text = f"generated {generated} at a time, until {prompts} groups differ in {filters.metric}"
        yield Number("generated", generated, text, (prompts_key(config), "algorithm.filter_groups.enable"))
    # rows are counted as if each were as long as allowed
    samples, longest = prompts * rollout.n, longest_row(config)
    text = f"{prompts} prompts x {counted(rollout.n, 'response')} = {samples:,} samples"
    yield Number("samples", samples, text, (key, f"{ROLLOUT}.n"))
    text = (
        f"at most {config.data.max_prompt_length} + {rollout.response_length} = {longest} tokens a sample, "
        f"{samples * longest:,} a step"
    )
    yield Number("tokens", longest, text, ("data.max_prompt_length", "data.max_response_length"))


def _workers(config: PPOConfig) -> Iterator[Number]:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    workers = counted(trainer.world_size, "worker")
    text = f"{trainer.nnodes} x {trainer.n_gpus_per_node} = {workers} on {trainer.device}"
    yield Number("workers", trainer.world_size, text, _WORLD)
    for key, section in models(config).items():
        # ranks that share a sequence are one data-parallel rank
        world = config.world_size_of(section)
        dp, sp, option = (
            config.dp_size(section),
            f"{row_ranks(section)} to a sequence",
            "ulysses_sequence_parallel_size",
        )
        if section.strategy == "megatron":
            sp, option = f"({section.megatron.mesh(world)})", "megatron.tensor_model_parallel_size"
        text = f"{counted(world, 'worker')} / {sp} = {counted(dp, 'data-parallel rank')}; "
        text += backend_of(section.strategy, trainer.device, world)
        has_own = key == TEACHER and config.teacher_processes
        sizes = ("distillation.nnodes", "distillation.n_gpus_per_node") if has_own else _WORLD
        yield Number(f"{_NAMES[key]} dp", dp, text, (*sizes, f"{key}.{option}"))
    processes, (tp, pp) = sum(config.rollout_processes), _rollout_split(config)
    replicas = max(1, processes // (tp * pp))
    stages = f" x {pp} pipeline stages" if pp > 1 else ""
    copies = _many(replicas, "copy", "copies")
    text = f"{counted(processes, 'worker')} / {tp} to a copy{stages} = {copies} of {rollout.name}"
    keys = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node") if config.rollout_beside else _WORLD
    yield Number("rollout", replicas, text, (*keys, f"{ROLLOUT}.tensor_model_parallel_size"))
    rows = -(-config.data.prompts_per_step * rollout.n // replicas)
    text = f"{counted(rows, 'sample')} a copy, up to {rows * longest_row(config):,} tokens in its cache"
    yield Number("rollout load", rows, text, (prompts_key(config), f"{ROLLOUT}.n"))


def _rollout_split(config: PPOConfig) -> tuple[int, int]:
    """Return the tensor- and pipeline-parallel sizes of the rollout engine."""
    rollout = config.actor_rollout_ref.rollout
    # Hugging Face's generate runs on each rank alone
    stages = (rollout.engine_kwargs.get("vllm") or {}).get("pipeline_parallel_size") or 1
    return 1 if rollout.name == "hf" else rollout.tensor_model_parallel_size, stages if rollout.name == "vllm" else 1


def _updates(config: PPOConfig) -> Iterator[Number]:
    for key, role, n in trained_roles(config):
        name, prompts, mini = _NAMES[key], config.prompts_per_update, role.ppo_mini_batch_size
        ranks, steps, count = config.dp_size(role), optimizer_steps(config, role), prompts // mini
        minis, size_key = _many(count, "mini-batch", "mini-batches"), f"{key}.ppo_mini_batch_size"
        yield Number(f"{name} mini", count, f"{prompts} prompts / {mini} = {minis}", (prompts_key(config), size_key))
        text = (
            f"{minis} x {_many(role.ppo_epochs, 'pass', 'passes')} = {counted(steps, 'optimizer step')} for each "
            "training step"
        )
        yield Number(f"{name} updates", steps, text, (size_key, f"{key}.ppo_epochs"))
        # the last rank may have one row less
        rows = -(-mini * n // ranks)
        text = f"{mini} prompts x {n} / {counted(ranks, 'rank')} = {counted(rows, 'sample')} a rank in each mini-batch"
        yield Number(f"{name} rows", rows, text, (size_key, f"{ROLLOUT}.n", *_WORLD))
        keys: tuple[str, ...] = (f"{key}.ppo_micro_batch_size_per_gpu",)
        if role.use_dynamic_bsz:
            keys = (f"{key}.use_dynamic_bsz", f"{key}.ppo_max_token_len_per_gpu")
        sp, what = row_ranks(role), "gradients are accumulated over"
        yield _micro(config, f"{name} micro", rows, role.update_split, sp, keys, what)


def rows_of_a_forward(config: PPOConfig, split: MicroBatching, rows: int, sp: int) -> int:
    """Return how many of ``rows`` rows of maximum length one forward pass holds; ``sp`` devices share it."""
    size = split.size if split.size is not None else (split.max_tokens or 0) * sp // longest_row(config)
    if config.trainer.device == "cpu":
        size = min(size, CPU_TOKENS // longest_row(config))
    return max(1, min(size, rows))  # a row longer than the budget is a forward pass of its own


def _micro(
    config: PPOConfig, name: str, rows: int, split: MicroBatching, sp: int, keys: tuple[str, ...], what: str
) -> Number:
    size = rows_of_a_forward(config, split, rows, sp)
    passes, tokens = -(-rows // size), size * longest_row(config) // sp
    bound = "" if split.size is not None else f" (of at most {split.max_tokens:,})"
    capped = f"; a CPU takes {CPU_TOKENS:,} at a time" if config.trainer.device == "cpu" and size < rows else ""
    text = (
        f"{counted(rows, 'sample')} / {size} = {what} {_many(passes, 'micro-batch', 'micro-batches')}, each up "
        f"to {tokens:,} tokens a device{bound}{capped}"
    )
    return Number(name, passes, text, keys)


def _scoring(config: PPOConfig) -> Iterator[Number]:
    shared = config.actor_rollout_ref
    passes: list[tuple[str, str, MicroBatching, Any, str]] = []
    if config.skips_old_log_probs:
        yield Number("old log-probs", 0, "those of the update's own forwards", (f"{ACTOR}.skip_old_log_probs",))
    elif config.algorithm.rollout_correction.bypass_mode:
        yield Number("old log-probs", 0, "those of the rollout engine", ("algorithm.rollout_correction.bypass_mode",))
    else:
        passes.append(("old log-probs", ROLLOUT, shared.rollout.log_prob_split, shared.actor, "log_prob_"))
    if config.scores_reference:
        passes.append(("ref log-probs", REF, shared.ref.log_prob_split, shared.ref, "log_prob_"))
    if config.uses_critic:
        passes.append(("values", "critic", config.critic.forward_split, config.critic, "forward_"))
    if config.reward_model.uses_engine:
        passes.append(("reward model", RM, config.reward_model.forward_split, config.reward_model, "forward_"))
    for name, key, split, section, prefix in passes:
        rows = -(-config.prompts_per_update * shared.rollout.n // config.dp_size(section))
        option = f"{key}.{prefix}max_token_len_per_gpu"
        if split.size is not None:
            # the reward model has one size for its only pass
            option = f"{key}.{'' if key == RM else prefix}micro_batch_size_per_gpu"
        yield _micro(config, name, rows, split, row_ranks(section), (option,), "scored in")


def _run(config: PPOConfig, data: Preview) -> Iterator[Number]:
    trainer, prompts, total = config.trainer, config.data.prompts_per_step, total_steps(config, data)
    key = "trainer.total_training_steps" if trainer.total_training_steps else "trainer.total_epochs"
    if data.train_rows is None:
        text = f"{counted(trainer.total_epochs, 'epoch')}; the files' rows cannot be counted here"
        text = counted(total, "step") if total else text
        yield Number("run", trainer.total_training_steps, text, (key,))
        return
    per_epoch, left = divmod(data.train_rows, prompts)
    text = f"{data.train_rows:,} rows / {prompts} prompts = {counted(per_epoch, 'step')} an epoch"
    text += f"; {left} rows are left over in each" if left else ""
    yield Number("epoch", per_epoch, text, ("data.train_files", prompts_key(config)))
    total = total or 0
    text = f"{per_epoch} x {counted(trainer.total_epochs, 'epoch')} = {counted(total, 'step')}"
    if trainer.total_training_steps:
        text = f"{counted(total, 'step')}, {total / max(1, per_epoch):.2g} epochs"
    yield Number("run", total, text, (key,))
    updates = total * optimizer_steps(config, config.actor_rollout_ref.actor)
    yield Number("updates", updates, f"{updates:,} optimizer steps of the actor in all", ())


def total_steps(config: PPOConfig, data: Preview) -> int | None:
    """Return the training steps of the run; None if the rows cannot be counted."""
    trainer, rows = config.trainer, data.train_rows
    by_epochs = None if rows is None else rows // config.data.prompts_per_step * trainer.total_epochs
    return trainer.total_training_steps or by_epochs


def _many(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"


# -- Memory of each phase ----------------------------------------------------------------------------------------------

PROCESS = {"cpu": 560 << 20, "cuda": 600 << 20}
"""Bytes of a process before any model: libraries in host memory, or the CUDA context on a device."""
_KEEP_ON_CPU = 1 << 30
"""Largest activations that are stored on a CPU even with gradient checkpointing."""
_SMALL_BLOCK = 32 << 20
"""Smaller freed blocks stay with the C library until malloc_trim, before the rollout engine sleeps."""
_FREED_LEFT = {"checkpoint": 0.9, "rollout": 0.6}
"""Phase after an update -> measured share of such blocks that is still allocated."""
BYTES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}
_NORMED_HEADS = ("qwen3", "gemma3", "olmo2")
"""Families that normalise queries and keys."""
_LOGITS_CHUNK = {"cpu": 320 << 20, "cuda": 512 << 20}
"""Bytes of logits computed at a time."""


def memory_plan(config: PPOConfig, gpu_bytes: int | None = None) -> list[PhaseMemory]:
    """Return the bytes on one device (on a CPU: of one process) in each phase; empty without a local config.json."""
    every = roles_memory(config, gpu_bytes)
    apart = [role for role in every if role.key == TEACHER and config.teacher_processes]
    roles = {role.key: role for role in every if role not in apart}
    actor = roles.get(ACTOR)
    if actor is None:
        return []
    device = "cpu" if config.trainer.device == "cpu" else "cuda"
    shared, process = config.actor_rollout_ref, {"process": PROCESS[device]}
    rollout, judge = _rollout(config, actor.model, gpu_bytes), _reward_engine(config, gpu_bytes)
    if judge:  # a process besides, with a context of its own, also while it sleeps
        process = {"process": 2 * process["process"]}
    awake = process | ({} if shared.rollout.free_cache_engine or not shared.hybrid_engine else rollout)
    rows = -(-config.prompts_per_update * shared.rollout.n // config.dp_size(shared.actor))
    freed = _freed(config, roles) if device == "cpu" else 0
    loading = sum(_small(role.model, role.weights) for role in roles.values()) if device == "cpu" else 0
    phases = [PhaseMemory("start", process | _resident(roles, ACTOR, started=False) | {"freed": loading})]
    if shared.hybrid_engine:
        # the engine reuses freed blocks
        left = max(0, int(_FREED_LEFT["rollout"] * freed) - sum(rollout.values()))
        phases.append(PhaseMemory("rollout", process | _resident(roles, None) | rollout | {"freed": left}))
    passes = [("log-probs", ACTOR, shared.rollout.log_prob_split), ("ref log-probs", REF, shared.ref.log_prob_split)]
    passes += [("values", "critic", config.critic.forward_split)]
    passes += [("reward model", RM, config.reward_model.forward_split)]
    for name, key, split in passes:
        if key in roles:
            parts = _forward(config, roles[key], split, rows, device)
            phases.append(PhaseMemory(name, awake | _resident(roles, key) | parts))
    if judge:
        phases.append(PhaseMemory("reward model", awake | _resident(roles, None) | judge))
    for key in (ACTOR, "critic"):
        if key in roles:
            parts = _resident(roles, key, updates=True) | _update(config, roles[key], device)
            phases.append(PhaseMemory(f"update {roles[key].name}", awake | parts))
    if config.trainer.save_freq > 0:
        saved = awake | _resident(roles, ACTOR) | {f"{actor.name} optimizer": actor.optimizer}
        # the optimizer is loaded to be written, wherever it is kept
        saved["freed"] = int(_FREED_LEFT["checkpoint"] * freed)
        if shared.actor.checkpoint.async_save and device == "cpu":
            saved["copy to save"] = actor.weights + actor.optimizer
        phases.append(PhaseMemory("checkpoint", saved))
    if not shared.hybrid_engine:
        # at both ends one bucket travels while another is filled or loaded
        size = BYTES.get(shared.rollout.dtype, 2)
        whole, bucket = actor.model.parameters * size, shared.rollout.update_weights_bucket_megabytes << 20
        parts = {"link buckets": min(whole, 2 * bucket)}
        gathered = {"copies of weights": actor.model.embedding * size}  # one at a time, the largest
        phases.append(PhaseMemory("send weights", process | _resident(roles, ACTOR) | gathered | parts))
        phases.append(PhaseMemory("rollout apart", process | rollout | parts))
    if apart:  # on other devices, one after the other; those that wait hold their weights, too
        held = sum(0 if role.offloads_weights else role.weights for role in apart)
        largest = max(apart, key=lambda role: role.weights)
        rows = -(-config.prompts_per_update * shared.rollout.n // config.dp_size(config.distillation.teacher))
        parts = {"teacher weights": max(held, largest.weights)}
        parts |= _forward(config, largest, config.distillation.teacher.log_prob_split, rows, device)
        phases.append(PhaseMemory("teachers apart", process | parts))
    return [phase._replace(way_out=_way_out(config, phase)) for phase in phases]


def _resident(
    roles: dict[str, RoleMemory], busy: str | None, updates: bool = False, started: bool = True
) -> dict[str, int]:
    """Return weights, gradients and optimizer states on the device while the role ``busy`` runs.

    Args:
        started: whether there was an update before, which allocates the optimizer state.
    """
    parts = {
        f"{role.name} weights": role.weights for key, role in roles.items() if key == busy or not role.offloads_weights
    }
    for key, role in roles.items():
        is_updated = key == busy and updates
        if is_updated or started and role.keeps_gradients:
            parts[f"{role.name} gradients"] = role.gradients
        if started and (is_updated or not role.offloads_optimizer):
            parts[f"{role.name} optimizer"] = role.optimizer
    return parts


def _tokens(config: PPOConfig, role: RoleMemory, split: MicroBatching, rows: int) -> int:
    """Return the tokens of the largest forward pass on one device, padding included."""
    section = get_path(config, role.key)
    rows = rows_of_a_forward(config, split, rows, row_ranks(section))
    return rows * longest_row(config) // activation_ranks(section)


def _logits(config: PPOConfig, role: RoleMemory, tokens: int, device: str, trains: bool) -> dict[str, int]:
    """Return the logits of the response tokens among ``tokens`` tokens of whole rows."""
    responses = tokens * config.actor_rollout_ref.rollout.response_length // longest_row(config)
    if role.key not in (ACTOR, REF, TEACHER):
        return {}
    return {"logits": logits(role.model, role.compute, responses, device, trains)}


def _forward(config: PPOConfig, role: RoleMemory, split: MicroBatching, rows: int, device: str) -> dict[str, int]:
    tokens = _tokens(config, role, split, rows)
    parts = {"copies of weights": role.gathered, "activations": passing(role.model, role.compute, tokens)}
    return parts | _logits(config, role, tokens, device, trains=False)


def _update(config: PPOConfig, role: RoleMemory, device: str) -> dict[str, int]:
    section: ActorConfig | CriticConfig = get_path(config, role.key)
    options = config.actor_rollout_ref.model if role.key == ACTOR else config.critic.model
    rows = -(-section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // config.dp_size(section))
    tokens = _tokens(config, role, section.update_split, rows)
    whole = activations(role.model, role.compute, tokens, False)
    # small activations are stored on a CPU, whatever the option: recomputing costs more there
    is_small = device == "cpu" and whole <= _KEEP_ON_CPU
    is_recomputed = recomputes_layers(section, options.enable_gradient_checkpointing) and not is_small
    kept = activations(role.model, role.compute, tokens, True) if is_recomputed else whole
    if options.enable_activation_offload and device != "cpu":
        kept = kept_bytes_per_token(role.model, role.compute) * tokens
    parts = {"copies of weights": role.gathered, "activations": kept}
    sp = section.ulysses_sequence_parallel_size
    backend = backend_of(section.strategy, device, config.trainer.world_size)
    if role.reduces_once and backend.startswith("fsdp") and rows * longest_row(config) > tokens * sp:
        # gradients of several micro-batches are summed unsharded, and reduced with the last
        reduced = (section.sharding.mixed_precision or MixedPrecisionConfig()).reduce_dtype
        parts["sums of gradients"] = trained_parameters(config, role.key, role.model) * BYTES[reduced]
    return parts | _logits(config, role, tokens, device, trains=True)


def _freed(config: PPOConfig, roles: dict[str, RoleMemory]) -> int:
    """Return the bytes of small blocks that the updates free."""
    freed = [0]
    for role in (roles[key] for key in (ACTOR, "critic") if key in roles):
        parts = _update(config, role, "cpu")
        gradients = parts.get("sums of gradients", 0) + (0 if role.keeps_gradients else role.gradients)
        freed.append(_small(role.model, gradients) + parts["activations"])
    return max(freed)


def _small(model: ModelShape, size: int) -> int:
    """Return the share of ``size`` bytes over all weights that lies in matrices below ``_SMALL_BLOCK``."""
    # glibc keeps freed blocks below its mmap threshold, which grows to 32 MiB
    per_number = size / max(1, model.parameters)
    outside = _embeddings(model)
    found = outside if model.embedding * per_number < _SMALL_BLOCK else 0
    found += model.parameters - outside if model.hidden * model.inner * per_number < _SMALL_BLOCK else 0
    return int(found * per_number)


def _embeddings(model: ModelShape) -> int:
    """Return the parameters outside of the layers: one embedding if input and output share it, else two."""
    return model.embedding * (1 if model.is_tied else 2)


def _rollout(config: PPOConfig, model: ModelShape, gpu_bytes: int | None) -> dict[str, int]:
    rollout = config.actor_rollout_ref.rollout
    size, (tp, pp) = BYTES.get(rollout.dtype, 2), _rollout_split(config)
    weights = model.parameters * size // (tp * pp)
    # each copy of the engine has its share of the prompts
    replicas = max(1, sum(config.rollout_processes) // (tp * pp))
    rows = min(-(-config.data.prompts_per_step * rollout.n // replicas), rollout.max_num_seqs)
    cache = rows * longest_row(config) * model.cached_numbers_per_token * size // (tp * pp)
    if config.trainer.device != "cpu" and gpu_bytes:
        share = int(gpu_bytes * rollout.gpu_memory_utilization)
        # vLLM and SGLang allocate their share of the device, however little the samples need
        cache = min(cache, share) if rollout.name == "hf" else max(0, share - weights)
    return {"rollout weights": weights, "cache": cache}


def _reward_engine(config: PPOConfig, gpu_bytes: int | None) -> dict[str, int]:
    """Return the bytes of a reward model's engine on the GPUs of training while it scores; empty: there is none."""
    section = config.reward_model
    model = shape_of(config, "reward_model") if section.shares_devices and config.trainer.device != "cpu" else None
    if model is None:
        return {}
    options = section.engine_options()
    weights = model.parameters * BYTES.get(options.dtype, 2) // options.tensor_model_parallel_size
    share = int((gpu_bytes or 0) * options.gpu_memory_utilization)
    return {"reward engine weights": weights, "reward engine cache": max(0, share - weights)}


def checkpoint_bytes(config: PPOConfig) -> int | None:
    """Return the bytes of one checkpoint of all trained roles on disk; None without a local config.json."""
    total = 0
    for role in roles_memory(config):
        if role.key in (ACTOR, "critic"):
            contents = get_path(config, role.key).checkpoint.save_contents
            kept = BYTES[get_path(config, sharded(config)[role.key]).master_dtype]
            trained = trained_parameters(config, role.key, role.model)
            total += trained * kept * ("model" in contents) + 2 * trained * kept * ("optimizer" in contents)
            total += role.model.parameters * kept * ("hf_model" in contents)
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
    fewer = f"a smaller {model}.path" if on_cpu else "more GPUs (trainer.n_gpus_per_node)"
    fewer += f", or {model}.lora_rank"
    offload = {name: "" if on_cpu else f"{place}.{name}_offload=true, " for name in ("param", "optimizer")}
    ways = {
        "process": "",
        "activations": f"lower {key}.{budget}{recompute}",
        "logits": f"lower {key}.{budget}",
        "rollout weights": f"raise {ROLLOUT}.tensor_model_parallel_size, or set {ROLLOUT}.dtype=bfloat16",
        "cache": f"lower {ROLLOUT}.gpu_memory_utilization or {ROLLOUT}.max_num_seqs, or data.max_response_length",
        "reward engine weights": f"raise {RM}.rollout.tensor_model_parallel_size",
        "reward engine cache": f"lower {RM}.rollout.gpu_memory_utilization",
        "link buckets": f"lower {ROLLOUT}.update_weights_bucket_megabytes",
        "copy to save": f"{ACTOR}.checkpoint.async_save=false",
        # of any role
        "weights": f"{offload['param']}{fewer}",
        "optimizer": f"{offload['optimizer']}{key}.optim.optimizer=AdamW8bit, {fewer}",
    } | dict.fromkeys(("gradients", "copies of weights", "freed", "sums of gradients"), fewer)
    return ways[phase.largest] if phase.largest in ways else ways[phase.largest.rpartition(" ")[2]]


# -- the parts: one role on one rank, one forward pass, from shapes alone --------------------------------------------


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
    model: ModelShape
    compute: int
    """Bytes of a number in forward and backward."""
    offloads_weights: bool
    """Whether weights are offloaded to the host while the role is idle."""
    offloads_optimizer: bool
    keeps_gradients: bool
    """Whether their memory stays allocated between updates."""
    reduces_once: bool
    """Whether gradients are summed over ranks with the last micro-batch only."""
    sharding: tuple[str, ...] = ()
    """Over which ranks of several nodes FSDP shards, and what it does once a mini-batch, and why."""


def roles_memory(config: PPOConfig, gpu_bytes: int | None = None) -> list[RoleMemory]:
    """Return every role with its own model and a local config.json.

    Args:
        gpu_bytes: memory of a device; None: unknown, and all ranks share one copy of a model.
    """
    own, found = config.actor_rollout_ref.ref.model, []
    for key, place in sharded(config).items():
        # the reference of a policy with adapters is the policy without them
        borrows = key == REF and config.actor_rollout_ref.model.lora_rank and not (own is not None and own.path)
        names = teachers(config) if key == TEACHER else [] if borrows else [key.rpartition(".")[2]]
        shapes = filter(None, (shape_of(config, name) for name in names))
        found += [_role(config, key, place, model, gpu_bytes) for model in shapes]
    return found


def trained_parameters(config: PPOConfig, key: str, model: ModelShape) -> int:
    """Return the number of trained parameters of a role."""
    if key not in (ACTOR, "critic"):
        return 0
    rank = get_path(config, MODEL if key == ACTOR else "critic.model").lora_rank
    if not rank:
        return model.parameters
    wide, narrow = model.heads * model.head_size, model.kv_heads * model.head_size
    # two matrices of ``rank`` rows for each of q, o (wide), k, v (narrow) and the three of the MLP
    sides = (model.hidden + wide) * 2 + (model.hidden + narrow) * 2 + 3 * (model.hidden + model.inner)
    return model.layers * rank * sides


def _role(config: PPOConfig, key: str, place: str, model: ModelShape, gpu_bytes: int | None) -> RoleMemory:
    section, sharding = get_path(config, key), get_path(config, place)
    world = config.world_size_of(section)
    backend = backend_of(section.strategy, config.trainer.device, world)
    trained, numbers = trained_parameters(config, key, model), model.parameters
    compute = BYTES[sharding.compute_dtype]
    kept = BYTES[sharding.master_dtype] if trained else compute
    # weights that an adapter leaves frozen are stored in the dtype they compute in
    own = max(0, numbers - trained) * compute + trained * kept
    # AdamW8bit keeps two moments of one byte each
    moments = (2 if trained and section.optim.optimizer == "AdamW8bit" else 2 * kept) * trained
    gradients, ranks = trained * kept, 1
    reasons: list[str] = []
    reduces = config.trainer.device == "cpu"
    if section.strategy == "megatron":
        own, gradients, moments = rank_memory(section.megatron, model, bool(trained), world)
        gathered = 0
    elif backend == "local":
        own, gathered = own + (numbers * compute if trained and compute != kept else 0), 0
    elif section.strategy == "deepspeed":
        own, gathered, gradients, moments = zero_memory(section.deepspeed, numbers, trained, compute, kept, world)
    else:
        node = config.trainer.n_gpus_per_node
        memory = host_memory() // node if config.trainer.device == "cpu" else gpu_bytes
        state = own + gradients + moments
        ranks = sharding.group_size(world, node, state, memory)
        reasons.append(sharding.sharding(world, node, state, memory))
        # the outermost unit stays gathered during a pass, and two layers are gathered at a time
        needs_copy = ranks > 1 or compute != kept
        gathered = (_embeddings(model) + (2 if ranks > 1 else 1) * model.layer) * compute if needs_copy else 0
        if section.strategy == "fsdp1":
            reduces = False
        else:
            reduced = (sharding.mixed_precision or MixedPrecisionConfig()).reduce_dtype
            sizes = ModelSizes(state, numbers * compute, trained * BYTES[reduced])
            given = config.trainer.device, ranks, sizes, memory
            gathers, reduces = sharding.once_a_mini_batch(*given)
            reasons.append(sharding.copies(*given))
            if gathers:
                gathered = numbers * compute  # all layers, until the mini-batch is done
    offloads = config.trainer.device != "cpu"
    keeps_gradients = not offloads and backend == "local" and compute != kept
    keeps_gradients |= section.strategy == "megatron" and not (offloads and section.megatron.grad_offload)
    is_on_host = offloads and sharding.get("offload_policy") and section.strategy != "deepspeed"
    return RoleMemory(
        name=_NAMES[key],
        key=key,
        weights=0 if is_on_host else own // ranks,
        gathered=gathered,
        gradients=0 if is_on_host else gradients // ranks,
        optimizer=0 if is_on_host else moments // ranks,
        model=model,
        compute=compute,
        offloads_weights=offloads and sharding.param_offload,
        offloads_optimizer=offloads and sharding.optimizer_offload,
        keeps_gradients=keeps_gradients,
        reduces_once=reduces,
        sharding=tuple(filter(None, reasons)),
    )


def kept_bytes_per_token(model: ModelShape, compute: int) -> int:
    """Return the activation bytes of one layer per token.

    Norms store their input, twice in fp32; attention its input, queries, keys, values and output; the MLP its input
    and four vectors of its own width.
    """
    h, wide, narrow = model.hidden, model.heads * model.head_size, model.kv_heads * model.head_size
    norms = 2 * h * (2 * compute + 4)
    if model.model_type.startswith(_NORMED_HEADS):
        norms += (wide + narrow) * (compute + 4)
    attention = (2 * wide + 2 * narrow + wide) * compute
    mlp = 4 * model.inner * (model.active_experts if model.experts else 1) * compute
    return norms + attention + mlp


def activations(model: ModelShape, compute: int, tokens: int, recomputes: bool) -> int:
    """Return the activation bytes of ``tokens`` tokens stored between forward and backward."""
    layer = kept_bytes_per_token(model, compute) * tokens
    if recomputes:
        return model.layers * model.hidden * compute * tokens + layer
    return model.layers * layer


def passing(model: ModelShape, compute: int, tokens: int) -> int:
    """Return the peak bytes of a forward pass without gradients: the widest point of one layer."""
    wide = max(3 * model.inner * (model.active_experts if model.experts else 1), 4 * model.heads * model.head_size)
    return (wide + 4 * model.hidden) * compute * tokens


def logits(model: ModelShape, compute: int, tokens: int, device: str, trains: bool) -> int:
    """Return the bytes of the chunks of logits of ``tokens`` tokens; in training also gradients of embeddings."""
    # on a GPU they are computed in fp32
    size = 4 if device == "cuda" else compute
    whole = tokens * model.vocab * size
    chunk = min(_LOGITS_CHUNK[device], whole)
    copies = (4 if trains else 3) if device == "cuda" else 1
    if not trains:
        return copies * chunk
    # the head's gradient is summed over chunks in fp32; the input embedding has its own, even if the two are tied
    head = model.embedding * (compute + (4 if whole > chunk else 0))
    return copies * chunk + head + model.embedding * compute
