"""The names under which users of verl know the algorithms. The functions themselves are in ``verl/algorithms``."""

from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_agentic_reinforce_advantage,
    compute_gae_advantage_return,
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_multi_turn_optimal_token_baseline_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_step_reinforce_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algorithms.advantages.gigpo import compute_gigpo_outcome_advantage
from verl.algorithms.aggregate import agg_loss as aggregated
from verl.algorithms.aggregate import agg_weight
from verl.algorithms.correction import importance_ratio, importance_weights, kept_tokens
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.kl import kl_penalty as _kl_penalty
from verl.algorithms.losses import (
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    compute_policy_loss,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo,
    compute_policy_loss_clip_cov,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gpg,
    compute_policy_loss_gspo,
    compute_policy_loss_kimi15,
    compute_policy_loss_kl_cov,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_tis,
    compute_policy_loss_topr,
    compute_policy_loss_vanilla,
    compute_value_loss,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl.algorithms.resample import resample_probabilities
from verl.algorithms.reward_shaping import (
    centre_and_spread,
    clip_scores,
    clip_tokens,
    overlong_penalty,
    rescore,
    right_or_short,
    whiten_tokens,
    within_difficulty,
)
from verl.utils.torch_functional import entropy_from_logits

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "PolicyLossFn",
    "agg_loss",
    "agg_weight",
    "centre_and_spread",
    "clip_scores",
    "clip_tokens",
    "compute_agentic_reinforce_advantage",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gigpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_multi_turn_optimal_token_baseline_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_pf_ppo_reweight_data",
    "compute_policy_loss",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_dro",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kimi15",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_sapo",
    "compute_policy_loss_tis",
    "compute_policy_loss_topr",
    "compute_policy_loss_vanilla",
    "compute_reinforce_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rewards",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_step_reinforce_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "importance_ratio",
    "importance_weights",
    "kept_tokens",
    "kl_penalty",
    "kl_penalty_forward",
    "overlong_penalty",
    "register_adv_est",
    "register_policy_loss",
    "rescore",
    "right_or_short",
    "whiten_tokens",
    "within_difficulty",
]


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """A loss per token as a scalar (see `verl.algorithms.aggregate.agg_loss`), in the order of verl's arguments.

    For a part of a batch, give the whole's divisor, ``batch_num_tokens`` with token-mean and ``global_batch_size`` with
    the other means; times ``dp_size``, over whose ranks gradients are averaged, the parts add up to the whole. A sum
    (``token-sum``, and ``seq-mean-token-sum-norm`` without ``global_batch_size``) needs no divisor, only ``dp_size``.
    Losses registered here need none of the three: the engine weighs micro-batches itself.

    Raises:
        ValueError: a mean over a part of a batch, ``dp_size`` above 1, and no divisor of the whole.
    """
    loss = aggregated(loss_mat, loss_mask, loss_agg_mode, loss_scale_factor)
    if loss_agg_mode == "token-sum":
        return loss * dp_size
    name = "batch_num_tokens" if loss_agg_mode == "token-mean" else "global_batch_size"
    whole = batch_num_tokens if loss_agg_mode == "token-mean" else global_batch_size
    if whole is not None:
        return loss * agg_weight(loss_mask, loss_agg_mode) / whole * dp_size
    if dp_size > 1 and loss_agg_mode != "seq-mean-token-sum-norm":
        raise ValueError(
            f"agg_loss: dp_size={dp_size} with loss_agg_mode={loss_agg_mode} and without {name}: the mean over the "
            f"whole batch cannot be put together from means over its parts. Pass {name}=, counted over all ranks, or "
            "leave dp_size out: the engine weighs micro-batches and ranks itself."
        )
    return loss * dp_size


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """The value of an estimator with its own gradient: ``kl_penalty`` without the ``+`` of the name."""
    return _kl_penalty(logprob, ref_logprob, kl_penalty.removesuffix("+"))


def compute_pf_ppo_reweight_data(data: Any, reweight_method: str = "pow", weight_pow: float = 2.0) -> Any:
    """As many rows of ``data``, which has ``token_level_scores`` (B, R), sampled with replacement by their scores.

    Samples with torch's global generator; the trainer with the seed of the run and the step (``use_pf_ppo``).
    Probabilities: `verl.algorithms.resample.resample_probabilities`.
    """
    scores = data.batch["token_level_scores"].sum(-1).cpu()
    probabilities = resample_probabilities(scores, reweight_method, weight_pow)
    return data.select_idxs(torch.multinomial(probabilities, len(scores), replacement=True))


def compute_entropy_loss(logits, response_mask, loss_agg_mode: str = "token-mean"):
    """Entropy of (B, R, V) logits, aggregated over the unmasked tokens of ``response_mask`` (B, R)."""
    return aggregated(entropy_from_logits(logits), response_mask, loss_agg_mode)
