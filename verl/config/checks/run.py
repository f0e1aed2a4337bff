"""Validators of the run around the steps: controller, servers, checkpoints, classes of the user's."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.checks.base import ACTOR, ROLLOUT, IsGiven, given_below, problem, trained_roles, unused, validator
from verl.config.checks.support import unsupported_but_off
from verl.config.ppo import PPOConfig


@validator("error")
def local_controller_requires_one_node(config: PPOConfig) -> Iterator[Problem]:
    if config.trainer.controller != "local":
        return
    keys = ["trainer.nnodes"] + ([] if config.actor_rollout_ref.hybrid_engine else [f"{ROLLOUT}.nnodes"])
    for key in keys:
        if get_path(config, key) > 1:
            yield problem(
                config,
                key,
                "with trainer.controller=local: forked processes stay on one machine. Use trainer.controller=ray.",
                "trainer.controller",
            )


@validator("error")
def server_host_reachable_from_other_nodes(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    is_local = rollout.server_host in ("localhost", "::1") or rollout.server_host.startswith("127.")
    place = "trainer" if config.actor_rollout_ref.hybrid_engine else ROLLOUT
    nodes = len(config.rollout_processes)
    if rollout.mode == "async" and nodes > 1 and is_local:
        yield problem(
            config,
            f"{ROLLOUT}.server_host",
            f"with {place}.nnodes={nodes}: the driver could not reach the rollout servers of other "
            "nodes. Use 0.0.0.0; the servers then ask for a key that the driver makes up.",
            f"{place}.nnodes",
        )


@validator("error")
def val_only_requires_val_files(config: PPOConfig) -> Iterator[Problem]:
    if config.trainer.val_only and not config.data.has_validation:
        files = show(config.data.val_files)
        text = f"with data.val_files={files}: nothing is there to validate. Name validation files."
        yield problem(config, "trainer.val_only", text, "data.val_files")


@validator("error")
def resume_from_path_is_checkpoint_folder(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in (trainer.resume_from_path or ""):
        yield problem(
            config,
            "trainer.resume_from_path",
            "with trainer.resume_mode=resume_path: give the folder of one checkpoint, .../global_step_N.",
            "trainer.resume_mode",
        )


@validator("error")
def hdfs_dir_requires_one_node(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.default_hdfs_dir and trainer.nnodes > 1:
        yield problem(
            config,
            "trainer.default_hdfs_dir",
            f"with trainer.nnodes={trainer.nnodes}: only this machine's part of a checkpoint would be copied. Let "
            "trainer.default_local_dir be a folder that all nodes share.",
            "trainer.nnodes",
        )


@validator("error")
def checkpoint_load_contents_are_saved(config: PPOConfig) -> Iterator[Problem]:
    for key, role, _ in trained_roles(config):
        extra = [part for part in role.checkpoint.load_contents if part not in role.checkpoint.save_contents]
        if extra and config.trainer.save_freq > 0:
            yield problem(
                config,
                f"{key}.checkpoint.load_contents",
                f"asks for {', '.join(extra)}, which "
                f"{key}.checkpoint.save_contents={role.checkpoint.save_contents} does not write: a run "
                f"could not resume from its own checkpoints.",
                f"{key}.checkpoint.save_contents",
            )


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


# -- Settings of data, checkpoints, validation and the controller without effect -------------------------------------


@validator("warning")
def profiler_options_without_profile_steps(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for key, needed in unsupported_but_off(config):
        yield from unused(config, [key], is_given, f"{needed}=null profiles no step, and profilers are not built")


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
    if not config.data.has_validation:
        why = f"data.val_files={show(config.data.val_files)}, so nothing is validated"
        switches = {"trainer.test_freq": trainer.test_freq > 0, "trainer.val_before_train": trainer.val_before_train}
        keys = [*(key for key, is_on in switches.items() if is_on), *keys]
        yield from list(unused(config, keys, is_given, why)) or [Problem("data.val_files", why)]
    elif trainer.test_freq <= 0 and not trainer.val_before_train and not trainer.val_only:
        why = "nothing is validated with trainer.test_freq and trainer.val_before_train off"
        yield from unused(config, keys, is_given, why)


@validator("warning")
def total_epochs_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    steps = config.trainer.total_training_steps
    if steps is not None:
        why = f"trainer.total_training_steps={steps} decides, over as many epochs as that takes"
        yield from unused(config, ["trainer.total_epochs"], is_given, why)


@validator("warning")
def shuffle_unused_with_custom_sampler(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.data.sampler.class_path is not None:
        yield from unused(config, ["data.shuffle"], is_given, "data.sampler decides the order")


@validator("warning")
def max_prompt_id_length_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.data.prompt_id_key is None:
        yield from unused(config, ["data.max_prompt_id_length"], is_given, "data.prompt_id_key=null")


@validator("warning")
def filter_overlong_prompts_workers_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.data.filter_overlong_prompts:
        keys = ["data.filter_overlong_prompts_workers"]
        yield from unused(config, keys, is_given, "data.filter_overlong_prompts=false")


@validator("warning")
def worker_timeout_unused_with_one_local_worker(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.actor_rollout_ref.hybrid_engine:
        return
    if config.trainer.controller == "local" and config.trainer.world_size == 1:
        yield from unused(config, ["trainer.worker_timeout"], is_given, "the one worker runs in the driver's process")


@validator("warning")
def ray_init_unused_with_local_controller(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.trainer.controller == "local":
        keys = [key for key in given_below("ray_init", config, is_given) if key != "ray_init.env"]
        if config.trainer.world_size == 1 and config.actor_rollout_ref.hybrid_engine:
            keys.append("trainer.ray_wait_register_center_timeout")  # forked workers are waited for, too
        yield from unused(config, keys, is_given, "trainer.controller=local starts no Ray")
