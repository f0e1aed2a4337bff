"""The folder of a run (``trainer.default_local_dir``) from its first second, and the commands that start it again.

Knows configurations and command lines; neither torch nor a trainer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config.base import ConfigError
from verl.config.load import check
from verl.config.model_info import read_model
from verl.config.ppo import SHARES_BY_DEFAULT, PPOConfig
from verl.config.trainer import TrainerConfig
from verl.config.tree import build
from verl.telemetry.run_record import LOCK, RunRecord, mask_text, open_record, recorded
from verl.utils.config import typed_config
from verl.utils.process import explanation

_PLACES = (
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.log_dir",
    "trainer.tracker_kwargs",
    "ray_init.timeline_json_file",
    "actor_rollout_ref.rollout.trace.dir",
    "actor_rollout_ref.rollout.skip_dump_dir",
)
"""Options that name what a run writes."""

RUN_VARIABLE = "VERL_RUN_FOLDER"
"""Environment variable of all processes of a run: its folder. ``verl clean`` knows them by it."""

logger = logging.getLogger(__name__)


@contextmanager
def recorded_run(config: Any, command_line: Sequence[str] | None) -> Iterator[RunRecord | None]:
    """Own the folder of a run of ``config``, and keep its record there, while the block runs.

    See `verl.telemetry.run_record.recorded`.

    Raises:
        ConfigError: another run has the folder, or checkpoints could not be written there.
    """
    config = typed_config(config)
    folder = _lock(config.trainer)
    os.environ[RUN_VARIABLE] = str(Path(config.trainer.default_local_dir).expanduser().absolute())
    try:
        with recorded(config.trainer.default_local_dir, command_line, config.to_dict(), explanation) as record:
            yield record
    finally:
        os.environ.pop(RUN_VARIABLE, None)
        _unlock(folder)


def open_run_record(config: Any) -> RunRecord | None:
    """The record of a run whose trainer a script of the user's drives; None where there is one.

    The folder is its own until the process ends.
    """
    config = typed_config(config)
    if _lock(config.trainer) is None:
        logger.debug("the folder %s is not locked", config.trainer.default_local_dir)
    return open_record(config.trainer.default_local_dir, None, config.to_dict(), is_scoped=False)


# -- One run in a folder -----------------------------------------------------------------------------------------------

_held: dict[Path, tuple[int, int]] = {}
"""Folder -> descriptor of its locked file, and how many blocks need it. A forked child counts as its parent."""

_NOT_LOCKED = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
"""Answers of disks that cannot lock."""


def _lock(trainer: TrainerConfig) -> Path | None:
    """Make the folder of a run this process's own; two runs would replace each other's checkpoints.

    Returns:
        What `_unlock` takes; None where nothing is locked: a run that only validates, a remote folder, a disk without
        locks.
    """
    if trainer.val_only or "://" in trainer.default_local_dir:
        return None
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    if folder in _held:
        handle, count = _held[folder]
        _held[folder] = handle, count + 1
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if trainer.save_freq <= 0:  # nothing is needed there; that no record is kept is said elsewhere
            return None
        raise ConfigError(
            [
                f"trainer.default_local_dir={trainer.default_local_dir} cannot be written ({error.strerror}), and "
                f"trainer.save_freq={trainer.save_freq} saves checkpoints there. Name a folder that can be written."
            ]
        ) from error
    try:
        # a lock of the process, which no forked worker inherits: it ends with the driver, however that ends
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 1 << 16).decode(errors="replace")
        os.close(handle)
        if error.errno in _NOT_LOCKED:
            logger.warning("%s has no locks (%s): let no second run write to it.", folder, error.strerror)
            return None
        raise ConfigError([f"trainer.default_local_dir={trainer.default_local_dir} {_in_use(owner)}"]) from None
    command = " ".join(map(mask_text, sys.orig_argv))
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": started, "command": command})
    os.ftruncate(handle, 0)
    os.write(handle, owner.encode())
    _held[folder] = handle, 1
    return folder


def _in_use(owner: str) -> str:
    try:
        found = json.loads(owner)
        who = f"process {found['pid']} on {found['host']} since {found['started']}, {found['command']}"
    except (ValueError, KeyError, TypeError):  # it is about to write its name
        who = "one that has just started"
    return (
        f"belongs to a run that has not ended: {who}. Two runs in one folder replace each other's checkpoints: wait "
        f"for that one, end it, or name another folder."
    )


def _unlock(folder: Path | None) -> None:
    if folder is None or folder not in _held:
        return
    handle, count = _held[folder]
    if count > 1:
        _held[folder] = handle, count - 1
        return
    del _held[folder]
    os.ftruncate(handle, 0)
    os.close(handle)


# -- Commands that start a run again -----------------------------------------------------------------------------------


def words_of_config(config: Any) -> list[str]:
    """Return the arguments of ``main_ppo`` that start the run of a configuration made in Python."""
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    return ["--config-path", str(folder), "--config-name", "config"]


def gpu_options(config: PPOConfig) -> list[str]:
    """Options that make a run of ``config`` the same run on a GPU, to stand behind its command line.

    The device changes, and every place the run writes to: in the old folder it would go on from the old checkpoint.
    Rows that a CPU packs by default stay packed.

    Raises:
        ConfigError: such a run is refused; says why.
    """
    tree = config.to_dict()
    tree["trainer"]["device"] = "cuda"
    is_packed = _is_packed_by_default(config)
    if is_packed:
        tree["actor_rollout_ref"]["actor"]["use_remove_padding"] = True
    check(build(type(config)(), tree, "", []))  # what the tree holds was typed before: nothing new can be wrong with it
    old = config.trainer.default_local_dir.rstrip("/")
    moved = {key: f"{old}-gpu{value[len(old) :]}" for key, value in _written(tree) if value.startswith(f"{old}/")}
    new = {"trainer.device": "cuda", "trainer.default_local_dir": f"{old}-gpu", **moved}
    # the actor's key: in a configuration that was recorded it follows the model's no more
    packed = ["actor_rollout_ref.actor.use_remove_padding=true"] if is_packed else []
    return [*(f"{key}={value}" for key, value in new.items()), *packed]


def _is_packed_by_default(config: PPOConfig) -> bool:
    """Whether the rows of a run on a CPU are packed to share prompts, though no option says so."""
    shared = config.actor_rollout_ref
    if shared.actor.use_remove_padding or not config.shares_prompts_by_default:
        return False
    model = read_model(shared.model.path, shared.model.override_config)
    return model is not None and not model.is_multimodal and model.model_type in SHARES_BY_DEFAULT


def _written(tree: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key in _PLACES:
        value: Any = tree
        for name in key.split("."):
            value = value[name]
        yield from _texts(key, value)


def _texts(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(f"{key}.{name}", item)
    elif isinstance(value, str):
        yield key, value
