"""What else a row may say of its prompt, and what is kept of the work on it."""

import json
import logging

import pytest

from tests.data.files import prompt_row, write, write_numbered
from verl.data import tokenization as token_ids
from verl.data.loader import build_dataset
from verl.data.rl_dataset import DataError, RLHFDataset
from verl.data.tokenization import AllPrompts
from verl.utils.tiny_model import make_tokenizer

CONFIG = {"max_prompt_length": 64}
TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("cell", [TALK, json.dumps(TALK)])
def test_messages_may_be_a_list_or_its_json(tmp_path, tokenizer, cell):
    path = write(tmp_path / "a.parquet", [prompt_row("", prompt=TALK), prompt_row("unread")])
    expected = RLHFDataset(path, tokenizer, CONFIG)[0]["raw_prompt_ids"]
    path = write(tmp_path / "b.parquet", [{"talk": cell, "prompt": 5}])
    dataset = RLHFDataset(path, tokenizer, CONFIG | {"messages_key": "talk", "return_raw_chat": True})
    assert dataset[0]["raw_prompt_ids"] == expected and dataset[0]["raw_prompt"] == TALK


def test_text_where_messages_should_be_is_refused(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [{"talk": "hello"}])
    with pytest.raises(
        DataError, match=r"row 0: 'talk' \(data.messages_key\) is text that is not the JSON of messages"
    ):
        RLHFDataset(path, tokenizer, CONFIG | {"messages_key": "talk"})


def test_raw_input_ids_are_what_is_said_without_the_template(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("", prompt=TALK)])
    item = RLHFDataset(path, tokenizer, CONFIG | {"return_raw_input_ids": True})[0]
    assert tokenizer.decode(item["raw_input_ids"]) == "be kind\nhi"


def test_prompt_ids_are_handed_on_and_measured(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("a", id="p-1"), prompt_row("b", id="p-22")])
    config = CONFIG | {"prompt_id_key": "id", "max_prompt_id_length": 4}
    item = RLHFDataset(path, tokenizer, config)[1]
    assert item["prompt_id"] == "p-22" and tokenizer.decode(item["prompt_id_ids"]) == "p-22"
    with pytest.raises(DataError, match="row 1: 'id' has 4 tokens, more than data.max_prompt_id_length=3"):
        RLHFDataset(path, tokenizer, config | {"max_prompt_id_length": 3})


def test_template_arguments_reach_the_template(tmp_path):
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template += "{% if thinking %}<think>{% endif %}"
    path = write_numbered(tmp_path / "a.parquet", 1)
    config = CONFIG | {"apply_chat_template_kwargs": {"thinking": True}}
    assert tokenizer.decode(RLHFDataset(path, tokenizer, config)[0]["raw_prompt_ids"]).endswith("<think>")


def indices(dataset) -> list[int]:
    return [dataset[item]["index"] for item in range(len(dataset))]


def test_a_cap_takes_the_first_rows_or_a_draw_of_the_seed(tmp_path, tokenizer):
    path = write_numbered(tmp_path / "a.parquet", 20)
    first = build_dataset(CONFIG | {"train_max_samples": 5, "shuffle": False}, path, tokenizer)
    assert indices(first) == [0, 1, 2, 3, 4]
    config = CONFIG | {"val_max_samples": 5, "shuffle": True, "seed": 1}
    chosen = indices(build_dataset(config, path, tokenizer, is_train=False))
    assert len(set(chosen)) == 5 and chosen == indices(build_dataset(config, path, tokenizer, is_train=False))
    assert chosen != indices(build_dataset(config | {"seed": 2}, path, tokenizer, is_train=False))
    assert len(build_dataset(config, path, tokenizer, is_train=True)) == 20
    assert len(build_dataset(config | {"val_max_samples": 99}, path, tokenizer, is_train=False)) == 20


@pytest.fixture
def kept(monkeypatch):
    """Token ids of two prompts and more are kept, and how often prompts were tokenized is counted."""
    monkeypatch.setattr("verl.data.rl_dataset.CACHED_FROM", 2)
    calls = []
    tokenize = AllPrompts._tokenize_block
    monkeypatch.setattr(AllPrompts, "_tokenize_block", lambda self, block: calls.append(block) or tokenize(self, block))
    return calls


def test_token_ids_are_kept_and_found_again_until_something_they_depend_on_changes(tmp_path, kept):
    tokenizer = make_tokenizer("byte")
    config = CONFIG | {"filter_overlong_prompts": True, "cache_dir": str(tmp_path / "cache")}
    path = write(tmp_path / "a.parquet", [prompt_row("x" * (1 + 9 * i), i) for i in range(6)])

    def tokenized(path=path, **changes) -> bool:
        kept.clear()
        dataset = RLHFDataset(path, tokenizer, config | changes)
        fresh = RLHFDataset(path, tokenizer, config | changes | {"cache_dir": str(tmp_path / "none")})
        assert [row["raw_prompt_ids"] for row in dataset] == [row["raw_prompt_ids"] for row in fresh]
        return len(kept) > 1

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    RLHFDataset.__iter__ = __iter__
    try:
        assert tokenized() and not tokenized()
        assert not tokenized(max_prompt_length=50)  # a limit is no part of it
        assert tokenized(apply_chat_template_kwargs={"thinking": True})
        assert tokenized(write(tmp_path / "a.parquet", [prompt_row("other", i) for i in range(6)]))
        tokenizer.chat_template += "{# #}."
        assert tokenized() and not tokenized()
    finally:
        del RLHFDataset.__iter__


def test_token_ids_are_not_kept_where_they_could_not_be_known_again(tmp_path, kept, caplog):
    config = CONFIG | {"filter_overlong_prompts": True, "cache_dir": str(tmp_path / "cache")}
    path = write_numbered(tmp_path / "a.parquet", 4)
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template += "{{ strftime_now('%d') }}"
    RLHFDataset(path, tokenizer, config)

    class Own(RLHFDataset):
        def _build_messages(self, example):
            return [{"role": "user", "content": "mine"}]

    Own(path, make_tokenizer("byte"), config)
    assert not (tmp_path / "cache").exists()
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(RLHFDataset(path, make_tokenizer("byte"), config | {"cache_dir": str(tmp_path / "file")})) == 4
    assert "Token ids are not cached in data.cache_dir=" in caplog.text


def test_kept_lists_are_those_that_were_written(tmp_path):
    lists = [[1, 2], [], [3], [2**30]]
    parts = [token_ids.TokenIds.of(lists[:2]), token_ids.TokenIds.of(lists[2:])]
    for _ in range(2):  # written, then found
        kept = token_ids.TokenIds.cached(iter(parts), str(tmp_path / "tokens"))
        assert [kept[i] for i in range(4)] == lists
        chosen = kept.select([3, 0])
        assert [chosen[0], chosen[1]] == [[2**30], [1, 2]] and chosen.lengths.tolist() == [1, 2]
