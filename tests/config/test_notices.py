"""A setting without effect is said once, and only if the user made it."""

import pytest

from .helpers import RUNNABLE, notes

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2"
ON_CPU = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.device=cpu")
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")


def test_nothing_is_said_about_defaults():
    assert notes() == ""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([f"{ROLLOUT}.tensor_model_parallel_size=2"], "tensor_model_parallel_size=2 has no effect"),
        ([f"{ROLLOUT}.gpu_memory_utilization=0.6", f"{ROLLOUT}.enforce_eager=false"], "have no effect"),
        ([f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4"], "engine_kwargs"),
        ([f"{ROLLOUT}.multi_stage_wake_up=true"], "weights are always brought back first"),
        ([*ON_CPU, f"{ROLLOUT}.enforce_eager=false"], "no CUDA graphs on a CPU"),
        ([f"{ACTOR}.entropy_checkpointing=true"], "always computed in chunks"),
        ([f"{ACTOR}.use_torch_compile=true"], "without torch.compile"),
        ([f"{ACTOR}.strategy=fsdp"], "runs on the fsdp2 machinery"),
        (["algorithm.kl_ctrl.kl_coef=0.01"], "algorithm.use_kl_in_reward=false"),
        ([f"{ACTOR}.kl_loss_coef=0.01"], "use_kl_loss=false"),
        ([*GRPO, "critic.optim.lr=1e-5"], "there is no critic with algorithm.adv_estimator=grpo"),
        ([*GRPO, "algorithm.lam=0.9"], "algorithm.lam=0.9 has no effect"),
        (["actor_rollout_ref.ref.fsdp_config.param_offload=true"], "there is no reference policy"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=8192"], "cut by count"),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], "warmup_style=constant"),
        (["trainer.resume_from_path=/x/global_step_3"], "trainer.resume_mode=auto"),
        (["trainer.controller=local", "ray_init.num_cpus=8"], "starts no Ray"),
        ([f"{ROLLOUT}.response_length=256", "data.max_response_length=128"], "response_length=256 decides"),
        (["custom_reward_function.name=f"], "custom_reward_function.path=null"),
        ([f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true", REF], "counts twice"),
        (["trainer.use_legacy_worker_impl=disable"], "one implementation"),
    ],
)
def test_a_setting_without_effect_is_said(words, sentence):
    assert sentence in notes(*words)


def test_one_tensor_parallel_rank_is_what_hf_has():
    assert notes(f"{ROLLOUT}.tensor_model_parallel_size=1") == ""


def test_no_torch_compile_is_what_happens():
    assert notes(f"{ACTOR}.use_torch_compile=false") == ""


def test_dynamic_batches_leave_sizes_unread():
    assert "are cut by tokens" in notes(f"{ACTOR}.use_dynamic_bsz=true")


def test_notices_are_warnings_of_the_library_call():
    from verl.config.base import ConfigWarning
    from verl.config.load import load_ppo_config

    with pytest.warns(ConfigWarning, match="fsdp2 machinery"):
        load_ppo_config([*RUNNABLE, f"{ACTOR}.strategy=fsdp"])
