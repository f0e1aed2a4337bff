import math

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from verl.utils import torch_functional as F

VALUES = torch.tensor([[1.0, 2.0, float("nan")], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1, 1, 0], [0, 1, 1]])


def test_masked_sum_and_mean_by_hand_do_not_read_masked_values():
    assert_close(F.masked_sum(VALUES, MASK), torch.tensor(14.0))
    assert_close(F.masked_sum(VALUES, MASK, axis=-1), torch.tensor([3.0, 11.0]))
    assert_close(F.masked_mean(VALUES, MASK), torch.tensor(3.5))
    assert_close(F.masked_mean(VALUES, MASK, axis=0), torch.tensor([1.0, 3.5, 6.0]))
    assert F.masked_mean(VALUES, torch.zeros_like(MASK)) == 0


def test_masked_var_and_whiten_by_hand():
    values = VALUES.nan_to_num(0)
    assert_close(F.masked_var(values, MASK), torch.tensor(17 / 3))
    assert_close(F.masked_var(values, MASK, unbiased=False), torch.tensor(17 / 4))
    whitened = F.masked_whiten(values, MASK)[MASK.bool()]
    assert_close(whitened, torch.tensor([-2.5, -1.5, 1.5, 2.5]) / math.sqrt(17 / 3))
    kept = F.masked_whiten(values, MASK, shift_mean=False)[MASK.bool()]
    assert_close(kept, whitened + 3.5)


def test_the_variance_of_one_value_is_refused():
    with pytest.raises(ValueError, match="the mask selects 1 value"):
        F.masked_var(torch.ones(2, 2), torch.tensor([[1, 0], [0, 0]]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 2500)])
def test_logprobs_and_entropy_equal_their_definitions(shape, dtype):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, 11, generator=g).to(dtype)
    labels = torch.randint(0, 11, shape, generator=g)
    exact = logits.double().log_softmax(-1)
    tolerance = {"rtol": 1e-5, "atol": 1e-6, "check_dtype": False}
    assert_close(F.logprobs_from_logits(logits, labels), F.gather_from_labels(exact, labels), **tolerance)
    assert_close(F.entropy_from_logits(logits), -(exact.exp() * exact).sum(-1), **tolerance)
    assert_close(F.entropy_from_logits_with_chunking(logits, 3), F.entropy_from_logits(logits))
    assert_close(F.logprobs_from_logits_naive(logits.double(), labels), F.gather_from_labels(exact, labels))


def test_logprobs_and_entropy_have_right_gradients():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[0, 4, 2], [1, 1, 3]])
    assert torch.autograd.gradcheck(lambda x: F.logprobs_from_logits(x, labels), logits)
    assert torch.autograd.gradcheck(F.entropy_from_logits, logits)


def test_forbidden_tokens_do_not_make_the_entropy_nan():
    assert_close(F.entropy_from_logits(torch.tensor([0.0, 0.0, -torch.inf])), torch.tensor(math.log(2)))


def test_response_log_probs_are_those_of_the_tokens_before_shifted_by_one():
    logits = torch.randn(2, 6, 9, generator=torch.Generator().manual_seed(2))
    ids = torch.arange(12).view(2, 6) % 9
    got = F.log_probs_from_logits_response(ids, logits, 2)
    assert_close(got[1, 0], logits[1, 3].log_softmax(-1)[ids[1, 4]])
    assert got.shape == (2, 2)


def test_response_mask_goes_up_to_the_first_end_token():
    ids = torch.tensor([[20, 10, 1, 0, 1], [7, 2, 8, 1, 0], [3, 3, 3, 3, 3]])
    assert F.get_response_mask(ids, 1).tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert F.get_response_mask(ids, [1, 2]).tolist()[1] == [1, 1, 0, 0, 0]
    assert F.get_response_mask(ids, 1, dtype=torch.bool).dtype == torch.bool


def test_padding_goes_to_the_side_asked_for_and_never_cuts():
    x = torch.tensor([[1, 2], [3, 4]])
    assert F.pad_sequence_to_length(x, 4, 9).tolist() == [[1, 2, 9, 9], [3, 4, 9, 9]]
    assert F.pad_sequence_to_length(x, 3, 9, left_pad=True).tolist() == [[9, 1, 2], [9, 3, 4]]
    assert torch.equal(F.pad_sequence_to_length(x, 1, 9), x)


def test_lists_of_unequal_length_become_a_tensor():
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, max_length=1).shape == (2, 2)
    assert F.pad_2d_list_to_length([[0.5], []], -1.0).tolist() == [[0.5], [-1.0]]


@pytest.mark.parametrize(("truncation", "expected"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_long_rows_are_cut_as_asked(truncation, expected):
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    got, mask = F.postprocess_data(ids, ids * 10, 3, 0, truncation=truncation)
    assert got.tolist() == [expected] and mask.tolist() == [[10 * i for i in expected]]


def test_short_rows_are_padded_on_the_left_with_a_masked_pad_token():
    ids = torch.tensor([[5, 6]])
    got, mask = F.postprocess_data(ids, torch.ones_like(ids), 4, pad_token_id=9)
    assert got.tolist() == [[9, 9, 5, 6]] and mask.tolist() == [[0, 0, 1, 1]]
    assert F.postprocess_data(ids, ids, 4, 9, left_pad=False)[0].tolist() == [[5, 6, 9, 9]]
    assert F.remove_pad_token(got, mask) == [[5, 6]]


def test_long_rows_are_an_error_by_default_and_unknown_truncation_too():
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="5 tokens is longer than max_length=3.*filter_overlong_prompts"):
        F.postprocess_data(ids, ids, 3, 0)
    with pytest.raises(ValueError, match="truncation=center is not known"):
        F.postprocess_data(ids, ids, 3, 0, truncation="center")


def test_batches_are_cut_evenly_or_refused():
    tensors = {"x": torch.arange(6)}
    for kind in (tensors, TensorDict(tensors, batch_size=6)):
        assert [part["x"].tolist() for part in F.split_dict_tensor_into_batches(kind, 3)] == [[0, 1, 2], [3, 4, 5]]
        with pytest.raises(ValueError, match="6 rows do not divide into batches of 4"):
            F.split_dict_tensor_into_batches(kind, 4)


def test_unpad_data_points_at_the_real_tokens():
    indices, offsets, longest = F.get_unpad_data(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    assert indices.tolist() == [1, 2, 3] and offsets.tolist() == [0, 2, 3] and longest == 2
    assert offsets.dtype == torch.int32


def rates(build, steps):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    schedule = build(optimizer)
    seen = []
    for _ in range(steps):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


def test_constant_schedule_rises_from_zero_and_stays():
    assert rates(lambda o: F.get_constant_schedule_with_warmup(o, 4), 7) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert rates(lambda o: F.get_constant_schedule_with_warmup(o, 0), 2) == [2.0, 2.0]


def test_cosine_schedule_falls_to_its_floor():
    seen = rates(lambda o: F.get_cosine_schedule_with_warmup(o, 2, 10, min_lr_ratio=0.1), 13)
    assert seen[:3] == pytest.approx([0.0, 1.0, 2.0])
    assert seen[6] == pytest.approx(2 * 0.55) and seen[10] == pytest.approx(0.2)
    assert seen[2:11] == sorted(seen[2:11], reverse=True)
    two_waves = rates(lambda o: F.get_cosine_schedule_with_warmup(o, 0, 8, num_cycles=1.0), 9)
    assert two_waves[4] == pytest.approx(0.0) and two_waves[8] == pytest.approx(2.0)
    with pytest.raises(ValueError, match="min_lr_ratio=1.5 must lie in"):
        rates(lambda o: F.get_cosine_schedule_with_warmup(o, 2, 10, min_lr_ratio=1.5), 1)


def test_grad_norm_is_the_square_over_all_parameters():
    model = torch.nn.Linear(2, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert F.compute_grad_norm(model) == 25.0
