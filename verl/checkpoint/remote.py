"""Checkpoints in a remote store next to those on disk (``trainer.default_hdfs_dir``), and the checkpoints of a run.

A step's folder is copied when it is complete, and the tracker file after it: what the tracker names is there whole.
Knows folders and stores; not what is in them.
"""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.checkpoint import run_state as checkpoint
from verl.checkpoint.run_state import TRACKER, mark_complete, step_folder, step_of
from verl.checkpoint.run_state import folder_to_resume as local_folder_to_resume
from verl.utils import fs


def upload(root: str, folder: Path, step: int) -> None:
    """Copy the complete folder of a step to the store, and name it the newest there."""
    target = _remote_folder(root, step)
    fs.makedirs(root)
    fs.remove(target)  # of an earlier run through this step; the command would copy into it
    fs.copy(str(folder), target)
    with tempfile.TemporaryDirectory() as place:
        tracker = Path(place) / TRACKER
        tracker.write_text(str(step))
        fs.copy(str(tracker), f"{root.rstrip('/')}/{TRACKER}")


def forget(root: str, step: int) -> None:
    """Delete the copy of a step."""
    fs.remove(_remote_folder(root, step))


def newest_step(root: str) -> int | None:
    """Return the step whose copy was completed last; None if there is none."""
    tracker = f"{root.rstrip('/')}/{TRACKER}"
    if not fs.exists(tracker):
        return None
    with tempfile.TemporaryDirectory() as place:
        fs.copy(tracker, f"{place}/{TRACKER}")
        text = (Path(place) / TRACKER).read_text().strip()
    if not text.isdigit():
        raise ValueError(
            f"{tracker} holds {text!r}, not a step number (trainer.default_hdfs_dir). Correct it, or pass "
            "trainer.resume_mode=disable to start from the beginning."
        )
    return int(text)


def download(source: str, local_root: str, step: int) -> Path:
    """The folder of a step of the store, copied whole into ``local_root`` unless it is there."""
    folder = step_folder(local_root, step).absolute()
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        fs.copy(source, str(partial))
        partial.rename(folder)
    return folder


def folder_to_resume(config: Any) -> Path | None:
    """:func:`checkpoint.folder_to_resume`, the store included: the newest or named folder there is downloaded.

    Args:
        config: the ``trainer`` section.
    """
    root, path = config.default_hdfs_dir, config.resume_from_path
    if config.resume_mode == "resume_path" and path and fs.is_remote(path):
        return download(path.rstrip("/"), config.default_local_dir, step_of(path.rstrip("/")))
    local = local_folder_to_resume(config)
    if not root:
        return local
    fs.makedirs(root)  # a store that cannot be written fails now, and not at the first checkpoint
    step = newest_step(root) if config.resume_mode == "auto" else None
    if step is None or local is not None and step <= step_of(local):
        return local
    folder = download(_remote_folder(root, step), config.default_local_dir, step)
    mark_complete(folder.parent, step)
    return folder


def _remote_folder(root: str, step: int) -> str:
    return f"{root.rstrip('/')}/global_step_{step}"


# -- The checkpoints of a run: written, marked complete, copied, deleted, and read ------------------------------------


SAVED_ROLES = {"actor_rollout": "actor", "actor": "actor", "critic": "critic"}
"""Names of roles with a checkpoint, and its folder under that of the step."""


def saved_groups(worker_groups: Mapping[Any, Any]) -> dict[str, Any]:
    """Folder under that of a step -> worker group whose checkpoint it is.

    Args:
        worker_groups: by role; ``str(role)`` is the role's name.
    """
    by_name = {str(role): group for role, group in worker_groups.items()}
    return {folder: by_name[name] for name, folder in SAVED_ROLES.items() if name in by_name}


class RunCheckpoints:
    """The checkpoints of one run; ``groups`` are always those of `saved_groups`.

    Args:
        config: the whole tree.
        say: prints a sentence for the user.
        timed: name -> a context that counts the seconds of a block.

    Attributes:
        last: folder of the newest complete one.
        steps: those this run has saved, restarts included, and not deleted.
        unfinished: the step that is being written, or None.
    """

    def __init__(self, config: Any, say: Callable[[str], None], timed: Callable[[str], AbstractContextManager]) -> None:
        self.config, self.say, self.timed = config, say, timed
        self.last: Path | None = None
        self.steps: list[int] = []
        self.unfinished: int | None = None

    def folder(self, step: int) -> Path:
        return checkpoint.step_folder(self.config.trainer.default_local_dir, step).absolute()

    def begin(self, step: int, groups: Mapping[str, Any]) -> Path:
        """Write the models and optimizers of a step; the returned folder is complete after `finish`."""
        folder = self.folder(step)
        for name, group in groups.items():
            group.save_checkpoint(str(folder / name), None, step)
        self.steps = [saved for saved in self.steps if saved != step] + [step]
        return folder

    def in_background(self, groups: Mapping[str, Any]) -> list[Any]:
        """Worker groups that write their checkpoint while training goes on."""
        sections = {"actor": self.config.actor_rollout_ref.actor, "critic": self.config.critic}
        return [group for name, group in groups.items() if sections[name].checkpoint.async_save]

    def finish(self, groups: Mapping[str, Any], wait: bool = True) -> None:
        """Mark the last saved step complete when it is; raises if it could not be written.

        Args:
            wait: False to leave a save alone that is still being written.
        """
        step, savers = self.unfinished, self.in_background(groups)
        if step is None or not wait and any(flag for group in savers for flag in group.is_saving()):
            return
        self.unfinished = None
        for group in savers:
            group.finish_saving()
        folder = self.folder(step)
        checkpoint.mark_complete(folder.parent, step)
        self.last = folder
        before = self.steps
        self.delete_old(groups)
        if self.config.trainer.default_hdfs_dir:
            self.copy_to_store(folder, step, [old for old in before if old not in self.steps])

    def copy_to_store(self, folder: Path, step: int, dropped: list[int]) -> None:
        """Copy a complete checkpoint to ``trainer.default_hdfs_dir``; a store that fails does not end the run."""
        root = self.config.trainer.default_hdfs_dir
        try:
            with self.timed("upload_checkpoint"):
                upload(root, folder, step)
                for old in dropped:
                    forget(root, old)
        except OSError as error:
            self.say(f"{folder} could not be copied to trainer.default_hdfs_dir={root}: {error}")

    def delete_old(self, groups: Mapping[str, Any]) -> None:
        """Keep the newest ``trainer.max_{actor,critic}_ckpt_to_keep`` checkpoints of this run, restarts included.

        Called when a newer one is complete: a run killed at any moment can resume.
        """
        for name, group in groups.items():
            keep = self.config.trainer[f"max_{name}_ckpt_to_keep"]
            old = [str(self.folder(step) / name) for step in self.steps[: -keep or None]] if keep else []
            if old:
                group.delete_checkpoints(old)
        self.steps = checkpoint.drop_emptied(self.folder(0).parent, self.steps)

    def load_groups(self, folder: Path, groups: Mapping[str, Any]) -> list[str]:
        """Load a checkpoint into the worker groups; returns remarks for the user."""
        policy, critic = self.config.actor_rollout_ref, self.config.critic
        sections = {"actor": (policy.actor, policy.model), "critic": (critic, critic.model)}
        remarks = []
        for name in groups:
            section, model = sections[name]
            has_adapter = model.lora_rank > 0
            remarks.append(checkpoint.not_loaded(name, section.checkpoint.load_contents, has_adapter))
        for name, group in groups.items():
            notes = dict.fromkeys(filter(None, group.load_checkpoint(str(folder / name))))
            remarks += [f"; {name}: {remark}" for remark in notes]
        return remarks

    def loaded(self, folder: Path, steps: list[int], groups: Mapping[str, Any]) -> None:
        """Note that all of a checkpoint has been read; with ``trainer.del_local_ckpt_after_load`` it is deleted.

        Args:
            steps: those its run had saved; they count as this run's if it writes into the same folder.
        """
        if folder.parent.resolve() == self.folder(0).parent.resolve():
            self.steps = list(steps)
        self.last = folder
        if self.config.trainer.del_local_ckpt_after_load:
            for name, group in groups.items():
                group.delete_checkpoints([str(folder / name)])
            checkpoint.drop_emptied(folder.parent, [checkpoint.step_of(folder)])
            self.last = None
