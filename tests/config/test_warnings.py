"""A setting without effect is said once, and only if the user made it."""

import pytest

from .helpers import RUNNABLE, notes

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"
MODEL, CPU = "actor_rollout_ref.model", "trainer.device=cpu"
PARAM_OFFLOAD = f"{ACTOR}.fsdp_config.param_offload=true"
LOCAL = (f"{ACTOR}.strategy=local", "critic.strategy=local", "trainer.n_gpus_per_node=1")
REF_DTYPE = "actor_rollout_ref.ref.fsdp_config.model_dtype"
ON_CPU = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.device=cpu")
CORRECTION = "algorithm.rollout_correction"
BYPASS = (f"{ROLLOUT}.calculate_log_probs=true", f"{CORRECTION}.bypass_mode=true")
HYBRID = "actor_rollout_ref.hybrid_engine=true"
ASYNC = (f"{ROLLOUT}.mode=async", f"{ROLLOUT}.calculate_log_probs=true")
KEPT = (*ASYNC, f"{ROLLOUT}.over_sample_rate=1", f"{ROLLOUT}.partial_rollout=true")
SHARING = ("actor_rollout_ref.model.use_remove_padding=true", "actor_rollout_ref.model.use_prefix_sharing=true")
RM = ("reward_model.enable=true", "reward_model.micro_batch_size_per_gpu=2", "data.return_raw_chat=true")
SHAPING = "algorithm.reward_shaping"
TAUGHT = ["distillation.enabled=true", "distillation.teacher_models.one.model_path=a"]
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")


def test_nothing_is_said_about_defaults():
    assert notes() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], "tensor_model_parallel_size=2 has no effect"),
        ([f"{ROLLOUT}.enforce_eager=false", f"{ROLLOUT}.disable_log_stats=false"], "have no effect"),
        ([f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4"], "engine_kwargs"),
        ([f"{ROLLOUT}.max_model_len=4096"], "max_model_len=4096 has no effect"),
        ([f"{ACTOR}.use_kl_loss=true", REF, f"{REF_DTYPE}=bf16"], "kept in mixed_precision.param_dtype"),
        (
            [f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=4"],
            "nnodes=2, actor_rollout_ref.rollout.n_gpus_per_node=4",
        ),
        (
            ["actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.free_cache_engine=true"],
            "shares its devices with nobody",
        ),
        ([*SHARING], "rollout.n=1 response a prompt has nothing to share with"),
        (
            [
                *SHARING,
                *GRPO,
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
            ],
            "use_prefix_sharing=true has no effect: micro-batches of one row",
        ),
        ([*GRPO, CPU, f"{MODEL}.use_remove_padding=false"], "packed all the same, to share the tokens of prompts"),
        ([f"{ROLLOUT}.multi_stage_wake_up=true"], "weights are always brought back first"),
        ([f"{ROLLOUT}.agent.default_agent_loop=mine"], "samples a batch in one call, without servers"),
        ([*ON_CPU, f"{ROLLOUT}.enforce_eager=false"], "no CUDA graphs on a CPU"),
        ([f"{ACTOR}.entropy_checkpointing=true"], "always computed in chunks"),
        ([f"{ACTOR}.use_torch_compile=true", CPU], "compiled on CUDA only"),
        ([f"{ACTOR}.fsdp_config.param_offload=true", CPU], "all is in host memory"),
        ([f"{ACTOR}.fsdp_config.mixed_precision.buffer_dtype=bf16"], "buffers keep the format"),
        ([*LOCAL, f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype=bf16"], "does not shard"),
        ([*LOCAL, "trainer.controller=local", "trainer.worker_timeout=9"], "in the driver's process"),
        ([f"{MODEL}.use_fused_kernels=true"], "from hidden states in chunks either way"),
        ([f"{ACTOR}.use_fused_kernels=true"], "actor_rollout_ref.model.use_fused_kernels=false decides"),
        ([f"{MODEL}.fused_kernel_options.impl_backend=triton"], "impl_backend=triton has no effect"),
        (
            [f"{MODEL}.{option}" for option in ("use_fused_kernels=true", "fused_kernel_options.impl_backend=triton")]
            + [f"{ACTOR}.entropy_coeff=0.1"],
            "the kernel gives no entropy, so updates of the actor run on torch",
        ),
        ([f"{ACTOR}.optim.num_cycles=2", f"{ACTOR}.optim.warmup_style=linear"], "warmup_style=linear"),
        ([*GRPO, "algorithm.gamma=0.9"], "algorithm.adv_estimator=grpo does not read it"),
        (["algorithm.norm_adv_by_std_in_grpo=false"], "algorithm.adv_estimator=gae does not read it"),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.7"], "val_kwargs.do_sample=false"),
        ([f"{ROLLOUT}.val_kwargs.do_sample=true"], "val_kwargs.temperature=0 is greedy"),
        (["trainer.val_before_train=false", "data.val_batch_size=2"], "nothing is validated"),
        (["data.val_files=null"], "data.val_files=null, so nothing is validated"),
        (
            ["data.val_files=[]", "trainer.test_freq=5", "trainer.val_before_train=true"],
            "trainer.test_freq=5, trainer.val_before_train=true have no effect: data.val_files=[], so nothing is",
        ),
        (["trainer.total_training_steps=5", "trainer.total_epochs=2"], "total_training_steps=5 decides"),
        (["data.sampler.class_path=x.py", "data.sampler.class_name=S", "data.shuffle=true"], "decides the order"),
        (
            [
                "trainer.n_gpus_per_node=8",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "critic.ppo_micro_batch_size_per_gpu=1",
            ],
            "= 4 responses a mini-batch on 8 data-parallel ranks: 4 of them",
        ),
        (["data.filter_overlong_prompts_workers=4"], "filter_overlong_prompts=false"),
        (["trainer.max_critic_ckpt_to_keep=2"], "writes no checkpoint"),
        ([f"{ACTOR}.strategy=fsdp", CPU], "strategy=fsdp is FSDP2 (fully_shard)"),
        ([f"{ACTOR}.strategy=fsdp", "trainer.n_gpus_per_node=2"], "strategy=fsdp is FSDP2 (fully_shard)"),
        ([f"{ACTOR}.fsdp_config.offload_policy=true", CPU], "all is in host memory"),
        (["actor_rollout_ref.model.enable_activation_offload=true", CPU], "all is in host memory"),
        ([*LOCAL, f"{ACTOR}.fsdp_config.forward_prefetch=true"], "does not shard"),
        (
            [f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.offload_policy=true", PARAM_OFFLOAD],
            "param_offload=true has no effect: actor_rollout_ref.actor.fsdp_config.offload_policy keeps both",
        ),
        (["algorithm.kl_ctrl.kl_coef=0.01"], "algorithm.use_kl_in_reward=false"),
        ([f"{ACTOR}.kl_loss_coef=0.01"], "use_kl_loss=false"),
        (["reward_model.model.path=/rm"], "there is no reward model with reward_model.enable=false"),
        (["reward_model.judge.model=m"], "there is no judge without reward_model.judge.url"),
        (["reward_model.sandbox_fusion.max_concurrent=3"], "programs run on this machine without"),
        (
            ["custom_reward_function.path=my.py", "reward_model.sandbox_fusion.url=http://h/run_code"],
            "custom_reward_function.path=my.py scores in place of the built-in scorers",
        ),
        (["reward_model.sandbox.enable=false", "reward_model.sandbox.memory_mb=9"], "calls the function in the driver"),
        (["reward_model.sandbox.batch_timeout_s=9"], "reward_model.sandbox.timeout_s is the limit of a call"),
        (
            ["reward_model.reward_manager=batch", "custom_reward_function.path=my.py"]
            + ["reward_model.sandbox.timeout_s=9"],
            "batch_timeout_s is the limit",
        ),
        ([*RM, "reward_model.launch_reward_fn_async=true"], "the built-in manager naive gives out the reward model's"),
        ([*RM, "custom_reward_function.path=f.py"], "scores validation only"),
        ([*RM, "reward_model.by_source.math=f.py"], "by_source is used in validation only"),
        ([*RM, "reward_model.judge.url=http://h/v1", "reward_model.judge.model=m"], "judge.url is used in validation"),
        ([*RM, "reward_model.self_test=stop"], "self_test=stop has no effect: the reward model scores"),
        (
            [*RM, "reward_model.reward_manager=dapo", "+reward_model.reward_kwargs.max_resp_len=9"]
            + [f"+reward_model.reward_kwargs.overlong_buffer_cfg.{word}" for word in ("enable=true", "len=4")],
            "overlong_buffer_cfg has no effect in training",
        ),
        ([*BYPASS], "log_prob_micro_batch_size_per_gpu=2 has no effect: algorithm.rollout_correction.bypass_mode=true"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.8", CPU], "gpu_memory_utilization=0.8 has no effect on any GPU"),
        ([*ON_CPU, f"{ROLLOUT}.gpu_memory_utilization=0.8"], "1 GiB at most, bounds the key-value cache"),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs.sglang.attention_backend=triton"],
            "engine_kwargs.sglang.attention_backend=triton has no effect",
        ),
        (["data.custom_cls.name=Mine"], "data.custom_cls.name=Mine has no effect: data.custom_cls.path=null"),
        (["data.sampler.class_name=Mine"], "data.sampler.class_path=null names no file"),
        (["data.datagen.name=Mine"], "data.datagen.path=null names no file"),
        ([*ASYNC, f"{ROLLOUT}.agent.custom_async_server.name=Mine"], "custom_async_server.path=null names no file"),
        (
            [f"{ACTOR}.policy_loss.rollout_correction.rollout_rs=token"],
            "loss_mode=vanilla reads algorithm.rollout_correction",
        ),
        (
            ["trainer.resume_mode=disable", "trainer.del_local_ckpt_after_load=true"],
            "resume_mode=disable loads no checkpoint",
        ),
        (
            ["trainer.resume_mode=disable", "trainer.default_hdfs_dir=/store"],
            "trainer.default_hdfs_dir=/store has no effect",
        ),
        ([*RM, "reward_model.model.input_tokenizer=null", "reward_model.max_length=4000"], "passes token ids on whole"),
        ([*RM, "reward_model.use_dynamic_bsz=true"], "reward_model.micro_batch_size_per_gpu=2 has no effect"),
        ([*RM, "reward_model.model.use_fused_kernels=true"], "needs no logits"),
        ([*RM, "reward_model.model.fsdp_config.optimizer_offload=true"], "the reward model is not trained"),
        ([*GRPO, "critic.optim.lr=1e-5"], "there is no critic with algorithm.adv_estimator=grpo"),
        ([*GRPO, "algorithm.lam=0.9"], "algorithm.lam=0.9 has no effect"),
        (["algorithm.pf_ppo.weight_pow=3"], "weight_pow=3.0 has no effect: algorithm.use_pf_ppo=false takes every"),
        (
            ["algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_min", "algorithm.pf_ppo.weight_pow=3"],
            "algorithm.pf_ppo.weight_pow=3.0 has no effect: algorithm.pf_ppo.reweight_method=max_min",
        ),
        (["algorithm.filter_groups.metric=acc"], "metric=acc has no effect: algorithm.filter_groups.enable=false"),
        (
            [*GRPO, "algorithm.filter_groups.enable=true", "reward_model.launch_reward_fn_async=true"],
            "launch_reward_fn_async=true has no effect: algorithm.filter_groups chooses",
        ),
        (["actor_rollout_ref.ref.fsdp_config.param_offload=true"], "there is no reference policy"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=8192"], "split by count"),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], "warmup_style=constant"),
        (["trainer.resume_from_path=/x/global_step_3"], "trainer.resume_mode=auto"),
        (["trainer.controller=local", "ray_init.num_cpus=8"], "starts no Ray"),
        ([f"{ROLLOUT}.response_length=256", "data.max_response_length=128"], "response_length=256 decides"),
        (["custom_reward_function.name=f"], "custom_reward_function.path=null"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true", REF], "counts twice"),
        (["trainer.use_legacy_worker_impl=disable"], "one implementation"),
        ([*GRPO, "algorithm.gamma=0.9"], "adv_estimator=grpo does not read it"),
        (["algorithm.step_gamma=0.9"], "adv_estimator=gae does not read it"),
        ([f"{CORRECTION}.rollout_is_mode=mask"], "rollout_is_mode=mask has no effect: algorithm.rollout_"),
        ([f"{CORRECTION}.rollout_is_threshold=3"], "rollout_is_threshold=3.0 has no effect"),
        ([f"{CORRECTION}.rollout_rs_threshold=3"], "rollout_correction.rollout_rs=null"),
        ([*BYPASS, f"{ROLLOUT}.mismatch_threshold=0.1"], "bypass_mode=true computes no probabilities to compare with"),
        ([*BYPASS, "algorithm.use_kl_in_reward=true", REF], "charged for the sampler's distance"),
        ([f"{ACTOR}.tau_pos=2"], "loss_mode=vanilla does not read it"),
        ([f"{ACTOR}.policy_loss.loss_mode=reinforce", f"{ACTOR}.clip_ratio=0.1"], "loss_mode=reinforce does not read"),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "was published with actor_rollout_ref.actor.loss_agg_mode=seq-mean"),
        ([f"{ACTOR}.loss_scale_factor=100"], "loss_agg_mode=token-mean"),
        ([f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.clip_ratio_high=0.28"], "its ratio is 1"),
        (
            [
                *GRPO,
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a]",
                "algorithm.use_kl_in_reward=true",
                REF,
            ],
            "gdpo reads algorithm.gdpo_reward_keys, not the reward",
        ),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3+", REF], "k3+ is k3"),
        (["algorithm.reward_shaping.overlong_buffer.len=64"], "reward_shaping.overlong_buffer.enable=false"),
        ([*GRPO, f"{SHAPING}.shift=1", f"{SHAPING}.norm.mean=batch"], "grpo compares with its group, shifted like it"),
        (
            [*GRPO, f"{SHAPING}.norm.std=running"],
            "norm.std=running has no effect: grpo divides by the std",
        ),
        (["algorithm.advantage.whiten=true"], "algorithm.advantage.whiten=true has no effect: gae does so by itself"),
        ([*GRPO, "algorithm.advantage.whiten=false"], "whiten=false has no effect: grpo does not by itself"),
        (
            [*GRPO, "algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", f"{SHAPING}.clip=2"],
            "clip=2.0 has no effect: gdpo reads algorithm.gdpo_reward_keys",
        ),
        ([f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full", REF], "micro-batches of the actor's update"),
        (["actor_rollout_ref.model.lora_alpha=32", f"{ROLLOUT}.lora_sync=merge"], "lora_rank=0 trains all weights"),
        (["distillation.distillation_loss.topk=8"], "topk=8 has no effect: distillation.enabled=false"),
        ([*TAUGHT, "distillation.distillation_loss.topk=8"], "distillation_loss.loss_mode=k3 does not read it"),
        ([*TAUGHT, "distillation.teacher_models.one.num_replicas=2"], "num_replicas has no effect: teachers score in"),
        ([*TAUGHT, "distillation.teacher_models.one.tries=2"], "one.tries has no effect: teachers score in"),
        (
            [*TAUGHT, "distillation.teacher_models.one.server_urls=http://a", "distillation.teacher.strategy=fsdp2"],
            "distillation.teacher.strategy=fsdp2 has no effect: all teachers are on server_urls",
        ),
        (["critic.model.target_modules=[q_proj]"], "critic.model.lora_rank=0 trains all weights"),
        (
            ["actor_rollout_ref.model.lora_rank=8", f"{ACTOR}.use_kl_loss=true", REF, f"{REF_DTYPE}=bf16"],
            "the reference is the actor with its LoRA adapter switched off",
        ),
        (
            [*ASYNC, HYBRID, f"{ROLLOUT}.partial_rollout=true", f"{ROLLOUT}.max_staleness=2"],
            "generated to its end in one step",
        ),
        ([*KEPT, f"{ROLLOUT}.max_postponements=2"], "max_postponements=2 is more than"),
        ([f"{ROLLOUT}.layered_summon=true"], "handed over tensor by tensor"),
        ([f"{ROLLOUT}.fire_temperature=9"], "use_fire_sampling=false"),
        ([f"{ROLLOUT}.use_fire_sampling=true", f"{ROLLOUT}.top_k=5", f"{ROLLOUT}.fire_top_k=4"], "first token too"),
        ([f"{ROLLOUT}.ignore_eos=true", f"{ROLLOUT}.stop_token_ids=[5]"], "goes on after any token"),
        ([f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.min_p=0.1"], "min_p=0.1 has no effect"),
    ],
)
def test_a_setting_without_effect_is_said(words, sentence):
    assert sentence in notes(*words)


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("top_p=0.9", "top_p=0.9"),
        ("top_k=20", "top_k=20"),
        ("min_p=0.1", "min_p=0.1"),
        ("repetition_penalty=1.1", "repetition_penalty=1.1"),
        ("use_fire_sampling=true", "use_fire_sampling=true"),
        ("frequency_penalty=0.2", "sampling_kwargs.frequency_penalty=0.2"),
        ("do_sample=false", "do_sample=false"),
    ],
)
def test_sampling_from_another_policy_than_is_trained_is_said_once(word, key):
    text = notes(f"+{ROLLOUT}.{word}")
    assert f"{ROLLOUT}.{key} makes the policy that samples another one" in text
    assert text.count("another one than the policy that is trained") == 1


@pytest.mark.parametrize("word", ["top_k=0", "temperature=0.7", "stop=x", "n=4", "min_tokens=null"])
def test_sampling_from_the_policy_that_is_trained_is_not_remarked(word):
    assert "another one" not in notes(f"+{ROLLOUT}.{word}")


@pytest.mark.parametrize(
    "words",
    [
        [*GRPO, f"{SHAPING}.shift=1", f"{SHAPING}.clip=1"],
        [*GRPO, "algorithm.norm_adv_by_std_in_grpo=false", f"{SHAPING}.norm.std=running"],
        [*GRPO, f"{SHAPING}.scale=2", "algorithm.use_kl_in_reward=true", REF],
        [*GRPO, "algorithm.advantage.whiten=true", f"{SHAPING}.whiten=true"],
        ["algorithm.advantage.whiten=false", f"{SHAPING}.norm.mean=batch", f"{SHAPING}.scale=2"],
    ],
)
def test_shaping_that_shows_is_not_remarked(words):
    assert "reward_shaping" not in notes(*words) and "advantage." not in notes(*words)


def test_compiled_layers_that_share_no_prompts_are_said_where_they_would_by_default():
    words, key = (*GRPO, CPU, "trainer.n_gpus_per_node=1"), f"{MODEL}.compile_layers"
    assert f"{key}=true: the responses to one prompt do not share" in notes(*words, f"{key}=true")
    assert "do not share" not in notes(*words)
    for off in (f"{MODEL}.use_prefix_sharing=false", f"{ROLLOUT}.n=1", "trainer.device=cuda"):
        other = [off, "algorithm.adv_estimator=gae"] if "n=1" in off else [off]
        assert "do not share" not in notes(*words, f"{key}=true", *other)


def test_one_tensor_parallel_rank_is_what_hf_has():
    assert notes(f"{ROLLOUT}.tensor_model_parallel_size=1") == ""


def test_no_torch_compile_is_what_happens():
    assert notes(f"{ACTOR}.use_torch_compile=false", CPU) == ""


def test_torch_compile_is_used_on_cuda():
    assert notes(f"{ACTOR}.use_torch_compile=true") == ""


def test_the_cache_of_hf_is_bounded_by_gpu_memory_utilization():
    assert notes(f"{ROLLOUT}.gpu_memory_utilization=0.6") == ""


def test_an_estimator_of_the_users_may_read_anything(monkeypatch):
    from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY

    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY._entries, "of_mine", lambda token_level_rewards, lam: None)
    assert "algorithm.lam" not in notes("algorithm.adv_estimator=of_mine", "algorithm.lam=0.9")


def test_micro_batch_sizes_are_unused_with_dynamic_batches():
    assert "are split by tokens" in notes(f"{ACTOR}.use_dynamic_bsz=true")


def test_notices_are_warnings_of_the_library_call():
    from verl.config.base import ConfigWarning
    from verl.config.load import load_ppo_config

    with pytest.warns(ConfigWarning, match="is FSDP2"):
        load_ppo_config([*RUNNABLE, f"{ACTOR}.strategy=fsdp", CPU])
