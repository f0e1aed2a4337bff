"""Checks of the configured models: folder or hub id, complete weights, tokenizer, matching adapters. None is loaded.

The hub is queried once, briefly, for an id that was not downloaded. Settings are compared with config.json in
``verl.config.model_info``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from verl.config.base import Problem, get_path
from verl.config.critic import CriticModelConfig
from verl.config.model_info import TOKENIZERS, find_folder, path_key, read_json, stored_shapes, teachers
from verl.config.ppo import MODEL, ModelConfig, PPOConfig
from verl.utils.import_utils import is_package_available

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model*.bin")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"
_PATIENCE_S = 3.0
"""Timeout of the hub in seconds; a third of that if the name looks like a local folder."""
_VISION_KEYS = ("vision", "visual", "image", "img_processor", "vit", "mm_tower")


def missing_models(config: PPOConfig) -> Iterator[Problem]:
    """Find everything wrong with the paths of models, tokenizers and adapters."""
    for key, path, needs in _paths(config):
        yield from _model(key, path, needs)
    for section in (MODEL, *(["critic.model"] if config.uses_critic else [])):
        yield from _adapter(section, get_path(config, section))
        yield from _attention(section, get_path(config, section))
    yield from _vision_tower(config)


def missing_tokenizer(config: PPOConfig, given: frozenset[str]) -> Iterator[Problem]:
    """Find what is wrong with the path of the tokenizer, if the user named one."""
    key = "data.tokenizer" if config.data.tokenizer else f"{MODEL}.path"
    if key in given:
        yield from _model(key, get_path(config, key), ("tokenizer",))


def _paths(config: PPOConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (option, path, required parts) of every model and tokenizer."""
    whole, own = ("config", "weights"), config.data.tokenizer
    yield f"{MODEL}.path", config.actor_rollout_ref.model.path, (*whole, *(() if own else ("tokenizer",)))
    if own:
        yield "data.tokenizer", own, ("tokenizer",)
    if config.uses_critic and config.critic.model.path:
        yield "critic.model.path", config.critic.model.path, whole
    ref = config.actor_rollout_ref.ref.model
    if config.uses_reference and ref is not None and ref.path:
        yield "actor_rollout_ref.ref.model.path", ref.path, whole
    for teacher in teachers(config):
        yield path_key(config, teacher), get_path(config, path_key(config, teacher)), whole
    for teacher in teachers(config, served=True):
        yield path_key(config, teacher), get_path(config, path_key(config, teacher)), ("tokenizer",)
    if config.reward_model.enable and not config.reward_model.server_urls:
        yield "reward_model.model.path", config.reward_model.model.path, whole
    if config.rewrites_for_reward_model and config.reward_model.model.input_tokenizer:
        yield "reward_model.model.input_tokenizer", config.reward_model.model.input_tokenizer, ("tokenizer",)


def _model(key: str, path: str, needs: tuple[str, ...]) -> Iterator[Problem]:
    # remote folders are copied when the run starts
    if not path or "://" in path:
        return
    setting, folder = f"{key}={path}", find_folder(path)
    if folder is None:
        is_file = Path(path).expanduser().is_file()
        way_out = "Name the folder that holds it, with config.json and the tokenizer."
        if text := f"{setting} is a file. {way_out}" if is_file else _not_found(setting, path):
            yield Problem(key, text)
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        yield Problem(key, f"{setting} cannot be read: no permission. Make the folder readable, or name another.")
        return
    if "config" in needs:
        if text := _no_config(setting, folder):
            yield Problem(key, text)
            return
        if text := _bad_weights(setting, folder):
            yield Problem(key, text)
    if "tokenizer" in needs and not any((folder / name).is_file() for name in TOKENIZERS):
        instead = "" if key == "data.tokenizer" else ", or name the folder of one in data.tokenizer"
        yield Problem(
            key,
            f"{setting} holds no tokenizer: neither tokenizer.json nor another file of one. Copy the tokenizer of the "
            f"base model there{instead}.",
        )


def _no_config(setting: str, folder: Path) -> str | None:
    """Return the error text for a folder without a usable config.json."""
    file = folder / "config.json"
    if file.is_file():
        if read_json(file):
            return None
        return f"{setting} has a config.json that cannot be read as JSON. Download or write it again."
    # peft writes an adapter without the config of its model
    if adapter := read_json(folder / "adapter_config.json"):
        base = adapter.get("base_model_name_or_path") or "its base model"
        return (
            f"{setting} is an adapter of {base}, not a model: it has no config.json. Name the base model, and this "
            "folder in lora_adapter_path."
        )
    below = " and ".join(str(one.parent) for one in sorted(folder.glob("*/config.json"))[:3])
    hint = f" There is one in {below}." if below else ""
    return f"{setting} holds no config.json: it is not a model in Hugging Face format.{hint} Name the folder of one."


def _bad_weights(setting: str, folder: Path) -> str | None:
    """Return the error text for missing, incomplete or damaged weights."""
    # safetensors first, as transformers prefers them
    indices = sorted(folder.glob("*.index.json"), key=lambda file: ("safetensors" not in file.name, file))
    if indices:
        listed = sorted(set((read_json(indices[0]).get("weight_map") or {}).values()))
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            return (
                f"{setting} lacks {len(missing)} of the {len(listed)} files that {indices[0].name} names, the first is "
                f"{missing[0]}: the download is incomplete. Download it again."
            )
    files = [file for pattern in _WEIGHTS for file in sorted(folder.glob(pattern))]
    if not files:
        return (
            f"{setting} holds no weights: neither *.safetensors nor pytorch_model*.bin. Download the complete model, "
            "or name the folder that has them."
        )
    damaged = ((file.name, why) for file in files if (why := _damage(file)))
    return next((f"{setting} cannot be loaded: {name} {why}. Download it again." for name, why in damaged), None)


def _damage(file: Path) -> str | None:
    """Return why a file of weights is incomplete; its tensors are not read."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            return "is a pointer of Git LFS, and the file itself is not there (git lfs pull)"
        if size == 0:
            return "is empty"
        if file.suffix != ".safetensors":
            return None
        # safetensors: 8 bytes with the length of a JSON header, the header with the offsets of the tensors, the tensors
        length = int.from_bytes(head, "little")
        if 8 + length > size:
            return f"is cut off: it has {size} bytes, and its header alone should have {length}"
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            return "is not a safetensors file: its header cannot be read"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    return f"is cut off: it has {size} of {whole} bytes" if size < whole else None


# -- names that are not a local folder: the hub, similar names --------------------------------------------------------


def _not_found(setting: str, path: str) -> str | None:
    """Return the error text for a name that is not a folder here, or None if the hub has such a model."""
    names, looked = close_names(path), f"(looked from {os.getcwd()})"
    give = f"Give a folder in Hugging Face format, or a hub id such as {_EXAMPLE}."
    # the hub is not asked about what can only be a path
    if path[0] in "/~." or _HUB_ID.fullmatch(path) is None:
        return f"{setting} does not exist {looked}{names}. {give}"
    if is_offline():
        return (
            f"{setting} is neither a folder {looked} nor a downloaded model of the hub, and HF_HUB_OFFLINE is set"
            f"{names}. {give} A model of the hub must be downloaded before (`hf download {_EXAMPLE}`)."
        )
    answer = query_hub(path)
    if answer == "yes":
        return None
    why = f"no such model was downloaded, and {endpoint()} cannot be reached ({answer})"
    if answer == "no":
        why = f"and {endpoint()} has no such model, or shows it only with HF_TOKEN"
    return f"{setting} does not exist: there is no such folder {looked}{names}, {why}. {give}"


def missing_dataset(setting: str, path: str, cache_dir: str | None) -> str | None:
    """Return the error text for a name that is neither a file nor a dataset of the hub or its cache; else None."""
    from verl.data.files import CACHE_DIR, hub_parts

    name = hub_parts(path)[0]
    # datasets names the folders of its cache so
    cached = Path(cache_dir or CACHE_DIR).expanduser() / "hub" / name.replace("/", "___")
    if cached.exists():
        return None
    answer = "HF_HUB_OFFLINE is set" if is_offline() else query_hub(name, "datasets")
    if answer == "yes" or answer.startswith("HF_") and not os.path.isdir(name.partition("/")[0]):
        return None  # the cache of datasets may lie elsewhere
    why = "has no such dataset" if answer == "no" else f"cannot be reached ({answer})"
    return (
        f"{setting} does not exist: there is no such file or folder (looked from {os.getcwd()}){close_names(path)}, "
        f"and {endpoint()} {why}. Give a file, a glob or a folder, or a dataset of the hub, openai/gsm8k:main:train."
    )


def close_names(path: str) -> str:
    """Return ``; did you mean models/tiny-qwen2``: similar paths, or the content of the folder; else empty."""
    target = Path(path).expanduser()
    # names are compared below the deepest folder that exists
    folder = next((one for one in target.parents if one.is_dir()), None)
    if folder is None:
        return ""
    rest = target.relative_to(folder).parts
    try:
        folders = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    except OSError:
        return ""
    lower = {name.lower(): name for name in folders}
    near = [lower[name] for name in difflib.get_close_matches(rest[0].lower(), lower, n=3, cutoff=0.6)]
    if near:
        wholes = [folder.joinpath(name, *rest[1:]) for name in near]
        return f"; did you mean {' or '.join(str(one if one.exists() else folder / one.name) for one in wholes)}"
    if folder != Path(".") and folders and len(rest) == 1:
        return f"; {folder} holds {', '.join(folders[:8])}{', ...' if len(folders) > 8 else ''}"
    return ""


def is_offline() -> bool:
    """Whether the hub must not be queried."""
    switches = (os.environ.get(name, "0").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "true", "yes", "on") for value in switches)


def is_available(name_or_path: str) -> bool:
    """Whether a model's files are local, or the hub has them."""
    if find_folder(name_or_path) is not None:
        return True
    return _HUB_ID.fullmatch(name_or_path) is not None and not is_offline() and query_hub(name_or_path) == "yes"


def endpoint() -> str:
    """Return the address of the hub."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


@lru_cache(maxsize=64)
def query_hub(name: str, kind: str = "models") -> str:
    """Return ``yes``, ``no``, or why the hub could not be queried; cached, and limited in time including DNS.

    Args:
        kind: ``models`` or ``datasets``.
    """
    # models/qwen3 is more likely a folder with a typo than a hub id
    looks_local = "/" in name and Path(name.partition("/")[0]).is_dir()
    seconds = _PATIENCE_S / 3 if looks_local else _PATIENCE_S
    request = urllib.request.Request(f"{endpoint()}/api/{kind}/{name}")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    # a thread, because urlopen's timeout does not cover DNS
    answer = [f"no answer in {seconds:g} s"]

    def query() -> None:
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                answer[0] = "yes"
        except urllib.error.HTTPError as error:
            # the hub says 401 for what does not exist, too
            answer[0] = "no" if error.code in (401, 403, 404) else f"it answered {error.code}"
        except (OSError, ValueError) as error:
            answer[0] = str(getattr(error, "reason", error)) or type(error).__name__

    thread = threading.Thread(target=query, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]


# -- adapters, attention kernels, vision tower -------------------------------------------------------------------------


def _adapter(prefix: str, section: ModelConfig | CriticModelConfig) -> Iterator[Problem]:
    """Find an adapter that is missing, or not of this model."""
    path, key = section.lora_adapter_path, f"{prefix}.lora_adapter_path"
    if not path or "://" in path:
        return
    setting, folder = f"{key}={path}", Path(path).expanduser()
    saved, weights = read_json(folder / "adapter_config.json"), folder / "adapter_model.safetensors"
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else f"does not exist (looked from {os.getcwd()}){close_names(path)}"
        yield Problem(key, f"{setting} {what}. Name the folder of an adapter, with adapter_config.json.")
        return
    if not saved or not weights.is_file():
        missing = "adapter_config.json" if not saved else weights.name
        yield Problem(key, f"{setting} holds no {missing}. Name the folder that peft or a run with lora_rank wrote.")
        return
    if why := _damage(weights):
        yield Problem(key, f"{setting} cannot be loaded: {weights.name} {why}. Copy it again.")
        return
    # without lora_rank these follow the adapter
    for name, option in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        if section.lora_rank and saved.get(name) != section[option]:
            yield Problem(
                f"{prefix}.{option}",
                f"{prefix}.{option}={section[option]} is not that of {setting}, which was trained with "
                f"{saved.get(name)}. Set {prefix}.{option}={saved.get(name)}.",
                (key,),
            )
    base = find_folder(section.path) if section.path else None
    layers = stored_shapes(base) if base is not None else {}
    if layers and (why := _mismatch(stored_shapes(folder), layers)):
        named = saved.get("base_model_name_or_path") or "no base model"
        yield Problem(
            key,
            f"{setting} is not an adapter of {prefix}.path={section.path}: {why}. Its base model is {named}: name "
            "that, or another adapter.",
            (f"{prefix}.path",),
        )


def _mismatch(adapter: dict[str, tuple[int, ...]], layers: dict[str, tuple[int, ...]]) -> str | None:
    """Return why tensors of an adapter do not fit the layers of a model.

    Args:
        adapter: name -> shape: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``.
        layers: name -> shape, of the model; its names may or may not begin with ``model.``.
    """
    # names differ in the prefix that the architecture's class adds
    here = {name.removesuffix(".weight").removeprefix("model."): shape for name, shape in layers.items()}
    for name, shape in adapter.items():
        layer, found, _ = name.removeprefix("base_model.model.").partition(".lora_A")
        whole = here.get(layer.removeprefix("model."))
        if found and whole is not None and len(whole) == 2 and shape[-1] not in whole:
            return f"{layer} reads {shape[-1]} numbers there, and {whole[-1]} here"
    ends = {name.partition(".lora_")[0].rpartition(".")[2] for name in adapter if ".lora_" in name}
    if ends and not ends & {name.rpartition(".")[2] for name in here}:
        return f"it is for layers {', '.join(sorted(ends)[:4])}, of which there are none"
    deepest, last = (
        max((int(number) for name in names for number in re.findall(r"\.(\d+)\.", name)), default=None)
        for names in (adapter, layers)
    )
    if deepest is not None and last is not None and deepest > last:
        return f"it has a layer {deepest}, and the last one here is {last}"
    return None


def _attention(prefix: str, section: ModelConfig | CriticModelConfig) -> Iterator[Problem]:
    implementation = str((section.override_config or {}).get("attn_implementation"))
    if implementation.startswith("flash_attention_2") and not is_package_available("flash_attn"):
        key = f"{prefix}.override_config"
        yield Problem(
            key,
            f"{key}.attn_implementation={implementation} needs the package flash_attn, which is not installed. Install "
            "it with `pip install flash-attn --no-build-isolation`, or use sdpa.",
        )


def _vision_tower(config: PPOConfig) -> Iterator[Problem]:
    """Find ``freeze_vision_tower`` on a model without one."""
    key, path = "actor_rollout_ref.actor.freeze_vision_tower", config.actor_rollout_ref.model.path
    folder = find_folder(path) if config.actor_rollout_ref.actor.freeze_vision_tower else None
    content = read_json(folder / "config.json") if folder else {}
    if content and not any(mark in name for name in content for mark in _VISION_KEYS):
        yield Problem(
            key,
            f"{key}=true, and {MODEL}.path={path} has no vision tower: its config.json describes none. Set the "
            "option to false.",
            (f"{MODEL}.path",),
        )
