import itertools
import multiprocessing

import pytest
import torch

from tests.data.files import prompt_row, write, write_numbered
from verl.data.loader import build_dataset, build_sampler, build_train_loader, build_val_loader
from verl.data.rl_dataset import DataError, RLHFDataset
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

CONFIG = {"max_prompt_length": 64, "train_batch_size": 4, "dataloader_num_workers": 0, "shuffle": True, "seed": 3}


@pytest.fixture
def dataset(tmp_path, tokenizer):
    return RLHFDataset(write_numbered(tmp_path / "a.parquet", 18), tokenizer, CONFIG)


def order(loader, batches: int | None = None) -> list[list[int]]:
    """Row numbers of the next batches; over the end of an epoch if that many are asked for."""
    if batches is None:
        return [batch["index"].tolist() for batch in loader]
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    return [batch["index"].tolist() for batch in itertools.islice(epochs, batches)]


def test_an_epoch_gives_every_row_at_most_once_in_full_batches(dataset):
    batches = order(build_train_loader(CONFIG, dataset))
    assert [len(batch) for batch in batches] == [4, 4, 4, 4] and len(build_train_loader(CONFIG, dataset)) == 4
    assert len(set(sum(batches, []))) == 16


def test_each_epoch_is_shuffled_again_and_the_seed_decides(dataset):
    loader = build_train_loader(CONFIG, dataset)
    first, second = order(loader), order(loader)
    assert first != second
    assert order(build_train_loader(CONFIG, dataset), 8) == first + second
    assert order(build_train_loader({**CONFIG, "seed": 4}, dataset)) != first
    assert order(build_train_loader({**CONFIG, "seed": None}, dataset, seed=3)) == first
    assert order(build_train_loader({**CONFIG, "shuffle": False}, dataset)) == [
        list(range(i, i + 4)) for i in (0, 4, 8, 12)
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_do_not_change_the_order(dataset, workers):
    alone = build_train_loader(CONFIG, dataset)
    together = build_train_loader({**CONFIG, "dataloader_num_workers": workers}, dataset)
    for _ in range(2):
        assert order(together) == order(alone)


def test_worker_processes_end_with_an_epoch_that_is_left(dataset):
    before = set(multiprocessing.active_children())
    batches = iter(build_train_loader({**CONFIG, "dataloader_num_workers": 2}, dataset))
    next(batches)
    workers = set(multiprocessing.active_children()) - before
    batches.close()
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("given", range(10))
def test_a_resumed_loader_continues_as_if_never_stopped(dataset, given):
    whole = order(build_train_loader(CONFIG, dataset), 12)
    loader = build_train_loader(CONFIG, dataset)
    epochs = itertools.chain.from_iterable(iter(loader) for _ in itertools.count())
    for _ in range(given):
        next(epochs)
    resumed = build_train_loader(CONFIG, dataset)
    resumed.load_state_dict(loader.state_dict())
    assert order(resumed, 12 - given) == whole[given:]


@pytest.mark.parametrize("saver, resumer", [(0, 2), (2, 0), (2, 1)])
def test_a_state_serves_any_number_of_workers(dataset, saver, resumer):
    whole = order(build_train_loader(CONFIG, dataset), 7)
    loader = build_train_loader({**CONFIG, "dataloader_num_workers": saver}, dataset)
    order(loader)
    next(iter(loader))
    resumed = build_train_loader({**CONFIG, "dataloader_num_workers": resumer}, dataset)
    resumed.load_state_dict(loader.state_dict())
    assert order(resumed, 2) == whole[5:7]


def test_the_state_survives_a_file_and_a_second_resume(dataset, tmp_path):
    whole = order(build_train_loader(CONFIG, dataset), 8)
    loader, seen = build_train_loader(CONFIG, dataset), []
    for _ in range(8):
        seen += order(loader, 1)
        torch.save(loader.state_dict(), tmp_path / "data.pt")
        loader = build_train_loader(CONFIG, dataset)
        loader.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    assert seen == whole


def test_a_state_that_was_loaded_is_the_state_that_is_saved(dataset):
    loader = build_train_loader(CONFIG, dataset)
    order(loader, 6)
    resumed = build_train_loader(CONFIG, dataset)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict() and loader.state_dict()["rows_given"] == 8


def test_an_epoch_that_was_left_early_is_not_taken_up_again(dataset):
    loader = build_train_loader(CONFIG, dataset)
    next(iter(loader))
    assert len(order(loader)) == 4


def test_loading_does_not_touch_the_global_random_state(dataset):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    order(build_train_loader(CONFIG, dataset))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_state_of_other_data_is_refused(dataset, tmp_path, tokenizer):
    other = RLHFDataset(write_numbered(tmp_path / "b.parquet", 20), tokenizer, CONFIG)
    loader = build_train_loader(CONFIG, other)
    with pytest.raises(ValueError, match="had 18 rows and this one has 20"):
        loader.load_state_dict(build_train_loader(CONFIG, dataset).state_dict())


def test_gen_batch_size_goes_before_train_batch_size(dataset):
    assert [len(batch) for batch in order(build_train_loader({**CONFIG, "gen_batch_size": 9}, dataset))] == [9, 9]


def test_a_batch_larger_than_the_data_is_refused(dataset):
    with pytest.raises(ValueError, match="data.train_batch_size=32 is larger than the 18 rows of data.train_files"):
        build_train_loader({**CONFIG, "train_batch_size": 32}, dataset)


def test_validation_sees_every_prompt_in_order(dataset):
    assert order(build_val_loader(CONFIG, dataset)) == [list(range(18))]
    assert [len(batch) for batch in order(build_val_loader({**CONFIG, "val_batch_size": 8}, dataset))] == [8, 8, 2]
    shuffled = order(build_val_loader({**CONFIG, "validation_shuffle": True}, dataset))[0]
    assert shuffled != list(range(18)) and sorted(shuffled) == list(range(18))


def test_build_dataset_lists_overlong_prompts_before_training(tmp_path, tokenizer):
    path = write(tmp_path / "a.parquet", [prompt_row("x" * (1 + 60 * (i % 2))) for i in range(4)])
    with pytest.raises(DataError, match=r"2 of 4 prompts are longer than data.max_prompt_length=64 \(.*row 1 has"):
        build_dataset(CONFIG, path, tokenizer)
    assert len(build_dataset({**CONFIG, "truncation": "left"}, path, tokenizer)) == 4


def test_build_dataset_warns_about_columns_a_rule_based_reward_needs(tmp_path, tokenizer, caplog):
    build_dataset(CONFIG, write(tmp_path / "a.parquet", [{"prompt": "hi", "source": "x"}]), tokenizer)
    assert "no column 'data_source' and no column 'reward_model' (there are: prompt, source)" in caplog.text


CUSTOM = """
from torch.utils.data import Dataset
from .words import WORDS

class Words(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None):
        self.files = data_files
    def __len__(self):
        return len(WORDS)
    def __getitem__(self, i):
        return {"index": WORDS[i]}

class Plain:
    pass
"""


def test_a_dataset_class_from_the_users_file_is_built(tmp_path, tokenizer):
    (tmp_path / "words.py").write_text("WORDS = ['a', 'b']\n")
    (tmp_path / "mine.py").write_text(CUSTOM)
    config = {**CONFIG, "custom_cls": {"path": str(tmp_path / "mine.py"), "name": "Words"}}
    dataset = build_dataset(config, "x.parquet", tokenizer)
    assert dataset.files == "x.parquet" and order(build_val_loader(config, dataset)) == [["a", "b"]]
    config["custom_cls"]["name"] = "Plain"
    with pytest.raises(TypeError, match="'Plain' of .*mine.py is not a subclass of torch.utils.data.Dataset"):
        build_dataset(config, "x.parquet", tokenizer)


class Backwards(AbstractSampler):
    def __init__(self, data_source, data_config):
        self.data_source = data_source

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        return iter(range(len(self) - 1, -1, -1))


class Curriculum(AbstractCurriculumSampler, Backwards):
    """Yields the rows of its last update; its state holds its position."""

    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.left = list(range(len(data_source)))

    def __iter__(self):
        while self.left:
            yield self.left.pop()
        self.left = list(range(len(self.data_source)))

    def update(self, batch):
        self.left.sort(key=lambda row: row % batch)

    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["left"])


def with_sampler(name: str) -> dict:
    return {**CONFIG, "sampler": {"class_path": f"pkg://{__name__}", "class_name": name}}


def test_a_users_sampler_decides_the_order_and_resumes(dataset):
    config = with_sampler("Backwards")
    loader = build_train_loader(config, dataset)
    assert order(loader, 1) == [[17, 16, 15, 14]]
    resumed = build_train_loader(config, dataset)
    resumed.load_state_dict(loader.state_dict())
    assert order(resumed, 2) == [[13, 12, 11, 10], [9, 8, 7, 6]]


def test_a_curriculum_sampler_resumes_from_its_own_state(dataset):
    config = with_sampler("Curriculum")

    def run(loader, batches, start=0):
        seen = []
        for step, batch in enumerate(itertools.islice(loader, batches), start):
            seen.append(batch["index"].tolist())
            loader.sampler.update(batch=step + 2)
        return seen

    whole = run(build_train_loader(config, dataset), 4)
    loader = build_train_loader(config, dataset)
    first = run(loader, 2)
    resumed = build_train_loader(config, dataset)
    resumed.load_state_dict(loader.state_dict())
    assert first + run(resumed, 2, start=2) == whole


def test_a_curriculum_sampler_needs_zero_workers(dataset):
    with pytest.raises(ValueError, match="data.dataloader_num_workers=2 with the curriculum sampler Curriculum"):
        build_sampler({**with_sampler("Curriculum"), "dataloader_num_workers": 2}, dataset)


def test_a_sampler_of_another_family_is_refused(dataset):
    with pytest.raises(TypeError, match="not a subclass of verl.experimental.dataset.sampler.AbstractSampler"):
        build_sampler(with_sampler("RLHFDataset"), dataset)
