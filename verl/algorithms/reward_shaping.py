"""Reward shaping: norm, penalty, bounds, masks of scores before an estimator, and of advantages after.

Pure functions on scores (B,) and token rewards (B, R), in the order a step applies them:

    score -> overlong penalty -> normalise -> scale, shift -> clip -> tokens -> KL in the reward -> clip
          -> whiten rewards -> sample masks -> estimator -> whiten advantages -> clip advantages

Takes numbers, prompt ids and data sources; independent of batch, config and model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, require_finite, whiten
from verl.algorithms.registry import control
from verl.algorithms.valid_tokens import ValidTokens

SMALLEST_STD = 1e-6
"""Scores that differ by less count as equal: they are not divided by their spread."""


class Moments(NamedTuple):
    """Mean and spread of all scores seen so far, as they can be merged: ``m2`` is the sum of squared deviations."""

    size: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def std(self) -> float:
        """Unbiased; zero of fewer than two scores."""
        return (self.m2 / (self.size - 1)) ** 0.5 if self.size > 1 else 0.0

    @classmethod
    def of(cls, scores: Tensor) -> Moments:
        """Return the moments of one batch of scores (B,)."""
        scores = scores.double()
        # of no scores the mean is NaN, which merging would keep for good: callers pass at least one
        mean = scores.mean().item()
        return cls(len(scores), mean, (scores - mean).square().sum().item())

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both together. With d the difference of the means,

            mean = mean_a + d n_b / n,      m2 = m2_a + m2_b + d^2 n_a n_b / n

        Source: Chan, Golub & LeVeque 1979, Stanford CS-79-773, equation 2.1.
        """
        size = self.size + other.size
        if not size:
            return self
        # not sums of squares: these cancel where the mean is far larger than the spread
        d = other.mean - self.mean
        m2 = self.m2 + other.m2 + d * d * self.size * other.size / size
        return Moments(size, self.mean + d * other.size / size, m2)


def merge_moments(known: Mapping[str, Moments], scores: Tensor, sources: Sequence[str]) -> dict[str, Moments]:
    """The moments of each data source after a batch.

    Args:
        known: data source -> what was seen before this batch.
        scores: (B,) float, finite.
        sources: (B,) the data source of each response.
    """
    merged, names = dict(known), np.asarray(sources, dtype=object)
    for source in dict.fromkeys(names.tolist()):
        here = torch.from_numpy(np.flatnonzero(names == source)).to(scores.device)
        merged[source] = merged.get(source, Moments()).merge(Moments.of(scores[here]))
    return merged


@control(
    "algorithm.reward_shaping.norm",
    "(s - mean) / (std + 1e-6), each over `batch`, `group`, `source` or `running`, or null, in any pair",
    "scores of several scales; estimators that compare with nothing",
    "arXiv:2501.03262",
    "test_reward_shaping.py::test_normalisation_by_hand",
    options="algorithm.reward_shaping.norm.{mean,std}",
)
def centre_and_spread(
    scores: Tensor,
    index: np.ndarray | Sequence,
    mean: str | None,
    std: str | None,
    running: Mapping[str, Moments] | None = None,
    sources: Sequence[str] | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Return the centre and spread that normalise each score: s' = (s - centre) / spread.

    centre is 0 or a mean, spread is 1 or an unbiased std + epsilon, each on its own taken over

        batch      all responses of this step
        group      the responses to the same prompt; alone there, a response is compared with 0 at a std of 1
        source     the responses of this step of the same data source, likewise
        running    all responses of the same data source up to and with this step

    Equal scores have nothing to be divided by: where the std is no more than 1e-6, spread is 1.

    Args:
        scores: (B,) float.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        mean, std: batch, group, source, running, or None for neither.
        running: data source -> moments that hold this batch already. Read for ``running`` only.
        sources: (B,) the data source of each response. Read for ``source`` and ``running`` only.

    Returns:
        centre, spread: both (B,), float64.

    Raises:
        NonFiniteError: a score is NaN or infinite.

    Source: mean and std of the group: Shao et al. 2024 (arXiv:2402.03300); a group's mean with the batch's std: Hu et
    al. 2025 (arXiv:2501.03262); running std: Engstrom et al. 2020 (arXiv:2005.12729), there of discounted sums.
    """
    scores = scores.double()
    require_finite("token_level_scores", scores)

    def over(kind: str | None) -> tuple[Tensor, Tensor]:
        """Mean and std for each score."""
        if kind is None:
            return torch.zeros_like(scores), torch.zeros_like(scores)
        if kind in ("group", "source"):
            groups = Groups(index if kind == "group" else sources, scores.device)
            # alone, a std of 0 becomes a spread of 1 below: the score stays as it is
            return torch.where(groups.is_alone, 0, groups.mean(scores)), groups.std(scores)
        seen = [Moments.of(scores)] * len(scores) if kind == "batch" else [running[source] for source in sources]
        return scores.new_tensor([one.mean for one in seen]), scores.new_tensor([one.std for one in seen])

    centre, spread = over(mean)[0], over(std)[1]
    # equal scores have a std of rounding errors, by which nothing must be divided
    return centre, torch.where(spread > SMALLEST_STD, spread + epsilon, 1.0)


@control(
    "algorithm.reward_shaping.overlong_buffer",
    "s - factor clip((T_i - (R - len)) / len, 0, 1), R = `rollout.response_length`",
    "responses that run into the length limit",
    "arXiv:2503.14476",
    "test_reward_shaping.py::test_overlong_penalty_by_hand",
    options="algorithm.reward_shaping.overlong_buffer.{enable,len,penalty_factor}",
)
def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Charge a response for the part of the buffer it used up, at most ``factor``:

        penalty_i = -factor clip((|y_i| - (max_length - buffer)) / buffer, 0, 1)

    Args:
        lengths: (B,) tokens of each response.
        max_length: tokens at which responses are cut.
        buffer: tokens before that over which the penalty grows; positive.

    Returns:
        (B,) float64, to be added to the scores; zero up to ``max_length - buffer`` tokens.

    Source: Yu et al. 2025, DAPO, section 3.4 (arXiv:2503.14476), there with factor 1.
    """
    return -factor * ((lengths.double() - (max_length - buffer)) / buffer).clamp(0, 1)


@control(
    "algorithm.reward_shaping.scale",
    "scale s",
    "scores too large for a critic",
    "arXiv:2005.12729",
    "test_reward_shaping.py::test_rescored_tokens_add_up_by_hand",
)
@control(
    "algorithm.reward_shaping.shift",
    "scale s + shift",
    "scores that must not all be positive, for estimators without a baseline",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "trainer/test_shaping.py::test_penalty_norm_scale_shift_and_clip_come_in_this_order",
)
def rescore(token_level_scores: Tensor, response_mask: Tensor, scores: Tensor, scale: Tensor) -> Tensor:
    """Token rewards that add up to new scores: each times its row's ``scale``, the rest on the last sampled token.

        r'_it = scale_i r_it,      and for the last t:      r'_it = scale_i r_it + scores_i - scale_i sum_t r_it

    A score that stands on the last token stays there alone; rewards on earlier tokens keep their proportions.

    Args:
        token_level_scores: (B, R) float.
        response_mask: (B, R); 1 on tokens the policy sampled. A row without any keeps its own sum.
        scores, scale: (B,) float.

    Returns:
        (B, R), in the dtype of ``token_level_scores``.
    """
    rewards = token_level_scores * scale.to(token_level_scores.dtype).unsqueeze(-1)
    width = rewards.shape[-1]
    # the rest in float64, so that a score that is not changed stays the same to the last bit
    rest = scores.double() - rewards.sum(-1, dtype=torch.float64)
    rows = (response_mask != 0).any(-1).nonzero().squeeze(-1)
    if len(rows):
        # the last one of the mask, not the last token: tool output may follow
        last = width - 1 - (response_mask[rows] != 0).flip(-1).byte().argmax(-1)
        rewards[rows, last] = (rewards[rows, last] + rest[rows]).to(rewards.dtype)
    return rewards


def onto_sampled_tokens(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Move what stands on masked tokens (tool output, padding) to the token of the policy that it answers:

        r'_it = r_it + sum of r_ik over the masked places k from t up to the next token that the policy sampled

    What stands before the first sampled token goes to that one. Sums over responses stay as they are.

    Args:
        token_level_rewards: (B, R) float.
        response_mask: (B, R); 1 on tokens the policy sampled. A row without any keeps its rewards where they are.

    Returns:
        (B, R); ``token_level_rewards`` itself where nothing is to be moved.
    """
    is_own = response_mask != 0
    has_own = is_own.any(-1, keepdim=True)
    if not ((token_level_rewards != 0) & ~is_own & has_own).any():
        return token_level_rewards
    place = torch.arange(is_own.shape[1], device=is_own.device).expand(is_own.shape)
    # the nearest sampled token at or before each place, -1 where there is none
    before = torch.where(is_own, place, -1).cummax(-1).values
    # argmax returns the first of equal values; of a row without any it is 0, which `has_own` discards
    first = is_own.byte().argmax(-1, keepdim=True)
    target = torch.where(has_own, torch.where(before < 0, first, before), place)
    # an indexed assignment would keep one of the rewards that meet at a token, not their sum
    return torch.zeros_like(token_level_rewards).scatter_add(-1, target, token_level_rewards)


@control(
    "algorithm.reward_shaping.clip_range",
    "s within [low, high]",
    "bounds that differ: RAGEN's and ROLL's `asym_clip` is [-1, 3]",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "trainer/test_more_shaping.py::test_bounds_of_a_score_may_differ_above_and_below",
)
@control(
    "algorithm.reward_shaping.clip",
    "s within [-c, c]; once the KL is in, every r_t too",
    "reward models with outliers",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "test_reward_shaping.py::test_bounds_and_the_share_they_changed",
)
def clip_scores(scores: Tensor, bound: float, low: float | None = None) -> tuple[Tensor, float]:
    """Scores (B,) within [low, bound], low = -bound where it is None, and the share of responses this changed."""
    clipped = scores.clamp(-bound if low is None else low, bound)
    return clipped, (clipped != scores).double().mean().item() if len(scores) else 0.0


@control(
    "algorithm.advantage.clip",
    "A within [-c, c]; the critic's returns stay",
    "single advantages that decide a step",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "test_reward_shaping.py::test_bounds_and_the_share_they_changed",
)
def clip_tokens(x: Tensor, response_mask: Tensor, bound: float) -> tuple[Tensor, float]:
    """Token rewards or advantages (B, R) within [-bound, bound], and the share of unmasked tokens this changed."""
    clipped = x.clamp(-bound, bound)  # masked positions, too: they are zero
    is_token = response_mask != 0
    changed = ((clipped != x) & is_token).sum() / is_token.sum().clamp(min=1)
    return clipped, changed.item()


@control(
    "algorithm.reward_shaping.whiten",
    "r_t to mean 0 and variance 1 over the tokens of the step",
    "scores at the end made into a reward on every token",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "test_reward_shaping.py::test_whitened_tokens_by_hand",
)
@control(
    "algorithm.advantage.whiten",
    "A to mean 0 and variance 1 over the tokens of the step; null: as the estimator does, false: not even that",
    "steps of one size whatever the rewards",
    "arXiv:2006.05990",
    "test_reward_shaping.py::test_whitening_can_be_switched_off",
)
@torch.no_grad()
def whiten_tokens(x: Tensor, response_mask: Tensor) -> Tensor:
    """Shift and scale to mean 0 and unbiased variance 1 over the unmasked tokens of the batch:

        x' = (x - mean) / sqrt(var + 1e-8)

    Of rewards this turns one score at the end into a reward on every token: the zeros become -mean / std.
    One token alone, or equal ones, become zero.

    Args:
        x: (B, R) float.
        response_mask: (B, R); 1 on tokens the policy sampled.

    Returns:
        (B, R), zero where masked.

    Source: of advantages: Andrychowicz et al. 2020 (arXiv:2006.05990).
    """
    tokens = ValidTokens(response_mask)
    flat = tokens.pack(x)
    return tokens.unpack(whiten(flat if flat.dtype == torch.float64 else flat.float(), tokens)).to(x.dtype)


@control(
    "algorithm.sample_mask.drop_truncated",
    'responses cut at the length limit leave the loss: DAPO\'s "overlong filtering"',
    "a score of a response that was cut says little",
    "arXiv:2503.14476",
    "trainer/test_shaping.py::test_truncated_responses_leave_the_loss_but_not_their_group",
)
def cut_at_limit(lengths: Tensor, max_length: int, finish_reasons: Sequence[str] | None = None) -> Tensor:
    """Whether each response ended because there was no room left: (B,) bool.

    Args:
        lengths: (B,) tokens of each response.
        max_length: tokens at which responses are cut.
        finish_reasons: (B,) why each ended, ``length`` if cut. None: a response that fills the window counts as cut.
    """
    if finish_reasons is not None:
        return torch.tensor([reason == "length" for reason in finish_reasons])
    # a response may end by itself on its last token: only finish reasons tell
    return lengths >= max_length


@control(
    "algorithm.sample_mask.difficulty",
    "responses to a prompt whose mean score lies outside [low, high] leave the loss",
    "prompts all right or all wrong",
    "arXiv:2502.01456",
    "test_reward_shaping.py::test_difficulty_is_that_of_the_group_and_its_ends_are_inside",
)
def within_difficulty(scores: Tensor, index: np.ndarray | Sequence, low: float, high: float) -> Tensor:
    """Whether the mean score of a response's group lies in [low, high], ends included: (B,) bool.

    Args:
        scores: (B,) float, as the reward function gave them.
        index: (B,) prompt ids; equal ids are one group. Order is free.
    """
    scores = scores.double()
    require_finite("token_level_scores", scores)
    mean = Groups(index, scores.device).mean(scores)
    return (mean >= low) & (mean <= high)


@control(
    "algorithm.sample_mask.error_max_len",
    "responses of n tokens or more with a score, as given, of 0 or less leave the loss",
    "long failures that would teach brevity alone",
    "[ROLL](https://github.com/alibaba/ROLL)",
    "trainer/test_more_shaping.py::test_long_failures_leave_the_loss_and_long_successes_stay",
)
def right_or_short(scores: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Whether a response succeeded, or failed in fewer than ``longest`` tokens: (B,) bool.

    Args:
        scores: (B,) float, as the reward function gave them; a positive one is a success.
        lengths: (B,) tokens of each response.

    Source: the ``error_max_len_clip`` of ROLL.
    """
    require_finite("token_level_scores", scores)
    # NaN > 0 is False: unchecked, a NaN would leave the loss as if it were a failure
    return (scores > 0) | (lengths.to(scores.device) < longest)
