"""GDPO: several rewards, each normalised within its group before they are added."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages.common import Groups, builtin_estimator, outcome_scores, require_finite, whiten
from verl.algorithms.valid_tokens import tokens_of


@builtin_estimator(
    "gdpo",
    "whiten(sum_k w_k (s_ik - mean_G s_k) / (std_G s_k + 1e-6))",
    "several rewards of different scale",
    "arXiv:2601.05242",
    "algorithms/advantages/test_gdpo.py::test_gdpo_by_hand_normalises_each_reward_before_the_sum",
    options="algorithm.gdpo_reward_keys algorithm.gdpo_reward_weights algorithm.advantage.whiten",
    ragged=True,
)
def compute_gdpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    non_tensor_batch: Mapping[str, Any],
    epsilon: float = 1e-6,
    config: Any = None,
    whiten_advantages: bool = True,
) -> tuple[Tensor, Tensor]:
    """Judge a response by each of several rewards against its group, then add up: no reward drowns the others.

    With rewards k of weight w_k, each normalised within its group before the sum,

        A = whiten( sum_k w_k (s_ik - mean_g s_k) / (std_g s_k + epsilon) ) over all tokens of the batch

    A response alone in its group is compared with zero, at a std of 1.

    Args:
        token_level_rewards: (B, R) float; not read beyond its dtype and that it is finite: the rewards are the columns
            named below, so a KL penalty in the reward has no effect here.
        response_mask: (B, R); 1 on tokens the policy sampled.
        index: (B,) prompt ids; equal ids are one group. Order is free.
        non_tensor_batch: holds (B,) numbers under each of the keys, as a reward function's dict of extras leaves them.
        config: the ``algorithm`` section, read for ``gdpo_reward_keys`` and ``gdpo_reward_weights`` (null: all 1).
        whiten_advantages: False leaves the sum as it is.

    Returns:
        advantages, returns: both (B, R) and equal; zero where masked.

    Raises:
        NonFiniteError: a reward is NaN or infinite.
        ValueError: no keys, a key without column, or not one weight a key.

    Source: Liu et al. 2026, GDPO (arXiv:2601.05242).
    """
    # for its check alone: NaN rewards are refused though the columns are what is read
    outcome_scores(token_level_rewards)
    keys, weights = _rewards_to_combine(config)
    groups, tokens = Groups(index, token_level_rewards.device), tokens_of(response_mask)
    combined = torch.zeros(response_mask.shape[0], dtype=torch.float64, device=token_level_rewards.device)
    for key, weight in zip(keys, weights, strict=True):
        if key not in non_tensor_batch:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {key!r}, which this batch does not have; it has "
                f"{', '.join(sorted(non_tensor_batch)) or 'nothing'}. Return it from the reward function, "
                f"next to the score: {{'score': ..., {key!r}: ...}}."
            )
        scores = torch.tensor([float(x) for x in non_tensor_batch[key]], dtype=torch.float64, device=combined.device)
        require_finite(f"reward {key!r}", scores)
        combined += weight * groups.centred(scores) / (groups.scale(scores) + epsilon)
    advantages = tokens.repeat(combined.to(token_level_rewards.dtype))
    advantages = tokens.unpack(whiten(advantages, tokens) if whiten_advantages else advantages)
    return advantages, advantages


def _rewards_to_combine(config: Any) -> tuple[list[str], list[float]]:
    read = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    keys = list(read("gdpo_reward_keys") or ())
    weights = [float(x) for x in read("gdpo_reward_weights") or [1.0] * len(keys)]
    if not keys:
        raise ValueError(
            "algorithm.gdpo_reward_keys is empty: gdpo combines rewards it finds by name. "
            "List the names your reward function returns next to 'score', for example [accuracy,format]."
        )
    if len(weights) != len(keys):
        raise ValueError(
            f"algorithm.gdpo_reward_weights={weights} has {len(weights)} numbers for {len(keys)} "
            f"algorithm.gdpo_reward_keys={keys}. Give one weight a key, or null for equal ones."
        )
    return keys, weights
