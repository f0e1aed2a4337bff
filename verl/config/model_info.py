"""Metadata of a model's folder, the model unopened: shapes from config.json, sizes from the headers of its weights.

Knows JSON and bytes; no torch, no transformers. A hub id is looked up among the downloaded ones.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import Problem, get_path
from verl.config.checks.base import models, problem
from verl.config.checks.megatron import megatron_roles
from verl.config.megatron import FAMILIES, REFUSED_FAMILIES, SPLITS
from verl.config.ppo import ACTOR, MODEL, REF, RM, ROLLOUT, TEACHER, PPOConfig

TOKENIZERS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "tiktoken.model", "qwen.tiktoken", "tekken.json",
)  # fmt: skip
"""Files one of which a tokenizer is made of."""

_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "phi", "starcoder2", "stablelm_epoch")
"""Families whose MLP has two matrices instead of three."""

_BIASED_QKV = ("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text")


class ModelShape(NamedTuple):
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
    # ``owner/name``; anything else with a slash is a path that does not exist
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


def read_model(path: str, override: Mapping[str, Any] | None = None) -> ModelShape | None:
    """Shape of the model at ``path``; None where its config.json is not at hand or is of no decoder.

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
    # the same number under the names that families give it
    experts = next((text[name] for name in _EXPERTS if text.get(name)), 0)
    inner = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    shapes = stored_shapes(folder)
    model = ModelShape(
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
    return model if shapes else model._replace(parameters=count_parameters(model))


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _tied_unless_said(text: Mapping[str, Any]) -> bool:
    """transformers' default where config.json is silent: False but for some families."""
    return str(text.get("model_type", "")).startswith(("gemma", "gpt2", "opt", "bloom", "falcon"))


def count_parameters(model: ModelShape) -> int:
    """Numbers of a decoder of this shape, vision towers left out."""
    h, wide = model.hidden, model.heads * model.head_size
    narrow = model.kv_heads * model.head_size
    attention = 2 * h * wide + 2 * h * narrow
    if model.model_type in _BIASED_QKV:
        attention += wide + 2 * narrow
    matrices = 2 if model.model_type in _UNGATED else 3
    mlp = matrices * h * model.inner
    if model.experts:
        mlp = model.experts * mlp + h * model.experts
    norms = (4 if model.model_type.startswith(("gemma2", "gemma3")) else 2) * h
    norms += 2 * model.head_size if model.model_type.startswith("qwen3") else 0
    return model.layers * (attention + mlp + norms) + h + model.embedding * (1 if model.is_tied else 2)


@lru_cache(maxsize=64)
def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the weights in a folder's safetensors files, from their headers; empty if there are none."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with open(file, "rb") as stream:
                # safetensors: eight bytes with the length of the header, then the header as JSON
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        except (OSError, ValueError, MemoryError, OverflowError):
            return {}
        shapes.update((name, tuple(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    return shapes


def tokenizer_size(folder: Path) -> int | None:
    """One more than the largest token id that a folder's tokenizer can give; None where it has no tokenizer.json."""
    tokens = vocabulary(folder)
    return 1 + max(tokens.values()) if tokens else None


def vocabulary(folder: Path) -> dict[str, int]:
    """Token -> id of a folder's tokenizer; empty where it has no tokenizer.json."""
    content = read_json(folder / "tokenizer.json")
    found = (content.get("model") or {}).get("vocab") or {}
    if not isinstance(found, dict):  # of pieces with their scores
        found = {str(piece[0]): number for number, piece in enumerate(found)}
    added = content.get("added_tokens") or () if found else ()
    return {**found, **{token["content"]: token["id"] for token in added}}


# -- What a model's config.json says against the settings: heads, context, vocabulary, adapters. No model is opened --


_LISTS_LABELS = ("ForSequenceClassification", "ForTokenClassification")


def model_problems(config: PPOConfig) -> list[Problem]:
    """Every contradiction between the models' folders and the settings."""
    return [found for check in _CHECKS for found in check(config)]


def shape_of(config: PPOConfig, role: str) -> ModelShape | None:
    """The model of a role: ``actor``, ``ref``, ``rollout``, ``critic``, ``reward_model`` or one of `teachers`."""
    shared = config.actor_rollout_ref
    if role == "critic":
        return read_model(config.critic.model.path, config.critic.model.override_config)
    if role == "reward_model":
        return read_model(config.reward_model.model.path)
    if role == "ref" and shared.ref.own_path:
        return read_model(shared.ref.own_path, shared.model.override_config)
    if role.startswith("teacher_models."):
        return read_model(get_path(config, path_key(config, role)))
    return read_model(shared.model.path, shared.model.override_config)


def teachers(config: PPOConfig, served: bool = False) -> list[str]:
    """The teachers as roles, ``teacher_models.<name>``: those that run here, or those on servers with a folder here."""
    options = config.distillation
    found = options.teachers().items() if options.enabled else ()
    return [f"teacher_models.{name}" for name, one in found if one.model_path and one.is_served == served]


def path_key(config: PPOConfig, role: str) -> str:
    """The option that names a role's model."""
    if role == "ref":
        return f"{REF}.model.path" if config.actor_rollout_ref.ref.own_path else f"{MODEL}.path"
    if role.startswith("teacher_models."):
        return f"distillation.{role}.model_path"
    return {"critic": "critic.model.path", "reward_model": f"{RM}.model.path"}.get(role, f"{MODEL}.path")


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _rollout_shares_heads(config: PPOConfig) -> Iterator[Problem]:
    rollout, model = config.actor_rollout_ref.rollout, shape_of(config, "rollout")
    size = rollout.tensor_model_parallel_size
    if not rollout.traits.is_external or model is None or size == 1:
        return
    if model.heads % size:
        text = (
            f"does not divide the {model.heads} attention heads (num_attention_heads) of "
            f"{MODEL}.path={config.actor_rollout_ref.model.path}. Choose one of {_divisors(model.heads)}."
        )
        yield problem(config, f"{ROLLOUT}.tensor_model_parallel_size", text, f"{MODEL}.path")
    elif model.kv_heads % size and size % model.kv_heads:
        text = (
            f"neither divides the {model.kv_heads} key-value heads (num_key_value_heads) of "
            f"{MODEL}.path={config.actor_rollout_ref.model.path} nor is a multiple of them. Choose one of "
            f"{_divisors(model.kv_heads)}."
        )
        yield problem(config, f"{ROLLOUT}.tensor_model_parallel_size", text, f"{MODEL}.path")


def _sequences_share_heads(config: PPOConfig) -> Iterator[Problem]:
    names = {ACTOR: ["actor"], REF: ["ref"], "critic": ["critic"], RM: ["reward_model"], TEACHER: teachers(config)}
    roles = [(key, section, name) for key, section in models(config).items() for name in names[key]]
    for key, section, name in roles:
        model, size = shape_of(config, name), section.ulysses_sequence_parallel_size
        if model is not None and model.heads % size:
            text = (
                f"does not divide the {model.heads} attention heads (num_attention_heads) of "
                f"{path_key(config, name)}={get_path(config, path_key(config, name))}. Choose one of "
                f"{_divisors(model.heads)}."
            )
            yield problem(config, f"{key}.ulysses_sequence_parallel_size", text, path_key(config, name))


def _megatron_shares_the_model(config: PPOConfig) -> Iterator[Problem]:
    names = {ACTOR: "actor", REF: "ref", "critic": "critic", RM: "reward_model"}
    for role in megatron_roles(config):
        model = shape_of(config, names[role.key])
        if model is None:
            continue
        path = path_key(config, names[role.key])
        whose = f"of {path}={get_path(config, path)}"
        sizes = role.section.megatron
        mesh = sizes.mesh(config.trainer.world_size)
        stored = Path(sizes.dist_checkpointing_path or "").expanduser() if sizes.use_dist_checkpointing else None
        if stored is not None and not (stored / "metadata.json").exists():
            text = (
                "holds no distributed checkpoint of megatron-core: there is no metadata.json in it. Give the folder "
                "that scripts/converter_hf_to_mcore.py wrote, or dist_ckpt of a run's checkpoint."
            )
            yield problem(config, f"{role.place}.dist_checkpointing_path", text)
        if model.model_type not in FAMILIES:
            reason = REFUSED_FAMILIES.get(model.model_type, "is not mapped to it")
            text = (
                f"with {role.key}.strategy=megatron: a model of type {model.model_type} {reason}. Admitted are "
                f"{', '.join(FAMILIES)}. Use strategy=fsdp2 or deepspeed, which run any model of transformers."
            )
            yield problem(config, path, text, f"{role.key}.strategy")
            continue
        tp, pp, ep = (
            f"{role.place}.{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model")
        )
        if model.heads % mesh.tp:
            text = f"does not divide the {model.heads} attention heads (num_attention_heads) {whose}. "
            yield problem(config, tp, f"{text}Choose one of {_divisors(model.heads)}.", path)
        elif model.kv_heads % mesh.tp:
            text = f"does not divide the {model.kv_heads} key-value heads (num_key_value_heads) {whose}. "
            yield problem(config, tp, f"{text}Choose one of {_divisors(model.kv_heads)}.", path)
        if not set(SPLITS) & set(sizes.transformer_overrides) and model.layers % (mesh.pp * mesh.vpp):
            pieces = f"x virtual_pipeline_model_parallel_size={mesh.vpp} " if mesh.vpp > 1 else ""
            text = (
                f"{pieces}does not divide the {model.layers} layers (num_hidden_layers) {whose}. Choose a divisor, or "
                f"say how they are split in {role.place}.override_transformer_config ({', '.join(SPLITS[:2])})."
            )
            yield problem(config, pp, text, path)
        if model.experts and model.experts % mesh.ep:
            text = f"does not divide the {model.experts} experts {whose}. Choose one of {_divisors(model.experts)}."
            yield problem(config, ep, text, path)
        elif mesh.ep > 1 and not model.experts:
            yield problem(config, ep, f"spreads experts, and the model {whose} has none. Set it to 1.", path)
        elif model.experts and mesh.tp > 1 and not sizes.sequence_parallel:
            text = f"with tp {mesh.tp} and the experts {whose}: their tokens are exchanged in slices. Set it to true."
            yield problem(config, f"{role.place}.sequence_parallel", text, path)
        elif model.experts and mesh.tp > 1 and mesh.ep == 1 and mesh.etp == 1:
            text = (
                f"with tp {mesh.tp}, ep 1 and the experts {whose}: each rank would hold all experts whole. Set it to "
                "null, or expert_model_parallel_size to 2 or more."
            )
            yield problem(config, f"{role.place}.expert_tensor_parallel_size", text, path)


def _context_holds_prompt_and_response(config: PPOConfig) -> Iterator[Problem]:
    rollout, model = config.actor_rollout_ref.rollout, shape_of(config, "rollout")
    if model is None or model.context is None:
        return
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if length > model.context:
        keys = "data.max_prompt_length + data.max_response_length"
        key = f"{ROLLOUT}.max_model_len" if rollout.max_model_len else "data.max_response_length"
        shown = f"{key}={length}" if rollout.max_model_len else f"{keys}={length}"
        text = (
            f"{shown} is more than the {model.context} tokens of context (max_position_embeddings) of "
            f"{MODEL}.path={config.actor_rollout_ref.model.path}. Lower it, or raise "
            f"{MODEL}.override_config.max_position_embeddings if the model can do more."
        )
        yield Problem(key, text, ("data.max_prompt_length", f"{MODEL}.path"))


def _tokenizer_fits_the_embedding(config: PPOConfig) -> Iterator[Problem]:
    model, named = shape_of(config, "rollout"), config.data.tokenizer
    folder = find_folder(named) if named else model and model.folder
    size = tokenizer_size(folder) if folder else None
    if model is None or size is None or size <= model.vocab:
        return
    key, path = ("data.tokenizer", named) if named else (f"{MODEL}.path", config.actor_rollout_ref.model.path)
    whose = f"{MODEL}.path={config.actor_rollout_ref.model.path}" if named else "its model"
    text = (
        f"{key}={path} has token ids up to {size - 1}, and {whose} has embeddings for {model.vocab} (vocab_size): text "
        "with the others would stop the run. Take the tokenizer the model was trained with."
    )
    yield Problem(key, text, (f"{MODEL}.path",))


def _roles_read_the_same_tokens(config: PPOConfig) -> Iterator[Problem]:
    policy = shape_of(config, "rollout")
    for role in ("ref", "critic", "reward_model"):
        other = shape_of(config, role) if role in _roles(config) else None
        if policy is None or other is None or other.vocab >= policy.vocab:
            continue
        if role == "reward_model" and config.reward_model.model.input_tokenizer:
            continue  # it reads texts in its own tokens
        # a padded embedding has rows no token uses
        used = tokenizer_size(policy.folder) or policy.vocab
        if other.vocab < used:
            key = path_key(config, role)
            text = (
                f"has embeddings for {other.vocab} tokens (vocab_size), and the policy's tokenizer gives ids up to "
                f"{used - 1}: token ids of one are not those of the other. Name a model with the tokens of "
                f"{MODEL}.path={config.actor_rollout_ref.model.path}."
            )
            yield problem(config, key, text, f"{MODEL}.path")


def _teachers_share_the_vocabulary(config: PPOConfig) -> Iterator[Problem]:
    """Refuse a teacher for which a token id is another token: its distributions would be of other texts."""
    own_path = config.data.tokenizer or config.actor_rollout_ref.model.path
    key = "data.tokenizer" if config.data.tokenizer else f"{MODEL}.path"
    roles = [*teachers(config), *teachers(config, served=True)]
    folder = find_folder(own_path) if roles else None
    own = vocabulary(folder) if folder else {}
    for role in roles if own else ():
        path = get_path(config, path_key(config, role))
        their_folder, shape = find_folder(path), shape_of(config, role)
        theirs = vocabulary(their_folder) if their_folder else {}
        token = next((token for token, number in own.items() if theirs and theirs.get(token) != number), None)
        what = None
        if token is not None:
            what = f"the token {token!r} is number {own[token]} of {key}={own_path} and {theirs.get(token)} of its own"
        elif shape is not None and shape.vocab <= max(own.values()):
            what = f"it has {shape.vocab} tokens (vocab_size), and {key}={own_path} gives ids up to {max(own.values())}"
        if what:
            text = (
                f"has another vocabulary than the policy: {what}. Distributions over tokens cannot be compared. Name a "
                "teacher with the policy's tokenizer, of the same family for example, or train on its responses with "
                "verl sft."
            )
            yield problem(config, path_key(config, role), text, key)


def _reward_model_scores(config: PPOConfig) -> Iterator[Problem]:
    model = shape_of(config, "reward_model") if config.reward_model.uses_engine else None
    if model is not None and model.architecture and not model.architecture.endswith(_LISTS_LABELS):
        text = (
            f"is of {model.architecture}, not a reward model: its scores would be random numbers. Name a sequence or "
            "token classifier with one label."
        )
        yield problem(config, f"{RM}.model.path", text)


def _adapted_layers_are_there(config: PPOConfig) -> Iterator[Problem]:
    for place in (MODEL, *(["critic.model"] if config.uses_critic else [])):
        section = get_path(config, place)
        folder = find_folder(section.path)
        if not section.lora_rank or folder is None:
            continue
        layers = {name.removesuffix(".weight") for name in stored_shapes(folder) if name.endswith(".weight")}
        ends = {layer.rpartition(".")[2] for layer in layers}
        for option in ("target_modules", "exclude_modules"):
            missing = [
                name for name in _named(section[option]) if layers and not any(_is_end(layer, name) for layer in layers)
            ]
            if missing:
                known = ", ".join(sorted(end for end in ends if end.endswith(("proj", "attn", "fc1", "fc2", "dense"))))
                text = (
                    f"names {', '.join(missing)}, and {place}.path={section.path} has no such layer. Use "
                    f"{'all-linear, or ' if option == 'target_modules' else ''}some of "
                    f"{known or ', '.join(sorted(ends))}."
                )
                yield problem(config, f"{place}.{option}", text, f"{place}.path")


def _named(layers: str | list[str] | None) -> list[str]:
    """The entries that are names, or ends of names; what an expression fits is seen on the model itself."""
    entries = [layers] if isinstance(layers, str) else layers or []
    return [entry for entry in entries if entry != "all-linear" and re.fullmatch(r"[\w.]+", str(entry))]


def _overrides_are_entries(config: PPOConfig) -> Iterator[Problem]:
    """transformers knows the entries; it is asked only where something is overridden."""
    for place in (MODEL, *(["critic.model"] if config.uses_critic else [])):
        section = get_path(config, place)
        folder = find_folder(section.path)
        overrides = {key: value for key, value in section.override_config.items() if key != "attn_implementation"}
        if not overrides or section.trust_remote_code or folder is None or not (folder / "config.json").is_file():
            continue
        from transformers import AutoConfig

        from verl.utils.model import unknown_entries

        if place != MODEL:
            # of the value head that is put on the model, and in no config.json
            overrides.pop("classifier_dropout", None)
        try:
            entries = AutoConfig.from_pretrained(folder)
        except (OSError, ValueError):  # of a family that transformers does not know: the run says so
            continue
        for sentence in unknown_entries(entries, overrides):
            yield Problem(f"{place}.override_config", f"{place}.{sentence}", (f"{place}.path",))


def _is_end(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


def _roles(config: PPOConfig) -> list[str]:
    own_ref = config.uses_reference and path_key(config, "ref") != f"{MODEL}.path"
    return [
        "actor",
        *["ref"] * own_ref,
        *["critic"] * config.uses_critic,
        *["reward_model"] * config.reward_model.uses_engine,
    ]


_CHECKS: tuple[Callable[[Any], Iterator[Problem]], ...] = (
    _rollout_shares_heads,
    _sequences_share_heads,
    _megatron_shares_the_model,
    _context_holds_prompt_and_response,
    _tokenizer_fits_the_embedding,
    _roles_read_the_same_tokens,
    _teachers_share_the_vocabulary,
    _reward_model_scores,
    _adapted_layers_are_there,
    _overrides_are_entries,
)
