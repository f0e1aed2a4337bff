"""Rows of files as preference pairs: both layouts, truncation of both sides, and a batch of the engines."""

import json

import pytest
import torch

from tests.support.tiny_models import make_tokenizer
from verl.data.preference_dataset import PreferenceDataset, pairs_to_batch
from verl.data.table import DataError

TEXTS = [{"prompt": f"q{i}", "chosen": "yes" * (i + 1), "rejected": "no"} for i in range(3)]


def turn(role, content):
    return {"role": role, "content": content}


CHAT = [turn("user", "q0"), turn("assistant", "well"), turn("user", "and?")]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("byte")


@pytest.fixture
def read(tmp_path, tokenizer):
    def read(rows, scores=False, **config):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return PreferenceDataset(str(path), tokenizer, {"num_workers": 1, **config}, scores=scores)

    return read


def learned(tokenizer, side):
    return tokenizer.decode(side["input_ids"][side["loss_mask"].bool()])


def test_the_layouts_of_the_field_are_the_same_tokens(read, tokenizer):
    whole = {
        "prompt": "not read",
        "chosen": [*CHAT, turn("assistant", "yes")],
        "rejected": [*CHAT, turn("assistant", "no")],
    }
    follows = {"prompt": CHAT, "chosen": [turn("assistant", "yes")], "rejected": [turn("assistant", "no")]}
    texts = {"prompt": CHAT, "chosen": "yes", "rejected": "no"}
    pairs = [read([row])[0] for row in (whole, follows, texts)]
    for side, text in (("chosen", "yes"), ("rejected", "no")):
        # the earlier answer is part of the prompt
        assert {learned(tokenizer, pair[side]) for pair in pairs} == {text + tokenizer.eos_token}
        prompts = [
            tokenizer.decode(pair[side]["input_ids"][~pair[side]["loss_mask"].bool()]).rstrip() for pair in pairs
        ]
        assert len(set(prompts)) == 1 and "well" in prompts[0]


def test_other_names_of_columns_and_several_turns_after_the_difference(read, tokenizer):
    ends = [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")]
    row = {"good": [*CHAT, *ends], "bad": [*CHAT, turn("assistant", "d")]}
    pair = read([row], chosen_key="good", rejected_key="bad")[0]
    eos = tokenizer.eos_token
    assert learned(tokenizer, pair["chosen"]) == f"a{eos}c{eos}" and learned(tokenizer, pair["rejected"]) == f"d{eos}"
    with pytest.raises(DataError, match="no column 'chosen'.*data.chosen_key"):
        read([row])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a", "rejected": "b"}, "there is no prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are the same: there is nothing to prefer"),
        ({"prompt": "q", "chosen": " ", "rejected": "a"}, "'chosen' is empty"),
        ({"prompt": "q", "chosen": "a", "rejected": None}, "are of different kinds"),
        ({"chosen": CHAT, "rejected": CHAT}, "does not end with a turn of the assistant"),
        ({"chosen": [turn("assistant", "a")], "rejected": [turn("assistant", "b")]}, "begins with the assistant"),
        ({"chosen": [turn("user", "x"), *CHAT[1:2]], "rejected": [turn("user", "y"), *CHAT[1:2]]}, "begin differently"),
    ],
)  # fmt: skip
def test_a_pair_that_cannot_be_used_is_named_and_may_be_left_out(read, row, reason):
    kept = {"prompt": "q", "chosen": "x", "rejected": "y"} if isinstance(row["chosen"], str) else {
        "chosen": [*CHAT, turn("assistant", "x")], "rejected": [*CHAT, turn("assistant", "y")]
    }  # fmt: skip
    with pytest.raises(DataError, match=f"row 1.*{reason}"):
        read([kept, row])
    assert len(read([kept, row, kept], bad_rows="skip")) == 2


def test_truncation_leaves_out_or_cuts_both_sides(read, tokenizer, caplog):
    lengths = [len(pair["chosen"]["input_ids"]) for pair in read(TEXTS)]
    limit = lengths[1]
    with pytest.raises(DataError, match=r"1 of 3 pairs .* row 2 has .*data.truncation=drop"):
        read(TEXTS, max_length=limit)
    assert len(read(TEXTS, max_length=limit, truncation="drop")) == 2 and "1 of 3 pairs are longer" in caplog.text
    left, whole = read(TEXTS, max_length=limit, truncation="left")[2], read(TEXTS)[2]
    cut = lengths[2] - limit
    for side in ("chosen", "rejected"):  # the same beginning is gone from both
        assert torch.equal(left[side]["input_ids"], whole[side]["input_ids"][cut:])
        assert learned(tokenizer, left[side]) == learned(tokenizer, whole[side])
    right = read(TEXTS, max_length=limit, truncation="right")[2]
    assert torch.equal(right["chosen"]["input_ids"], whole["chosen"]["input_ids"][:limit])
    with pytest.raises(DataError, match="all 3 pairs are without"):
        read(TEXTS, max_length=4, truncation="right")


def test_a_score_is_read_at_the_last_token_of_the_conversation_and_margins_are_numbers(read, tokenizer):
    rows = [{**row, "margin": i / 2} for i, row in enumerate(TEXTS)]
    found = read(rows, scores=True)
    chat = [turn("user", "q1"), turn("assistant", "yesyes")]
    side = found[1]["chosen"]
    assert tokenizer.decode(side["input_ids"]) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert side["loss_mask"].tolist() == [0] * (len(side["input_ids"]) - 1) + [1] and found[1]["margin"] == 0.5
    whole = {"chosen": chat, "rejected": [chat[0], turn("assistant", "no")], "margin": 0.5}
    assert torch.equal(read([whole], scores=True)[0]["chosen"]["input_ids"], side["input_ids"])
    with pytest.raises(DataError, match="row 1.*'margin'.* is None; a margin is a number"):
        read([rows[0], {**rows[1], "margin": None}], scores=True)
    assert read([rows[0], {**rows[1], "margin": None}, rows[2]], scores=True, bad_rows="skip").margins.tolist() == [
        0,
        1,
    ]


def test_a_batch_has_the_chosen_row_before_the_rejected_one(read):
    items = [{**pair, "margin": float(at)} for at, pair in enumerate(read(TEXTS))]
    batch = pairs_to_batch(items)
    assert batch.column("pairs").tolist() == [1, -1, 2, -2, 3, -3]
    assert batch.column("margin").tolist() == [0, 0, 1, 1, 2, 2]
    rows = list(batch.ragged("input_ids").rows())
    assert torch.equal(rows[3], items[1]["rejected"]["input_ids"])
