import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import outcome
from verl.algorithms.advantages import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    NonFiniteError,
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
    compute_remax_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)

REWARDS = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, -1.0, 0.0]])
VALUES = torch.tensor([[0.5, 0.4, 0.3, 9.0], [0.2, 7.0, -0.1, 0.3]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])  # the second row has a hole: a tool's output
SCORES, LENGTHS, INDEX = [1.0, 0.0, 2.0, 0.25], [3, 1, 5, 2], np.array(["a", "a", "b", "a"], dtype=object)


def test_a_value_or_baseline_that_is_not_finite_is_named_but_rubbish_in_padding_is_not_looked_at():
    values = VALUES.clone()
    values[0, 3] = torch.nan
    compute_gae_advantage_return(REWARDS, values, MASK, 1.0, 1.0)
    values[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"values holds nan in 1 .*\[1\]"):
        compute_gae_advantage_return(REWARDS, values, MASK, 1.0, 1.0)
    with pytest.raises(NonFiniteError, match=r"reward_baselines holds inf"):
        compute_remax_outcome_advantage(REWARDS, torch.tensor([0.0, torch.inf]), MASK)


@pytest.mark.parametrize("index", [np.array(["x", "y", "x"], dtype=object), ["x", "y", "x"], torch.tensor([5, 2, 5])])
def test_prompt_ids_may_be_strings_a_list_or_a_tensor(index):
    rewards, mask = outcome([1.0, 3.0, 0.0], [1, 2, 3], width=3)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index, norm_adv_by_std_in_grpo=False)
    assert_close(advantages, torch.tensor([[0.5], [3.0], [-0.5]]) * mask)


def test_an_estimator_of_ones_own_is_found_by_name(monkeypatch, caplog):
    for name in ("_entries", "_about"):
        monkeypatch.setattr(ADV_ESTIMATOR_REGISTRY, name, dict(getattr(ADV_ESTIMATOR_REGISTRY, name)))

    @register_adv_est("score_itself")
    def score_itself(token_level_rewards, response_mask, config=None):
        advantages = token_level_rewards.sum(-1, keepdim=True) * response_mask
        return advantages, advantages

    assert get_adv_estimator_fn("score_itself") is score_itself
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is compute_grpo_outcome_advantage
    register_adv_est(AdvantageEstimator.GRPO)(score_itself)
    assert get_adv_estimator_fn("grpo") is score_itself and "from now on, not verl's own" in caplog.text
    with pytest.raises(ValueError, match="'score_itself' is already taken"):
        register_adv_est("score_itself")(compute_grpo_outcome_advantage)


def test_an_unknown_estimator_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match="algorithm.adv_estimator=grop is not known; did you mean 'grpo'.*rloo"):
        get_adv_estimator_fn("grop")
