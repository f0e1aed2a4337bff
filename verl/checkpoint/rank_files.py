"""The files of a save, one a rank and part: their names, which there are, and opening them.

Every error names what is there instead and how to continue. Knows no engine.
"""

import errno
import json
import logging
import os
import pickle
import re
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from verl.checkpoint.manifest import DamagedCheckpoint, Digest, DigestingFile
from verl.checkpoint.shards import is_flat, local
from verl.utils.exit_codes import ExitCode
from verl.utils.torch_functional import nonfinite_numbers

PARTS = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
"""Parts of a checkpoint that every rank writes -> how their files' names begin."""
METADATA_FILE = "fsdp_config.json"
UNREADABLE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, pickle.UnpicklingError)
"""Errors of ``torch.load`` on bytes that are not what ``torch.save`` wrote; an empty file is an IndexError."""


def file_name(part: str, world_size: int, rank: int) -> str:
    """Return the name of the file of ``part`` by ``rank`` of ``world_size``."""
    return f"{PARTS[part]}_world_size_{world_size}_rank_{rank}.pt"


def part_and_rank(name: str) -> tuple[str, int] | None:
    """The part and the rank that a file's name says; None for a file that no rank wrote as its own."""
    match = re.fullmatch(r"(\w+)_world_size_\d+_rank_(\d+)\.pt", name)
    parts = {begin: part for part, begin in PARTS.items()}
    return (parts[match[1]], int(match[2])) if match and match[1] in parts else None


def write_layout(folder: Path, world_size: int, layout: str | None) -> None:
    """Write ``fsdp_config.json``: the number of ranks and the layout of the files in ``folder``."""
    metadata = {"FSDP_version": 2, "world_size": world_size, "layout": layout}
    (folder / METADATA_FILE).write_text(json.dumps(metadata, indent=4))


def saved_layout(folder: Path) -> str | None:
    """The ``layout`` of the engine that wrote ``folder``; None where it is not recorded.

    Raises:
        DamagedCheckpoint: the file that records it is damaged.
    """
    path = folder / METADATA_FILE
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text()).get("layout")
    except (ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} cannot be read: it is damaged ({error}). {way_back(folder)}") from error


def saved_world_size(folder: Path, part: str) -> int:
    """The number of ranks that wrote ``part``.

    Raises:
        FileNotFoundError: if there is no such folder, or no such part in it.
        ValueError: if there are files of several saves.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint folder {folder} does not exist. {way_back(folder)}")
    pattern = re.compile(rf"{PARTS[part]}_world_size_(\d+)_rank_\d+\.pt")
    sizes = sorted({int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))})
    if not sizes:
        # without its weights a run cannot go on: leaving them out of load_contents would be refused
        way_out = f"Leave {part} out of checkpoint.load_contents, or give" if part != "model" else "Give"
        if (folder / "dist_ckpt").is_dir():
            way_out = f"dist_ckpt/ is of strategy=megatron: resume with that. {way_out}"
        raise FileNotFoundError(
            f"checkpoint folder {folder} was saved without {part!r}, or its files were deleted: it has "
            f"{_shown(folder)}. {way_out} a checkpoint whose save_contents had it. {way_back(folder)}"
        )
    if len(sizes) > 1:
        raise ValueError(
            f"checkpoint folder {folder} has {part} files of {' and of '.join(map(str, sizes))} ranks, and one save "
            f"writes those of one number: move the files of the other save away"
        )
    return sizes[0]


def files_of_all_ranks(folder: Path, part: str) -> list[Path]:
    """The files of ``part`` in rank order.

    Raises:
        FileNotFoundError, ValueError: as ``saved_world_size``, and if a rank's file is missing.
    """
    size = saved_world_size(folder, part)
    paths = [folder / file_name(part, size, rank) for rank in range(size)]
    missing = [rank for rank, path in enumerate(paths) if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"checkpoint folder {folder} lacks {len(missing)} of the {size} files of {part!r}, first "
            f"{paths[missing[0]].name}: all of them are needed to put the whole together. If nodes saved to disks of "
            f"their own, bring their files into one folder. Otherwise: {way_back(folder)}"
        )
    return paths


def open_file(path: Path, mmap: bool = False) -> Any:
    """Return what ``torch.save`` wrote to ``path``, on the host.

    Args:
        mmap: leave tensors in the file until they are touched; the file must then stay as it is.

    Raises:
        FileNotFoundError: if it is not there.
        DamagedCheckpoint: if it cannot be read.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"checkpoint file {path} does not exist, and its folder has {_shown(path.parent)}. {way_back(path.parent)}"
        )
    import torch.distributed.tensor  # registers DTensor with torch.load; heavy, and who only lists files needs none

    try:
        # weights_only: a checkpoint may come from elsewhere, and a full unpickling runs its code
        with _quiet_meshes():
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except UNREADABLE as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DamagedCheckpoint(
            f"checkpoint file {path} cannot be read: it is damaged, or not of this program. {way_back(path.parent)} "
            f"({reason})"
        ) from error


def way_back(folder: Path) -> str:
    """Return advice for a checkpoint of a role in ``folder`` that cannot be used: the older one to resume from."""
    steps = {
        int(path.parent.name.removeprefix("global_step_")): path.parent
        for path in folder.parent.parent.glob(f"global_step_*/{folder.name}")
        if path.is_dir() and path.parent.name.removeprefix("global_step_").isdigit()
    }
    match = re.fullmatch(r"global_step_(\d+)", folder.parent.name)
    older = [step for step in steps if match and step < int(match[1])]
    if older:
        return (
            f"Resume from an older step: trainer.resume_mode=resume_path trainer.resume_from_path={steps[max(older)]}"
        )
    return (
        "No older checkpoint lies next to it: give another folder, or start from the beginning with "
        "trainer.resume_mode=disable"
    )


def _shown(folder: Path, most: int = 8) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return f"{', '.join(names[:most])}{' ...' if len(names) > most else ''}" or "nothing"


@contextmanager
def _quiet_meshes() -> Iterator[None]:
    """Silence torch's warning that the mesh of a saved DTensor has no process group here."""
    noisy = logging.getLogger("torch.distributed.device_mesh")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


# -- Writing one file of a checkpoint, and saying what was missing where a disk is full ------------------------------


_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_file(content: Any, path: Path) -> Digest:
    """``torch.save`` to ``path``, and on to the disk; returns the digest of what was meant to be written.

    Raises:
        OSError: if the disk is full, with the bytes that were needed.
    """
    with full_disk_is_said(path, num_bytes(content)), open(path, "wb") as file:
        digesting = DigestingFile(file)
        torch.save(content, digesting)  # type: ignore[arg-type]  # of a file, it calls write() alone
        file.flush()
        # to the disk: the folder gets its name only when everything in it would survive a power cut
        os.fsync(file.fileno())
    return digesting.digest


class NonFiniteWeights(FloatingPointError):
    """Weights that are NaN or infinite were about to be saved."""

    exit_class = ExitCode.UNHEALTHY


@torch.no_grad()
def check_finite(content: Any, skip: Container[str] = (), source: Path | None = None) -> None:
    """Raise if a weight is not finite: a checkpoint of such a model would be of no use.

    Args:
        content: name -> piece, as in `verl.checkpoint.shards`.
        skip: names of tensors that may be infinite: masks that a model keeps as buffers.
        source: the checkpoint that ``content`` was read from; None: it is about to be saved.

    Raises:
        NonFiniteWeights: names the first such tensor.
        DamagedCheckpoint: the same, of weights that were read.
    """
    for name, piece in content.items():
        tensor = local(piece["flat"] if is_flat(piece) else piece)
        if name in skip or not isinstance(tensor, Tensor) or not (found := nonfinite_numbers(tensor)):
            continue
        if source is not None:
            raise DamagedCheckpoint(
                f"{source} is of a model that diverged, or was written wrongly: {name} has {found}. Resume from "
                "another checkpoint (trainer.resume_from_path), or start from the model again"
            )
        raise NonFiniteWeights(
            f"{name} has {found}. It is not saved, and the checkpoints of earlier steps stay: resume from one of them "
            f"with a lower optim.lr, and look for extreme rewards or log-probabilities in the steps since"
        )


_LESS = (
    "keep fewer checkpoints (trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep), leave optimizer or "
    "hf_model out of checkpoint.save_contents, or point trainer.default_local_dir to another disk. Checkpoints that "
    "were complete before still are"
)


@contextmanager
def full_disk_is_said(path: Path, needed: int = 0, way_out: str = _LESS) -> Iterator[None]:
    """Turn the error of a writer on a full disk into one that names ``path`` and ``needed``, its bytes if known."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        # some writers report a full disk as a plain error: then the free space tells
        free = shutil.disk_usage(path.parent).free
        if not _says_full(error) and free >= needed:
            raise
        needs = f"needs {needed:,} bytes" if needed else "was not written"
        raise OSError(errno.ENOSPC, f"{path} {needs} and its disk has {free:,} left. Free some, {way_out}") from error


def _says_full(error: BaseException | None) -> bool:
    while error is not None:
        # safetensors writes in Rust, whose text for ENOSPC is all that comes through
        if getattr(error, "errno", None) in _FULL or "(os error 28)" in str(error):
            return True
        # a writer may raise another while it closes the file: the first is its context
        error = error.__context__
    return False


def num_bytes(content: Any) -> int:
    """Bytes of all tensors in nested dicts, lists and tuples; of a sharded one, those of this rank."""
    if isinstance(content, Tensor):
        tensor = local(content)
        return tensor.numel() * tensor.element_size()
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return sum(num_bytes(part) for part in parts)


def on_host(content: Any) -> Any:
    """A copy whose tensors lie in host memory of their own: what is trained on may change meanwhile."""
    if isinstance(content, Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, dict):
        return {key: on_host(part) for key, part in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(on_host(part) for part in content)
    return content
