"""Rows of files as examples for supervised fine-tuning, and as a batch of the engines."""

import json

import pytest
import torch

from tests.support.tiny_models import make_tokenizer
from verl.data.sft_dataset import SFTDataset, build_examples, examples_to_batch
from verl.data.table import DataError

PAIRS = [{"question": f"q{i}", "answer": "a" * (i + 1)} for i in range(4)]
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("byte")


@pytest.fixture
def read(tmp_path, tokenizer):
    def read(rows, **config):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return SFTDataset(str(path), tokenizer, {"num_workers": 1, **config})

    return read


def test_a_pair_is_the_prompt_as_a_policy_meets_it_and_the_response_to_its_end(read, tokenizer):
    item = read(PAIRS)[2]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q2"}], add_generation_prompt=True, tokenize=False
    )
    ids, mask = item["input_ids"], item["loss_mask"].bool()
    assert tokenizer.decode(ids[~mask]) == prompt and tokenizer.decode(ids[mask]) == "aaa" + tokenizer.eos_token


def test_columns_may_hold_mappings(read):
    rows = [{"extra_info": {"q": {"text": "x"}, "a": "y"}}]
    keys = {"prompt_key": "extra_info", "prompt_dict_keys": ["q", "text"]}
    found = read(rows, **keys, response_key="extra_info", response_dict_keys=["a"])
    assert torch.equal(found[0]["input_ids"], read([{"question": "x", "answer": "y"}])[0]["input_ids"])
    with pytest.raises(DataError, match="row 0.*has no 'b'"):
        read(rows, **keys, response_key="extra_info", response_dict_keys=["b"])


def test_conversations_are_found_by_their_column_and_may_be_json(read):
    plain, text = read([{"messages": TURNS}]), read([{"messages": json.dumps(TURNS), "tools": None}])
    assert plain.is_messages and torch.equal(plain[0]["input_ids"], text[0]["input_ids"])
    with pytest.raises(DataError, match="Say which with data.format"):
        read([{"messages": TURNS, **PAIRS[0]}])
    assert not read([{"messages": TURNS, **PAIRS[0]}], format="prompt_response").is_messages
    with pytest.raises(DataError, match="neither a column 'messages'.*the columns are text"):
        read([{"text": "x"}])


def test_rows_that_cannot_be_learned_are_named_and_may_be_left_out(read):
    rows = [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": []}, {"messages": TURNS}]
    with pytest.raises(DataError, match="2 of 4 rows cannot be used.*row 1.*no turn of the assistant"):
        read(rows)
    found = read(rows, bad_rows="skip")
    assert len(found) == 2 and [row.where[-5:] for row in found.dataframe.skipped] == ["row 1", "row 2"]
    picture = [{"role": "user", "content": [{"type": "image"}]}, TURNS[1]]
    with pytest.raises(DataError, match="the model has no image processor"):
        read([{"messages": picture}])


def test_truncation_keeps_the_side_it_is_told(read, tokenizer):
    whole = read(PAIRS)[3]["input_ids"]
    limit = len(whole) - 2
    with pytest.raises(DataError, match=f"row 3 has {len(whole)} tokens.*data.truncation"):
        read(PAIRS, max_length=limit)
    assert torch.equal(read(PAIRS, max_length=limit, truncation="left")[3]["input_ids"], whole[2:])
    assert torch.equal(read(PAIRS, max_length=limit, truncation="right")[3]["input_ids"], whole[:-2])


def test_what_has_nothing_to_learn_after_truncation_is_left_out_and_counted(read, caplog):
    rows = [*PAIRS, {"question": "q" * 60, "answer": "a"}]
    found = read(rows, max_length=len(read(PAIRS)[3]["input_ids"]), truncation="right")
    assert len(found) == 4 and "1 of 5 examples have no token to learn" in caplog.text
    with pytest.raises(DataError, match="none of 1 examples has a token to learn"):
        read(rows[4:], max_length=20, truncation="right")


def test_several_processes_read_the_same(tmp_path, tokenizer):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": str(i), "answer": "x"}) for i in range(2100)))
    one, two = (SFTDataset(str(path), tokenizer, {"num_workers": n}) for n in (1, 2))
    assert len(one) == 2100 and all(torch.equal(one[i]["input_ids"], two[i]["input_ids"]) for i in (0, 999, 2099))


def test_a_batch_marks_learned_tokens_also_between_others(tokenizer):
    items = [
        {"input_ids": torch.arange(8), "loss_mask": torch.tensor([1, 0, 1, 1, 0, 1, 0, 0])},
        {"input_ids": torch.arange(5), "loss_mask": torch.tensor([0, 1, 1, 1, 1])},
    ]
    batch = examples_to_batch(items)
    # the first token is predicted from nothing; what stands behind the last learned one decides nothing
    assert [row.tolist() for row in batch.ragged("input_ids").rows()] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]
    assert [row.tolist() for row in batch.ragged("response_mask").rows()] == [[1, 1, 0, 1], [1, 1, 1, 1]]
    padded = {"input_ids": torch.tensor([9, 0, 1]), "loss_mask": torch.tensor([1, 0, 1]),
              "attention_mask": torch.tensor([0, 1, 1])}  # fmt: skip
    assert examples_to_batch([padded]).ragged("input_ids").rows()[0].tolist() == [0, 1]


def test_a_class_of_the_users_gives_the_examples(tmp_path, tokenizer):
    (tmp_path / "own.py").write_text(
        "import torch\nfrom torch.utils.data import Dataset\n"
        "class Own(Dataset):\n"
        "    def __init__(self, parquet_files, tokenizer, config): self.files = parquet_files\n"
        "    def __len__(self): return 3\n"
        "    def __getitem__(self, i): return {'input_ids': torch.tensor([1, i]), 'loss_mask': torch.tensor([0, 1])}\n"
    )
    found = build_examples({"custom_cls": {"path": str(tmp_path / "own.py"), "name": "Own"}}, "a file", tokenizer)
    assert found.files == "a file" and examples_to_batch([found[2]]).ragged("responses").values.tolist() == [2]
