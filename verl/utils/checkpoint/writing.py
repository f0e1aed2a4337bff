"""Writing one file of a checkpoint, and saying what was missing where a disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from verl.utils.checkpoint.pieces import local

_FULL = {errno.ENOSPC, errno.EDQUOT}


def write_file(content: Any, path: Path) -> None:
    """``torch.save`` to ``path``, and on to the disk.

    Raises:
        OSError: if the disk is full, with the bytes that were needed.
    """
    with full_disk_is_said(path, num_bytes(content)), open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def full_disk_is_said(path: Path, needed: int) -> Iterator[None]:
    """Turn what a writer raises on a full disk into an error that says ``path`` and ``needed``, its bytes."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        free = shutil.disk_usage(path.parent).free
        if not _says_full(error) and free >= needed:
            raise
        raise OSError(
            errno.ENOSPC,
            f"{path} needs {needed:,} bytes and its disk has {free:,} left. Free some, keep fewer checkpoints "
            f"(trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep), leave optimizer or hf_model out of "
            f"checkpoint.save_contents, or point trainer.default_local_dir to another disk. Checkpoints that were "
            f"complete before still are",
        ) from error


def _says_full(error: BaseException | None) -> bool:
    while error is not None:
        if getattr(error, "errno", None) in _FULL or "(os error 28)" in str(error):
            return True
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
