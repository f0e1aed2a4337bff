"""Functions of the driver between rollout and update."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.advantages.estimators import BASELINE_FREE, CREDIT, NAMES, num_turns
from verl.algorithms.advantages import NonFiniteError, register_adv_est
from verl.algorithms.losses import imitation_loss
from verl.algorithms.reward_shaping import onto_sampled_tokens
from verl.batch.ragged import RowValues
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.trainer.ppo.experience import (
    apply_kl_penalty,
    attach_reward,
    compute_advantage,
    compute_response_mask,
    response_column,
)
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.rollout_correction import reject_tokens


def batch_of(prompt_lengths, response_lengths, prompt_width=8, response_width=8):
    rows = len(prompt_lengths)
    mask = torch.zeros(rows, prompt_width + response_width, dtype=torch.long)
    for i, (p, r) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        mask[i, prompt_width - p : prompt_width + r] = 1
    data = DataProto.from_dict(
        tensors={
            "attention_mask": mask,
            "input_ids": torch.arange(mask.numel()).view_as(mask) * mask,
            "responses": (torch.arange(mask.numel()).view_as(mask) * mask)[:, prompt_width:],
            "row": torch.arange(rows),
        },
        non_tensors={"uid": np.array([f"u{i // 2}" for i in range(rows)], dtype=object)},
    )
    return data


def test_response_mask_marks_the_real_tokens_of_the_response():
    data = batch_of([2, 3], [1, 4], 4, 5)
    assert compute_response_mask(data).tolist() == [[1, 0, 0, 0, 0], [1, 1, 1, 1, 0]]


class FixedBeta:
    value = 0.5

    def update(self, current_kl, n_steps):
        self.seen = (current_kl, n_steps)


def test_kl_in_reward_charges_each_token_and_shows_the_controller_the_mean():
    data = batch_of([1, 1], [2, 1], 1, 2)
    mask = compute_response_mask(data).float()
    data.put("response_mask", mask.long())
    data.put("token_level_scores", torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
    data.put("old_log_probs", torch.tensor([[-1.0, -2.0], [-3.0, 0.0]]))
    data.put("ref_log_prob", torch.tensor([[-1.5, -1.0], [-3.0, 0.0]]))
    beta = FixedBeta()
    data, metrics = apply_kl_penalty(data, beta, "kl")
    torch.testing.assert_close(data.column("token_level_rewards"), torch.tensor([[-0.25, 1.5], [2.0, 0.0]]))
    assert beta.seen[0] == pytest.approx(-0.125) and beta.seen[1] == 2
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5


def test_user_estimator_receives_the_arguments_it_names_and_only_real_tokens_count():
    @register_adv_est("test_named_arguments")
    def estimator(token_level_rewards, response_mask, index, row, gamma):
        return token_level_rewards * gamma + row[:, None], token_level_rewards

    data = batch_of([1, 1], [2, 1], 1, 2)
    data.put("token_level_rewards", torch.ones(2, 2))
    data = compute_advantage(data, "test_named_arguments", gamma=0.5)
    assert data.column("advantages").tolist() == [[0.5, 0.5], [1.5, 0.0]]


def test_missing_column_of_an_estimator_is_named():
    data = batch_of([1, 1], [2, 1], 1, 2)
    data.put("token_level_rewards", torch.ones(2, 2))
    with pytest.raises(ValueError, match="algorithm.adv_estimator=gae needs 'values'"):
        compute_advantage(data, "gae")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_estimator_that_gives_nan_or_infinity_is_named_with_the_row(bad):
    @register_adv_est(f"test_gives_{bad}")
    def estimator(token_level_rewards, response_mask):
        advantages = token_level_rewards.clone()
        advantages[1, 0] = advantages[0, 1] = bad  # the second where masked: rubbish there is not looked at
        return advantages, token_level_rewards

    data = batch_of([1, 1], [1, 2], 1, 2)
    data.put("token_level_rewards", torch.zeros(2, 2))
    words = rf"advantages of algorithm.adv_estimator=test_gives_{bad} are NaN or infinite in 1 .*\[1\]"
    with pytest.raises(NonFiniteError, match=words):
        compute_advantage(data, f"test_gives_{bad}")


# -- a reward stands where the policy sampled --------------------------------------------------------------------------


def with_masks(masks, padding=0):
    """Rows of a prompt of one token, under response masks given as text; one group, with what estimators read."""
    width = max(map(len, masks)) + padding
    data = batch_of([1] * len(masks), list(map(len, masks)), 1, width)
    mask = torch.zeros(len(masks), width, dtype=torch.long)
    for row, text in zip(mask, masks, strict=True):
        row[: len(text)] = torch.tensor([int(bit) for bit in text], dtype=torch.long)
    data.put("response_mask", mask)
    g = torch.Generator().manual_seed(0)
    for name in ("values", "old_log_probs"):
        data.put(name, -torch.rand(mask.shape, generator=g))
    data.put("sum_pi_squared", torch.full(mask.shape, 0.5))
    data.put("reward_baselines", torch.zeros(len(masks)))
    data.non_tensor_batch["uid"] = np.array(["a"] * len(masks), dtype=object)
    data.non_tensor_batch["turn_state_ids"] = np.empty(len(masks), dtype=object)
    data.non_tensor_batch["turn_state_ids"][:] = [list(range(count)) for count in num_turns(mask)]
    return data


UNDISCOUNTED = {"step_gamma": 1.0, "gdpo_reward_keys": ["score"]}
OPTIONS = {"gamma": 1.0, "lam": 1.0, "config": AlgorithmConfig().with_values(UNDISCOUNTED)}


def rewarded(masks, scores, place):
    """That batch with each row's score where ``place`` of its mask says."""
    data = with_masks(masks, padding=1)
    rewards = torch.zeros(data.column("response_mask").shape)
    for i, (mask, score) in enumerate(zip(masks, scores, strict=True)):
        rewards[i, place(mask)] = score
    data = attach_reward(data, rewards, {"score": list(scores)})
    data.put("token_level_rewards", data.ragged("token_level_scores"))
    return data


MASKS = st.lists(st.text("01", min_size=1, max_size=6), min_size=2, max_size=5)


@pytest.mark.parametrize("name", NAMES)
@given(masks=MASKS, seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_no_reward_is_lost_or_moved_by_any_mask(name, masks, seed):
    scores = torch.randn(len(masks), generator=torch.Generator().manual_seed(seed)).tolist()
    on_last = rewarded(masks, scores, lambda mask: len(mask) - 1)  # what managers call the last valid token
    on_own = rewarded(masks, scores, lambda mask: mask.rfind("1") if "1" in mask else len(mask) - 1)
    in_padding = rewarded(masks, scores, lambda mask: -1)
    for data in (on_last, on_own, in_padding):
        totals = data.column("token_level_scores").sum(-1)
        torch.testing.assert_close(totals, torch.tensor(scores))
        compute_advantage(data, name, **OPTIONS)
    for column in ("advantages", "returns"):
        assert torch.equal(on_last.column(column), on_own.column(column))
        assert torch.equal(in_padding.column(column), on_own.column(column))
    if name in BASELINE_FREE:  # an undiscounted return is the whole score, wherever a mask has holes
        for i, mask in enumerate(masks):
            if "1" in mask:
                assert on_last.column("returns")[i, mask.index("1")].item() == pytest.approx(scores[i], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_on_a_tools_last_token_counts_where_the_estimators_are_called_alone(name):
    masks, scores = ["110", "1100", "10"], [1.0, 0.0, -1.0]
    on_last, on_own = with_masks(masks), with_masks(masks)
    for data, places in ((on_last, (2, 3, 1)), (on_own, (1, 1, 0))):
        rewards = torch.zeros(3, 4)
        rewards[torch.arange(3), torch.tensor(places)] = torch.tensor(scores)
        data.put("token_level_rewards", rewards)
        data.non_tensor_batch["score"] = np.array(scores, dtype=object)
        compute_advantage(data, name, **OPTIONS)
    assert torch.equal(on_last.column("advantages"), on_own.column("advantages"))
    first = on_last.column("advantages")[0, :2]
    assert (first != 0).any() and ("response" not in CREDIT[name] or first[0] == first[1])


def test_a_reward_on_masked_tokens_goes_to_the_sampled_token_before_it():
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    rewards = torch.tensor([[0.5, 0, 1, 2, 4, 8, 16.0], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]])
    got = onto_sampled_tokens(rewards, mask)
    assert got[0].tolist() == [0, 0.5, 7, 0, 0, 24, 0]
    assert torch.equal(got[1:], rewards[1:])
    assert onto_sampled_tokens(got, mask) is got


def test_a_reward_without_any_token_to_stand_on_is_an_error_and_a_score_of_zero_is_none():
    data = with_masks(["1", "11"])
    empty = batch_of([1, 1], [1, 0], 1, 2)
    attach_reward(empty, torch.tensor([[1.0, 0], [0.0, 0]]), {})
    with pytest.raises(ValueError, match="row 1 of the batch has a response without any token, and the reward 1"):
        attach_reward(empty, torch.tensor([[1.0, 0], [0.0, 1.0]]), {})
    attach_reward(data, torch.tensor([[1.0, 0], [0.0, 1.0]]), {})


def test_a_kl_penalty_in_the_reward_leaves_a_score_behind_tool_output_whole():
    data = rewarded(["110", "100"], [1.0, 2.0], lambda mask: len(mask) - 1)
    data.put("ref_log_prob", data.column("old_log_probs") + 1)
    data, _ = apply_kl_penalty(data, FixedBeta(), "kl")
    assert response_column(data, "token_level_rewards").sum(-1).tolist() == pytest.approx([1.0 + 2 * 0.5, 2.0 + 0.5])


def test_a_rejected_last_token_leaves_its_score_to_the_response():
    data = rewarded(["111", "110"], [1.0, 2.0], lambda mask: len(mask) - 1)
    sampled = data.column("old_log_probs").clone()
    sampled[0, 2] -= 9  # likelier by far under the trainer: rejected
    data.put("rollout_log_probs", sampled)
    options = AlgorithmConfig().with_values(
        {"rollout_correction.rollout_rs": "token", "rollout_correction.rollout_rs_threshold": 2.0}
    )
    reject_tokens(data, options.rollout_correction)
    mask, scores = (response_column(data, name) for name in ("response_mask", "token_level_scores"))
    assert mask.tolist() == [[1, 1, 0], [1, 1, 0]] and scores.tolist() == [[0, 1.0, 0], [0, 2.0, 0]]
    assert (imitation_loss(torch.full((2, 3), -1.0), scores, mask) > 0).sum() == 4


@settings(deadline=None, max_examples=80)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=5))
def test_one_reward_a_row_goes_to_the_token_that_a_padded_reward_goes_to(masks):
    """Tool output is masked: the score on a response's last token goes to the sampled token before it."""
    lengths = [len(mask) for mask in masks]
    padded_mask = torch.tensor([[int(own) for own in mask] + [0] * (8 - len(mask)) for mask in masks])
    numbers = torch.arange(1, 1 + len(masks), dtype=torch.float32)
    results = []
    for is_padded in (False, True):
        data = batch_of([2] * len(masks), lengths)
        data.put("response_mask", padded_mask)
        rewards = RowValues.on_last_tokens(numbers, data.ragged("responses").layout)
        attach_reward(data, rewards.padded() if is_padded else rewards, {})
        results.append(response_column(data, "token_level_scores"))
    assert torch.equal(*results)


def test_scores_and_advantages_stay_one_number_a_row_up_to_the_metrics():
    data = batch_of([3, 3, 3, 3], [5, 2, 8, 1]).packed()
    data.put("response_mask", data.ragged("responses").constant(1))
    rewards = RowValues.on_last_tokens(torch.tensor([0.0, 1.0, 1.0, 0.0]), data.ragged("responses").layout)
    attach_reward(data, rewards, {})
    data.put("token_level_rewards", data.ragged("token_level_scores"))
    compute_advantage(data, "grpo", config=AlgorithmConfig())
    metrics = compute_data_metrics(data, use_critic=False)
    for name in ("token_level_scores", "token_level_rewards", "advantages", "returns"):
        column = data.ragged(name)
        assert isinstance(column, RowValues) and "values" not in vars(column), f"{name} was laid out"

    padded = DataProto.from_dict(
        tensors={name: data.column(name) for name in data.keys()}, non_tensors=dict(data.non_tensor_batch)
    )
    assert metrics == pytest.approx(compute_data_metrics(padded, use_critic=False), rel=1e-12)
