"""Differences between the run that saved a checkpoint and the one that goes on from it.

Options are compared with ``config.json`` of the step; training data, model and reward function, which may change under
the same name, by the digests in its manifest. What changes learning is refused unless ``trainer.resume_allow_changes``.
"""

import json
import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from verl.checkpoint.manifest import digest, read_manifest
from verl.config.base import ConfigError
from verl.config.describe import CONFIG_FILE
from verl.config.ppo import PPOConfig
from verl.config.tree import flatten
from verl.telemetry.run_record import MASK, mask

_ROLLOUT = (
    "n temperature top_k top_p min_p repetition_penalty stop stop_token_ids sampling_kwargs* do_sample ignore_eos"
)
_ROLLOUT += " prompt_length response_length use_fire_sampling fire_temperature fire_top_k over_sample_rate"
_ROLLOUT += " max_postponements partial_rollout max_staleness multi_turn.* agent.default_agent_loop"
_DATA = "train_batch_size gen_batch_size train_max_samples prompt_key messages_key mixture* domains* max_prompt_length"
_DATA += " max_response_length shuffle seed filter_overlong_prompts truncation apply_chat_template_kwargs*"
_EXAMPLES = "format tools_key enable_thinking* response_key *_dict_keys max_length ignore_input_ids_mismatch"
_EXAMPLES += " chosen_key rejected_key margin_key"
_SERVERS = "server_urls* server api_key_env max_concurrent timeout_s tries"
_MODEL = "lora_rank lora_alpha target_modules exclude_modules override_config* custom_chat_template"

LEARNING = (
    "algorithm.*",
    "actor_rollout_ref.actor.*",
    "critic.*",
    "custom_reward_function.name",
    "custom_reward_function.reward_kwargs*",
    "env.train.*",
    "env.reward*",
    "distillation.*",
    "reward_model.enable",
    "reward_model.model.path",
    "reward_model.reward_manager",
    "reward_model.reward_kwargs*",
    "trainer.seed",
    "trainer.critic_warmup",
    "trainer.weight_sync_freq",
    *(f"actor_rollout_ref.rollout.{name}" for name in _ROLLOUT.split()),
    *(f"actor_rollout_ref.model.{name}" for name in _MODEL.split()),
    *(f"data.{name}" for name in _DATA.split()),
    # of supervised fine-tuning and preference training
    "optim.*",
    *(f"model.{name}" for name in _MODEL.split()),
    *(f"data.{name}" for name in _EXAMPLES.split()),
)
"""Options that change what is learned; patterns of dotted keys."""

_SAME_NUMBERS = (
    "*micro_batch_size*",
    "*use_dynamic_bsz",
    "*max_token_len_per_gpu",
    "*.strategy",
    "*.fsdp_config.*",
    "*.deepspeed.*",
    "*.checkpoint.*",
    "*.profiler.*",
    "*ulysses_sequence_parallel_size",
    "*use_torch_compile",
    "*use_fused_kernels",
    "*use_remove_padding",
    "*use_prefix_sharing",
    "*entropy_from_logits_with_chunking",
    "*entropy_checkpointing",
    "*gradient_checkpointing",
    "*activation_offload",
    "*precompute_ref",
    "*skip_old_log_probs",
    "*optim.total_training_steps",  # follows the length of the run, which may grow
    *(f"distillation.teacher_models.*.{name}" for name in _SERVERS.split()),
    "critic.model.path",  # compared by its files
    "critic.model.tokenizer_path",
    "critic.model.use_shm",
    "critic.model.external_lib",
    "critic.model.trust_remote_code",
)
"""Options among these that change how the work is split, not what is learned."""

_OWN = ("trainer.resume_*", "trainer.default_local_dir", "trainer.*_data_dir", "trainer.log_dir", "ray_init.*")
"""Options that belong to one start of a run."""

_STALENESS = "actor_rollout_ref.rollout.max_staleness"
_ENDS = 1 << 20
_WHOLE_FILE = 16 << 20


class Change(NamedTuple):
    """One difference."""

    key: str
    old: Any
    new: Any
    is_refused: bool

    def __str__(self) -> str:
        return f"{self.key}: {shown(self.old)} -> {shown(self.new)}"


# -- Data, model and reward function that a run learns from -----------------------------------------------------------


def run_identity(config: PPOConfig, dataset: Any) -> dict[str, Any]:
    """Digests of the files that a run learns from, as JSON values; of what is no file here, none."""
    datagen = config.data.get("datagen")
    found = {"data.train_files": data_identity(dataset) if datagen is None or datagen.path is None else None}
    for key, path in config.learns_from.items():
        found[key] = model_identity(path) if key.endswith("model.path") else _file_identity(path)
    return {key: value for key, value in found.items() if value}


def data_identity(dataset: Any) -> dict[str, str]:
    """Digests of the files of a dataset, and of which of their rows it has; none for what is no file here."""
    files = [str(path) for path in getattr(dataset, "data_files", ())]
    if not files or not all(os.path.isfile(path) for path in files):
        return {}
    found = {f"{at} {os.path.basename(path)}": digest(Path(path)).xxh3 for at, path in enumerate(files)}
    positions = getattr(getattr(dataset, "dataframe", None), "positions", None)
    if positions is not None:  # the rows of the files that are used
        found["rows"] = f"{len(dataset)} {xxhash.xxh3_64_hexdigest(positions().tobytes())}"
    return found


def model_identity(path: str | None) -> dict[str, str]:
    """Name -> digest of the files of a model's folder: of large ones size, beginning and end; none for a hub's id."""
    folder = Path(path or "").expanduser()
    if not path or not folder.is_dir():
        return {}
    return {file.name: _ends(file) for file in sorted(folder.iterdir()) if file.is_file() and file.name[0] != "."}


def _ends(path: Path) -> str:
    size = path.stat().st_size
    if size <= _WHOLE_FILE:
        return digest(path).xxh3
    with open(path, "rb") as file:
        state = xxhash.xxh3_128(f"{size}".encode())
        state.update(file.read(_ENDS))
        file.seek(-_ENDS, os.SEEK_END)
        state.update(file.read(_ENDS))
    return state.hexdigest()


def _file_identity(path: str | None) -> dict[str, str]:
    file = Path(path or "").expanduser()
    return {file.name: digest(file).xxh3} if path and file.is_file() else {}


# -- Differences -------------------------------------------------------------------------------------------------------


def changes(folder: Path, config: PPOConfig, identity: Mapping[str, Any]) -> list[Change]:
    """What differs between ``config`` and the run that saved the step ``folder``; nothing where it left no options."""
    if not (folder / CONFIG_FILE).exists():
        return []
    saved = dict(flatten(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))))
    own = dict(flatten(json.loads(json.dumps(mask(config.to_dict())))))
    if _STALENESS in own and _STALENESS in saved:
        own[_STALENESS], saved[_STALENESS] = _staleness(own), _staleness(saved)
    # a key that one of the two lacks is of another release, which had its default
    keys = [key for key in own if key in saved and own[key] != saved[key] and MASK not in (own[key], saved[key])]
    keys = [key for key in keys if not _matches(key, _OWN) and (config.uses_critic or not key.startswith("critic."))]
    found = [Change(key, saved[key], own[key], _changes_learning(key)) for key in keys]
    manifest = read_manifest(folder)
    before = manifest.about.get("learns_from", {}) if manifest else {}
    for key in before.keys() & identity.keys():
        old, new = before[key], identity[key]
        names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        if names:
            content = f"content of {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            found.append(Change(key, content, "another", True))
    return found


def _staleness(options: Mapping[str, Any]) -> int:
    """Return what ``max_staleness`` means among these options; those of earlier runs have ``async_ratio`` too."""
    rollout = "actor_rollout_ref.rollout"
    bound, is_partial = options[_STALENESS], options.get(f"{rollout}.partial_rollout", False)
    if (ratio := options.get(f"{rollout}.async_ratio")) is not None:
        return ratio or (bound if is_partial else 0)
    return int(is_partial) if bound is None else bound


def refuse_changes(folder: Path, found: list[Change]) -> None:
    """Raise if something among ``found`` changes learning.

    Raises:
        ConfigError: names the keys, both values, and how to go on all the same.
    """
    refused = [change for change in found if change.is_refused]
    if refused:
        raise ConfigError(
            [
                f"{folder} was saved by a run that learned otherwise: {'; '.join(map(str, refused))}. The run would be "
                f"neither the old one nor a new one. Give the saved values (verl config --diff {folder} <yours> lists "
                f"all), set trainer.resume_allow_changes=true to go on with the new ones, or start in "
                f"another trainer.default_local_dir."
            ]
        )


def _changes_learning(key: str) -> bool:
    return _matches(key, LEARNING) and not _matches(key, _SAME_NUMBERS)


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(key, pattern) for pattern in patterns)


def shown(value: Any) -> str:
    """A value in a message: as JSON, its first 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe_changes(found: list[Change], most: int = 12) -> str:
    """One sentence that lists the differences."""
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"what differs from the run that saved it: {'; '.join(map(str, found[:most]))}{more}"
