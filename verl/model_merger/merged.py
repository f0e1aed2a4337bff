"""Weights of a sharded checkpoint, joined over ranks, under their Hugging Face names.

Reads the files of every backend: each piece carries its own sharding. Starts no process group and no engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint.rank_files import files_of_all_ranks, open_file
from verl.checkpoint.shards import Joined, check_names, fill
from verl.models.loader import LoRASpec, ModelSpec, empty_model, load_config, load_model
from verl.models.weight_names import checkpoint_tensors, plain_name, tied_duplicates


@dataclass(frozen=True)
class Source:
    """A role's checkpoint, and the folder with its config and tokenizer."""

    local_dir: Path
    """``.../global_step_N/actor`` or ``critic``."""
    model_dir: str
    """Folder with config and tokenizer; by default ``huggingface/`` in the checkpoint."""
    trust_remote_code: bool = False
    is_value_model: bool = False
    has_own_base: bool = False
    """Whether the model below an adapter is that of ``model_dir``, rather than where the adapter says it was."""

    @classmethod
    def find(cls, local_dir: str, hf_model_path: str | None = None, **options: bool) -> Source:
        """Check the folders of a checkpoint and its model.

        Raises:
            ValueError: if one is missing or of another kind.
        """
        folder = Path(local_dir).expanduser()
        if not folder.is_dir():
            raise ValueError(
                f"--local_dir={local_dir} does not exist: give the folder of a role, .../global_step_N/actor"
            )
        inner = [name for name in ("actor", "critic") if (folder / name).is_dir()]
        if inner:
            raise ValueError(
                f"--local_dir={local_dir} holds the checkpoints of {' and '.join(inner)}, and one model is merged at a "
                f"time: give {folder / inner[0]}"
            )
        if (folder / "dist_ckpt").is_dir():
            raise ValueError(
                f"--local_dir={local_dir} is a checkpoint of Megatron (dist_ckpt/), which is not read here: merge it "
                f"with the program that wrote it"
            )
        model_dir = os.path.expanduser(hf_model_path or folder / "huggingface")
        if not hf_model_path and not (folder / "huggingface" / "config.json").exists():
            raise ValueError(
                f"{model_dir} has no config.json to tell which model this is: pass --hf_model_path=<folder of the "
                f"model that the run began with>"
            )
        return cls(folder, model_dir, has_own_base=bool(hf_model_path), **options)

    def spec(self, path: str | None = None, lora: LoRASpec | None = None) -> ModelSpec:
        """Return the spec of the checkpoint's model."""
        return ModelSpec(
            path or self.model_dir,
            "value" if self._has_value_head() else "lm",
            trust_remote_code=self.trust_remote_code,
            gradient_checkpointing=False,
            lora=lora,
        )

    def _has_value_head(self) -> bool:
        config = load_config(ModelSpec(self.model_dir, trust_remote_code=self.trust_remote_code))
        architectures = getattr(config, "architectures", None) or [""]
        return self.is_value_model or architectures[0].endswith("ForTokenClassification")

    def source_dtype(self) -> torch.dtype:
        """Return the precision in the config."""
        config = load_config(ModelSpec(self.model_dir, trust_remote_code=self.trust_remote_code))
        return getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None) or torch.float32


def merged_weights(source: Source, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole weight once under its checkpoint name; only one is held, and with an adapter its base model.

    Raises:
        FileNotFoundError, ValueError: if the files are not those of all ranks of one save, or of another model.
    """
    ranks = [open_file(path, mmap=True) for path in files_of_all_ranks(source.local_dir, "model")]
    saved = Joined([{plain_name(name): piece for name, piece in rank.items()} for rank in ranks])
    if any(".lora_A." in name for name in saved):
        model, named = _with_adapter(source, saved)
    else:
        model, named = _without_adapter(source, saved)
    for name, tensor in checkpoint_tensors(model, named):
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _without_adapter(source: Source, saved: Mapping[str, Tensor]) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    model = empty_model(source.spec())
    duplicates = tied_duplicates(model)
    own = {plain_name(name): tensor for name, tensor in model.state_dict().items() if name not in duplicates}
    # names only: joining a tensor reads it
    check_names(own, {name: None for name in saved if name not in duplicates})

    def joined() -> Iterator[tuple[str, Tensor]]:
        for name, meta in own.items():
            tensor = saved[name]
            if tensor.shape != meta.shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} in {source.local_dir} and {tuple(meta.shape)} by the "
                    f"config in {source.model_dir}: they are different models. Pass --hf_model_path of the right one"
                )
            yield name, tensor

    return model, joined()


def _with_adapter(source: Source, saved: Mapping[str, Tensor]) -> tuple[nn.Module, Iterator[tuple[str, Tensor]]]:
    """Load the base model and the saved adapter into it: the checkpoint holds only trained weights."""
    from verl.models.lora import merge_adapter

    adapter = _adapter_config(source)
    lora = LoRASpec(adapter["r"], adapter["lora_alpha"], tuple(adapter["target_modules"]))
    base = source.model_dir if source.has_own_base else adapter["base_model_name_or_path"]
    model = load_model(source.spec(base, lora))
    trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    check_names(trained, saved)
    for name, parameter in trained.items():
        fill(parameter, saved[name], name)
    duplicates = tied_duplicates(model)
    state = ((name, tensor) for name, tensor in model.state_dict().items() if name not in duplicates)
    return model, merge_adapter(model, state)


def _adapter_config(source: Source) -> dict[str, Any]:
    path = source.local_dir / "lora_adapter" / "adapter_config.json"
    if not path.exists():
        raise ValueError(
            f"{source.local_dir} holds an adapter, and {path} does not exist: without rank, alpha and base model it "
            f"cannot be merged. Bring the checkpoint's lora_adapter/ back"
        )
    return json.loads(path.read_text())
