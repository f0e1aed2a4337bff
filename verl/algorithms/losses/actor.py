"""The actor's loss as a training engine calls it: from a forward pass's outputs to the mean loss of a micro-batch.

An engine calls ``loss(outputs, micro)``, multiplies by ``weight(micro) / sum of weights`` over the micro-batches of all
ranks, and adds up: the result, and so the gradient, does not depend on how the mini-batch was split. The metrics of
``averaged_as_loss`` are means of the same kind, all others (clip fractions, ``ppo_kl``, a user's own) means over
tokens. Reads columns and the config section; independent of model and engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.algorithms.aggregate import Aggregation, PreparedBatch
from verl.algorithms.kl import KL_PENALTIES
from verl.algorithms.losses.common import (
    LOSS_ARGUMENTS,
    TOKEN_CHOICES,
    get_policy_loss_fn,
    loss_and_metrics,
    loss_arguments_of,
)
from verl.algorithms.registry import control, does_take_ragged
from verl.algorithms.valid_tokens import as_column, row_sums, valid_tokens, values_of
from verl.batch.ragged import Column, Ragged

if TYPE_CHECKING:
    from verl.config.actor import ActorConfig

Metrics = dict[str, "Tensor | float"]


class TokenOutputs(NamedTuple):
    """Outputs of a forward pass for each response token, (t,), or (b, r) with padded columns; None if not requested."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    full_kl: Tensor | None = None
    """KL(policy || reference) over the vocabulary, or another divergence of the two."""
    top_log_probs: Tensor | None = None
    """(t, k) of the tokens in the column that the loss names."""


class PPOLoss:
    """The actor's loss, each of its parts aggregated as ``loss_agg_mode`` says:

        rl_loss_coef (policy loss + kl_loss_coef KL to the reference) - entropy_coeff entropy + sft_loss_coef imitation

    ``imitation`` is -log pi on tokens of responses with a positive score, and 0 on all others, which count in its mean:
    so its weight relative to the policy loss is the same token for token, whatever the share of successes.

    Args:
        config: the ``actor`` section.
        response_length: tokens, ``data.max_response_length``; needed for ``seq-mean-token-sum-norm`` only, and there
            only without ``actor.loss_scale_factor``.

    ``want_entropy`` tells the engine to compute entropies, ``want_full_kl`` to compare whole distributions with the
    reference's (``kl_loss_type=full``), ``columns`` which columns to put into the micro-batch.
    ``averaged_as_loss`` names the metrics that are aggregated as the loss is.
    The engine calls ``prepare`` with each mini-batch before it is split: a loss that compares tokens or responses of
    the whole mini-batch adds a column there.

    Raises:
        ValueError: unknown names; or responses are to be weighed and the policy loss takes no weights.
    """

    averaged_as_loss = frozenset({"actor/pg_loss", "actor/kl_loss", "actor/entropy_loss", "actor/sft_loss"})

    def __init__(self, config: ActorConfig, response_length: int | None = None):
        self.config = config
        self.aggregation = Aggregation(config.loss_agg_mode, response_length, config.loss_scale_factor)
        self.policy_loss = get_policy_loss_fn(config.policy_loss.loss_mode)
        self.want_full_kl = config.use_kl_loss and config.kl_loss_type == "full"
        self.kl = KL_PENALTIES[config.kl_loss_type] if config.use_kl_loss and not self.want_full_kl else None
        self.want_entropy = config.entropy_coeff != 0
        # the only step of a batch has itself as the policy that sampled
        self.is_on_policy = config.skip_old_log_probs
        self.weighs_responses = config.length_loss_weight or config.difficulty_loss_weight
        self._choice = TOKEN_CHOICES.get(config.policy_loss.loss_mode)

        self.arguments = loss_arguments_of(self.policy_loss)
        extra = {
            parameter.name: parameter
            for parameter in inspect.signature(self.policy_loss).parameters.values()
            if self.arguments
            and parameter.name not in LOSS_ARGUMENTS
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        }
        # those with a default ride along where the batch has them; the others are in `columns`, and must be there
        self.extra_columns = list(extra)
        if self.weighs_responses and "rollout_is_weights" not in extra:
            key = "difficulty_loss_weight" if config.difficulty_loss_weight else "length_loss_weight"
            raise ValueError(
                f"actor_rollout_ref.actor.{key}=true with policy_loss.loss_mode={config.policy_loss.loss_mode}: "
                "responses are weighed by the loss's rollout_is_weights, which this one does not name. Add that "
                "parameter, (B, R) factors of each token's loss, or set the option to false."
            )
        names = {
            "old_log_probs": not self.is_on_policy,
            "advantages": True,
            "response_mask": True,
            "ref_log_prob": self.kl is not None,
            "token_level_scores": config.sft_loss_coef != 0,
            "selected_tokens": self._choice is not None,
            "response_weights": self.weighs_responses,
            **{name: True for name, parameter in extra.items() if parameter.default is parameter.empty},
        }
        self.columns = tuple(name for name, is_read in names.items() if is_read)

    def weight(self, micro: Mapping[str, Column]) -> Tensor:
        """Return the weight of this micro-batch's mean, as a scalar."""
        return self.aggregation.weight(micro["response_mask"])

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        """Add the columns that compare tokens or responses of the whole mini-batch.

        Args:
            batch: this rank's rows, a ``DataProto``.
            gather: has ``log_probs()``, this rank's under the current weights; ``apply(function, values)``, which
                applies ``function`` to ``values`` (k, N) of all ranks; and ``has_reference``.
        """
        if self.want_full_kl != gather.has_reference:
            raise RuntimeError("a loss with want_full_kl needs a reference, and no other loss reads one")
        # before the mini-batch is split: both compare tokens or responses of all of it, over all ranks
        if self._choice is not None:
            batch = self._with_selected_tokens(batch, gather)
        if self.weighs_responses:
            batch = self._with_response_weights(batch, gather)
        return PreparedBatch(batch, self.aggregation.is_sum)

    def _with_selected_tokens(self, batch: Any, gather: Any) -> Any:
        """Add ``selected_tokens``, chosen among the valid tokens of all ranks by one more forward pass."""
        log_probs = gather.log_probs()
        # without old log-probs the policy is still the one that sampled
        old = batch.ragged("old_log_probs") if "old_log_probs" in batch else log_probs
        columns = [old.values, log_probs.values, batch.ragged("advantages").values]
        is_valid = batch.ragged("response_mask").values.bool()
        values = torch.stack([column[is_valid].cpu().float() for column in columns])
        # on the host and in fp32, as the values were compared
        selected = torch.zeros(len(is_valid))
        selected[is_valid.cpu()] = gather.apply(self.choose, values).float()
        batch = batch.select(deepcopy=False)  # the caller's batch stays as it is
        batch.put("selected_tokens", log_probs.like(selected))
        return batch

    def _with_response_weights(self, batch: Any, gather: Any) -> Any:
        """Add ``response_weights``, from lengths and difficulties of the responses of all ranks."""
        mask = batch.ragged("response_mask")
        # sampled tokens: the output of a tool makes no response longer
        values = [row_sums(mask)]
        if self.config.difficulty_loss_weight:
            if "difficulty" not in batch:
                raise ValueError(
                    "actor_rollout_ref.actor.difficulty_loss_weight=true: the batch has no column 'difficulty', one "
                    f"number a response; it has {batch.keys()}. Put it there, or set the option to false."
                )
            values.append(batch.column("difficulty"))
        weights = gather.apply(self.weigh, torch.stack([value.cpu().float() for value in values]))
        weights = weights.to(mask.values.device)
        batch = batch.select(deepcopy=False)
        batch.put("response_weights", mask.like(mask.layout.spread(weights)))
        return batch

    def choose(self, old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor) -> Tensor:
        """Select tokens among all unmasked ones of a mini-batch, (T,) each in any order: (T,) bool."""
        return self._choice(old_log_prob, log_prob, advantages, self.config)

    def weigh(self, lengths: Tensor, difficulty: Tensor | None = None) -> Tensor:
        """Return the weight of each response of a mini-batch, (B,) float32; see ``response_weights``."""
        return response_weights(lengths, difficulty, by_length=self.config.length_loss_weight)

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Column]) -> tuple[Tensor, Metrics]:
        """Return the mean loss of a micro-batch, a scalar, and its metrics.

        With ``token-sum`` that is the mean over tokens: ``is_sum`` of ``prepare`` has the engine make it a sum.

        Args:
            out: ``log_probs``, ``entropy`` if ``want_entropy``, ``full_kl`` if ``want_full_kl``.
            micro: ``columns``, each without padding or each (b, r). A policy loss of the user's gets (b, r).
        """
        mask = micro["response_mask"]
        tokens, mean = valid_tokens(mask), self.aggregation.mean
        loss, metrics = loss_and_metrics(self._policy_loss_of(out.log_probs, micro))
        loss = self.aggregation.rescaled(loss, tokens)
        metrics = {"actor/pg_loss": loss.detach(), **metrics}
        if self.config.use_kl_loss:
            kl = out.full_kl if self.kl is None else self.kl(out.log_probs, values_of(micro["ref_log_prob"]))
            kl = mean(tokens.pack(kl), tokens)
            loss = loss + self.config.kl_loss_coef * kl
            metrics["actor/kl_loss"] = kl.detach()
            metrics["actor/kl_coef"] = self.config.kl_loss_coef
        # entropy and imitation come after: the coefficient is that of the policy loss and its KL alone
        loss = loss * self.config.rl_loss_coef
        if self.want_entropy:
            entropy = mean(tokens.pack(out.entropy), tokens)
            loss = loss - self.config.entropy_coeff * entropy
            metrics["actor/entropy_loss"] = entropy.detach()
        if self.config.sft_loss_coef:
            imitation = mean(imitation_loss(out.log_probs, micro["token_level_scores"], mask), tokens)
            loss = loss + self.config.sft_loss_coef * imitation
            metrics["actor/sft_loss"] = imitation.detach()
        return loss, metrics

    def _policy_loss_of(self, log_probs: Tensor, micro: Mapping[str, Column]) -> tuple:
        """Call the policy loss with the columns that it names."""
        mask = micro["response_mask"]
        # equal to log pi, so every ratio is exactly 1 and no clip holds
        old = as_column(log_probs.detach(), mask) if self.is_on_policy else micro["old_log_probs"]
        values = (old, as_column(log_probs, mask), micro["advantages"], mask, self.aggregation.mode_of_mean)
        named: dict[str, Any] = dict(zip(LOSS_ARGUMENTS, (*values, self.config), strict=True))
        if self.arguments:
            named = {name: named[name] for name in self.arguments}
            named |= {name: micro[name] for name in self.extra_columns if name in micro}
            if self.weighs_responses:
                # the loss multiplies its tokens by these: so responses are weighed without a change of any loss
                weights = values_of(named.get("rollout_is_weights", 1)) * values_of(micro["response_weights"])
                named["rollout_is_weights"] = as_column(weights, mask)
        if not does_take_ragged(self.policy_loss):
            named = {name: one.padded() if isinstance(one, Ragged) else one for name, one in named.items()}
        return self.policy_loss(**named) if self.arguments else self.policy_loss(*named.values())


@control(
    "actor.sft_loss_coef",
    "- log pi on tokens of responses with a positive score, 0 on others",
    "learning from one's own successes, together with the policy loss or, with `rl_loss_coef=0`, alone",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "algorithms/losses/test_actor.py::test_imitation_by_hand",
    options="actor.sft_loss_coef actor.rl_loss_coef",
)
def imitation_loss(log_prob: Tensor, token_level_scores: Column, response_mask: Column) -> Tensor:
    """Raise the likelihood of what succeeded: -log pi on tokens of responses with a positive score, 0 on others.

    Args:
        log_prob: (B, R) float, or (T,) of columns without padding.
        token_level_scores: a response's score is the sum over its tokens.
        response_mask: 1 on tokens that count.

    Returns:
        The loss of each valid token, packed.
    """
    tokens = valid_tokens(response_mask)
    is_success = tokens.repeat((tokens.row_sum(tokens.pack(token_level_scores)) > 0).long()) != 0
    # `where`, not a product: the log-prob of a failure may be -inf
    return torch.where(is_success, -tokens.pack(log_prob), 0)


@control(
    "actor.length_loss_weight",
    "w_i = 3/2 - (T_i - T_min) / (T_max - T_min), over the mean of w",
    "shorter responses",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "algorithms/losses/test_response_weights.py::test_weights_by_hand",
)
@control(
    "actor.difficulty_loss_weight",
    "w_i = 1/2 + 3/2 clip(d_i, 0, 1), over the mean of w",
    "data with a difficulty a row: the hard ones count more",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "algorithms/losses/test_response_weights.py::test_weights_by_hand",
)
def response_weights(lengths: Tensor, difficulty: Tensor | None = None, by_length: bool = False) -> Tensor:
    """Weigh hard prompts and short responses up, the mean over a mini-batch staying 1:

        w_i = (1/2 + 3/2 clip(d_i, 0, 1)) (3/2 - (T_i - T_min) / (T_max - T_min)),      divided by the mean of w

    The first factor needs ``difficulty``, the second ``by_length``; it is the same for all where lengths are equal.
    A response without a token is none: it is in no minimum, maximum or mean, and weighs 0.

    Args:
        lengths: (B,) tokens of each response of the whole mini-batch.
        difficulty: (B,) float; 0 is easy, 1 is hard.

    Returns:
        (B,) float32.

    Source: ``difficulty_loss_weight`` and ``length_loss_weight`` of ROLL, which compares within a micro-batch.
    """
    is_response = lengths > 0
    weights = is_response.float()
    if not is_response.any():
        return weights
    if difficulty is not None:
        weights = weights * (0.5 + 1.5 * difficulty.float().clamp(0, 1))
    if by_length:
        own = lengths[is_response].float()
        # of equal lengths the factor is 3/2 for all, and the mean takes it off
        span = (own.max() - own.min()).clamp(min=1)
        weights = weights * (1.5 - (lengths.float() - own.min()) / span)
    return torch.where(is_response, weights / weights[is_response].mean(), 0)


def nonfinite_columns(data: Any, columns: Sequence[str]) -> str:
    """Describe which columns of a mini-batch spoiled its loss: those with NaN or infinity on a valid token.

    Args:
        data: has ``column(name)``, (B, R) or (B,), with ``response_mask`` among them.
    """
    is_own, found = data.column("response_mask") != 0, []
    for name in columns:
        values = data.column(name)
        # columns of one number a row have no mask
        bad = ~values.isfinite() & (is_own if values.shape == is_own.shape else True)
        if bad.any():
            found.append(f"{name} in {int(bad.sum())} places, first in row {int(bad.nonzero()[0, 0])}")
    if found:
        return f"NaN or infinite: {', '.join(found)}"
    return "all columns are finite: what the model computes is not, or its gradient overflows"
