import numpy as np
import pytest
import torch

from verl import DataProto
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion

PAD = 9


def left_padded(rows, width):
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return DataProto.from_dict(tensors={"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1})


def assembled(log_probs=True):
    prompts = left_padded([[1, 2, 3], [4], [5, 6, 7, 8]], width=4)
    responses = [[11, 9], [12, 13, 14], [15]]
    completions = [Completion(r, [-0.5 * t for t in r] if log_probs else None, "stop") for r in responses]
    return assemble(prompts, completions, prompt_length=4, response_length=3, pad_token_id=PAD)


def test_prompts_stand_left_padded_and_responses_right_padded():
    batch = assembled().batch
    assert batch["prompts"].tolist() == [[PAD, 1, 2, 3], [PAD, PAD, PAD, 4], [5, 6, 7, 8]]
    assert batch["responses"].tolist() == [[11, 9, PAD], [12, 13, 14], [15, PAD, PAD]]
    assert torch.equal(batch["input_ids"], torch.cat([batch["prompts"], batch["responses"]], 1))


def test_a_sampled_pad_token_is_real():
    batch = assembled().batch
    assert batch["response_mask"].tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]


def test_positions_are_zero_on_the_left_and_go_on_on_the_right():
    assert assembled().batch["position_ids"].tolist() == [
        [0, 0, 1, 2, 3, 4, 5],
        [0, 0, 0, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6],
    ]


def test_columns_have_the_promised_types_and_cost_real_tokens_only():
    data = assembled()
    log_probs = data.ragged("rollout_log_probs")
    assert log_probs.values.dtype == torch.float32 and log_probs.padded()[0].tolist() == [-5.5, -4.5, 0.0]
    for name in ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask"):
        assert data.column(name).dtype == torch.int64
    assert data.ragged("input_ids").values.tolist() == [1, 2, 3, 11, 9, 4, 12, 13, 14, 5, 6, 7, 8, 15]
    assert "rollout_log_probs" not in assembled(log_probs=False).keys()


def test_prompts_may_come_as_lists():
    rows = np.empty(2, dtype=object)
    rows[:] = [[1, 2], [3]]
    prompts = DataProto.from_dict(non_tensors={"raw_prompt_ids": rows})
    done = Completion([5], None, "length")
    batch = assemble(prompts, [done, done], prompt_length=3, response_length=2, pad_token_id=0).batch
    assert batch["input_ids"].tolist() == [[0, 1, 2, 5, 0], [0, 0, 3, 5, 0]]


def test_rows_that_do_not_fit_are_refused():
    prompts = left_padded([[1, 2, 3]], width=4)
    done = Completion([1, 2], None, "stop")
    with pytest.raises(ValueError, match="1 prompts but 2 completions"):
        assemble(prompts, [done] * 2, prompt_length=4, response_length=2, pad_token_id=0)
    with pytest.raises(ValueError, match="prompt 0 has 3 tokens.*prompt_length=2"):
        assemble(prompts, [done], prompt_length=2, response_length=2, pad_token_id=0)
    with pytest.raises(ValueError, match="width=1"):
        assemble(prompts, [done], prompt_length=4, response_length=1, pad_token_id=0)
