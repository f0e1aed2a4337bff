"""Sections of the runs that learn from given examples: supervised fine-tuning (``sft.py``) and preferences
(``preference.py``).

Keys that ``main_ppo`` has mean the same here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl.config.base import Config, option, read_if, section
from verl.config.data import _as_list
from verl.config.engine import DeepSpeedConfig, FSDPConfig, OptimConfig, Strategy
from verl.config.ppo import ModelConfig
from verl.config.trainer import DeadlinesConfig


@dataclass
class ExamplesConfig(Config):
    """Examples to learn from: files, lengths, batches. What columns they have is in the subclasses."""

    noun: ClassVar[str] = "examples"
    sequences: ClassVar[int] = 1
    """Sequences of an example."""

    train_files: str | list[str] = "~/data/gsm8k/train.parquet"
    """Training examples, named as ``data.train_files`` of main_ppo: files, globs, folders, remote paths, data sets of
    the hub."""

    val_files: str | list[str] | None = None
    """Examples whose loss is measured, named in the same ways. Null, ``''`` or ``[]``: none is."""

    tools_key: str = "tools"
    """Column of the tools that a conversation shows: OpenAI schemas or their JSON text. It may be missing."""

    enable_thinking_key: str = "enable_thinking"
    """Column of the template's argument ``enable_thinking``, a truth value. It may be missing."""

    enable_thinking_default: Literal["none", "true", "false"] = "none"
    """That argument where the column is missing or null; none: the template's own default."""

    train_batch_size: int = option(256, above=0)
    """Examples of one optimizer step, over all ranks."""

    micro_batch_size: int | None = option(None, above=0)
    """Deprecated: examples of one forward, summed over all ranks. Becomes ``micro_batch_size_per_gpu`` when the
    configuration is loaded, and is null afterwards."""

    micro_batch_size_per_gpu: int = option(4, above=0)
    """Examples of one forward and backward on one device, without ``use_dynamic_bsz``. Changes memory and speed, never
    the gradient."""

    use_dynamic_bsz: bool = True
    """Cut micro-batches by ``max_token_len_per_gpu`` instead of by count. False where only a micro-batch size is
    given."""

    max_token_len_per_gpu: int | None = option(None, read_if("use_dynamic_bsz"), above=0)
    """Tokens of one micro-batch on one device. Null: 8192, or those of the longest example if that is more."""

    val_batch_size: int | None = option(None, above=0)
    """Examples measured at a time. Null: ``train_batch_size``. Changes no number."""

    max_length: int = option(1024, above=1)
    """Tokens of an example."""

    ignore_input_ids_mismatch: bool = False
    """Learn also from conversations whose template writes them otherwise than the policy meets them: another header
    before a turn, reasoning left out of earlier turns, tokens joined across a turn's begin. False: such rows are
    refused, with what differs. See docs/sft.md."""

    apply_chat_template_kwargs: dict[str, Any] = option({})
    """Free-form: arguments of the tokenizer's chat template."""

    train_max_samples: int = option(-1, at_least=-1)
    """Use at most that many rows of ``train_files``: sampled with ``seed`` if ``shuffle``, else the first. -1: all."""

    val_max_samples: int = option(-1, at_least=-1)
    """The same for ``val_files``."""

    shuffle: bool = True
    """Draw examples in random order, a new one each epoch."""

    seed: int | None = None
    """Seed of the shuffling. Null: ``trainer.seed``."""

    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Treatment of rows that cannot be learned from: stop before anything starts, or leave them out. Either way they
    are named with file, row and reason."""

    num_workers: int = option(8, at_least=0)
    """Processes that render and tokenize the examples at the start; no more than there are cores."""

    use_shm: bool = False
    """Copy files to /dev/shm before reading."""

    cache_dir: str = "~/.cache/verl/rlhf"
    """Folder for copies of remote and of large files."""

    @property
    def files(self) -> dict[str, list[str]]:
        """Key of the option -> its files, always as a list."""
        return {f"data.{key}": _as_list(self[key]) for key in ("train_files", "val_files")}

    @property
    def has_validation(self) -> bool:
        """Are there validation examples?"""
        return bool(self.files["data.val_files"])

    @property
    def token_budget(self) -> int:
        """Tokens of one micro-batch on one device."""
        return self.max_token_len_per_gpu or max(8192, self.longest)

    @property
    def longest(self) -> int:
        """Tokens of an example, all its sequences together."""
        return self.max_length * self.sequences


@dataclass
class SFTModelConfig(ModelConfig):
    """The model to train."""

    use_remove_padding: bool = True
    """Pack the rows of a micro-batch one behind another in one sequence: no padding runs, and token budgets count real
    tokens. Rows do not see each other, and the gradient is that of padded rows. Source: Krell et al. 2021
    (arXiv:2107.02027)."""

    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer. Null: ``path``."""


@dataclass
class SFTEngineConfig(FSDPConfig):
    """Sharding, offload and number formats, and the engine that does it."""

    strategy: Strategy = "fsdp2"
    """Training engine: fsdp2 (fsdp is another name of it), fsdp1, deepspeed (ZeRO) or local (one process)."""

    ulysses_sequence_parallel_size: int = option(1, above=0)
    """Ranks that share one sequence. Source: DeepSpeed-Ulysses (arXiv:2309.14509)."""

    use_torch_compile: bool = True
    """Compile the head's maths with torch.compile. On CUDA only."""

    deepspeed: DeepSpeedConfig = section(DeepSpeedConfig)
    """ZeRO, with ``strategy=deepspeed``."""


@dataclass
class SFTOptimConfig(OptimConfig):
    """Optimizer and learning-rate schedule; a training step is one optimizer step."""

    lr: float = option(1e-5, above=0)
    """Peak learning rate."""

    lr_warmup_steps_ratio: float = option(0.1, at_least=0, at_most=1)
    """Share of all training steps spent warming up; read only while ``lr_warmup_steps`` is negative."""

    warmup_style: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """Course after the warm-up, as in main_ppo; ``lr_scheduler`` and ``lr_scheduler_type`` are other names of it."""

    betas: list[float] = option([0.9, 0.95], at_least=0, below=1)
    """Decay of AdamW's running means of gradient and squared gradient."""

    clip_grad: float = option(1.0, above=0)
    """Gradient norm above which the gradient is scaled down."""


ExamplesRule = Literal["no_gradient", "constant_loss", "loss_jump", "val_loss", "memory"]


@dataclass
class ExamplesHealthConfig(Config):
    """Limits of the rules that watch a run on examples, each reported once, with advice, when it held in 5 of the last
    10 steps or the trend is clear. Null switches a rule off."""

    constant_loss: float | None = option(0.0, at_least=0)
    """Difference of the loss to that of the step before up to which it counts as constant."""

    loss_jump: float | None = option(3.0, above=1)
    """Factor over its median of the last 50 steps by which the loss may exceed it in one step."""

    val_loss: float | None = option(1.1, above=1)
    """Factor over its least so far by which the validation loss may exceed it."""

    memory: float | None = option(1.0, above=0)
    """Share of the free memory of this machine that the run may take until its last step, as it grew in the last 50
    steps."""


@dataclass
class SFTRunConfig(Config):
    """The run as a whole. Keys that main_ppo has mean the same here."""

    project_name: str = "gsm8k-sft"
    """Name of the project in loggers and in the checkpoint folder."""

    experiment_name: str = "test"
    """Name of the run in loggers and in the checkpoint folder."""

    # follows project and experiment by interpolation in sft_trainer.yaml; this is its value there
    default_local_dir: str = "checkpoints/gsm8k-sft/test"
    """Folder of the run: its command, configuration, environment, log and checkpoints."""

    default_hdfs_dir: str | None = None
    """Second place for checkpoints, as ``trainer.default_hdfs_dir`` of main_ppo. One node only."""

    total_epochs: int = option(
        4, read_if("total_training_steps", "null", remark="decides, over as many epochs as that takes"), above=0
    )
    """Passes over the training examples."""

    total_training_steps: int | None = option(None, above=0)
    """Optimizer steps after which the run ends. Null: from ``total_epochs``."""

    logger: str | list[str] = option(["console", "wandb"])
    """Loggers of metrics, as in main_ppo."""

    tracker_kwargs: dict[str, Any] = option({})
    """Free-form: ``tracker_kwargs.<logger>.<argument>`` is handed to that logger's start call."""

    log_dir: str | None = None
    """Folder of the metrics of the logger ``file``. Null: ``default_local_dir``."""

    profile_interval: list[int] = option([-1, -1])
    """First and last step to profile, in one trace; ``profiler`` says how. Negative: none."""

    log_freq: int = option(1, above=0)
    """Steps between lines of metrics; a step that validates, and the last, has one in any case."""

    progress_bar: bool = True
    """Show a progress bar."""

    seed: int = option(1, at_least=0)
    """Seed of the run: order of examples, dropout, initial weights of an adapter."""

    save_freq: int = -1
    """Steps between checkpoints; the last step is saved too. Negative: none is written."""

    test_freq: int = -1
    """Steps between validations; the last step is validated too. Negative: at the end of each epoch."""

    val_before_train: bool = True
    """Measure the validation loss before the first step."""

    val_only: bool = False
    """Measure the validation loss once and stop."""

    export_model: bool = True
    """At the end write the model to ``huggingface/`` in ``default_local_dir``, in Hugging Face format, an adapter
    merged: main_ppo starts from that folder."""

    max_ckpt_to_keep: int | None = option(None, above=0)
    """Newest checkpoints of this run, restarts included, that are kept. Null: all."""

    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """``auto``: from the newest checkpoint in ``default_local_dir``, if any. ``resume_path``: from
    ``resume_from_path``. ``disable``: from the start."""

    resume_from_path: str | None = None
    """Folder of a checkpoint, ``.../global_step_N``. Read only with ``resume_mode=resume_path``."""

    resume_allow_changes: bool = False
    """Go on although data, model or an option that changes learning is not that of the run that saved the
    checkpoint."""

    del_local_ckpt_after_load: bool = False
    """Delete the checkpoint after resuming from it."""

    max_time: float | None = option(None, above=0)
    """Seconds the run may take; it saves and ends in time, with exit code 75."""

    esi_redundant_time: int = option(0, at_least=0)
    """Seconds before the end of an elastic instance by which the run must have ended."""

    max_restarts: int = option(0, at_least=0)
    """How often a run that lost a process is started again from its newest checkpoint. Not under torchrun, which has
    ``--max-restarts``."""

    restart_wait: float = option(10.0, read_if("max_restarts"), at_least=0)
    """Seconds before the first restart; each further one waits twice as long."""

    nonfinite_tolerance: int = option(3, at_least=1)
    """Stop after this many steps in a row were skipped for a gradient that is not finite."""

    health: ExamplesHealthConfig = section(ExamplesHealthConfig)
    """Limits of the rules that watch a run."""

    halt_on: list[ExamplesRule] = option([])
    """Rules of ``health`` that end the run when they are broken, instead of a warning: its numbers are logged, and the
    newest checkpoint is named. ``no_gradient`` has no limit in ``health``."""

    memory_ledger: bool = False
    """Log the memory of each phase of a step, by rank, and write that of every process to ``memory.jsonl``, as in
    main_ppo."""

    balance_batch: bool = True
    """Divide the examples of a step among data-parallel ranks by work instead of in their order. Changes speed only."""

    device: Literal["cuda", "cpu", "npu"] = "cuda"
    """Device of the model. ``cpu`` uses gloo between processes."""

    nnodes: int = option(1, above=0)
    """Machines that take part. Under torchrun that says how many, and this is not read."""

    n_gpus_per_node: int = option(8, above=0)
    """Processes per machine, one per device. Under torchrun that says how many, and this is not read."""

    controller: Literal["ray", "local"] = "local"
    """Start of the ranks without torchrun: forked processes of this machine, or Ray actors."""

    nccl_timeout: int = option(600, above=0)
    """Seconds a collective between ranks may take before they give up (gloo's timeout too)."""

    ray_wait_register_center_timeout: int = option(300, above=0)
    """Seconds the start of the ranks may take, models not included."""

    worker_timeout: float | None = option(None, above=0)
    """Seconds any call to the ranks may take. Null: as ``deadlines`` say."""

    deadlines: DeadlinesConfig = section(DeadlinesConfig)
    """Limits of the calls to ranks, by class."""

    @property
    def world_size(self) -> int:
        """Processes over all nodes."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def loggers(self) -> list[str]:
        """``logger``, always as a list."""
        return [self.logger] if isinstance(self.logger, str) else list(self.logger)
