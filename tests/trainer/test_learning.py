"""A tiny model from random weights learns its task: the whole loop on its real path."""

import pytest

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


def learn(tmp_path, monkeypatch, **settings):
    """Run and return the mean reward of the first and of the last five steps."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)
    task = make_task(tmp_path, size="2.5M")
    run_job(overrides(task, **{**LEARNING, **settings}))
    rewards = [row["data"]["critic/score/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


@pytest.mark.learning
def test_grpo_learns_on_the_local_controller(tmp_path, monkeypatch):
    first, last = learn(tmp_path, monkeypatch, trainer__total_training_steps=30)
    assert first < 0.5 and last > 0.9


@pytest.mark.learning
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")]
)
def test_grpo_learns_with_another_engine(engine, mode, tmp_path, monkeypatch):
    rollout = {"name": engine, "mode": mode, "calculate_log_probs": True}
    settings = {f"actor_rollout_ref__rollout__{key}": value for key, value in rollout.items()}
    first, last = learn(tmp_path, monkeypatch, **settings, trainer__total_training_steps=25)
    assert first < 0.5 and last > 0.85


SHORT = {
    "data__max_response_length": 10,
    "actor_rollout_ref__rollout__n": 4,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,  # two optimizer steps a batch: the second is off-policy
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 16,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref__actor__optim__lr": "7e-4",
    "trainer__total_training_steps": 14,
}
LOSS, ACTOR = "actor_rollout_ref__actor__policy_loss__loss_mode", "actor_rollout_ref__actor"
METHODS = {
    "gspo": {LOSS: "gspo", f"{ACTOR}__loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}__clip_ratio_high": 0.05},
    "cispo": {LOSS: "cispo", f"{ACTOR}__clip_ratio_low": 1.0},
    "tis": {LOSS: "tis", "actor_rollout_ref__rollout__calculate_log_probs": True},
    "kl_cov": {LOSS: "kl_cov"},
    "dr_grpo": {
        "algorithm__norm_adv_by_std_in_grpo": False,
        f"{ACTOR}__loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "rloo": {"algorithm__adv_estimator": "rloo"},
    "remax": {"algorithm__adv_estimator": "remax"},
    "reinforce_plus_plus": {"algorithm__adv_estimator": "reinforce_plus_plus"},
    "optimal_token_baseline": {
        "algorithm__adv_estimator": "optimal_token_baseline",
        f"{ACTOR}__calculate_sum_pi_squared": True,
    },
}


@pytest.mark.learning
@pytest.mark.parametrize("method", METHODS)
def test_every_kind_of_method_climbs(method, tmp_path, monkeypatch):
    first, last = learn(tmp_path, monkeypatch, **SHORT, **METHODS[method])
    assert first < 0.5 and last > first + 0.2


@pytest.mark.learning
@pytest.mark.ray
def test_grpo_learns_on_ray_with_two_ranks(tmp_path, monkeypatch):
    first, last = learn(
        tmp_path,
        monkeypatch,
        trainer__controller="ray",
        trainer__n_gpus_per_node=2,
        actor_rollout_ref__actor__strategy="fsdp2",
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=32,
        trainer__total_training_steps=30,
    )
    assert first < 0.5 and last > 0.9


@pytest.mark.learning
@pytest.mark.parametrize("controller", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_ppo_with_a_critic_learns(controller, tmp_path, monkeypatch):
    first, last = learn(
        tmp_path,
        monkeypatch,
        trainer__controller=controller,
        algorithm__adv_estimator="gae",
        actor_rollout_ref__actor__optim__lr="3e-4",
        critic__optim__lr="1e-3",
        critic__ppo_micro_batch_size_per_gpu=64,
        critic__strategy="local",
        trainer__total_training_steps=40,
    )
    assert first < 0.5 and last > 0.85
