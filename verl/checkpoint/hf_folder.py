"""A model as a Hugging Face folder: config, tokenizer, weights in safetensors; written, and read back to be sure."""

import copy
import errno
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from verl.checkpoint.rank_files import full_disk_is_said, num_bytes

SHARD_BYTES = 4 << 30
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"


def write_config(module: Any, folder: Path, dtype: torch.dtype, tokenizer: Any = None, generates: bool = True) -> None:
    """Write the files next to the weights: config, generation config, and the tokenizer or processor.

    Args:
        dtype: of the weights, as the config will say.
        generates: whether the model has a language model's head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(module.config)  # the running model's stays as it is
    # fully_shard makes the class FSDP<name>; transformers looks it up under its plain one
    config.architectures = [getattr(module, "architecture", type(module).__name__.removeprefix("FSDP"))]
    config.dtype = dtype
    config.save_pretrained(folder)
    if generates and getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def write_safetensors(weights: Iterable[tuple[str, Tensor]], folder: Path, is_writer: bool = True) -> None:
    """Write tensors as Hugging Face shards of at most 4 GiB; each is opened again and compared with what was written.

    Args:
        weights: iterator of (name, tensor); every rank runs it to its end.
        is_writer: whether this rank writes.

    Raises:
        OSError: the disk is full, or a file does not hold what was written to it.
    """
    files: dict[Path, list[str]] = {}
    shard: dict[str, Tensor] = {}
    total, held = 0, 0

    def flush() -> None:
        path = folder / f"model-{len(files) + 1:05d}.safetensors"
        with full_disk_is_said(path, num_bytes(shard)):
            save_file(shard, path, metadata={"format": "pt"})
        _check_written(path, shard)
        files[path] = list(shard)
        shard.clear()

    for name, tensor in weights:
        if not is_writer:
            continue
        size = tensor.numel() * tensor.element_size()
        # a tensor above the limit gets a shard of its own
        if shard and held + size > SHARD_BYTES:
            flush()
            held = 0
        # a copy: the tensor may be memory that the next one is gathered into
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held, total = held + size, total + size
    if not is_writer:
        return
    flush()
    # names tell how many there are, which is known only now
    if len(files) == 1:
        next(iter(files)).rename(folder / _WHOLE)
        return
    place: dict[str, str] = {}
    for number, (path, names) in enumerate(files.items(), 1):
        path = path.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
        place |= dict.fromkeys(names, path.name)
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _check_written(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with safe_open(path, "pt") as file:
        wrong = sorted(file.keys() ^ tensors.keys())
        # as bytes, in which NaN equals itself
        wrong += [name for name in tensors if not wrong and not _equal_bytes(file.get_tensor(name), tensors[name])]
    if wrong:
        raise OSError(
            errno.EIO,
            f"{path} was written and does not hold the same when it is read again: {wrong[0]} and "
            f"{len(wrong) - 1} more tensors differ. Look at its disk, or save to another one",
        )


def _equal_bytes(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` has weights in safetensors."""
    return (folder / _INDEX).exists() or (folder / _WHOLE).exists()


def is_weight_file(path: Path) -> bool:
    """Whether ``path`` is a file of weights or their index, in any format of a Hugging Face folder."""
    return path.suffix in (".safetensors", ".bin", ".pt", ".pth") or path.name.endswith(".index.json")


class Weights:
    """The tensors in a Hugging Face folder, each read on first use.

    Raises:
        FileNotFoundError: if the folder has no weights, or lacks a file that its index names.
    """

    def __init__(self, folder: Path) -> None:
        if (folder / _INDEX).exists():
            place = json.loads((folder / _INDEX).read_text())["weight_map"]
        elif (folder / _WHOLE).exists():
            with safe_open(folder / _WHOLE, "pt") as file:
                place = dict.fromkeys(file.keys(), _WHOLE)
        else:
            there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
            raise FileNotFoundError(
                f"{folder} has no {_WHOLE} and no {_INDEX}, but {', '.join(there) or 'nothing'}: give a folder with "
                f"weights in safetensors"
            )
        self._files = {name: folder / file for name, file in place.items()}
        for path in dict.fromkeys(self._files.values()):
            if not path.exists():
                raise FileNotFoundError(f"{folder / _INDEX} names {path.name}, which does not exist: the copy was cut")

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, read from the file's header alone."""
        with safe_open(self._files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)
