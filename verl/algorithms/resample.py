"""Policy filtration (PF-PPO): rows resampled by their scores.

Works on scores alone: no prompts, no tokens.
"""

import torch
from torch import Tensor

from verl.algorithms.registry import control

RESAMPLE_METHODS = ("pow", "max_min", "max_random")


def resample_probabilities(scores: Tensor, method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """Return each response's probability in a resample: the more extreme its score, the more its reward is trusted.

    p_i = w_i / sum_j w_j, with w_i of one response among those of the batch

        pow         |s_i|^k
        max_min     1 where s_i is the highest or the lowest score, else 0
        max_random  4 where s_i is the highest score, else 1

    Where every weight is zero, as with ``pow`` and scores that are all zero, each response is as likely as any other.
    ``weight_pow=0`` is the same.

    Args:
        scores: (B,) float, one a response.
        weight_pow: k, 0 or more.

    Returns:
        (B,) float64 that sums to 1.

    Raises:
        ValueError: unknown method, or a score that is not finite.

    Source: Shen & Zhang 2024, Policy Filtration for RLHF (arXiv:2409.06957), with the weights verl gives these names:
    the paper ranks the responses of each prompt, here scores of the whole batch are compared.
    """
    scores = scores.double()
    if not torch.isfinite(scores).all():
        row = int((~torch.isfinite(scores)).nonzero()[0])
        raise ValueError(f"resample: the score of row {row} is {scores[row].item()}. Scores must be finite numbers.")
    if method == "pow":
        largest = scores.abs().max()
        # over the largest first: |s|^k of large scores would overflow
        weights = (scores.abs() / largest if largest > 0 else torch.ones_like(scores)) ** weight_pow
    elif method == "max_min":
        # ties all count: with rewards of 0 and 1 every row is at an end, and all are equally likely
        weights = ((scores == scores.max()) | (scores == scores.min())).double()
    elif method == "max_random":
        weights = torch.where(scores == scores.max(), 4.0, 1.0).double()
    else:
        raise ValueError(f"algorithm.pf_ppo.reweight_method={method} is not known: use {', '.join(RESAMPLE_METHODS)}.")
    return weights / weights.sum()


@control(
    "algorithm.use_pf_ppo",
    "rows resampled, B w_i / sum_j w_j times each: |s|^k, highest and lowest, or the highest 4 times as often",
    "a reward model that is most reliable at the extremes; with `gae`",
    "arXiv:2409.06957",
    "test_resample.py::test_rows_come_as_often_as_they_are_likely",
    options="algorithm.use_pf_ppo algorithm.pf_ppo.{reweight_method,weight_pow}",
)
def resample_rows(scores: Tensor, method: str = "pow", weight_pow: float = 2.0, seed: int = 0) -> Tensor:
    """Draw as many rows as there are, with replacement, by `resample_probabilities`; row numbers (B,) int64.

    A row comes B p_i times on average. The same scores and seed give the same rows, on whatever device the scores are.
    """
    probabilities = resample_probabilities(scores.cpu(), method, weight_pow)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(probabilities, len(scores), replacement=True, generator=generator)
