"""The run around the steps: controller, servers, checkpoints, classes of the user's."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.build import show
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ROLLOUT, problem, rule, trained_roles


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
