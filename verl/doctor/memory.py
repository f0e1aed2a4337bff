"""How many bytes each phase of a step takes on one device, part by part.

What is counted: weights as they are kept and as layers compute with them, gradients, optimizer state, what a forward
pass keeps for its backward pass, chunks of logits, the engine's weights and cache; on a CPU also what the C library
does not give back. ``benchmarks/memory_estimate.py`` holds it against what processes really take.
"""

from verl.config.base import get_path
from verl.config.model_checks import MODEL
from verl.config.model_facts import ModelFacts
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, REF, RM, ROLLOUT
from verl.doctor.derivation import longest_row, pipeline_stages, rows_of_a_forward
from verl.doctor.memory_parts import (
    BYTES,
    RoleMemory,
    activations,
    kept_bytes_per_token,
    logits,
    passing,
    roles_memory,
    trained_numbers,
)
from verl.doctor.report import PhaseMemory
from verl.utils.micro_batching import MicroBatching

PROCESS = {"cpu": 560 << 20, "cuda": 600 << 20}
"""What a process takes before any model: libraries in host memory, or the CUDA context on a device."""
_KEEP_ON_CPU = 1 << 30
"""Activations up to this size are kept on a CPU even with gradient checkpointing."""
_SMALL_BLOCK = 32 << 20
"""Smaller blocks that are freed stay with the C library until it is asked for them, before the rollout sleeps."""
_STAYS = {"checkpoint": 0.9, "rollout": 0.6}
"""Phase after an update -> share of such blocks that is still there, as measured."""


def cells(config: PPOConfig, split: MicroBatching, rows: int, sp: int) -> int:
    """Tokens of the largest forward on one device, padding included."""
    return rows_of_a_forward(config, split, rows, sp) * longest_row(config) // sp


def memory_plan(config: PPOConfig, gpu_bytes: int | None = None) -> list[PhaseMemory]:
    """Bytes on one device (with ``trainer.device=cpu``: of one process) in each phase; empty if no model is at hand."""
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
        # the engine takes its memory of what was freed
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


def _resident(
    roles: dict[str, RoleMemory], busy: str | None, updates: bool = False, started: bool = True
) -> dict[str, int]:
    """Weights, gradients and optimizer states on the device while ``busy`` runs."""
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
    tokens = cells(config, split, rows, sp)
    parts = {"copies of weights": role.gathered, "activations": passing(role.facts, role.compute, tokens)}
    return parts | (
        {"logits": logits(role.facts, role.compute, _responses(config, tokens), device, False)}
        if role.key in (ACTOR, REF)
        else {}
    )


def _freed(config: PPOConfig, roles: dict[str, RoleMemory]) -> int:
    """Bytes of small blocks that the updates free."""
    found = 0
    for key in (ACTOR, "critic"):
        if key in roles:
            role, parts = roles[key], _update(config, roles[key], "cpu")
            gone = 0 if role.keeps_gradients else role.gradients
            found = max(found, _small(role.facts, gone + parts.get("sums of gradients", 0)) + parts["activations"])
    return found


def _small(facts: ModelFacts, size: int) -> int:
    """Of ``size`` bytes over all weights, those in matrices below ``_SMALL_BLOCK``."""
    per_number = size / max(1, facts.parameters)
    outside = facts.embedding * (1 if facts.is_tied else 2)
    found = outside if facts.embedding * per_number < _SMALL_BLOCK else 0
    found += facts.parameters - outside if facts.hidden * facts.inner * per_number < _SMALL_BLOCK else 0
    return int(found * per_number)


def _responses(config: PPOConfig, tokens: int) -> int:
    """Those of ``tokens`` tokens of whole rows that are scored."""
    return tokens * config.actor_rollout_ref.rollout.response_length // longest_row(config)


def _update(config: PPOConfig, role: RoleMemory, device: str) -> dict[str, int]:
    section = get_path(config, role.key)
    model = config.actor_rollout_ref.model if role.key == ACTOR else config.critic.model
    sp = section.ulysses_sequence_parallel_size
    rows = -(-section.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // config.dp_size(section))
    tokens = cells(config, section.update_split, rows, sp)
    recomputes = model.enable_gradient_checkpointing
    if device == "cpu" and activations(role.facts, role.compute, tokens, False) <= _KEEP_ON_CPU:
        recomputes = False
    kept = activations(role.facts, role.compute, tokens, recomputes)
    if model.enable_activation_offload and device != "cpu":
        kept = kept_bytes_per_token(role.facts, role.compute) * tokens
    parts = {"copies of weights": role.gathered, "activations": kept}
    if device == "cpu" and section.strategy.startswith("fsdp") and rows * longest_row(config) > tokens * sp:
        # several micro-batches are summed whole, and reduced with the last
        parts["sums of gradients"] = trained_numbers(config, role.key, role.facts) * BYTES["fp32"]
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
        # the engine takes its share of the device, whatever the samples need
        cache = max(0, int(gpu_bytes * rollout.gpu_memory_utilization) - weights)
    elif config.trainer.device != "cpu" and gpu_bytes:
        cache = min(cache, int(gpu_bytes * rollout.gpu_memory_utilization))
    return {"rollout weights": weights, "cache": cache}


def checkpoint_bytes(config: PPOConfig) -> int | None:
    """Bytes that one checkpoint of all trained roles takes on disk; None if the actor's model is not at hand."""
    total = 0
    for role in roles_memory(config):
        if role.key not in (ACTOR, "critic"):
            continue
        section, facts = get_path(config, role.key), role.facts
        contents, trained = section.checkpoint.save_contents, trained_numbers(config, role.key, facts)
        place = section.model.fsdp_config if role.key == "critic" else section.fsdp_config
        kept = BYTES[place.master_dtype]
        total += trained * kept * ("model" in contents) + facts.parameters * kept * ("hf_model" in contents)
        total += 2 * trained * kept * ("optimizer" in contents)
    return total or None


def _way_out(config: PPOConfig, phase: PhaseMemory) -> str:
    """Options that make the largest part of a phase smaller."""
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
