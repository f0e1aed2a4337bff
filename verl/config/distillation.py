"""On-policy distillation: teachers, and how the policy learns from them."""

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.actor import FrozenModelConfig
from verl.config.base import Config, Problem, option, plain, read_if, section
from verl.config.tree import build

DistillationMode = Literal[
    "forward_kl_topk", "reverse_kl_topk", "jsd_topk", "forward_kl_full", "reverse_kl_full", "jsd_full",
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3",
    "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+",
]  # fmt: skip
"""What the policy minimises: a divergence over the teacher's top-k tokens or over the whole vocabulary, or an estimate
of KL(policy || teacher) from the sampled tokens."""

_PG = read_if("use_policy_gradient")


@dataclass
class DistillationLossConfig(Config):
    """The loss that draws the policy to its teacher, on the policy's own responses."""

    loss_mode: DistillationMode = "k3"
    """forward_kl_topk, reverse_kl_topk, jsd_topk: KL(teacher || policy), KL(policy || teacher) or the generalised
    Jensen-Shannon divergence (Agarwal et al. 2023, arXiv:2306.13649) over the teacher's ``topk`` likeliest tokens.
    forward_kl_full, reverse_kl_full, jsd_full: the same over the whole vocabulary; nothing travels, and the teacher
    runs in the update. k1, k2, k3 and the others: estimates of KL(policy || teacher) from the sampled tokens alone, as
    ``actor.kl_loss_type`` has them."""

    topk: int = option(32, above=0)
    """Tokens of the teacher's distribution that ..._topk compares; of each response token 8 bytes times this travel."""

    topk_tail: bool = True
    """..._topk: count all tokens outside of the teacher's top k as one token more, on both sides, so that the sum is a
    divergence, never above that over the vocabulary. False: leave them out, as verl does; for forward_kl_topk."""

    jsd_beta: float = option(0.5, above=0, below=1)
    """jsd_...: weight of the teacher in the mixture. Near 0 it behaves as the forward KL, near 1 as the reverse."""

    use_task_rewards: bool = True
    """Add the loss to that of the task's rewards. False: it is the only one, but for ``actor.entropy_coeff`` and
    ``actor.sft_loss_coef``; rewards are still measured."""

    distillation_loss_coef: float = option(1.0, above=0)
    """Factor of this loss."""

    loss_max_clamp: float | None = option(None, above=0)
    """Largest size of a token's loss; beyond it has no gradient. Null: no bound."""

    log_prob_min_clamp: float | None = option(None, below=0)
    """Log-probs below are taken for this, the policy's and the teacher's; then without gradient. Null: no bound."""

    use_policy_gradient: bool = False
    """Take minus the loss of each token as its advantage, and follow ``policy_loss_mode``: the gradient of
    KL(policy || teacher) where ``loss_mode=k1``. False: the gradient of the loss itself."""

    policy_loss_mode: str = option("vanilla", _PG)
    """Policy loss of that, as ``actor.policy_loss.loss_mode``."""

    clip_ratio: float = option(0.2, _PG, above=0)
    """Its clip range on both sides, as ``actor.clip_ratio``."""

    clip_ratio_low: float | None = option(None, _PG, above=0)
    """Lower side. Null: ``clip_ratio``."""

    clip_ratio_high: float | None = option(None, _PG, above=0)
    """Upper side. Null: ``clip_ratio``."""

    @property
    def beta(self) -> float:
        """1: KL(policy || teacher); 0: KL(teacher || policy); between: the Jensen-Shannon divergence."""
        kind = self.loss_mode.partition("_")[0]
        return {"forward": 0.0, "reverse": 1.0}.get(kind, self.jsd_beta)

    @property
    def is_topk(self) -> bool:
        """Does it compare the teacher's likeliest tokens?"""
        return self.loss_mode.endswith("_topk")

    @property
    def is_full(self) -> bool:
        """Does it compare whole distributions, in the update?"""
        return self.loss_mode.endswith("_full")


@dataclass
class TeacherConfig(FrozenModelConfig):
    """The engine of the teachers, which take turns on the devices of training."""


@dataclass
class TeacherModelConfig(Config):
    """One teacher: an entry of ``distillation.teacher_models``."""

    key: str | None = None
    """Rows of this value in ``distillation.teacher_key`` are its own. Null: the only teacher has all rows."""

    model_path: str | None = None
    """Folder or hub id of a causal language model with the policy's vocabulary."""

    num_replicas: int = 0
    """Has no effect: each teacher is sharded over all devices of training."""

    inference: dict[str, Any] = option({})
    """Has no effect: teachers run in the training engine of ``distillation.teacher``."""


@dataclass
class DistillationConfig(Config):
    """Learning from teachers on the policy's own responses. Sources: Agarwal et al. 2023 (arXiv:2306.13649), Gu et al.
    2023 (arXiv:2306.08543)."""

    enabled: bool = False
    """Ask teachers about every response, and learn from their distributions."""

    teacher_models: dict[str, Any] = option({})
    """Teachers by a name of yours: ``distillation.teacher_models.<name>.model_path`` and, with several, ``.key``, the
    fields of ``verl.config.distillation.TeacherModelConfig``."""

    teacher_key: str = "data_source"
    """Column of the data whose value chooses the teacher of a row, where there are several."""

    temperature: float | None = option(None, above=0)
    """The teachers' logits are divided by this. Null: by ``actor_rollout_ref.rollout.temperature``, as the policy's."""

    teacher: TeacherConfig = section(TeacherConfig)
    """Engine, sharding and micro-batches of the teachers."""

    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)
    """The loss."""

    nnodes: int = option(0, at_least=0)
    """Nodes of the teachers' own. 0: they take turns on the devices of training, which is the only way here."""

    n_gpus_per_node: int = option(8, above=0, never_read="teachers take turns on the devices of training")
    """Devices of each such node."""

    def teachers(self, problems: list[Problem] | None = None) -> dict[str, TeacherModelConfig]:
        """Teachers by name, those of ``teacher_models`` that name a model; what is wrong goes to ``problems``."""
        found: dict[str, TeacherModelConfig] = {}
        problems = [] if problems is None else problems
        for name, entry in self.teacher_models.items():
            key = f"distillation.teacher_models.{name}"
            if not isinstance(entry, dict):
                problems.append(Problem(key, f"{key}={entry!r} is no section. Give {key}.model_path=FOLDER."))
                continue
            made = build(TeacherModelConfig(), plain(entry), key, problems)
            if made.model_path:
                found[name] = made
        return found
