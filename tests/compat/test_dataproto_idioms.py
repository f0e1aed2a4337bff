"""What user code does with a batch, line for line as in recipes and reward managers written for verl."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import DataProtoItem, pad_dataproto_to_divisor, unpad_dataproto

PROMPT, RESPONSE = 3, 4


@pytest.fixture(params=["padded", "packed"])
def data(request) -> DataProto:
    """Four rows: prompts of 1, 2, 3, 1 tokens, responses of 4, 1, 2, 3; packed as after a rollout, or padded."""
    prompts = torch.tensor([[0, 0, 11], [0, 12, 13], [14, 15, 16], [0, 0, 17]])
    responses = torch.tensor([[21, 22, 23, 24], [25, 0, 0, 0], [26, 27, 0, 0], [28, 29, 30, 0]])
    input_ids = torch.cat([prompts, responses], 1)
    mask = (input_ids != 0).long()
    batch = DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "input_ids": input_ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        },
        non_tensors={
            "uid": np.array(["a", "a", "b", "b"], dtype=object),
            "reward_model": [{"style": "rule", "ground_truth": str(i)} for i in range(4)],
            "data_source": ["math"] * 4,
            "extra_info": [{"index": i} for i in range(4)],
        },
        meta_info={"temperature": 0.7},
    )
    return batch.packed() if request.param == "packed" else batch


def test_rows_as_reward_managers_read_them(data):
    for i in range(len(data)):
        data_item = data[i]
        assert isinstance(data_item, DataProtoItem)
        prompt_ids = data_item.batch["prompts"]
        prompt_length = prompt_ids.shape[-1]
        valid_prompt_length = data_item.batch["attention_mask"][:prompt_length].sum()
        valid_prompt_ids = prompt_ids[-valid_prompt_length:]
        valid_response_length = data_item.batch["attention_mask"][prompt_length:].sum()
        valid_response_ids = data_item.batch["responses"][:valid_response_length]
        assert valid_prompt_ids.tolist() == [t for t in data.batch["prompts"][i].tolist() if t]
        assert valid_response_ids.tolist() == [t for t in data.batch["responses"][i].tolist() if t]
        assert data_item.non_tensor_batch["reward_model"]["ground_truth"] == str(i)
        assert data_item.non_tensor_batch.get("extra_info", {}).get("index") == i
        assert "rm_scores" not in data.batch.keys()


def test_a_reward_tensor_is_filled_in_place(data):
    reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
    lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(dim=-1)
    for i in range(len(data)):
        reward_tensor[i, lengths[i].item() - 1] = i + 1
    data.batch["token_level_scores"] = reward_tensor
    assert data.batch["token_level_scores"].sum(-1).tolist() == [1, 2, 3, 4]
    assert data.ragged("token_level_scores").values.sum() == 10


def test_columns_are_changed_through_batch(data):
    data.batch["response_mask"] = data.batch["attention_mask"][:, -RESPONSE:]
    data.batch["values"] = torch.zeros(4, RESPONSE)
    data.batch["values"][0] += 1
    data.batch["values"] = data.batch["values"] * data.batch["response_mask"]
    assert data.batch["values"].sum() == 4
    popped = data.batch.pop("values")
    assert popped.shape == (4, RESPONSE) and "values" not in data.batch
    assert len(data.batch) == 4 and data.batch.batch_size[0] == 4
    assert isinstance(data.batch, TensorDict) and data.batch["input_ids"].size(1) == PROMPT + RESPONSE
    data.non_tensor_batch["acc"] = np.array([1.0, 0.0, 0.5, 1.0])
    data.non_tensor_batch.update({"pred": np.array(list("wxyz"))})
    assert data[2:].non_tensor_batch["pred"].tolist() == ["y", "z"]


def test_prompts_are_popped_repeated_and_united_with_responses(data):
    prompts = data.select(batch_keys=["input_ids", "attention_mask", "position_ids"], deepcopy=True)
    gen_batch = prompts.pop(
        batch_keys=["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=["data_source"]
    )
    assert set(gen_batch.batch.keys()) == {"input_ids", "attention_mask", "position_ids"}
    assert list(gen_batch.non_tensor_batch) == ["data_source"] and "data_source" not in prompts.non_tensor_batch
    gen_batch = gen_batch.repeat(repeat_times=2, interleave=True)
    prompts = prompts.repeat(repeat_times=2, interleave=True)
    assert prompts.non_tensor_batch["uid"].tolist() == list("aaaabbbb")
    united = prompts.union(gen_batch)
    assert united.batch["input_ids"][0].equal(united.batch["input_ids"][1]) and len(united) == 8
    blocks = data.repeat(2, interleave=False)
    assert blocks.non_tensor_batch["uid"].tolist() == list("aabbaabb")


def test_rows_are_reordered_chunked_joined_and_padded(data):
    before = data.batch["responses"].clone()
    data.reorder(torch.tensor([2, 0, 3, 1]))
    assert data.batch["responses"].equal(before[[2, 0, 3, 1]])
    parts = data.chunk(2)
    assert [len(part) for part in parts] == [2, 2] and parts[0].meta_info == {"temperature": 0.7}
    assert DataProto.concat(parts).batch["responses"].equal(data.batch["responses"])
    padded, pad_size = pad_dataproto_to_divisor(data, 3)
    assert (len(padded), pad_size) == (6, 2)
    assert unpad_dataproto(padded, pad_size=pad_size).batch["responses"].equal(data.batch["responses"])
    kept = np.array([row == "a" for row in data.non_tensor_batch["uid"]])
    assert data[kept].non_tensor_batch["uid"].tolist() == ["a", "a"]
    assert data[torch.tensor([True, False, False, True])].batch["responses"].equal(data.batch["responses"][[0, 3]])
    with pytest.raises(AssertionError):
        data.chunk(3)


def test_mini_batches_and_micro_batches(data):
    seen = []
    for mini in data.make_iterator(mini_batch_size=2, epochs=2, seed=1, dataloader_kwargs={"shuffle": True}):
        assert mini.meta_info["temperature"] == 0.7
        for micro in mini.split(1):
            seen += micro.non_tensor_batch["reward_model"].tolist()
            model_inputs = {**micro.batch, **micro.non_tensor_batch}
            assert model_inputs["responses"].shape == (1, RESPONSE)
    assert sorted(row["ground_truth"] for row in seen) == sorted("01230123")
    selected = data.select(batch_keys=["responses", "input_ids", "attention_mask", "position_ids"]).batch
    assert [len(part) for part in selected.split(3)] == [3, 1]


def test_a_copy_is_a_copy(data):
    copied = deepcopy(data)
    copied.batch["responses"][:] = 7
    copied.meta_info["temperature"] = 0.0
    assert data.batch["responses"].max() == 30 and data.meta_info["temperature"] == 0.7
    for name, column in data.batch.items():
        assert column.shape[0] == 4, name
    assert data.to("cpu") is data


def test_a_dataproto_is_a_dataclass_of_three_parts(data):
    again = DataProto(batch=data.batch, non_tensor_batch=data.non_tensor_batch, meta_info=data.meta_info)
    assert len(again) == 4 and again.batch["responses"].equal(data.batch["responses"])
    assert len(DataProto(non_tensor_batch={"uid": np.array(["a"], dtype=object)})) == 1
    only_facts = DataProto(meta_info={"metrics": {"actor/lr": [1e-3]}})
    assert only_facts.batch is None and only_facts.meta_info["metrics"]["actor/lr"] == [1e-3]
