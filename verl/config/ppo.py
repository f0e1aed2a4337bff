"""The root of the configuration of ``verl.trainer.main_ppo``. Checks that span sections are in ``checks/``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from verl.config.actor import ActorConfig, RefConfig
from verl.config.algorithm import AlgorithmConfig
from verl.config.base import Config, option, read_if, section
from verl.config.critic import CriticConfig
from verl.config.data import DataConfig
from verl.config.distillation import DistillationConfig, TeacherConfig
from verl.config.env import EnvConfig
from verl.config.profiler import GlobalProfilerConfig, ProfilePlan, ProfilerConfig, profile_plan
from verl.config.reward import RewardFunctionConfig, RewardModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.trainer import CheckpointConfig, RayInitConfig, TrainerConfig

# -- The policy's model: where it is, and how its modules run --------------------------------------------------------


@dataclass
class FusedKernelConfig(Config):
    """Implementation of the fused head; read with ``use_fused_kernels``."""

    impl_backend: Literal["torch", "triton"] = option("torch", read_if("actor_rollout_ref.model.use_fused_kernels"))
    """``torch``: log-probs and entropy from hidden states in chunks, which is also what runs without fused kernels.
    ``triton``: log-probs of the same chunks by liger's kernel (``pip install -e '.[liger]'``); on CUDA only. It gives
    no entropy: passes that need it, with ``actor.entropy_coeff`` the update, stay with ``torch``."""


@dataclass
class ModelConfig(Config):
    """Model of actor, rollout and reference."""

    path: str = "~/models/deepseek-llm-7b-chat"
    """Folder in Hugging Face format, hub id, or ``hdfs://``."""

    custom_chat_template: str | None = None
    """Jinja template, or a file that holds one, to use instead of the tokenizer's own. Saved with checkpoints."""

    use_shm: bool = False
    """Copy the model's folder to /dev/shm, once a node, and let all processes load it from there. The copy stays for
    the next run (delete /dev/shm/verl-cache-*); without room for it the folder itself is read, with a warning."""

    external_lib: str | None = None
    """Module to import in every process before the model is built: registers models, losses or estimators."""

    override_config: dict[str, Any] = option({})
    """Free-form: entries laid over the model's config.json, dropout for example; one that its config does not have is
    refused (but with ``trust_remote_code``). The auxiliary loss of a mixture of experts is no part of any loss here, so
    ``output_router_logits=true`` is refused."""

    enable_gradient_checkpointing: bool = True
    """Recompute activations in backward instead of keeping them. Source: Chen et al. 2016 (arXiv:1604.06174)."""

    enable_activation_offload: bool = False
    """Keep activations in host memory between forward and backward; with ``enable_gradient_checkpointing`` the inputs
    of layers, else also their insides. Gradients are the same to the bit. No effect on a CPU device."""

    use_remove_padding: bool = False
    """Pack the rows of a micro-batch one behind another in one sequence: no padding runs, and token budgets count real
    tokens. Attention then runs in flash-attn where installed, else in torch's kernel; families whose layers mix tokens
    otherwise (linear attention, Mamba) are refused at the start. Source: Krell et al. 2021 (arXiv:2107.02027)."""

    use_prefix_sharing: bool | None = None
    """With ``use_remove_padding``: in log-prob passes and updates the responses to one prompt share its tokens, which
    run once per micro-batch, forward and backward. Numbers stay the same; of n responses of R tokens to a prompt of P,
    P + n R tokens run in place of n (P + R), and a prompt's images are looked at once. Null: on a CPU, with
    ``rollout.n`` above 1, rows of Llama, Mistral, Qwen2 and Qwen3 are packed for it, whatever ``use_remove_padding``
    says, unless another model is the reference or a teacher; otherwise false."""

    lora_rank: int = option(0, at_least=0)
    """Rank of LoRA adapters; 0 trains the full weights. Source: Hu et al. 2021 (arXiv:2106.09685)."""

    lora_alpha: float = option(16, read_if("lora_rank", remark="trains all weights"))
    """LoRA's scale: adapters are multiplied by alpha / rank."""

    target_modules: str | list[str] = option("all-linear", read_if("lora_rank", remark="trains all weights"))
    """Linear layers that get an adapter: ``all-linear``, names or ends of names (``[q_proj,v_proj]``), or a regular
    expression for whole names. The output layer never does."""

    exclude_modules: str | list[str] | None = option(None, read_if("lora_rank", remark="trains all weights"))
    """Linear layers that get none, named in the same ways."""

    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format to go on from; ``lora_rank``, ``lora_alpha`` and ``target_modules`` must
    be those it was trained with."""

    use_liger: bool | None = None
    """Let the Triton kernels of liger-kernel (``pip install -e '.[liger]'``) compute norms, gated MLPs and the rotary
    embedding of actor and reference; on CUDA only. Null: where the device is CUDA, the package is installed and it
    knows the model's family, unless ``compile_layers``; the run says which. Source: Hsu et al. 2024
    (arXiv:2410.10989)."""

    compile_layers: bool = False
    """Compile the layers of actor and reference with torch.compile, on CUDA or CPU: minutes at the start, and again at
    the first update; less time in each step where layers are bound by memory. Needs a compiler on every node. Not with
    ``use_liger=true``, ``strategy=megatron`` or ZeRO stage 3."""

    use_fused_kernels: bool = False
    """Compute log-probs and entropy from hidden states without whole logits. Always so here: true adds the choice of
    ``fused_kernel_options.impl_backend``."""

    fused_kernel_options: FusedKernelConfig = section(FusedKernelConfig)
    """Options of ``use_fused_kernels``."""

    trust_remote_code: bool = False
    """Let the model run Python code that comes with its folder."""


# keys of sections that messages name again and again
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"

MODEL, RM, TEACHER = "actor_rollout_ref.model", "reward_model", "distillation.teacher"

SHAPING, CORRECTION = "algorithm.reward_shaping", "algorithm.rollout_correction"


@dataclass
class ActorRolloutRefConfig(Config):
    """The roles that share the policy's weights."""

    actor: ActorConfig = section(ActorConfig)
    """Training of the policy."""

    ref: RefConfig = section(RefConfig)
    """The frozen reference policy."""

    rollout: RolloutConfig = section(RolloutConfig)
    """Sampling of responses."""

    hybrid_engine: bool = True
    """Training and sampling share the same devices and take turns. False: sampling has devices and processes of its
    own (``rollout.nnodes``, ``rollout.n_gpus_per_node``) apart from those of ``trainer``, and gets their weights."""

    nccl_timeout: int = option(600, above=0)
    """Seconds a collective between workers may take before they give up (gloo's timeout too)."""

    model: ModelConfig = section(ModelConfig)
    """Model of actor, rollout and reference."""

    profiler: ProfilerConfig = section(ProfilerConfig)
    """Profiling of these roles; ``ref.profiler`` and ``rollout.profiler`` may differ."""

    @property
    def generates_ahead(self) -> bool:
        """Whether responses of later steps are generated, on devices of their own, while one step is trained on."""
        rollout = self.rollout
        return not self.hybrid_engine and rollout.staleness > 0 and not rollout.over_sample_rate

    @property
    def generates_continuously(self) -> bool:
        """Whether engines generate all the time, group by group, and new weights interrupt what runs."""
        return self.generates_ahead and self.rollout.partial_rollout

    @property
    def shares_prompts_by_default(self) -> bool:
        """Whether ``model.use_prefix_sharing=null`` has a family that can share prompts do so, on a CPU."""
        model, rollout, actor = self.model, self.rollout, self.actor
        has_groups = rollout.n > 1 and actor.update_split.size != 1
        is_plain = (
            actor.strategy != "megatron"
            and not model.compile_layers
            and "attn_implementation" not in model.override_config
        )
        return model.use_prefix_sharing is None and has_groups and is_plain and self.ref.own_path is None


SHARES_BY_DEFAULT = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose rows share prompts on a CPU where ``model.use_prefix_sharing`` leaves that open."""


class SavedRole(NamedTuple):
    """How the model of a role is saved."""

    checkpoint: CheckpointConfig
    has_adapter: bool
    keep: int | None
    """Newest checkpoints that are kept; None: all."""


@dataclass
class PPOConfig(Config):
    """Everything about one run of PPO and its relatives."""

    config_name: ClassVar[str] = "ppo_trainer"
    """YAML file with the values from which a user's differ."""
    short_names: ClassVar[Mapping[str, str]] = {}
    """Other key of an option or section -> its own."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    """The policy: training, sampling, reference."""

    trainer: TrainerConfig = section(TrainerConfig)
    """The run: length, hardware, logging, checkpoints."""

    data: DataConfig = section(DataConfig)
    """Prompts: files, columns, lengths, batches."""

    critic: CriticConfig = section(CriticConfig)
    """The value model."""

    reward_model: RewardModelConfig = section(RewardModelConfig)
    """Scoring: manager and reward model."""

    custom_reward_function: RewardFunctionConfig = section(RewardFunctionConfig)
    """Scoring function of the user's."""

    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    """From rewards to advantages."""

    ray_init: RayInitConfig = section(RayInitConfig)
    """Start of Ray."""

    env: EnvConfig = section(EnvConfig)
    """Environments, and the episodes of agent loops."""

    distillation: DistillationConfig = section(DistillationConfig)
    """Teachers, and learning from them on the policy's own responses."""

    global_profiler: GlobalProfilerConfig = section(GlobalProfilerConfig)
    """Form of the traces of profiled steps."""

    @property
    def profile_plan(self) -> ProfilePlan:
        """The traces that the run makes."""
        policy, trainer = self.actor_rollout_ref, self.trainer
        roles = {"actor": policy.profiler, "rollout": policy.rollout.profiler, "ref": policy.ref.profiler}
        roles |= {"critic": self.critic.profiler, "reward_model": self.reward_model.profiler}
        follows = {"rollout": "actor", "ref": "actor"}
        continuous = trainer.profile_continuous_steps
        return profile_plan(trainer.profile_steps, continuous, self.global_profiler, roles, follows)

    @property
    def shares_prompts_by_default(self) -> bool:
        """Whether rows share prompts though no option says so, if the model is of `SHARES_BY_DEFAULT`."""
        is_plain = self.trainer.device == "cpu" and not self.distillation.enabled
        return is_plain and self.actor_rollout_ref.shares_prompts_by_default

    @property
    def uses_critic(self) -> bool:
        """Is there a value model?"""
        if self.critic.enable is not None:
            return self.critic.enable
        return self.algorithm.adv_estimator == "gae"

    @property
    def uses_reference(self) -> bool:
        """Is there a reference policy?"""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def saved_roles(self) -> dict[str, SavedRole]:
        """Folder of a checkpoint -> how its role is saved."""
        policy, critic, trainer = self.actor_rollout_ref, self.critic, self.trainer
        return {
            "actor": SavedRole(policy.actor.checkpoint, policy.model.lora_rank > 0, trainer.max_actor_ckpt_to_keep),
            "critic": SavedRole(critic.checkpoint, critic.model.lora_rank > 0, trainer.max_critic_ckpt_to_keep),
        }

    @property
    def learns_from(self) -> dict[str, str | None]:
        """Key -> file or model folder, besides the data, that decides what is learned."""
        model, critic = self.actor_rollout_ref.model.path, self.critic.model.path
        return {
            "actor_rollout_ref.model.path": model,
            "critic.model.path": critic if self.uses_critic and critic != model else None,
            "custom_reward_function.path": self.custom_reward_function.path,
            **{
                f"distillation.teacher_models.{name}.model_path": teacher.model_path
                for name, teacher in (self.distillation.teachers().items() if self.distillation.enabled else ())
                if teacher.model_path
            },
        }

    @property
    def asks_reward_function(self) -> bool:
        """Is anything scored by a reward function? Not where environments and simulated users give all rewards."""
        return not (self.env.reward == "environment" and self.actor_rollout_ref.rollout.mode == "async")

    @property
    def prompts_per_update(self) -> int:
        """Prompts one training step trains on."""
        return self.data.train_batch_size if self.algorithm.filter_groups.enable else self.data.prompts_per_step

    @property
    def skips_old_log_probs(self) -> bool:
        """Whether the update's own forward pass gives the old log-probs: as set, else where nothing reads them before.

        `tests/config/test_validators.py` holds this against the rules that refuse the option.
        """
        actor, algorithm = self.actor_rollout_ref.actor, self.algorithm
        if actor.skip_old_log_probs is not None:
            return actor.skip_old_log_probs
        correction = algorithm.rollout_correction
        is_one_step = self.prompts_per_update // actor.ppo_mini_batch_size * actor.ppo_epochs <= 1
        read_before = (
            algorithm.use_kl_in_reward,
            algorithm.use_pf_ppo,
            actor.calculate_sum_pi_squared,
            correction.rollout_is or correction.rollout_rs or correction.rollout_token_veto_threshold,
            correction.bypass_mode,
            self.distillation.enabled,
            self.trainer.on_nonfinite == "skip",  # such rows are found by the pass
        )
        return is_one_step and not any(read_before)

    @property
    def has_validation(self) -> bool:
        """Are there prompts, or environment groups, to validate with?"""
        return bool(self.env.val_tags) if self.env.makes_rows else self.data.has_validation

    @property
    def compares_distributions(self) -> bool:
        """Does the update compare whole distributions with the reference's?"""
        actor = self.actor_rollout_ref.actor
        return actor.use_kl_loss and actor.kl_loss_type == "full"

    @property
    def scores_reference(self) -> bool:
        """Does the reference score log-probs in a pass of its own?"""
        return self.algorithm.use_kl_in_reward or self.uses_reference and not self.compares_distributions

    @property
    def rewrites_for_reward_model(self) -> bool:
        """Does the reward model read conversations in its own chat template?"""
        return self.reward_model.enable and bool(self.reward_model.model.input_tokenizer)

    @property
    def data_seed(self) -> int:
        """Seed of the shuffling of prompts."""
        return self.trainer.seed if self.data.seed is None else self.data.seed

    def batch_bytes(self, images: int = 0) -> int:
        """Bytes of the largest batch of a step between driver and workers, all rows full.

        4 bytes a token: its id, and eleven more columns on tokens of the response. ``images``: bytes of those of a
        prompt; each rank that has a response to it gets them.
        """
        rollout = self.actor_rollout_ref.rollout
        prompts = max(self.data.prompts_per_step, self.data.train_batch_size)
        tokens = 4 * prompts * rollout.n * (rollout.prompt_length + 12 * rollout.response_length)
        return tokens + prompts * min(rollout.n, self.trainer.world_size) * images

    @property
    def rollout_processes(self) -> list[int]:
        """Processes that sample, by node: those of training, or with ``hybrid_engine=false`` those apart from them."""
        rollout, trainer = self.actor_rollout_ref.rollout, self.trainer
        if self.actor_rollout_ref.hybrid_engine:
            return [trainer.n_gpus_per_node] * trainer.nnodes
        return [rollout.n_gpus_per_node or trainer.n_gpus_per_node] * rollout.nnodes

    @property
    def rollout_beside(self) -> int:
        """Processes that only sample, in addition to those of ``trainer``."""
        return 0 if self.actor_rollout_ref.hybrid_engine else sum(self.rollout_processes)

    @property
    def teacher_processes(self) -> list[int]:
        """Processes that only teachers use, by node; none where they take turns with the policy."""
        options = self.distillation
        return [options.n_gpus_per_node] * options.nnodes if options.runs_teachers else []

    @property
    def processes_beside(self) -> dict[str, int]:
        """Who -> processes in addition to those of ``trainer``."""
        found = {"rollout": self.rollout_beside, "teachers": sum(self.teacher_processes)}
        found["reward model"] = sum(self.reward_model.own_processes)
        return {name: count for name, count in found.items() if count}

    def world_size_of(self, role: Any) -> int:
        """Workers of a role's section."""
        own = sum(self.teacher_processes) if isinstance(role, TeacherConfig) else 0
        own = sum(role.own_processes) if isinstance(role, RewardModelConfig) else own
        return own or self.trainer.world_size

    def dp_size(self, role: Any) -> int:
        """Data-parallel ranks of a role's section (``actor``, ``ref``, ``critic`` or ``reward_model``)."""
        # at least 1: a size that does not divide the workers has an error of its own
        if role.strategy == "megatron":
            return max(1, role.megatron.mesh(self.world_size_of(role)).dp)
        return max(1, self.world_size_of(role) // role.ulysses_sequence_parallel_size)
