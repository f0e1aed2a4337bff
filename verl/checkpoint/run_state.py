"""State of a run on disk: the folder of a step's checkpoint, the driver's own part of it, and the one to resume from.

The folder of a step holds ``actor/`` and ``critic/`` (written by the workers), ``data.pt`` (the loader's position),
``trainer.json`` (the driver's state), ``config.json`` (the options of the run), and ``ahead.safetensors`` (responses
generated ahead, in a run that does).
``latest_checkpointed_iteration.txt`` names the newest complete step and is written last, so a run killed while saving
resumes from the one before.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint import checkpoint_manager
from verl.checkpoint.checkpoint_manager import TRACKER
from verl.checkpoint.rank_files import way_back
from verl.checkpoint.rows_file import load_rows, save_rows
from verl.config.describe import CONFIG_FILE
from verl.protocol import DataProto

AHEAD = "ahead.safetensors"


def step_folder(root: str | Path, step: int) -> Path:
    return Path(root).expanduser() / f"global_step_{step}"


def step_of(folder: str | Path) -> int:
    """The step number in a checkpoint folder's name."""
    match = re.fullmatch(r"global_step_(\d+)", Path(folder).name)
    if not match:
        raise ValueError(
            f"trainer.resume_from_path={folder} is not a step's folder: its name must be global_step_<number>. "
            f"Give the folder that holds actor/ and data.pt, for example .../global_step_100."
        )
    return int(match.group(1))


def find_latest_ckpt_path(root: str | Path) -> Path | None:
    """The folder of the newest complete checkpoint under ``root``, or None when there is none."""
    folder = checkpoint_manager.find_latest_ckpt_path(root)
    return None if folder is None else Path(folder)


def folder_to_resume(config: Any) -> Path | None:
    """The checkpoint ``trainer.resume_mode`` asks for; None to start from the beginning."""
    if config.resume_mode == "disable":
        return None
    if config.resume_mode == "auto":
        return find_latest_ckpt_path(config.default_local_dir)
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
    write_atomic(folder / "data.pt", lambda path: torch.save(position, path))
    write_atomic(folder / "trainer.json", lambda path: path.write_text(json.dumps(state, indent=1)))


def save_options(folder: Path, options: dict[str, Any]) -> None:
    """Write the options of the run into a step's folder, for ``verl config --diff``; nothing reads them on resume."""
    write_atomic(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(options, indent=1, default=str)))


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
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        way_out = way_back(path.parent / "actor")
        raise ValueError(f"{path} cannot be read: it is damaged. {way_out} ({error})") from error


def load_ahead(folder: Path) -> tuple[DataProto, dict[str, int]] | None:
    """Responses that the run had generated for the next step, and metadata of them; None if there are none."""
    return load_rows(folder / AHEAD) if (folder / AHEAD).exists() else None


def mark_complete(root: str | Path, step: int) -> None:
    """Name ``step`` as the newest complete checkpoint."""
    write_atomic(Path(root).expanduser() / TRACKER, lambda path: path.write_text(str(step)))


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


def write_atomic(target: Path, write: Any) -> None:
    """Let ``write(path)`` fill a file next to ``target`` and put it in place whole."""
    part = target.with_name(target.name + ".part")
    write(part)
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
