import pytest
import torch
from torch.testing import assert_close

from tests.algorithms.batches import normal, ragged_mask, slow_suffix_sum
from verl.algorithms import valid_tokens as valid_tokens_module
from verl.algorithms.valid_tokens import BLOCK, PaddedTokens, ValidTokens, discounted_suffix_sum, valid_tokens

SHAPES = [(1, 1), (3, 7), (5, BLOCK), (4, BLOCK + 1), (6, 3 * BLOCK), (7, 200)]


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_packing_and_unpacking_keeps_the_tokens_and_zeroes_the_rest(shape, holes):
    mask = ragged_mask(*shape, seed=0, holes=holes)
    x = normal(mask, seed=1)
    tokens = ValidTokens(mask)
    assert tokens.total == mask.sum() and tokens.lengths.tolist() == mask.sum(-1).tolist()
    assert_close(tokens.unpack(tokens.pack(x)), x * mask, rtol=0, atol=0)
    assert_close(tokens.unpack(torch.ones_like(tokens.pack(x))), mask.double())


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_suffix_sum_equals_the_loop(shape, decay, holes):
    mask = ragged_mask(*shape, seed=2, holes=holes)
    x = normal(mask, seed=3)
    tokens = ValidTokens(mask)
    assert_close(tokens.unpack(tokens.suffix_sum(tokens.pack(x), decay)), slow_suffix_sum(x, mask, decay))


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefix_sum_adds_up_the_tokens_before(shape, holes):
    mask = ragged_mask(*shape, seed=2, holes=holes)
    x = normal(mask, seed=3)
    tokens = ValidTokens(mask)
    sums = tokens.prefix_sum(tokens.pack(x))
    assert_close(tokens.unpack(sums), (x * mask).cumsum(-1) * mask)
    assert not sums[tokens.clear_gaps(torch.ones_like(sums)) == 0].any()


def test_suffix_sum_is_right_where_a_row_has_more_blocks_than_a_block_has_tokens():
    mask = torch.ones(2, 2 * BLOCK * BLOCK + 5, dtype=torch.int64)
    mask[1, 100:] = 0
    x = normal(mask, seed=4)
    tokens = ValidTokens(mask)
    assert_close(tokens.unpack(tokens.suffix_sum(tokens.pack(x), 0.999)), slow_suffix_sum(x, mask, 0.999))
    assert_close(discounted_suffix_sum(x[:1], 0.999), slow_suffix_sum(x[:1], mask[:1], 0.999))


@pytest.mark.parametrize("holes", [False, True])
def test_next_is_the_following_token_of_the_same_row(holes):
    mask = ragged_mask(6, 2 * BLOCK, seed=5, holes=holes)
    mask[2] = 1  # ends on the edge of a block, with another row behind it
    x = normal(mask, seed=6)
    tokens = ValidTokens(mask)
    got = tokens.unpack(tokens.next(tokens.pack(x)))
    for i, row in enumerate(mask):
        where = row.nonzero().flatten()
        expected = torch.cat([x[i, where[1:]], torch.zeros(1).double()]) if len(where) else torch.zeros(0).double()
        assert_close(got[i, where], expected)


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("kind", [ValidTokens, PaddedTokens])
def test_sums_means_and_gradients_touch_only_valid_tokens_even_next_to_nan(kind, holes):
    mask = ragged_mask(5, 150, seed=7, holes=holes)
    x = torch.where(mask.bool(), normal(mask, seed=8), torch.nan).requires_grad_(True)
    clean = torch.where(mask.bool(), x.detach(), 0)
    tokens = kind(mask)
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    sums = tokens.row_sum(tokens.pack(x).square())
    assert_close(sums.detach(), clean.square().sum(-1))
    assert_close(tokens.mean(tokens.pack(x)).detach(), clean.sum() / mask.sum())
    (sums * weights).sum().backward()
    assert_close(x.grad, 2 * clean * weights[:, None])


def test_spread_gives_each_token_its_rows_number():
    mask = ragged_mask(4, 90, seed=9, holes=True)
    per_row = torch.tensor([1.0, -2.0, 3.0, 4.0])
    assert_close(ValidTokens(mask).spread(per_row), per_row[:, None] * mask)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype_count(dtype):
    mask = ragged_mask(4, 70, seed=10, holes=True)
    x = normal(mask, seed=11)
    assert_close(ValidTokens(mask.to(dtype)).pack(x), ValidTokens(mask).pack(x))
    assert_close(PaddedTokens(mask.to(dtype)).row_sum(PaddedTokens(mask.to(dtype)).pack(x)), (x * mask).sum(-1))


def test_an_empty_mask_has_nothing_in_it():
    tokens = ValidTokens(torch.zeros(3, 9, dtype=torch.int64))
    x = tokens.pack(torch.full((3, 9), torch.nan))
    assert tokens.total == 0 and x.numel() == 0
    assert tokens.mean(x) == 0
    assert_close(tokens.unpack(tokens.suffix_sum(x, 0.9)), torch.zeros(3, 9))


def test_small_masks_stay_dense_and_large_ones_are_packed(monkeypatch):
    mask = ragged_mask(4, 70, seed=12)
    assert isinstance(valid_tokens(mask), PaddedTokens)
    monkeypatch.setattr(valid_tokens_module, "PADDED_BELOW", 1)
    assert isinstance(valid_tokens(mask), ValidTokens)
