"""Write an engine's state to a folder and read it back, in the layout that tools of verl know:

    model_world_size_{W}_rank_{r}.pt         this rank's weights (DTensors where sharded)
    optim_world_size_{W}_rank_{r}.pt         AdamW's state by parameter name
    extra_state_world_size_{W}_rank_{r}.pt   learning-rate schedule, random generators, version
    fsdp_config.json                         {"FSDP_version": 2, "world_size": W}
    huggingface/                             config and tokenizer; with "hf_model", weights in safetensors too
    lora_adapter/                            of a LoRA run: what is trained, in peft's format

A LoRA run's model file holds what is trained on top of ``model.path``; the weights of ``huggingface/`` are merged.

A folder appears under its name only when all ranks have written all of it. Knows an engine by ``state``,
``load_state`` and ``weights``; knows no training loop.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.utils.distributed import barrier, is_node_leader

logger = logging.getLogger(__name__)

CONTENTS = ("model", "optimizer", "extra", "hf_model")
_FILE = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
_SHARD_BYTES = 4 << 30


class CheckpointManager:
    """Saves and loads one engine.

    Args:
        engine: whose state it is.
        tokenizer: saved beside the weights, or None.
        save_contents: which of ``model``, ``optimizer``, ``extra``, ``hf_model`` to write.
        load_contents: which of ``model``, ``optimizer``, ``extra`` to read.

    Raises:
        ValueError: for unknown contents.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any = None,
        save_contents: Sequence[str] = ("model", "optimizer", "extra"),
        load_contents: Sequence[str] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.save_contents = _checked("save_contents", save_contents)
        self.load_contents = _checked("load_contents", save_contents if load_contents is None else load_contents)
        self._saved: list[Path] = []

    # -- save -----------------------------------------------------------------------------------------------------

    def save(self, local_path: str | os.PathLike, global_step: int = 0, max_to_keep: int | None = None) -> None:
        """Write the folder ``local_path``; all ranks call it together.

        Args:
            global_step: of the trainer, for the log only.
            max_to_keep: of the folders this manager has saved, delete all but the newest so many; None or 0: keep all.
        """
        final = Path(local_path).expanduser()
        staged = final.with_name(final.name + ".partial")
        if is_node_leader():
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir(parents=True)
        barrier()
        state = self.engine.state([part for part in self.save_contents if part in _FILE])
        for part, content in state.items():
            _write(content, staged / self._file_name(part))
        del state
        self._save_huggingface(staged / "huggingface")
        if getattr(self.engine, "has_adapter", False):
            self.engine.save_adapter(staged / "lora_adapter", is_writer=self.engine.topology.rank == 0)
        barrier()
        if is_node_leader():
            self._publish(staged, final)
        barrier()
        logger.info("saved step %s to %s", global_step, final)
        self._forget_old(final, max_to_keep)

    def _file_name(self, part: str) -> str:
        place = self.engine.topology
        return f"{_FILE[part]}_world_size_{place.world_size}_rank_{place.rank}.pt"

    def _publish(self, staged: Path, final: Path) -> None:
        config = {"FSDP_version": 2, "world_size": self.engine.topology.world_size}
        (staged / "fsdp_config.json").write_text(json.dumps(config, indent=4))
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        staged.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)

    def _forget_old(self, newest: Path, max_to_keep: int | None) -> None:
        self._saved = [path for path in self._saved if path != newest] + [newest]
        if not max_to_keep or max_to_keep < 0:
            return
        old, self._saved = self._saved[:-max_to_keep], self._saved[-max_to_keep:]
        self.delete(old)

    def delete(self, folders: Sequence[str | os.PathLike]) -> None:
        """Delete the checkpoints in ``folders``, on every node; those that are gone already are no error."""
        if is_node_leader():
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _save_huggingface(self, folder: Path) -> None:
        is_writer = self.engine.topology.rank == 0
        # ranks on other nodes write their shards; the model folder is written once
        if is_writer:
            folder.mkdir(parents=True, exist_ok=True)
            module = self.engine.module
            config = copy.deepcopy(module.config)
            config.architectures = [type(module).__name__.removeprefix("FSDP")]
            dtype = self.export_dtype()
            config.dtype = dtype
            config.save_pretrained(folder)
            if getattr(module, "generation_config", None) is not None and self.engine.spec.head == "lm":
                module.generation_config.save_pretrained(folder)
            if self.tokenizer is not None:
                self.tokenizer.save_pretrained(folder)
        if "hf_model" in self.save_contents:
            write_safetensors(self.engine.weights(self.export_dtype()), folder, is_writer)

    def export_dtype(self) -> torch.dtype:
        """The precision the model came in, which its Hugging Face copy keeps."""
        return self.engine.source_dtype or torch.float32

    # -- load -----------------------------------------------------------------------------------------------------

    def load(self, local_path: str | os.PathLike, del_after: bool = False) -> None:
        """Continue from the folder ``local_path``; all ranks call it together.

        Args:
            del_after: delete the files once every rank has read them.

        Raises:
            FileNotFoundError: if a file is missing, with what is there instead.
            ValueError: if a file is damaged, or of another model.
        """
        folder = Path(local_path).expanduser()
        state = {part: self._read(folder, part) for part in self.load_contents if part in _FILE}
        self.engine.load_state(state)
        barrier()
        if del_after and is_node_leader():
            shutil.rmtree(folder, ignore_errors=True)

    def _read(self, folder: Path, part: str) -> Any:
        path = folder / self._file_name(part)
        if not path.exists():
            raise FileNotFoundError(f"checkpoint file {path} does not exist: {_what_is_there(folder, part)}")
        try:
            # to host memory: a device holds no second copy, and generator states must lie there
            return torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"checkpoint file {path} cannot be read: resume from an older step. ({error})") from error


def _checked(name: str, contents: Sequence[str]) -> list[str]:
    unknown = [part for part in contents if part not in CONTENTS]
    if unknown:
        raise ValueError(f"checkpoint.{name} has {unknown[0]!r}, which is none of {', '.join(CONTENTS)}")
    return list(contents)


def _write(content: Any, path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _what_is_there(folder: Path, part: str) -> str:
    if not folder.is_dir():
        return "neither does its folder"
    found = sorted(path.name for path in folder.glob(f"{_FILE[part]}_world_size_*.pt"))
    if not found:
        return f"the checkpoint was saved without {part!r}; leave it out of checkpoint.load_contents"
    size = found[0].split("_world_size_")[1].split("_")[0]
    return f"it was saved by {size} ranks; resume with as many"


def write_safetensors(weights: Any, folder: Path, is_writer: bool) -> None:
    """Write tensors as Hugging Face shards of at most 4 GiB.

    Args:
        weights: iterator of (name, tensor); every rank runs it to its end.
        is_writer: whether this rank writes.
    """
    files: dict[Path, list[str]] = {}
    shard: dict[str, Tensor] = {}
    total, held = 0, 0

    def flush() -> None:
        path = folder / f"model-{len(files) + 1:05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files[path] = list(shard)
        shard.clear()

    for name, tensor in weights:
        if not is_writer:
            continue
        size = tensor.numel() * tensor.element_size()
        if shard and held + size > _SHARD_BYTES:
            flush()
            held = 0
        # a copy: the tensor may be memory that the next one is gathered into
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held, total = held + size, total + size
    if not is_writer:
        return
    flush()
    if len(files) == 1:
        next(iter(files)).rename(folder / "model.safetensors")
        return
    index = {"metadata": {"total_size": total}, "weight_map": {}}
    for number, (path, names) in enumerate(files.items(), 1):
        path = path.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        index["weight_map"].update(dict.fromkeys(names, path.name))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))
