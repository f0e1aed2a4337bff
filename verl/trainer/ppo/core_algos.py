"""The names under which users of verl know the algorithms. The functions themselves are in ``verl/algorithms``."""

from verl.algorithms.advantage import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from verl.algorithms.advantage_groups import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_optimal_token_baseline_advantage,
)
from verl.algorithms.advantage_turns import (
    compute_agentic_reinforce_advantage,
    compute_reinforce_advantage,
    compute_step_reinforce_advantage,
)
from verl.algorithms.aggregate import agg_loss, agg_weight
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    compute_rewards,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.policy_cov import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algorithms.policy_loss import (
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    compute_policy_loss,
    compute_policy_loss_vanilla,
    get_policy_loss_fn,
    register_policy_loss,
)
from verl.algorithms.policy_ratio import (
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_geo_mean,
    compute_policy_loss_gspo,
    compute_policy_loss_sapo,
)
from verl.algorithms.policy_reinforce import (
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_kimi15,
    compute_policy_loss_tis,
    compute_policy_loss_topr,
)
from verl.algorithms.value_loss import compute_value_loss
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
    "compute_agentic_reinforce_advantage",
    "compute_entropy_loss",
    "compute_gae_advantage_return",
    "compute_gdpo_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_dppo_kl",
    "compute_policy_loss_dppo_tv",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_dro",
    "compute_policy_loss_kimi15",
    "compute_policy_loss_kl_cov",
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
    "compute_step_reinforce_advantage",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]


def compute_entropy_loss(logits, response_mask, loss_agg_mode: str = "token-mean"):
    """Entropy of (B, R, V) logits, aggregated over the unmasked tokens of ``response_mask`` (B, R)."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
