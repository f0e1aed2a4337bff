"""Losses of preference pairs: DPO and its relatives, and the Bradley-Terry loss of reward models.

All are functions of the scores of a pair's two rows, most of them of d = score(chosen) - score(rejected) alone. The
score of a row is its log-ratio to the reference, sum_t log pi(y_t) - log ref(y_t), its mean log-probability, or a
reward model's output at its last token. `PairwiseLoss` makes any of them the loss of a training engine. Which rows are
a pair is a column; how rows are scored and split, the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.aggregate import PreparedBatch
from verl.algorithms.losses.actor import Metrics, TokenOutputs
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.ragged import Column

PairLossFn = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(chosen score, rejected score, margin), (P,) each, to the loss of each pair, (P,); differentiable."""

Score = Literal["log_ratio", "log_prob", "mean_log_prob", "value"]


def dpo_loss(difference: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """Raise the chosen response's log-ratio above the rejected one's.

        l = -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d),      d = log-ratio(chosen) - log-ratio(rejected)

    with e = ``label_smoothing``, the share of pairs taken to be labelled the wrong way round (conservative DPO); at 0
    the loss as published, which has its minimum at d = infinity.

    Args:
        difference: (P,) d of each pair, in nats.
        beta: strength of the KL constraint to the reference; small lets the policy go far.

    Returns:
        (P,)

    Raises:
        ValueError: ``label_smoothing`` is not in [0, 0.5).

    Source: Rafailov et al. 2023, equation 7 (arXiv:2305.18290); smoothing: Mitchell 2023,
    https://ericmitchell.ai/cdpo.pdf
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing={label_smoothing} must be at least 0 and below 0.5: at 0.5 a label says nothing, above "
            "it the opposite. Use 0 for labels that are right, 0.1 for noisy ones."
        )
    wanted, opposite = logsigmoid(beta * difference), logsigmoid(-beta * difference)
    return -(1 - label_smoothing) * wanted - label_smoothing * opposite


def ipo_loss(difference: Tensor, beta: float = 0.1) -> Tensor:
    """Fit the difference of log-ratios to a margin: l = (d - 1 / (2 beta))^2.

    Unlike DPO's its minimum is finite, so that pairs which always go one way do not drive the policy off the reference.

    Args:
        difference: (P,) d of each pair, in nats.
        beta: tau of the paper.

    Returns:
        (P,)

    Source: Azar et al. 2023, equation 17 (arXiv:2310.12036).
    """
    return (difference - 1 / (2 * beta)).square()


def bradley_terry_loss(difference: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Score the chosen text above the rejected one: l = -log sigmoid(score(chosen) - score(rejected) - margin).

    Args:
        difference: (P,) difference of the scores of each pair.
        margin: by how much the chosen one is better, (P,) or one number; in units of the score.

    Returns:
        (P,)

    Source: Bradley & Terry 1952; as the loss of reward models Ouyang et al. 2022, equation 1 (arXiv:2203.02155); with a
    margin Touvron et al. 2023, Llama 2, equation 2 (arXiv:2307.09288).
    """
    return -logsigmoid(difference - margin)


def robust_dpo_loss(difference: Tensor, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """DPO's loss without the bias of labels that are wrong with probability e = ``label_smoothing``:

        l = (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)

    Its mean over such labels is the loss of the right ones.

    Args:
        difference: (P,) d of each pair, in nats.

    Returns:
        (P,)

    Source: Chowdhury et al. 2024, equation 12 (arXiv:2403.00409).
    """
    wanted, opposite = logsigmoid(beta * difference), logsigmoid(-beta * difference)
    return (label_smoothing * opposite - (1 - label_smoothing) * wanted) / (1 - 2 * label_smoothing)


def hinge_loss(difference: Tensor, beta: float = 0.1) -> Tensor:
    """Raise the chosen log-ratio above the rejected one by 1 / beta, and no further: l = max(0, 1 - beta d).

    Args:
        difference: (P,) d of each pair, in nats.

    Returns:
        (P,)

    Source: Zhao et al. 2023, SLiC-HF (arXiv:2305.10425), with log-ratios as in Liu et al. 2023 (arXiv:2309.06657).
    """
    return torch.relu(1 - beta * difference)


def sppo_pair_loss(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Bring both log-ratios to those of a game that the chosen response has won:

        l = (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2

    Args:
        chosen, rejected: (P,) log-ratios, in nats.
        beta: 1 / eta of the paper, whose win probabilities are here 1 and 0.

    Returns:
        (P,)

    Source: Wu et al. 2024, equation 4.7 (arXiv:2405.00675).
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def simpo_loss(difference: Tensor, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    """Raise the chosen mean log-probability above the rejected one, without a reference:

        l = -log sigmoid(beta d - gamma)

    Args:
        difference: (P,) difference of mean log-probabilities, in nats a token.
        gamma: margin that the scaled difference is to have.

    Returns:
        (P,)

    Source: Meng et al. 2024, equation 6 (arXiv:2405.14734).
    """
    return -logsigmoid(beta * difference - gamma)


def odds_ratio_loss(chosen: Tensor, rejected: Tensor, beta: float = 0.1) -> Tensor:
    """Raise the odds of the chosen response above those of the rejected one; with the chosen one's mean negative
    log-likelihood ORPO:

        l = -beta log sigmoid(log odds(chosen) - log odds(rejected)),      odds(x) = e^x / (1 - e^x)

    Args:
        chosen, rejected: (P,) mean log-probabilities, in nats a token.
        beta: lambda of the paper.

    Returns:
        (P,)

    Source: Hong et al. 2024, equations 6 and 7 (arXiv:2403.07691).
    """

    def log_odds(mean: Tensor) -> Tensor:
        # a probability of 1 has no odds: rounding alone brings a mean there
        return mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))

    return -beta * logsigmoid(log_odds(chosen) - log_odds(rejected))


def reward_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0) -> Tensor:
    """Bradley-Terry with a term that keeps scores near zero, which the first part leaves free:

        l = -log sigmoid(chosen - rejected - margin) + center_coef (chosen + rejected)^2

    Args:
        chosen, rejected, margin: (P,), in units of the score.

    Returns:
        (P,)

    Source: Eisenstein et al. 2023, equation 2 (arXiv:2312.09244).
    """
    return bradley_terry_loss(chosen - rejected, margin) + center_coef * (chosen + rejected).square()


class Preference(NamedTuple):
    """A loss that ``algorithm.loss_type`` of ``verl dpo`` can name."""

    function: Callable[..., Tensor]
    of_both: bool
    """Whether it takes both scores; else their difference."""
    score: Score
    options: Mapping[str, str]
    """Its arguments, and the options of that section which they are."""


_BETA = {"beta": "beta"}
_SMOOTHED = {**_BETA, "label_smoothing": "label_smoothing"}
PREFERENCES = {
    "sigmoid": Preference(dpo_loss, False, "log_ratio", _SMOOTHED),
    "robust": Preference(robust_dpo_loss, False, "log_ratio", _SMOOTHED),
    "hinge": Preference(hinge_loss, False, "log_ratio", _BETA),
    "ipo": Preference(ipo_loss, False, "log_ratio", _BETA),
    "sppo": Preference(sppo_pair_loss, True, "log_ratio", _BETA),
    "simpo": Preference(simpo_loss, False, "mean_log_prob", {"beta": "beta", "gamma": "simpo_gamma"}),
    "orpo": Preference(odds_ratio_loss, True, "mean_log_prob", _BETA),
}
"""Name -> loss of a policy that learns from preferences."""


def of_difference(loss: Callable[[Tensor], Tensor]) -> PairLossFn:
    """A function of d as one of both scores; a margin is taken off d."""
    return partial(_of_difference, loss)


def _of_difference(loss: Callable[[Tensor], Tensor], chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    return loss(chosen - rejected - margin)


def _of_both(loss: Callable[..., Tensor], chosen: Tensor, rejected: Tensor, margin: Tensor) -> Tensor:
    return loss(chosen, rejected)


def policy_pair_loss(options: Mapping[str, Any], together: bool = True) -> PairwiseLoss:
    """The loss that the section ``algorithm`` of ``verl dpo`` describes."""
    kind = PREFERENCES[options["loss_type"]]
    function = partial(kind.function, **{name: options[key] for name, key in kind.options.items()})
    score = "log_prob" if options["reference_free"] and kind.score == "log_ratio" else kind.score
    pair_loss = partial(_of_both, function) if kind.of_both else of_difference(function)
    # what ORPO adds its odds to
    nll_coef = options["rpo_alpha"] or (1.0 if options["loss_type"] == "orpo" else 0.0)
    return PairwiseLoss(pair_loss, score, "train", options["beta"], together=together, nll_coef=nll_coef)


def reward_model_loss(options: Mapping[str, Any], together: bool = True) -> PairwiseLoss:
    """The loss that the section ``algorithm`` of ``verl rm`` describes."""
    pair_loss = partial(reward_loss, center_coef=options["center_rewards_coefficient"])
    return PairwiseLoss(pair_loss, "value", "train", together=together)


class PairwiseLoss:
    """The mean over preference pairs of a function of the scores of their two rows, as an engine calls it.

    Column ``pairs`` (B,) names the pairs of the batch: k > 0 on the chosen row of pair k, -k on the rejected one, 0 on
    a row of no pair, which costs nothing. The loss of a micro-batch is linear in the scores
    of its rows, with the slope of its pair's loss by each, so that gradients are those of all pairs at once however the
    batch is split. With ``together`` both rows of a pair must be in one micro-batch (``MicroBatching.together``), which
    knows slopes by itself. Else both must be in the same optimizer step, and may be on different ranks: ``prepare``
    scores the rows of all ranks, by one more forward pass.

    Args:
        pair_loss: (chosen, rejected, margin), (P,) each, to the loss of each pair, with its parameters bound.
        score: ``log_ratio``, sum over the response of log pi - ``ref_log_prob`` (B, R); ``log_prob``, without a
            reference; ``mean_log_prob``, its mean over tokens; ``value``, a reward model's output at the last token.
        name: begins the names of the metrics.
        scale: factor of the scores in the metrics, beta of DPO.
        together: see above.
        nll_coef: add this times the chosen response's negative log-likelihood, its mean over tokens. Source: Pang et
            al. 2024, equation 1 (arXiv:2404.19733).
    """

    want_entropy = want_full_kl = False
    extra_columns = ("margin",)
    """(B,): by how much the chosen row of a pair is better, read on that row; 0 where there is none."""
    averaged_as_loss = None

    def __init__(
        self,
        pair_loss: PairLossFn,
        score: Score = "log_ratio",
        name: str = "actor",
        scale: float = 1.0,
        together: bool = False,
        nll_coef: float = 0.0,
    ):
        self.pair_loss, self.score, self.name, self.scale = pair_loss, score, name, scale
        self.together, self.nll_coef = together, nll_coef
        self.reference = ("ref_log_prob",) if score == "log_ratio" else ()
        numbers = () if together else ("pair_loss", "pair_slope", "pair_is_right")
        self.columns = ("response_mask", *self.reference, "pairs", *numbers)

    def weight(self, micro: Mapping[str, Any]) -> Tensor:
        """Return the rows of ``micro`` that are in a pair, as a scalar."""
        return (micro["pairs"] != 0).sum()

    def prepare(self, batch: Any, gather: Any) -> PreparedBatch:
        """Add ``pair_loss``, ``pair_slope``, ``pair_is_right`` (B,) from the rows of all ranks, if not ``together``."""
        if self.together:
            return PreparedBatch(batch)
        outputs = (gather.values if self.score == "value" else gather.log_probs)()
        columns = {name: batch.ragged(name).to("cpu") for name in ("response_mask", *self.reference)}
        scores = self.scores(outputs.to("cpu"), columns).detach().double()
        margin = batch.column("margin").cpu().double() if "margin" in batch else torch.zeros_like(scores)
        values = torch.stack([batch.column("pairs").cpu().double(), scores, margin])
        numbers = gather.apply(partial(pair_numbers, self.pair_loss), values)
        batch = batch.select(deepcopy=False)  # the caller's batch stays as it is
        for name, number in zip(("pair_loss", "pair_slope", "pair_is_right"), numbers.unbind(-1), strict=True):
            batch.put(name, number.contiguous())
        return PreparedBatch(batch)

    def scores(self, outputs: Column, columns: Mapping[str, Any]) -> Tensor:
        """Return the score of each row, (b,), from its tokens' log-probabilities or values."""
        tokens = valid_tokens(columns["response_mask"])
        flat = tokens.pack(outputs)
        if self.score == "value":  # of the last token of the text alone
            place = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device).view_as(flat)
            last = tokens.row_max(place * (tokens.repeat(torch.ones_like(tokens.lengths)) != 0)).long()
            return torch.cat([flat.new_zeros(1), flat.flatten()])[last]
        if self.score == "log_ratio":
            flat = flat - tokens.pack(columns["ref_log_prob"]).to(flat)
        total = tokens.row_sum(flat)
        return total / tokens.lengths.clamp(min=1) if self.score == "mean_log_prob" else total

    def of_pairs(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the means over all pairs that a step logs, of measured rows in pairs, the chosen one first.

        Args:
            rows: ``score`` (B,); of a policy ``log_prob`` and ``tokens`` of its response; ``margin`` if there is one.
        """
        chosen, rejected = rows["score"][::2], rows["score"][1::2]
        margin = rows["margin"][::2] if "margin" in rows else torch.zeros_like(chosen)
        preference = loss = self.pair_loss(chosen, rejected, margin).mean()
        found = {"preference_loss": preference}
        if self.nll_coef:
            found["nll_loss"] = -(rows["log_prob"] / rows["tokens"].clamp(min=1))[::2].mean()
            loss = preference + self.nll_coef * found["nll_loss"]
        rewards = {"chosen_reward": self.scale * chosen.mean(), "rejected_reward": self.scale * rejected.mean()}
        found |= {"loss": loss, "preference_accuracy": (chosen > rejected).double().mean(), **rewards}
        found["preference_margin"] = rewards["chosen_reward"] - rewards["rejected_reward"]
        return {name: float(value) for name, value in found.items()}

    def __call__(self, out: TokenOutputs, micro: Mapping[str, Any]) -> tuple[Tensor, Metrics]:
        """Return the mean loss over the rows of pairs of a micro-batch, a scalar, and its metrics."""
        outputs = out.values if self.score == "value" else out.log_probs
        assert outputs is not None
        pairs, scores = micro["pairs"], self.scores(outputs, micro)
        sign, before = pairs.sign().to(outputs.dtype), scores.detach()
        if self.together:
            margin = micro.get("margin", torch.zeros_like(before))
            numbers = pair_numbers(self.pair_loss, pairs, before.double(), margin.double()).to(scores).unbind(-1)
        else:
            numbers = tuple(micro[name].to(scores) for name in ("pair_loss", "pair_slope", "pair_is_right"))
        loss_of_pair, slope, is_right = numbers
        rows = (sign != 0).sum().clamp(min=1)

        def mean(per_row: Tensor) -> Tensor:
            return torch.where(sign != 0, per_row, 0).sum() / rows

        # each pair has two rows: with half its loss each, a row's slope by its own score is the whole of the pair's
        preference = mean(loss_of_pair + 2 * slope * (scores - before))
        scaled, name, loss = self.scale * before, self.name, preference
        metrics = {}
        if self.score != "value":
            tokens = valid_tokens(micro["response_mask"])
            log_prob = tokens.row_sum(tokens.pack(outputs))
            metrics[f"{name}/chosen_log_prob"] = mean(log_prob.detach() * (1 + sign))
            metrics[f"{name}/rejected_log_prob"] = mean(log_prob.detach() * (1 - sign))
            if self.nll_coef:
                nll = mean(-log_prob / tokens.lengths.clamp(min=1) * (1 + sign))
                loss = preference + self.nll_coef * nll
                metrics[f"{name}/nll_loss"] = nll.detach()
        return loss, {
            f"{name}/loss": loss.detach(),
            f"{name}/preference_loss": preference.detach(),
            f"{name}/preference_accuracy": mean(is_right),
            f"{name}/chosen_reward": mean(scaled * (1 + sign)),
            f"{name}/rejected_reward": mean(scaled * (1 - sign)),
            f"{name}/preference_margin": mean(2 * sign * scaled),
            **metrics,
        }


def chosen_and_rejected(pairs: Tensor, *columns: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the pair of each row (B,), -1 for none, and of each column the rows of all pairs in the same order.

    Args:
        pairs: (B,) as of `PairwiseLoss`.
        columns: (B,) each.

    Returns:
        (B,) int, and for each column the chosen rows' numbers and the rejected rows', (P,) each.

    Raises:
        ValueError: a pair has not one chosen and one rejected row here.
    """
    is_row = pairs != 0
    numbers, place = pairs[is_row].abs().unique(return_inverse=True)
    sides = [pairs.sign() == sign for sign in (1, -1)]
    chosen, rejected = (torch.bincount(place[side[is_row]], minlength=len(numbers)) for side in sides)
    wrong = ((chosen != 1) | (rejected != 1)).nonzero().flatten().tolist()
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"pair {int(numbers[first])} has {int(chosen[first])} chosen and {int(rejected[first])} rejected rows in "
            f"this optimizer step ({len(wrong)} such pairs), and needs one of each. Keep the rows of a pair together: "
            "no shuffle of single rows, and mini-batches of whole pairs."
        )
    of_row = torch.full_like(pairs, -1, dtype=torch.int64)
    of_row[is_row] = place
    order = [side.nonzero().flatten()[of_row[side].argsort()] for side in sides]
    return of_row, [(column[order[0]], column[order[1]]) for column in columns]


def pair_numbers(pair_loss: PairLossFn, pairs: Tensor, scores: Tensor, margins: Tensor) -> Tensor:
    """Return of each row its pair's loss, the slope of that by the row's own score, and whether the chosen row of the
    pair has the higher score: (B, 3); 0 on rows of none."""
    of_row, ((chosen, rejected), (margin, _)) = chosen_and_rejected(pairs, scores, margins)
    with torch.enable_grad():
        chosen, rejected = chosen.detach().requires_grad_(True), rejected.detach().requires_grad_(True)
        losses = pair_loss(chosen, rejected, margin)
        slopes = torch.autograd.grad(losses.sum(), (chosen, rejected))
    is_right = (chosen > rejected).to(losses)
    sides = [torch.stack([losses.detach(), slope, is_right], -1) for slope in slopes]
    with_none = [torch.cat([side, side.new_zeros(1, 3)]) for side in sides]
    return torch.where((pairs > 0)[:, None], with_none[0][of_row], with_none[1][of_row])


def best_and_worst(scores: Tensor, groups: Tensor) -> Tensor:
    """Pair the best response of each group with its worst: ``pairs`` (B,) as of `PairwiseLoss`.

    Of equal scores the first row is taken; a group whose scores are all equal has no pair.

    Args:
        scores: (B,)
        groups: (B,) int; equal numbers are responses to one prompt.
    """
    pairs = torch.zeros(len(scores), dtype=torch.int64)
    for number, group in enumerate(groups.unique().tolist(), 1):
        rows = (groups == group).nonzero().flatten()
        best, worst = rows[scores[rows].argmax()], rows[scores[rows].argmin()]
        if scores[best] > scores[worst]:
            pairs[best], pairs[worst] = number, -number
    return pairs
