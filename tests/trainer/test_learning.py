"""A tiny model from random weights learns its task: the whole loop on its real path."""

import pytest

from tests.support.learning import check_learned
from tests.support.runs import make_task, overrides, read_metrics, run_job

LEARNING = {
    "data__train_batch_size": 8,
    "data__max_response_length": 16,
    "actor_rollout_ref__rollout__n": 8,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref__actor__optim__lr": "3e-4",
    "actor_rollout_ref__actor__optim__weight_decay": 0.0,
    "actor_rollout_ref__actor__optim__betas": "[0.9,0.99]",
    "actor_rollout_ref__actor__fsdp_config__mixed_precision__param_dtype": "bf16",
    "actor_rollout_ref__rollout__dtype": "bfloat16",
    "actor_rollout_ref__model__enable_gradient_checkpointing": False,
    "critic__model__enable_gradient_checkpointing": False,
    "trainer__logger": "[file]",
}


def rewards_of(tmp_path, monkeypatch, size="2.5M", **settings):
    """The mean reward of each step of a run."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)
    run_job(overrides(make_task(tmp_path, size=size), **{**LEARNING, **settings}))
    return [row["data"]["critic/score/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")]


@pytest.mark.learning
@pytest.mark.parametrize(
    ("engine", "mode"),
    [
        pytest.param(engine, mode, marks=getattr(pytest.mark, engine))
        for engine, mode in [("vllm", "async"), ("sglang", "async")]
    ],
)
def test_grpo_learns_with_another_engine(engine, mode, tmp_path, monkeypatch):
    rollout = {"name": engine, "mode": mode, "calculate_log_probs": True}
    settings = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
    rewards = rewards_of(tmp_path, monkeypatch, **settings, trainer__total_training_steps=16)
    check_learned(f"{engine}, {mode}", rewards)


SHORT = {
    "trainer__controller": "local",
    "data__max_response_length": 10,
    "actor_rollout_ref__rollout__n": 4,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,  # two optimizer steps a batch: the second is off-policy
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref__actor__optim__lr": "7e-4",
    "trainer__total_training_steps": 14,
}
TINY = {**SHORT, "size": "tiny", "actor_rollout_ref__actor__optim__lr": "6e-3", "trainer__total_training_steps": 16}
"""Two layers of 64 learn in three seconds of CPU time."""
ESTIMATOR, ACTOR = "algorithm__adv_estimator", "actor_rollout_ref__actor"
LOSS, BUFFER = f"{ACTOR}__policy_loss__loss_mode", "algorithm__reward_shaping__overlong_buffer"
METHODS = {
    "grpo": {},
    "rloo": {ESTIMATOR: "rloo"},
    "reinforce_plus_plus": {ESTIMATOR: "reinforce_plus_plus"},
    "remax": {ESTIMATOR: "remax", "trainer__total_training_steps": 26},  # no division by the spread: smaller gradients
    "ppo": {
        ESTIMATOR: "gae",
        "critic__strategy": "local",
        "critic__optim__lr": "1e-3",
        "critic__ppo_micro_batch_size_per_gpu": 16,
    },
    "gspo": {LOSS: "gspo", f"{ACTOR}__loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}__clip_ratio_high": 0.05},
    "cispo": {LOSS: "cispo", f"{ACTOR}__clip_ratio_low": 1.0},
    "dapo": {
        f"{ACTOR}__clip_ratio_high": 0.28,
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__metric": "acc",
        f"{BUFFER}__enable": True,
        f"{BUFFER}__len": 4,
        f"{BUFFER}__penalty_factor": 0.1,
        "trainer__total_training_steps": 12,  # where nearly all succeed, groups that differ are hard to find
    },
    "tis": {LOSS: "tis", "actor_rollout_ref__rollout__calculate_log_probs": True},
    "kl_cov": {LOSS: "kl_cov"},
    "dr_grpo": {
        "algorithm__norm_adv_by_std_in_grpo": False,
        f"{ACTOR}__loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "optimal_token_baseline": {ESTIMATOR: "optimal_token_baseline", f"{ACTOR}__calculate_sum_pi_squared": True},
}


@pytest.mark.learning
@pytest.mark.parametrize("method", METHODS)
def test_a_method_reaches_a_reward_of_85_percent(method, tmp_path, monkeypatch):
    rewards = rewards_of(tmp_path, monkeypatch, **TINY | METHODS[method])
    check_learned(method, rewards, over=(2, 3))


@pytest.mark.learning
def test_without_the_policy_loss_the_reward_stays_where_it_was(tmp_path, monkeypatch):
    """What the test above sees is the method's doing: the same run with the loss of weight zero goes nowhere."""
    rewards = rewards_of(tmp_path, monkeypatch, **TINY, actor_rollout_ref__actor__rl_loss_coef=0.0)
    assert max(rewards) < 0.25


@pytest.mark.learning
@pytest.mark.ray
def test_grpo_learns_on_ray_with_two_ranks(tmp_path, monkeypatch):
    two = {"trainer__n_gpus_per_node": 2, f"{ACTOR}__strategy": "fsdp2", f"{ACTOR}__ppo_micro_batch_size_per_gpu": 8}
    rewards = rewards_of(tmp_path, monkeypatch, **TINY | {"trainer__controller": "ray"} | two)
    check_learned("two ranks on Ray", rewards)
