import itertools
from collections import Counter

import pytest
import torch

from tests.data.files import prompt_row, write
from verl.data.loader import MixtureSampler, build_sampler, build_train_loader
from verl.data.rl_dataset import DataError, RLHFDataset

SIZES = {"math": 12, "code": 5, "chat": 7}
CONFIG = {
    "max_prompt_length": 64,
    "train_batch_size": 4,
    "dataloader_num_workers": 0,
    "seed": 3,
    "mixture": {"math": 0.5, "code": 0.25, "chat": 0.25},
}


@pytest.fixture
def dataset(tmp_path, tokenizer):
    sources = [name for name, count in SIZES.items() for _ in range(count)]
    rows = [prompt_row(f"prompt {i}", i, data_source=source) for i, source in enumerate(sources)]
    return RLHFDataset(write(tmp_path / "a.parquet", rows), tokenizer, CONFIG)


def rows_of(loader, batches: int) -> list[tuple[str, int]]:
    """(source, row) of the prompts of the next batches, over the ends of epochs."""
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    taken = itertools.islice(epochs, batches)
    return [(s, i) for batch in taken for s, i in zip(batch["data_source"], batch["index"], strict=True)]


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"a": 0.61, "b": 0.29, "c": 0.1}, {"a": 1 / 3, "b": 2 / 3}])
def test_every_beginning_has_its_shares_to_within_one_prompt(shares):
    sampler = MixtureSampler({name: range(40) for name in shares}, shares, seed=None)
    rows = {name: 0 for name in shares}
    for _ in range(3):
        before = dict(zip(sampler.names, sampler.taken, strict=True))
        list(sampler)
        after = dict(zip(sampler.names, sampler.taken, strict=True))
        rows = {name: rows[name] + after[name] - before[name] for name in shares}
        total = sum(rows.values())
        assert all(abs(rows[name] - share * total) <= 1 for name, share in shares.items())


def test_batches_hold_the_shares_and_a_source_comes_up_whole_before_it_repeats(dataset):
    seen = rows_of(build_train_loader(CONFIG, dataset), 24)
    for start in range(0, len(seen), 4):
        assert Counter(source for source, _ in seen[start : start + 4]) == {"math": 2, "code": 1, "chat": 1}
    for source, size in SIZES.items():
        rows = [row for name, row in seen if name == source]
        turns = [rows[start : start + size] for start in range(0, len(rows) - size + 1, size)]
        assert len(turns) > 1 and all(len(set(turn)) == size for turn in turns) and turns[0] != turns[1]


@pytest.mark.parametrize("given", range(0, 16, 3))
def test_a_resumed_mixture_continues_as_if_never_stopped(dataset, given, tmp_path):
    whole = rows_of(build_train_loader(CONFIG, dataset), 16)
    loader = build_train_loader(CONFIG, dataset)
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for _ in range(given):
        next(epochs)
    torch.save(loader.state_dict(), tmp_path / "data.pt")
    resumed = build_train_loader(CONFIG, dataset)
    resumed.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    assert rows_of(resumed, 16 - given) == whole[4 * given :]


def test_shares_may_change_on_resume_and_sources_may_not(dataset):
    loader = build_train_loader(CONFIG, dataset)
    rows_of(loader, 6)
    other = CONFIG | {"mixture": {"math": 0.0, "code": 0.5, "chat": 0.5}}
    with pytest.raises(ValueError, match="had the sources chat, code, math and this one has chat, code"):
        build_sampler(other, dataset).load_state_dict(loader.state_dict()["sampler"])
    shifted = build_train_loader(CONFIG | {"mixture": {"math": 0.25, "code": 0.5, "chat": 0.25}}, dataset)
    shifted.load_state_dict(loader.state_dict())
    assert Counter(source for source, _ in rows_of(shifted, 4))["code"] in (7, 8, 9)


def test_without_shuffling_a_source_keeps_the_order_of_its_rows(dataset):
    seen = rows_of(build_train_loader(CONFIG | {"shuffle": False}, dataset), 6)
    assert [row for source, row in seen if source == "math"] == list(range(12))


def test_a_source_of_no_share_is_left_out_and_one_not_listed_is_refused(dataset):
    config = CONFIG | {"mixture": {"math": 0.5, "code": 0.5, "chat": 0}}
    sampler = build_sampler(config, dataset)
    assert len(sampler) == 17 and all(dataset[row]["data_source"] != "chat" for row in sampler)
    with pytest.raises(DataError, match="does not list 'chat', .* of 7 rows"):
        build_sampler(CONFIG | {"mixture": {"math": 0.5, "code": 0.5}}, dataset)
    with pytest.raises(DataError, match="gives a share to 'maths', and no row.*'math', 'code', 'chat'"):
        build_sampler(CONFIG | {"mixture": {"maths": 1}}, dataset)


def test_a_share_may_be_of_a_pattern(tmp_path, tokenizer):
    sources = ["math/a", "math/b", "math/b", "code/x"] * 4
    rows = [prompt_row(f"prompt {i}", i, data_source=source) for i, source in enumerate(sources)]
    config = CONFIG | {"mixture": {"math/*": 0.25, "code/x": 0.75}, "train_batch_size": 8}
    dataset = RLHFDataset(write(tmp_path / "a.parquet", rows), tokenizer, config)
    counts = Counter(source for source, _ in rows_of(build_train_loader(config, dataset), 2))
    assert counts["code/x"] == 12 and counts["math/a"] + counts["math/b"] == 4
