"""An estimator, a policy loss, a scorer and a tracker are each added by one file, outside the package."""

import sys

from tests.support.runs import make_task, overrides, read_metrics, run_job

ESTIMATOR = """
def score_itself(token_level_rewards, response_mask, **kwargs):
    advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages
"""
LOSS = """
from verl.trainer.ppo.core_algos import agg_loss

def weighted_log_prob(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None,
                      rollout_is_weights=None):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    return loss, {"actor/mean_advantage": (advantages * response_mask).sum().item()}
"""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) / 100, "length": len(solution_str)}
"""
TRACKER = """
import json
from verl.telemetry.tracking import Backend, register_backend

@register_backend("lines")
class Lines(Backend):
    def __init__(self, project_name, experiment_name, config, path, **kwargs):
        self.path = path

    def log(self, data, step):
        with open(self.path, "a") as file:
            file.write(json.dumps({"step": step, **{name: float(value) for name, value in data.items()}}) + "\\n")
"""


def test_a_run_uses_an_estimator_a_loss_a_scorer_and_a_tracker_of_one_file_each(tmp_path, monkeypatch):
    for name, text in {"estimator": ESTIMATOR, "loss": LOSS, "scorer": SCORER, "tracker": TRACKER}.items():
        (tmp_path / f"one_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {
        "actor_rollout_ref__model__external_lib": "one_tracker",
        "algorithm__adv_estimator": f"{tmp_path}/one_estimator.py:score_itself",
        "actor_rollout_ref__actor__policy_loss__loss_mode": f"{tmp_path}/one_loss.py:weighted_log_prob",
        "custom_reward_function__path": tmp_path / "one_scorer.py",
        "trainer__logger": "[lines]",
        "trainer__tracker_kwargs__lines__path": tmp_path / "metrics.jsonl",
        "trainer__total_training_steps": 1,
    }
    try:
        run_job(overrides(make_task(tmp_path), **settings))
    finally:
        sys.modules.pop("one_tracker", None)
    (row,) = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "actor/mean_advantage" in row]
    assert row["actor/mean_advantage"] > 0 and row["critic/score/mean"] > 0
