"""What policy losses share: their registry, the ratio, and the way from value and slope of each token to a loss.

Knows packed tokens and aggregation; knows no particular loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_rows
from verl.algorithms.registry import Registry
from verl.algorithms.valid_tokens import PaddedTokens, ValidTokens, valid_tokens

PolicyLossFn = Callable[..., tuple]

LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config")
"""What every policy loss is told, in the order in which older releases of verl passed it."""


def loss_arguments_of(policy_loss: Callable) -> tuple[str, ...]:
    """Those of ``LOSS_ARGUMENTS`` the function names, or all if it takes any; empty if it must be called by position.

    By position are called functions whose first parameter has a name of their own.
    """
    parameters = inspect.signature(policy_loss).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return LOSS_ARGUMENTS
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if len(by_position) == len(LOSS_ARGUMENTS) and by_position[0] not in LOSS_ARGUMENTS:
        return ()
    return tuple(p.name for p in parameters if p.name in LOSS_ARGUMENTS)


def check_policy_loss(policy_loss: Callable) -> str | None:
    """What is wrong with the parameters of a policy loss; None: it can be called."""
    parameters = inspect.signature(policy_loss).parameters
    names = loss_arguments_of(policy_loss)
    if not names and len(parameters) == len(LOSS_ARGUMENTS) or "log_prob" in names:
        return None
    return (
        f"takes ({', '.join(parameters)}). A policy loss must take log_prob, what it changes, by that name or all of "
        f"({', '.join(LOSS_ARGUMENTS)}) in this order; rename its parameters"
    )


POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode", "@register_policy_loss(name)", check_policy_loss
)
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss_fn = POLICY_LOSS_REGISTRY.__getitem__


class Tokens:
    """The real tokens of a micro-batch, packed, and what is known of each.

    ``log_prob``, ``old``, ``advantage``, ``log_ratio`` and ``ratio`` (log pi, log pi_old, A, log w, w) are constants:
    a loss works out its value and its slope d loss / d log pi by hand, and ``loss`` joins them. log w is cut at +-20.
    """

    def __init__(self, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor):
        self.cells: ValidTokens | PaddedTokens = valid_tokens(response_mask)
        self.width = response_mask.shape[-1]
        self.tracked = self.cells.pack(log_prob)
        self.log_prob = self.tracked.detach()
        self.old = self.cells.pack(old_log_prob).detach()
        self.advantage = self.cells.pack(advantages).detach()
        self.log_ratio = (self.log_prob - self.old).clamp(-20, 20)
        self.ratio = self.log_ratio.exp()

    def pack(self, column: Tensor) -> Tensor:
        """One more column, (B, R) to packed, as a constant."""
        return self.cells.pack(column).detach()

    def row_mean(self, flat: Tensor) -> Tensor:
        """The mean over each response, (B,)."""
        return self.cells.row_sum(flat) / self.cells.lengths.clamp(min=1)

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """Give each token its response's number, (B,) to packed."""
        return self.cells.repeat(per_row)

    def loss(
        self,
        value: Tensor,
        slope: Tensor,
        loss_agg_mode: str,
        rollout_is_weights: Tensor | None = None,
        is_clipped: Tensor | None = None,
        is_clipped_lower: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Aggregate token losses of ``value`` whose gradient by log pi is ``slope``; returns it and the usual metrics.

        Args:
            rollout_is_weights: (B, R) factors of each token's loss and gradient.
            is_clipped, is_clipped_lower: packed bools; tokens whose gradient a bound took away or cut.
        """
        losses = value + slope * (self.tracked - self.log_prob)
        if rollout_is_weights is not None:
            losses = losses * self.pack(rollout_is_weights)
        loss = agg_rows(self.cells.row_sum(losses), self.cells.lengths, loss_agg_mode, self.width)
        return loss, {
            "actor/pg_clipfrac": self._share(is_clipped),
            "actor/ppo_kl": self.cells.mean(-self.log_ratio),
            "actor/pg_clipfrac_lower": self._share(is_clipped_lower),
        }

    def _share(self, is_clipped: Tensor | None) -> Tensor:
        return torch.zeros((), device=self.ratio.device) if is_clipped is None else self.cells.mean(is_clipped)


def clip_range(config: Any, loss_mode: str) -> tuple[float, float]:
    """``clip_ratio_low`` and ``clip_ratio_high`` of the actor section, each ``clip_ratio`` where null."""
    config = section_of(config, loss_mode)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def section_of(config: Any, loss_mode: str) -> Any:
    """``config``, which must be there."""
    if config is None:
        raise ValueError(
            f"policy loss {loss_mode!r}: config is missing. Pass the actor section, which holds its options."
        )
    return config


def loss_and_metrics(result: tuple) -> tuple[Tensor, dict[str, Any]]:
    """Bring what a policy loss returned into one form: (loss, metrics) as it is, the older 4-tuple with names."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        return result
    if isinstance(result, tuple) and len(result) == 4:
        loss, clipfrac, kl, clipfrac_lower = result
        return loss, {"actor/pg_clipfrac": clipfrac, "actor/ppo_kl": kl, "actor/pg_clipfrac_lower": clipfrac_lower}
    shape = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
    raise TypeError(
        f"A policy loss returned {shape}, and must return (loss, metrics dict) or "
        f"(loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower). Change the function registered as loss_mode."
    )
