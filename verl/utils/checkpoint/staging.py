"""A folder that appears under its name only when all ranks have written all of it.

Ranks write to ``<name>.partial``; one rank of each disk prepares that folder and renames it at the end. Nodes may share
a disk or have one each.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import torch.distributed as dist

from verl.utils.distributed import all_gather_objects, barrier, get_rank, is_node_leader


def begin(final: Path) -> tuple[Path, bool]:
    """Make an empty folder to write to in place of ``final``; all ranks call it together.

    Returns:
        The folder, and whether this rank is the one to ``publish`` it.
    """
    if is_node_leader():
        final.parent.mkdir(parents=True, exist_ok=True)
    staged, leads = final.with_name(f"{final.name}.partial"), leads_its_disk(final.parent)
    if leads:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
    barrier()
    return staged, leads


def leads_its_disk(folder: Path, group: dist.ProcessGroup | None = None) -> bool:
    """True on one of the ranks to which ``folder`` is the same place; all ranks call it together.

    Each node's leader leaves a file there, and looks which of the others' it sees.
    """
    token = f".{uuid.uuid4().hex}"
    tokens = all_gather_objects(token if is_node_leader() else None, group)
    if sum(name is not None for name in tokens) == 1:
        return is_node_leader()
    if is_node_leader():
        (folder / token).touch()
    barrier()
    # asked for by name: a listing of a network folder may be some seconds old
    seen = [rank for rank, name in enumerate(tokens) if is_node_leader() and name and (folder / name).exists()]
    barrier()
    if is_node_leader():
        (folder / token).unlink()
    return bool(seen) and seen[0] == get_rank()


def publish(staged: Path, final: Path) -> None:
    """Give ``staged`` its name, once everything in it is on the disk; what had the name is deleted."""
    for path in (*staged.rglob("*"), staged):
        _flush(path)
    replaced = _replaced(final)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    staged.rename(final)
    _flush(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def recover(final: Path) -> None:
    """Bring back what had the name ``final``, if a save was cut off between taking the name away and giving it anew."""
    if not final.exists() and _replaced(final).exists():
        _replaced(final).rename(final)


def _replaced(final: Path) -> Path:
    return final.with_name(f"{final.name}.replaced")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
