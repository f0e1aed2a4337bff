"""Loss of on-policy distillation: divergence of the policy from a teacher on the policy's own responses.

`DistillationLoss` is the actor's loss with one term more. The teacher's numbers are columns of the batch, or with
``..._full`` come from the forward pass; which model gave them is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from verl.algorithms.kl import KL_PENALTIES
from verl.algorithms.losses.actor import Metrics, PPOLoss, TokenOutputs
from verl.algorithms.valid_tokens import as_column, valid_tokens, values_of
from verl.batch.ragged import Column

if TYPE_CHECKING:
    from verl.config.actor import ActorConfig
    from verl.config.distillation import DistillationLossConfig

TEACHER_LOG_PROBS, TOP_LOG_PROBS, TOP_IDS = "teacher_log_probs", "teacher_topk_log_probs", "teacher_topk_ids"
"""Columns of a teacher: log-probs of the sampled tokens (B, R), fp32; those of its likeliest tokens (B, R, k), fp32,
and their ids (B, R, k), int32."""

_SMALLEST_TAIL = 1e-6
"""Probability of all other tokens at least: fp32 sums of probabilities are no more exact than that."""


def top_divergence(
    log_p: Tensor, log_q: Tensor, beta: float, with_tail: bool = True, smallest: float | None = None
) -> Tensor:
    """Divergence of p, the policy, from q, the teacher, over k tokens:

        beta = 0    sum_k q_k (log q_k - log p_k)                                       KL(q || p), "forward"
        beta = 1    sum_k p_k (log p_k - log q_k)                                       KL(p || q), "reverse"
        else        beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p     generalised Jensen-Shannon

    ``with_tail`` counts all other tokens as one more of probability 1 - sum_k. The sum is then a divergence of two
    distributions: never negative, 0 only where they agree on each of the k tokens, at most that over the whole
    vocabulary, and equal to it where the k tokens are the vocabulary.

    Args:
        log_p, log_q: (..., k) log-probs of the same tokens; differentiable in ``log_p``.
        smallest: log-probs below are taken for this one.

    Returns:
        (...) float.

    Source: Agarwal et al. 2023 (arXiv:2306.13649).
    """
    if with_tail:
        log_p, log_q = _with_tail(log_p), _with_tail(log_q)
    if smallest is not None:
        log_p, log_q = log_p.clamp(min=smallest), log_q.clamp(min=smallest)
    if beta == 0.0:
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    if beta == 1.0:
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    log_m = torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    of_q, of_p = ((one.exp() * (one - log_m)).sum(-1) for one in (log_q, log_p))
    return beta * of_q + (1 - beta) * of_p


def _with_tail(log_probs: Tensor) -> Tensor:
    """(..., k + 1): the last is the log of what the others leave of 1."""
    rest = 1 - log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, rest.clamp(min=_SMALLEST_TAIL).log()], -1)


class DistillationLoss(PPOLoss):
    """The actor's loss plus ``distillation_loss_coef`` times the divergence from the teacher, aggregated as it is.

    With ``use_policy_gradient`` the divergence of a token, here an estimate from the token itself, is no loss but minus
    its advantage: E[grad log pi (log pi - log pi_T)] is the gradient of KL(pi || pi_T) at each prefix, so that k1 has a
    gradient that it lacks as a loss. The advantage is that of the newest weights, the ratio that to those that sampled.

    Args:
        config: the ``actor`` section.
        options: ``distillation.distillation_loss``.
        response_length: as of `PPOLoss`.

    Source: Gu et al. 2023 (arXiv:2306.08543); Agarwal et al. 2023 (arXiv:2306.13649).
    """

    averaged_as_loss = PPOLoss.averaged_as_loss | {"distill/loss", "distill/pg_loss"}

    def __init__(self, config: ActorConfig, options: DistillationLossConfig, response_length: int | None = None):
        task = config if options.use_task_rewards else cast("ActorConfig", config.with_values({"rl_loss_coef": 0.0}))
        super().__init__(task, response_length)
        self.options = options
        self.want_full_kl = self.want_full_kl or options.is_full
        self.ids_column = TOP_IDS if options.is_topk else None
        own = () if options.is_full else (TEACHER_LOG_PROBS, *((TOP_LOG_PROBS, TOP_IDS) if options.is_topk else ()))
        self.columns = (*self.columns, *own)
        self.policy_gradient: PPOLoss | None = None
        if options.use_policy_gradient:
            changes = {name: getattr(options, name) for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
            changes |= {"policy_loss.loss_mode": options.policy_loss_mode, "rl_loss_coef": 1.0, "use_kl_loss": False}
            changes |= {"entropy_coeff": 0, "sft_loss_coef": 0.0}
            self.policy_gradient = PPOLoss(cast("ActorConfig", config.with_values(changes)), response_length)

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Column]) -> tuple[Tensor, Metrics]:
        """As of `PPOLoss`; ``out.top_log_probs`` (t, k) are the policy's of the teacher's tokens."""
        loss, metrics = super().__call__(out, micro)
        mask, divergence = micro["response_mask"], self.divergence(out, micro)
        tokens = valid_tokens(mask)
        own = self.aggregation.mean(tokens.pack(divergence), tokens)
        metrics |= {"distill/loss": own.detach(), **self._measures(out, micro)}
        if self.policy_gradient is not None:
            own, found = self.policy_gradient(out, {**micro, "advantages": as_column(-divergence.detach(), mask)})
            metrics |= {name.replace("actor/", "distill/"): value for name, value in found.items()}
        return loss + self.options.distillation_loss_coef * own, metrics

    def divergence(self, out: TokenOutputs, micro: Mapping[str, Column]) -> Tensor:
        """The divergence at each response token, (t,) or (b, r)."""
        options, smallest = self.options, self.options.log_prob_min_clamp
        if options.is_full:
            found = out.full_kl
        elif options.is_topk:
            teachers = values_of(micro[TOP_LOG_PROBS])
            found = top_divergence(out.top_log_probs, teachers, options.beta, options.topk_tail, smallest)
        else:
            own, teachers = out.log_probs, values_of(micro[TEACHER_LOG_PROBS])
            if smallest is not None:
                own, teachers = own.clamp(min=smallest), teachers.clamp(min=smallest)
            found = KL_PENALTIES[options.loss_mode](own, teachers)
        most = options.loss_max_clamp
        return found if most is None else found.clamp(-most, most)

    @torch.no_grad()
    def _measures(self, out: TokenOutputs, micro: Mapping[str, Column]) -> Metrics:
        """Means over tokens: the log-ratio to the teacher, and what the k tokens cover of both distributions."""
        found, tokens = {}, valid_tokens(micro["response_mask"])
        if not self.options.is_full:
            found["distill/kl"] = out.log_probs - values_of(micro[TEACHER_LOG_PROBS])
        if self.options.is_topk:
            found["distill/topk_mass"] = values_of(micro[TOP_LOG_PROBS]).exp().sum(-1)
            found["distill/student_topk_mass"] = out.top_log_probs.exp().sum(-1)
        return {name: tokens.mean(tokens.pack(values)) for name, values in found.items()}
