"""What a run needs of this machine and its network: room on disks, services, packages, functions in files."""

import ast
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl.config.base import Problem, did_you_mean, get_path, leaves
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, ROLLOUT
from verl.doctor.report import shown_bytes
from verl.utils.import_utils import is_package_available, split_file_name

_CONNECT_S = 1.0
_LOGGER_PACKAGES = {
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
}


def missing_services(config: PPOConfig) -> Iterator[Problem]:
    """Addresses the configuration names that nobody answers at."""
    asked: dict[tuple[str, int], bool] = {}
    for key, url in _urls(config):
        parts = urlsplit(url)
        try:
            place = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        except ValueError:
            yield Problem(key, f"{key}={url} is no address: its port is no number. Write http://HOST:PORT.")
            continue
        if place not in asked:
            asked[place] = _answers(*place)
        if not asked[place]:
            yield Problem(
                key,
                f"{key}={url} cannot be reached: nobody answers at {place[0]} port {place[1]} within {_CONNECT_S:g} s. "
                "Start the service, or correct the address.",
            )


def _urls(config: PPOConfig) -> Iterator[tuple[str, str]]:
    for key, value in leaves(config):
        yield from _urls_in(key, value)


def _urls_in(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _urls_in(f"{key}.{name}", item)
    elif isinstance(value, str) and value.startswith(("http://", "https://")):
        yield key, value


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S):
            return True
    except (OSError, UnicodeError):
        return False


def missing_packages(config: PPOConfig) -> Iterator[Problem]:
    """Optional packages the configuration asks for that are not installed here."""
    loggers = config.trainer.logger
    for name in [loggers] if isinstance(loggers, str) else loggers:
        package = _LOGGER_PACKAGES.get(name)
        if package and not is_package_available(package):
            yield Problem(
                "trainer.logger",
                f"trainer.logger={name} needs the package {package}, which is not installed. Install it with `pip "
                f"install {package}`, or take {name} out.",
            )
    wanted = {
        f"{ACTOR}.strategy": ("deepspeed", config.actor_rollout_ref.actor.strategy == "deepspeed"),
        f"{ACTOR}.optim.optimizer": ("torchao", config.actor_rollout_ref.actor.optim.optimizer == "AdamW8bit"),
        "critic.optim.optimizer": ("torchao", config.uses_critic and config.critic.optim.optimizer == "AdamW8bit"),
        "actor_rollout_ref.model.use_liger": ("liger_kernel", config.actor_rollout_ref.model.use_liger),
    }
    for key, (package, is_wanted) in wanted.items():
        if is_wanted and not is_package_available(package):
            extra = package.partition("_")[0]
            yield Problem(
                key,
                f"{key}={get_path(config, key)} needs the package {package}, which is not installed. Install it with "
                f"`pip install 'verl[{extra}]'`, or choose another.",
            )


def engine_elsewhere(config: PPOConfig) -> Iterator[Problem]:
    """A rollout engine that is not installed here: the workers may have it."""
    name = config.actor_rollout_ref.rollout.name
    if name in ("vllm", "sglang") and not is_package_available(name) and not _is_installed(f"{name}-cpu"):
        yield Problem(
            f"{ROLLOUT}.name",
            f"{ROLLOUT}.name={name} is not installed on this machine: the workers must have it. Install it with "
            f"bash scripts/install_engines.sh {name}, or set {ROLLOUT}.name=hf.",
        )


def _is_installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def room_for_checkpoints(config: PPOConfig, size: int | None) -> Iterator[tuple[str, Problem]]:
    """(level, problem) where checkpoints of ``size`` bytes each do not fit where they would be written."""
    trainer = config.trainer
    if size is None or trainer.save_freq <= 0 or "://" in trainer.default_local_dir:
        return
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    there = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if there is None:
        return
    free, kept = shutil.disk_usage(there).free, trainer.max_actor_ckpt_to_keep
    at_a_time = 2 if kept is None else kept + 1  # the newest is written before the oldest goes
    key, place = "trainer.default_local_dir", f"trainer.default_local_dir={trainer.default_local_dir}"
    if size > free:
        text = (
            f"{place} has room for {shown_bytes(free)}, and one checkpoint takes about {shown_bytes(size)}. Name a "
            "larger place"
        )
        yield (
            "error",
            Problem(
                key, f"{text}, or leave the optimizer out of {ACTOR}.checkpoint.save_contents.", ("trainer.save_freq",)
            ),
        )
    elif size * at_a_time > free:
        text = (
            f"{place} has room for {shown_bytes(free)}, and {at_a_time} checkpoints take about "
            f"{shown_bytes(size * at_a_time)}"
        )
        yield (
            "warning",
            Problem(
                key,
                f"{text} (trainer.max_actor_ckpt_to_keep). Keep fewer, or name a larger place.",
                ("trainer.max_actor_ckpt_to_keep",),
            ),
        )


def names_in_files(config: PPOConfig) -> Iterator[Problem]:
    """Functions and classes that the Python files the configuration names do not define."""
    asked = [
        ("data.custom_cls.path", "data.custom_cls.name", config.data.custom_cls.name),
        ("data.sampler.class_path", "data.sampler.class_name", config.data.sampler.class_name),
    ]
    for path_key, key, name in asked:
        path = get_path(config, path_key)
        if path and name:
            yield from _missing_name(key, f"{key}={name}", path, name)
    for key in ("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"):
        found = split_file_name(get_path(config, key))
        if found:
            yield from _missing_name(key, f"{key}={get_path(config, key)}", *found)


def _missing_name(key: str, shown: str, path: str, name: str) -> Iterator[Problem]:
    file = Path(path).expanduser()
    if not file.is_file():
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        yield Problem(key, f"{shown} cannot be loaded: {path} is no Python ({error}). Correct it.")
        return
    defined, is_open = _defined(tree.body)
    if name not in defined and not is_open:
        hint = did_you_mean(name, sorted(defined)).rstrip("?")
        yield Problem(key, f"{shown} is not defined in {path}{hint}. Define it there, or give the name of what is.")


def _defined(body: list[ast.stmt]) -> tuple[set[str], bool]:
    """Names that statements bind, and whether they may bind others that cannot be seen."""
    names: set[str] = set()
    is_open = False
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            is_open |= any(alias.name == "*" for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        else:
            is_open |= not isinstance(node, ast.Pass)
    return names, is_open


def unreachable_models(config: PPOConfig) -> Iterator[Problem]:
    """Hub ids that were not downloaded, where the hub may not be asked."""
    from verl.config.model_facts import find_folder

    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("1", "true", "yes", "on"):
        return
    keys = ["actor_rollout_ref.model.path", *["critic.model.path"] * config.uses_critic]
    for key in [*keys, *["reward_model.model.path"] * config.reward_model.enable]:
        path = get_path(config, key)
        if path and "://" not in path and path[0] not in "/~." and find_folder(path) is None:
            yield Problem(
                key,
                f"{key}={path} is neither a folder nor a downloaded model of the hub, and HF_HUB_OFFLINE is set. "
                "Name a folder, or download it first (`hf download`).",
            )
