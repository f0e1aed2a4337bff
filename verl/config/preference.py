"""Configuration of preference training: `DPOConfig` of ``verl dpo``, and `RewardTrainConfig` of ``verl rm``.

Both are that of supervised fine-tuning with other data and a section ``algorithm``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from verl.config.actor import ActorConfig, RefConfig, RefModelConfig
from verl.config.base import Config, Problem, option, peek, read_if, section
from verl.config.engine import FSDPConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.sft import SFTConfig
from verl.config.supervised import ExamplesConfig, SFTOptimConfig, SFTRunConfig

LossType = Literal["sigmoid", "robust", "hinge", "ipo", "sppo", "simpo", "orpo"]
WITHOUT_REFERENCE = ("simpo", "orpo")
"""Losses that read no reference."""


@dataclass
class PairDataConfig(ExamplesConfig):
    """Preference pairs: files, columns, lengths, batches. An example is a pair of two sequences."""

    noun: ClassVar[str] = "pairs"
    sequences: ClassVar[int] = 2

    prompt_key: str = "prompt"
    """Column of prompts: a text, which is one user message, or messages. It may be missing, or is not read, where the
    two sides are whole conversations."""

    chosen_key: str = "chosen"
    """Column of the better response: a text, the messages that follow the prompt, or a whole conversation."""

    rejected_key: str = "rejected"
    """Column of the worse response, in the same form."""

    max_length: int = option(1024, above=1)
    """Tokens of each of the two sequences, the prompt included."""

    truncation: Literal["error", "drop", "left", "right"] = "error"
    """Treatment of a pair one of whose sequences is over ``max_length``: stop before anything starts, leave the pair
    out, or cut both: the beginning of the prompt, the same tokens of both (``left``), or their ends (``right``)."""


@dataclass
class RewardDataConfig(PairDataConfig):
    """Preference pairs of a reward model."""

    margin_key: str = "margin"
    """Column of how much better the chosen response is, in units of the score. It may be missing."""


@dataclass
class DPOAlgorithmConfig(Config):
    """What is learned of a pair."""

    loss_type: LossType = "sigmoid"
    """``sigmoid``: DPO (arXiv:2305.18290); ``robust``: the same for noisy labels (arXiv:2403.00409); ``hinge``
    (arXiv:2305.10425); ``ipo`` (arXiv:2310.12036); ``sppo`` (arXiv:2405.00675); and without a reference ``simpo``
    (arXiv:2405.14734) and ``orpo`` (arXiv:2403.07691). Equations: docs/preference.md."""

    beta: float = option(0.1, above=0)
    """Strength of the constraint to the reference. ``simpo``: scale of the mean log-probabilities, 2 to 10 there;
    ``orpo``: weight of the odds ratio."""

    label_smoothing: float = option(0.0, read_if("loss_type", "sigmoid", "robust"), at_least=0, below=0.5)
    """Share of pairs that are taken to be the wrong way round."""

    simpo_gamma: float = option(0.5, read_if("loss_type", "simpo"), at_least=0)
    """Margin of ``simpo``."""

    rpo_alpha: float = option(0.0, at_least=0)
    """Add this times the mean negative log-likelihood of the chosen response. ``orpo`` has it with 1 unless another
    is given. Source: Pang et al. 2024 (arXiv:2404.19733)."""

    reference_free: bool = False
    """Take log-probabilities in place of log-ratios: the reference is uniform."""

    precompute_ref: bool = False
    """Score all pairs under the reference once, before the first step, and keep their log-probabilities in memory:
    training then runs without the reference's forward passes and weights."""

    @property
    def uses_reference(self) -> bool:
        """Does the loss read a reference?"""
        return not self.reference_free and self.loss_type not in WITHOUT_REFERENCE


@dataclass
class RewardAlgorithmConfig(Config):
    """What is learned of a pair: the Bradley-Terry loss, -log sigmoid(chosen - rejected - margin)."""

    center_rewards_coefficient: float = option(0.0, at_least=0)
    """Add this times the square of the sum of the two scores, which keeps scores near zero. Source: Eisenstein et al.
    2023 (arXiv:2312.09244)."""


@dataclass
class ReferenceConfig(Config):
    """The model that log-ratios are taken to."""

    path: str | None = None
    """Model folder or hub id. Null: the model before its first step, a frozen copy of it; with LoRA the model below its
    adapter, without a copy."""

    param_offload: bool = False
    """Keep its weights in host memory between its forward passes. On CUDA only."""


@dataclass
class PairActorConfig(ActorConfig):
    """The model that learns, with its loss: the section that a worker is given."""

    preference: Config | None = None
    """The section ``algorithm``."""


HELP = """\
usage: python -m verl.trainer.{module} [flags] key=value [key=value ...]
       torchrun --nproc_per_node=N -m verl.trainer.{module} key=value ...

{what}. Most runs need at least
  model.path=DIR                            a model in Hugging Face format
  data.train_files=FILE [data.val_files=FILE]   rows with prompt, chosen and rejected
  trainer.n_gpus_per_node=N [trainer.device=cpu]

flags, as main_ppo has them: --help [KEY ...], --check, --cfg job [--resolve], --config-path DIR, --config-name NAME
All keys: docs/preference.md; one of them in full: --help data.truncation.
"""


@dataclass
class PairConfig(SFTConfig):
    """What both programs have."""

    data: PairDataConfig = section(PairDataConfig)  # type: ignore[assignment]  # pairs in place of single examples
    """Preference pairs: files, columns, lengths, batches."""

    @property
    def actor_rollout_ref(self) -> ActorRolloutRefConfig:
        """The section of the worker that trains."""
        shared = SFTConfig.actor_rollout_ref.fget(self)  # type: ignore[attr-defined]
        values = {item.name: peek(shared.actor, item.name) for item in fields(ActorConfig)}
        # a micro-batch holds whole pairs, of two rows each
        values["ppo_micro_batch_size_per_gpu"] = 2 * self.data.micro_batch_size_per_gpu
        return shared.with_values({"actor": PairActorConfig(**values, preference=self["algorithm"])})

    def as_ppo(self) -> PPOConfig:
        """A configuration of main_ppo with these sections; a pair is a prompt with two responses there."""
        has_reference = {"actor_rollout_ref.actor.use_kl_loss": self.holds_reference}
        tree = super().as_ppo().with_values({"actor_rollout_ref.rollout.n": 2, **has_reference})
        assert isinstance(tree, PPOConfig)
        return tree

    @property
    def holds_reference(self) -> bool:
        """Is there a second model?"""
        return False


@dataclass
class DPOConfig(PairConfig):
    """Everything about one run of direct preference optimization."""

    _schema: ClassVar[str | None] = "dpo"
    config_name: ClassVar[str] = "dpo_trainer"
    _help: ClassVar[str] = HELP.format(module="dpo_trainer", what="Direct preference optimization")

    algorithm: DPOAlgorithmConfig = section(DPOAlgorithmConfig)
    """What is learned of a pair."""

    ref: ReferenceConfig = section(ReferenceConfig)
    """The reference."""

    optim: SFTOptimConfig = section(SFTOptimConfig, lr=1e-6)
    """Optimizer and learning rate."""

    trainer: SFTRunConfig = section(SFTRunConfig, project_name="dpo", default_local_dir="checkpoints/dpo/test")
    """The run: length, hardware, logging, checkpoints."""

    @property
    def actor_rollout_ref(self) -> ActorRolloutRefConfig:
        """The section of the worker that trains, and of its reference."""
        shared = PairConfig.actor_rollout_ref.fget(self)  # type: ignore[attr-defined]
        actor, engine = shared.actor, self.engine
        sharding = {item.name: peek(engine, item.name) for item in fields(FSDPConfig)}
        reference = RefConfig(
            strategy=actor.strategy,
            use_torch_compile=actor.use_torch_compile,
            log_prob_micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
            log_prob_use_dynamic_bsz=actor.use_dynamic_bsz,
            log_prob_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
            model=None if self.ref.path is None else RefModelConfig(path=self.ref.path),
            fsdp_config=FSDPConfig(**{**sharding, "param_offload": self.ref.param_offload}),
            deepspeed=engine.deepspeed,
            ulysses_sequence_parallel_size=engine.ulysses_sequence_parallel_size,
        )
        return shared.with_values({"ref": reference})

    @property
    def holds_reference(self) -> bool:
        """Is there a second model? With LoRA the reference is the model below the adapter."""
        loss = self.algorithm
        return loss.uses_reference and bool(self.ref.path or not (loss.precompute_ref or self.model.lora_rank))

    @property
    def learns_from(self) -> dict[str, str | None]:
        """Key -> file or model folder, besides the data, that decides what is learned."""
        return {"model.path": self.model.path} | ({"ref.path": self.ref.path} if self.ref.path else {})

    def _own_errors(self) -> Iterator[Problem]:
        yield from super()._own_errors()
        loss = self.algorithm
        if loss.reference_free and loss.loss_type == "sppo":
            key = "algorithm.reference_free"
            yield Problem(
                key, f"{key}=true with algorithm.loss_type=sppo, whose targets are log-ratios. Set it to false."
            )

    def _own_warnings(self, is_given: Callable[[str], bool]) -> Iterator[Problem]:
        yield from super()._own_warnings(is_given)
        loss = self.algorithm
        if not loss.uses_reference and (named := [f"ref.{name}" for name in self.ref if is_given(f"ref.{name}")]):
            yield Problem(named[0], f"{', '.join(named)} has no effect: the loss reads no reference")
        if loss.reference_free and loss.loss_type in WITHOUT_REFERENCE:
            key = "algorithm.reference_free"
            yield Problem(key, f"{key}=true has no effect: algorithm.loss_type={loss.loss_type} reads no reference")
        if loss.precompute_ref and not loss.uses_reference:
            key = "algorithm.precompute_ref"
            yield Problem(key, f"{key}=true has no effect: the loss reads no reference")
        for name, types in (("label_smoothing", ("sigmoid", "robust")), ("simpo_gamma", ("simpo",))):
            key = f"algorithm.{name}"
            if is_given(key) and loss.loss_type not in types:
                yield Problem(key, f"{key} has no effect: algorithm.loss_type={loss.loss_type}")
        if loss.precompute_ref and is_given("ref.param_offload") and not self.ref.path:
            yield Problem(
                "ref.param_offload", "ref.param_offload has no effect: algorithm.precompute_ref=true keeps no reference"
            )


@dataclass
class RewardTrainConfig(PairConfig):
    """Everything about one run that trains a reward model."""

    _schema: ClassVar[str | None] = "rm"
    scores: ClassVar[bool] = True
    config_name: ClassVar[str] = "rm_trainer"
    _help: ClassVar[str] = HELP.format(module="rm_trainer", what="Training of a reward model")

    data: RewardDataConfig = section(RewardDataConfig)
    """Preference pairs: files, columns, lengths, batches."""

    algorithm: RewardAlgorithmConfig = section(RewardAlgorithmConfig)
    """What is learned of a pair."""

    trainer: SFTRunConfig = section(SFTRunConfig, project_name="rm", default_local_dir="checkpoints/rm/test")
    """The run: length, hardware, logging, checkpoints."""
