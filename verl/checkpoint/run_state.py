"""State of a run on disk: the folder of a step's checkpoint, the driver's own part of it, and the one to resume from.

The folder of a step holds ``actor/`` and ``critic/`` (written by the workers), ``data.pt`` (the loader's position),
``trainer.json`` (the driver's state), ``config.json`` (the options of the run), and ``ahead.safetensors`` (responses
generated ahead, in a run that does), and ``manifest.json`` (sizes and checksums of all of these).
``latest_checkpointed_iteration.txt`` names the newest complete step and is written last, so a run killed while saving
resumes from the one before. In a remote store (``trainer.default_hdfs_dir``) a step's folder is copied when it is
complete, and the tracker file after it: what the tracker names is there whole.
"""

import errno
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.checkpoint.manifest import (
    MANIFEST,
    TRACKER,
    DamagedCheckpoint,
    damaged_files,
    digest,
    digest_of,
    fingerprint,
    manifest_of,
    read_manifest,
    versions,
)
from verl.checkpoint.rank_files import UNREADABLE, full_disk_is_said, way_back
from verl.checkpoint.resume_changes import changes, describe_changes, refuse_changes, run_identity
from verl.checkpoint.rows_file import load_rows, save_rows
from verl.config.describe import CONFIG_FILE
from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.protocol import DataProto
from verl.telemetry.run_record import mask
from verl.utils import fs

AHEAD = "ahead.safetensors"


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root).expanduser() / f"global_step_{step}"


def step_of(folder: str | Path) -> int:
    """Return the step number in a checkpoint folder's name.

    Raises:
        ValueError: the name is not ``global_step_<number>``.
    """
    match = re.fullmatch(r"global_step_(\d+)", Path(folder).name)
    if not match:
        raise ValueError(
            f"trainer.resume_from_path={folder} is not a step's folder: its name must be global_step_<number>. "
            f"Give the folder that holds actor/ and data.pt, for example .../global_step_100."
        )
    return int(match.group(1))


def folder_to_resume(config: TrainerConfig) -> Path | None:
    """The checkpoint ``trainer.resume_mode`` asks for; None to start from the beginning.

    One in the remote store, the newest or the named, is copied to ``trainer.default_local_dir`` unless it is there.
    """
    root, path = config.default_hdfs_dir, config.resume_from_path
    if config.resume_mode == "resume_path" and path and fs.is_remote(path):
        return _download(path.rstrip("/"), config.default_local_dir, step_of(path.rstrip("/")))
    local = _local_folder_to_resume(config)
    if not root:
        return local
    fs.makedirs(root)  # a store that cannot be written fails now, and not at the first checkpoint
    step = newest_step(root) if config.resume_mode == "auto" else None
    if step is None or local is not None and step <= step_of(local):
        return local
    try:
        folder = _download(_remote_folder(root, step), config.default_local_dir, step)
    except DamagedCheckpoint as error:
        if local is None:
            raise
        print(f"{error}. Going on from {local}.")
        return local
    mark_complete(folder.parent, step)
    return folder


def _local_folder_to_resume(config: TrainerConfig) -> Path | None:
    if config.resume_mode == "disable":
        return None
    if config.resume_mode == "auto":
        return _newest_complete(Path(config.default_local_dir).expanduser())
    path = config.resume_from_path
    if not path:
        raise ValueError(
            "trainer.resume_from_path is not set, but trainer.resume_mode=resume_path needs it. "
            "Give the folder global_step_<number> to resume from."
        )
    folder = Path(path).expanduser()
    step_of(folder)
    if not folder.exists():
        raise FileNotFoundError(f"trainer.resume_from_path={path} does not exist. Give an existing global_step_<n>.")
    return folder


def _newest_complete(root: Path) -> Path | None:
    """The step that the tracker file names; where it does not help, the newest one whose save was completed."""
    missing = None
    try:
        if newest := find_latest_ckpt_path(root):
            return Path(newest)
    except FileNotFoundError as error:
        missing = error
    steps = complete_steps(root)
    if not steps and missing is not None:
        raise missing
    if not steps:
        return None
    folder = step_folder(root, max(steps))
    print(f"{root / TRACKER} names no checkpoint that is there: going on from {folder}, the newest complete one.")
    return folder


def complete_steps(root: Path) -> list[int]:
    """Return the numbers of the steps in ``root`` whose manifest, which is written last, is there."""
    return [step for step in steps_in(root) if (step_folder(root, step) / MANIFEST).exists()]


def not_loaded(name: str, load_contents: list[str], has_adapter: bool = False) -> str:
    """Return a remark on the parts of the checkpoint of role ``name`` that are not read; empty if all are.

    Args:
        has_adapter: whether the role trains an adapter, which ``hf_model`` holds merged into the weights below it.

    Raises:
        ValueError: if no weights would be read, or none that fit.
    """
    if "model" not in load_contents and ("hf_model" not in load_contents or has_adapter):
        why = (
            "hf_model holds the adapter merged into the model, from which training cannot go on"
            if "hf_model" in load_contents
            else "the run would go on at the checkpoint's step with the initial weights"
        )
        raise ValueError(
            f"{name}.checkpoint.load_contents={load_contents} leaves out the model: {why}. Add model (a checkpoint has "
            f"it if save_contents had), or start from the beginning with trainer.resume_mode=disable."
        )
    from_export = "" if "model" in load_contents else f"; {name}: weights of huggingface/, in the precision saved there"
    left_out = [part for part in ("optimizer", "extra") if part not in load_contents]
    return from_export + (f"; {name}: {', '.join(left_out)} not loaded, initialized again" if left_out else "")


def save_driver_state(
    folder: Path, position: dict[str, Any], state: dict[str, Any], ahead: tuple[DataProto, dict[str, int]] | None = None
) -> None:
    """Write the loader's ``position`` and the driver's ``state`` (JSON values) into a step's folder.

    ``ahead``: responses that no step has trained on yet, and metadata of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / AHEAD).unlink(missing_ok=True)  # of an earlier run through this step
    if ahead is not None:
        try:
            save_rows(folder / AHEAD, *ahead)
        except ValueError as problem:
            print(f"{folder / AHEAD} is not written: {problem} A run that resumes here generates them again.")
    write_durable(folder / "data.pt", lambda path: torch.save(position, path))
    write_durable(folder / "trainer.json", lambda path: path.write_text(json.dumps(state, indent=1)))


def save_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of the run, secrets masked: ``verl config --diff`` and a resume read them."""
    write_durable(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(mask(options), indent=1)))


def load_driver_state(folder: Path, loader: Any) -> dict[str, Any]:
    """Bring the loader to its saved position; returns the driver's saved state, empty for a foreign checkpoint."""
    data = folder / "data.pt"
    if data.exists():
        with _damage_is_said(data):
            position = torch.load(data, weights_only=True)
        loader.load_state_dict(position)
    else:
        print(f"{data} is missing: the data loader starts from its beginning, so prompts repeat.")
    state = folder / "trainer.json"
    if not state.exists():
        return {}
    with _damage_is_said(state):
        return json.loads(state.read_text())


@contextmanager
def _damage_is_said(path: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        way_out = way_back(path.parent / "actor")
        raise DamagedCheckpoint(f"{path} cannot be read: it is damaged. {way_out} ({error})") from error


def load_ahead(folder: Path) -> tuple[DataProto, dict[str, int]] | None:
    """Responses that the run had generated for the next step, and metadata of them; None if there are none."""
    return load_rows(folder / AHEAD) if (folder / AHEAD).exists() else None


def write_step_manifest(folder: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of a step: of the driver's files, and of the manifests of the roles."""
    files = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    text = manifest_of(folder, [*files, *folder.glob(f"*/{MANIFEST}")], about)
    write_durable(folder / MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))


def damage_of_step(folder: Path, roles: Container[str]) -> dict[str, str]:
    """File -> what is wrong with it, of the driver's files of a step and of the manifests of ``roles``.

    A step that another program wrote has no manifest, and nothing to compare with.
    """
    try:
        manifest = read_manifest(folder)
    except DamagedCheckpoint:
        return {MANIFEST: "is damaged"}
    if manifest is not None:
        # other roles' folders may have been deleted: trainer.max_critic_ckpt_to_keep
        return damaged_files(folder, manifest, lambda name: "/" not in name or name.split("/")[0] in roles)
    is_ours = any(folder.glob(f"*/{MANIFEST}"))
    return {MANIFEST: "is missing: the save was cut off, or the file was deleted"} if is_ours else {}


def steps_in(root: Path) -> list[int]:
    """Return the numbers of the steps that have a folder in ``root``."""
    names = (path.name.removeprefix("global_step_") for path in root.glob("global_step_*") if path.is_dir())
    return [int(name) for name in names if name.isdigit()]


def _can_verify(group: Any) -> bool:
    return hasattr(group, "verify_checkpoint")  # workers of a user's own may lack it


def mark_complete(root: str | Path, step: int) -> None:
    """Name ``step`` as the newest complete checkpoint."""
    write_durable(Path(root).expanduser() / TRACKER, lambda path: path.write_text(str(step)))


def drop_emptied(root: str | Path, steps: list[int]) -> list[int]:
    """Delete the folders of ``steps`` that hold no role's checkpoint any more; returns the steps that do."""
    left = []
    for step in steps:
        folder = step_folder(root, step)
        if folder.exists() and any(child.is_dir() for child in folder.iterdir()):
            left.append(step)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return left


def write_durable(target: Path, write: Any) -> None:
    """Write a file of a checkpoint with ``write(path)``: on the disk and whole, or not there.

    Raises:
        OSError: as `full_disk_is_said` says.
    """
    with full_disk_is_said(target):
        fs.write_atomic(target, write, is_durable=True)


# -- The remote store --------------------------------------------------------------------------------------------------


def upload(root: str, folder: Path, step: int) -> None:
    """Copy the complete folder of a step to the store, read it there, and name it the newest.

    Raises:
        OSError: the store failed, or does not hold what was copied; it still names the step before.
    """
    target = _remote_folder(root, step)
    fs.makedirs(root)
    fs.remove(target)  # of an earlier run through this step; the command would copy into it
    fs.copy(str(folder), target)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        there = f"{target}/{path.relative_to(folder).as_posix()}"
        if digest_of(fs.pieces(there)) != digest(path):
            raise OSError(errno.EIO, f"{there} does not hold what was copied there, {path}")
    with tempfile.TemporaryDirectory() as place:
        tracker = Path(place) / TRACKER
        tracker.write_text(str(step))
        fs.copy(str(tracker), f"{root.rstrip('/')}/{TRACKER}")


def forget(root: str, step: int) -> None:
    """Delete the copy of a step from the store."""
    fs.remove(_remote_folder(root, step))


def newest_step(root: str) -> int | None:
    """Return the step whose copy was completed last; None if there is none.

    Raises:
        ValueError: the tracker file holds no step number.
    """
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


def _download(source: str, local_root: str, step: int) -> Path:
    """The folder of a step of the store, copied whole into ``local_root`` unless it is there."""
    folder = step_folder(local_root, step).absolute()
    # an earlier start of this run may have copied it
    if not folder.exists():
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        fs.copy(source, str(partial))
        for part in (partial, *(path.parent for path in partial.glob(f"*/{MANIFEST}"))):
            manifest = read_manifest(part)
            for name, problem in damaged_files(part, manifest).items() if manifest else ():
                raise DamagedCheckpoint(
                    f"{source}: the copy of {(part / name).relative_to(partial)} {problem}. Start again if the "
                    f"connection may be at fault, or name an older step of the store: "
                    f"trainer.resume_mode=resume_path trainer.resume_from_path=.../global_step_<n>"
                )
        partial.rename(folder)  # under its name only when it is whole
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
        about: what the manifest of a step says of its run besides: JSON values.
    """

    def __init__(self, config: Any, say: Callable[[str], None], timed: Callable[[str], AbstractContextManager]) -> None:
        self.config, self.say, self.timed = config, say, timed
        self.last: Path | None = None
        self.steps: list[int] = []
        self.unfinished: int | None = None
        self.about: dict[str, Any] = {"versions": versions()}
        self._compared: Path | None = None

    def folder(self, step: int) -> Path:
        return step_folder(self.config.trainer.default_local_dir, step).absolute()

    def begin(self, step: int, groups: Mapping[str, Any]) -> Path:
        """Write the models and optimizers of a step; the returned folder is complete after `finish`."""
        folder = self.folder(step)
        for name, group in groups.items():
            group.save_checkpoint(str(folder / name), None, step)
        self.steps = [saved for saved in self.steps if saved != step] + [step]
        return folder

    def in_background(self, groups: Mapping[str, Any]) -> list[Any]:
        """Worker groups that write their checkpoint while training goes on."""
        roles = self.config.saved_roles
        return [group for name, group in groups.items() if roles[name].checkpoint.async_save]

    def finish(self, groups: Mapping[str, Any], wait: bool = True) -> None:
        """Mark the last saved step complete when it is; raises if it could not be written.

        Args:
            wait: False to leave a save alone that is still being written.
        """
        step, savers = self.unfinished, self.in_background(groups)
        if step is None or not wait and any(flag for group in savers for flag in group.is_saving()):
            return
        # before anything can raise: a save that failed is not waited for, or marked complete, later
        self.unfinished = None
        for group in savers:
            group.finish_saving()
        folder = self.folder(step)
        write_step_manifest(folder, {"step": step, **self.about})
        mark_complete(folder.parent, step)
        self.last = folder
        before = self.steps
        # only now that a newer one is complete: a run killed at any moment can resume
        for name, group in groups.items():
            keep = self.config.saved_roles[name].keep
            old = [str(self.folder(saved) / name) for saved in before[:-keep]] if keep else []
            if old:
                group.delete_checkpoints(old)
        self.steps = drop_emptied(folder.parent, before)
        root = self.config.trainer.default_hdfs_dir
        if not root:
            return
        try:
            with self.timed("upload_checkpoint"):
                upload(root, folder, step)
                for saved in before:
                    if saved not in self.steps:
                        forget(root, saved)
        except OSError as error:  # a store that fails does not end the run
            self.say(f"{folder} could not be copied to trainer.default_hdfs_dir={root}: {error}")

    def describe_run(self, options: PPOConfig, dataset: Any) -> None:
        """Note for manifests what the run learns from, and look at the checkpoint it would go on from.

        Args:
            dataset: of training.

        Raises:
            ConfigError: that was saved by a run that learned otherwise; see `refuse_changes`.
        """
        trainer = options.trainer
        if "learns_from" in self.about or trainer.resume_mode == "disable" and trainer.save_freq <= 0:
            return
        self.about["options"] = fingerprint(options.to_dict())
        self.about["learns_from"] = run_identity(options, dataset)
        folder = _local_folder_to_resume(trainer)
        if folder is not None and not damage_of_step(folder, ()):
            self.compare(folder.absolute(), options)

    def compare(self, folder: Path, options: PPOConfig) -> None:
        """Say what differs from the run that saved ``folder``, once.

        Raises:
            ConfigError: something that changes learning, without ``trainer.resume_allow_changes``.
        """
        if folder == self._compared:
            return
        self._compared = folder
        found = changes(folder, options, self.about.get("learns_from", {}))
        if not (options.trainer.resume_allow_changes or options.trainer.val_only):
            refuse_changes(folder, found)
        if found:
            self.say(f"{folder}: {describe_changes(found)}")

    def good_one(self, folder: Path, groups: Mapping[str, Any]) -> Path:
        """Return ``folder`` if nothing of it is damaged; else, with ``resume_mode=auto``, the newest older one.

        Says what was wrong with those that were passed over.

        Raises:
            DamagedCheckpoint: none can be used, or the named one cannot.
        """
        wrong: dict[Path, str] = {}
        later = [step for step in complete_steps(folder.parent) if step > step_of(folder)]
        if later and self.config.trainer.resume_mode == "auto":
            self.say(
                f"{folder.parent / TRACKER} names step {step_of(folder)}: later ones are not read, {sorted(later)}"
            )
        for candidate in self._candidates(folder):
            damage = damage_of_step(candidate, groups)
            for name, group in groups.items() if not damage else ():
                for found, unread in group.verify_checkpoint(str(candidate / name)) if _can_verify(group) else ():
                    damage |= {f"{name}/{file}": problem for file, problem in found.items()}
                    for file, problem in unread.items():
                        self.say(f"{candidate / name / file} {problem}. Nothing of it is needed to go on.")
            if not damage:
                if wrong:
                    self.say(f"resuming from {candidate}, the newest checkpoint that is whole")
                return candidate
            file, problem = next(iter(damage.items()))
            more = f" (and {len(damage) - 1} more files)" if len(damage) > 1 else ""
            wrong[candidate] = f"{candidate / file} {problem}{more}"
            self.say(f"{wrong[candidate]}: {candidate.name} is not loaded")
        text = "; ".join(wrong.values())
        raise DamagedCheckpoint(f"{text}. Nothing was loaded. {way_back(folder / next(iter(groups), 'actor'))}")

    def _candidates(self, folder: Path) -> Iterator[Path]:
        yield folder
        if self.config.trainer.resume_mode == "auto":
            older = [step for step in steps_in(folder.parent) if step < step_of(folder)]
            yield from (step_folder(folder.parent, step) for step in sorted(older, reverse=True))

    def load_groups(self, folder: Path, groups: Mapping[str, Any]) -> list[str]:
        """Load a checkpoint into the worker groups; returns remarks for the user."""
        # all of them before the first is loaded: loading takes minutes
        roles = self.config.saved_roles
        remarks = [not_loaded(name, roles[name].checkpoint.load_contents, roles[name].has_adapter) for name in groups]
        for name, group in groups.items():
            notes = dict.fromkeys(filter(None, group.load_checkpoint(str(folder / name))))
            remarks += [f"; {name}: {remark}" for remark in notes]
        return remarks

    def loaded(self, folder: Path, steps: list[int], groups: Mapping[str, Any]) -> None:
        """Note that all of a checkpoint has been read; with ``trainer.del_local_ckpt_after_load`` it is deleted.

        Args:
            steps: those its run had saved; they count as this run's if it writes into the same folder.
        """
        # those of another run's folder are not this one's to delete
        if folder.parent.resolve() == self.folder(0).parent.resolve():
            self.steps = list(steps)
        self.last = folder
        if self.config.trainer.del_local_ckpt_after_load:
            for name, group in groups.items():
                group.delete_checkpoints([str(folder / name)])
            drop_emptied(folder.parent, [step_of(folder)])
            self.last = None
