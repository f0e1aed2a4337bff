"""Functions of the driver between rollout and update."""

import numpy as np
import pytest
import torch

from verl.algorithms.advantage import NonFiniteError, register_adv_est
from verl.protocol import DataProto
from verl.trainer.ppo.experience import apply_kl_penalty, compute_advantage, compute_response_mask


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
