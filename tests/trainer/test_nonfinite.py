"""NaN and infinity are named with sample and token, and end the step or are left out of it."""

import numpy as np
import pytest
import torch

from tests.support.tiny_models import make_batch
from verl.algorithms.advantages.common import NonFiniteError
from verl.rewards.managers.scoring import compute_reward
from verl.trainer.ppo.nonfinite import NonFiniteGuard


@pytest.fixture
def batch():
    batch = make_batch(rows=4)
    batch.non_tensor_batch["uid"] = np.array([f"step7-{i // 2}" for i in range(4)], dtype=object)
    batch.non_tensor_batch["data_source"] = np.array(["digits"] * 4, dtype=object)
    batch.non_tensor_batch["extra_info"] = np.array([{"index": 10 + i} for i in range(4)], dtype=object)
    return batch


def spoil(batch, name, row, token, value):
    column = batch.ragged(name)
    column.values[int(column.layout.offsets[row]) + token] = value


@pytest.mark.parametrize("name", ["old_log_probs", "ref_log_prob", "values", "advantages"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named_with_sample_and_token(batch, name, value):
    spoil(batch, name, 2, 0, value)
    token, length = int(batch.ragged("responses").rows()[2][0]), int(batch.ragged("responses").layout.lengths[2])
    place = f"uid=step7-1, data_source=digits, index=12. at response token 1 of {length} .id {token} 'x': {value}."
    with pytest.raises(NonFiniteError, match=f"Step 7: {name}, from .*, is not finite in row 2 .{place}"):
        NonFiniteGuard(3, "stop", lambda ids: "x").check_columns(batch, 7)


def test_masked_tokens_and_sums_that_overflow_are_no_fault(batch):
    guard = NonFiniteGuard(3)
    assert guard.check_columns(batch, 7) == {}
    batch.ragged("response_mask").values[:] = 0
    spoil(batch, "old_log_probs", 1, 0, float("nan"))
    assert guard.check_columns(batch, 7) == {}
    batch.ragged("response_mask").values[:] = 1
    batch.ragged("old_log_probs").values[:] = -3e38
    assert guard.check_columns(batch, 7) == {}


def test_skip_leaves_the_rows_out_of_the_loss(batch, capsys):
    spoil(batch, "old_log_probs", 0, 3, float("nan"))
    spoil(batch, "values", 2, 0, float("inf"))
    assert NonFiniteGuard(3, "skip").check_columns(batch, 7) == {"training/nonfinite_rows": 2.0}
    rows = batch.ragged("response_mask").rows()
    assert [bool(row.any()) for row in rows] == [False, True, False, True]
    assert batch.ragged("old_log_probs").values.isfinite().all() and batch.ragged("values").values.isfinite().all()
    assert "2 rows are left out of the update: old_log_probs" in capsys.readouterr().out


def test_rewards_that_are_not_finite_name_the_token_and_the_prompt(batch):
    def manager(data, return_dict=False):
        rewards = torch.zeros(tuple(data.ragged("responses").shape))
        rewards[2, 1] = float("nan")
        return rewards

    with pytest.raises(ValueError, match=r"not finite, in rows \[2\]: the first is nan at response token 2 of row 2"):
        compute_reward(batch, manager)


def test_steps_in_a_row_without_a_finite_gradient_end_the_run():
    guard = NonFiniteGuard(2)
    assert guard.roles_without_gradient({"actor/nonfinite_steps": 0.5, "critic/nonfinite_steps": 0.0}) == ["actor"]
    for step, skipped in enumerate((["actor"], [], ["actor"])):
        guard.check(step, skipped)
    with pytest.raises(FloatingPointError, match="2 steps in a row.*the last is step 4"):
        guard.check(4, ["actor"])
