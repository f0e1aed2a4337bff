import numpy as np
import pytest
import torch

from tests.data.files import prompt_row, write, write_numbered
from verl.data.rl_dataset import DataError, RLHFDataset, collate_fn, truncate
from verl.utils.tiny_model import make_tokenizer

CONFIG = {"max_prompt_length": 64}


def rendered(tokenizer, text: str) -> list[int]:
    """Token ids of one user message, by transformers' own path."""
    messages = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_prompt_is_rendered_left_padded_and_positioned(tmp_path, tokenizer):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", [prompt_row("hi")]), tokenizer, CONFIG)
    item, ids = dataset[0], rendered(tokenizer, "hi")
    pad = 64 - len(ids)
    assert item["input_ids"].tolist() == [tokenizer.pad_token_id] * pad + ids
    assert item["attention_mask"].tolist() == [0] * pad + [1] * len(ids)
    assert item["position_ids"].tolist() == [0] * pad + list(range(len(ids)))
    assert {item[name].dtype for name in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert item["raw_prompt_ids"] == ids


def test_all_other_columns_stay_and_the_prompt_is_consumed(tmp_path, tokenizer):
    row = prompt_row("hi", 7, note="kept", images=None)
    row["extra_info"] |= {"tools_kwargs": {"calc": {"create_kwargs": {"x": "1"}}}, "interaction_kwargs": {"name": "g"}}
    item = RLHFDataset(write(tmp_path / "a.parquet", [row]), tokenizer, CONFIG)[0]
    assert item["note"] == "kept" and item["data_source"] == "digits" and item["index"] == 7
    assert item["reward_model"] == {"style": "rule", "ground_truth": "5"}
    assert item["tools_kwargs"] == {"calc": {"create_kwargs": {"x": "1"}}} and item["interaction_kwargs"] == {
        "name": "g"
    }
    assert not {"prompt", "images", "videos", "raw_prompt", "full_prompts"} & item.keys()


def test_raw_prompt_and_full_prompt_come_on_request(tmp_path, tokenizer):
    config = {**CONFIG, "return_raw_chat": True, "return_full_prompt": True}
    item = RLHFDataset(write(tmp_path / "a.parquet", [prompt_row("hi")]), tokenizer, config)[0]
    assert item["raw_prompt"] == [{"role": "user", "content": "hi"}]
    assert item["full_prompts"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_plain_string_is_a_user_message(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("", prompt="hi")])
    config = {**CONFIG, "return_raw_chat": True}
    item = RLHFDataset(path, tokenizer, config)[0]
    assert item["raw_prompt_ids"] == rendered(tokenizer, "hi")
    assert item["raw_prompt"] == [{"role": "user", "content": "hi"}]


def test_without_a_chat_template_strings_are_taken_as_they_are_and_chats_are_refused(tmp_path):
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = None
    text = RLHFDataset(write(tmp_path / "a.parquet", [prompt_row("", prompt="hi")]), tokenizer, CONFIG)
    assert text[0]["raw_prompt_ids"] == tokenizer("hi")["input_ids"]
    chat = RLHFDataset(write(tmp_path / "b.parquet", [prompt_row("hi")]), tokenizer, CONFIG)
    with pytest.raises(DataError, match="no chat template"):
        chat[0]


def test_lists_home_and_relative_paths_name_files(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_numbered(tmp_path / "a.parquet", 3)
    write_numbered(tmp_path / "b.parquet", 2, start=3)
    dataset = RLHFDataset(["~/a.parquet", "b.parquet"], tokenizer, CONFIG)
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("side, expected", [("left", [3, 4, 5, 6]), ("right", [0, 1, 2, 3]), ("middle", [0, 1, 5, 6])])
def test_truncation_keeps_the_side_it_says(side, expected):
    assert truncate(list(range(7)), 4, side) == expected
    assert truncate([1, 2], 4, side) == [1, 2]


def test_truncation_in_the_middle_gives_the_odd_token_to_the_end():
    assert truncate(list(range(7)), 3, "middle") == [0, 5, 6]


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncated_prompt_and_its_raw_ids_agree(tmp_path, tokenizer, side):
    config = {"max_prompt_length": 40, "truncation": side}
    item = RLHFDataset(write(tmp_path / "a.parquet", [prompt_row("x" * 50)]), tokenizer, config)[0]
    assert item["input_ids"].tolist() == item["raw_prompt_ids"] == truncate(rendered(tokenizer, "x" * 50), 40, side)


def test_an_overlong_prompt_is_an_error_that_names_file_row_lengths_and_ways_out(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("ok"), prompt_row("x" * 50)])
    dataset = RLHFDataset(path, tokenizer, CONFIG)
    dataset[0]
    with pytest.raises(DataError) as error:
        dataset[1]
    length = len(rendered(tokenizer, "x" * 50))
    for part in (
        f"{path}, row 1",
        str(length),
        "data.max_prompt_length=64",
        "filter_overlong_prompts",
        "data.truncation",
    ):
        assert part in str(error.value)
    assert dataset.find_overlong() == [(f"{path}, row 1", length)]


def test_unknown_truncation_is_refused_at_once(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="data.truncation='start'.*'error', 'left', 'right' or 'middle'"):
        RLHFDataset(write_numbered(tmp_path / "a.parquet", 1), tokenizer, {**CONFIG, "truncation": "start"})


@pytest.mark.parametrize("workers", [1, 2])
def test_overlong_filter_keeps_exactly_the_rows_that_fit(tmp_path, tokenizer, monkeypatch, workers):
    monkeypatch.setattr("verl.data.tokenization._BLOCK", 4)
    texts = ["x" * (1 + i * 7 % 50) for i in range(15)]
    path = write(tmp_path / "a.parquet", [prompt_row(text, i) for i, text in enumerate(texts)])
    config = {**CONFIG, "filter_overlong_prompts": True, "filter_overlong_prompts_workers": workers}
    dataset = RLHFDataset(path, tokenizer, config)
    fits = [i for i, text in enumerate(texts) if len(rendered(tokenizer, text)) <= 64]
    assert 0 < len(fits) < 15
    assert [dataset[i]["index"] for i in range(len(dataset))] == fits
    assert [dataset[i]["raw_prompt_ids"] for i in range(len(dataset))] == [rendered(tokenizer, texts[i]) for i in fits]


def test_a_tokenizer_with_ways_of_its_own_is_asked_for_every_prompt(tmp_path):
    class Shouting(type(make_tokenizer("byte"))):
        def __call__(self, texts, **kwargs):
            return super().__call__([text.upper() for text in texts], **kwargs)

    tokenizer = make_tokenizer("byte")
    tokenizer.__class__ = Shouting
    dataset = RLHFDataset(
        write_numbered(tmp_path / "a.parquet", 2), tokenizer, {**CONFIG, "filter_overlong_prompts": True}
    )
    assert "PROMPT 1" in tokenizer.decode(dataset[1]["raw_prompt_ids"])


def test_filter_that_leaves_nothing_says_so(tmp_path, tokenizer):
    config = {"max_prompt_length": 5, "filter_overlong_prompts": True}
    with pytest.raises(DataError, match="leaves none of 3 prompts.*max_prompt_length=5"):
        RLHFDataset(write_numbered(tmp_path / "a.parquet", 3), tokenizer, config)


def test_missing_prompt_column_lists_what_is_there(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [{"question": "x", "answer": "y"}])
    with pytest.raises(DataError, match=r"no column 'prompt' \(data.prompt_key\); its columns are question, answer"):
        RLHFDataset(path, tokenizer, CONFIG)


@pytest.mark.parametrize("bad", [None, [], [{"role": "user", "content": None}], [{"role": None, "content": "x"}]])
def test_a_bad_prompt_is_reported_with_file_and_row_before_training(tmp_path, tokenizer, bad):
    path = write(tmp_path / "a.parquet", [prompt_row("fine"), prompt_row("", prompt=bad), prompt_row("fine")])
    with pytest.raises(DataError, match=r"1 of 3 rows cannot be used \(.*a.parquet, row 1: 'prompt'"):
        RLHFDataset(path, tokenizer, CONFIG)


def test_messages_of_another_shape_are_refused_with_their_fields(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("", prompt=[{"from": "human", "value": "x"}])])
    with pytest.raises(DataError, match="no role and no content; their fields are from, value"):
        RLHFDataset(path, tokenizer, CONFIG)


def test_a_chat_template_that_refuses_a_conversation_is_reported_with_its_row(tmp_path):
    tokenizer = make_tokenizer("byte")
    tokenizer.chat_template = "{{ raise_exception('system role not supported') }}"
    dataset = RLHFDataset(write_numbered(tmp_path / "a.parquet", 1), tokenizer, CONFIG)
    with pytest.raises(DataError, match="a.parquet, row 0.*roles user: system role not supported"):
        dataset[0]


def test_videos_are_refused_by_name_and_images_without_a_processor(tmp_path, tokenizer):
    for key, error, text in (
        ("videos", NotImplementedError, "does not support videos"),
        ("images", DataError, "no image"),
    ):
        rows = [prompt_row("x", **{key: [{"path": "a.png"}] if i else []}) for i in range(2)]
        with pytest.raises(error, match=rf"a.parquet, row 1 has '{key}'.*{text}"):
            RLHFDataset(write(tmp_path / "a.parquet", rows), tokenizer, CONFIG)


def test_collate_stacks_tensors_and_keeps_objects_apart():
    rows = [{"t": torch.tensor([1, 2]), "ids": [1, 2], "info": {"a": 1}}, {"t": torch.tensor([3, 4]), "ids": [3, 4]}]
    batch = collate_fn(rows)
    assert batch["t"].tolist() == [[1, 2], [3, 4]]
    assert batch["ids"].shape == (2,) and batch["ids"].dtype == object and batch["ids"][1] == [3, 4]
    assert isinstance(batch["info"], np.ndarray) and batch["info"].tolist() == [{"a": 1}, None]


def test_a_subclass_may_build_its_own_messages(tmp_path, tokenizer):
    class Questions(RLHFDataset):
        def _build_messages(self, example):
            return [{"role": "user", "content": f"Q: {example['question']}"}]

    path = write(tmp_path / "a.parquet", [{"question": "why?"}, {"question": "x" * 60}])
    dataset = Questions(path, tokenizer, {**CONFIG, "filter_overlong_prompts": True})
    assert len(dataset) == 1 and dataset[0]["raw_prompt_ids"] == rendered(tokenizer, "Q: why?")


def test_a_subclass_may_replace_the_rows(tmp_path, tokenizer):
    class Doubled(RLHFDataset):
        def _read_files_and_tokenize(self):
            super()._read_files_and_tokenize()
            self.dataframe = [row for row in self.dataframe for _ in range(2)]

    dataset = Doubled(write_numbered(tmp_path / "a.parquet", 2), tokenizer, CONFIG)
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 0, 1, 1]
