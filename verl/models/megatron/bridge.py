"""Models of Hugging Face folders as megatron-core's, and their weights both ways, by mbridge's mappings.

mbridge as it comes needs Transformer Engine, and with some models gives other logits without an error; what it gets
wrong is corrected here, and what cannot be corrected is refused by name. A family is admitted
(``config.megatron.FAMILIES``) when its logits are those of transformers and its weights come back bit for bit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple

import megatron.core.transformer.moe.moe_utils as moe_utils
import torch
import torch.distributed as dist
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from verl.checkpoint.hf_folder import Weights
from verl.config.megatron import FAMILIES, REFUSED_FAMILIES
from verl.models.heads import is_head
from verl.models.loader import depends_on_length
from verl.models.megatron.layers import use_own_layers
from verl.models.megatron.scores import VocabularyPart
from verl.utils.distributed import all_gather_objects
from verl.utils.torch_functional import nonfinite_numbers

if not hasattr(moe_utils, "te_general_gemm"):
    # 0.16.1 asks whether it is None, and does not define it without Transformer Engine
    moe_utils.te_general_gemm = None

HAS_TRANSFORMER_ENGINE = find_spec("transformer_engine") is not None

_OWN_LAYERS = {
    "masked_softmax_fusion": False, "persist_layer_norm": False, "bias_activation_fusion": False,
    "bias_dropout_fusion": False, "apply_rope_fusion": False, "moe_grouped_gemm": False,
    "attention_softmax_in_fp32": True, "transformer_impl": "local",
}  # fmt: skip
"""Entries of ``TransformerConfig`` without Transformer Engine's kernels."""

_NOT_BUILT: dict[str, tuple[tuple[Any, ...], str]] = {
    "moe_router_load_balancing_type": (("none", None), "there is no auxiliary loss of experts"),
    "moe_z_loss_coeff": ((None, 0), "there is no auxiliary loss of experts"),
    "mtp_num_layers": ((None, 0), "heads that predict several tokens are not trained"),
    "hidden_dropout": ((0.0,), "dropout is the model's, by model.override_config"),
    "attention_dropout": ((0.0,), "dropout is the model's, by model.override_config"),
    "cuda_graph_impl": (("none", None), "graphs would hold the pointers of weights that are offloaded"),
    "enable_cuda_graph": ((False, None), "graphs would hold the pointers of weights that are offloaded"),
}
"""Entry of ``TransformerConfig`` -> its values that work, the first of them the default, and why others do not."""

_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

Head = Literal["lm", "value", "reward"]


# -- configurations -------------------------------------------------------------------------------------------------


def transformer_config_entries() -> frozenset[str]:
    """Names that ``override_transformer_config`` may have."""
    return frozenset(entry.name for entry in fields(TransformerConfig))


def check_model(config: Any, path: str) -> None:
    """Refuse a model that would get other logits on megatron-core than in transformers.

    Raises:
        ValueError: with what it has that is not mapped.
    """
    kind, way_out = config.model_type, "Use strategy=fsdp2 or deepspeed, which run any model of transformers."
    if kind not in FAMILIES:
        reason = REFUSED_FAMILIES.get(kind, "is not mapped to megatron-core")
        admitted = ", ".join(FAMILIES)
        raise ValueError(f"model.path={path!r}: a model of type {kind} {reason}. Admitted are {admitted}. {way_out}")
    rope = getattr(config, "rope_parameters", None) or {}
    rope_kind = rope.get("rope_type", "default")
    layers = getattr(config, "layer_types", None) or ()
    odd = {
        f"hidden_act={getattr(config, 'hidden_act', 'silu')}": getattr(config, "hidden_act", "silu") != "silu",
        f"rope_type={rope_kind}": depends_on_length(rope_kind) or abs(_rope_factor(config) - 1) > 1e-9,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "sliding windows": any("sliding" in layer for layer in layers)
        or (kind == "mixtral" and bool(getattr(config, "sliding_window", None))),
        "layers without experts (mlp_only_layers, decoder_sparse_step)": bool(getattr(config, "mlp_only_layers", None))
        or getattr(config, "decoder_sparse_step", 1) != 1,
    }
    found = [name for name, is_there in odd.items() if is_there]
    if found:
        raise ValueError(
            f"model.path={path!r} has {' and '.join(found)}, which strategy=megatron does not map: its logits would be "
            f"others. {way_out}"
        )


def _rope_factor(config: Any) -> float:
    frequencies = _scaled_frequencies(config)
    return 1.0 if frequencies is None else frequencies[1]


def _scaled_frequencies(config: Any) -> tuple[Tensor, float] | None:
    """Rotary frequencies and the factor on attention by transformers' own code; None for plain ones."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind == "default" or depends_on_length(kind):
        return None
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu")


def _entries_of_family(config: Any) -> dict[str, Any]:
    """Entries of ``TransformerConfig`` that mbridge leaves out or gets wrong."""
    kind, found = config.model_type, {}
    if kind == "mixtral":
        found["moe_router_pre_softmax"] = False
    if kind in ("qwen2_moe", "qwen3_moe"):
        # weights of the chosen experts sum to 1, or are what the softmax over all of them gave
        found["moe_router_pre_softmax"] = not config.norm_topk_prob
    if kind == "qwen2_moe":
        found |= {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": False}
    return found


def _bridge_class(kind: str) -> type:
    """mbridge's class of a family, for megatron-core's layers without Transformer Engine where that is absent."""
    base: Any = _MODEL_REGISTRY[kind]

    class Bridge(base):
        if not HAS_TRANSFORMER_ENGINE:
            # names of norms that Transformer Engine fuses into the layer behind them
            _OTHER_MAPPING = {
                **base._OTHER_MAPPING,
                "input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
            }
            _MLP_MAPPING = {
                "pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
                **base._MLP_MAPPING,
            }

        def _adjust_mapping_for_shared_weights(self) -> None:
            # a mapping of this model: mbridge writes into that of the class, where the next model finds it
            self._DIRECT_MAPPING = dict(base._DIRECT_MAPPING)
            if getattr(self.hf_config, "tie_word_embeddings", False):
                self._DIRECT_MAPPING[_OUTPUT] = self._DIRECT_MAPPING[_EMBEDDING]

    return Bridge


def _plain(config: Any) -> Any:
    """The configuration with the attributes that mbridge reads and transformers 5 does not have."""
    rope = getattr(config, "rope_parameters", None) or {}
    if not hasattr(config, "rope_theta"):
        object.__setattr__(config, "rope_theta", rope.get("rope_theta", 10000.0))
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


# -- the model --------------------------------------------------------------------------------------------------------


def _hidden_states(layer: Any, input: Tensor, weight: Tensor | None = None, runtime_gather_output: Any = None) -> Any:
    """In place of the last layer's product: its inputs (l, b, H), from which scores are computed in chunks."""
    if layer.sequence_parallel:  # every rank has the whole gradient: it is split, not summed
        input = tensor_parallel.gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=False)
    return input, None


class ScoreHead(nn.Linear):
    """Layer with one output in place of the last layer; whole on every rank."""

    def __init__(self, config: Any, bias: bool) -> None:
        super().__init__(config.hidden_size, 1, bias=bias)
        self.sequence_parallel = config.sequence_parallel

    forward = _hidden_states


@dataclass
class MegatronModel:
    """The part of a model on this rank: one GPTModel for each of its pieces of the pipeline.

    A piece returns the inputs of the last layer (b, l, H) where it has that, and else what the next piece takes.
    """

    config: Any
    """Of Hugging Face."""
    bridge: Any
    head: Head
    pieces: list[GPTModel] = field(default_factory=list)

    @property
    def transformer_config(self) -> TransformerConfig:
        return self.bridge.config

    @cached_property
    def vocabulary(self) -> VocabularyPart:
        """Rows of the last layer on this rank."""
        size, rank = self.bridge.mpu.tp_size, self.bridge.mpu.tp_rank
        rows = -(-self.config.vocab_size // size)
        return VocabularyPart(self.bridge.mpu.tp_group if size > 1 else None, rank * rows, self.config.vocab_size)

    @property
    def plain_pieces(self) -> list[GPTModel]:
        """The pieces without the wrapper that sums their gradients."""
        return [getattr(piece, "module", piece) for piece in self.pieces]

    @property
    def last(self) -> GPTModel:
        """The last piece of this rank."""
        return self.plain_pieces[-1]

    @property
    def output_weight(self) -> Tensor:
        """Weight of the last layer, (V / tp, H); on the last pipeline stage only."""
        is_tied = self.head == "lm" and self.last.share_embeddings_and_output_weights
        return self.last.shared_embedding_or_output_weight() if is_tied else self.last.output_layer.weight


def build(
    config: Any,
    dtype: torch.dtype,
    head: Head = "lm",
    path: str = "",
    sequence_parallel: bool = True,
    overrides: Mapping[str, Any] | None = None,
    model_overrides: Mapping[str, Any] | None = None,
    head_bias: bool = True,
) -> MegatronModel:
    """Build this rank's part of a model, with random weights; the groups are made before (``start_groups``).

    Args:
        config: of Hugging Face.
        head: ``lm``, or a layer with one output.
        path: of the model, for errors.
        sequence_parallel: has no effect with one tensor-parallel rank.
        overrides: entries of megatron-core's ``TransformerConfig``.
        model_overrides: entries of its ``GPTModel``.
        head_bias: whether the layer with one output has a bias.

    Raises:
        ValueError: the model is not admitted, or an override is none.
    """
    check_model(config, path)
    unknown = sorted(set(overrides or {}) - transformer_config_entries())
    if unknown:
        raise ValueError(
            f"override_transformer_config.{unknown[0]} is no entry of megatron-core's TransformerConfig: leave it out"
        )
    for name, (works, reason) in _NOT_BUILT.items():
        if (overrides or {}).get(name, works[0]) not in works:
            raise ValueError(f"override_transformer_config.{name}={overrides[name]!r}: {reason}. Leave it out")
    known = set(signature(GPTModel.__init__).parameters) - {"self"}
    if unknown := sorted(set(model_overrides or {}) - known):
        raise ValueError(
            f"override_mcore_model_config.{unknown[0]} is no argument of megatron-core's GPTModel: leave it out"
        )
    own = {} if HAS_TRANSFORMER_ENGINE else _OWN_LAYERS
    bridge = _bridge_class(config.model_type)(_plain(config), dtype=dtype)
    bridge.set_extra_args(
        **own,
        **_entries_of_family(config),
        sequence_parallel=sequence_parallel and bridge.mpu.tp_size > 1,
        gradient_accumulation_fusion=False,
        # gradients are summed over ranks: a micro-batch's loss has its share already
        calculate_per_token_loss=True,
        **(overrides or {}),
    )
    model = MegatronModel(config, bridge, head)
    if head != "lm":
        bridge._DIRECT_MAPPING |= {_OUTPUT: "score.weight", "output_layer.bias": "score.bias"}
    stages = range(bridge.mpu.vpp_size) if bridge.mpu.vpp_size else [None]
    model.pieces = [_piece(model, stage, model_overrides or {}, head_bias, dtype) for stage in stages]
    return model


def _piece(model: MegatronModel, stage: int | None, overrides: Mapping[str, Any], bias: bool, dtype: Any) -> GPTModel:
    bridge, config = model.bridge, model.config
    spec = get_gpt_decoder_block_spec(
        bridge.config, use_transformer_engine=HAS_TRANSFORMER_ENGINE, normalization="RMSNorm", vp_stage=stage
    )
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": stage}
    rows = -(-config.vocab_size // bridge.mpu.tp_size)
    options = {
        "vocab_size": rows * bridge.mpu.tp_size,
        "max_sequence_length": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": config.rope_theta,
        **overrides,
    }
    piece = GPTModel(
        config=bridge.config,
        transformer_layer_spec=spec if HAS_TRANSFORMER_ENGINE else use_own_layers(spec),
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=config.tie_word_embeddings and model.head == "lm",
        vp_stage=stage,
        **options,
    )
    piece.vp_stage = stage
    if piece.post_process and model.head == "lm":
        piece.output_layer.forward = MethodType(_hidden_states, piece.output_layer)
    elif piece.post_process:
        piece.output_layer = ScoreHead(bridge.config, bias)
        with torch.no_grad():
            piece.output_layer.weight.normal_(0, getattr(config, "initializer_range", 0.02))
            for parameter in piece.output_layer.parameters():
                # of all replicas alike: they are one weight
                group = parallel_state.get_tensor_model_parallel_group()
                dist.broadcast(parameter, dist.get_global_rank(group, 0), group=group)
            if bias:
                piece.output_layer.bias.zero_()
    frequencies = _scaled_frequencies(config)
    if frequencies is not None and hasattr(piece, "rotary_pos_emb"):
        piece.rotary_pos_emb.inv_freq = frequencies[0].to(piece.rotary_pos_emb.inv_freq)
    piece = piece.to(torch.cuda.current_device(), dtype)
    for parameter in piece.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return piece


# -- weights ----------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One parameter of one pipeline stage."""

    stage: int
    piece: int
    local: str
    """Its name in the piece."""
    name: str
    """In the whole model; of an expert, before the number of the expert."""
    expert: int | None
    """Number of the expert among those of a rank."""
    shape: torch.Size
    split: int | None
    """Dimension that is split over tensor-parallel ranks; None: it is whole on each."""


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"experts\.(?:local_experts\.(?P<number>\d+)\.)?(?P<layer>linear_fc[12])\.weight(?P<grouped>\d*)$")


def _entries(model: MegatronModel) -> Iterator[_Entry]:
    for number, piece in enumerate(model.plain_pieces):
        layers = {at: layer.layer_number - 1 for at, layer in enumerate(piece.decoder.layers)}
        for local, parameter in piece.named_parameters():
            name = local
            if found := _LAYER.match(local):
                name = f"decoder.layers.{layers[int(found[1])]}.{local[found.end() :]}"
            found, expert = _EXPERT.search(name), None
            if found and ".shared_experts." not in name:
                expert = int(found["number"] or found["grouped"])
                name = f"{name[: found.start()]}experts.{found['layer']}.weight"
            is_split = getattr(parameter, "tensor_model_parallel", False)
            dim = parameter.partition_dim if is_split else None
            yield _Entry(model.bridge.mpu.pp_rank, number, local, name, expert, parameter.shape, dim)


def _global_name(entry: _Entry, first_expert: int) -> str:
    return entry.name if entry.expert is None else f"{entry.name}{entry.expert + first_expert}"


def _group_of(model: MegatronModel, entry: _Entry) -> tuple[int, int, dist.ProcessGroup]:
    """Size, this rank's place and group of the ranks over which a parameter is split."""
    mpu = model.bridge.mpu
    if entry.expert is None:
        return mpu.tp_size, mpu.tp_rank, mpu.tp_group
    return mpu.etp_size, mpu.etp_rank, mpu.etp_group


def _has_gate(name: str) -> bool:
    """Whether a weight is of a gate and of what it multiplies, one after the other."""
    return "linear_fc1." in name


def _cut(whole: Tensor, entry: _Entry, size: int, rank: int) -> Tensor:
    if entry.split is None or size == 1:
        return whole
    if _has_gate(entry.name):
        return torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])
    return whole.chunk(size, entry.split)[rank]


def _joined(parts: list[Tensor], entry: _Entry) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if _has_gate(entry.name):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    return torch.cat(parts, entry.split)


def local_weights(model: MegatronModel, folder: str | Path) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (piece, name, this rank's part) of every parameter, read from a Hugging Face folder; all ranks call it
    together. A head with one output that the folder has not is left out.

    Raises:
        ValueError: the folder lacks a weight, has one that is not mapped, or one that is not finite.
    """
    folder, bridge = Path(folder), model.bridge
    weights, used = Weights(folder), set()
    there, vocab = set(weights.names()), model.config.vocab_size
    first = (bridge.config.num_moe_experts or 0) // bridge.mpu.ep_size * bridge.mpu.ep_rank
    for entry in _entries(model):
        name = _global_name(entry, first)
        names = bridge._weight_name_mapping_mcore_to_hf(name)
        if not there.issuperset(names):
            if all(map(is_head, names)) and model.head == "value":
                continue
            raise ValueError(
                f"model.path={str(folder)!r} lacks {sorted(set(names) - there)[0]}: it would stay random. Use a "
                "complete checkpoint of this architecture."
            )
        used.update(names)
        tensors = [weights[one] for one in names]
        for one, tensor in zip(names, tensors, strict=True):
            if found := nonfinite_numbers(tensor):
                raise ValueError(
                    f"model.path={str(folder)!r}: {one} has {found}, so every output of this model would be NaN. Use "
                    "another checkpoint."
                )
        whole = bridge._weight_to_mcore_format(name, tensors)
        size, rank, _ = _group_of(model, entry)
        if entry.name == _EMBEDDING or entry.name == _OUTPUT and model.head == "lm":
            rows = -(-vocab // size) * size
            whole = torch.cat([whole, whole.new_zeros(rows - vocab, whole.shape[1])]) if rows > vocab else whole
        part = _cut(whole, entry, size, rank)
        if part.shape != entry.shape:
            raise ValueError(
                f"model.path={str(folder)!r}: {names[0]} is of another size than config.json says: {tuple(part.shape)} "
                f"for {tuple(entry.shape)} on a rank. Use a complete checkpoint of this architecture."
            )
        yield entry.piece, entry.local, part
    everywhere = set().union(*all_gather_objects(used))
    unused = [name for name in sorted(there - everywhere) if not _may_be_unused(name)]
    if unused:
        raise ValueError(
            f"model.path={str(folder)!r} has {unused[0]} and {len(unused) - 1} more weights that strategy=megatron "
            "does not map: its logits would be others. Use strategy=fsdp2 or deepspeed."
        )


def _may_be_unused(name: str) -> bool:
    return name == "lm_head.weight" or is_head(name) or name.endswith("rotary_emb.inv_freq")


@torch.no_grad()
def load_hf(model: MegatronModel, folder: str | Path) -> None:
    """Load the weights of a Hugging Face folder; all ranks call it together, each reads its own part."""
    named = [dict(piece.named_parameters()) for piece in model.plain_pieces]
    for piece, name, part in local_weights(model, folder):
        named[piece][name].copy_(part)


@torch.no_grad()
def export_hf(model: MegatronModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight whole under its Hugging Face name, one at a time; all ranks iterate together.

    A parameter is sent from its pipeline stage to the others, then gathered over tensor-parallel and expert-parallel
    ranks; no more of the model is whole at a time.

    Args:
        dtype: cast to it before weights travel; None: as they are.
    """
    mpu, pp_group = model.bridge.mpu, model.bridge.mpu.pp_group
    named = [dict(piece.named_parameters()) for piece in model.plain_pieces]
    device = next(iter(named[0].values())).device
    own = next(iter(named[0].values())).dtype
    stages = all_gather_objects(list(_entries(model)), pp_group) if mpu.pp_size > 1 else [list(_entries(model))]
    seen: set[str] = set()
    for entry in (entry for stage in stages for entry in stage):
        if entry.stage == mpu.pp_rank:
            tensor = named[entry.piece][entry.local].detach().to(dtype or own).contiguous()
        else:
            tensor = torch.empty(entry.shape, dtype=dtype or own, device=device)
        if mpu.pp_size > 1:
            dist.broadcast(tensor, dist.get_global_rank(pp_group, entry.stage), group=pp_group)
        if entry.split is not None:
            size, _, group = _group_of(model, entry)
            tensor = _joined(_gathered(tensor, size, group), entry)
        experts = _gathered(tensor, mpu.ep_size, mpu.ep_group) if entry.expert is not None else [tensor]
        for rank, whole in enumerate(experts):
            name = _global_name(entry, (model.bridge.config.num_moe_experts or 0) // mpu.ep_size * rank)
            if name == _EMBEDDING or name == _OUTPUT and model.head == "lm":
                whole = whole[: model.config.vocab_size]
            for one, part in zip(*model.bridge._weight_to_hf_format(name, whole), strict=True):
                if one not in seen:  # a tied weight is on the first stage and on the last
                    seen.add(one)
                    yield one, part.contiguous()


def _gathered(tensor: Tensor, size: int, group: dist.ProcessGroup) -> list[Tensor]:
    if size == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(parts, tensor, group=group)
    return parts
