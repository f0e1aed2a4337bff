"""Rotary frequencies that do not depend on the other rows of a forward pass.

transformers picks the frequencies of RoPE ``longrope`` (Phi-3, Phi-4) and ``dynamic`` by the largest position of a
micro-batch, so that a row's log-probs would change next to a longer one, and a response would change frequencies while
it is generated. Here they are fixed once, for the longest sequence of the run, as vLLM does for its ``max_model_len``.

Sources: Ding et al. 2024, LongRoPE (arXiv:2402.13753); dynamic NTK scaling as in transformers.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def depends_on_length(kind: Any) -> bool:
    """Whether transformers changes the frequencies of this ``rope_type`` during forward passes."""
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def fix_rotary_frequencies(model: nn.Module, longest: int | None) -> None:
    """Fix every rotary embedding of ``model`` to the frequencies of a sequence of ``longest`` tokens.

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
        elif depends_on_length(kinds):
            module.rope_type = _fix(module, kinds, longest)
            found = True
    kind, trained = _rope_type_and_length(text)
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


def _rope_type_and_length(text: Any) -> tuple[str | None, int | None]:
    """Return the RoPE type of a config, and the length it was trained for."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    trained = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return kind, trained or getattr(text, "max_position_embeddings", None)
