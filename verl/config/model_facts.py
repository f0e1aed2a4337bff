"""What a model's folder says without opening the model: shapes from config.json, sizes from the headers of its weights.

Knows JSON and bytes; no torch, no transformers. A hub id is looked up among the downloaded ones.
"""

import json
import os
from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "qwen.tiktoken", "tekken.json",
)  # fmt: skip
"""Files one of which a tokenizer is made of."""

_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "stablelm_epoch")
"""Families whose MLP has two matrices instead of three."""

_BIASED_QKV = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text")


class ModelFacts(NamedTuple):
    """Shape of a decoder. A number is None where the config does not name it."""

    folder: Path
    model_type: str
    layers: int
    hidden: int
    inner: int
    """Width of the MLP; of one expert where there are experts."""
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    context: int | None
    is_tied: bool
    """Input and output embeddings are one matrix."""
    experts: int
    """0: a dense MLP."""
    active_experts: int
    parameters: int
    """Of the whole model, counted from stored weights or else from the shape."""
    is_stored: bool
    """Whether weights were found and counted."""
    architecture: str
    is_multimodal: bool

    @property
    def embedding(self) -> int:
        """Numbers of one embedding matrix."""
        return self.vocab * self.hidden

    @property
    def layer(self) -> int:
        """Numbers of one layer, on average."""
        outside = self.embedding * (1 if self.is_tied else 2)
        return max(0, self.parameters - outside) // max(1, self.layers)

    @property
    def cached_numbers_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size


def find_folder(path: str) -> Path | None:
    """The folder of a path or of a hub id that was downloaded; None if it is neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path[0] in "/~.":
        return None
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    snapshots = hub.expanduser() / f"models--{path.replace('/', '--')}" / "snapshots"
    found = [folder for folder in snapshots.glob("*") if (folder / "config.json").exists()]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def read_json(file: Path) -> dict[str, Any]:
    """Content of a JSON file; empty if there is none or it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_model(path: str, override: Mapping[str, Any] | None = None) -> ModelFacts | None:
    """Facts of the model at ``path``; None where its config.json is not at hand or is of no decoder.

    Args:
        override: entries laid over config.json, as ``model.override_config``.
    """
    folder = find_folder(path)
    config = read_json(folder / "config.json") if folder else {}
    if not config:
        return None
    whole = {**config, **dict(override or {})}
    text = {**whole, **(whole.get("text_config") or {})}
    names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    hidden, layers, heads = (text.get(name) or text.get(other) for name, other in names.items())
    vocab = text.get("vocab_size")
    if not all(isinstance(number, int) and number > 0 for number in (hidden, layers, heads, vocab)):
        return None
    experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    shapes = stored_shapes(folder)
    facts = ModelFacts(
        folder=folder,
        model_type=str(text.get("model_type", "")),
        layers=layers,
        hidden=hidden,
        inner=(text.get("moe_intermediate_size") or inner) if experts else inner,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_size=text.get("head_dim") or hidden // heads,
        vocab=vocab,
        context=text.get("max_position_embeddings") or text.get("n_positions"),
        is_tied=bool(whole.get("tie_word_embeddings", text.get("tie_word_embeddings", _tied_unless_said(text)))),
        experts=experts,
        active_experts=text.get("num_experts_per_tok") or 1,
        parameters=sum(prod(shape) for shape in shapes.values()),
        is_stored=bool(shapes),
        architecture=next(iter(whole.get("architectures") or ()), ""),
        is_multimodal="vision_config" in whole,
    )
    return facts if shapes else facts._replace(parameters=count_parameters(facts))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _tied_unless_said(text: Mapping[str, Any]) -> bool:
    """transformers' default where config.json is silent: False but for some families."""
    return str(text.get("model_type", "")).startswith(("gemma", "gpt2", "opt", "bloom", "falcon"))


def count_parameters(facts: ModelFacts) -> int:
    """Numbers of a decoder of this shape, vision towers left out."""
    h, wide = facts.hidden, facts.heads * facts.head_size
    narrow = facts.kv_heads * facts.head_size
    attention = 2 * h * wide + 2 * h * narrow
    if facts.model_type in _BIASED_QKV:
        attention += wide + 2 * narrow
    matrices = 2 if facts.model_type in _UNGATED else 3
    mlp = matrices * h * facts.inner
    if facts.experts:
        mlp = facts.experts * mlp + h * facts.experts
    norms = (4 if facts.model_type.startswith(("gemma2", "gemma3")) else 2) * h
    norms += 2 * facts.head_size if facts.model_type.startswith("qwen3") else 0
    return facts.layers * (attention + mlp + norms) + h + facts.embedding * (1 if facts.is_tied else 2)


@lru_cache(maxsize=64)
def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights in a folder's safetensors files, from their headers; empty if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError, MemoryError, OverflowError):
            return {}
        shapes.update((name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    return shapes


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest token id that a folder's tokenizer can give; None where it has no tokenizer.json."""
    content = read_json(folder / "tokenizer.json")
    vocabulary = (content.get("model") or {}).get("vocab")
    if not vocabulary:
        return None
    largest = max(vocabulary.values()) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return 1 + max([largest, *(token["id"] for token in content.get("added_tokens") or ())])
