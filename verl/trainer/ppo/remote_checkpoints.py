"""Checkpoints in a remote store beside those on disk: ``trainer.default_hdfs_dir``.

A step's folder is copied when it is complete, and the tracker file after it: what the tracker names is there whole.
Knows folders and stores; not what is in them.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from verl.trainer.ppo.checkpoint import TRACKER, mark_complete, step_folder, step_of
from verl.trainer.ppo.checkpoint import folder_to_resume as local_folder_to_resume
from verl.utils import hdfs_io


def upload(root: str, folder: Path, step: int) -> None:
    """Copy the complete folder of a step to the store, and name it the newest there."""
    target = _remote_folder(root, step)
    hdfs_io.makedirs(root)
    hdfs_io.remove(target)  # of an earlier run through this step; the command would copy into it
    hdfs_io.copy(str(folder), target)
    with tempfile.TemporaryDirectory() as place:
        tracker = Path(place) / TRACKER
        tracker.write_text(str(step))
        hdfs_io.copy(str(tracker), f"{root.rstrip('/')}/{TRACKER}")


def forget(root: str, step: int) -> None:
    """Delete the copy of a step."""
    hdfs_io.remove(_remote_folder(root, step))


def newest_step(root: str) -> int | None:
    """The step whose copy was completed last; None if there is none."""
    tracker = f"{root.rstrip('/')}/{TRACKER}"
    if not hdfs_io.exists(tracker):
        return None
    with tempfile.TemporaryDirectory() as place:
        hdfs_io.copy(tracker, f"{place}/{TRACKER}")
        text = (Path(place) / TRACKER).read_text().strip()
    if not text.isdigit():
        raise ValueError(
            f"{tracker} holds {text!r}, not a step number (trainer.default_hdfs_dir). Correct it, or pass "
            "trainer.resume_mode=disable to start anew."
        )
    return int(text)


def download(source: str, local_root: str, step: int) -> Path:
    """The folder of a step of the store, copied whole into ``local_root`` unless it is there."""
    folder = step_folder(local_root, step).absolute()
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        hdfs_io.copy(source, str(partial))
        partial.rename(folder)
    return folder


def folder_to_resume(config: Any) -> Path | None:
    """:func:`checkpoint.folder_to_resume`, the store included: what is newest there, or named there, is brought here.

    Args:
        config: the ``trainer`` section.
    """
    root, path = config.default_hdfs_dir, config.resume_from_path
    if config.resume_mode == "resume_path" and path and hdfs_io.is_remote(path):
        return download(path.rstrip("/"), config.default_local_dir, step_of(path.rstrip("/")))
    local = local_folder_to_resume(config)
    if not root:
        return local
    hdfs_io.makedirs(root)  # a store that cannot be written is known now, and not at the first checkpoint
    step = newest_step(root) if config.resume_mode == "auto" else None
    if step is None or local is not None and step <= step_of(local):
        return local
    folder = download(_remote_folder(root, step), config.default_local_dir, step)
    mark_complete(folder.parent, step)
    return folder


def _remote_folder(root: str, step: int) -> str:
    return f"{root.rstrip('/')}/global_step_{step}"
