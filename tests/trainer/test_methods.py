"""Every estimator and every policy loss runs by its name from the command line's keys."""

from pathlib import Path

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.config.checks.support import built_names

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Two rewards other than the score, for estimators that combine several."""
    digits, length = sum(c.isdigit() for c in solution_str), len(solution_str)
    return {"score": digits / 8, "digits": float(digits), "brevity": -float(length)}
'''
ACTOR = "actor_rollout_ref__actor"
NEEDS = {
    "gdpo": {"algorithm__gdpo_reward_keys": "[digits,brevity]", "algorithm__gdpo_reward_weights": "[2,1]"},
    "optimal_token_baseline": {f"{ACTOR}__calculate_sum_pi_squared": True},
    "tir_optimal_token_baseline": {f"{ACTOR}__calculate_sum_pi_squared": True},
    "bypass_mode": {
        "actor_rollout_ref__rollout__calculate_log_probs": True,
        "algorithm__rollout_correction__bypass_mode": True,
    },
    "tis": {"actor_rollout_ref__rollout__calculate_log_probs": True},
    "gae": {"critic__strategy": "local", "critic__ppo_micro_batch_size_per_gpu": 8},
}
ESTIMATORS = built_names("algorithm.adv_estimator")
LOSSES = built_names("actor_rollout_ref.actor.policy_loss.loss_mode")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("task"))
    Path(task["custom_reward_function.path"]).write_text(REWARD)
    return task


def one_step(task, tmp_path, monkeypatch, **settings):
    """The metrics of a training step of two mini-batches, the second off-policy."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    monkeypatch.chdir(tmp_path)
    settings |= {f"{ACTOR}__ppo_mini_batch_size": 2, "trainer__total_training_steps": 1, "trainer__logger": "[file]"}
    run_job(overrides(task, **settings))
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    return row["data"]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_runs_by_its_name(name, task, tmp_path, monkeypatch):
    metrics = one_step(task, tmp_path, monkeypatch, algorithm__adv_estimator=name, **NEEDS.get(name, {}))
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/nonfinite_steps"] == 0
    assert metrics["critic/advantages/max"] != metrics["critic/advantages/min"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_loss_runs_by_its_name(name, task, tmp_path, monkeypatch):
    mode = {f"{ACTOR}__policy_loss__loss_mode": name}
    metrics = one_step(task, tmp_path, monkeypatch, **mode, **NEEDS.get(name, {}))
    assert metrics["actor/grad_norm"] > 0 and metrics["actor/nonfinite_steps"] == 0
    assert {"actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"} <= set(metrics)
