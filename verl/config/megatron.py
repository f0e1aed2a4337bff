"""Megatron-core's parallelism, formats and offload of one model, and the mesh of ranks that they ask for. No torch."""

from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar, NamedTuple

from verl.config.base import Config, FreeDict, option
from verl.config.engine import Dtype, short_dtype
from verl.config.tree import section_at

_ALWAYS_MBRIDGE = "configurations and weights are mapped by mbridge either way"


class MegatronMesh(NamedTuple):
    """Factors of the ranks that hold one model. ``dp`` and ``expert_dp`` follow from the world size."""

    tp: int
    pp: int
    vpp: int
    """Pieces of the model on each pipeline rank; 1 without a virtual pipeline."""
    cp: int
    ep: int
    etp: int
    world: int

    @property
    def model(self) -> int:
        """Ranks of one replica of the layers that are not experts: tp x pp x cp."""
        return self.tp * self.pp * self.cp

    @property
    def experts(self) -> int:
        """Ranks of one replica of the experts: etp x ep x pp."""
        return self.etp * self.ep * self.pp

    @property
    def divisor(self) -> int:
        """Smallest number of ranks that both kinds of layers divide."""
        return lcm(self.model, self.experts)

    @property
    def dp(self) -> int:
        """Data-parallel ranks. Whole only if ``fits``."""
        return self.world // self.model

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert."""
        return self.world // self.experts

    @property
    def fits(self) -> bool:
        """Do both kinds of layers divide the ranks?"""
        return self.world % self.model == 0 and self.world % self.experts == 0

    def __str__(self) -> str:
        """``tp 2 x pp 2 x cp 1 x dp 2``, and the experts' factors where they are others."""
        text = f"tp {self.tp} x pp {self.pp} x cp {self.cp} x dp {self.dp}"
        if self.vpp > 1:
            text += f", {self.vpp} pieces a pipeline rank"
        if self.ep > 1 or self.etp != self.tp:
            text += f"; experts: etp {self.etp} x ep {self.ep} x pp {self.pp} x dp {self.expert_dp}"
        return text


FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral")
"""``model_type`` of the families that are admitted: logits as those of transformers, and weights that come back bit for
bit through mbridge."""
_SEES = "is in mbridge with what it sees images with, and models of text alone are mapped here"
REFUSED_FAMILIES = {
    "deepseek_v3": "is in mbridge, but its latent attention needs Transformer Engine",
    "glm4_moe": "is in mbridge, but not with the configurations of this transformers",
    "mimo": "is in mbridge, but with heads that predict several tokens, which are not trained",
    **dict.fromkeys(("qwen2_5_vl", "gemma3", "glm4v", "glm4v_moe", "internvl_chat"), _SEES),
}
"""``model_type`` -> why a family that mbridge knows is refused; fits behind "a model of type X"."""

SPLITS = (
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
)  # fmt: skip
"""Entries of ``override_transformer_config`` that say how layers are split over pipeline ranks."""

RECOMPUTE = {
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "recompute_method": None,
    "recompute_num_layers": None,
}
"""Entries of ``override_transformer_config`` that verl's own YAML has."""


@dataclass
class MegatronConfig(Config):
    """Parallelism, formats and offload of one model, read with ``strategy=megatron``. The world is tp x pp x cp x dp
    ranks, and for experts etp x ep x pp x dp of their own.
    Source: Shoeybi et al. 2019 (arXiv:1909.08053), Narayanan et al. 2021 (arXiv:2104.04473)."""

    _target_: ClassVar[str] = "verl.workers.config.McoreEngineConfig"

    param_offload: bool = False
    """Keep the parameters in host memory while the model is idle. No effect on a CPU device."""

    grad_offload: bool = False
    """Free the gradient buffers while the model is idle. No effect on a CPU device or an untrained model."""

    optimizer_offload: bool = False
    """Keep the optimizer's state and the fp32 weights in host memory between updates. No effect on a CPU device or an
    untrained model."""

    tensor_model_parallel_size: int = option(1, above=0)
    """tp: ranks that share each layer, by attention heads and hidden units. Must divide attention heads and key-value
    heads. Best within one node."""

    pipeline_model_parallel_size: int = option(1, above=0)
    """pp: ranks, or groups of them, that hold consecutive layers. Must divide the layers, unless
    ``override_transformer_config`` says how they are split."""

    virtual_pipeline_model_parallel_size: int | None = option(None, above=0)
    """vpp: pieces of the model on each pipeline rank, which shorten the time that ranks wait. Null: one."""

    context_parallel_size: int = option(1, above=0)
    """cp: ranks that share each sequence. Needs rows that are not packed (``use_remove_padding=false``)."""

    expert_model_parallel_size: int = option(1, above=0)
    """ep: ranks over which the experts of a mixture are spread. Must divide their number."""

    expert_tensor_parallel_size: int | None = option(None, above=0)
    """etp: ranks that share each expert. Null: as tp."""

    sequence_parallel: bool = True
    """Split norms and dropout along the sequence over the tensor-parallel ranks: less memory, same numbers. No effect
    with tp 1. Source: Korthikanti et al. 2022 (arXiv:2205.05198)."""

    use_distributed_optimizer: bool = True
    """Spread the optimizer's state and the fp32 weights over data-parallel ranks. No effect on an untrained model."""

    use_dist_checkpointing: bool = False
    """Load the first weights from ``dist_checkpointing_path`` and not from the model's folder."""

    dist_checkpointing_path: str | None = None
    """Folder of a distributed checkpoint of megatron-core, read with ``use_dist_checkpointing``."""

    dist_checkpointing_prefix: str = ""
    """Prefix of the names of weights in that checkpoint."""

    seed: int = 42
    """Seed of weights that the checkpoint does not hold, such as a value head, and of dropout."""

    dtype: Dtype = "bfloat16"
    """Format of weights and activations in forward and backward. The optimizer keeps fp32 weights."""

    override_ddp_config: dict[str, Any] = option({})
    """Free-form: entries of megatron-core's ``DistributedDataParallelConfig``, for example ``overlap_grad_reduce``.
    What an option of verl decides is an error here."""

    override_transformer_config: dict[str, Any] = option(RECOMPUTE)
    """Free-form: entries of megatron-core's ``TransformerConfig``: recomputation
    (``recompute_granularity=full recompute_method=uniform recompute_num_layers=1``), uneven pipelines
    (``num_layers_in_first_pipeline_stage``, ``account_for_embedding_in_pipeline_split``). Critic, reference and reward
    model follow the actor's where theirs has no entry of the user's."""

    override_mcore_model_config: dict[str, Any] = option({})
    """Free-form: entries of megatron-core's ``GPTModel``."""

    use_mbridge: bool = option(True, never_read=_ALWAYS_MBRIDGE)
    """Both values do the same: configurations and weights are mapped by mbridge."""

    vanilla_mbridge: bool = option(True, never_read=_ALWAYS_MBRIDGE)
    """Both values do the same: Megatron-Bridge is not used."""

    forward_only: bool = option(False, never_read="the role decides whether a model is trained")
    """Both values do the same: actor and critic are trained, reference and reward model are not."""

    @property
    def compute_dtype(self) -> str:
        """``fp32``, ``bf16`` or ``fp16``: format of forward and backward."""
        return short_dtype(self.dtype)

    @property
    def master_dtype(self) -> str:
        """Format of the weights that the optimizer changes."""
        return "fp32"

    @property
    def full_determinism(self) -> bool:
        """Does the model use only algorithms that repeat bit for bit (megatron-core's ``deterministic_mode``)?"""
        return bool(self.override_transformer_config.get("deterministic_mode", False))

    @property
    def transformer_overrides(self) -> FreeDict:
        """Entries of ``override_transformer_config`` that ask for anything: without nulls and unread recompute keys."""
        given = {name: value for name, value in self.override_transformer_config.items() if value is not None}
        if given.get("recompute_granularity") != "selective":
            given.pop("recompute_modules", None)
        return FreeDict(given)

    def mesh(self, world: int) -> MegatronMesh:
        """Factors of ``world`` ranks."""
        tp, etp = self.tensor_model_parallel_size, self.expert_tensor_parallel_size
        return MegatronMesh(
            tp,
            self.pipeline_model_parallel_size,
            self.virtual_pipeline_model_parallel_size or 1,
            self.context_parallel_size,
            self.expert_model_parallel_size,
            etp or tp,
            world,
        )


def follow_overrides(tree: dict, given: set[str]) -> None:
    """Give reference, critic and reward model the actor's entries of free-form options where theirs are not the user's.

    Args:
        tree: the composed tree, interpolations unresolved; it is changed.
        given: dotted keys the user set.
    """
    first = section_at(tree, "actor_rollout_ref.actor.megatron")
    for role in ("actor_rollout_ref.ref.megatron", "critic.megatron", "reward_model.megatron"):
        section = section_at(tree, role)
        for name in ("override_transformer_config", "override_ddp_config", "override_mcore_model_config"):
            key = f"{role}.{name}"
            own, followed = section.get(name), first.get(name)
            if key in given or not isinstance(own, dict) or not isinstance(followed, dict):
                continue
            kept = {entry: value for entry, value in own.items() if f"{key}.{entry}" in given}
            section[name] = {**own, **followed, **kept}
