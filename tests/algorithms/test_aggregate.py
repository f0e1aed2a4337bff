import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask
from verl.algorithms import valid_tokens as valid_tokens_module
from verl.algorithms.aggregate import AGG_MODES, AggMode, agg_loss, agg_weight

MODES = list(AGG_MODES)
LOSS = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.fixture(params=["dense", "packed"])
def both_layouts(request, monkeypatch):
    if request.param == "packed":
        monkeypatch.setattr(valid_tokens_module, "PADDED_BELOW", 0)


BY_HAND = {  # loss and weight of the batch, loss of the first row alone
    "token-mean": (10 / 4, 4, 6 / 3),
    "seq-mean-token-sum": ((6 + 4) / 2, 2, 6),
    "seq-mean-token-mean": ((2 + 4) / 2, 2, 2),
    "seq-mean-token-sum-norm": (10 / 4, 1, 6 / 4),
    "token-sum": (10, 1, 6),
}


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_weight_of_each_mode_by_hand(mode):
    loss, weight, alone = BY_HAND[mode]
    assert_close(agg_loss(LOSS, MASK, mode), torch.tensor(float(loss)))
    assert agg_weight(MASK, mode) == weight
    assert_close(agg_loss(LOSS[:1], MASK[:1], mode), torch.tensor(float(alone)))


def test_the_constant_divisor_can_be_given():
    assert_close(agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", loss_scale_factor=20), torch.tensor(0.5))
    assert_close(agg_loss(LOSS, MASK, "token-mean", loss_scale_factor=20), torch.tensor(2.5))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_costs_nothing(mode):
    assert agg_loss(LOSS, torch.zeros_like(MASK), mode) == 0


@pytest.mark.usefixtures("both_layouts")
@pytest.mark.parametrize("mode", MODES)
def test_masked_positions_have_no_influence_and_no_gradient_even_if_nan(mode):
    loss = torch.where(MASK.bool(), LOSS, torch.nan).requires_grad_(True)
    value = agg_loss(loss, MASK, mode)
    value.backward()
    assert_close(value.detach(), agg_loss(LOSS, MASK, mode))
    assert (loss.grad[MASK == 0] == 0).all() and (loss.grad[MASK == 1] > 0).all()


def partitions(items):
    """Every way to cut a list into non-empty parts, rows in any company."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for parts in partitions(rest):
        yield [[first], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [first, *parts[i]], *parts[i + 1 :]]


@pytest.mark.parametrize("mode", MODES)
def test_weighted_parts_give_the_loss_of_the_whole_however_it_is_cut(mode):
    mask = ragged_mask(6, 9, seed=0)
    loss = normal(mask, seed=1)
    whole = agg_loss(loss, mask, mode)
    cuts = list(partitions(list(range(6))))
    assert len(cuts) == 203
    for parts in cuts:
        losses = torch.stack([agg_loss(loss[p], mask[p], mode) for p in parts])
        weights = torch.stack([agg_weight(mask[p], mode) for p in parts])
        total = 1 if mode in ("seq-mean-token-sum-norm", "token-sum") else weights.sum()
        assert_close((losses * weights / total).sum(), whole)


@pytest.mark.parametrize("sides", [(0, 5), (5, 0), (1, 2)])
@pytest.mark.parametrize("mode", MODES)
def test_rows_in_another_order_and_padding_change_nothing(mode, sides):
    mask = ragged_mask(6, 9, seed=2, holes=True)
    loss = normal(mask, seed=3)
    whole = agg_loss(loss, mask, mode, loss_scale_factor=9)
    order = torch.tensor([3, 1, 5, 0, 4, 2])
    assert_close(agg_loss(loss[order], mask[order], mode, loss_scale_factor=9), whole)
    pad = torch.nn.functional.pad
    assert_close(agg_loss(pad(loss, sides, value=7.0), pad(mask, sides), mode, loss_scale_factor=9), whole)


def test_an_unknown_mode_names_the_nearest():
    with pytest.raises(ValueError, match="loss_agg_mode=token_mean is not known; did you mean 'token-mean'"):
        agg_loss(LOSS, MASK, "token_mean")


def test_a_mode_of_ones_own_takes_part_in_loss_and_weight(monkeypatch):
    monkeypatch.setattr(AGG_MODES, "_entries", dict(AGG_MODES._entries))
    AGG_MODES.register("twice")(AggMode(lambda sums, counts: 2 * sums.sum(), lambda counts: counts.sum()))
    assert_close(agg_loss(LOSS, MASK, "twice"), torch.tensor(5.0))
    assert agg_weight(MASK, "twice") == 4


@pytest.mark.parametrize("mode", MODES)
def test_gradients_agree_with_finite_differences(mode):
    mask = ragged_mask(4, 5, seed=4, holes=True)
    loss = normal(mask, seed=5).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: agg_loss(x, mask, mode), loss)
