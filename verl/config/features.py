"""What verl's releases v0.5 to v0.9 have and this package has not: each feature once, with what to do instead.

Keys, modules, configuration files and backends lead here, so that whoever asks for one is told its name. The list in
docs/moving.md is made from this table. Standard library only: a misspelt key or module must be told at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

_A, _R, _O, _M = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout", "model"))
_ROLES = (_A, _R, "critic", "reward_model")
_FSDP = (f"{_A}.fsdp_config", f"{_R}.fsdp_config", "critic.model.fsdp_config")
_MODELS = (_M, "critic.model")
_TRAINED = (_A, "critic")
_LOADED_MODELS = ("reward_model", "reward.reward_model")


def _below(places: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in places for name in names)


class Feature(NamedTuple):
    """Something that a user of verl may ask for by a key, a module, a configuration file or a backend's name."""

    name: str
    """Noun phrase; fits behind "asks for"."""
    instead: str
    """What to do instead: whole sentences."""
    keys: tuple[str, ...] = ()
    """Dotted keys; one of a section stands for all below it."""
    switches: tuple[str, ...] = ()
    """Keys of which one must be on for the others to ask for anything; ``.name`` is one of the same section."""
    takes: tuple = ()
    """Values beside the releases' defaults that ask for what is done anyway."""
    asks: tuple = ()
    """Of null, false and the like: those that do ask for the feature."""
    is_free: bool = False
    """No value of its keys changes a number, so that any is accepted and said to have no effect."""
    modules: tuple[str, ...] = ()
    """Modules and packages, with all below them."""
    configs: tuple[str, ...] = ()
    """Names of YAML files of verl's, without suffix, or words between underscores of such."""
    backends: tuple[str, ...] = ()
    """Values of ``strategy`` and ``model_engine``, and the beginnings of YAML files of a group."""


FEATURES: tuple[Feature, ...] = (
    # ------------------------------------------------------------------------------------- backends of training
    Feature(
        "the Megatron backend",
        "Set strategy=fsdp2 or deepspeed for actor, ref and critic, which shard the same model over the same devices, "
        "and leave the Megatron settings out.",
        keys=(
            *_below(_ROLES, "megatron"),
            *_below(_TRAINED, "checkpoint.mbridge_config"),
            *_below(
                tuple(f"{role}.optim" for role in _TRAINED),
                *("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "use_precision_aware_optimizer"),
                *("use_layer_wise_distributed_optimizer", "override_optimizer_config"),
            ),
            f"{_O}.layer_name_map",
        ),
        modules=(
            *("verl.models.mcore", "verl.models.weight_loader_registry", "verl.utils.megatron", "verl.utils.mbridge"),
            *("verl.models.llama", "verl.models.qwen2", "verl.models.registry"),
            *("verl.utils.megatron_utils", "verl.utils.megatron_peft_utils", "verl.utils.mcore_patch"),
            *("verl.workers.actor.megatron_actor", "verl.workers.critic.megatron_critic"),
            *("verl.workers.sharding_manager.megatron_vllm", "verl.workers.sharding_manager.megatron_sglang"),
            *("verl.workers.engine.megatron", "verl.utils.checkpoint.megatron_checkpoint_manager"),
            *("verl.model_merger.megatron_model_merger"),
        ),
        configs=("ppo_megatron_trainer", "fully_async_ppo_megatron_trainer", "dapo_megatron_trainer"),
        backends=("megatron", "mcore", "mindspeed"),
    ),
    Feature(
        "the VeOmni backend",
        "Set strategy=fsdp2 or deepspeed.",
        keys=_below(_ROLES, "veomni"),
        modules=("verl.workers.engine.veomni",),
        backends=("veomni",),
    ),
    Feature(
        "the TorchTitan backend",
        "Set strategy=fsdp2 or deepspeed.",
        keys=_below(_ROLES, "torchtitan"),
        modules=("verl.workers.engine.torchtitan",),
        backends=("torchtitan",),
    ),
    Feature(
        "the NeMo AutoModel backend",
        "Set strategy=fsdp2 or deepspeed.",
        keys=_below(_ROLES, "automodel"),
        modules=("verl.workers.engine.automodel",),
        backends=("automodel",),
    ),
    Feature(
        "the Muon optimizer",
        "Set optim.optimizer=AdamW or AdamW8bit.",
        keys=tuple(
            f"{role}.optim.muon_{name}"
            for role in _TRAINED
            for name in (
                *("coefficient_type", "extra_scale_factor", "fp32_matmul_prec", "match_adamw_update_rms", "momentum"),
                *("nesterov", "num_ns_steps", "scalar_optimizer", "scale_mode", "split_qkv", "tp_mode"),
            )
        ),
    ),
    Feature(
        "an optimizer of another package",
        "optim.optimizer=AdamW is torch's and AdamW8bit torchao's; optim.betas and optim.eps are theirs.",
        keys=_below(_TRAINED, "optim.optimizer_impl"),
        takes=("torchao.optim",),
    ),
    Feature(
        "Megatron's schedule of the learning rate",
        "Set optim.lr_warmup_steps, optim.warmup_style and optim.min_lr_ratio, a share of optim.lr at which the rate "
        "starts and ends; weight decay is constant, and a checkpoint brings its schedule back.",
        keys=_below(
            _TRAINED,
            *("optim.lr_warmup_init", "optim.min_lr", "optim.weight_decay_incr_style"),
            *("optim.use_checkpoint_opt_param_scheduler", "optim.zero_indexed_step"),
        ),
    ),
    Feature(
        "quantization-aware training",
        "Train in bf16, and quantize the merged checkpoint or the engine's weights "
        "(actor_rollout_ref.rollout.engine_kwargs.vllm.quantization).",
        keys=(f"{_A}.qat", f"{_R}.qat", f"{_O}.qat", *_below(_FSDP, "qat")),
        switches=(".enable",),
        modules=("verl.utils.qat",),
    ),
    Feature(
        "multi-token prediction",
        "Leave it off: the heads that predict further tokens are not trained, and the model's main head is.",
        keys=(*_below(_MODELS, "mtp"), f"{_O}.mtp"),
        switches=(".enable", ".enable_train", ".enable_rollout"),
        modules=("verl.models.transformers.mtp",),
    ),
    Feature(
        "tiled MLPs",
        "Set enable_gradient_checkpointing=true and enable_activation_offload=true in the same section, or a smaller "
        "micro-batch: they bound what a layer keeps.",
        keys=_below(_MODELS, "tiled_mlp"),
        switches=(".enabled", ".enable"),
        modules=("verl.models.transformers.tiled_mlp",),
    ),
    Feature(
        "full determinism by a switch",
        "A run on a CPU repeats bit by bit already; on CUDA set CUBLAS_WORKSPACE_CONFIG=:4096:8 and call "
        "torch.use_deterministic_algorithms(True) in actor_rollout_ref.model.external_lib.",
        keys=(*_below(_FSDP, "full_determinism"), f"{_O}.full_determinism"),
    ),
    Feature(
        "replay of expert routing",
        "Leave it off: algorithm.rollout_correction weighs what sampler and trainer disagree on.",
        keys=(*_below((_A, _R), "router_replay"), f"{_O}.enable_rollout_routing_replay"),
        modules=("verl.utils.megatron.router_replay_patch", "verl.utils.megatron.router_replay_utils"),
    ),
    Feature(
        "LoRA with dropout, other initial values or other kinds of adapters",
        "Leave the key out: adapters are plain LoRA without dropout, with peft's initial values; "
        "actor_rollout_ref.model.lora_rank, lora_alpha, target_modules and exclude_modules describe them.",
        keys=_below(
            _MODELS,
            *("lora.type", "lora.dropout", "lora.dropout_position", "lora.lora_A_init_method"),
            *("lora.lora_B_init_method", "lora.dtype", "lora.a2a_experimental", "lora.freeze_vision_model"),
            *("lora.freeze_vision_projection", "lora.freeze_language_model"),
        ),
    ),
    Feature(
        "a choice of how adapters reach the engine below model.lora",
        "Set actor_rollout_ref.rollout.lora_sync=merge, adapter or auto.",
        keys=_below(_MODELS, "lora.merge"),
    ),
    Feature(
        "padding of micro-batches to one length",
        "Rows are packed, or padded to the longest of their micro-batch.",
        keys=_below((_A, _R, *_FSDP), "pad_to_length", "pad_to_length_bucket"),
        is_free=True,
    ),
    Feature(
        "a size of the chunks in which entropy is computed",
        "Entropy is always computed in chunks, and recomputed in the backward pass.",
        keys=(
            *_below((_A, _R, *_FSDP), "entropy_from_logits_chunk_size"),
            *_below(("critic.model.fsdp_config",), "entropy_checkpointing", "entropy_from_logits_with_chunking"),
            f"{_A}.sum_pi_squared_checkpointing",
        ),
        is_free=True,
    ),
    Feature(
        "kernels of the critic's own",
        "The critic has no logits over a vocabulary, which fused kernels are for.",
        keys=_below(
            ("critic.model",), "use_fused_kernels", "fused_kernel_options", "use_liger", "fsdp_config.use_torch_compile"
        ),
        is_free=True,
    ),
    Feature(
        "an engine that only runs forward",
        "The role says whether a model is trained.",
        keys=_below(_FSDP, "forward_only"),
        is_free=True,
    ),
    Feature(
        "models with random weights",
        "Save a model with random weights as a folder and give its path.",
        keys=_below(_ROLES, "load_weight"),
        asks=(False,),
    ),
    Feature(
        "seeds of single components",
        "Set trainer.seed, from which data, sampling, shuffling and initial values follow.",
        keys=(*_below(_TRAINED, "data_loader_seed"), *_below(_FSDP, "seed")),
    ),
    Feature(
        "a checkpoint that fits its model in part",
        "Checkpoints are loaded whole; checkpoint.load_contents says which parts.",
        keys=_below(_TRAINED, "checkpoint.strict"),
        asks=(False,),
    ),
    Feature(
        "a switch for the entropy metric",
        "actor/entropy is always logged.",
        keys=(f"{_A}.calculate_entropy",),
        is_free=True,
    ),
    Feature(
        "a divisor of the critic's loss",
        "critic.loss_agg_mode=seq-mean-token-sum-norm divides by rollout.response_length.",
        keys=("critic.loss_scale_factor",),
    ),
    Feature(
        "a configuration of the model in another folder",
        "It is read from model.path; model.override_config changes it.",
        keys=_below(_MODELS, "hf_config_path"),
    ),
    Feature(
        "a chat template of the critic's",
        "The critic reads the policy's token ids; set actor_rollout_ref.model.custom_chat_template.",
        keys=("critic.model.custom_chat_template",),
    ),
    # ------------------------------------------------------------------------------------------------- rollout
    Feature(
        "prefill and decoding on different devices",
        "Leave it off: both run in one engine; rollout.tensor_model_parallel_size sets how many copies there are.",
        keys=(f"{_O}.disaggregation",),
        switches=(".enabled", ".enable"),
    ),
    Feature(
        "data, expert and pipeline parallelism inside a rollout engine",
        "Set actor_rollout_ref.rollout.tensor_model_parallel_size: what the devices leave over becomes further copies "
        "of the engine, which share out the work.",
        keys=_below((_O,), "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size"),
    ),
    Feature(
        "quantization by a key of its own",
        "Set actor_rollout_ref.rollout.engine_kwargs.vllm.quantization, and what else the engine wants, there.",
        keys=_below((_O,), "quantization", "quantization_config_file"),
    ),
    Feature(
        "the TensorRT-LLM rollout engine",
        "Set actor_rollout_ref.rollout.name=vllm, sglang or hf.",
        keys=(f"{_O}.max_batch_size",),
        modules=("verl.workers.rollout.trtllm_rollout",),
    ),
    Feature(
        "a choice of the log-probs an engine reports",
        "They are those of softmax(logits / temperature), processed_logprobs in vLLM's words.",
        keys=(f"{_O}.logprobs_mode",),
    ),
    Feature(
        "engines with a tokenizer",
        "Engines get and return token ids, so none is loaded.",
        keys=(f"{_O}.skip_tokenizer_init",),
        is_free=True,
    ),
    Feature(
        "metrics of how experts are loaded",
        "rollout.disable_log_stats=false logs what the engine counts itself.",
        keys=(f"{_O}.moe_load_balance_metrics_interval",),
    ),
    Feature(
        "a Prometheus configuration that the trainer writes",
        "The servers of rollout.mode=async answer /metrics themselves.",
        keys=(f"{_O}.prometheus",),
        switches=(".enable",),
    ),
    Feature(
        "checkpoint engines",
        "Leave it out: weights reach the rollout in the fastest way its processes allow (shared memory, CUDA IPC, NCCL "
        "or gloo).",
        keys=(f"{_O}.checkpoint_engine",),
        modules=("verl.checkpoint_engine",),
    ),
    Feature(
        "multi-turn rollouts with tools and simulated users",
        "Write an agent loop (docs/async.md, docs/extend.md): it calls tools itself; "
        "rollout.agent.agent_loop_config_path names it, and rollout.mode=async runs it.",
        keys=(
            *_below((f"{_O}.multi_turn",), "function_tool_path", "num_repeat_rollouts", "completion_callback"),
            *_below(("data",), "function_tool_path", "tool_config_path", "need_tools_kwargs"),
            f"{_O}.chat_scheduler",
        ),
        modules=(
            *("verl.tools", "verl.interactions", "verl.experimental.agent_loop.tool_agent_loop"),
            *("verl.experimental.agent_loop.tool_parser", "verl.workers.rollout.chat_scheduler", "recipe.retool"),
            *("verl.workers.rollout.async_server", "verl.workers.rollout.schemas"),
            *("recipe.langgraph_agent", "recipe.deepeyes", "recipe.collabllm", "recipe.swe_agent", "recipe.fapo"),
        ),
        configs=(
            *("multiturn", "gsm8k_multiturn_grpo", "gsm8k_multiturn_grpo_w_interaction", "gsm8k_multiturn_grpo_server"),
            *("gsm8k_multiturn_megatron_grpo", "geo3k_multiturn_grpo", "geo3k_multiturn_megatron_grpo"),
            *("search_multiturn_grpo", "search_multiturn_grpo_one_step_off", "retool_multiturn_grpo"),
            *("deepeyes_multiturn_grpo", "gsm8k_multiturn_sf_grpo", "sandbox_fusion_tool_config"),
        ),
    ),
    Feature(
        "prompts of several turns built from tokens that never change",
        "Agent loops keep token ids from turn to turn already (docs/async.md).",
        keys=("data.continuous_token",),
        switches=(".enable",),
    ),
    Feature(
        "a manager of agent loops named by a key",
        "Derive from verl.agent_loop.AgentLoopManager in a trainer of yours (docs/extend.md).",
        keys=(f"{_O}.agent.agent_loop_manager_class",),
    ),
    Feature(
        "traces under names of their own, of some samples only",
        "A trace holds every sample, under trainer.project_name and trainer.experiment_name.",
        keys=_below((f"{_O}.trace",), "project_name", "experiment_name", "max_samples_per_step_per_worker"),
        is_free=True,
    ),
    Feature(
        "reuse of rollouts step by step",
        "Set actor_rollout_ref.rollout.skip_rollout=true and skip_dump_dir, which keep and reuse every step.",
        keys=("skip", f"{_O}.skip"),
        switches=(".enable",),
    ),
    Feature(
        "generation batches under way at the same time",
        "filter_groups asks for one batch after another; algorithm.filter_groups.max_num_gen_batches bounds them.",
        keys=("algorithm.filter_groups.max_inflight_gen_batches",),
        is_free=True,
    ),
    # ------------------------------------------------------------------------------------------------- rewards
    Feature(
        "a reward model that an inference engine serves",
        "reward_model.enable=true scores with a classifier in the training engine, of strategy "
        "reward_model.strategy; a model that writes its judgement is asked by reward_model.judge.url.",
        keys=(*_below(_LOADED_MODELS, "rollout"), "reward_model.reward_models"),
        switches=("reward_model.enable", "reward.reward_model.enable"),
        modules=("recipe.genrm_remote", "verl.experimental.reward", "verl.workers.reward_model.megatron"),
    ),
    Feature(
        "devices of the reward model's own",
        "The reward model shares the devices of trainer.n_gpus_per_node; one on another machine is asked by "
        "reward_model.judge.url.",
        keys=_below(_LOADED_MODELS, "enable_resource_pool", "n_gpus_per_node", "nnodes"),
        switches=(".enable_resource_pool",),
    ),
    Feature(
        "the reward loop",
        "Reward functions run in processes of their own, reward_model.sandbox.workers of them; a manager of yours is "
        "named by reward_model.reward_manager=FILE.py:CLASS.",
        keys=(
            *("reward.num_workers", "reward_model.num_workers", "reward_model.use_reward_loop"),
            *_below(("reward.reward_manager", "reward_manager"), "source", "module"),
            *(f"reward_model.reward_loop_{name}" for name in ("source", "module_path", "class_name")),
        ),
        modules=(
            *("verl.experimental.reward_loop", "verl.workers.reward_manager.registry_loop"),
            "verl.workers.reward_manager.remote",
        ),
    ),
    Feature(
        "changes to the configuration of the reward model",
        "Change config.json in the folder of reward_model.model.path.",
        keys=("reward_model.model.override_config",),
    ),
    # ---------------------------------------------------------------------------------------------------- data
    Feature(
        "prompts with sound",
        "Text, images and videos can be trained on (data.image_key, data.video_key).",
        keys=("data.audio_key",),
        modules=("recipe.minicpmo",),
    ),
    Feature(
        "settings of the image processor below data",
        "Patch size and all else are read from preprocessor_config.json in the model's folder; change it there.",
        keys=("data.mm_processor_kwargs", "data.image_patch_size"),
    ),
    # ----------------------------------------------------------------------------------------------------- run
    Feature(
        "profilers",
        "timing_s/* metrics are logged at every step and trainer.memory_ledger=true shows memory by phase; use py-spy "
        "or torch.profiler around the run for more.",
        keys=(
            *_below((_A, _R, _O, "critic", "reward_model"), "profiler", "profile"),
            *("global_profiler", "profile"),
        ),
        switches=(".enable", ".use_profile", "global_profiler.tool", "global_profiler.steps", "trainer.profile_steps"),
        modules=("verl.utils.profiler.nvtx_profile", "verl.utils.profiler.mstx_profile"),
    ),
    Feature(
        "TransferQueue",
        "Leave it off: batches travel packed, through shared memory or Ray's object store.",
        keys=("transfer_queue",),
        switches=(".enable", ".enabled"),
        modules=("verl.experimental.transfer_queue", "verl.utils.transferqueue_utils", "recipe.transfer_queue"),
        configs=("ppo_transfer_queue_trainer", "transfer_queue_ppo_trainer"),
    ),
    Feature(
        "the trainer called V1",
        "There is one trainer: actor_rollout_ref.rollout.async_ratio=1 generates the next batch while one is trained "
        "on, actor_rollout_ref.hybrid_engine=false does so on devices of its own.",
        keys=("trainer.use_v1", "trainer.v1"),
        switches=("trainer.use_v1",),
        modules=("verl.trainer.ppo.v1", "verl.trainer.main_ppo_sync", "verl.trainer.main_ppo_v1"),
    ),
    Feature(
        "callbacks at a checkpoint",
        "Override save_checkpoint in a trainer of yours (docs/extend.md).",
        keys=("trainer.checkpoint_callback_class",),
    ),
    Feature(
        "fully asynchronous training",
        "actor_rollout_ref.rollout.async_ratio=1 generates one batch ahead, and rollout.partial_rollout=true carries "
        "unfinished responses on (docs/async.md, docs/long_tails.md).",
        keys=("async_training", "rollout.total_rollout_steps", "rollout.test_freq"),
        modules=("recipe.fully_async_policy", "verl.experimental.fully_async_policy", "verl.experimental.separation"),
        configs=("fully_async_ppo_trainer",),
    ),
    Feature(
        "one-step-off training as a program of its own",
        "Set actor_rollout_ref.rollout.async_ratio=1, or run python -m recipe.one_step_off_policy.main_ppo.",
        modules=("verl.experimental.one_step_off_policy", "recipe.one_step_off_policy.async_main_ppo"),
        configs=("one_step_off_ppo_megatron_trainer",),
    ),
    Feature(
        "distillation from a teacher model",
        "Score against a fixed model with actor.use_kl_loss=true and actor_rollout_ref.ref.model.path=TEACHER, whose "
        "vocabulary must be the policy's.",
        keys=("distillation",),
        switches=(".enabled", "distillation.enabled"),
        modules=("verl.trainer.distillation", "recipe.gkd", "verl.workers.teacher"),
        configs=("distillation_ppo_trainer", "on_policy_distill_trainer"),
    ),
    Feature(
        "Ascend NPUs",
        "Set trainer.device=cuda or cpu.",
        modules=(
            "verl.utils.npu",
            "verl.utils.npu_patch",
            "verl.models.transformers.npu_patch",
            "verl.utils.kernel.npu",
        ),
    ),
    Feature(
        "training of vision-language-action models",
        "Train a vision-language model on data with an images column (docs/images.md).",
        modules=("verl.experimental.vla", "recipe.vla"),
    ),
    # ------------------------------------------------------------------------------------------- other programs
    Feature(
        "supervised fine-tuning",
        "Fine-tune with another tool (TRL's SFTTrainer, for example), and give the folder it writes as "
        "actor_rollout_ref.model.path.",
        modules=(
            *("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"),
            *("verl.utils.dataset.sft_dataset", "verl.utils.dataset.multiturn_sft_dataset"),
        ),
        configs=("sft_trainer", "sft_trainer_engine", "sft"),
    ),
    Feature(
        "training of reward models",
        "Train one with another tool (TRL's RewardTrainer, for example), and name its folder in "
        "reward_model.model.path.",
        modules=("verl.utils.dataset.rm_dataset",),
    ),
    Feature(
        "batch generation as a program of its own",
        "Run python -m verl.trainer.main_ppo with trainer.val_only=true and trainer.validation_data_dir=DIR, which "
        "writes prompts, responses and scores of data.val_files; val_kwargs.n sets how many.",
        modules=("verl.trainer.main_generation", "verl.trainer.main_generation_server"),
        configs=("generation",),
    ),
    Feature(
        "scoring of a file of responses as a program of its own",
        "Run python -m verl.trainer.main_ppo with trainer.val_only=true, which generates and scores data.val_files.",
        modules=("verl.trainer.main_eval",),
        configs=("evaluation",),
    ),
    # ------------------------------------------------------------------------- insides of verl that files import
    Feature(
        "patches of transformers models by hand",
        "model.use_remove_padding and actor.ulysses_sequence_parallel_size do what they did; the engine sees to the "
        "model.",
        modules=("verl.models.transformers",),
    ),
    Feature(
        "verl's own copies of engine internals",
        "Import vllm, sglang or torch themselves, at your own risk.",
        modules=("verl.third_party",),
    ),
    Feature(
        "verl's Triton kernels",
        "Set actor_rollout_ref.model.use_fused_kernels=true for log-probs without logits.",
        modules=("verl.utils.kernel",),
    ),
    Feature(
        "the classes by which verl holds its rollout engines",
        "Choose the engine with actor_rollout_ref.rollout.name=vllm, sglang or hf; "
        "verl.workers.rollout.get_rollout_class gives its class.",
        modules=(
            *("verl.utils.vllm", "verl.utils.vllm_utils", "verl.workers.rollout.hf_rollout"),
            *("verl.workers.rollout.naive", "verl.workers.rollout.sglang_rollout", "verl.workers.rollout.vllm_rollout"),
        ),
    ),
    Feature(
        "sharding managers",
        "The workers switch between training and rollout themselves; "
        "a worker of your own inherits from verl.workers.fsdp_workers.ActorRolloutRefWorker.",
        modules=("verl.workers.sharding_manager",),
    ),
    Feature(
        "the classes DataParallelPPOActor and DataParallelPPOCritic",
        "Their work is done by the engine and the loss: register a loss with register_policy_loss, or override the "
        "verbs of verl.workers.fsdp_workers.ActorRolloutRefWorker (docs/extend.md).",
        modules=("verl.workers.actor", "verl.workers.critic"),
    ),
    Feature(
        "DAPO as a program of its own",
        "Run python -m verl.trainer.main_ppo with algorithm.filter_groups.enable=true, "
        "actor_rollout_ref.actor.clip_ratio_high=0.28 and reward_model.reward_manager=dapo.",
        modules=("recipe.dapo",),
        configs=("dapo_trainer",),
    ),
    Feature(
        "a recipe of verl's that was not carried over",
        "Of verl's recipes only one_step_off_policy is here. Files of a recipe may be copied beside a run: trainers "
        "derive from RayPPOTrainer, and rewards, losses and advantages register under a name (docs/extend.md).",
        modules=tuple(
            f"recipe.{name}"
            for name in (
                *("prime", "spin", "sppo", "entropy", "r1", "r1_ascend", "char_count", "infigui-g1", "infigui_g1"),
                *("open_math_reasoning", "rep_exp", "spo", "flowrl", "gvpo", "specrl", "spec_rl", "sdpo", "cispo"),
                *("gspo", "dppo", "otb", "rollout_mm", "deepmath", "atropos", "dro", "qat", "prefix_grouper"),
            )
        ),
        configs=("prime_trainer", "sppo_trainer", "spin_trainer", "spo_trainer", "rebel_trainer"),
    ),
)


class FeatureKey(NamedTuple):
    """The feature that a key belongs to."""

    feature: Feature
    section: str
    """The part of the key that the table names."""


@lru_cache(maxsize=1)
def _by_key() -> dict[str, Feature]:
    return {key: feature for feature in FEATURES for key in feature.keys}


def feature_of_key(key: str) -> FeatureKey | None:
    """The feature that a dotted key, or a section it stands in, asks for."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((FeatureKey(_by_key()[name], name) for name in names if name in _by_key()), None)


def feature_of_module(name: str) -> Feature | None:
    """The feature of a module of verl's, ``verl.tools.base_tool`` for example, that does not exist here."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 1, -1))
    return next((_by_module()[prefix] for prefix in prefixes if prefix in _by_module()), None)


@lru_cache(maxsize=1)
def _by_module() -> dict[str, Feature]:
    return {module: feature for feature in FEATURES for module in feature.modules}


def feature_of_config(name: str) -> Feature | None:
    """The feature of a configuration file of verl's, named as behind ``--config-name``."""
    name = name.removesuffix(".yaml").rpartition("/")[2]
    backend = feature_of_backend(name, within=True)
    return backend or next((item for item in FEATURES if {name, *name.split("_")} & set(item.configs)), None)


def feature_of_backend(name: str, within: bool = False) -> Feature | None:
    """The feature of a training backend, or of a YAML file named after one (``megatron_actor``).

    Args:
        name: as behind ``strategy=``, ``model_engine=`` or ``actor@actor_rollout_ref.actor=``.
        within: whether the backend may stand anywhere between underscores of ``name``.
    """
    words = name.split("_") if within else [name]
    return next((item for item in FEATURES for backend in item.backends if backend in words), None)


def not_built(what: str, feature: Feature) -> str:
    """The sentence to somebody whose ``what`` (``key=value``, a module) asks for a feature."""
    return f"{what} asks for {feature.name}: that is not built. {feature.instead}"
