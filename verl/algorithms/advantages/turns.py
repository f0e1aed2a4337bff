"""The turns of a batch: what the policy said between two tool outputs, found as runs of ones in the mask.

Knows token rewards and masks; knows no estimator.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.advantages.common import pack_finite
from verl.algorithms.valid_tokens import BLOCK, ValidTokens, discounted_suffix_sum


class Turns(NamedTuple):
    """The K turns of a batch, one row's after another's; M as in ``ValidTokens``."""

    tokens: ValidTokens
    number: Tensor
    """(M,): which of the turns a token belongs to."""
    tokens_left: Tensor
    """(M,): tokens of the same turn still to come."""
    row: Tensor
    """(K,)"""
    rewards: Tensor
    """(K,): sum over a turn."""

    @property
    def counts(self) -> Tensor:
        """(B,): how many turns each row has; 0 of a row without tokens."""
        return torch.bincount(self.row, minlength=self.tokens.shape[0])

    def to_go(self, decay: float) -> Tensor:
        """(K,): rewards of a turn and of those after it in its row, ``decay`` less with each turn."""
        counts = self.counts
        place = torch.arange(len(self.row), device=self.row.device) - (counts.cumsum(0) - counts)[self.row]
        table = self.rewards.new_zeros(len(counts), int(counts.max()) if len(counts) else 0)
        table[self.row, place] = self.rewards
        return discounted_suffix_sum(table, decay)[self.row, place]

    def to_tokens(self, per_turn: Tensor) -> Tensor:
        """Give every token its turn's number: (K,) to (B, R), zero where masked."""
        return self.tokens.unpack(per_turn[self.number])


def find_turns(token_level_rewards: Tensor, response_mask: Tensor) -> Turns:
    """The turns of (B, R) token rewards under a mask (B, R).

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.
    """
    tokens, is_own = ValidTokens(response_mask), response_mask != 0
    rewards = pack_finite("token_level_rewards", token_level_rewards, tokens)
    begins = is_own.clone()
    begins[:, 1:] &= ~is_own[:, :-1]
    begins = tokens.pack(begins)
    starts = begins.nonzero().squeeze(-1)
    number = (begins.cumsum(0) - 1).clamp(min=0)  # a gap counts to the turn before it
    is_valid = tokens.repeat(torch.ones_like(tokens.lengths))
    lengths = torch.zeros_like(starts).index_add(0, number, is_valid)
    here = torch.arange(len(number), device=number.device)
    tokens_left = ((starts + lengths)[number] - 1 - here).clamp(min=0)
    summed = rewards.new_zeros(len(starts)).index_add(0, number, rewards)
    return Turns(tokens, number, tokens_left, tokens.row[starts // BLOCK], summed)
