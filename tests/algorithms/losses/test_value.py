import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms import valid_tokens as valid_tokens_module
from verl.algorithms.losses import compute_value_loss

PREDICTED = torch.tensor([[0.9, 1.5, 0.0, 3.0], [1.0, 9.0, 9.0, 9.0]])
OLD = torch.tensor([[0.4, 0.5, 0.6, 0.0], [1.0, 9.0, 9.0, 9.0]])
RETURNS = torch.tensor([[1.0, 0.0, 0.9, 5.0], [2.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
# per token: 0.08 (clipped: 0.9 ran past 0.6), 1.125, 0.405 | 0.5


@pytest.fixture(params=["dense", "packed"], autouse=True)
def both_layouts(request, monkeypatch):
    if request.param == "packed":
        monkeypatch.setattr(valid_tokens_module, "PADDED_BELOW", 0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 2.11 / 4),
        ("seq-mean-token-sum", 2.11 / 2),
        ("seq-mean-token-mean", (1.61 / 3 + 0.5) / 2),
        ("seq-mean-token-sum-norm", 2.11 / 4),
    ],
)
def test_loss_and_share_by_hand_in_every_mode(mode, expected):
    loss, clipfrac = compute_value_loss(PREDICTED, RETURNS, OLD, MASK, 0.2, mode)
    assert_close(loss, torch.tensor(expected), rtol=0, atol=1e-6)
    assert clipfrac == 0.25


def test_one_response_alone():
    loss, clipfrac = compute_value_loss(PREDICTED[:1], RETURNS[:1], OLD[:1], MASK[:1], 0.2)
    assert_close(loss, torch.tensor(0.536667), rtol=0, atol=1e-6)
    assert_close(clipfrac, torch.tensor(1 / 3))


def test_gradient_by_hand_is_the_error_where_nothing_is_clipped():
    v = PREDICTED.clone().requires_grad_(True)
    compute_value_loss(v, RETURNS, OLD, MASK, 0.2)[0].backward()
    assert_close(v.grad, torch.tensor([[0.0, 1.5, -0.9, 0.0], [-1.0, 0.0, 0.0, 0.0]]) / 4)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradients_agree_with_finite_differences(mode):
    mask = ragged_mask(5, 9, seed=0, holes=True)
    v, returns, old = (normal(mask, seed) * mask for seed in (1, 2, 3))
    assert torch.autograd.gradcheck(
        lambda x: compute_value_loss(x, returns, old, mask, 0.5, mode)[0], v.requires_grad_(True)
    )


def test_masked_positions_have_no_influence_and_no_gradient_even_if_nan():
    spoil = lambda x: torch.where(MASK.bool(), x, torch.nan)  # noqa: E731
    v = spoil(PREDICTED).requires_grad_(True)
    loss, clipfrac = compute_value_loss(v, spoil(RETURNS), spoil(OLD), MASK, 0.2)
    loss.backward()
    assert_close(loss.detach(), torch.tensor(2.11 / 4), rtol=0, atol=1e-6)
    assert (v.grad[MASK == 0] == 0).all() and clipfrac == 0.25


def test_a_batch_without_tokens_costs_nothing():
    loss, clipfrac = compute_value_loss(PREDICTED, RETURNS, OLD, torch.zeros_like(MASK), 0.2)
    assert loss == 0 and clipfrac == 0
