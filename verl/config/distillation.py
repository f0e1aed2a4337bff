"""On-policy distillation: teachers, and how the policy learns from them."""

from dataclasses import dataclass
from typing import Any, Literal

from verl.config.actor import FrozenModelConfig
from verl.config.base import Config, Problem, option, plain, read_if, section
from verl.config.engine_options import READ, engine_options
from verl.config.rollout import RolloutConfig
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
    """The loss between the policy and its teacher, on the policy's own responses."""

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
    """The engine of the teachers, which take turns on the devices of training, or on their own."""


@dataclass
class TeacherModelConfig(Config):
    """One teacher: an entry of ``distillation.teacher_models``."""

    key: str | None = None
    """Rows of this value in ``distillation.teacher_key`` are its own. Null: the only teacher has all rows."""

    model_path: str | None = None
    """Folder or hub id of a causal language model with the policy's vocabulary. With ``server_urls`` it may be missing;
    of one that is given the tokenizer alone is read, and compared with the policy's."""

    server_urls: str | list[str] = option([])
    """Base URLs of servers that run this teacher, each of them all of it: ``http://HOST:PORT``. vLLM's and SGLang's
    servers and verl's own (``main_generation_server``) give the log-probs of a text. Empty: it runs in the training
    engine of ``distillation.teacher``."""

    server: Literal["auto", "vllm", "sglang"] = "auto"
    """Protocol of the servers; verl's own speak vLLM's. ``auto``: what they say they are."""

    server_model: str | None = None
    """Name of the model at the servers. Null: the first one that they list."""

    api_key_env: str = "VERL_TEACHER_API_KEY"
    """Environment variable that holds the key of the servers, if they want one. The key itself stands in no file."""

    max_concurrent: int = option(32, above=0)
    """Texts that each worker has under way at a time."""

    timeout_s: float = option(300.0, above=0)
    """Seconds a server may take for a text."""

    tries: int = option(5, above=0)
    """Requests for one text, at the next server each time: one more after each that failed or was too slow."""

    num_replicas: int = 0
    """Has no effect: each teacher is sharded over all devices of training, or on ``server_urls``."""

    inference: dict[str, Any] = option({})
    """With ``distillation.nnodes``: run it in a rollout engine instead of the training engine of
    ``distillation.teacher``; keys of ``actor_rollout_ref.rollout`` such as name, tensor_model_parallel_size, dtype,
    gpu_memory_utilization, max_num_batched_tokens, engine_kwargs. Name, dtype and lengths follow the policy's rollout.
    Empty: the training engine."""

    @property
    def urls(self) -> list[str]:
        """``server_urls``, always as a list."""
        return [self.server_urls] if isinstance(self.server_urls, str) else list(self.server_urls)

    @property
    def is_served(self) -> bool:
        """Does it run behind servers?"""
        return bool(self.server_urls)

    def rollout(
        self,
        policy: RolloutConfig,
        key: str = "inference",
        problems: list[Problem] | None = None,
        notes: list[str] | None = None,
    ) -> RolloutConfig:
        """Options of the rollout engine of ``inference``; what is wrong goes to ``problems``, what has no effect to
        ``notes``.

        Args:
            policy: ``actor_rollout_ref.rollout``.
        """
        # an engine makes at least one token of its own
        longest = (policy.max_model_len or policy.prompt_length + policy.response_length) + 1
        base = RolloutConfig(
            name=policy.name,
            dtype=policy.dtype,
            prompt_length=policy.prompt_length,
            response_length=policy.response_length,
            max_model_len=longest,
            load_format="auto",
            free_cache_engine=False,
            tensor_model_parallel_size=1,
            temperature=1.0,
        )
        given = {name: value for name, value in self.inference.items() if name != "max_model_len" or value is not None}
        return engine_options(base, given, key, problems, notes, (*READ, "temperature"))


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
    """The teachers' logits are divided by this. Null: by ``actor_rollout_ref.rollout.temperature``, as the policy's.
    Must be 1 for teachers on ``server_urls``."""

    teacher: TeacherConfig = section(TeacherConfig)
    """Engine, sharding and micro-batches of the teachers."""

    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)
    """The loss."""

    nnodes: int = option(0, at_least=0)
    """Nodes that only teachers use. 0: they take turns with the policy on the devices of training."""

    n_gpus_per_node: int = option(8, read_if("nnodes"), above=0)
    """Devices of each such node, over all of which each teacher is sharded."""

    def teachers(self, problems: list[Problem] | None = None) -> dict[str, TeacherModelConfig]:
        """Teachers by name, those of ``teacher_models`` that name a model or a server; what is wrong goes to
        ``problems``."""
        found: dict[str, TeacherModelConfig] = {}
        problems = [] if problems is None else problems
        for name, entry in self.teacher_models.items():
            key = f"distillation.teacher_models.{name}"
            if not isinstance(entry, dict):
                problems.append(Problem(key, f"{key}={entry!r} is no section. Give {key}.model_path=FOLDER."))
                continue
            made = build(TeacherModelConfig(), plain(entry), key, problems)
            if made.model_path or made.is_served:
                found[name] = made
        return found

    @property
    def in_rollout_engines(self) -> dict[str, TeacherModelConfig]:
        """Teachers that run in rollout engines, on devices of their own."""
        has_own = self.enabled and self.nnodes
        return {name: one for name, one in self.teachers().items() if has_own and one.inference and not one.is_served}

    @property
    def uses_training_engine(self) -> bool:
        """Does a teacher run in the training engine of ``teacher``?"""
        return self.runs_teachers and any(
            not one.is_served and name not in self.in_rollout_engines for name, one in self.teachers().items()
        )

    @property
    def runs_teachers(self) -> bool:
        """Does a teacher run on devices of this run?"""
        return self.enabled and any(not teacher.is_served for teacher in self.teachers().values())
