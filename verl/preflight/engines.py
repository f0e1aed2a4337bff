"""What estimates of memory ask of a training engine: bytes of a model on one rank, ranks that share its rows."""

from typing import Any, NamedTuple

from verl.config.engine import DeepSpeedConfig, short_dtype
from verl.config.megatron import MegatronConfig, MegatronMesh
from verl.config.model_info import ModelShape

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class RankMemory(NamedTuple):
    """Bytes of one role on the rank that holds most."""

    weights: int
    gradients: int
    optimizer: int
    """Two moments, and with weights in bf16 the fp32 weights."""


def rank_memory(config: MegatronConfig, model: ModelShape, trained: bool, world: int) -> RankMemory:
    """Return the bytes of one rank: layers by pp, matrices by tp, experts by etp x ep, and one embedding whole of tp.

    Gradients are fp32 whatever the weights. The distributed optimizer spreads moments and fp32 weights over the
    data-parallel ranks, those of context parallelism included.
    """
    mesh, size = config.mesh(world), _BYTES[short_dtype(config.dtype)]
    experts = expert_parameters(model)
    others = max(0, model.parameters - experts - _outside(model))
    # the first rank of a pipeline holds one embedding, the last the other; a pipeline of one both
    dense = (others // mesh.pp + (_outside(model) if mesh.pp == 1 else model.embedding)) // mesh.tp
    sparse = experts // (mesh.pp * mesh.etp * mesh.ep)
    weights = (dense + sparse) * size
    if not trained:
        return RankMemory(weights, 0, 0)
    state = 8 + (0 if size == 4 else 4)
    replicas, expert_replicas = _replicas(mesh) if config.use_distributed_optimizer else (1, 1)
    optimizer = state * (dense // replicas + sparse // expert_replicas)
    return RankMemory(weights, 4 * (dense + sparse), optimizer)


def _outside(model: ModelShape) -> int:
    return model.embedding * (1 if model.is_tied else 2)


def _replicas(mesh: MegatronMesh) -> tuple[int, int]:
    """Ranks over which the distributed optimizer spreads the state of a weight: of no expert, and of an expert."""
    return max(1, mesh.dp * mesh.cp), max(1, mesh.expert_dp)


def expert_parameters(model: ModelShape) -> int:
    """Return the numbers of all experts: three matrices each, in every layer; 0 for a dense model."""
    return model.layers * model.experts * 3 * model.hidden * model.inner if model.experts else 0


def row_ranks(section: Any) -> int:
    """Return over how many ranks each row's tokens are spread: cp, or with another engine Ulysses' ranks."""
    if section.strategy == "megatron":
        return section.megatron.context_parallel_size
    return section.ulysses_sequence_parallel_size


def activation_ranks(section: Any) -> int:
    """Return over how many ranks the activations of a row are spread: cp x tp, of which the vocabulary is split too.

    A pipeline does not lessen them: its first rank holds those of as many micro-batches as there are stages.
    """
    if section.strategy != "megatron":
        return row_ranks(section)
    tp = section.megatron.tensor_model_parallel_size
    # without sequence parallelism the inputs of norms stay whole on each rank: about a quarter of a layer's
    return row_ranks(section) * (tp if section.megatron.sequence_parallel else max(1, tp // 2))


def recomputes_layers(section: Any, option: bool) -> bool:
    """Return whether layers are recomputed in the backward pass; ``option``: ``enable_gradient_checkpointing``."""
    if section.strategy != "megatron":
        return option
    return section.megatron.override_transformer_config.get("recompute_granularity") == "full"


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def zero_memory(
    zero: DeepSpeedConfig, numbers: int, trained: int, compute: int, kept: int, ranks: int
) -> tuple[int, int, int, int]:
    """Return the bytes of (weights, gathered, gradients, optimizer with fp32 weights) of DeepSpeed on one rank."""
    stage = zero.zero_stage
    # stage 1 shards the optimizer, 2 gradients too, 3 also weights
    weights = numbers * compute // (ranks if stage == 3 else 1)
    if not trained:
        return weights, 0, 0, 0
    gradients = trained * compute // (ranks if stage >= 2 else 1)
    # two moments in fp32, and from stage 1 on a copy of the weights in fp32
    moments = trained * (8 + (kept if stage else 0)) // (ranks if stage else 1)
    live = min(zero.stage3_max_live_parameters, numbers) if stage == 3 else 0
    gathered = (min(zero.reduce_bucket_size, trained) + live) * compute
    return 0 if zero.offload_param else weights, gathered, gradients, 0 if zero.offload_optimizer else moments
