"""PPOJob: one run from a checked config to its closing summary.

All cheap checks run first (``verl.preflight``). Only then do worker processes start and models load.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.losses import get_policy_loss_fn
from verl.config.base import ConfigError
from verl.config.checks.batch import counted, optimizer_steps
from verl.config.checks.megatron import megatron_roles, not_exercised
from verl.config.engine import backend_of
from verl.config.ppo import PPOConfig
from verl.data.env_groups import EnvGroupDataset
from verl.data.loader import FileOrderSampler
from verl.models.heads import stored_shapes, stores_head
from verl.preflight.checks import refuse
from verl.rewards.managers.early import begins_early
from verl.rewards.managers.scoring import check_data_sources, load_reward_manager, start_reward_functions
from verl.rewards.managers.self_test import try_reward_function
from verl.rewards.reward_model import check_reward_model
from verl.single_controller import get_controller
from verl.telemetry.progress import RunSummary, print_summary
from verl.telemetry.run_record import COMMAND, LOG
from verl.trainer.launch import check_device, running_workers
from verl.trainer.ppo.experience import columns_read_early
from verl.trainer.ppo.placement import GLOBAL_POOL, ResourcePoolManager, Role, default_pools, default_roles
from verl.trainer.ppo.ray_trainer import OneStepOffTrainer, RayPPOTrainer
from verl.trainer.restarts import is_attempt
from verl.trainer.run_folder import gpu_options, recorded_run, words_of_config
from verl.utils.config import adopt_config, typed_config
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules
from verl.utils.process import no_collection
from verl.utils.tokenizer import hf_processor, hf_tokenizer

# -- plan of a run: its first lines on the screen ---------------------------------------------------------------------


def run_plan(trainer: RayPPOTrainer) -> str:
    """Return the lines for a trainer whose workers have not started yet."""
    return "\n".join(f"{label:<9}{text}" for label, text in _lines(trainer))


def _lines(trainer: RayPPOTrainer) -> Iterator[tuple[str, str]]:
    config = trainer.config
    shared, keys = config.actor_rollout_ref, config.trainer
    yield "model", model_line(shared.model.path)
    if trainer.use_critic:
        path, head = config.critic.model.path, {True: ", value head from there", False: ", new value head", None: ""}
        yield "critic", model_line(path) + head[stores_head(path)]
    if trainer.use_rm:
        yield "rewards", model_line(config.reward_model.model.path)
    train, held_out = trainer.train_dataset, trainer.val_dataset
    if isinstance(train, EnvGroupDataset):
        yield "data", f"{train.summary}; " + (f"{held_out.summary} to validate" if held_out else "none to validate")
    else:
        validates = f"{len(held_out):,} to validate" if held_out else "none to validate"
        yield "data", f"{counted(len(train), 'prompt')} to train on, {validates}"
    samples = f"{counted(config.prompts_per_update, 'prompt')} x {counted(shared.rollout.n, 'response')}"
    length = counted(config.data.max_response_length, "token")
    updates = counted(optimizer_steps(config, shared.actor), "optimizer step")
    yield "step", f"{samples} of up to {length}; {config.algorithm.adv_estimator}; {updates}"
    steps, epochs = trainer.total_training_steps, trainer.total_training_steps / trainer.steps_per_epoch
    validation = _every("validation", keys.test_freq if held_out else -1)
    checkpoint = _every("checkpoint", keys.save_freq)
    in_epochs = "" if isinstance(train, EnvGroupDataset) else f" ({epochs:.2g} epochs)"
    yield "run", f"{counted(steps, 'step')}{in_epochs}; {validation}, {checkpoint}"
    ranks = counted(keys.world_size, "rank")
    what = {"rollout": "to sample", "teachers": "of teachers"}
    apart = "".join(f" and {counted(count, 'rank')} {what[name]}" for name, count in config.processes_beside.items())
    sp = shared.actor.ulysses_sequence_parallel_size
    ranks += f", {sp} to a sequence" if sp > 1 else ""
    strategy = shared.actor.strategy
    if (backend := backend_of(strategy, keys.device, keys.world_size)) != strategy:
        backend += f" ({strategy} has nothing to shard on one CPU process)"
    yield "on", f"{keys.device}, {ranks}{apart}, {backend}, controller {keys.controller}"
    if roles := megatron_roles(config):
        mesh, beyond = roles[0].section.megatron.mesh(keys.world_size), ", ".join(not_exercised(config))
        yield "megatron", f"{mesh}; {f'not exercised by our tests: {beyond}' if beyond else 'as in our tests'}"
    yield "results", str(keys.default_local_dir)


def _every(what: str, frequency: int) -> str:
    return f"{what} every {counted(frequency, 'step')}" if frequency > 0 else f"no {what}"


def model_line(path: str) -> str:
    """A model's path and size for the plan of a run."""
    number = stored_parameters(path)
    return path if number is None else f"{path}, {_rounded(number)} parameters"


def _rounded(number: int) -> str:
    size, unit = next((size, unit) for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K"), (1, "")) if number >= size)
    return f"{number / size:.3g}{unit}"


def stored_parameters(path: str) -> int | None:
    """Numbers in the safetensors files of a folder, from their headers alone; None if it has none."""
    return sum(map(prod, stored_shapes(path).values())) or None


logger = logging.getLogger(__name__)


class PPOJob:
    """The main job as users start it; the trainer class is the place to bring another algorithm."""

    trainer_cls: type[RayPPOTrainer] = RayPPOTrainer

    def __init__(self, config: Any, command_line: Sequence[str] | None = None) -> None:
        """Make a run of ``config``, which ``main_ppo`` read from ``command_line``. None: it was made in Python."""
        self.config = config
        self.given_words = command_line
        self.command_line = command_line
        self.script_config: Any = None
        """The tree of a script, which may hold keys of its own; None: there is none."""
        self.roles: dict[Role, Any] | None = None
        self.pools: ResourcePoolManager | None = None
        """Roles, and the pool of each; None: as ``config`` says."""
        if command_line is None:  # main_ppo knows nothing of a subclass
            self.command_line = words_of_config(config) if type(self) is PPOJob else []

    def run(self) -> RayPPOTrainer:
        """Prepare, train, and print a summary; worker processes never outlive this call.

        Raises:
            StoppedEarly: a signal or a limit of time ended it before its last step, with a checkpoint saved.
        """
        with self.prepared() as trainer, trainer.early_stop.signals():
            trainer.fit()
        return trainer

    @contextmanager
    def prepared(self) -> Iterator[RayPPOTrainer]:
        """Own the run's folder, check, start the workers; at the block's end they are gone, and a summary is printed.

        Raises:
            StoppedEarly: as `run`.
        """
        with recorded_run(self.config, self.given_words), _reward_router(self.config), self._workers() as trainer:
            yield trainer

    @contextmanager
    def _workers(self) -> Iterator[RayPPOTrainer]:
        """Check, build the trainer and start its workers; at the block's end stop them, and print what was done."""
        start = time.monotonic()
        with no_collection():
            self.check()
            check_device(self.config.trainer, self.config.processes_beside)
            self.import_users_modules()
            trainer = self.build_trainer()
        report = None
        if self.config.asks_reward_function:
            check_data_sources(self.config, trainer.reward_fn, [trainer.train_dataset, trainer.val_dataset])
        # environments have no known-good answers to try a reward function with
        if self.config.asks_reward_function and not self.config.env.makes_rows:
            report = try_reward_function(self.config, trainer.reward_fn, trainer.train_dataset)
        if self.config.trainer.progress_bar:
            print(run_plan(trainer), flush=True)
            if report:
                when = "as each ends" if begins_early(self.config, trainer.reward_fn) else "when the batch is whole"
                print(f"reward   {report}; responses are scored {when}", flush=True)
        for alarm in report.alarms if report else ():
            logger.warning("The reward function %s looks wrong: %s.", report.function, alarm)
        with running_workers(trainer, self.config, self.command_line, trainer.buffer):
            yield trainer
        print_summary(self.summary(trainer, time.monotonic() - start))

    def check(self) -> None:
        """Run the checks that need neither Ray nor a model, unless the command line has run them.

        Raises:
            ConfigError: the run cannot succeed; lists every reason.
        """
        report = refuse(self.config)
        if (restarts := self.config.trainer.max_restarts) and not is_attempt():
            logger.warning("trainer.max_restarts=%d has no effect in PPOJob.run: call run_ppo instead.", restarts)
        for finding in report.warnings if report else ():
            logger.warning("%s", finding.text)

    def import_users_modules(self) -> None:
        """Import the user's modules, here as in every worker, and check that the configured names are registered."""
        import_users_modules(self.config.actor_rollout_ref.model.external_lib)
        get_adv_estimator_fn(self.config.algorithm.adv_estimator)
        get_policy_loss_fn(self.config.actor_rollout_ref.actor.policy_loss.loss_mode)

    def summary(self, trainer: RayPPOTrainer, seconds: float) -> RunSummary:
        """Return the summary of the finished run."""
        keys = self.config.trainer
        script = Path(keys.default_local_dir).expanduser() / COMMAND
        options, refusal = self.gpu_options()
        return RunSummary(
            steps=trainer.global_steps,
            seconds=seconds,
            validations=trainer.validations,
            places={
                "samples": keys.rollout_data_dir,
                "validation samples": keys.validation_data_dir if trainer.validations else None,
                "log": Path(keys.default_local_dir).expanduser() / LOG,
                **trainer.run_log.places,
                "checkpoint": trainer.last_checkpoint,
            },
            overrides=self.command_line,
            device=keys.device,
            can_resume=trainer.last_checkpoint is not None,
            again=script if self.given_words is not None and script.exists() else None,
            gpu_options=options,
            gpu_refusal=refusal,
        )

    def gpu_options(self) -> tuple[list[str], str]:
        """Return the options that run this CPU run on a GPU; else why that is refused."""
        if self.config.trainer.device != "cpu" or not self.command_line:
            return [], ""
        try:
            return gpu_options(typed_config(self.config)), ""
        except ConfigError as error:
            return [], str(error)

    def build_trainer(self) -> RayPPOTrainer:
        """Tokenizer, reward functions and roles, as the config names them; the trainer reads the data."""
        config = self.config
        os.environ.update({name: str(value) for name, value in config.ray_init.variables.items()})
        start_reward_functions(config)  # they load while tokenizer and data do, in the environment of the workers
        tokenizer, processor = load_tokenizer(config)
        if config.reward_model.enable and not config.reward_model.server_urls:
            check_reward_model(config, tokenizer)
        roles = self.roles or default_roles(config)
        trainer_cls = self.trainer_cls
        if trainer_cls is RayPPOTrainer and config.actor_rollout_ref.generates_ahead:
            trainer_cls = OneStepOffTrainer
        tree = config if self.script_config is None else self.script_config
        if trainer_cls in (RayPPOTrainer, OneStepOffTrainer) and isinstance(tree, PPOConfig):
            early = columns_read_early(config.algorithm.adv_estimator)
            skips = config.skips_old_log_probs and (config.actor_rollout_ref.actor.skip_old_log_probs or not early)
            tree = tree.with_values({"actor_rollout_ref.actor.skip_old_log_probs": skips})
        return trainer_cls(
            tree,
            tokenizer,
            role_worker_mapping=roles,
            resource_pool_manager=self.pools or default_pools(config, roles),
            processor=processor,
            reward_fn=load_reward_manager(config, tokenizer, num_examine=0),
            val_reward_fn=load_reward_manager(config, tokenizer, num_examine=1),
            **(group_datasets(config) if config.env.makes_rows else {}),
        )


@contextmanager
def _reward_router(config: PPOConfig) -> Iterator[None]:
    """At the block's end, stop the router to the servers of ``reward_model``, if there are any."""
    try:
        yield
    finally:
        if config.reward_model.asks_servers:
            from verl.rewards.router import close_router  # imports aiohttp

            close_router()


def load_tokenizer(config: PPOConfig) -> tuple[Any, Any]:
    """Return the tokenizer, and the processor of images or None, with the template that the config names.

    Raises:
        ValueError: agent loops cannot continue a conversation in that template.
    """
    model = config.actor_rollout_ref.model
    path = copy_to_local(model.path)
    trust = config.data.trust_remote_code or model.trust_remote_code
    reading: dict[str, Any] = {"trust_remote_code": trust, "chat_template": model.custom_chat_template}
    tokenizer, processor = hf_tokenizer(config.data.tokenizer or path, **reading), hf_processor(path, **reading)
    if config.actor_rollout_ref.rollout.mode == "async":
        from verl.agents.conversation import check_chat_template  # with the servers' packages: in this mode alone

        check_chat_template(tokenizer, processor, config)
    return tokenizer, processor


def group_datasets(config: PPOConfig) -> dict[str, Any]:
    """Return the datasets of environment groups and their order, as arguments of the trainer."""
    seed = config.trainer.seed
    train = EnvGroupDataset(config.env, seed, is_train=True)
    held_out = EnvGroupDataset(config.env, seed, is_train=False) if config.has_validation else None
    return {"train_dataset": train, "val_dataset": held_out, "train_sampler": FileOrderSampler(train)}


class TaskRunner:
    """Driver of a run under the name that applications of verl use; override ``run`` or the methods it calls.

    ``run(config)`` runs here; ``TaskRunner.remote()``, or a subclass wrapped by ``ray.remote``, is an actor that does.

    Attributes:
        role_worker_mapping: role -> worker class, filled by the ``add_*`` methods.
        mapping: role -> pool of devices.
    """

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Role, Any] = {}
        self.mapping: dict[Role, str] = {}
        self._default_roles: dict[Role, type] = {}

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """An actor of Ray's that runs the task."""
        return cls.options(num_cpus=1).remote(*args, **kwargs)

    @classmethod
    def options(cls, **options: Any) -> Any:
        """The same with options of Ray's."""
        import ray  # the local controller does without

        return ray.remote(cls).options(**options)

    def run(self, config: Any) -> None:
        """Train as ``config`` says, with the roles that the methods below add."""
        config = adopt_config(config)
        roles = self._defaults(config)
        actor_cls = None
        if Role.ActorRollout in roles:
            actor_cls, _ = self.add_actor_rollout_worker(config)
        self.add_critic_worker(config)
        self.add_reward_model_worker(config)
        self.add_ref_policy_worker(config, actor_cls)
        job = PPOJob(typed_config(config), sys.argv[1:])
        job.script_config = config
        job.roles = {role: self.role_worker_mapping.get(role, cls) for role, cls in roles.items()}
        job.pools = self.init_resource_pool_mgr(config)
        job.run()

    def add_actor_rollout_worker(self, config: Any) -> tuple[type, Any]:
        """The class of the policy and its rollout, and the class of its group; None: that of ``trainer.controller``."""
        cls = self._defaults(config)[Role.ActorRollout]
        return self._add(Role.ActorRollout, cls), None

    def add_critic_worker(self, config: Any) -> None:
        """Add the critic, if one takes part."""
        self._add(Role.Critic, self._defaults(config).get(Role.Critic))

    def add_reward_model_worker(self, config: Any) -> None:
        """Add the reward model, if one takes part."""
        self._add(Role.RewardModel, self._defaults(config).get(Role.RewardModel))

    def add_ref_policy_worker(self, config: Any, ref_policy_cls: Any) -> None:
        """Add the reference, if one takes part and the actor does not stand for it."""
        if default := self._defaults(config).get(Role.RefPolicy):
            self._add(Role.RefPolicy, ref_policy_cls or default)

    def init_resource_pool_mgr(self, config: Any) -> ResourcePoolManager:
        """The pools, and the pool of every role."""
        pools = default_pools(config, self._defaults(config))
        pools.mapping.update(self.mapping)
        return pools

    def _defaults(self, config: Any) -> dict[Role, type]:
        self._default_roles = self._default_roles or default_roles(config)
        return self._default_roles

    def _add(self, role: Role, cls: Any) -> Any:
        if cls is not None:
            self.role_worker_mapping[role] = cls
            self.mapping.setdefault(role, GLOBAL_POOL)
        return cls


def run_task(task_runner_class: Any, config: Any) -> None:
    """Have ``task_runner_class`` train as ``config`` says: in an actor if ``ray.remote`` wraps it, else here."""
    if not hasattr(task_runner_class, "__ray_actor_class__"):
        task_runner_class().run(config)
        return
    import ray

    options = typed_config(adopt_config(config)).ray_init
    controller = get_controller("ray")
    controller.start(options, options.variables)
    try:
        ray.get(task_runner_class.remote().run.remote(config))
    finally:
        controller.stop()
