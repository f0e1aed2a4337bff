"""Shared by policy losses: the registry, their inputs, and the way from token losses to one number.

On flat tokens; nothing here depends on a particular loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, update_wrapper
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.aggregate import agg_rows
from verl.algorithms.registry import About, Registry, takes_ragged
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column

if TYPE_CHECKING:
    from verl.config.actor import ActorConfig

PolicyLossFn = Callable[..., tuple]
TokenChoice = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(old_log_prob, log_prob, advantages, config) of all valid tokens of a mini-batch, (T,) each, to (T,) bool."""

LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config")
"""Arguments of every policy loss, in the order in which older releases of verl passed them."""


def loss_arguments_of(policy_loss: Callable) -> tuple[str, ...]:
    """Return those of ``LOSS_ARGUMENTS`` the function names, all if it takes any, none if it is called by position.

    A function is called by position if its first parameter has another name.
    """
    parameters = inspect.signature(policy_loss).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return LOSS_ARGUMENTS
    by_position = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    # as functions written for releases that passed exactly these, by position
    if len(by_position) == len(LOSS_ARGUMENTS) and by_position[0] not in LOSS_ARGUMENTS:
        return ()
    return tuple(p.name for p in parameters if p.name in LOSS_ARGUMENTS)


def check_policy_loss(policy_loss: Callable) -> str | None:
    """Return the fault in the parameters of a policy loss, or None if it can be called."""
    parameters = inspect.signature(policy_loss).parameters
    names = loss_arguments_of(policy_loss)
    if not names and len(parameters) == len(LOSS_ARGUMENTS) or "log_prob" in names:
        return None
    return (
        f"takes ({', '.join(parameters)}). A policy loss must take log_prob, what it changes, by that name or all of "
        f"({', '.join(LOSS_ARGUMENTS)}) in this order; rename its parameters"
    )


POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry(
    "actor_rollout_ref.actor.policy_loss.loss_mode",
    "@register_policy_loss(name)",
    check_policy_loss,
    test="algorithms/losses/test_every_loss.py::test_loss_by_hand_in_a_batch_and_alone",
)
register_policy_loss = POLICY_LOSS_REGISTRY.register
get_policy_loss_fn = POLICY_LOSS_REGISTRY.__getitem__


class TokenLoss(NamedTuple):
    """The loss of each token, and the tokens that a bound changed: flat, shaped like ``LossInputs.log_prob``."""

    losses: Tensor
    """Differentiable in ``log_prob``."""
    clipped: Tensor | None = None
    """Bools: tokens whose gradient the main bound took away, ``actor/pg_clipfrac``."""
    clipped_lower: Tensor | None = None
    """Bools: the same of the other bound, ``actor/pg_clipfrac_lower``."""
    weights: Tensor | None = None
    """Factors of the losses in place of ``LossInputs.rollout_is_weights``."""
    metrics: Mapping[str, Tensor] = MappingProxyType({})
    """Scalars to log besides."""


class LossInputs:
    """The inputs of a built-in policy loss: the valid tokens of a micro-batch, flat, and the ``actor`` section.

    Only ``log_prob`` (log pi) is differentiable. Constants are ``old_log_prob`` (log pi_old), ``advantages`` (A),
    ``rollout_is_weights`` (None without), ``difference`` (log w as it is), ``log_ratio`` (log w within +-20),
    ``ratio`` (w), ``is_valid`` (False in gaps of the layout), and ``columns``, what the loss asked for besides, None
    where an optional one is missing. Gaps hold zeros; ``valid_tokens`` has the row of each token.

    Args:
        old_log_prob, log_prob, advantages, rollout_is_weights, columns: (B, R) float, or without padding, all of one
            layout; values at masked positions have no influence and get no gradient.
        response_mask: the same; 1 on tokens that count.
        config: the ``actor`` section.
    """

    def __init__(
        self,
        loss_mode: str,
        old_log_prob: Column,
        log_prob: Column,
        advantages: Column,
        response_mask: Column,
        loss_agg_mode: str,
        config: ActorConfig | None = None,
        rollout_is_weights: Column | None = None,
        **columns: Column | None,
    ):
        self.loss_mode, self.loss_agg_mode, self._config = loss_mode, loss_agg_mode, config
        self.valid_tokens = valid_tokens(response_mask)
        self.width = response_mask.shape[-1]
        self._response_mask = response_mask
        self.log_prob = self.valid_tokens.pack(log_prob)  # the only one that keeps its gradient
        self.old_log_prob = self._constant(old_log_prob)
        self.advantages = self._constant(advantages)
        self.rollout_is_weights = self._constant(rollout_is_weights)
        self.columns = {name: self._constant(column) for name, column in columns.items()}

    def _constant(self, column: Column | None) -> Tensor | None:
        return None if column is None else self.valid_tokens.pack(column).detach()

    @cached_property
    def difference(self) -> Tensor:
        """log pi - log pi_old, without bounds."""
        return self.log_prob.detach() - self.old_log_prob

    @cached_property
    def log_ratio(self) -> Tensor:
        """log w within +-20."""
        return self.difference.clamp(-20, 20)

    @cached_property
    def ratio(self) -> Tensor:
        """w = pi / pi_old."""
        return self.log_ratio.exp()

    @cached_property
    def is_valid(self) -> Tensor:
        """Bools: True on tokens, False in the gaps between rows."""
        return self._constant(self._response_mask) != 0

    @property
    def config(self) -> ActorConfig:
        """The ``actor`` section, which must have been given."""
        if self._config is None:
            raise ValueError(
                f"policy loss {self.loss_mode!r}: config is missing. Pass the actor section, which holds its options."
            )
        return self._config

    @property
    def clip_range(self) -> tuple[float, float]:
        """``clip_ratio_low`` and ``clip_ratio_high``, each ``clip_ratio`` where null."""
        return clip_range(self.config)

    def row_sum(self, flat: Tensor) -> Tensor:
        """Sum over each response: flat to (B,)."""
        return self.valid_tokens.row_sum(flat)

    def row_mean(self, flat: Tensor) -> Tensor:
        """Mean over each response: flat to (B,)."""
        return self.row_sum(flat) / self.valid_tokens.lengths.clamp(min=1)

    def to_tokens(self, per_row: Tensor) -> Tensor:
        """Give each token its response's number: (B,) to flat."""
        return self.valid_tokens.repeat(per_row)

    def with_gradient(self, value: Tensor, dloss_dlogp: Tensor) -> Tensor:
        """Token losses of a constant ``value`` whose derivative by log pi is ``dloss_dlogp``.

        For losses whose derivative is cheaper by hand than traced. Differentiable once.
        """
        return value + dloss_dlogp * (self.log_prob - self.log_prob.detach())

    def selected_tokens(self, choose: TokenChoice) -> Tensor:
        """Bools: the column ``selected_tokens``, or without it the choice among these tokens."""
        column = self.columns["selected_tokens"]
        if column is not None:
            return column != 0
        valid, is_selected = self.is_valid, torch.zeros_like(self.is_valid)
        is_selected[valid] = choose(
            self.old_log_prob[valid], self.log_prob.detach()[valid], self.advantages[valid], self.config
        )
        return is_selected

    def aggregate(self, token: TokenLoss) -> tuple[Tensor, dict[str, Tensor]]:
        """Aggregate as ``loss_agg_mode`` says; returns the loss and the usual metrics."""
        # weights multiply the loss and not the advantage: bounds are decided without them
        losses, weights = token.losses, self.rollout_is_weights if token.weights is None else token.weights
        if weights is not None:
            losses = losses * weights
        loss = agg_rows(self.row_sum(losses), self.valid_tokens.lengths, self.loss_agg_mode, self.width)
        return loss, {
            "actor/pg_clipfrac": self._fraction(token.clipped),
            "actor/ppo_kl": self.valid_tokens.mean(-self.log_ratio),
            "actor/pg_clipfrac_lower": self._fraction(token.clipped_lower),
            **token.metrics,
        }

    def _fraction(self, is_clipped: Tensor | None) -> Tensor:
        return (
            # gaps are summed too: with a ratio of 1 and A = 0 no bound may hold there
            torch.zeros((), device=self.log_prob.device) if is_clipped is None else self.valid_tokens.mean(is_clipped)
        )


TOKEN_CHOICES: dict[str, TokenChoice] = {}
"""loss_mode -> the function that selects tokens of a whole mini-batch, of built-in losses that do so."""


def builtin_policy_loss(
    *names: str,
    about: About | Sequence[About],
    columns: Sequence[str] = (),
    choose: TokenChoice | None = None,
    loss_agg_mode: str = "token-mean",
) -> Callable[[Callable[[LossInputs], TokenLoss]], PolicyLossFn]:
    """Decorator: make an equation on ``LossInputs`` the policy loss ``names``, with the signature that verl gives it:

        fn(old_log_prob, log_prob, advantages, response_mask, *columns, loss_agg_mode, config, rollout_is_weights)

    all tensors (B, R), or all without padding; ``old_log_prob`` is log pi_old, ``config`` the ``actor`` section, and
    ``rollout_is_weights`` multiply each token's loss. It returns the loss and its metrics, and is differentiable in
    ``log_prob``, once.

    Args:
        about: the row of docs/algorithms.md; its ``options`` are what the loss reads.
        columns: further columns of the batch, (B, R), that the loss needs.
        choose: selects tokens by comparing all of a mini-batch. The function then takes ``selected_tokens``, (B, R),
            nonzero on selected tokens, last; by default it selects among the tokens given.
        loss_agg_mode: default of that argument.
    """

    def wrap(equation: Callable[[LossInputs], TokenLoss]) -> PolicyLossFn:
        kind, required = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        parameters: dict[str, Any] = dict.fromkeys((*LOSS_ARGUMENTS[:4], *columns), required)
        parameters |= {"loss_agg_mode": loss_agg_mode, "config": None, "rollout_is_weights": None}
        if choose is not None:
            parameters["selected_tokens"] = None
            TOKEN_CHOICES.update(dict.fromkeys(names, choose))
        signature = inspect.Signature([inspect.Parameter(name, kind, default=d) for name, d in parameters.items()])

        def policy_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            # what is no parameter of LossInputs goes into its `columns`
            x = LossInputs(names[0], **arguments.arguments)
            return x.aggregate(equation(x))

        # engines read the signature to learn which columns a loss needs; that of the equation is (x)
        wrapper: Any = update_wrapper(policy_loss, equation)
        del wrapper.__wrapped__, wrapper.__annotations__
        wrapper.__signature__ = signature
        return register_policy_loss(*names, about=about)(takes_ragged(wrapper))

    return wrap


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """``clip_ratio_low`` and ``clip_ratio_high`` of the actor section, each ``clip_ratio`` where null."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def loss_and_metrics(result: tuple) -> tuple[Tensor, dict[str, Any]]:
    """Return (loss, metrics) from the result of a policy loss: that form as it is, the older 4-tuple with names."""
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
