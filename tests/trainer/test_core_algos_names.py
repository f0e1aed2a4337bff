"""Names and signatures under which recipes written for verl call the algorithms."""

import inspect

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.trainer.test_experience import batch_of
from verl.trainer.ppo import core_algos

NAMES = """
ADV_ESTIMATOR_REGISTRY AdaptiveKLController AdvantageEstimator FixedKLController POLICY_LOSS_REGISTRY PolicyLossFn
agg_loss compute_entropy_loss compute_gae_advantage_return compute_gdpo_outcome_advantage
compute_gpg_outcome_advantage compute_grpo_outcome_advantage compute_grpo_passk_outcome_advantage
compute_grpo_vectorized_outcome_advantage compute_multi_turn_optimal_token_baseline_advantage
compute_opo_outcome_advantage compute_optimal_token_baseline_advantage compute_pf_ppo_reweight_data
compute_policy_loss compute_policy_loss_bypass_mode compute_policy_loss_cispo compute_policy_loss_clip_cov
compute_policy_loss_geo_mean compute_policy_loss_gpg compute_policy_loss_gspo compute_policy_loss_kl_cov
compute_policy_loss_reinforce compute_policy_loss_sapo compute_policy_loss_vanilla
compute_reinforce_plus_plus_baseline_outcome_advantage compute_reinforce_plus_plus_outcome_advantage
compute_remax_outcome_advantage compute_rewards compute_rloo_outcome_advantage
compute_rloo_vectorized_outcome_advantage compute_value_loss get_adv_estimator_fn get_kl_controller
get_policy_loss_fn kl_penalty kl_penalty_forward register_adv_est register_policy_loss
""".split()
"""What recipes import."""

PARAMETERS = {
    "compute_gae_advantage_return": "token_level_rewards values response_mask gamma lam",
    "compute_grpo_outcome_advantage": "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
    "compute_rloo_outcome_advantage": "token_level_rewards response_mask index epsilon config",
    "compute_opo_outcome_advantage": "token_level_rewards response_mask index epsilon config",
    "compute_gpg_outcome_advantage": "token_level_rewards response_mask index epsilon f_norm config",
    "compute_remax_outcome_advantage": "token_level_rewards reward_baselines response_mask config",
    "compute_reinforce_plus_plus_outcome_advantage": "token_level_rewards response_mask config",
    "compute_policy_loss": "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high "
    "clip_ratio_c loss_agg_mode",
    "compute_value_loss": "vpreds returns values response_mask cliprange_value loss_agg_mode",
    "agg_loss": "loss_mat loss_mask loss_agg_mode dp_size batch_num_tokens global_batch_size loss_scale_factor",
    "kl_penalty": "logprob ref_logprob kl_penalty",
    "compute_rewards": "token_level_scores old_log_prob ref_log_prob kl_ratio",
    "compute_pf_ppo_reweight_data": "data reweight_method weight_pow",
    "get_kl_controller": "kl_ctrl",
    "AdaptiveKLController": "init_kl_coef target_kl horizon",
    "FixedKLController": "kl_coef",
    **{
        f"compute_policy_loss_{name}": "old_log_prob log_prob advantages response_mask loss_agg_mode config"
        for name in ("vanilla", "gspo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "sapo", "bypass_mode")
    },
}
"""Name -> the first parameters, in verl's order."""


def test_every_name_a_recipe_imports_is_there():
    assert not [name for name in NAMES if not hasattr(core_algos, name)]
    assert set(NAMES) <= set(core_algos.__all__)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_come_in_verls_order(name):
    ours = [p for p in inspect.signature(getattr(core_algos, name)).parameters if p != "rollout_log_probs"]
    expected = PARAMETERS[name].split()
    assert [p for p in ours if p in expected] == expected


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_parts_that_know_the_divisor_of_the_whole_add_up_to_it(mode):
    g = torch.Generator().manual_seed(0)
    loss, mask = torch.randn(6, 5, generator=g), torch.randint(0, 2, (6, 5), generator=g)
    sizes = {"batch_num_tokens": mask.sum(), "global_batch_size": (mask.sum(-1) > 0).sum()}
    parts = [core_algos.agg_loss(loss[i::2], mask[i::2], mode, dp_size=2, **sizes) for i in range(2)]
    assert_close(sum(parts) / 2, core_algos.agg_loss(loss, mask, mode))


@pytest.mark.parametrize("mode", ["token-sum", "seq-mean-token-sum-norm"])
def test_parts_of_a_sum_add_up_over_ranks_whose_gradients_are_averaged(mode):
    loss, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]), torch.ones(4, 2)
    parts = [core_algos.agg_loss(loss[i : i + 1], mask[i : i + 1], mode, dp_size=4) for i in range(4)]
    assert sum(parts) / 4 == core_algos.agg_loss(loss, mask, mode) == (36 if mode == "token-sum" else 18)


def test_the_constant_divisor_is_of_the_mean_over_all_responses_where_their_number_is_given():
    loss, mask = torch.ones(2, 4), torch.ones(2, 4)
    mode = "seq-mean-token-sum-norm"
    scaled = core_algos.agg_loss(loss, mask, mode, dp_size=2, global_batch_size=4, loss_scale_factor=8)
    assert scaled == 2 * (8 / 8) / 4


@pytest.mark.parametrize(
    ("mode", "name"), [("token-mean", "batch_num_tokens"), ("seq-mean-token-mean", "global_batch_size")]
)
def test_a_mean_over_one_of_several_ranks_parts_needs_the_divisor_of_the_whole(mode, name):
    with pytest.raises(ValueError, match=rf"dp_size=4 with loss_agg_mode={mode} and without {name}.*Pass {name}="):
        core_algos.agg_loss(torch.ones(2, 4), torch.ones(2, 4), mode, dp_size=4)


def test_the_scale_factor_is_a_constant_divisor_by_name():
    loss, mask = torch.ones(2, 4), torch.ones(2, 4)
    mode = "seq-mean-token-sum-norm"
    assert (
        core_algos.agg_loss(loss, mask, mode) == 2 and core_algos.agg_loss(loss, mask, mode, loss_scale_factor=8) == 1
    )


def test_kl_without_its_straight_through_gradient():
    x, ref = torch.tensor([0.5], requires_grad=True), torch.tensor([0.0])
    (own,) = torch.autograd.grad(core_algos.kl_penalty_forward(x, ref, "k1+").sum(), x)
    (followed,) = torch.autograd.grad(core_algos.kl_penalty(x, ref, "k1+").sum(), x)
    assert (own.item(), followed.item()) == (1.0, 0.5)


def test_pf_ppo_samples_rows_by_their_scores():
    data = batch_of([1, 1, 1, 1], [1, 1, 1, 1], 1, 2)
    data.put("token_level_scores", torch.tensor([[0.0, 0], [2.0, 0], [0.0, 0], [-2.0, 0]]))
    torch.manual_seed(0)
    resampled = core_algos.compute_pf_ppo_reweight_data(data, "pow", 2.0)
    assert len(resampled) == 4 and set(resampled.column("row").tolist()) <= {1, 3}
    with pytest.raises(ValueError, match="reweight_method=top is not known"):
        core_algos.compute_pf_ppo_reweight_data(data, "top")


def test_advantages_by_their_public_names():
    rewards, mask, index = torch.tensor([[1.0, 0], [0.0, 0]]), torch.tensor([[1, 1], [1, 0]]), np.array([0, 0])
    expected = core_algos.compute_grpo_outcome_advantage(rewards, mask, index)
    assert_close(core_algos.compute_grpo_vectorized_outcome_advantage(rewards, mask, index), expected)
    assert_close(core_algos.compute_gigpo_outcome_advantage(rewards, mask, index)[0], 2 * expected[0])
