"""Files a configuration names: that a run would find them, and could write its own, before anything heavy starts."""

import glob
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verl.config.base import Problem, get_path
from verl.config.model_info import model_problems
from verl.config.ppo import PPOConfig
from verl.utils.import_utils import split_file_name

_WRITTEN = (
    "trainer.default_local_dir",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.log_dir",
)
_PYTHON_FILES = (
    "custom_reward_function.path",
    "data.custom_cls.path",
    "data.sampler.class_path",
    "data.datagen.path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
)
_DATA_ENDINGS = (".parquet", ".arrow", ".json", ".jsonl", ".csv")
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?(:[\w.-]+(\[[^\]]*\])?)?")
"""A data set of the Hugging Face hub; whether it can be had is seen when it is loaded."""
_FUNCTIONS_IN_FILES = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "reward_model.reward_manager",
)


def missing_files(config: PPOConfig) -> list[Problem]:
    """One problem per file or folder that is not there or cannot be, and per model that does not fit the settings.

    Remote paths and hub ids are not looked at; whether a model is there is the matter of ``verl.preflight.models``.
    """
    return [
        *_data_files(config),
        *_python_files(config),
        *model_problems(config),
        *_checkpoint(config),
        *_written_folders(config),
    ]


def _is_remote(path: str) -> bool:
    return "://" in path


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _data_files(config: PPOConfig) -> Iterator[Problem]:
    if config.data.custom_cls.path is not None:
        return  # what the files are is that class's affair
    for key, files in config.data.files.items():
        for path in map(str, files):
            if _is_remote(path) or _exists(path) or _HUB_NAME.fullmatch(path) and not path.endswith(_DATA_ENDINGS):
                continue
            if glob.has_magic(path):
                if not glob.glob(os.path.expanduser(path), recursive=True):
                    yield Problem(
                        key, f"{key}={path}: no file matches (looked from {Path.cwd()}). Correct the pattern."
                    )
                continue
            yield Problem(
                key,
                f"{key}={path} does not exist. Give a file ({', '.join(_DATA_ENDINGS)}), a glob or a folder; "
                "examples/data_preprocess makes them.",
            )


def _python_files(config: PPOConfig) -> Iterator[Problem]:
    for key in _PYTHON_FILES:
        path = get_path(config, key)
        if path and not _is_remote(path) and not _exists(path):
            yield Problem(key, f"{key}={path} does not exist (looked in {Path.cwd()}). Give a Python file.")
    for key in _FUNCTIONS_IN_FILES:
        name = get_path(config, key)
        path, _ = split_file_name(name) or (None, None)
        if path and not _is_remote(path) and not _exists(path):
            yield Problem(
                key, f"{key}={name} does not exist: no {path} in {Path.cwd()}. Give a Python file and a function in it."
            )


def _checkpoint(config: PPOConfig) -> Iterator[Problem]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path and not _is_remote(path) and not _exists(path):
        yield Problem(
            "trainer.resume_from_path",
            f"trainer.resume_from_path={path} does not exist. Give the folder of a checkpoint, .../global_step_N.",
        )


def _written_folders(config: PPOConfig) -> Iterator[Problem]:
    found = [(key, f"{key}={get_path(config, key)}", get_path(config, key)) for key in _WRITTEN]
    loggers = [config.trainer.logger] if isinstance(config.trainer.logger, str) else config.trainer.logger
    if "tensorboard" in loggers:
        options = (config.trainer.tracker_kwargs or {}).get("tensorboard") or {}
        named, from_environment = options.get("log_dir"), os.environ.get("TENSORBOARD_DIR")
        folder = (
            named
            or from_environment
            or f"tensorboard_log/{config.trainer.project_name}/{config.trainer.experiment_name}"
        )
        whence = "" if named else "TENSORBOARD_DIR=" if from_environment else "its folder "
        key = "trainer.tracker_kwargs.tensorboard.log_dir" if named else "trainer.logger"
        found.append((key, f"{key}={folder}" if named else f"{key}=tensorboard: {whence}{folder}", folder))
    for key, shown, path in found:
        if not path or _is_remote(path):
            continue
        folder = Path(path).expanduser().absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            yield Problem(key, f"{shown} cannot be a folder: {there} is a file. Name another place.")
        elif not os.access(there, os.W_OK | os.X_OK):
            yield Problem(key, f"{shown} cannot be written: no permission in {there}. Name a folder of your own.")
        elif why := _why_unwritable(there):
            yield Problem(key, f"{shown} cannot be written: {there} takes no files ({why}). Name another place.")


def _why_unwritable(folder: Path) -> str | None:
    """What the system says to a folder made there; permissions alone do not tell of full and of special disks."""
    try:
        with tempfile.TemporaryDirectory(prefix=".verl-", dir=folder):
            return None
    except OSError as error:
        return error.strerror
