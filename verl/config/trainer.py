"""The run: length, hardware, logging, checkpoints, profiling."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl.config.base import Config, option, read_if, section
from verl.config.profiler import ProfilerConfig

__all__ = ["ProfilerConfig"]  # scripts look for it here

CheckpointContent = Literal["model", "optimizer", "extra", "hf_model"]


@dataclass
class CheckpointConfig(Config):
    """Contents of a checkpoint."""

    _target_: ClassVar[str] = "verl.trainer.config.CheckpointConfig"

    save_contents: list[CheckpointContent] = option(["model", "optimizer", "extra"])
    """Parts to write: model and optimizer shards, extra (schedule and random state), hf_model (whole weights in
    Hugging Face format)."""

    load_contents: list[CheckpointContent] = option(["model", "optimizer", "extra"])
    """Parts to read on resume; follows ``save_contents``. ``hf_model`` counts only without ``model``: weights then come
    from the Hugging Face folder, in the precision saved there."""

    async_save: bool = False
    """Copy model, optimizer and extra to host memory and write them while training goes on; hf_model is written before.
    The step counts as saved when all is on the disk; the next save and the end of the run wait for that."""


@dataclass
class NPUProfileConfig(Config):
    """Ascend profiler, which is not built: nothing reads this."""

    options: dict[str, Any] = option(
        {
            "save_path": "./profiler_data",
            "roles": ["all"],
            "level": "level1",
            "with_memory": False,
            "record_shapes": False,
            "with_npu": True,
            "with_cpu": True,
            "with_module": False,
            "with_stack": False,
            "analysis": True,
        },
        never_read="the Ascend profiler is not built",
    )
    """Free-form, handed to the profiler: save_path (folder), roles (names or ["all"]), level (level0..2, level_none),
    with_memory, record_shapes, with_npu, with_cpu, with_module, with_stack (what to record), analysis (parse the
    trace at the end)."""


HealthRule = Literal[
    "groups_without_signal", "identical_responses", "no_gradient", "constant_reward", "truncation", "entropy",
    "length_drift", "kl_jump", "mismatch", "memory", "episode_limits", "failed_episodes",
]  # fmt: skip


@dataclass
class HealthConfig(Config):
    """Limits of the rules that watch a run, each reported once, with advice, when it held in 5 of the last 10 steps or
    the trend is clear. Null switches a rule off. See docs/observe.md."""

    groups_without_signal: float | None = option(0.9, above=0, at_most=1)
    """Share of the groups in which every advantage is 0, because all rewards are equal."""

    identical_responses: float | None = option(0.9, above=0, at_most=1)
    """Share of the responses that equal another to the same prompt, token by token."""

    constant_reward: float | None = option(0.0, at_least=0)
    """Largest less smallest score of a batch, and difference of its mean to that of the step before, up to which the
    reward counts as constant."""

    truncation: float | None = option(0.5, above=0, at_most=1)
    """Share of the responses that are cut at a length limit. Not looked at with ``rollout.ignore_eos`` and for agents,
    whose limits are named."""

    entropy: float | None = option(0.01, above=0)
    """Nats a token below which the policy no longer explores; a fall to a tenth within 50 steps counts too."""

    length_drift: float | None = option(3.0, above=1)
    """Factor by which the mean length of responses may change within 50 steps."""

    kl_jump: float | None = option(10.0, above=1)
    """Factor over its median of the last 50 steps by which a KL may exceed it in one step, of the update or to the
    reference."""

    memory: float | None = option(1.0, above=0)
    """Share of the free memory of this machine that the run may take until its last step, as it grew in the last 50
    steps."""


@dataclass
class DeadlinesConfig(Config):
    """Seconds without progress after which a call to the workers ends the run, with the name of the worker.

    Progress is a step of the rollout engine, or a micro-batch; where a call reports none, they count from its begin.
    Null: twenty times the longest such call so far, 1800 at least, 7200 for load, save and the first call of a kind. 0:
    no limit.
    """

    load: float | None = option(None, at_least=0)
    """Load models and checkpoints."""

    generate: float | None = option(None, at_least=0)
    """Generate responses with ``rollout.mode=sync``; those of agent loops have ``rollout.stall_timeout_s`` and
    ``env.episode_timeout``."""

    score: float | None = option(None, at_least=0)
    """Log-probabilities, values, scores of a reward model."""

    update: float | None = option(None, at_least=0)
    """Updates of the actor and the critic."""

    sync: float | None = option(None, at_least=0)
    """Weights for a rollout engine on devices of its own, or for servers."""

    save: float | None = option(None, at_least=0)
    """Save checkpoints, and wait for those saved in the background."""

    other: float | None = option(None, at_least=0)
    """All other calls, methods of a user's worker for example."""


@dataclass
class TrainerConfig(Config):
    """The run as a whole."""

    npu_profile: NPUProfileConfig = section(NPUProfileConfig)
    """Ascend profiler."""

    balance_batch: bool = True
    """Divide the rows of each mini-batch among data-parallel ranks by work, tokens and attention, instead of in their
    order. Changes speed only."""

    total_epochs: int = option(
        30, read_if("total_training_steps", "null", remark="decides, over as many epochs as that takes"), above=0
    )
    """Passes over the training prompts."""

    total_training_steps: int | None = option(None, above=0)
    """Training steps after which the run ends. Null: from ``total_epochs``."""

    profile_steps: list[int] | None = None
    """Training steps to profile, from 1 on; ``global_profiler`` says how. See docs/observe.md."""

    profile_continuous_steps: bool = option(False, read_if("profile_steps", remark="profiles no step"))
    """Write adjacent profiled steps into one trace."""

    controller_nsight_options: dict[str, Any] = option(
        {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"},
        never_read="the driver is the process that you start, which only you can start under nsys",
    )
    """Has no effect: the driver is the process that you start, under ``nsys profile`` if its trace is wanted too."""

    worker_nsight_options: dict[str, Any] = option(
        {
            "trace": "cuda,nvtx,cublas,ucx",
            "cuda-memory-usage": "true",
            "cuda-graph-trace": "graph",
            "capture-range": "cudaProfilerApi",
            "capture-range-end": None,
            "kill": "none",
        },
        read_if("trainer.profile_steps", remark="profiles no step"),
        read_if("global_profiler.tool", "nsys", remark="is another tool"),
    )
    """Free-form, with ``global_profiler.tool=nsys``: options of ``nsys profile`` for Ray workers: trace (APIs),
    cuda-memory-usage ("true"/"false" as text), cuda-graph-trace (graph or node), capture-range (when to record; leave
    it), capture-range-end (what happens at its end; null: one file for each trace), kill (signal sent at the end)."""

    project_name: str = "verl_examples"
    """Name of the project in loggers and in the checkpoint folder."""

    experiment_name: str = "gsm8k"
    """Name of the run in loggers and in the checkpoint folder."""

    logger: str | list[str] = option(["console", "wandb"])
    """Loggers of metrics: any of console, file (JSON lines), tensorboard, wandb, mlflow, swanlab, clearml, trackio,
    aim, and those a module of yours registers. See docs/observe.md."""

    log_val_generations: int = option(0, at_least=0)
    """Validation samples to send to the loggers, each time."""

    rollout_data_dir: str | None = None
    """Folder for training samples, one JSONL file per step. Null: none are kept."""

    rollout_data_tokens: int = option(16_384, at_least=0)
    """Response tokens a step that are written to ``rollout_data_dir`` one by one, for `verl view`: text, log-probs of
    trainer and rollout, advantage, mask. Whole groups, the first of the batch, until so many are reached. As many of
    each validation, to ``validation_data_dir``; log-probs of the rollout with ``rollout.calculate_log_probs``. 0:
    none."""

    validation_data_dir: str | None = None
    """Folder for validation samples, one JSONL file per validation. Null: none are kept."""

    log_dir: str | None = None
    """Folder of log files: the metrics of the logger ``file``. Null: ``default_local_dir``."""

    nnodes: int = option(1, above=0)
    """Machines that take part."""

    n_gpus_per_node: int = option(8, above=0)
    """Worker processes per machine: one per GPU, or CPU processes with ``device=cpu``."""

    save_freq: int = -1
    """Training steps between checkpoints; the last step is saved too. Negative: none is written."""

    max_time: float | None = option(None, above=0)
    """Seconds the run may take, start included. It saves and ends before another step would not fit any more, with exit
    code 75: the same command goes on. Also with ``save_freq=-1``. Null: no limit."""

    esi_redundant_time: int = option(0, at_least=0)
    """Seconds before the end of an elastic instance by which the run must have saved and ended, as by ``max_time``. The
    environment says when that is: ``MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP`` or
    ``SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP``."""

    checkpoint_callback_class: str | None = None
    """Class whose ``on_save(trainer, global_step, checkpoint_dir, ...)`` the driver calls after each checkpoint, once
    it is complete: ``package.module.ClassName`` or ``path/to/file.py:ClassName``, of
    ``verl.trainer.ppo.checkpoint_callback.CheckpointCallback``. Its exceptions end the run. Null: none."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """``auto``: from the newest checkpoint in ``default_local_dir``, if any. ``resume_path``: from
    ``resume_from_path``. ``disable``: from the start."""

    # asked for a step's folder, not a run's: the newest of a run is what ``auto`` takes
    resume_from_path: str | None = None
    """Folder of a checkpoint, ``.../global_step_N``. Read only with ``resume_mode=resume_path``."""

    max_restarts: int = option(0, at_least=0)
    """How often a run that lost a process (a worker, a rollout engine or its driver: exit codes 5 and 7) is started
    again, from its newest checkpoint. A step that fails a second time ends it."""

    restart_wait: float = option(10.0, read_if("max_restarts"), at_least=0)
    """Seconds before the first restart; each further one waits twice as long, at most ten minutes."""

    resume_allow_changes: bool = False
    """Go on although the training data (by content), the model or an option that changes learning, a learning rate or
    batch size for example, is not that of the run that saved the checkpoint. False: such a run is refused; what else
    differs is listed."""

    val_before_train: bool = True
    """Validate before the first step."""

    val_only: bool = False
    """Validate once and stop."""

    test_freq: int = -1
    """Training steps between validations; the last step is validated too. Negative: never."""

    critic_warmup: int = option(0, at_least=0)
    """Training steps in which only the critic learns."""

    default_hdfs_dir: str | None = None
    """Second place for checkpoints, most often in a remote store (``hdfs://``, ``s3://``, ``gs://``, ...): each is
    copied there when it is complete, and a run resumes from it where it holds a newer one than ``default_local_dir``.
    One node only."""

    del_local_ckpt_after_load: bool = False
    """Delete the checkpoint after resuming from it. A run that ends before it has saved a new one cannot resume."""

    # follows project and experiment by interpolation in ppo_trainer.yaml; this is its value there
    default_local_dir: str = "checkpoints/verl_examples/gsm8k"
    """Folder of the run: its command, configuration, environment, log and checkpoints; by default named after project
    and experiment."""

    max_actor_ckpt_to_keep: int | None = option(None, above=0)
    """Newest actor checkpoints of this run, restarts included, that are kept. Null: all."""

    max_critic_ckpt_to_keep: int | None = option(None, above=0)
    """Newest critic checkpoints of this run, restarts included, that are kept. Null: all."""

    ray_wait_register_center_timeout: int = option(300, above=0)
    """Seconds the start of the workers may take, models not included."""

    device: Literal["cuda", "cpu", "npu"] = "cuda"
    """Device of the models. ``cpu`` uses gloo between processes."""

    use_legacy_worker_impl: Literal["auto", "enable", "disable"] = option(
        "auto", never_read="there is one implementation"
    )
    """There is one implementation of the workers: all values do the same."""

    controller: Literal["ray", "local"] = "ray"
    """Start and calls of workers: Ray actors, or (``local``) this process for one worker and forked processes
    for several."""

    seed: int = option(1, at_least=0)
    """Seed of the run. Every sample's seed is a function of it, the step, the prompt and the sample's number."""

    tracker_kwargs: dict[str, Any] = option({})
    """Free-form: ``tracker_kwargs.<logger>.<argument>`` is handed to that logger's start call. ``console.format=line``:
    all metrics of a step on one line."""

    tracker_timeout: float = option(60.0, above=0)
    """Seconds that the loggers, other than console and file, get at the end of the run to send what waits; 15 at most
    after an error."""

    show_samples: int | None = option(None, at_least=0)
    """Training steps between tables of the best and the worst samples in the terminal, the first after step 1. 0: none.
    Null: 10 on a terminal, and none where the output is a file or a pipe."""

    progress_bar: bool = True
    """Show a progress bar."""

    dry_run: bool = False
    """Say what the run would do, what would go wrong, and what memory it would take, and stop: as
    ``python -m verl.doctor``. Nothing is started. See docs/doctor.md."""

    log_freq: int = option(1, above=0)
    """Training steps between lines of metrics; a step that validates, and the last, has one in any case."""

    memory_ledger: bool = False
    """Show what memory each phase of the first step took, log ``memory/<phase>_gb`` at every step, and write the memory
    of every process to ``memory.jsonl`` in ``default_local_dir``."""

    unread_keys: Literal["error", "warn", "off"] = "error"
    """Treatment of options that were set and that nothing has read once the policy was updated for the first time.
    Options read at a later event, a save for example, count as read."""

    weight_sync_freq: int = option(1, above=0)
    """Training steps between two syncs of the weights to the rollout engine. 1: every step. Above 1 the responses in
    between come from older weights, while old log-probs stay those of the newest (``algorithm.rollout_correction``
    measures and weighs the difference); validation, and the first step after a resume, always sync. Needs
    ``rollout.free_cache_engine=false``, ``rollout.mode=sync`` and ``hybrid_engine``."""

    dump_steps: list[int] = option([])
    """Training steps to write as a whole, with rows and weights, to ``steps/step_N`` in ``default_local_dir``;
    `verl replay` computes such a step again. A step that fails, or has no finite gradient, is written in any case."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A row with NaN or infinity among its log-probs, values or weights of the loss: stop the run, naming sample and
    token, or leave the row out of the update and count it as ``training/nonfinite_rows``. Rewards are those of
    ``reward_model.on_error``, gradients of ``nonfinite_tolerance``."""

    nonfinite_tolerance: int = option(3, at_least=1)
    """Stop after this many training steps in a row were skipped for a gradient that is not finite."""

    health: HealthConfig = section(HealthConfig)
    """Limits of the rules that watch a run."""

    halt_on: list[HealthRule] = option([])
    """Rules of ``health`` that end the run when they are broken, instead of a warning: its numbers are logged, and the
    newest checkpoint is named. ``no_gradient``, ``mismatch`` (over ``rollout.mismatch_threshold``), ``episode_limits``
    and ``failed_episodes`` (of more than half of the episodes) have no limit in ``health``."""

    worker_timeout: float | None = option(None, above=0)
    """Seconds any call to the workers may take before the run stops, whether or not it makes progress. Null: as
    ``deadlines`` say. No effect on one local worker."""

    deadlines: DeadlinesConfig = section(DeadlinesConfig)
    """Limits of the calls to workers, by class. No effect on one local worker."""

    @property
    def world_size(self) -> int:
        """Worker processes over all nodes."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def loggers(self) -> list[str]:
        """``logger``, always as a list."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)


@dataclass
class RayInitConfig(Config):
    """Start of Ray. Read only with ``trainer.controller=ray``."""

    num_cpus: int | None = option(None, above=0)
    """CPUs Ray may use. Null: all; under SLURM give the number of the allocation."""

    timeline_json_file: str | None = None
    """File for Ray's timeline, written at the end of the run."""

    object_store_memory_mb: int | None = option(None, at_least=75)
    """Shared memory for Ray's objects, MiB. Null: room for two batches of a step, 256 at least, half of the free
    shared memory at most. A cluster that the run joins has its own."""

    env: dict[str, Any] = option({})
    """Free-form: environment variables of the workers."""

    runtime_env: dict[str, Any] = option({})
    """Free-form: Ray's runtime environment of the workers: env_vars (as ``env``, which goes before it), working_dir,
    py_modules, pip, ..."""

    include_dashboard: bool = False
    """Start Ray's dashboard."""

    @property
    def variables(self) -> dict[str, Any]:
        """Environment variables of the workers; ``env`` goes before ``runtime_env.env_vars``."""
        # env last: it goes before what the runtime environment says
        return {**(self.runtime_env.get("env_vars") or {}), **self.env}
