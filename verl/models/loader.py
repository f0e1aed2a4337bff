"""Load a model folder as a module: a (vision-)language model, or its body with a scalar head.

Knows transformers; knows no sharding, no optimizer and no batch.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from verl.models.heads import is_classifier, is_head, reward_class, value_class
from verl.models.multimodal import is_vision_language, vision_tower
from verl.models.weight_files import WeightFiles, stored_tensors
from verl.models.weight_names import remember_conversions
from verl.utils.fs import copy_to_local
from verl.utils.model import unknown_entries, update_model_config, without_progress_bars
from verl.utils.torch_functional import PrecisionType, nonfinite_numbers

# -- Rotary frequencies that do not depend on the other rows of a forward pass ---------------------------------------


def depends_on_length(kind: Any) -> bool:
    """Whether transformers changes the frequencies of this ``rope_type`` during forward passes."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def fix_rotary_frequencies(model: Any, longest: int | None) -> None:
    """Fix every rotary embedding of ``model`` to the frequencies of a sequence of ``longest`` tokens.

    transformers picks the frequencies of RoPE ``longrope`` (Phi-3, Phi-4) and ``dynamic`` by the largest position of a
    micro-batch, so that a row's log-probs would change next to a longer one, and a response would change frequencies
    while it is generated. Here they are fixed once, for the longest sequence of the run, as vLLM does for its
    ``max_model_len``.

    Sources: Ding et al. 2024, LongRoPE (arXiv:2402.13753); dynamic NTK scaling as in transformers.

    Args:
        longest: tokens of the longest prompt with its response; None: the model's whole context.

    Raises:
        ValueError: the config asks for such frequencies, rows may be long enough to change them, and the model's code
            is not transformers' own, so that it cannot be fixed.
    """
    text = model.config.get_text_config()
    longest = longest or getattr(text, "max_position_embeddings", None) or 1
    found = False
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict) and any(map(depends_on_length, kinds.values())):
            module.rope_type = dict(kinds)
            for layer_type in filter(lambda name: depends_on_length(kinds[name]), kinds):
                module.rope_type[layer_type] = _fix(module, kinds[layer_type], longest, f"{layer_type}_", layer_type)
            found = True
        # one rotary embedding for all layers; above, one for each kind of layer (Gemma 3)
        elif depends_on_length(kinds):
            module.rope_type = _fix(module, kinds, longest)
            found = True
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    trained = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    trained = trained or getattr(text, "max_position_embeddings", None)
    if depends_on_length(kind) and not found and longest > (trained or 0):
        raise ValueError(
            f"{type(model).__name__} has rope_type={kind!r}, and code of its own that picks the frequencies by the "
            f"longest row of a micro-batch: with sequences of up to {longest} tokens (trained for {trained}) a row's "
            "log-probs would depend on the other rows. Use transformers' own class for this model "
            "(trust_remote_code=false), or keep data.max_prompt_length + data.max_response_length within "
            f"{trained}."
        )


def _fix(module: Any, kind: str, longest: int, prefix: str = "", layer_type: str | None = None) -> str:
    """Set the buffers and return a ``rope_type`` that transformers does not update."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    old = getattr(module, f"{prefix}inv_freq")
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=longest, **of_layer)
    for name in (f"{prefix}inv_freq", f"{prefix}original_inv_freq"):
        module.register_buffer(name, frequencies.clone(), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scaling)
    return "fixed"


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoRASpec:
    """Layers and size of a low-rank adapter. Source: Hu et al. 2021 (arXiv:2106.09685)."""

    rank: int
    alpha: float = 16
    """Scale of the adapter is alpha / rank."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """``all-linear``, a regular expression, or names or ends of names of linear layers."""
    exclude_modules: str | tuple[str, ...] | None = None
    """Layers without an adapter, given in the same ways."""
    adapter_path: str | None = None
    """Folder of an adapter to continue from."""
    leaves_vision_tower: bool = False
    """Exclude the layers of a vision-language model's tower."""


@dataclass(frozen=True)
class ModelSpec:
    """Path, head, precision and training options of a model."""

    path: str
    """Folder or hub name of a Hugging Face model."""
    head: Literal["lm", "value", "reward"] = "lm"
    """``lm``: next-token logits. ``value``: one number per token, the critic's. ``reward``: one number per text, the
    reward model's; its head must come with the weights."""
    param_dtype: str = "fp32"
    """Precision in which weights are stored and updated. Keep fp32 for training: a step of 1e-5 is lost in bf16."""
    compute_dtype: str | None = "bf16"
    """Precision of matrix products; None means ``param_dtype``."""
    new_head: bool = False
    """``reward``: the head may be missing, and is then random: it is to be trained."""
    override_config: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the Hugging Face config to change; ``attn_implementation`` chooses the attention code. Every dropout
    rate that is not named here is 0."""
    trust_remote_code: bool = False
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: a third more time, a fraction of the memory. On CPU only for
    micro-batches whose activations would pass 1 GiB."""
    activation_offload: bool = False
    """Keep activations in host memory between forward and backward pass; nothing on a CPU."""
    use_shm: bool = False
    """Read the folder from a copy in shared memory, one for all processes of a node."""
    external_lib: str | None = None
    """Module, or several separated by commas, to import first: for models that register themselves."""
    load: bool = True
    """False: random weights in the shape the config gives."""
    use_torch_compile: bool = False
    """Fuse the operations on logits with torch.compile; on CUDA only."""
    head_backend: Literal["torch", "triton"] = "torch"
    """Kernel for logits where no entropy is requested; ``triton``: liger's, on CUDA only."""
    use_liger: bool | None = False
    """Compute norms, gated MLPs and the rotary embedding with liger's kernels; on CUDA only. None: ``build_engine``
    decides."""
    compile_layers: bool = False
    """The engine compiles each decoder layer with torch.compile, on any device."""
    lora: LoRASpec | None = None
    """Train an adapter and freeze the rest; None trains everything."""
    freeze_vision_tower: bool = False
    """Train the rest of a vision-language model only."""
    remove_padding: bool = False
    """Rows run packed into one sequence, without padding."""
    share_prompts: bool = False
    """With ``remove_padding``: a prompt shared by several rows of a micro-batch runs once."""
    max_sequence_length: int | None = None
    """Tokens of the run's longest sequence, by which ``longrope`` and ``dynamic`` frequencies are picked; None: the
    model's whole context."""

    @property
    def folder(self) -> str:
        """Local folder of the model: ``path``, or the node's copy in shared memory, made at first use."""
        return copy_to_local(self.path, use_shm=self.use_shm)

    @property
    def has_dropout(self) -> bool:
        """Whether the user enabled dropout, which makes two passes over the same tokens differ."""
        return any(_dropout_rates(self.override_config))

    @property
    def param_torch_dtype(self) -> torch.dtype:
        return PrecisionType.to_dtype(self.param_dtype)

    @property
    def compute_torch_dtype(self) -> torch.dtype:
        return PrecisionType.to_dtype(self.compute_dtype or self.param_dtype)


def load_config(spec: ModelSpec) -> Any:
    """Read the model's config and apply the overrides.

    Raises:
        ValueError: where the folder holds no readable config, or an override is no entry of it.
    """
    from transformers import AutoConfig

    # modules that register model classes must come before the config is read
    for module in (spec.external_lib or "").split(","):
        if module.strip():
            importlib.import_module(module.strip())
    try:
        config = AutoConfig.from_pretrained(spec.folder, trust_remote_code=spec.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path={spec.path!r} holds no model: {error}") from error
    overrides = {name: value for name, value in spec.override_config.items() if name != "attn_implementation"}
    if overrides.get("output_router_logits"):
        raise ValueError(
            "override_config.output_router_logits=true: the auxiliary loss of a mixture of experts is not part of the "
            "losses here, which read log-probs and values, so router logits would be kept for nothing. Leave it out."
        )
    if not spec.trust_remote_code:  # code of the folder may read what its config does not name
        taken = {"classifier_dropout"} if spec.head != "lm" else set()
        unknown = list(unknown_entries(config, {k: v for k, v in overrides.items() if k not in taken}))
        if unknown:
            raise ValueError(f"{' '.join(unknown)} (model.path={spec.path!r})")
    update_model_config(config, overrides)
    _zero_dropout_rates(config, spec.override_config)
    if spec.head != "lm":
        if spec.head == "value" or spec.new_head and not is_classifier(config):
            config.num_labels = 1
        if "classifier_dropout" not in overrides:
            config.classifier_dropout = 0.0
    return config


def _zero_dropout_rates(config: Any, chosen: Mapping[str, Any]) -> None:
    """Set every dropout rate of ``config`` and its nested configs to 0, except those in ``chosen``."""
    from transformers import PretrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            inner = chosen.get(name)
            _zero_dropout_rates(value, inner if isinstance(inner, Mapping) else {})
        elif _is_dropout_rate(name, value) and name not in chosen:
            setattr(config, name, 0.0)


def _dropout_rates(entries: Mapping[str, Any]) -> Iterator[float]:
    """The dropout rates among the entries of a config, nested ones included."""
    for name, value in entries.items():
        if isinstance(value, Mapping):
            yield from _dropout_rates(value)
        elif _is_dropout_rate(name, value):
            yield value


def _is_dropout_rate(name: str, value: Any) -> bool:
    """Whether an entry is a dropout rate: ``dropout``, ``attn_pdrop``, ``layerdrop``."""
    return "drop" in name and isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def source_dtype(spec: ModelSpec) -> torch.dtype | None:
    """Return the precision in the model's config."""
    config = load_config(spec)
    return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)


def load_model(spec: ModelSpec, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model on CPU with its weights, in ``dtype`` (default ``spec.param_dtype``), ready for training.

    Args:
        seed: of weights missing from the checkpoint: a new value head, an adapter, or all with
            ``spec.load=False``.

    Raises:
        ValueError: if weights are missing from the checkpoint, which would silently stay random, or not finite.
    """
    # new weights come from ``seed`` alone, and the caller's generator stays where it was
    config, dtype = load_config(spec), dtype or spec.param_torch_dtype
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        torch.manual_seed(seed)
        if spec.load:
            model, report = _auto_class(spec, config).from_pretrained(
                spec.folder,
                config=config,
                dtype=dtype,
                trust_remote_code=spec.trust_remote_code,
                attn_implementation=_attention(spec, config),
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below
            )
            _check_complete(spec, report)
            for name, parameter in model.named_parameters():
                check_finite(spec, name, parameter)
        else:
            model = _from_config(spec, config, dtype)
    return _prepare(spec, model, seed, dtype)


def empty_model(spec: ModelSpec, dtype: torch.dtype | None = None) -> nn.Module:
    """Build the model without memory for its weights (on the meta device): the shape to shard before loading.

    Args:
        dtype: of the weights (default ``spec.param_dtype``); buffers, as rotary frequencies, keep the model's own.
    """
    dtype = dtype or spec.param_torch_dtype
    # buffers are made too, without memory: the sharding engine fills them
    with torch.device("meta"):
        return _prepare(spec, _from_config(spec, load_config(spec), dtype), dtype=dtype)


def stored_model(spec: ModelSpec, seed: int = 0, dtype: torch.dtype | None = None) -> tuple[Any, WeightFiles] | None:
    """Build the model with its weights left in their files: on the meta device, for engines that read a part.

    Buffers, and what the files lack (a new head) or never have (an adapter), are on CPU as `load_model` makes them.

    Returns:
        The model, and the weights of its parameters on the meta device. None where they can only be loaded whole:
        files other than safetensors, quantized numbers, code of the folder's own, two values for a tied weight.

    Raises:
        ValueError: as `load_model`, but for numbers that are not finite: see `check_finite`.
    """
    from transformers import PreTrainedModel

    config, dtype = load_config(spec), dtype or spec.param_torch_dtype
    stored = stored_tensors(spec.folder) if spec.load else None
    if stored is None or getattr(config, "quantization_config", None):
        return None
    with torch.device("meta"):
        model: Any = _from_config(spec, config, dtype)
    is_ours = type(model).__module__ == value_class.__module__
    if not isinstance(model, PreTrainedModel) or model.is_custom_code() and not is_ours:
        return None
    files = WeightFiles(stored, model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    sources = {parameter: [name for name in same if name in files] for parameter, same in names.items()}
    if any(len(found) > 1 for found in sources.values()):
        return None
    buffers = model.state_dict().keys() - {name for same in names.values() for name in same}
    lacking = [names[parameter][0] for parameter, found in sources.items() if not found]
    lacking += [name for name in buffers if name not in files]
    known = re.compile("|".join(model._keys_to_ignore_on_load_missing or ()) or "(?!)")
    missing = [name for name in lacking if not known.search(name)]
    _check_complete(spec, {"missing_keys": missing, "mismatched_keys": files.mismatched})
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        torch.manual_seed(seed)
        _initialize(model, {parameter for parameter, found in sources.items() if found})
    for name in buffers:
        if name in files:
            buffer = model.get_buffer(name)
            buffer.copy_(files.rows(name, 0, len(buffer) if buffer.ndim else 1, buffer.dtype))
    _prepare(spec, model, seed, dtype)
    # by the objects: an adapter gives the layers other names
    files.rename(
        {
            name: sources[parameter][0]
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if sources.get(parameter)
        }
    )
    return model, files


@torch.no_grad()
def _initialize(model: Any, stored: Set[nn.Parameter]) -> None:
    """Give all but the ``stored`` parameters memory and their first values, as transformers' ``from_pretrained``."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        module.__dict__.pop("_is_hf_initialized", None)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in stored:
                made.setdefault(parameter, nn.Parameter(torch.empty_like(parameter, device="cpu")))
                module._parameters[name] = made[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    # transformers' mark of what is not to be made
    for parameter in stored:
        vars(parameter)["_is_hf_initialized"] = True
    model.initialize_weights()
    for parameter in stored:
        del vars(parameter)["_is_hf_initialized"]


def _auto_class(spec: ModelSpec, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    if spec.head == "lm":
        return language_model_class(config) or AutoModelForCausalLM
    if spec.head == "reward":
        return reward_class(spec.path, config, spec.new_head)
    return value_class(spec.path, config)


def language_model_class(config: Any) -> Any:
    """Return the auto class of vision-language models for the configs that need it, else None.

    ``AutoModelForCausalLM`` would load only the text part of such a family, or nothing.
    """
    from transformers import AutoModelForImageTextToText

    if not is_vision_language(config) or type(config) not in AutoModelForImageTextToText._model_mapping:
        return None
    return AutoModelForImageTextToText


def _from_config(spec: ModelSpec, config: Any, dtype: torch.dtype) -> nn.Module:
    chosen = _auto_class(spec, config)
    options = {"dtype": dtype, "attn_implementation": _attention(spec, config)}
    if not hasattr(chosen, "from_config"):  # no auto class, but the model's own
        return chosen._from_config(config, **options)
    return chosen.from_config(config, trust_remote_code=spec.trust_remote_code, **options)


def _attention(spec: ModelSpec, config: Any) -> str | None:
    chosen = spec.override_config.get("attn_implementation")
    # torch's fused attention has no softcap and transformers silently ignores it there (Gemma 2)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return chosen or ("eager" if capped else None)


def _check_complete(spec: ModelSpec, report: Mapping[str, Any]) -> None:
    missing = sorted(report.get("missing_keys") or ())
    if (
        spec.head == "reward"
        and not spec.new_head
        and any(is_head(name) and name.endswith("weight") for name in missing)
    ):
        raise ValueError(
            f"model.path={spec.path!r} holds no weights of its head, {[name for name in missing if is_head(name)]}: a "
            "random head would make random rewards. Name a checkpoint of a trained reward model."
        )
    if spec.head != "lm":
        missing = [name for name in missing if not is_head(name)]
    wrong = [str(entry[0]) for entry in report.get("mismatched_keys") or ()]
    if missing or wrong:
        raise ValueError(
            f"model.path={spec.path!r} lacks {len(missing)} weights and has {len(wrong)} of another shape, first "
            f"{(missing + wrong)[:3]}: they would stay random. Use a complete checkpoint of this architecture."
        )


def check_finite(spec: ModelSpec, name: str, weight: Tensor) -> None:
    """Raise ValueError unless all numbers of a weight are finite."""
    if found := nonfinite_numbers(weight):
        raise ValueError(
            f"model.path={spec.path!r}: {name} has {found}, so every output of this model would be NaN. Its files "
            "are of a training that diverged, or were converted wrongly: use another checkpoint."
        )


def _prepare(spec: ModelSpec, model: Any, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Enable what training needs; disable what makes two passes over the same tokens differ."""
    # before sharding, which changes the model's class
    remember_conversions(model)
    if spec.use_liger:
        from verl.models.liger import use_liger_layers

        use_liger_layers(model)  # before an adapter wraps layers of MLPs
    if not spec.has_dropout:
        disable_dropout(model)
    fix_rotary_frequencies(model, spec.max_sequence_length)
    if spec.freeze_vision_tower:
        vision_tower(model).requires_grad_(False)
    if spec.lora is not None:
        from verl.models.lora import add_adapter

        add_adapter(model, spec.lora, seed, is_value=spec.head != "lm")
        cast_parameters(model, dtype or spec.param_torch_dtype)
    if spec.gradient_checkpointing and not getattr(model, "supports_gradient_checkpointing", True):
        logger.warning(
            "model.enable_gradient_checkpointing=true has no effect: %s cannot recompute its layers. If activations do "
            "not fit, use smaller micro-batches.",
            type(model).__name__,
        )
    elif spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def cast_parameters(model: nn.Module, dtype: torch.dtype, frozen_only: bool = False) -> None:
    """Cast the parameters, or only the frozen ones, to ``dtype``; ties are kept."""
    for parameter in model.parameters():
        if not (frozen_only and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate to 0: importance ratios compare two passes, which dropout would make differ.

    The config has none by then; this catches rates hard-coded in a model's code.
    """
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if _is_dropout_rate(name, value):
                setattr(module, name, 0.0)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide progress bars and the warning about a new value head; ``_check_complete`` reports missing weights."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        hf_logging.set_verbosity(level)
