"""The run around the steps: controller, servers, checkpoints, classes of the user's."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.checks.base import ACTOR, ROLLOUT, IsGiven, given_below, notice, problem, rule, trained_roles, unread
from verl.config.ppo import PPOConfig
from verl.config.support import asked_of_nobody


@rule
def local_controller_has_one_node(config: PPOConfig) -> Iterator[Problem]:
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


@rule
def servers_of_several_nodes_can_be_reached(config: PPOConfig) -> Iterator[Problem]:
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


@rule
def something_is_there_to_validate(config: PPOConfig) -> Iterator[Problem]:
    if config.trainer.val_only and not config.data.has_validation:
        files = show(config.data.val_files)
        text = f"with data.val_files={files}: nothing is there to validate. Name validation files."
        yield problem(config, "trainer.val_only", text, "data.val_files")


@rule
def resume_path_is_a_step_folder(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and "global_step_" not in (trainer.resume_from_path or ""):
        yield problem(
            config,
            "trainer.resume_from_path",
            "with trainer.resume_mode=resume_path: give the folder of one checkpoint, .../global_step_N.",
            "trainer.resume_mode",
        )


@rule
def checkpoints_are_copied_from_one_node(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if trainer.default_hdfs_dir and trainer.nnodes > 1:
        yield problem(
            config,
            "trainer.default_hdfs_dir",
            f"with trainer.nnodes={trainer.nnodes}: only this machine's part of a checkpoint would be copied. Let "
            "trainer.default_local_dir be a folder that all nodes share.",
            "trainer.nnodes",
        )


@rule
def resumable_checkpoints_hold_what_is_loaded(config: PPOConfig) -> Iterator[Problem]:
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


@rule
def custom_class_has_a_name(config: PPOConfig) -> Iterator[Problem]:
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


@notice
def nothing_is_profiled(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key, needed in asked_of_nobody(config):
        yield from unread(config, [key], is_given, f"{needed}=null profiles no step, and profilers are not built")


@notice
def resume_path_is_not_read(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.resume_mode != "resume_path" and config.trainer.resume_from_path is not None:
        yield from unread(
            config, ["trainer.resume_from_path"], is_given, f"trainer.resume_mode={config.trainer.resume_mode}"
        )


@notice
def no_checkpoint_is_written(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.save_freq <= 0:
        keys = ["trainer.max_actor_ckpt_to_keep"]
        keys += [f"{ACTOR}.checkpoint.{name}" for name in ("save_contents", "async_save")]
        if config.uses_critic:
            keys += ["trainer.max_critic_ckpt_to_keep"]
            keys += [f"critic.checkpoint.{name}" for name in ("save_contents", "async_save")]
        yield from unread(config, keys, is_given, f"trainer.save_freq={config.trainer.save_freq} writes no checkpoint")


@notice
def nothing_comes_from_or_goes_to_a_store(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode != "disable":
        return
    if trainer.save_freq <= 0:
        why = "trainer.save_freq writes no checkpoint, and trainer.resume_mode=disable reads none"
        yield from unread(config, ["trainer.default_hdfs_dir"] * bool(trainer.default_hdfs_dir), is_given, why)
    keys = ["trainer.del_local_ckpt_after_load"] * trainer.del_local_ckpt_after_load
    yield from unread(config, keys, is_given, "trainer.resume_mode=disable loads no checkpoint")


@notice
def classes_need_a_file(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    server = f"{ROLLOUT}.agent.custom_async_server"
    for section, file, name in (
        ("data.custom_cls", "path", "name"),
        ("data.sampler", "class_path", "class_name"),
        ("data.datagen", "path", "name"),
        *([(server, "path", "name")] if config.actor_rollout_ref.rollout.mode == "async" else []),
    ):
        if get_path(config, f"{section}.{file}") is None:
            keys = [f"{section}.{name}"] if get_path(config, f"{section}.{name}") else []
            yield from unread(config, keys, is_given, f"{section}.{file}=null names no file")


@notice
def nothing_is_validated(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
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
        asked = {"trainer.test_freq": trainer.test_freq > 0, "trainer.val_before_train": trainer.val_before_train}
        keys = [*(key for key, is_wanted in asked.items() if is_wanted), *keys]
        yield from list(unread(config, keys, is_given, why)) or [why]
    elif trainer.test_freq <= 0 and not trainer.val_before_train and not trainer.val_only:
        why = "nothing is validated with trainer.test_freq and trainer.val_before_train off"
        yield from unread(config, keys, is_given, why)


@notice
def steps_go_before_epochs(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    steps = config.trainer.total_training_steps
    if steps is not None:
        why = f"trainer.total_training_steps={steps} decides, over as many epochs as that takes"
        yield from unread(config, ["trainer.total_epochs"], is_given, why)


@notice
def users_sampler_decides_the_order(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.data.sampler.class_path is not None:
        yield from unread(config, ["data.shuffle"], is_given, "data.sampler decides the order")


@notice
def prompts_have_no_ids(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.data.prompt_id_key is None:
        yield from unread(config, ["data.max_prompt_id_length"], is_given, "data.prompt_id_key=null")


@notice
def nothing_is_filtered(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.data.filter_overlong_prompts:
        keys = ["data.filter_overlong_prompts_workers"]
        yield from unread(config, keys, is_given, "data.filter_overlong_prompts=false")


@notice
def one_local_worker_cannot_be_interrupted(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.hybrid_engine:
        return
    if config.trainer.controller == "local" and config.trainer.world_size == 1:
        yield from unread(config, ["trainer.worker_timeout"], is_given, "the one worker runs in the driver's process")


@notice
def ray_is_not_started(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.trainer.controller == "local":
        keys = [key for key in given_below("ray_init", config, is_given) if key != "ray_init.env"]
        if config.trainer.world_size == 1 and config.actor_rollout_ref.hybrid_engine:
            keys.append("trainer.ray_wait_register_center_timeout")  # forked workers are waited for, too
        yield from unread(config, keys, is_given, "trainer.controller=local starts no Ray")
