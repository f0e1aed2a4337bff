"""Shaping by data source, bounds of scores, long failures, and groups chosen by their mean."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.config.helpers import loaded_with
from tests.trainer.test_experience import batch_of
from verl.algorithms.advantages import NonFiniteError
from verl.algorithms.losses import compute_value_loss
from verl.algorithms.reward_shaping import centre_and_spread, clip_scores, right_or_short
from verl.config.algorithm import AlgorithmConfig
from verl.trainer.buffer.prompt_pool import chosen_groups
from verl.trainer.ppo.experience import Shaping, attach_reward


def shaped(scores, lengths, sources=None, **changed):
    config = AlgorithmConfig().with_values({"adv_estimator": "grpo"})
    config = config.with_values({key.replace("__", "."): value for key, value in changed.items()})
    data = batch_of([1] * len(scores), lengths, 1, 8)
    rewards = torch.zeros(len(scores), 8)
    rewards[torch.arange(len(scores)), torch.tensor(lengths) - 1] = torch.tensor(scores)
    data.put("response_mask", (torch.arange(8) < torch.tensor(lengths)[:, None]).long())
    if sources:
        data.non_tensor_batch["data_source"] = np.array(sources, dtype=object)
    data = attach_reward(data, rewards, {})
    shaping = Shaping(config, 8)
    metrics = shaping.shape_scores(data) | shaping.finish_rewards(data)
    return data, metrics


def test_bounds_of_a_score_may_differ_above_and_below():
    norm = {"reward_shaping__norm__mean": "batch", "reward_shaping__norm__std": "batch"}
    data, metrics = shaped([0.0, 0.0, 0.0, 1.0], [2, 3, 1, 4], **norm, reward_shaping__clip_range=[-0.25, 3.0])
    assert data.column("token_level_rewards").sum(-1).tolist() == pytest.approx([-0.25, -0.25, -0.25, 1.499997])
    assert metrics["reward_shaping/clip_range_fraction"] == 0.75
    assert clip_scores(torch.tensor([-5.0, 5.0]), 3.0, -1.0)[0].tolist() == [-1.0, 3.0]


def test_scores_are_compared_within_their_data_source_of_this_step():
    centre, spread = centre_and_spread(
        torch.tensor([1.0, 3.0, 10.0, 20.0, 7.0]), np.arange(5), "source", "source", sources=list("aabbc")
    )
    assert centre.tolist() == [2, 2, 15, 15, 0]
    assert spread.tolist() == pytest.approx([2**0.5 + 1e-6, 2**0.5 + 1e-6, 50**0.5 + 1e-6, 50**0.5 + 1e-6, 1])
    data, _ = shaped([1.0, 3.0, 10.0, 20.0], [1] * 4, list("aabb"), reward_shaping__norm__mean="source")
    assert data.column("token_level_rewards").sum(-1).tolist() == [-1, 1, -5, 5]


def test_long_failures_leave_the_loss_and_long_successes_stay():
    data, metrics = shaped([0.0, 1.0, 0.0, -1.0], [3, 8, 6, 5], sample_mask__error_max_len=5)
    assert data.column("response_mask").sum(-1).tolist() == [3, 8, 0, 0]
    assert metrics["sample_mask/long_error_fraction"] == 0.5 and metrics["sample_mask/kept_fraction"] == 0.5
    with pytest.raises(NonFiniteError, match="token_level_scores holds nan"):
        right_or_short(torch.tensor([torch.nan]), torch.tensor([1]), 5)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["mixed", "hard", "close"]),
        ({"low": 0.25}, ["mixed", "close"]),
        ({"high": 0.5}, ["hard"]),
        ({"min_std": 0.1}, ["mixed", "hard"]),
        ({"low": 0.2, "high": 0.6, "min_std": 0.1}, ["mixed", "hard"]),
    ],
)
def test_groups_are_chosen_by_mean_and_std_too(options, kept):
    config = SimpleNamespace(**{"low": None, "high": None, "min_std": 0.0} | options)
    groups = {"mixed": [0, 1, 0, 1], "hard": [0, 0, 0, 1], "close": [0.9, 0.95, 0.9, 0.95], "same": [1, 1, 1, 1]}
    uids = [uid for uid, values in groups.items() for _ in values]
    chosen = chosen_groups(uids, np.concatenate([np.array(v, dtype=float) for v in groups.values()]), config)
    assert [uid for uid, keeps in chosen.items() if keeps] == kept


def test_values_may_go_unclipped():
    v, target, old = torch.tensor([[2.0, 1.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[5.0, 1.0]])
    loss, share = compute_value_loss(v, target, old, torch.ones(1, 2), None)
    assert (loss.item(), share.item()) == (1.25, 0.0)
    assert compute_value_loss(v, target, old, torch.ones(1, 2), 0.5)[0].item() == pytest.approx((4.5**2 / 2 + 0.5) / 2)


def test_other_homes_of_the_overlong_buffer_are_understood():
    words = ("reward_model.overlong_buffer.enable=true", "+reward_model.overlong_buffer.len=128")
    loaded = loaded_with(*words, "reward_model.overlong_buffer.log=true", "reward_model.len_reward.coef=0.5")
    buffer = loaded.config.algorithm.reward_shaping.overlong_buffer
    assert not loaded.problems and (buffer.enable, buffer.len, buffer.penalty_factor) == (True, 128, 0.5)
    assert "reward_model.overlong_buffer.len is now called" in loaded.warnings[0]
    twice = "+reward_model.reward_kwargs.overlong_buffer_cfg={enable: true, len: 4}"
    assert any("charged twice" in warning for warning in loaded_with(*words, twice).warnings)
