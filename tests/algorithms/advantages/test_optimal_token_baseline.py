import numpy as np
import torch
from torch.testing import assert_close

from tests.algorithms.batches import close
from verl.algorithms.advantages import (
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_optimal_token_baseline_advantage,
)

REWARDS = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.5, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
LOG_PROBS = torch.tensor([[-1.0, -0.5, -0.2], [-2.0, -0.1, 9.0]])
SQUARES = torch.tensor([[0.3, 0.5, 0.7], [0.2, 0.85, 9.0]])


def test_optimal_token_baseline_by_hand_weighs_the_group_by_its_gradients_so_far():
    same = np.zeros(2)
    advantages, returns = compute_optimal_token_baseline_advantage(REWARDS, MASK, same, LOG_PROBS, SQUARES)
    close(advantages, [[0.311110, 0.266267, 1.0], [-0.188890, -0.233733, 0.0]])
    close(returns, [[1.0, 1.0, 1.0], [0.5, 0.5, 0.0]])
    kept = compute_optimal_token_baseline_advantage(REWARDS, MASK, same, LOG_PROBS, SQUARES, handle_zero_tail=False)
    close(kept[0], [[0.311110, 0.266267, 0.0], [-0.188890, -0.233733, 0.0]])


def test_optimal_token_baseline_passes_over_tool_output():
    spread = lambda x: torch.stack([x[:, 0], x[:, 0] + 5, x[:, 1], x[:, 2]], dim=1)  # noqa: E731
    mask = torch.tensor([[1, 0, 1, 1], [1, 0, 1, 0]])
    plain, _ = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES)
    holes, _ = compute_optimal_token_baseline_advantage(
        spread(REWARDS), mask, np.zeros(2), spread(LOG_PROBS), spread(SQUARES)
    )
    assert_close(holes[:, [0, 2, 3]], plain)
    assert (holes[:, 1] == 0).all()


def test_optimal_token_baseline_of_a_response_alone_is_its_return_and_weights_square():
    alone, _ = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.arange(2), LOG_PROBS, SQUARES)
    close(alone, [[1.0, 1.0, 1.0], [0.5, 0.5, 0.0]])
    doubled = torch.full_like(REWARDS, 2.0)
    first = compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES, doubled)
    assert_close(first, compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES))
    only_first = torch.tensor([[1.0], [0.0]]).expand(2, 3)
    close(
        compute_optimal_token_baseline_advantage(REWARDS, MASK, np.zeros(2), LOG_PROBS, SQUARES, only_first)[0],
        [[0.0, 0.0, 1.0], [-0.5, -0.5, 0.0]],
    )


def test_tir_optimal_token_baseline_by_hand_meets_tokens_by_their_number_not_their_column():
    # probability 1/2 each and sum of squares 1/2: each token adds 1/2 to W, so W = 1/2, 1, ... as tokens come
    mask = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]])
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    log_prob, squares = torch.full((2, 4), 0.5).log(), torch.full((2, 4), 0.5)
    advantages, returns = compute_multi_turn_optimal_token_baseline_advantage(rewards, mask, [0, 0], log_prob, squares)
    close(advantages, [[0.5, 0, 0, 0.5], [-0.5, -0.5, 0, 0]])
    close(returns, [[1.0, 0, 0, 1.0], [0.0, 0, 0, 0]])
    assert_close(advantages, compute_optimal_token_baseline_advantage(rewards, mask, [0, 0], log_prob, squares)[0])
