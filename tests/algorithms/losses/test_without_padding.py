"""Losses on columns without padding: the numbers of the padded form, for all of them."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal
from tests.algorithms.losses.test_actor import actor, critic
from tests.algorithms.losses.test_every_loss import NAMES, OPTIONS, random_batch
from tests.algorithms.test_aggregate import MODES
from verl.algorithms.aggregate import agg_loss
from verl.algorithms.losses import POLICY_LOSS_REGISTRY, PPOLoss, TokenOutputs, ValueLoss, register_policy_loss
from verl.algorithms.losses.distillation import TEACHER_LOG_PROBS, TOP_LOG_PROBS, DistillationLoss
from verl.algorithms.losses.preference import PairwiseLoss, dpo_loss, of_difference
from verl.algorithms.losses.sft import SFTLoss
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.config.actor import ActorConfig
from verl.config.distillation import DistillationLossConfig

WIDTH = 9
PARTS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01, "sft_loss_coef": 0.25, "rl_loss_coef": 0.5}


def in_both_forms(holes=True):
    """Outputs, which share their leaves, and columns of a batch: padded, and without padding."""
    b = random_batch(rows=6, width=WIDTH, seed=23, holes=holes)
    mask = b["mask"]
    mask[2] = 0  # a row without a token
    top = normal(torch.ones(6, WIDTH * 3), 31).view(6, WIDTH, 3).log_softmax(-1)
    columns = {
        "old_log_probs": b["old"],
        "advantages": b["adv"],
        "ref_log_prob": b["old"] - 0.1,
        "rollout_log_probs": b["mu"],
        "token_level_scores": b["scores"],
        "selected_tokens": b["selected"],
        "rollout_is_weights": b["scores"].abs(),
        "response_weights": (torch.arange(6.0) / 3)[:, None].expand_as(b["old"]),
        "returns": b["adv"] + 1,
        "values": b["adv"] + 0.5 * b["scores"],
        TEACHER_LOG_PROBS: b["mu"],
        TOP_LOG_PROBS: top.flip(-1),
        "response_mask": mask,
        "pairs": torch.tensor([1, -1, 2, -2, 0, 0]),
    }
    leaves = {
        "log_probs": b["new"],
        "entropy": b["scores"].abs(),
        "values": b["adv"] + 0.1,
        "full_kl": b["scores"].square(),
        "top_log_probs": top,
    }
    leaves = {name: leaf.clone().requires_grad_(True) for name, leaf in leaves.items()}
    for name in ("old_log_probs", "advantages", "rollout_log_probs", "token_level_scores", "returns", "values"):
        columns[name] = torch.where(mask != 0, columns[name], 7.0)  # what masked positions hold is read nowhere
    layout = Layout.from_mask(mask)
    packed = {
        name: Ragged.from_padded(column, layout) if column.shape[:2] == mask.shape else column
        for name, column in columns.items()
    }
    flat = {name: Ragged.from_padded(leaf, layout).values for name, leaf in leaves.items()}
    return leaves, (TokenOutputs(**leaves), columns), (TokenOutputs(**flat), packed)


def policy(mode, name="vanilla", **changed):
    section = ActorConfig().with_values({**OPTIONS, "policy_loss.loss_mode": name, "loss_agg_mode": mode, **changed})
    return PPOLoss(section, WIDTH)


def distillation(mode, **options):
    options = DistillationLossConfig(**{"use_task_rewards": False, **options})
    return DistillationLoss(ActorConfig().with_values({"loss_agg_mode": mode}), options, WIDTH)


LOSSES = {
    **{name: lambda mode, name=name: policy(mode, name) for name in NAMES},
    "every part": lambda mode: policy(mode, **PARTS),
    "kl over the vocabulary": lambda mode: policy(mode, use_kl_loss=True, kl_loss_type="full"),
    "on policy, weighed": lambda mode: policy(mode, skip_old_log_probs=True, length_loss_weight=True),
    "value": lambda mode: ValueLoss(critic(loss_agg_mode=mode), WIDTH),
    "teacher k3": lambda mode: distillation(mode, loss_mode="k3", use_policy_gradient=True),
    "teacher top k": lambda mode: distillation(mode, loss_mode="forward_kl_topk"),
    "sft": lambda mode: SFTLoss(),
    **{
        f"pairs by {score}": lambda mode, score=score: PairwiseLoss(of_difference(dpo_loss), score, together=True)
        for score in ("log_ratio", "mean_log_prob", "value")
    },
}


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_it_has_the_numbers_of_the_padded_form_in_every_mode(name, holes):
    for mode in MODES:
        loss = LOSSES[name](mode)
        leaves, *forms = in_both_forms(holes)
        results = []
        for out, columns in forms:
            value, metrics = loss(out, columns)
            gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
            results.append((value, metrics, loss.weight(columns), gradients))
        padded, without = results
        assert_close(without[:2], padded[:2])
        assert without[2] == padded[2] and any(gradient is not None for gradient in padded[3])
        for one, other in zip(without[3], padded[3], strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(POLICY_LOSS_REGISTRY, "_entries", dict(POLICY_LOSS_REGISTRY._entries))


@pytest.mark.usefixtures("registry")
def test_a_users_loss_gets_padded_tensors():
    @register_policy_loss("of_a_user")
    def of_a_user(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, rollout_is_weights=None):
        tensors = old_log_prob, log_prob, advantages, response_mask, rollout_is_weights
        assert all(isinstance(x, torch.Tensor) and x.shape == response_mask.shape for x in tensors)
        losses = -advantages * (log_prob - old_log_prob).exp() * rollout_is_weights
        return agg_loss(losses, response_mask, loss_agg_mode), {}

    section = {"policy_loss": SimpleNamespace(loss_mode="of_a_user"), "length_loss_weight": True}
    for on_policy in (False, True):
        loss = PPOLoss(actor(**section, skip_old_log_probs=on_policy))
        leaves, *forms = in_both_forms()
        values = [loss(*form)[0] for form in forms]
        assert_close(*values)
        assert_close(*(torch.autograd.grad(value, leaves["log_probs"])[0] for value in values))
