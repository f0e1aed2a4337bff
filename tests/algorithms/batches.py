"""Random batches of unequal rows, and the slow definitions to compare with."""

import torch
from torch.testing import assert_close


def ragged_mask(rows: int, width: int, seed: int, holes: bool = False) -> torch.Tensor:
    """(rows, width) int64: runs of ones from the left, with an empty and a full row; with ``holes``, any pattern."""
    g = torch.Generator().manual_seed(seed)
    if holes:
        return (torch.rand(rows, width, generator=g) < torch.rand(rows, 1, generator=g)).long()
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    lengths[0], lengths[-1] = width, 0
    return (torch.arange(width) < lengths[:, None]).long()


def normal(mask: torch.Tensor, seed: int, dtype=torch.float64) -> torch.Tensor:
    """Normal numbers on the ones of ``mask``, rubbish elsewhere."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(mask.shape, generator=g, dtype=dtype)
    return torch.where(mask.bool(), x, 1e3 * x)


def slow_suffix_sum(x: torch.Tensor, mask: torch.Tensor, decay: float) -> torch.Tensor:
    """y_t = x_t + decay * y at the next one of the mask; zero where masked."""
    y = torch.zeros_like(x)
    for i in range(len(x)):
        following = 0.0
        for t in reversed(mask[i].nonzero().flatten().tolist()):
            following = x[i, t].item() + decay * following
            y[i, t] = following
    return y


def slow_gae(rewards, values, mask, gamma, lam):
    """Unwhitened advantages, token by token."""
    advantages = torch.zeros_like(rewards)
    for i in range(len(rewards)):
        next_value = next_advantage = 0.0
        for t in reversed(mask[i].nonzero().flatten().tolist()):
            delta = rewards[i, t].item() + gamma * next_value - values[i, t].item()
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[i, t].item()
            advantages[i, t] = next_advantage
    return advantages


def close(got, expected):
    assert_close(got, torch.tensor(expected), rtol=0, atol=1e-6)


def outcome(scores, lengths, width=5):
    """Rewards on the last token of each row, as managers give them, and the mask."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(scores), width)
    for i, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        rewards[i, length - 1] = score
    return rewards, mask


def per_response(advantages, mask, expected):
    assert_close(advantages, torch.tensor(expected)[:, None] * mask, rtol=0, atol=1e-6)
