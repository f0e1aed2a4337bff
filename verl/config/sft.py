"""The root of the configuration of ``verl sft``: ``verl.trainer.sft_trainer`` and ``verl.trainer.fsdp_sft_trainer``.

Model, engine, optimizer and checkpoints are the policy's of ``main_ppo`` under shorter names, and are checked as those:
`SFTConfig.actor_rollout_ref` is the section that workers are given. What releases of verl call these keys is in
``sft_keys.tsv`` and translated as that of ``main_ppo`` is.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from verl.config.actor import ActorConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.base import Config, Problem, peek, section
from verl.config.data import ClassFileConfig, DataConfig
from verl.config.engine import FSDPConfig, OptimConfig
from verl.config.legacy import Moved, RemovedOption, read_names, rename
from verl.config.ppo import ActorRolloutRefConfig, ModelConfig, PPOConfig, SavedRole
from verl.config.profiler import ProfilePlan, SFTProfilerConfig, profile_plan
from verl.config.rollout import RolloutConfig
from verl.config.supervised import ExamplesConfig, SFTEngineConfig, SFTModelConfig, SFTOptimConfig, SFTRunConfig
from verl.config.trainer import CheckpointConfig, RayInitConfig, TrainerConfig
from verl.config.tree import at_key, flatten, pop_key, put_key, section_at, show

# -- sections ----------------------------------------------------------------------------------------------------------


@dataclass
class SFTDataConfig(ExamplesConfig):
    """Examples to learn from: files, columns, lengths, batches."""

    format: Literal["auto", "messages", "prompt_response"] = "auto"
    """``messages``: conversations, in which all turns of the assistant are learned. ``prompt_response``: two texts, of
    which the second is learned. ``auto``: by the columns that the files have."""

    messages_key: str = "messages"
    """Column of conversations: a list of {role, content, ...}, or the JSON text of one. A turn with ``weight: 0`` or
    ``loss_mask: 0`` is not learned."""

    prompt_key: str = "question"
    """Column of prompts: a text, which is one user message, or messages."""

    response_key: str = "answer"
    """Column of responses, a text. The end-of-sequence token is added and learned too."""

    prompt_dict_keys: list[str] | None = None
    """Where the prompt column holds mappings: the keys to follow, from the outside in."""

    response_dict_keys: list[str] | None = None
    """The same for the response column."""

    truncation: Literal["error", "left", "right"] = "error"
    """Treatment of an example over ``max_length``: stop before anything starts, keep its end (``left``) or its start
    (``right``)."""

    image_key: str = "images"
    """Column of images, each {bytes} or {path}: a text shows them where it says ``<image>``, in order, a message also
    in parts ``{"type": "image"}``. Needs a vision-language model; tokens of images are not learned."""

    custom_cls: ClassFileConfig = section(ClassFileConfig)
    """Data set class of the user's, built as ``cls(parquet_files=, tokenizer=, config=)``; its items have ``input_ids``
    and ``loss_mask``, 1 on tokens to learn."""


# -- the root ----------------------------------------------------------------------------------------------------------

_PPO_KEYS = {
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "data.max_token_len_per_gpu",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "data.micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.fsdp_config": "engine",
    "actor_rollout_ref.actor.deepspeed": "engine.deepspeed",
    "actor_rollout_ref.actor.strategy": "engine.strategy",
    "actor_rollout_ref.actor.use_torch_compile": "engine.use_torch_compile",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
    "actor_rollout_ref.actor.use_remove_padding": "model.use_remove_padding",
    "actor_rollout_ref.actor.grad_clip": "optim.clip_grad",
    "actor_rollout_ref.actor.optim": "optim",
    "actor_rollout_ref.actor.checkpoint": "checkpoint",
    "actor_rollout_ref.model": "model",
    "actor_rollout_ref.ref.model.path": "ref.path",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "ref.param_offload",
}
"""Key or section of main_ppo -> what it is called here; the others have the same name."""

_CHECKED = ("verl.config.checks.engine", "verl.config.checks.support", "verl.config.checks.run")
"""Subjects of main_ppo's checks that hold here too."""

NOT_BUILT = {
    "model.mtp": ("enable", "multi-token prediction"),
    "model.tiled_mlp": ("enabled", "MLPs computed in tiles"),
    "engine.qat": ("enable", "training for quantised weights"),
    "engine.turbo_config": ("", "another training backend's options"),
}
"""Section of verl's releases -> its switch, and the feature, which is not built."""

HELP = """\
usage: python -m verl.trainer.sft_trainer [flags] key=value [key=value ...]
       torchrun --nproc_per_node=N -m verl.trainer.fsdp_sft_trainer key=value ...

Supervised fine-tuning. Most runs need at least
  model.path=DIR                            a model in Hugging Face format
  data.train_files=FILE [data.val_files=FILE]
  data.prompt_key=question data.response_key=answer, or a column `messages`
  trainer.n_gpus_per_node=N [trainer.device=cpu]

flags, as main_ppo has them: --help [KEY ...], --check, --cfg job [--resolve], --config-path DIR, --config-name NAME
All keys: docs/sft.md; one of them in full: --help data.truncation.
"""


@dataclass
class SFTConfig(Config):
    """Everything about one run of supervised fine-tuning."""

    _schema: ClassVar[str | None] = "sft"
    config_name: ClassVar[str] = "sft_trainer"
    _help: ClassVar[str] = HELP

    data: SFTDataConfig = section(SFTDataConfig)
    """Examples: files, columns, lengths, batches."""

    model: SFTModelConfig = section(SFTModelConfig)
    """The model to train."""

    engine: SFTEngineConfig = section(SFTEngineConfig)
    """Sharding and number formats."""

    optim: SFTOptimConfig = section(SFTOptimConfig)
    """Optimizer and learning rate."""

    checkpoint: CheckpointConfig = section(CheckpointConfig)
    """Contents of a checkpoint."""

    trainer: SFTRunConfig = section(SFTRunConfig)
    """The run: length, hardware, logging, checkpoints."""

    ray_init: RayInitConfig = section(RayInitConfig)
    """Start of Ray. Read only with ``trainer.controller=ray``."""

    profiler: SFTProfilerConfig = section(SFTProfilerConfig)
    """Form of the traces of profiled steps."""

    @property
    def profile_plan(self) -> ProfilePlan:
        """The traces that the run makes."""
        first, last = self.trainer.profile_interval
        steps = list(range(max(first, 1), last + 1))
        return profile_plan(steps, True, self.profiler, {"actor": self.profiler})

    # what the parts that serve main_ppo too ask a configuration for -----------------------------------------------

    uses_critic: ClassVar[bool] = False
    scores: ClassVar[bool] = False
    """Whether the model gives a text one score, in place of log-probabilities of its tokens."""

    @property
    def actor_rollout_ref(self) -> ActorRolloutRefConfig:
        """The section of the worker that trains: this model as main_ppo's policy."""
        data, engine, model = self.data, self.engine, self.model
        actor = ActorConfig(
            strategy=engine.strategy,
            ppo_micro_batch_size_per_gpu=data.micro_batch_size_per_gpu,
            use_dynamic_bsz=data.use_dynamic_bsz,
            ppo_max_token_len_per_gpu=data.token_budget,
            use_torch_compile=engine.use_torch_compile,
            ulysses_sequence_parallel_size=engine.ulysses_sequence_parallel_size,
            use_remove_padding=model.use_remove_padding,
            grad_clip=self.optim.clip_grad,
            checkpoint=self.checkpoint,
            optim=_as(OptimConfig, self.optim),
            fsdp_config=_as(FSDPConfig, engine),
            deepspeed=engine.deepspeed,
        )
        return ActorRolloutRefConfig(
            actor=actor,
            model=_as(ModelConfig, model),
            rollout=RolloutConfig(name="hf", response_length=data.max_length, prompt_length=1, temperature=1.0),
            nccl_timeout=self.trainer.nccl_timeout,
        )

    @property
    def saved_roles(self) -> dict[str, SavedRole]:
        """Folder of a checkpoint -> how its role is saved."""
        return {"actor": SavedRole(self.checkpoint, self.model.lora_rank > 0, self.trainer.max_ckpt_to_keep)}

    @property
    def learns_from(self) -> dict[str, str | None]:
        """Key -> file or model folder, besides the data, that decides what is learned."""
        return {"model.path": self.model.path}

    # checks ---------------------------------------------------------------------------------------------------------

    @classmethod
    def is_old_name(cls, key: str) -> bool:
        """Is this a name that a release of verl has for an option, or for something that is not built?"""
        sections = [key[:at] for at, sign in enumerate(key) if sign == "."]
        tools = (f"profiler.tool_config.{tool}" for tool in ("npu", "nsys", "torch", "precision_debugger"))
        known = (*old_names(), *NOT_BUILT, "data.multiturn.enable", *tools)
        return any(name in known for name in (key, *sections))

    @classmethod
    def rewrite(cls, tree: dict, given: set[str], problems: list[Problem], resolved: Callable[[str], Any]) -> list[str]:
        """Translate names of verl's releases in the unresolved ``tree``, in place; returns a sentence for each."""
        messages = []
        if at_key(tree, "data.multiturn.enable") is not None:  # before the sections' other keys move away
            _, says = pop_key(tree, "data.multiturn.enable")
            given.discard("data.multiturn.enable")
            if "data.format" not in given:
                put_key(tree, "data.format", "messages" if str(says).lower() == "true" else "prompt_response")
                given.add("data.format")
        if at_key(tree, "optim.lr_scheduler") is not None:  # where a release has both, this one is read
            pop_key(tree, "optim.lr_scheduler_type")
            given.discard("optim.lr_scheduler_type")
        if not at_key(tree, "model.lora.rank"):  # the other keys of an adapter that nobody asks for
            pop_key(tree, "model.lora")
        if not at_key(tree, "optim.override_optimizer_config"):  # an option of main_ppo's that is removed here
            pop_key(tree, "optim.override_optimizer_config")
        tools = section_at(tree, "profiler.tool_config")
        for key in [key for key, _ in flatten(tools) if key.endswith("_target_")]:  # of tools that are not here too
            pop_key(tools, key)
            given.discard(f"profiler.tool_config.{key}")
        for place, (switch, feature) in NOT_BUILT.items():
            is_there, values = pop_key(tree, place)
            given -= {key for key in given if key == place or key.startswith(f"{place}.")}
            is_on = isinstance(values, dict) and str(values.get(switch)).lower() == "true"
            if is_on:
                key = f"{place}.{switch}=true"
                problems.append(Problem(place, f"{key} asks for {feature}: that is not built. Leave it out."))
            elif is_there:
                messages.append(f"{place} has no effect: {feature} is not built, and not asked for")
        messages += rename(tree, given, problems, resolved, old_names())
        _set_micro_batches(tree, given, problems)
        return messages

    def find(self, severity: Literal["error", "warning"], is_given: Callable[[str], bool]) -> Iterator[Problem]:
        """Yield what contradicts, or has no effect; what main_ppo says of the same options, under their names here."""
        from verl.config.checks import VALIDATORS

        yield from self._own_errors() if severity == "error" else self._own_warnings(is_given)
        tree = self.as_ppo()
        arguments = {"is_given": lambda key: is_given(_name_here(key))}
        for check in VALIDATORS:
            if check.severity != severity or check.subject not in _CHECKED:
                continue
            for found in check.function(tree, *(arguments[name] for name in check.arguments)):
                text = _with_names_here(found.text)
                if not any(word in text for word in ("actor_rollout_ref.", "rollout.", "critic", "reward_")):
                    yield Problem(_name_here(found.key), text, tuple(map(_name_here, found.also)))

    def missing_files(self) -> list[Problem]:
        """Files that the run reads and that are not there."""
        from verl.config.checks.run import missing_files

        return self.here(missing_files(self.as_ppo()))

    def _own_errors(self) -> Iterator[Problem]:
        data, trainer = self.data, self.trainer
        if self.engine.strategy == "megatron":
            text = "is main_ppo's: learning from examples is not built on megatron-core. Use fsdp2 or deepspeed."
            yield Problem("engine.strategy", f"engine.strategy=megatron {text}")
        ranks = self.engine.ulysses_sequence_parallel_size
        budget = data.token_budget * ranks
        if data.use_dynamic_bsz and budget < data.longest:
            key = "data.max_token_len_per_gpu"
            yield Problem(
                key,
                f"{key}={data.max_token_len_per_gpu} times {ranks} ranks to a sequence is less than data.max_length="
                f"{data.max_length}{' for each of a pair' if data.sequences > 1 else ''}: such an example fits no "
                "micro-batch. Raise the first or lower the second.",
            )
        if trainer.controller == "local" and trainer.nnodes > 1:
            yield Problem(
                "trainer.controller",
                f"trainer.controller=local with trainer.nnodes={trainer.nnodes}: forked processes are on one machine. "
                "Start it with torchrun on every node, or set trainer.controller=ray.",
            )
        interval, tool = trainer.profile_interval, self.profiler.tool
        if len(interval) != 2 or (max(interval) > 0 and not 1 <= interval[0] <= interval[1]):
            text = f"trainer.profile_interval={interval} must be the first and the last step to profile, or [-1,-1]."
            yield Problem("trainer.profile_interval", text)
        elif interval[1] > 0 and tool in ("nsys", "npu"):
            why = "nothing here starts the ranks under nsys" if tool == "nsys" else "Ascend devices are not supported"
            yield Problem("profiler.tool", f"profiler.tool={tool}: {why}. Set torch or torch_memory.")
        if trainer.val_only and not data.has_validation:
            yield Problem("trainer.val_only", "trainer.val_only=true without data.val_files: name files to measure.")

    def _own_warnings(self, is_given: Callable[[str], bool]) -> Iterator[Problem]:
        data = self.data
        if not data.has_validation:
            keys = ["trainer.test_freq", "trainer.val_before_train", "data.val_batch_size", "data.val_max_samples"]
            if named := [key for key in keys if is_given(key)]:
                yield Problem(named[0], f"{', '.join(named)} without data.val_files: nothing is validated")
        if data.use_dynamic_bsz and is_given("data.micro_batch_size_per_gpu"):
            key = "data.micro_batch_size_per_gpu"
            yield Problem(key, f"{key} has no effect: data.use_dynamic_bsz=true cuts micro-batches by tokens")
        if data.get("format") == "messages":
            keys = ["data.prompt_key", "data.response_key", "data.prompt_dict_keys", "data.response_dict_keys"]
            if named := [key for key in keys if is_given(key)]:
                yield Problem(named[0], f"{', '.join(named)} has no effect: data.format=messages")
        if self.trainer.controller == "local" and (named := [key for key in _RAY_KEYS if is_given(key)]):
            yield Problem(named[0], f"{', '.join(named)} has no effect: trainer.controller=local")

    def as_ppo(self) -> PPOConfig:
        """A configuration of main_ppo with these sections, for its checks and estimates."""
        names = {item.name for item in fields(TrainerConfig)} & {item.name for item in fields(self.trainer)}
        trainer = TrainerConfig(**{name: peek(self.trainer, name) for name in names})
        batch = self.data.train_batch_size
        files = DataConfig(
            train_files=self.data.train_files,
            val_files=self.data.val_files,
            train_batch_size=batch,
            max_prompt_length=1,
        )
        # an estimator without a critic
        algorithm = AlgorithmConfig(adv_estimator="grpo")
        shared = self.actor_rollout_ref
        changed = shared.with_values({"actor": shared.actor.with_values({"ppo_mini_batch_size": batch})})
        assert isinstance(changed, ActorRolloutRefConfig)
        return PPOConfig(actor_rollout_ref=changed, trainer=trainer, data=files, algorithm=algorithm)

    def here(self, problems: Iterable[Problem]) -> list[Problem]:
        """Problems of main_ppo's checks, with the names that options have here."""
        return [Problem(_name_here(one.key), _with_names_here(one.text)) for one in problems]

    @staticmethod
    def words_here(text: str) -> str:
        """A text with the names that options of main_ppo have here."""
        return _with_names_here(text)


_RAY_KEYS = tuple(f"ray_init.{item.name}" for item in fields(RayInitConfig) if item.name not in ("env", "runtime_env"))


def _as(cls: type[Config], values: Config) -> Any:
    """The section ``cls`` with the values of a subclass's."""
    return cls(**{item.name: peek(values, item.name) for item in fields(cls)})


@lru_cache(maxsize=1)
def old_names() -> dict[str, Moved | RemovedOption]:
    """Names of verl's releases, of ``sft_keys.tsv``."""
    _, moved, removed = read_names(Path(__file__).with_name("sft_keys.tsv"))
    names: dict[str, Moved | RemovedOption] = {entry.old: entry for entry in moved}
    return names | {entry.old: entry for entry in removed}


def _set_micro_batches(tree: dict, given: set[str], problems: list[Problem]) -> None:
    """A micro-batch size that counts all ranks becomes one per rank; one that is given alone decides."""
    key = "data.micro_batch_size"
    total = at_key(tree, key)
    if isinstance(total, int) and "data.micro_batch_size_per_gpu" not in given:
        sizes = [at_key(tree, name) for name in ("trainer.nnodes", "trainer.n_gpus_per_node")]
        sizes.append(at_key(tree, "engine.ulysses_sequence_parallel_size"))
        if all(isinstance(size, int) for size in sizes):
            ranks = max(1, sizes[0] * sizes[1] // sizes[2])
            if total % ranks:
                text = f"{key}={total} does not spread evenly over {ranks} data-parallel ranks. Set {key}_per_gpu."
                problems.append(Problem(key, text))
            else:
                put_key(tree, f"{key}_per_gpu", total // ranks)
                given.add(f"{key}_per_gpu")
    if total is not None:
        put_key(tree, key, None)
        given.discard(key)
    if f"{key}_per_gpu" in given and not given & {"data.use_dynamic_bsz", "data.max_token_len_per_gpu"}:
        put_key(tree, "data.use_dynamic_bsz", False)


def _with_names_here(text: str) -> str:
    for theirs, ours in _PPO_KEYS.items():
        text = text.replace(theirs, ours)
    return text


def _name_here(key: str) -> str:
    """What a key of main_ppo is called here."""
    for theirs, ours in _PPO_KEYS.items():
        if key == theirs or key.startswith(f"{theirs}."):
            return ours + key[len(theirs) :]
    return key


def plan(config: "SFTConfig") -> str:
    """The batch arithmetic in words, for ``--check``."""
    data, ranks = config.data, config.trainer.world_size // config.engine.ulysses_sequence_parallel_size
    by = f"{data.token_budget:,} tokens" if data.use_dynamic_bsz else f"{data.micro_batch_size_per_gpu} {data.noun}"
    return (
        f"one optimizer step: {data.train_batch_size} {data.noun} of up to {data.longest} tokens over {ranks} "
        f"data-parallel ranks, in micro-batches of up to {by}; engine {show(config.engine.strategy)}"
    )
