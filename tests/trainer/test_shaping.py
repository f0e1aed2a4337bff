"""Shaping of a batch: which columns change, in which order, and what a checkpoint keeps of it."""

import json

import numpy as np
import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.ppo.experience import Shaping, apply_kl_penalty, compute_advantage

WIDTH = 4


def batch_of(scores, lengths, uids=None, sources=None, reasons=None):
    """Responses of ``lengths`` tokens to one-token prompts, each with its score on its last token."""
    rows = len(scores)
    mask = (torch.arange(WIDTH) < torch.tensor(lengths)[:, None]).long()
    attention = torch.cat([torch.ones(rows, 1, dtype=torch.long), mask], 1)
    names = {"uid": uids or ["p"] * rows, "data_source": sources or ["digits"] * rows}
    names |= {"finish_reason": reasons} if reasons else {}
    data = DataProto.from_dict(
        tensors={"attention_mask": attention, "input_ids": attention, "responses": mask},
        non_tensors={name: np.array(column, dtype=object) for name, column in names.items()},
    )
    column = torch.zeros(rows, WIDTH)
    column[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(scores)
    data.put("token_level_scores", column)
    data.put("response_mask", mask)
    return data


def shaping(estimator="grpo", **options):
    changes = {name.replace("__", "."): value for name, value in options.items()}
    algorithm = AlgorithmConfig().with_values({"adv_estimator": estimator, **changes})
    return Shaping(algorithm, WIDTH), algorithm


def shaped(data, estimator="grpo", **options):
    """Metrics, after all the steps without KL."""
    shape, algorithm = shaping(estimator, **options)
    metrics = shape.shape_scores(data) | shape.finish_rewards(data)
    compute_advantage(data, estimator, config=algorithm)
    return metrics | shape.shape_advantages(data)


def test_defaults_change_nothing_and_measure_nothing():
    data = batch_of([1.0, 0.0], [2, 4])
    assert shaped(data) == {}
    assert data.column("token_level_rewards").equal(data.column("token_level_scores"))
    assert data.column("response_mask").tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]


def test_penalty_norm_scale_shift_and_clip_come_in_this_order():
    data = batch_of([1.0, 0.0, 1.0, 0.0], [4, 1, 3, 2])
    metrics = shaped(
        data,
        reward_shaping__overlong_buffer__enable=True,
        reward_shaping__overlong_buffer__len=2,
        reward_shaping__norm__mean="batch",
        reward_shaping__scale=4.0,
        reward_shaping__shift=0.5,
        reward_shaping__clip=1.25,
    )
    # scores less the penalties 1, 0, 0.5, 0: (0, 0, 0.5, 0), mean 0.125; x 4 + 0.5: (0, 0, 2, 0)
    assert data.column("token_level_rewards").sum(-1).tolist() == [0, 0, 1.25, 0]
    assert data.column("token_level_scores").sum(-1).tolist() == [1, 0, 1, 0]
    assert metrics == {
        "reward_shaping/overlong_fraction": 0.5,
        "reward_shaping/overlong_penalty": -0.375,
        "reward_shaping/clip_fraction": 0.25,
        "reward_shaping/token_clip_fraction": 0.0,
    }


class Beta:
    value = 1.0

    def update(self, current_kl, n_steps):
        pass


def test_kl_is_charged_after_the_norm_and_bounded_with_the_rest():
    data = batch_of([4.0, 0.0], [2, 2])
    shape, _ = shaping(reward_shaping__norm__mean="batch", reward_shaping__clip=1.0)
    shape.shape_scores(data)
    assert data.column("token_level_rewards").tolist() == [[0, 1, 0, 0], [0, -1, 0, 0]]
    data.put("old_log_probs", torch.tensor([[-1.0, -1, 0, 0], [-1, -1, 0, 0]]))
    data.put("ref_log_prob", torch.tensor([[-4.0, -1.25, 0, 0], [-1, -1, 0, 0]]))
    data, _ = apply_kl_penalty(data, Beta(), "kl", scores="token_level_rewards")
    metrics = shape.finish_rewards(data)
    assert data.column("token_level_rewards").tolist() == [[-1, 0.75, 0, 0], [0, -1, 0, 0]]
    assert metrics == {"reward_shaping/token_clip_fraction": 0.25}


def test_truncated_responses_leave_the_loss_but_not_their_group():
    data = batch_of([1.0, 0.0], [4, 4], reasons=["length", "stop"])
    metrics = shaped(data, sample_mask__drop_truncated=True)
    assert data.column("response_mask").tolist() == [[0, 0, 0, 0], [1, 1, 1, 1]]
    assert metrics == {"sample_mask/truncated_fraction": 0.5, "sample_mask/kept_fraction": 0.5}
    advantages = data.column("advantages")
    assert advantages[0].eq(0).all()
    torch.testing.assert_close(advantages[1], torch.full((4,), -0.5 / (0.5**0.5 + 1e-6)))


def test_without_a_reason_a_full_window_counts_as_truncated():
    data = batch_of([1.0, 0.0], [4, 3])
    shaped(data, sample_mask__drop_truncated=True)
    assert data.column("response_mask").sum(-1).tolist() == [0, 3]


def test_difficulty_is_read_off_the_scores_as_given():
    data = batch_of([1.0, 1, 1, 0], [1, 2, 3, 4], uids=["easy", "easy", "mid", "mid"])
    metrics = shaped(data, sample_mask__difficulty=[0.1, 0.9], reward_shaping__norm__mean="group")
    assert data.column("response_mask").sum(-1).tolist() == [0, 0, 3, 4]
    assert metrics["sample_mask/difficulty_fraction"] == 0.5


def test_a_batch_of_masked_responses_has_advantages_of_zero():
    for estimator in ("grpo", "reinforce_plus_plus", "opo"):
        data = batch_of([1.0, 0.0], [4, 4])
        shaped(data, estimator, sample_mask__drop_truncated=True, reward_shaping__whiten=True, advantage__whiten=True)
        assert data.column("advantages").eq(0).all()


def test_a_masked_response_counts_where_rewards_are_whitened():
    kept, masked = (batch_of([1.0, 0.0], [4, 4], reasons=["length", "stop"]) for _ in range(2))
    shaped(kept, reward_shaping__whiten=True)
    shaped(masked, reward_shaping__whiten=True, sample_mask__drop_truncated=True)
    assert masked.column("token_level_rewards").equal(kept.column("token_level_rewards"))
    assert masked.column("advantages")[1].equal(kept.column("advantages")[1])
    assert masked.column("advantages")[0].eq(0).all()


def test_whitened_rewards_are_dense():
    data = batch_of([1.0, 0.0], [2, 2])
    shaped(data, reward_shaping__whiten=True)
    torch.testing.assert_close(data.column("token_level_rewards")[:, :2], torch.tensor([[-0.5, 1.5], [-0.5, -0.5]]))


@pytest.mark.parametrize(("estimator", "expected"), [("grpo", True), ("gae", False), ("gdpo", False)])
def test_whitening_comes_after_estimators_that_do_not_whiten(estimator, expected):
    assert shaping(estimator, advantage__whiten=True)[0].whitens_after is expected
    assert not shaping(estimator, advantage__whiten=False)[0].whitens_after


def test_advantages_are_whitened_then_bounded_and_returns_stay():
    data = batch_of([1.0, 0.0, 0.0, 0.0], [1, 1, 1, 1])
    metrics = shaped(data, "reinforce", advantage__whiten=True, advantage__clip=1.0)  # 1.5, -0.5, -0.5, -0.5
    torch.testing.assert_close(data.column("advantages")[:, 0], torch.tensor([1.0, -0.5, -0.5, -0.5]))
    assert data.column("returns")[:, 0].tolist() == [1, 0, 0, 0]
    assert metrics == {"critic/advantage_clip_frac": 0.25}


def test_whiten_false_reaches_the_estimator():
    data = batch_of([1.0, 3.0], [1, 1])
    shaped(data, "reinforce_plus_plus", advantage__whiten=False)
    assert data.column("advantages")[:, 0].tolist() == [1, 3]


def test_running_moments_are_of_each_source_and_go_through_json():
    options = {"reward_shaping__norm__mean": "running", "reward_shaping__norm__std": "running"}
    whole, _ = shaping(**options)
    first = batch_of([1.0, 3.0, 7.0, 7.0], [1, 1, 1, 1], sources=["a", "a", "b", "b"])
    metrics = whole.shape_scores(first)
    assert metrics["reward_shaping/running_mean/a"] == 2 and metrics["reward_shaping/running_std/b"] == 0
    assert first.column("token_level_rewards")[2:].eq(0).all()
    resumed, _ = shaping(**options)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    both = [batch_of([0.1, 5.0], [1, 2], sources=["a", "b"]) for _ in range(2)]
    assert whole.shape_scores(both[0]) == resumed.shape_scores(both[1])
    assert both[0].column("token_level_rewards").equal(both[1].column("token_level_rewards"))


def test_a_resumed_run_goes_on_with_the_running_moments(tmp_path, monkeypatch):
    task = make_task(tmp_path / "task", rows=12)
    settings = {
        "trainer__logger": "[file]",
        "trainer__save_freq": 1,
        "trainer__total_training_steps": 2,
        "actor_rollout_ref__rollout__n": 2,
        "algorithm__adv_estimator": "reinforce",
        "algorithm__reward_norm__mean": "running",
        "algorithm__reward_norm__std": "running",
        "algorithm__reward_clip": 1,
        "algorithm__sample_mask__drop_truncated": True,
        "algorithm__advantage_clip": 0.5,
    }

    def run(name, **more):
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
        given = {**settings, "trainer__default_local_dir": str(tmp_path / name), **more}
        trainer = run_job(overrides(task, **given))
        return trainer, {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}

    whole, steps = run("whole")
    source = str(tmp_path / "whole" / "global_step_1")
    resumed, again = run("resumed", trainer__resume_mode="resume_path", trainer__resume_from_path=source)
    assert whole.shaping.running == resumed.shaping.running and whole.shaping.running["digits"].size == 16
    assert list(again) == [2]
    timed = ("timing", "perf/", "rollout/engine/")
    left, right = ({k: v for k, v in x[2].items() if not k.startswith(timed)} for x in (steps, again))
    assert left == right
    assert 0 < left["sample_mask/truncated_fraction"] <= 1 and "critic/advantage_clip_frac" in left


def test_reinforce_on_scores_normalised_by_group_is_grpo():
    scores, lengths, uids = [1.0, 0.0, 0.5, 0.2, 0.2, 0.9], [1, 4, 2, 3, 3, 1], ["p", "q"] * 3
    normed, grpo = batch_of(scores, lengths, uids), batch_of(scores, lengths, uids)
    shaped(normed, "reinforce", reward_shaping__norm__mean="group", reward_shaping__norm__std="group")
    shaped(grpo, "grpo")
    torch.testing.assert_close(normed.column("advantages"), grpo.column("advantages"), atol=1e-6, rtol=0)
