"""Output heads of models: what lies between hidden states and logits, and scalar heads of critics and reward models.

Critics (a value per token) and reward models (a score per text) are a language model's body with a linear layer of one
output, which the engine applies itself: to the state before each response token (value) or of a text's last token
(reward). Knows transformers' classes and the names of stored weights; no batches.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from verl.models.multimodal import is_vision_language

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OutputHead:
    """Kind and constants of a model's output head, from ``detect_output_head``."""

    kind: Literal["fused", "logits", "value"]
    scale: float = 1.0
    softcap: float = 0.0
    compiled: bool = False
    triton: bool = False
    excluded_tokens: tuple[int, ...] = ()
    """Tokens that get no probability because the policy must not generate them, such as image placeholders."""


@torch.no_grad()
def detect_output_head(model: Any, device: torch.device, compiled: bool = False) -> OutputHead:
    """Detect by one short forward pass what the model computes between hidden states and logits.

    The input of the last linear layer is amplified so that its outputs reach 30, where a softcap or a scale shows even
    in an untrained model. Anything but a linear layer, a constant from the config or a tanh cap falls back to whole
    logits, with a warning.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear) or layer.bias is not None:
        return _full_logits_head(model, "its last layer is not a linear layer without bias")
    captured: dict[str, Tensor] = {}

    def amplify(module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        captured["input"] = args[0]
        return (args[0] * (30 / (args[0] @ module.weight.t()).abs().amax().clamp_min(1e-6)),)

    # the states that the body returns must be those that the last layer gets, or something lies between
    hooks = [
        model.base_model.register_forward_hook(lambda _module, _args, out: captured.update(hidden=out[0])),
        layer.register_forward_pre_hook(amplify),
        layer.register_forward_hook(lambda _module, _args, out: captured.update(raw=out)),
    ]
    training = model.training
    try:
        model.eval()
        ids = torch.arange(16, device=device).view(2, 8) % model.config.get_text_config().vocab_size
        final = model(input_ids=ids, use_cache=False).logits.float()
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if "raw" not in captured or "hidden" not in captured or not torch.equal(captured["hidden"], captured["input"]):
        return _full_logits_head(model, "its hidden states are changed before the last layer")
    raw = captured["raw"].float()
    # the constants that the config names, the plain head first
    config = model.config.get_text_config()
    caps = dict.fromkeys((0.0, float(getattr(config, "final_logit_softcapping", None) or 0.0)))
    logit_scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    scales = [1.0, *([float(logit_scale)] if logit_scale else ()), *([1.0 / float(divisor)] if divisor else ())]
    for softcap, scale in product(caps, scales):
        made = raw * scale
        made = torch.tanh(made / softcap) * softcap if softcap else made
        # loose, since bf16 logits near 30 are an eighth apart
        if torch.allclose(made, final, rtol=0.02, atol=0.02 * float(made.abs().amax())):
            return OutputHead("fused", scale, softcap, compiled)
    return _full_logits_head(model, "its logits are changed after the last layer")


def _full_logits_head(model: nn.Module, reason: str) -> OutputHead:
    logger.warning(
        "%s: %s, so all logits of a micro-batch are held in memory; use small micro-batches",
        type(model).__name__,
        reason,
    )
    return OutputHead("logits")


# -- scalar heads: critics and reward models --------------------------------------------------------------------------

HEADS = ("score", "classifier")
"""Names of the last layer in transformers' token and sequence classifiers."""


def value_class(path: str, config: Any) -> Any:
    """Return the class of a critic: transformers' token classifier of the family or, without one, an equivalent.

    A critic that starts from a reward model is of the reward model's class, so that its head is found.

    Raises:
        ValueError: for a model to which no head can be added.
    """
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    scores_texts = "ForSequenceClassification" in _architecture(config)
    for known in (AutoModelForSequenceClassification,) * scores_texts + (AutoModelForTokenClassification,):
        if type(config) in known._model_mapping or known.__name__ in (getattr(config, "auto_map", None) or {}):
            return known
    return _body_with_a_head(path, config)


def is_classifier(config: Any) -> bool:
    """Whether a checkpoint is a sequence or token classifier."""
    architecture = _architecture(config)
    return "ForSequenceClassification" in architecture or "ForTokenClassification" in architecture


def reward_class(path: str, config: Any, new_head: bool = False) -> Any:
    """Return the class of a reward model by its checkpoint's architecture: a sequence or token classifier of one label.

    With ``new_head`` a language model becomes a sequence classifier.

    Raises:
        ValueError: for a checkpoint that is neither, or of a family that has no sequence classifier.
    """
    architecture = _architecture(config)
    if new_head and not is_classifier(config):
        from transformers import AutoModelForSequenceClassification

        if type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise ValueError(
                f"model.path={path!r} is of type {config.model_type!r}, of which transformers has no sequence "
                "classifier, so no other program could read the reward model. Use a family that has one, such as "
                "llama, qwen2, qwen3, mistral or gemma."
            )
        return AutoModelForSequenceClassification
    if not is_classifier(config):
        raise ValueError(
            f"model.path={path!r} holds {architecture}, not a reward model: its scores would be random numbers. Name a "
            "model trained to score texts, a sequence or token classifier with one label (num_labels=1)."
        )
    if config.num_labels != 1:
        raise ValueError(
            f"model.path={path!r} has {config.num_labels} labels (num_labels), and a reward is one number. Name a "
            "model that was trained with one label."
        )
    return value_class(path, config)


def _architecture(config: Any) -> str:
    return next(iter(getattr(config, "architectures", None) or ()), "no architecture")


def _body_with_a_head(path: str, config: Any) -> type:
    """Return a token classifier for a family without one in transformers, with transformers' naming."""
    from transformers import AutoModel

    if is_vision_language(config):
        raise ValueError(
            f"model.path={path!r} is a vision-language model of type {config.model_type!r}, which cannot get a value "
            "head: choose an advantage estimator without a critic (grpo, rloo), or a critic that reads text"
        )
    body = AutoModel._model_mapping[type(config)] if type(config) in AutoModel._model_mapping else None
    body = body[0] if isinstance(body, tuple) else body
    base = next((cls for cls in getattr(body, "__mro__", ()) if cls.__name__.endswith("PreTrainedModel")), None)
    if base is None or not base.base_model_prefix or getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"model.path={path!r} is of type {config.model_type!r}, to whose body no head can be added: name a causal "
            "language model that transformers itself knows"
        )
    name = base.__name__.removesuffix("PreTrainedModel") + "ForTokenClassification"
    return type(name, (_ScalarHead, base), {"__module__": __name__})


class _ScalarHead(nn.Module):
    """Mixin before a family's ``PreTrainedModel``: the body under its usual attribute name, then ``score``."""

    # of PreTrainedModel
    base_model: Any
    base_model_prefix: str
    post_init: Callable[[], None]

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel

        super().__init__(config)
        setattr(self, self.base_model_prefix, AutoModel.from_config(config))
        self.score = nn.Linear(config.get_text_config().hidden_size, 1)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> Any:
        from transformers.modeling_outputs import TokenClassifierOutput

        return TokenClassifierOutput(logits=self.score(self.base_model(input_ids, **inputs)[0]))


def is_head(name: str) -> bool:
    """Whether a weight belongs to the last layer."""
    return name.split(".")[0] in HEADS


def stored_shapes(folder: str | Path) -> dict[str, list[int]]:
    """Name -> shape of the weights in a folder's safetensors files, read from their headers."""
    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(folder).expanduser().glob("*.safetensors")):
        # safetensors: eight bytes of the header's length, then JSON
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes.update((name, entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return shapes


def stores_head(folder: str | Path) -> bool | None:
    """Whether a folder's weights include a last layer with one output; None without safetensors files."""
    shapes = stored_shapes(folder)
    if not shapes:
        return None
    return any(is_head(name) and name.endswith(".weight") and shape[0] == 1 for name, shape in shapes.items())


def score_layer(model: nn.Module) -> nn.Linear:
    """Return the linear layer with one output that computes values or scores."""
    for name in HEADS:
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return layer
    raise ValueError(
        f"{type(model).__name__} has no linear layer {' or '.join(map(repr, HEADS))} with one output to read a number "
        "from: use a model family whose classification head is such a layer"
    )


@torch.no_grad()
def check_score_head(model: Any, device: torch.device, head: Any) -> None:
    """Check by two short forward passes that the score at a token equals the model's own score of the text that ends
    there.

    Raises:
        ValueError: the head is more than a linear layer on the last token's state, or attention is not causal.
    """
    config = model.config.get_text_config()
    # a classifier looks for the last token that is not padding, so leave padding tokens out
    ids = [i for i in range(16) if i != getattr(config, "pad_token_id", None)][:8]
    ids = torch.tensor([ids], device=device) % config.vocab_size
    training = model.training
    try:
        model.eval()
        expected = model(input_ids=ids[:, :6], use_cache=False).logits.flatten()[-1].item()
        scores = model.token_outputs(ids, None, torch.arange(8, device=device), None, head, 1.0, False).values.tolist()
    finally:
        model.train(training)
    size = max(map(abs, scores))
    if not math.isclose(scores[5], expected, rel_tol=0.05, abs_tol=0.05 * size + 1e-6):
        raise ValueError(
            f"{type(model).__name__} scores a text of 6 tokens {expected:.4f} itself, and its head gives "
            f"{scores[5]:.4f} at the 6th token when more tokens follow: it is not a causal model with a linear "
            "head. Use a model that is."
        )
