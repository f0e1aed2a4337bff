"""Validators of the run around the steps: controller, servers, checkpoints, classes of the user's, files."""

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import verl.config.model_info as model_info  # whole: it imports this package, and may be imported first
from verl.config.base import Problem, get_path
from verl.config.checks.base import IsGiven, contradictions, given_below, problem, trained_roles, unused, validator
from verl.config.ppo import ACTOR, ROLLOUT, PPOConfig
from verl.config.tree import show
from verl.utils.import_utils import split_file_name

_CONTRADICTIONS = {
    "trainer.nnodes>1 with trainer.controller=local": (
        "forked processes stay on one machine. Use trainer.controller=ray."
    ),
    f"{ROLLOUT}.nnodes>1 with trainer.controller=local if actor_rollout_ref.hybrid_engine=false": (
        "forked processes stay on one machine. Use trainer.controller=ray."
    ),
    "distillation.nnodes>1 with trainer.controller=local if distillation.enabled": (
        "forked processes stay on one machine. Use trainer.controller=ray."
    ),
    "trainer.val_only with data.val_files=null|[]|''": "nothing is there to validate. Name validation files.",
    "trainer.default_hdfs_dir with trainer.nnodes>1": (
        "only this machine's part of a checkpoint would be copied. Let trainer.default_local_dir be a folder that all "
        "nodes share."
    ),
}
contradictions(__name__, _CONTRADICTIONS)

PROFILERS = {
    "actor": "actor_rollout_ref.profiler",
    "rollout": f"{ROLLOUT}.profiler",
    "ref": "actor_rollout_ref.ref.profiler",
    "critic": "critic.profiler",
    "reward_model": "reward_model.profiler",
}
"""Role -> the section of its profiler."""


@validator("error")
def server_host_reachable_from_other_nodes(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    is_local = rollout.server_host in ("localhost", "::1") or rollout.server_host.startswith("127.")
    place = "trainer" if config.actor_rollout_ref.hybrid_engine else ROLLOUT
    # of the rollout, which may be on machines of its own
    nodes = len(config.rollout_processes)
    if rollout.mode == "async" and nodes > 1 and is_local:
        text = (
            f"with {place}.nnodes={nodes}: the driver could not reach the rollout servers of other nodes. Use 0.0.0.0; "
            "the servers ask for a key that the driver makes up."
        )
        yield problem(config, f"{ROLLOUT}.server_host", text, f"{place}.nnodes")


@validator("error")
def resume_from_path_is_checkpoint_folder(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in (trainer.resume_from_path or ""):
        text = "with trainer.resume_mode=resume_path: give the folder of one checkpoint, .../global_step_N."
        yield problem(config, "trainer.resume_from_path", text, "trainer.resume_mode")


@validator("error")
def checkpoint_load_contents_are_saved(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        extra = [part for part in role.checkpoint.load_contents if part not in role.checkpoint.save_contents]
        # without saving, what is loaded comes from another run
        if extra and config.trainer.save_freq > 0:
            text = (
                f"asks for {', '.join(extra)}, which {key}.checkpoint.save_contents={role.checkpoint.save_contents} "
                "does not write: a run could not resume from its own checkpoints."
            )
            yield problem(config, f"{key}.checkpoint.load_contents", text, f"{key}.checkpoint.save_contents")


@validator("error")
def custom_class_requires_name(config: PPOConfig) -> Iterator[Problem]:
    for path, name in (
        ("data.custom_cls.path", "data.custom_cls.name"),
        ("data.sampler.class_path", "data.sampler.class_name"),
        ("data.datagen.path", "data.datagen.name"),
        (f"{ROLLOUT}.agent.custom_async_server.path", f"{ROLLOUT}.agent.custom_async_server.name"),
    ):
        if get_path(config, path) and not get_path(config, name):
            yield problem(
                config, name, f"with {path}={get_path(config, path)}: name the class to take from the file.", path
            )


@validator("error")
def halting_rules_are_on(config: PPOConfig) -> Iterator[Problem]:
    for rule in config.trainer.halt_on:
        if config.trainer.health.get(rule, 0) is None:
            text = f"names {rule}, and trainer.health.{rule}=null switches that rule off: give it a limit."
            yield problem(config, "trainer.halt_on", text, f"trainer.health.{rule}")


@validator("error")
def profiles_can_be_made(config: PPOConfig) -> Iterator[Problem]:
    plan, trainer, steps = config.profile_plan, config.trainer, "trainer.profile_steps"
    if not plan.steps:
        return
    if min(plan.steps) < 1:
        yield problem(config, steps, "names a step that there is not: the first is 1.")
    if plan.tool == "npu":
        text = "needs torch_npu and the devices of Ascend, which are not supported. Use torch or torch_memory."
        yield problem(config, "global_profiler.tool", text)
    if plan.tool == "nsys":
        key = "global_profiler.tool"
        if trainer.controller != "ray" or trainer.device != "cuda":
            text = "records CUDA in workers that Ray starts under it: set trainer.controller=ray and "
            yield problem(config, key, f"{text}trainer.device=cuda, or tool=torch.", "trainer.controller")
        elif shutil.which("nsys") is None:
            text = "needs the program nsys, which is not on the PATH. Install NVIDIA Nsight Systems, or set tool=torch."
            yield problem(config, key, text)
    for name, role in plan.roles.items():
        extra = [rank for rank in role.ranks or () if not 0 <= rank < max(trainer.world_size, config.rollout_beside)]
        if role.enabled and extra and get_path(config, PROFILERS[name]).ranks:
            text = f"names rank {extra[0]}, and there are {trainer.world_size}: they count from 0."
            yield problem(config, PROFILERS[name] + ".ranks", text)


# -- Settings of data, checkpoints, validation and the controller without effect -------------------------------------
@validator("warning")
def profiles_that_are_not_made(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    plan, steps = config.profile_plan, "trainer.profile_steps"
    if plan.steps and not plan.is_on:
        yield from unused(config, [steps], is_given, "profiler.enable=false for every role, so nothing is recorded")
    elif plan.steps and plan.tool == "torch_memory" and config.trainer.device != "cuda":
        text = "records CUDA's memory, of which there is none: the traces show each allocation of host memory instead"
        yield problem(config, "global_profiler.tool", f"with trainer.device={config.trainer.device} {text}")
    if plan.is_on and config.actor_rollout_ref.generates_ahead:
        why = f"{ROLLOUT}.max_staleness={config.actor_rollout_ref.rollout.staleness} keeps those processes busy"
        yield from unused(config, [f"{ROLLOUT}.profiler.enable"], is_given, why)


@validator("warning")
def resume_from_path_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.resume_mode != "resume_path" and config.trainer.resume_from_path is not None:
        yield from unused(
            config, ["trainer.resume_from_path"], is_given, f"trainer.resume_mode={config.trainer.resume_mode}"
        )


@validator("warning")
def checkpoint_options_without_save_freq(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.save_freq <= 0:
        keys = ["trainer.max_actor_ckpt_to_keep"]
        keys += ["trainer.checkpoint_callback_class"] * bool(config.trainer.checkpoint_callback_class)
        keys += [f"{ACTOR}.checkpoint.{name}" for name in ("save_contents", "async_save")]
        if config.uses_critic:
            keys += ["trainer.max_critic_ckpt_to_keep"]
            keys += [f"critic.checkpoint.{name}" for name in ("save_contents", "async_save")]
        yield from unused(config, keys, is_given, f"trainer.save_freq={config.trainer.save_freq} writes no checkpoint")


@validator("warning")
def remote_checkpoint_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode != "disable":
        return
    if trainer.save_freq <= 0:
        why = "trainer.save_freq writes no checkpoint, and trainer.resume_mode=disable reads none"
        yield from unused(config, ["trainer.default_hdfs_dir"] * bool(trainer.default_hdfs_dir), is_given, why)
    keys = ["trainer.del_local_ckpt_after_load"] * trainer.del_local_ckpt_after_load
    yield from unused(config, keys, is_given, "trainer.resume_mode=disable loads no checkpoint")


@validator("warning")
def class_name_without_path(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    server = f"{ROLLOUT}.agent.custom_async_server"
    for section, file, name in (
        ("data.custom_cls", "path", "name"),
        ("data.sampler", "class_path", "class_name"),
        ("data.datagen", "path", "name"),
        *([(server, "path", "name")] if config.actor_rollout_ref.rollout.mode == "async" else []),
    ):
        if get_path(config, f"{section}.{file}") is None:
            keys = [f"{section}.{name}"] if get_path(config, f"{section}.{name}") else []
            yield from unused(config, keys, is_given, f"{section}.{file}=null names no file")


@validator("warning")
def validation_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    trainer = config.trainer
    keys = [
        *given_below(f"{ROLLOUT}.val_kwargs", config, is_given),
        "data.val_batch_size",
        "data.validation_shuffle",
        "trainer.validation_data_dir",
        "trainer.log_val_generations",
    ]
    if not config.has_validation:
        key = "env.val.tags" if config.env.makes_rows else "data.val_files"
        why = f"{key}={show(get_path(config, key))}, so nothing is validated"
        switches = {"trainer.test_freq": trainer.test_freq > 0, "trainer.val_before_train": trainer.val_before_train}
        keys = [*(key for key, is_on in switches.items() if is_on), *keys]
        yield from list(unused(config, keys, is_given, why)) or [Problem(key, why)]
    elif trainer.test_freq <= 0 and not trainer.val_before_train and not trainer.val_only:
        why = "nothing is validated with trainer.test_freq and trainer.val_before_train off"
        yield from unused(config, keys, is_given, why)


@validator("warning")
def shuffle_unused_with_custom_sampler(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.data.sampler.class_path is not None:
        yield from unused(config, ["data.shuffle"], is_given, "data.sampler decides the order")


@validator("warning")
def worker_timeout_unused_with_one_local_worker(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.controller == "local" and config.trainer.world_size == 1 and not config.processes_beside:
        keys = ["trainer.worker_timeout", *given_below("trainer.deadlines", config, is_given)]
        yield from unused(config, keys, is_given, "the one worker runs in the driver's process")


@validator("warning")
def ray_init_unused_with_local_controller(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.controller == "local":
        # env reaches forked workers as well
        keys = [key for key in given_below("ray_init", config, is_given) if key != "ray_init.env"]
        if config.trainer.world_size == 1 and not config.processes_beside:
            keys.append("trainer.ray_wait_register_center_timeout")  # forked workers are waited for, too
        yield from unused(config, keys, is_given, "trainer.controller=local starts no Ray")


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


@validator("advice")
def too_few_or_too_many_checkpoints(config: PPOConfig, total_steps: int | None) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.val_only:
        return
    if trainer.save_freq <= 0:
        text = (
            "writes no checkpoint: nothing of the run is left at its end, and nothing if it stops. Set it to a "
            "number of steps."
        )
        yield problem(config, "trainer.save_freq", text)
    elif trainer.save_freq == 1 and (total_steps or 0) > 50 and trainer.max_actor_ckpt_to_keep is None:
        text = (
            f"with trainer.max_actor_ckpt_to_keep=null keeps all of the {total_steps} checkpoints of the run. "
            "Keep some, or save less often."
        )
        yield problem(config, "trainer.save_freq", text, "trainer.max_actor_ckpt_to_keep")


@validator("advice")
def warmup_and_frequencies_within_total_steps(config: PPOConfig, total_steps: int | None) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        warmup = role.optim.lr_warmup_steps
        if total_steps is not None and warmup is not None and warmup >= total_steps > 0:
            text = (
                f"is not less than the {total_steps} steps of the run: the learning rate never reaches "
                f"{key}.optim.lr={role.optim.lr:g}. Lower it, or train longer."
            )
            yield problem(config, f"{key}.optim.lr_warmup_steps", text, "trainer.total_training_steps")
        elif role.optim.lr_warmup_steps_ratio == 1 and (warmup is None or warmup < 0):
            text = f"warms up during the whole run: the learning rate reaches {key}.optim.lr at its end only. Lower it."
            yield problem(config, f"{key}.optim.lr_warmup_steps_ratio", text)
        if key == "critic" and total_steps is not None and config.trainer.critic_warmup >= total_steps > 0:
            text = (
                f"is not less than the {total_steps} steps of the run: the policy is never trained. Lower it, or train "
                "longer."
            )
            yield problem(config, "trainer.critic_warmup", text)
    for key in ["trainer.save_freq", *(["trainer.test_freq"] if config.has_validation else [])]:
        if total_steps is not None and get_path(config, key) > total_steps:
            text = (
                f"is more than the {total_steps} steps of the run: only the last one counts. Lower it, or train longer."
            )
            yield problem(config, key, text, "trainer.total_training_steps")


@validator("advice")
def validation_files_in_training_files(config: PPOConfig) -> Iterator[Problem]:
    both = sorted(set(config.data.files["data.train_files"]) & set(config.data.files["data.val_files"]))
    validates = config.trainer.test_freq > 0 or config.trainer.val_before_train
    if both and validates:
        text = (
            f"data.val_files={both[0]} is in data.train_files too: validation would see what was trained on. Name "
            "other rows."
        )
        yield Problem("data.val_files", text, ("data.train_files",))


# -- Files a configuration names: that a run would find them, and could write its own, before anything heavy starts --


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
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
)

_YAML_FILES = (
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
)

_DATA_ENDINGS = (".parquet", ".arrow", ".json", ".jsonl", ".csv")

_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?(:[\w.-]+(\[[^\]]*\])?)?")
"""A data set of the Hugging Face hub; whether it can be had is seen when it is loaded."""

_FUNCTIONS_IN_FILES = (
    "actor_rollout_ref.rollout.agent.openai_agent.function",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "reward_model.reward_manager",
    "actor_rollout_ref.rollout.multi_turn.format",
    "trainer.checkpoint_callback_class",
)


def missing_files(config: PPOConfig) -> list[Problem]:
    """One problem per file or folder that is not there or cannot be, and per model that does not fit the settings.

    Remote paths and hub ids are not looked at; whether a model is there is the matter of ``verl.preflight.models``.
    """
    return [
        *_data_files(config),
        *_python_files(config),
        *model_info.model_problems(config),
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
            # a hub id has no ending of a file
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
    for key in (*_PYTHON_FILES, *_YAML_FILES):
        path = get_path(config, key)
        if path and not _is_remote(path) and not _exists(path):
            kind = "YAML" if key in _YAML_FILES else "Python"
            yield Problem(key, f"{key}={path} does not exist (looked in {Path.cwd()}). Give a {kind} file.")
    for key in _FUNCTIONS_IN_FILES:
        name = get_path(config, key)
        path, _ = split_file_name(name or "") or (None, None)
        if path and not _is_remote(path) and not _exists(path):
            yield Problem(
                key, f"{key}={name} does not exist: no {path} in {Path.cwd()}. Give a Python file and a name in it."
            )


def _checkpoint(config: PPOConfig) -> Iterator[Problem]:
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path and not _is_remote(path) and not _exists(path):
        text = f"trainer.resume_from_path={path} does not exist. Give the folder of a checkpoint, .../global_step_N."
        yield Problem("trainer.resume_from_path", text)


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
    # the folder itself need not exist: the nearest that does decides
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
    """Answer of the system to a folder made there; permissions alone do not tell of full and of special disks."""
    try:
        # tried rather than asked: os.access knows nothing of full or read-only disks
        with tempfile.TemporaryDirectory(prefix=".verl-", dir=folder):
            return None
    except OSError as error:
        return error.strerror
