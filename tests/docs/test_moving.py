"""docs/moving.md: its numbers, computed here and in the other trainers' way; its names, which must be ours."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms.advantages import (
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
)
from verl.algorithms.aggregate import agg_loss
from verl.algorithms.correction import importance_weights
from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import PPOLoss, TokenOutputs, compute_policy_loss, get_policy_loss_fn
from verl.algorithms.reward_shaping import centre_and_spread
from verl.config.actor import ActorConfig
from verl.config.base import get_path
from verl.config.checks.batch import optimizer_steps
from verl.config.load import load_ppo_config
from verl.config.ppo import PPOConfig

PAGE = (Path(__file__).parents[2] / "docs" / "moving.md").read_text(encoding="utf-8")
SCORES = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1], dtype=torch.float64)
INDEX = np.repeat([0, 1], 4)


def cells(first: str) -> list[str]:
    """The other cells of the page's row that begins with ``first``."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def grpo(scores, index=INDEX, **options):
    mask = torch.ones(len(scores), 1)
    return compute_grpo_outcome_advantage(scores[:, None], mask, index, **options)[0][:, 0]


def test_keys_of_the_first_column_are_ours():
    table = PAGE[PAGE.index("## Names") : PAGE.index("## Batch sizes")]
    config, keys = PPOConfig(), []
    for line in table.splitlines():
        if line.startswith("| `"):
            for word in re.findall(r"`([^`]+)`", line.split("|")[1]):
                section, _, names = word.partition("=")[0].partition("{")
                keys += [section + name for name in names.rstrip("}").split(",")]
    assert len(keys) > 30
    for key in keys:
        get_path(config, key.removesuffix(".*"))


@pytest.mark.parametrize(
    ("p", "a", "d", "n", "rollout", "expected"),
    [
        (8, 4, 4, 8, None, (16, 16, 8, 1)),  # TRL: one generation batch is one optimizer step
        (1, 32, 16, 8, 64, (64, 64, 1, 1)),  # ROLL
        (2, 4, 4, 8, 16, (16, 4, 2, 4)),
    ],
)
def test_batch_sizes_of_the_examples(p, a, d, n, rollout, expected):
    responses = p * a * d
    prompts = rollout or responses // n
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=hf", f"actor_rollout_ref.rollout.n={n}"]
    sizes = {"data.train_batch_size": prompts, "actor_rollout_ref.actor.ppo_mini_batch_size": responses // n}
    sizes["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = p
    sizes["actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"] = p
    sizes["trainer.n_gpus_per_node"] = d
    config = load_ppo_config(words + [f"{key}={value}" for key, value in sizes.items()])
    actor = config.actor_rollout_ref.actor
    steps = optimizer_steps(config, actor)
    assert (prompts, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu, steps) == expected
    assert prompts * n // responses == steps


def test_the_first_advantage_with_the_epsilon_of_each():
    here, verl, roll, trl = cells("first advantage, `grpo`")
    group = SCORES[:4]
    centred, std = group[0] - group.mean(), group.std()
    assert grpo(SCORES)[0].item() == pytest.approx(float(here), abs=1e-6)
    assert (centred / (std + 1e-6)).item() == pytest.approx(float(verl), abs=1e-6) == pytest.approx(float(roll))
    assert (centred / (std + 1e-4)).item() == pytest.approx(float(trl), abs=1e-6)


def test_group_mean_and_batch_std():
    here, _, _, trl = (re.findall(r"[\d.]+\d$", cell) for cell in cells("group's mean, batch's std"))
    centre, spread = centre_and_spread(SCORES, INDEX, "group", "batch")
    assert ((SCORES - centre) / spread)[0].item() == pytest.approx(float(here[0]), abs=1e-6)
    assert (0.5 / (SCORES.std() + 1e-4)).item() == pytest.approx(float(trl[0]), abs=1e-6)


def test_equal_scores_are_exactly_zero_here_and_rounding_errors_elsewhere():
    _, verl, _, trl = cells("seven scores of 0.7, `grpo`")
    scores = torch.full((7,), 0.7)
    assert (grpo(scores, np.zeros(7)) == 0).all()
    noise = (scores - scores.mean()) / (scores.std() + torch.tensor([[1e-6], [1e-4]]))
    for cell, value in zip((verl, trl), noise[:, 0].abs().tolist(), strict=True):
        assert value < 0.1 and float(re.match(r"[\d.]+", cell)[0]) < 0.1  # which error depends on the processor


def test_a_group_of_one_keeps_its_score():
    assert_close(grpo(SCORES[:1], np.zeros(1)), SCORES[:1] / (1 + 1e-6))


def test_whitening_is_that_of_verl_and_roll():
    mask, rewards = ragged_mask(4, 9, seed=0), normal(ragged_mask(4, 9, seed=0), 1)
    got, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.9)
    own = returns[mask.bool()]
    assert_close(got[mask.bool()], (own - own.mean()) * torch.rsqrt(own.var() + 1e-8))


def test_kl_before_and_after_the_group_is_compared():
    """verl's order inside grpo; ROLL's with the norm of reward_shaping and reinforce."""
    kl = torch.tensor([0.1, 0.2, 0.0, 0.4, 0.1, 0.1, 0.3, 0.0], dtype=torch.float64)
    before = grpo(SCORES - kl)
    centre, spread = centre_and_spread(SCORES, INDEX, "group", "group")
    after = (SCORES - centre) / spread - kl
    charged = (SCORES - kl).view(2, 4)
    verl = (charged - charged.mean(1, keepdim=True)) / (charged.std(1, keepdim=True) + 1e-6)
    assert_close(before, verl.flatten())
    assert (before - after).abs().max() > 0.05


def test_returns_of_earlier_turns_go_on():
    rewards, mask = torch.tensor([[0.0, 0, 0, 0, 0, 1]]), torch.tensor([[1, 1, 0, 0, 1, 1]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=1.0)
    there, running = torch.zeros(6), 0.0
    for t in reversed(range(6)):
        running = (rewards[0, t] + running) * mask[0, t]  # verl multiplies by the mask as it goes
        there[t] = running
    assert returns.tolist() == [[1, 1, 0, 0, 1, 1]] and there.tolist() == [0, 0, 0, 0, 1, 1]


def test_gae_passes_over_tool_output():
    rewards, values = torch.tensor([[0.0, 7, 1]]), torch.tensor([[0.5, 9, 0.25]])
    mask = torch.tensor([[1, 0, 1]])
    _, returns = compute_gae_advantage_return(rewards, values, mask, 0.5, 0.5)
    _, closed = compute_gae_advantage_return(rewards[:, ::2], values[:, ::2], mask[:, ::2], 0.5, 0.5)
    assert_close(returns[:, ::2], closed)


def test_the_factor_of_gpg():
    scores = torch.tensor([1.0, 0, 1, 1])
    here = compute_gpg_outcome_advantage(scores[:, None], torch.ones(4, 1), np.array([0, 0, 1, 1]))[0][:, 0]
    assert here.tolist() == [1.0, -1.0, 0, 0]  # 4 / 2 times 0.5
    verl = 4 / (scores != 0).sum() * 0.5
    assert verl.item() == pytest.approx(4 / 3 / 2)


# ------------------------------------------------------------------------------------------------------------- losses


def test_loss_types_of_trl_are_aggregation_modes():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
    loss, length = normal(mask, 0), 10
    per_row = (loss * mask).sum(-1)
    trl = {
        "token-mean": per_row.sum() / mask.sum(),  # dapo
        "seq-mean-token-mean": (per_row / mask.sum(-1)).mean(),  # grpo
        "seq-mean-token-sum-norm": per_row.sum() / (3 * length),  # dr_grpo
    }
    for mode, expected in trl.items():
        config = ActorConfig().with_values({"policy_loss.loss_mode": "gpg", "loss_agg_mode": mode})
        columns = {"old_log_probs": loss, "advantages": -torch.ones_like(loss), "response_mask": mask}
        assert_close(PPOLoss(config, response_length=length)(TokenOutputs(loss), columns)[0], expected)


def test_responses_without_tokens_count_in_trl_only():
    mask = torch.tensor([[1, 1], [0, 0]])
    loss = torch.tensor([[1.0, 3.0], [9.0, 9.0]])
    trl = ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    assert agg_loss(loss, mask, "seq-mean-token-mean") == 2 and trl == 1


def test_micro_batches_averaged_by_rows_give_another_loss():
    mask, loss = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]]), torch.tensor([[1.0, 1, 1, 1], [6, 0, 0, 0]])
    parts = [agg_loss(loss[i : i + 1], mask[i : i + 1], "token-mean") for i in range(2)]
    assert agg_loss(loss, mask, "token-mean") == 2 and sum(parts) / 2 == 3.5


def test_delta_of_trl_is_the_dual_clip():
    g = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(5, 7, generator=g) for _ in range(3))
    w, delta = (new - old).exp(), 1.5
    trl = -torch.min(w.clamp(max=delta) * adv, w.clamp(0.8, 1.2) * adv)
    assert_close(compute_policy_loss(old, new, adv, torch.ones(5, 7), 0.2, clip_ratio_c=delta)[0], trl.mean())


def test_roll_s_dual_clip_is_c_of_one_and_twice_the_range():
    assert cells("dual clip")[2].endswith("1.4") and 1 + 2 * 0.2 == 1.4
    assert ActorConfig().clip_ratio_c == 3.0 == float(re.search(r"c = ([\d.]+)", cells("dual clip")[0])[1])


def test_the_cap_of_cispo():
    g = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(5, 7, generator=g) * 1.5 for _ in range(3))
    trl = -(new - old).exp().clamp(max=5.0) * adv * new
    config = ActorConfig().with_values({"clip_ratio_high": 4.0, "clip_ratio_low": 1.0})
    loss, _ = get_policy_loss_fn("cispo")(old, new, adv, torch.ones(5, 7), "token-mean", config)
    assert_close(loss, trl.mean())


def test_defaults_the_page_names():
    actor = ActorConfig()
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2)
    assert (actor.tau_pos, actor.tau_neg) == tuple(map(float, cells("`sapo`'s temperatures")[0].split(", ")))
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (False, 0.001, "low_var_kl")
    assert (actor.entropy_coeff, actor.loss_agg_mode, actor.shuffle) == (0, "token-mean", False)
    assert (actor.optim.lr, actor.optim.weight_decay, actor.optim.warmup_style) == (1e-6, 0.01, "constant")
    config = PPOConfig()
    rollout, control = config.actor_rollout_ref.rollout, config.algorithm.kl_ctrl
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (1.0, 1.0, -1)
    assert (config.algorithm.lam, config.trainer.seed) == (1.0, 1)
    assert (control.type, control.target_kl, control.horizon) == ("fixed", 0.1, 10000)


def test_k3_is_bounded_here_and_not_in_trl():
    here, _, _, trl = cells("k3 of d = -3")
    x, y = torch.tensor([-3.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert kl_penalty(x, y, "k3").item() == float(here)
    assert math.exp(3) - 3 - 1 == pytest.approx(float(trl), abs=1e-6)


def test_the_correction_of_trl_by_sequences():
    """Ratio of the whole response, 0 above the cap; no lower bound."""
    g = torch.Generator().manual_seed(1)
    mask = ragged_mask(6, 5, seed=2)
    old, mu = (-torch.rand(6, 5, generator=g) for _ in range(2))
    ratio = ((old - mu) * mask).sum(-1, keepdim=True).exp()
    trl = torch.where(ratio > 3.0, 0.0, ratio) * mask
    assert "rollout_is_threshold=3 rollout_is_threshold_lower=1e-9" in cells("sampler and trainer differ")[3]
    weights, _ = importance_weights(old, mu, mask, "sequence", upper=3.0, lower=1e-9, mode="mask")
    assert_close(weights, trl)
