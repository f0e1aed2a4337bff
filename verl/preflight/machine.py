"""Checks of this machine and its network: devices, packages, disk space, services, functions in files.

No torch: devices are listed by ``nvidia-smi``.
"""

import ast
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from functools import lru_cache
from glob import glob
from itertools import filterfalse
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from verl.config.base import Problem, did_you_mean, get_path, leaves
from verl.config.checks.base import models, trained_roles
from verl.config.ppo import ACTOR, MODEL, ROLLOUT, PPOConfig
from verl.preflight.environments import environment_files
from verl.preflight.report import Finding, format_bytes
from verl.sandbox.containment import PROMISES, VARIABLE, containment, landlock_version
from verl.utils.distribution import install_command
from verl.utils.import_utils import is_package_available, split_file_name

_CONNECT_S = 1.0
_PROGRAMS = "Programs that the policy writes (scorers of code, the environment Code, PythonTool)"
_MEGATRON = ("megatron.core", "mbridge")
"""Packages of ``strategy=megatron``."""
_LOGGER_PACKAGES = ("wandb", "tensorboard", "mlflow", "swanlab", "clearml")
"""Loggers of the same name as the package they need."""


def containment_here(is_allowed: bool) -> Finding:
    """What contains generated programs on this machine, tried; ``is_allowed``: to run them without."""
    missing, version = containment(), landlock_version()
    means = f"Landlock {version} and seccomp" if version >= 1 else "no Landlock"
    if not missing:
        return Finding("note", f"{_PROGRAMS} are contained on this machine: {'; '.join(PROMISES.values())} ({means}).")
    lacking = "; ".join(PROMISES[name] for name in missing)
    fate = "They run all the same, as allowed" if is_allowed else "They are refused"
    return Finding(
        "note",
        f"{_PROGRAMS} are not contained on this machine ({means}), which cannot promise that {lacking}. {fate}: "
        "reward_model.sandbox.allow_uncontained_code decides for scorers, "
        f"{VARIABLE} for the rest.",
    )


def missing_services(config: PPOConfig) -> Iterator[Problem]:
    """Find services of the configuration that do not answer."""
    waiting: list[tuple[str, Any]] = list(leaves(config))
    answers: dict[tuple[str, int], bool] = {}  # one service may stand behind several options
    for key, value in waiting:
        if isinstance(value, Mapping):  # free-form options may hold addresses, too
            waiting += [(f"{key}.{name}", item) for name, item in value.items()]
        if isinstance(value, list | tuple):
            waiting += [(key, item) for item in value]
        if not isinstance(value, str) or not value.startswith(("http://", "https://")):
            continue
        parts = urlsplit(value)
        try:
            address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            yield Problem(key, f"{key}={value} is not an address: its port is not a number. Write http://HOST:PORT.")
            continue
        if address not in answers:
            answers[address] = _answers(address)
        if not answers[address]:
            yield Problem(
                key,
                f"{key}={value} cannot be reached: no service answers at {address[0]} port {address[1]} within "
                f"{_CONNECT_S:g} s. Start the service, or correct the address.",
            )


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except (OSError, UnicodeError):  # UnicodeError: a name that is no host name
        return False
    return True


class Machine(NamedTuple):
    """The machine that a run is checked for."""

    gpu_bytes: int | None = None
    """Memory of one GPU; None: unknown, and not compared."""
    gpus: int | None = None
    """GPUs instead of ``trainer.n_gpus_per_node``."""
    is_this: bool = True
    """False: the devices and packages of this machine are not checked."""
    is_gpu_given: bool = False
    """Whether the user gave ``gpu_bytes``, so that exceeding it is an error."""


def runs_here(config: PPOConfig, machine: Machine) -> bool:
    """Whether the workers would run on this machine, so that its devices and packages matter."""
    trainer = config.trainer
    # with Ray the driver may run where no worker does
    is_cluster = trainer.nnodes > 1 or trainer.controller == "ray" and "RAY_ADDRESS" in os.environ
    return machine.is_this and not is_cluster


def missing_devices(config: PPOConfig, machine: Machine) -> Iterator[Problem]:
    """Find devices that the configuration needs and this machine does not have."""
    trainer, beside = config.trainer, config.processes_beside
    count = cuda_devices() if trainer.device == "cuda" and runs_here(config, machine) else None
    if count is None:
        return
    key, here, rule = "trainer.n_gpus_per_node", trainer.n_gpus_per_node, ""
    if count == 0:
        key, rule = (
            "trainer.device",
            "=cuda, and this machine has no CUDA device. Pass trainer.device=cpu to run here, or check the driver with "
            "`nvidia-smi`, and CUDA_VISIBLE_DEVICES",
        )
    elif here > count:
        rule = f"={here}, and this machine has {count} CUDA devices. Lower it to that number"
    elif here + sum(beside.values()) > count:
        others = " and ".join(f"the {number} of the {name}" for name, number in beside.items())
        rule = (
            f"={here} and {others} (nnodes x n_gpus_per_node of {ROLLOUT} or distillation) are more than the {count} "
            "CUDA devices of this machine. Lower one of them, or share devices with "
            "actor_rollout_ref.hybrid_engine=true and distillation.nnodes=0"
        )
    if rule:
        yield Problem(key, f"{key}{rule}; to check a run on another machine, add --elsewhere.")


@lru_cache(maxsize=1)
def _gpus() -> list[int] | None:
    """Return the bytes of each GPU the driver lists, or None if that cannot be determined."""
    # torch.cuda would create a context, and importing torch takes seconds
    tool = shutil.which("nvidia-smi")
    if tool is None:
        # other vendors' devices are not counted
        may_be = glob("/dev/nvidia[0-9]*") or any(map(os.path.exists, ("/dev/kfd", "/dev/dxg", "/dev/nvhost-gpu")))
        return None if may_be else []
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        sizes = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [int(size) << 20 if size.isdigit() else 0 for size in sizes]


def cuda_devices() -> int | None:
    """Return the number of CUDA devices this process may use, or None if that cannot be determined."""
    gpus, visible = _gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or gpus is None:
        return None if gpus is None else len(gpus)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    # slices of a GPU are not listed by the query
    if any(name.startswith("MIG") for name in names):
        return len(names)
    # CUDA ignores all devices from the first invalid one on
    good = next((i for i, name in enumerate(names) if name.isdigit() and int(name) >= len(gpus) or name == "-1"), None)
    return min(len(names if good is None else names[:good]), len(gpus))


def gpu_memory_here() -> int | None:
    """Return the bytes of this machine's first GPU, or None without one."""
    return (_gpus() or [None])[0] or None if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else None


def _missing_compiler(config: PPOConfig) -> Iterator[Problem]:
    """What torch.compile lacks here."""
    from verl.models.compilation import check_compiler

    key = f"{MODEL}.compile_layers"
    try:
        check_compiler(f"{key}=true", config.trainer.device, "set it to false")
    except RuntimeError as error:
        yield Problem(key, str(error))


def missing_packages(config: PPOConfig, machine: Machine) -> Iterator[Problem]:
    """Find optional packages that the configuration needs and that are not installed here."""
    loggers, shared = config.trainer.logger, config.actor_rollout_ref
    required = [
        ("trainer.logger", name, name, f"pip install {name}", f"remove {name}")
        for name in ([loggers] if isinstance(loggers, str) else loggers)
        if name in _LOGGER_PACKAGES
    ]
    key, backend = f"{ROLLOUT}.trace.backend", shared.rollout.trace.backend
    if backend in ("weave", "mlflow"):
        required.append((key, backend, backend, f"pip install {backend}", f"use {key}=file, which needs nothing"))
    if runs_here(config, machine):
        packages = {
            f"{key}.strategy": "deepspeed" for key, role in models(config).items() if role.strategy == "deepspeed"
        }
        for key, role in models(config).items():
            if role.strategy == "megatron":
                packages[f"{key}.strategy"] = next(filterfalse(is_package_available, _MEGATRON), _MEGATRON[0])
        for key, role, _ in trained_roles(config):
            if role.optim.optimizer == "AdamW8bit":
                packages[f"{key}.optim.optimizer"] = "torchao"
        for key in (MODEL, *(["critic.model"] if config.uses_critic else [])):
            if get_path(config, key).lora_rank:
                packages[f"{key}.lora_rank"] = "peft"
        if shared.model.use_liger:
            packages[f"{MODEL}.use_liger"] = "liger_kernel"
        if shared.model.compile_layers:
            yield from _missing_compiler(config)
        for key, package in packages.items():
            install = install_command("megatron" if package in _MEGATRON else package.partition("_")[0])
            required.append((key, get_path(config, key), package, install, "choose another"))
    for key, value, package, install, instead in required:
        if not is_package_available(package):
            yield Problem(
                key,
                f"{key}={value} needs the package {package}, which is not installed. Install it with `{install}`, or "
                f"{instead}.",
            )
    # engines are installed apart, because their pins of torch differ
    name = shared.rollout.name
    if runs_here(config, machine) and name in ("vllm", "sglang") and not is_package_available(name):
        yield Problem(
            f"{ROLLOUT}.name",
            f"{ROLLOUT}.name={name} is not installed on this machine. Install it with bash scripts/install_engines.sh "
            f"{name}, or set {ROLLOUT}.name=hf; to check a run on another machine, add --elsewhere.",
        )


def room_for_checkpoints(config: PPOConfig, size: int | None) -> Iterator[Finding]:
    """Find checkpoints of ``size`` bytes each that do not fit on their disk."""
    trainer = config.trainer
    if size is None or trainer.save_freq <= 0 or "://" in trainer.default_local_dir:
        return
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), None)
    if existing is None:
        return
    free, kept = shutil.disk_usage(existing).free, trainer.max_actor_ckpt_to_keep
    at_a_time = 2 if kept is None else kept + 1  # the newest is written before the oldest is deleted
    key = "trainer.default_local_dir"
    room = f"{key}={trainer.default_local_dir} has room for {format_bytes(free)}"
    if size > free:
        yield Finding(
            "error",
            f"{room}, and one checkpoint takes about {format_bytes(size)}. Name a folder on a larger disk, or leave "
            f"the optimizer out of {ACTOR}.checkpoint.save_contents.",
            (key, "trainer.save_freq"),
        )
    elif size * at_a_time > free:
        yield Finding(
            "warning",
            f"{room}, and {at_a_time} checkpoints take about {format_bytes(size * at_a_time)} "
            "(trainer.max_actor_ckpt_to_keep). Keep fewer, or name a folder on a larger disk.",
            (key, "trainer.max_actor_ckpt_to_keep"),
        )


def names_in_files(config: PPOConfig) -> Iterator[Problem]:
    """Find functions and classes that the configured Python files do not define."""
    data, named = config.data, []
    for key, path, name in (
        ("data.custom_cls.name", data.custom_cls.path, data.custom_cls.name),
        ("data.sampler.class_name", data.sampler.class_path, data.sampler.class_name),
        ("data.datagen.name", data.datagen.path, data.datagen.name),
    ):
        if path and name:
            named.append((key, path, name))
    for key in ("algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode", "reward_model.reward_manager"):
        if found := split_file_name(get_path(config, key)):
            named.append((key, *found))
    named += environment_files(config)
    for key, path, name in named:
        in_registry = key.startswith("env.registry.")
        value = f"{path}:{name}" if in_registry else get_path(config, key)
        setting, file = f"{key}={value}", Path(path).expanduser()
        if not file.is_file():
            if in_registry:
                yield Problem(key, f"{setting}: there is no file {path} (looked from {os.getcwd()}). Correct the path.")
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            yield Problem(key, f"{setting} cannot be loaded: {path} is not valid Python ({error}). Correct it.")
            continue
        # parsed, not imported: the file is the user's and may do anything
        defined, is_open = _defined(tree.body)
        if name not in defined and not is_open:
            hint = did_you_mean(name, sorted(defined)).rstrip("?")
            yield Problem(key, f"{setting} is not defined in {path}{hint}. Define it there, or correct the name.")


def missing_modules(config: PPOConfig) -> Iterator[Problem]:
    """Find modules that cannot be imported, and chat templates that are neither Jinja nor a file."""
    model = config.actor_rollout_ref.model
    key, template = f"{MODEL}.external_lib", model.custom_chat_template
    for name in filter(None, (part.strip().partition(".")[0] for part in (model.external_lib or "").split(","))):
        if not is_package_available(name):
            yield Problem(
                key,
                f"{key}={model.external_lib} cannot be imported: there is no module {name!r}. Install it, or add its "
                "folder to PYTHONPATH.",
            )
    if template and "{" not in template and not Path(template).expanduser().is_file():
        key = f"{MODEL}.custom_chat_template"
        yield Problem(
            key,
            f"{key}={template!r} is neither a Jinja template, since it has no braces, nor a file (looked from "
            f"{os.getcwd()}). Give one of them.",
        )


def _defined(body: list[ast.stmt]) -> tuple[set[str], bool]:
    """Return the names that statements bind, and whether they may bind further, unknown ones."""
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
        # a docstring
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        else:
            # loops, conditions and calls may bind anything
            is_open |= not isinstance(node, ast.Pass)
    return names, is_open
