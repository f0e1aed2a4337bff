import torch

from tests.algorithms.batches import close
from verl.algorithms.advantages import compute_remax_outcome_advantage

REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, -1.0, 0.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])  # the second row has a hole: a tool's output


def test_remax_by_hand():
    advantages, returns = compute_remax_outcome_advantage(REWARDS, torch.tensor([0.25, -1.0]), MASK)
    close(returns, [[1.0, 1.0, 1.0, 0.0], [-0.5, 0.0, -1.0, 0.0]])
    close(advantages, [[0.75, 0.75, 0.75, 0.0], [0.5, 0.0, 0.0, 1.0]])
