"""Sampled batches kept on disk and taken from there in the next run: the trainer can be debugged without the sampler.

A batch is found by what made it: step, prompts, seeds and sampling. A batch made otherwise is never used; what differs
is said, and the batch is sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from verl.checkpoint.rows_file import load_rows, read_facts, save_rows
from verl.config.base import plain
from verl.protocol import DataProto
from verl.utils.config import typed_config

_SAMPLING = (
    "temperature top_p top_k min_p repetition_penalty do_sample n ignore_eos stop stop_token_ids sampling_kwargs "
    "response_length prompt_length calculate_log_probs use_fire_sampling fire_temperature fire_top_k max_model_len"
).split()

_READ_OBJECTS = ("multi_modal_data", "agent_name")
"""Columns without tensors that decide what is drawn."""


class KeptRollouts:
    """A sampler that keeps what another sampler drew, and gives it back when it is asked for the same again.

    Args:
        sampler: has ``generate_sequences``: the worker group, or the manager of agent loops.
        config: the whole tree.
        say: tells the user a sentence.
    """

    def __init__(self, sampler: Any, config: Any, say: Callable[[str], None]):
        self.sampler = sampler
        self.config = config
        self.say = say
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        self.folder = Path(rollout.skip_dump_dir).expanduser() / trainer.project_name / trainer.experiment_name
        self.has_said: set[str] = set()

    def generate_sequences(self, request: DataProto) -> DataProto:
        """As the sampler's; validation always goes to the sampler."""
        if request.meta_info.get("validate"):
            return self.sampler.generate_sequences(request)
        if (kept := self.try_load(request)) is not None:
            return kept
        self._say_what_differs(self.facts(request))
        batch = self.sampler.generate_sequences(request)
        self.dump(request, batch)
        return batch

    def path_of(self, request: DataProto) -> Path:
        """The file of the batch that answers a request."""
        facts = self.facts(request)
        return self.folder / f"step{facts['step']}-{_digest(facts)}.safetensors"

    def try_load(self, request: DataProto) -> DataProto | None:
        """The batch kept for a request; None where there is none."""
        path = self.path_of(request)
        if not path.exists():
            return None
        self._say_reuse(path)
        return self._kept(path)

    def dump(self, request: DataProto, batch: DataProto) -> None:
        """Keep the batch that answers a request.

        Raises:
            ValueError: it holds what cannot be written.
        """
        path, facts = self.path_of(request), self.facts(request)
        try:
            save_rows(path, batch, facts)
        except ValueError as problem:
            raise ValueError(
                f"actor_rollout_ref.rollout.skip_rollout=true: the batch cannot be kept: {problem} "
                "Set skip_rollout=false."
            ) from None

    def __getattr__(self, name: str) -> Any:
        """Whatever else the sampler can do."""
        return getattr(vars(self)["sampler"], name)

    def facts(self, request: DataProto) -> dict[str, Any]:
        """What decides which batch it is, as JSON values."""
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

    @staticmethod
    def _kept(path: Path) -> DataProto:
        batch, _ = load_rows(path)
        batch.meta_info["timing"] = {}
        return batch

    def _say_reuse(self, path: Path) -> None:
        if "reuse" not in self.has_said:
            self.has_said.add("reuse")
            self.say(
                f"actor_rollout_ref.rollout.skip_rollout=true: batches are taken from {path.parent} where they are "
                f"there. What this run learns is not what its own policy wrote."
            )

    def _say_what_differs(self, facts: Mapping[str, Any]) -> None:
        """A batch of this step that was made otherwise is a surprise to who wants to reuse it; said once."""
        if "other" in self.has_said:
            return
        for path in sorted(self.folder.glob(f"step{facts['step']}-*.safetensors")):
            other = read_facts(path)
            changed = list(_differences(other, facts))
            if any(text.startswith("sampling.do_sample ") for text in changed):
                continue  # the greedy responses of ReMax beside the sampled ones
            self.has_said.add("other")
            self.say(
                f"actor_rollout_ref.rollout.skip_rollout=true: {path} is not used, it was made otherwise: "
                f"{'; '.join(changed)}. Batches of which no equal one is kept are sampled, and kept beside it."
            )
            return


class RolloutSkip(KeptRollouts):
    """The same for scripts with a loop of their own: over a worker group, whose own method then skips.

    Args:
        config: the whole tree.
        rollout_wg: has ``generate_sequences``.
    """

    def __init__(self, config: Any, rollout_wg: Any):
        super().__init__(SimpleNamespace(generate_sequences=rollout_wg.generate_sequences), typed_config(config), print)
        self.rollout_wg = rollout_wg

    def wrap_generate_sequences(self) -> None:
        """From now on ``rollout_wg.generate_sequences`` takes batches from disk where they are there."""
        self.rollout_wg.generate_sequences = self.generate_sequences

    @property
    def curr_path_dump(self) -> Path:
        """The folder of the batches."""
        return self.folder


def _hash(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _flat(value: Any) -> Iterator[Any]:
    """The items of nested lists: the frames of videos, too."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _hash_objects(values: Any) -> str:
    """Of names and of images, whose pixels count."""
    digest = hashlib.sha256()
    for value in values:
        for part in [*value.items()] if isinstance(value, Mapping) else [("", value)]:
            for item in _flat(part[1]):
                pixels = item.tobytes() if hasattr(item, "tobytes") else repr(item).encode()
                digest.update(f"{part[0]} {type(item).__name__} {len(pixels)} ".encode() + pixels)
    return digest.hexdigest()[:16]


def _digest(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Any:
    for name in {**old, **new}:
        before, now = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(before, now, f"{prefix}{name}.")
        elif before != now:
            yield f"{prefix}{name} was {before}, is {now}"
