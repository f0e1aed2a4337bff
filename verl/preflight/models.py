"""The models a configuration names: that there is one, whole, with what it needs; adapters that fit it. None is opened.

A hub id that was not downloaded is asked for once, briefly. What config.json says against the settings is
``verl.config.model_info``' matter.
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
from typing import Any

from verl.config.base import Problem, get_path
from verl.config.model_info import MODEL, TOKENIZERS, find_folder, read_json, stored_shapes
from verl.config.ppo import PPOConfig
from verl.utils.import_utils import is_package_available

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model*.bin")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"
_PATIENCE_S = 3.0
"""Seconds the hub has to answer; a third of that where the name looks like a folder here."""
_SEES = ("vision", "visual", "image", "img_processor", "vit", "mm_tower")


def missing_models(config: PPOConfig) -> Iterator[Problem]:
    """Everything wrong with the places models, tokenizers and adapters are to come from."""
    for key, path, needs in _places(config):
        yield from _model(key, path, needs)
    for place in (MODEL, *(["critic.model"] if config.uses_critic else [])):
        yield from _adapter(place, get_path(config, place))
        yield from _attention(place, get_path(config, place))
    yield from _sight(config)


def missing_tokenizer(config: PPOConfig, given: frozenset[str]) -> Iterator[Problem]:
    """What is wrong with the place of the tokenizer, if the user named one."""
    key = "data.tokenizer" if config.data.tokenizer else f"{MODEL}.path"
    if key in given:
        yield from _model(key, get_path(config, key), ("tokenizer",))


def _places(config: PPOConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(option, path, what must be there) of every model and tokenizer."""
    whole, own = ("config", "weights"), config.data.tokenizer
    yield f"{MODEL}.path", config.actor_rollout_ref.model.path, (*whole, *(() if own else ("tokenizer",)))
    if own:
        yield "data.tokenizer", own, ("tokenizer",)
    if config.uses_critic and config.critic.model.path:
        yield "critic.model.path", config.critic.model.path, whole
    ref = config.actor_rollout_ref.ref.model
    if config.uses_reference and ref is not None and ref.path:
        yield "actor_rollout_ref.ref.model.path", ref.path, whole
    if config.reward_model.enable:
        yield "reward_model.model.path", config.reward_model.model.path, whole
    if config.rewrites_for_reward_model and config.reward_model.model.input_tokenizer:
        yield "reward_model.model.input_tokenizer", config.reward_model.model.input_tokenizer, ("tokenizer",)


def _model(key: str, path: str, needs: tuple[str, ...]) -> Iterator[Problem]:
    if not path or "://" in path:
        return
    shown, folder = f"{key}={path}", find_folder(path)
    if folder is None:
        file = Path(path).expanduser()
        if file.is_file():
            yield Problem(key, f"{shown} is a file. Name the folder that holds it, with config.json and the tokenizer.")
        elif (text := _nowhere(shown, path)) is not None:
            yield Problem(key, text)
        return
    if not os.access(folder, os.R_OK | os.X_OK):
        yield Problem(key, f"{shown} cannot be read: no permission. Make the folder readable, or name another.")
        return
    if "config" in needs:
        if (text := _no_config(shown, folder)) is not None:
            yield Problem(key, text)
            return
        yield from (Problem(key, text) for text in _weights(shown, folder))
    if "tokenizer" in needs and not any((folder / name).is_file() for name in TOKENIZERS):
        instead = "" if key == "data.tokenizer" else ", or name the folder of one in data.tokenizer"
        yield Problem(
            key,
            f"{shown} holds no tokenizer: neither tokenizer.json nor another file of one. Copy the tokenizer of the "
            f"base model there{instead}.",
        )


def _no_config(shown: str, folder: Path) -> str | None:
    file = folder / "config.json"
    if not file.is_file():
        adapter = read_json(folder / "adapter_config.json")
        if adapter:
            base = adapter.get("base_model_name_or_path") or "its base model"
            return (
                f"{shown} is an adapter of {base}, and no model: there is no config.json. Name the base model, and "
                "this folder in lora_adapter_path."
            )
        below = [one.parent for one in sorted(folder.glob("*/config.json"))[:3]]
        hint = f" There is one in {' and '.join(map(str, below))}." if below else ""
        return f"{shown} holds no config.json: it is no model in Hugging Face format.{hint} Name the folder of one."
    if not read_json(file):
        return f"{shown} has a config.json that cannot be read as JSON. Download or write it again."
    return None


def _weights(shown: str, folder: Path) -> Iterator[str]:
    """Weights that are not there, or not all of them."""
    found = sorted(folder.glob("*.index.json"))
    index = next((file for file in found if "safetensors" in file.name), next(iter(found), None))
    if index is not None:
        listed = sorted(set((read_json(index).get("weight_map") or {}).values()))
        missing = [name for name in listed if not (folder / name).is_file()]
        if missing:
            yield (
                f"{shown} lacks {len(missing)} of the {len(listed)} files that {index.name} names, the first is "
                f"{missing[0]}: the download is not complete. Download it again."
            )
            return
    files = [file for pattern in _WEIGHTS for file in sorted(folder.glob(pattern))]
    if not files:
        yield (
            f"{shown} holds no weights: neither *.safetensors nor pytorch_model*.bin. Download the model as a whole, "
            "or name the folder that has them."
        )
    for file in files:
        if why := _cut_off(file):
            yield f"{shown} cannot be loaded: {file.name} {why}. Download it again."
            return


def _cut_off(file: Path) -> str | None:
    """Why a file of weights cannot be whole; its tensors are not read."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            return "is a pointer of Git LFS, and the file itself is not there (git lfs pull)"
        if size == 0:
            return "is empty"
        if file.suffix != ".safetensors":
            return None
        length = int.from_bytes(head, "little")
        try:
            header = json.loads(stream.read(length)) if 8 + length <= size else None
        except ValueError:
            return "is no safetensors file: its header cannot be read"
    if header is None:
        return f"is cut off: it has {size} bytes, and its header alone should have {length}"
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    whole = 8 + length + max(ends, default=0)
    return f"is cut off: it has {size} of {whole} bytes" if size < whole else None


# -- where there is no folder --------------------------------------------------------------------------------------


def _nowhere(shown: str, path: str) -> str | None:
    """What to say of a name that is no folder here; None if the hub has such a model."""
    names, looked = close_names(path), f"(looked from {os.getcwd()})"
    give = f"Give a folder in Hugging Face format, or a hub id such as {_EXAMPLE}."
    if path[0] in "/~." or _HUB_ID.fullmatch(path) is None:
        return f"{shown} does not exist {looked}{names}. {give}"
    if is_offline():
        return (
            f"{shown} is neither a folder {looked} nor a downloaded model of the hub, and HF_HUB_OFFLINE is set"
            f"{names}. {give} A model of the hub must be downloaded before (`hf download {_EXAMPLE}`)."
        )
    answer = ask_hub(path)
    if answer == "yes":
        return None
    if answer == "no":
        return (
            f"{shown} does not exist: there is no such folder {looked}{names}, and {endpoint()} has no such model, or "
            f"shows it only with HF_TOKEN. {give}"
        )
    return (
        f"{shown} does not exist: there is no such folder {looked}{names}, no such model was downloaded, and "
        f"{endpoint()} cannot be asked ({answer}). {give}"
    )


def close_names(path: str) -> str:
    """``; did you mean models/tiny-qwen2``: what is like a path that does not exist, or stands where it should."""
    place = Path(path).expanduser()
    folder = next((one for one in place.parents if one.is_dir()), None)
    if folder is None:
        return ""
    rest = place.relative_to(folder).parts
    try:
        there = sorted(one.name for one in folder.iterdir() if one.is_dir() and not one.name.startswith("."))
    except OSError:
        return ""
    lower = {name.lower(): name for name in there}
    near = [lower[name] for name in difflib.get_close_matches(rest[0].lower(), lower, n=3, cutoff=0.6)]
    if near:
        wholes = [folder.joinpath(name, *rest[1:]) for name in near]
        return f"; did you mean {' or '.join(str(one if one.exists() else folder / one.name) for one in wholes)}"
    if folder != Path(".") and there and len(rest) == 1:
        return f"; {folder} holds {', '.join(there[:8])}{', ...' if len(there) > 8 else ''}"
    return ""


def is_offline() -> bool:
    """Whether the hub may not be asked."""
    asked = (os.environ.get(name, "0").lower() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "true", "yes", "on") for value in asked)


def can_be_had(name_or_path: str) -> bool:
    """Whether a model's files are here, or the hub has them."""
    if find_folder(name_or_path) is not None:
        return True
    return _HUB_ID.fullmatch(name_or_path) is not None and not is_offline() and ask_hub(name_or_path) == "yes"


def endpoint() -> str:
    """Where the hub is."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


@lru_cache(maxsize=64)
def ask_hub(name: str, kind: str = "models") -> str:
    """``yes``, ``no``, or why the hub could not be asked; once, and in seconds, name resolution included.

    Args:
        kind: ``models`` or ``datasets``.
    """
    looks_local = "/" in name and Path(name.partition("/")[0]).is_dir()
    seconds = _PATIENCE_S / 3 if looks_local else _PATIENCE_S
    request = urllib.request.Request(f"{endpoint()}/api/{kind}/{name}")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    answer = [f"no answer in {seconds:g} s"]

    def ask() -> None:
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                answer[0] = "yes"
        except urllib.error.HTTPError as error:
            answer[0] = "no" if error.code in (401, 403, 404) else f"it answered {error.code}"
        except (OSError, ValueError) as error:
            answer[0] = str(getattr(error, "reason", error)) or type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]


# -- what stands beside the weights --------------------------------------------------------------------------------


def _adapter(place: str, section: Any) -> Iterator[Problem]:
    """An adapter to go on from that is not there, or not of this model."""
    path, key = section.lora_adapter_path, f"{place}.lora_adapter_path"
    if not path or "://" in path:
        return
    shown, folder = f"{key}={path}", Path(path).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.is_file() else f"does not exist (looked from {os.getcwd()}){close_names(path)}"
        yield Problem(key, f"{shown} {what}. Name the folder of an adapter, with adapter_config.json.")
        return
    saved, weights = read_json(folder / "adapter_config.json"), folder / "adapter_model.safetensors"
    if not saved or not weights.is_file():
        missing = "adapter_config.json" if not saved else weights.name
        yield Problem(key, f"{shown} holds no {missing}. Name the folder that peft or a run with lora_rank wrote.")
        return
    if why := _cut_off(weights):
        yield Problem(key, f"{shown} cannot be loaded: {weights.name} {why}. Copy it again.")
        return
    for name, option in (("r", "lora_rank"), ("lora_alpha", "lora_alpha")):
        if section.lora_rank and saved.get(name) != section[option]:
            yield Problem(
                f"{place}.{option}",
                f"{place}.{option}={section[option]} is not that of {shown}, which was trained with {saved.get(name)}. "
                f"Set {place}.{option}={saved.get(name)}.",
                (key,),
            )
    base = find_folder(section.path) if section.path else None
    layers = stored_shapes(base) if base is not None else {}
    if layers and (why := _of_another(stored_shapes(folder), layers)):
        named = saved.get("base_model_name_or_path") or "no base model"
        yield Problem(
            key,
            f"{shown} is no adapter of {place}.path={section.path}: {why}. The model it names is {named}: name that, "
            "or another adapter.",
            (f"{place}.path",),
        )


def _of_another(adapter: dict[str, tuple[int, ...]], layers: dict[str, tuple[int, ...]]) -> str | None:
    """Why tensors of an adapter fit no layer of a model."""
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


def _attention(place: str, section: Any) -> Iterator[Problem]:
    wanted = (section.override_config or {}).get("attn_implementation")
    if isinstance(wanted, str) and wanted.startswith("flash_attention_2") and not is_package_available("flash_attn"):
        key = f"{place}.override_config"
        yield Problem(
            key,
            f"{key}.attn_implementation={wanted} needs the package flash_attn, which is not installed. Install it "
            "with `pip install flash-attn --no-build-isolation`, or use sdpa.",
        )


def _sight(config: PPOConfig) -> Iterator[Problem]:
    """``freeze_vision_tower`` on a model that has none."""
    key, path = "actor_rollout_ref.actor.freeze_vision_tower", config.actor_rollout_ref.model.path
    folder = find_folder(path)
    content = read_json(folder / "config.json") if folder else {}
    if not config.actor_rollout_ref.actor.freeze_vision_tower or not content:
        return
    if not any(mark in name for name in content for mark in _SEES):
        yield Problem(
            key,
            f"{key}=true, and {MODEL}.path={path} has no vision tower: its config.json describes none. Leave the "
            "option false.",
            (f"{MODEL}.path",),
        )
