"""Rollout cache: generated batches on disk, reused by the next run, so that a trainer is debugged without generation.

The key of a batch is what made it: step, prompts, seeds and sampling parameters. A batch with another key is never
used; a message names the difference, and the batch is generated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl.checkpoint.rows_file import load_rows, read_metadata, save_rows
from verl.config.base import plain
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.utils.config import typed_config

_SAMPLING = (
    "temperature top_p top_k min_p repetition_penalty do_sample n ignore_eos stop stop_token_ids sampling_kwargs "
    "response_length prompt_length calculate_log_probs use_fire_sampling fire_temperature fire_top_k max_model_len"
).split()

_READ_OBJECTS = ("multi_modal_data", "agent_name")
"""Columns without tensors that are part of the key."""


class RolloutCache:
    """Cache of the batches that ``generate_sequences`` of another object returns.

    Args:
        engine: has ``generate_sequences``: the worker group, or the manager of agent loops.
        config: the whole tree.
        say: prints a message to the user.
    """

    def __init__(self, engine: Any, config: PPOConfig, say: Callable[[str], None]):
        self.engine = engine
        self.config = config
        self.say = say
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        self.folder = Path(rollout.skip_dump_dir).expanduser() / trainer.project_name / trainer.experiment_name
        self.has_said: set[str] = set()

    def generate_sequences(self, request: DataProto) -> DataProto:
        """Return the cached batch, or generate it; validation is always generated."""
        if request.meta_info.get("validate"):
            return self.engine.generate_sequences(request)
        if (cached := self.try_load(request)) is not None:
            return cached
        self._say_what_differs(self.key(request))
        batch = self.engine.generate_sequences(request)
        self.dump(request, batch)
        return batch

    def path_of(self, request: DataProto) -> Path:
        """Return the file of the batch for a request."""
        key = self.key(request)
        return self.folder / f"step{key['step']}-{_digest(key)}.safetensors"

    def try_load(self, request: DataProto) -> DataProto | None:
        """Return the cached batch for a request; None where there is none."""
        path = self.path_of(request)
        if not path.exists():
            return None
        if "reuse" not in self.has_said:
            self.has_said.add("reuse")
            self.say(
                f"actor_rollout_ref.rollout.skip_rollout=true: batches are read from {path.parent} where they "
                f"exist. This run learns from text that its own policy did not write."
            )
        batch, _ = load_rows(path)
        batch.meta_info["timing"] = {}
        return batch

    def dump(self, request: DataProto, batch: DataProto) -> None:
        """Write the batch for a request.

        Raises:
            ValueError: it holds what cannot be written.
        """
        path, key = self.path_of(request), self.key(request)
        try:
            save_rows(path, batch, key)
        except ValueError as problem:
            raise ValueError(
                f"actor_rollout_ref.rollout.skip_rollout=true: the batch cannot be saved: {problem} "
                "Set skip_rollout=false."
            ) from None

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the engine."""
        return getattr(vars(self)["engine"], name)

    def key(self, request: DataProto) -> dict[str, Any]:
        """Return what identifies the batch for a request, as JSON values."""
        shared = self.config.actor_rollout_ref
        sampling = {name: plain(shared.rollout[name]) for name in _SAMPLING}
        objects = {name: request.non_tensor_batch[name] for name in _READ_OBJECTS if name in request.non_tensor_batch}
        extra = {"do_sample": bool(sampling["do_sample"] and request.meta_info.get("do_sample", True))}
        return {
            "step": int(request.meta_info.get("global_steps", 0)),
            "sampling": sampling | extra,
            "model": str(shared.model.path),
            "rows": len(request),
            "prompts": _hash(request.ragged("input_ids").values, request.ragged("input_ids").layout.lengths),
            "seeds": _hash(request.column("seeds")) if "seeds" in request else None,
            **{name: _hash_objects(column) for name, column in objects.items()},
        }

    def _say_what_differs(self, key: Mapping[str, Any]) -> None:
        """Print once how a cached batch of this step differs from the requested one."""
        if "other" in self.has_said:
            return
        for path in sorted(self.folder.glob(f"step{key['step']}-*.safetensors")):
            other = read_metadata(path)
            changed = list(_differences(other, key))
            if any(text.startswith("sampling.do_sample ") for text in changed):
                continue  # the greedy responses of ReMax next to the sampled ones
            self.has_said.add("other")
            self.say(
                f"actor_rollout_ref.rollout.skip_rollout=true: {path} is not used, its key differs: "
                f"{'; '.join(changed)}. Batches without a cached one are generated and saved next to it."
            )
            return


class RolloutSkip(RolloutCache):
    """Rollout cache for scripts with a loop of their own, around a worker group.

    Args:
        config: the whole tree.
        rollout_wg: has ``generate_sequences``.
    """

    def __init__(self, config: Any, rollout_wg: Any):
        super().__init__(SimpleNamespace(generate_sequences=rollout_wg.generate_sequences), typed_config(config), print)
        self.rollout_wg = rollout_wg

    def wrap_generate_sequences(self) -> None:
        """Have ``rollout_wg.generate_sequences`` read batches from disk where they exist."""
        self.rollout_wg.generate_sequences = self.generate_sequences

    @property
    def curr_path_dump(self) -> Path:
        """Folder of the batches."""
        return self.folder


def _hash(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _flat(value: Any) -> Iterator[Any]:
    """Yield the items of nested lists, such as frames of videos."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _hash_objects(values: Any) -> str:
    """Hash names, and images by their pixels."""
    digest = hashlib.sha256()
    for value in values:
        for part in [*value.items()] if isinstance(value, Mapping) else [("", value)]:
            for item in _flat(part[1]):
                pixels = item.tobytes() if hasattr(item, "tobytes") else repr(item).encode()
                digest.update(f"{part[0]} {type(item).__name__} {len(pixels)} ".encode() + pixels)
    return digest.hexdigest()[:16]


def _digest(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Any:
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name} was {before}, is {now}"
