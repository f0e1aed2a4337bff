import itertools

import pytest
import torch

from tests.data.files import prompt_row, write_numbered
from verl.data.loader import build_dataset, build_train_loader
from verl.data.rl_dataset import DataError
from verl.experimental.dynamic_dataset.dynamicgen_dataset import AbstractDataGenerator

CONFIG = {
    "max_prompt_length": 64,
    "train_batch_size": 2,
    "dataloader_num_workers": 0,
    "seed": 3,
    "datagen": {"path": f"pkg://{__name__}", "name": "Harder"},
}


class Harder(AbstractDataGenerator):
    """One new prompt for every batch; it counts its calls."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = 0

    def generate(self, dataset):
        self.calls += 1
        return [prompt_row(f"harder than {dataset.last_batch}", 100 + self.calls)]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Wrong(Harder):
    def generate(self, dataset):
        return [prompt_row("", 7)]


class Long(Harder):
    def generate(self, dataset):
        return [prompt_row("x" * 99, 7), prompt_row("short", 8)]


@pytest.fixture
def path(tmp_path):
    return write_numbered(tmp_path / "a.parquet", 5)


def train(loader, dataset, steps: int) -> list[list[int]]:
    """Row numbers of the next batches; after each the dataset hears of it."""
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    seen = []
    for batch in itertools.islice(epochs, steps):
        seen.append(batch["index"].tolist())
        dataset.on_batch_end(len(dataset))
    return seen


def test_generated_prompts_are_used_from_the_next_epoch_on(path, tokenizer):
    dataset = build_dataset(CONFIG, path, tokenizer)
    seen = train(build_train_loader(CONFIG, dataset), dataset, 5)
    assert all(row < 100 for row in sum(seen[:2], [])) and any(row > 100 for row in sum(seen[2:], []))
    assert len(dataset) == 10 and dataset[9]["index"] == 105
    assert dataset.dataframe.where(9) == "rows generated after 4 others, row 0"


@pytest.mark.parametrize("given", range(7))
def test_a_resumed_run_sees_the_same_prompts(path, tokenizer, given, tmp_path):
    whole_set = build_dataset(CONFIG, path, tokenizer)
    whole = train(build_train_loader(CONFIG, whole_set), whole_set, 8)
    first = build_dataset(CONFIG, path, tokenizer)
    loader = build_train_loader(CONFIG, first)
    train(loader, first, given)
    torch.save(loader.state_dict(), tmp_path / "data.pt")
    dataset = build_dataset(CONFIG, path, tokenizer)
    resumed = build_train_loader(CONFIG, dataset)
    resumed.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    assert train(resumed, dataset, 8 - given) == whole[given:]
    assert list(dataset.dataframe) == list(whole_set.dataframe)


def test_generated_rows_are_checked_and_filtered_as_those_of_files(path, tokenizer):
    wrong = build_dataset(CONFIG | {"datagen": {**CONFIG["datagen"], "name": "Wrong"}}, path, tokenizer)
    with pytest.raises(DataError, match="rows generated after 0 others, row 0: 'prompt'.* is empty"):
        wrong.on_batch_end(None)
    config = CONFIG | {"datagen": {**CONFIG["datagen"], "name": "Long"}, "filter_overlong_prompts": True}
    dataset = build_dataset(config, path, tokenizer)
    dataset.on_batch_end(None)
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 1, 2, 3, 4, 8]


def test_a_generator_of_another_family_is_refused_and_validation_has_none(path, tokenizer):
    config = CONFIG | {"datagen": {"path": f"pkg://{__name__}", "name": "pytest"}}
    with pytest.raises(TypeError, match="is not a subclass of verl.data.dynamicgen_dataset.AbstractDataGen"):
        build_dataset(config, path, tokenizer)
    assert not hasattr(build_dataset(config, path, tokenizer, is_train=False), "on_batch_end")
