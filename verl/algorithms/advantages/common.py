"""Shared by estimators: their registry, groups of responses, scores, whitening, and the refusal of NaN.

On (B, R) tensors and prompt ids; nothing here depends on an estimator.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.registry import About, Registry, takes_ragged
from verl.algorithms.valid_tokens import (
    BLOCK,
    ValidTokens,
    as_column,
    discounted_suffix_sum,
    is_whole,
    row_sums,
    tokens_of,
    values_of,
)
from verl.batch.ragged import Column, Ragged, RowValues
from verl.utils.exit_codes import ExitCode

AdvantageFn = Callable[..., tuple[Tensor, Tensor]]

REWARD_COLUMNS = ("token_level_rewards", "token_level_scores")


def check_estimator(estimator: Callable) -> str | None:
    """Return the fault in the parameters of an estimator, or None if it can be called with what it names."""
    parameters = inspect.signature(estimator).parameters
    by_name = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    has_nameless = any(p.kind is p.POSITIONAL_ONLY for p in parameters.values())
    if not has_nameless and (takes_all or set(by_name) & set(REWARD_COLUMNS)):
        return None
    return (
        f"takes ({', '.join(parameters)}). An estimator is given by name what it asks for, and must ask for the "
        f"rewards: {' or '.join(REWARD_COLUMNS)}, next to response_mask, index and others; rename its parameters"
    )


ADV_ESTIMATOR_REGISTRY: Registry[AdvantageFn] = Registry(
    "algorithm.adv_estimator", "@register_adv_est(name)", check_estimator
)

register_adv_est = ADV_ESTIMATOR_REGISTRY.register

get_adv_estimator_fn = ADV_ESTIMATOR_REGISTRY.__getitem__


def builtin_estimator(
    name: str, equation: str, use: str, source: str, test: str, options: str = "", ragged: bool = False
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: register an estimator, which keeps no gradients; the arguments after the name are those of `About`.

    Args:
        ragged: it takes columns of the responses as `Ragged` too, and then returns such.
    """

    def register(estimator: AdvantageFn) -> AdvantageFn:
        about = About(equation, use, source, test, options)
        estimator = torch.no_grad()(estimator)
        return register_adv_est(name, about=about)(takes_ragged(estimator) if ragged else estimator)

    return register


class NonFiniteError(ValueError):
    """An estimator was given NaN or infinity: one such number would silently spoil the whole batch."""

    exit_class = ExitCode.UNHEALTHY


class Groups:
    """Responses to the same prompt, found by id: ``sizes`` (B,) and ``is_alone`` (B,) of each response's group."""

    def __init__(self, index: np.ndarray | Tensor | Sequence, device: torch.device):
        ids: dict[Any, int] = {}
        # ids may be strings, numbers or tuples: compared as Python compares them
        # as Python objects: elements of a tensor hash by identity, so that each would be a group
        index = index.tolist() if hasattr(index, "tolist") else index
        self.group = torch.tensor([ids.setdefault(i, len(ids)) for i in index], dtype=torch.long, device=device)
        self.num_groups = len(ids)
        self.sizes = torch.bincount(self.group, minlength=self.num_groups)[self.group]
        self.is_alone = self.sizes == 1

    def mean(self, x: Tensor) -> Tensor:
        """Each response's group mean, (B,)."""
        return self.sum(x) / self.sizes

    def std(self, x: Tensor) -> Tensor:
        """Each response's unbiased group std, (B,); zero in a group of one."""
        # not E[x^2] - mean^2: equal scores must have a std of exactly 0
        return (self.sum((x - self.mean(x)).square()) / (self.sizes - 1).clamp(min=1)).sqrt()

    def centred(self, x: Tensor) -> Tensor:
        """Each response's distance from its group mean, (B,); alone in its group, it is compared with zero."""
        return x - torch.where(self.is_alone, 0, self.mean(x))

    def scale(self, x: Tensor) -> Tensor:
        """Each response's group std, (B,), and 1 in a group of one: the scale that goes with `centred`."""
        return torch.where(self.is_alone, 1, self.std(x))

    def sum(self, x: Tensor) -> Tensor:
        """Each response's group total, shaped like ``x`` (B, ...)."""
        return x.new_zeros(self.num_groups, *x.shape[1:]).index_add(0, self.group, x)[self.group]


def outcome_scores(token_level_rewards: Tensor | Ragged) -> Tensor:
    """Sum (B, R) to (B,), in float64: then equal scores have exactly their common value as mean, in any order.

    Raises:
        NonFiniteError: a score is NaN or infinite.
    """
    scores = row_sums(token_level_rewards).double()
    require_finite("token_level_rewards", scores)
    return scores


def for_each_token(per_response: Tensor, rewards: Any, response_mask: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns, equal, of tokens that share their response's number: (B,) to (B, R), like ``rewards``."""
    per_response = per_response.to(rewards.dtype)
    if not isinstance(response_mask, Ragged):
        advantages: Any = ValidTokens(response_mask).spread(per_response)
    elif is_whole(response_mask):
        advantages = RowValues(per_response, response_mask.layout)
    else:
        spread = response_mask.layout.spread(per_response)
        advantages = response_mask.like(spread * (response_mask.values != 0))
    # one tensor under two names: change neither in place
    return advantages, advantages


def pack_finite(name: str, x: Any, tokens: ValidTokens) -> Tensor:
    """Pack (B, R) to (M,), in float32 or better.

    Raises:
        NonFiniteError: a valid token has NaN or infinity.
    """
    flat = tokens.pack(x)
    # sums over thousands of tokens lose all digits of bf16
    flat = flat if flat.dtype == torch.float64 else flat.float()
    require_finite(name, flat, tokens.row)
    return flat


def whiten(flat: Tensor, tokens: ValidTokens) -> Tensor:
    """Shift and scale packed numbers to mean 0 and unbiased variance 1 over the tokens of the batch.

    One token alone, or equal ones, become zero: there is nothing to tell them apart.
    """
    mean = flat.sum(dtype=torch.float64) / max(tokens.total, 1)  # over gaps too, which hold zeros
    centred = tokens.clear_gaps(flat - mean)
    variance = centred.square().sum() / max(tokens.total - 1, 1)
    # epsilon inside the root: where all are equal this is 0 * 1e4, not 0 / 0
    return centred * torch.rsqrt(variance + 1e-8)


def require_finite(name: str, x: Tensor, block_rows: Tensor | None = None) -> None:
    """Refuse NaN and infinity; ``x`` has one entry a row, or is packed with ``block_rows`` naming each block's row."""
    if x.sum().isfinite():  # one reduction in the usual case; NaN and infinity survive a sum
        return
    bad = (~x.isfinite()).nonzero().squeeze(-1)
    if len(bad) == 0:  # finite numbers whose sum overflows
        return
    rows = bad if block_rows is None else block_rows[bad // BLOCK]
    rows = rows.unique().tolist()
    raise NonFiniteError(
        f"{name} holds {x[bad[0]].item()} in {len(rows)} of the batch's rows (first: {rows[:5]}), and must be finite: "
        f"one such number spoils the advantages of all. Find out what produced it: the reward function or its KL "
        f"penalty for rewards, the critic's loss or learning rate for values."
    )


# -- The turns of a batch: what the policy said between two tool outputs, found as runs of ones in the mask ----------


class Turns(NamedTuple):
    """The K turns of a batch, row by row; M as in ``ValidTokens``."""

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


def find_turns(token_level_rewards: Column, response_mask: Column) -> Turns:
    """Find the turns of (B, R) token rewards: the runs of ones of a mask (B, R). Both with padding, or without.

    Raises:
        NonFiniteError: a reward of an unmasked token is NaN or infinite.
    """
    tokens, is_own = tokens_of(response_mask), values_of(response_mask) != 0
    rewards = pack_finite("token_level_rewards", token_level_rewards, tokens)
    # a turn begins at each valid token whose left neighbour is none
    begins = is_own.clone()
    begins[..., 1:] &= ~is_own[..., :-1]
    if isinstance(response_mask, Ragged):  # the neighbour of a row's first token is of another row
        layout = response_mask.layout
        firsts = layout.offsets[:-1][layout.lengths > 0]
        begins[firsts] = is_own[firsts]
    begins = tokens.pack(as_column(begins, response_mask))
    starts = begins.nonzero().squeeze(-1)
    number = (begins.cumsum(0) - 1).clamp(min=0)  # a gap counts to the turn before it
    is_valid = tokens.repeat(torch.ones_like(tokens.lengths))
    lengths = torch.zeros_like(starts).index_add(0, number, is_valid)
    here = torch.arange(len(number), device=number.device)
    tokens_left = ((starts + lengths)[number] - 1 - here).clamp(min=0)
    summed = rewards.new_zeros(len(starts)).index_add(0, number, rewards)
    # a block belongs to one row only, so where a turn starts tells its row
    return Turns(tokens, number, tokens_left, tokens.row[starts // BLOCK], summed)
