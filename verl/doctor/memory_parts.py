"""Bytes of the parts that memory is made of: one role's engine on one rank, and one forward pass, from shapes alone."""

from typing import Any, NamedTuple

from verl.config.base import get_path
from verl.config.model_checks import MODEL, facts_of
from verl.config.model_facts import ModelFacts
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, REF, RM, sharded

BYTES = {"fp32": 4, "float32": 4, "float": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "auto": 2}
_NORMED_HEADS = ("qwen3", "gemma3", "olmo2")
"""Families that normalise queries and keys."""
_LOGITS_CHUNK = {"cpu": 64 << 20, "cuda": 512 << 20}


class RoleMemory(NamedTuple):
    """Bytes of one role's engine on one rank."""

    name: str
    key: str
    weights: int
    """As they are kept."""
    gathered: int
    """Further copies of weights while layers compute."""
    gradients: int
    optimizer: int
    facts: ModelFacts
    compute: int
    """Bytes of a number in forward and backward."""
    leaves_weights: bool
    """Weights are on the host while the role is idle."""
    leaves_optimizer: bool
    keeps_gradients: bool
    """Their memory stays taken between updates."""


def roles_memory(config: PPOConfig) -> list[RoleMemory]:
    """Every role with a model of its own whose config.json is at hand."""
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


def trained_numbers(config: PPOConfig, key: str, facts: ModelFacts) -> int:
    """Numbers of a role's model that the optimizer changes."""
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
    trained, numbers = trained_numbers(config, key, facts), facts.parameters
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
        # the outermost unit stays gathered through a pass, and two layers are at a time
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
    """(weights, gathered, gradients, optimizer with fp32 weights) of DeepSpeed on one rank."""
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
    """Bytes one layer keeps of a token for its backward pass.

    Norms keep their input, twice in fp32; attention its input, queries, keys, values and output; the MLP its input and
    four vectors of its own width.
    """
    h, wide, narrow = facts.hidden, facts.heads * facts.head_size, facts.kv_heads * facts.head_size
    norms = 2 * h * (2 * compute + 4)
    if facts.model_type.startswith(_NORMED_HEADS):
        norms += (wide + narrow) * (compute + 4)
    attention = (2 * wide + 2 * narrow + wide) * compute
    mlp = 4 * facts.inner * (facts.active_experts if facts.experts else 1) * compute
    return norms + attention + mlp


def activations(facts: ModelFacts, compute: int, tokens: int, recomputes: bool) -> int:
    """Bytes kept between forward and backward of ``tokens`` tokens."""
    layer = kept_bytes_per_token(facts, compute) * tokens
    if recomputes:
        return facts.layers * facts.hidden * compute * tokens + layer
    return facts.layers * layer


def passing(facts: ModelFacts, compute: int, tokens: int) -> int:
    """Bytes of a forward pass that keeps nothing: one layer's widest moment."""
    wide = max(3 * facts.inner * (facts.active_experts if facts.experts else 1), 4 * facts.heads * facts.head_size)
    return (wide + 4 * facts.hidden) * compute * tokens


def logits(facts: ModelFacts, compute: int, tokens: int, device: str, trains: bool) -> int:
    """Bytes of the chunks that logits of ``tokens`` tokens are made in; in training also gradients of embeddings."""
    size = 4 if device == "cuda" else compute
    whole = tokens * facts.vocab * size
    chunk = min(_LOGITS_CHUNK[device], whole)
    copies = (4 if trains else 3) if device == "cuda" else 1
    if not trains:
        return copies * chunk
    # the head's is summed over chunks in fp32; the input embedding has one of its own, also where the two are tied
    head = facts.embedding * (compute + (4 if whole > chunk else 0))
    return copies * chunk + head + facts.embedding * compute
