"""What becomes of samples whose scoring fails, and when rewards are computed: seen in real runs."""

import json

import numpy as np
import pytest
import torch

from tests.rewards.managers.batches import TOKENIZER, batch_of
from tests.support.runs import make_task, overrides, run_job
from verl.rewards.managers import NaiveRewardManager, RewardError
from verl.rewards.managers.scoring import error_counts, without_failed
from verl.sandbox.containment import Uncontained
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.experience import compute_advantage, put_response_column
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

SOMETIMES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if len(solution_str) % 3 == 0:
        raise ValueError("a third of them")
    if len(solution_str) % 3 == 1 and extra_info["index"] % 4 == 0:
        return float("nan")
    return sum(c.isdigit() for c in solution_str) / 8
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def train(task, tmp_path, text, **settings):
    (tmp_path / "reward.py").write_text(text)
    own = {"custom_reward_function__path": tmp_path / "reward.py", "trainer__resume_mode": "disable"}
    own["trainer__default_local_dir"] = tmp_path / "checkpoints"
    return run_job(overrides(task, **{"trainer__total_training_steps": 2, **own, **settings}))


@pytest.mark.parametrize("on_error", ["zero_and_count", "drop_sample"])
def test_failures_are_counted_by_kind_and_dropped_if_asked_for(task, tmp_path, on_error):
    trainer = train(
        task,
        tmp_path,
        SOMETIMES,
        reward_model__on_error=on_error,
        trainer__rollout_data_dir=tmp_path / "dump",
    )
    metrics = trainer.metrics
    assert metrics["reward/errors"] == metrics["reward/errors/raised"] + metrics.get("reward/errors/not_finite", 0) > 0
    rows = [json.loads(line) for line in (tmp_path / "dump" / "2.jsonl").read_text().splitlines()]
    failed = [row["score"] for row in rows if row["reward_error"]]
    good = [row["score"] for row in rows if not row["reward_error"]]
    expected = sum(good) / len(good) if on_error == "drop_sample" else 0.0
    assert failed == pytest.approx([expected] * len(failed))
    assert {row["reward_error_kind"] for row in rows if row["reward_error"]} <= {"raised", "not_finite"}


def test_one_failure_more_than_is_borne_stops_the_run(task, tmp_path):
    with pytest.raises(RewardError, match=r"(?s)failed on sample.*failure 3 of the run, reward_model.max_errors=2"):
        train(task, tmp_path, SOMETIMES, reward_model__on_error="drop_sample", reward_model__max_errors=2)


def scored(values: list[float], failed: list[bool]):
    data = batch_of(["abc"] * len(values))
    data.put("response_mask", data.column("attention_mask")[:, -data.column("responses").shape[1] :])
    rewards = torch.zeros(data.column("responses").shape)
    rewards[:, 3] = torch.tensor(values)
    put_response_column(data, "token_level_rewards", rewards)
    data.non_tensor_batch["uid"] = np.array(["a"] * len(values), dtype=object)
    data.non_tensor_batch["reward_error"] = np.array([float(x) for x in failed], dtype=object)
    return data


def advantages(data, rows):
    return compute_advantage(data, "grpo").column("advantages")[rows]


def test_a_dropped_sample_moves_neither_the_loss_nor_its_siblings():
    alone = advantages(scored([1.0, 0.0, 0.5], [False] * 3), [0, 1, 2])
    data = scored([1.0, 7.0, 0.0, 0.5], [False, True, False, False])
    with without_failed(data, "drop_sample"):
        assert torch.equal(advantages(data, [0, 2, 3]), alone)
        assert not data.column("response_mask")[1].any() and not data.column("advantages")[1].any()
    assert set(data.non_tensor_batch["uid"]) == {"a"}


def test_a_failure_that_counts_as_zero_stays_in_its_group():
    data = scored([1.0, 0.0], [False, True])
    with without_failed(data, "zero_and_count"):
        assert data.column("response_mask")[1].any() and set(data.non_tensor_batch["uid"]) == {"a"}


def test_errors_are_counted_by_kind():
    extra = {"reward_error": [1.0, 0.0, 1.0], "reward_error_kind": ["timeout", None, "crash"]}
    assert error_counts(extra) == {"reward/errors": 2.0, "reward/errors/timeout": 1.0, "reward/errors/crash": 1.0}
    assert error_counts({}) == {}


WAITING = """
import os, time

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos, log, waits):
    def words():
        with open(log) as file:
            return file.read().split()

    def note(word):
        with open(log, "a") as file:
            file.write(word + "\\n")

    step = words().count("scores") + 1
    note("scores")
    while waits and words().count("evaluated") < step:
        time.sleep(0.01)
    note("scored")
    return [float(len(text)) for text in solution_strs]
"""


@pytest.mark.parametrize("background", [False, True])
def test_async_rewards_are_computed_while_log_probs_are(task, tmp_path, monkeypatch, background):
    """In turn the call ends before the models are asked; in the background it waits until they have answered."""
    log = tmp_path / "log"
    log.touch()

    def noting(self, batch, evaluate=RayPPOTrainer.evaluate):
        note("evaluates")
        batch = evaluate(self, batch)
        note("evaluated")
        return batch

    def note(word):
        with log.open("a") as file:
            file.write(f"{word}\n")

    monkeypatch.setattr(ray_trainer.RayPPOTrainer, "evaluate", noting)
    train(
        task,
        tmp_path,
        WAITING,
        custom_reward_function__name="compute_scores",
        reward_model__reward_manager="batch",
        reward_model__launch_reward_fn_async=background,
        actor_rollout_ref__actor__skip_old_log_probs=False,
        reward_model__self_test="off",
        **{
            "+custom_reward_function__reward_kwargs__log": log,
            "+custom_reward_function__reward_kwargs__waits": background,
        },
    )
    words = log.read_text().split()
    if background:
        assert sorted(words[:4]) == sorted(words[4:]) and words[3::4] == ["scored"] * 2
    else:
        assert words == ["scores", "scored", "evaluates", "evaluated"] * 2


def test_a_response_that_makes_a_built_in_scorer_fail_scores_0_and_is_counted(monkeypatch):
    def scorer(data_source, solution_str, ground_truth, extra_info=None):
        if ground_truth == "bad data" or "deep" in solution_str:
            raise RecursionError("too deep")
        return {"score": 1.0, "acc": True}

    monkeypatch.setattr("verl.rewards.managers.rule.is_built_in", lambda function: function is scorer)
    manager = NaiveRewardManager(TOKENIZER, 0, scorer)
    result = manager(batch_of(["right", "deep", "right", "deep"]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0]
    columns = result["reward_extra_info"]
    assert columns["acc"] == [True, False, True, False] and columns["score"] == [1.0, 0.0, 1.0, 0.0]
    assert error_counts(columns) == {"reward/response_errors": 2.0, "reward/response_errors/raised": 2.0}
    with pytest.raises(RewardError, match="too deep"):  # for which no response is to blame
        manager(batch_of(["right"] * 2, ["5", "bad data"]))


def test_programs_that_cannot_be_contained_are_never_scored():
    def scorer(data_source, solution_str, ground_truth, extra_info=None):
        raise Uncontained(["files"])

    with pytest.raises(RewardError, match="cannot promise files"):
        NaiveRewardManager(TOKENIZER, 0, scorer, on_error="zero_and_count")(batch_of(["a", "b"]))
