"""Files a configuration names: that a run would find them, and could write its own, before anything heavy starts."""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path

from verl.config.base import Problem, get_path
from verl.config.model_checks import model_problems
from verl.config.ppo import PPOConfig
from verl.utils.import_utils import split_file_name

_WRITTEN = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
_PYTHON_FILES = (
    "custom_reward_function.path",
    "data.custom_cls.path",
    "data.sampler.class_path",
    "data.datagen.path",
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

    Remote paths and hub ids are not looked at.
    """
    return [
        *_data_files(config),
        *_python_files(config),
        *_models(config),
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
                    yield Problem(key, f"{key}={path}: no file fits (looked from {Path.cwd()}). Correct the pattern.")
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


def _models(config: PPOConfig) -> Iterator[Problem]:
    keys = ["actor_rollout_ref.model.path"]
    if config.uses_critic:
        keys.append("critic.model.path")
    if config.uses_reference and config.actor_rollout_ref.ref.model is not None:
        keys.append("actor_rollout_ref.ref.model.path")
    if config.reward_model.enable:
        keys.append("reward_model.model.path")
    if config.rewrites_for_reward_model:
        keys.append("reward_model.model.input_tokenizer")
    for key in keys:
        path = get_path(config, key)
        if path and path[0] in "/~." and not _exists(path):
            yield Problem(key, f"{key}={path} does not exist. Give a folder in Hugging Face format or a hub id.")


def _checkpoint(config: PPOConfig) -> Iterator[Problem]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path and not _is_remote(path) and not _exists(path):
        yield Problem(
            "trainer.resume_from_path",
            f"trainer.resume_from_path={path} does not exist. Give the folder of a checkpoint, .../global_step_N.",
        )


def _written_folders(config: PPOConfig) -> Iterator[Problem]:
    for key in _WRITTEN:
        path = get_path(config, key)
        if not path or _is_remote(path):
            continue
        folder = Path(path).expanduser().absolute()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not there.is_dir():
            yield Problem(key, f"{key}={path} cannot be a folder: {there} is a file. Name another place.")
        elif not os.access(there, os.W_OK | os.X_OK):
            yield Problem(key, f"{key}={path} cannot be written: no permission in {there}. Name a folder of your own.")
