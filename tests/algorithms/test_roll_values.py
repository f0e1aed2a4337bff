"""Numbers that ROLL's own functions give, kept as they are: whoever comes from there finds the same here.

Two groups of four scored [1, 0, 0, 1 | 0, 0, 0, 1] where nothing else is said; four digits, as they were noted.
"""

import numpy as np
import pytest
import torch

from verl.algorithms.advantages import compute_reinforce_advantage
from verl.algorithms.losses import compute_policy_loss, get_policy_loss_fn
from verl.algorithms.reward_shaping import centre_and_spread, merge_moments
from verl.config.actor import ActorConfig

SCORES = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])
INDEX = np.repeat([0, 1], 4)


@pytest.mark.parametrize(
    ("mean", "std", "values"),
    [
        ("group", "group", [0.8660, -0.8660, -0.8660, 0.8660, -0.5, -0.5, -0.5, 1.5]),
        ("group", "batch", [0.9661, -0.9661, -0.9661, 0.9661, -0.4830, -0.4830, -0.4830, 1.4491]),
        ("running", "running", [1.2076, -0.7246, -0.7246, 1.2076, -0.7246, -0.7246, -0.7246, 1.2076]),
    ],
)
def test_reward_norm(mean, std, values):
    sources = ["math"] * 8
    centre, spread = centre_and_spread(SCORES, INDEX, mean, std, merge_moments({}, SCORES, sources), sources)
    assert ((SCORES - centre) / spread).tolist() == pytest.approx(values, abs=6e-5)


def test_dual_clip():
    ratios, advantages = [5.0, 1.1, 5.0, 0.1], [-1.0, -1.0, 1.0, 1.0]
    losses = []
    for w, a in zip(ratios, advantages, strict=True):
        one, new, old = torch.ones(1, 1), torch.tensor([[w]]).log(), torch.zeros(1, 1)
        losses.append(compute_policy_loss(old, new, torch.tensor([[a]]), one, 0.2, clip_ratio_c=1.4)[0].item())
    assert losses == pytest.approx([1.4, 1.1, -1.2, -0.1])


def test_reinforce_with_gamma_one_half():
    advantages, _ = compute_reinforce_advantage(torch.tensor([[0, 0, 1.0]]), torch.ones(1, 3), 0.5)
    assert advantages.tolist() == [[0.25, 0.5, 1.0]]


def test_topr_by_token():
    """-(w+ 1[s > 0] + w- 1[s <= 0] sg(clip(rho, 0, 1))) A log pi, rho of the token as ROLL has it."""
    options = {
        "policy_loss.topr_pos_weight": 1.5,
        "policy_loss.topr_neg_weight": 0.5,
        "policy_loss.topr_ratio": "token",
    }
    old, new = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]), torch.tensor([[-0.5, -2.0], [-0.5, -2.0]])
    advantages, scores = torch.tensor([[2.0, 2.0], [-2.0, -2.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    loss, _ = get_policy_loss_fn("topr")(
        old_log_prob=old,
        log_prob=new,
        advantages=advantages,
        response_mask=torch.ones(2, 2),
        token_level_scores=scores,
        loss_agg_mode="token-sum",
        config=ActorConfig().with_values(options),
    )
    won = -1.5 * 2 * -0.5 + -1.5 * 2 * -2.0
    lost = 0.5 * 1 * 2 * -0.5 + 0.5 * np.exp(-1) * 2 * -2.0
    assert loss.item() == pytest.approx(won + lost)
