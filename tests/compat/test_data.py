"""Data as users have it: their dataset and sampler classes, their columns and their ways to write a path."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.compat.support import FILES, train
from tests.support.runs import DEFAULTS
from verl.config.load import load_ppo_config


def dataset(name: str) -> dict[str, str]:
    return {"data.custom_cls.path": str(FILES / "my_datasets.py"), "data.custom_cls.name": name}


def sampler(name: str) -> dict[str, str]:
    return {"data.sampler.class_path": str(FILES / "my_samplers.py"), "data.sampler.class_name": name}


def test_a_dataset_with_a_column_more(task):
    trainer = train(task, files=dataset("TaggedDataset"))
    assert trainer.train_dataset[5]["difficulty"] == 2


def test_a_dataset_that_reads_the_files_itself(task):
    trainer = train(task, files=dataset("EvenRows"), trainer__test_freq=1)
    assert len(trainer.train_dataset) == 8 and len(trainer.val_dataset) == 4


def test_a_dataset_made_from_nothing_hears_of_each_batch(task):
    trainer = train(task, files=dataset("FromScratch"), trainer__test_freq=1, trainer__total_training_steps=2)
    assert len(trainer.train_dataset.rewards) == 2 and "val-core/sums/reward/mean@1" in trainer.metrics


def test_a_sampler_decides_the_order(task):
    trainer = train(task, files=sampler("LastFirst"))
    first = next(iter(trainer.train_dataloader))
    assert first["index"].tolist() == [15, 14, 13, 12]


def test_a_curriculum_sampler_learns_from_each_batch(task):
    trainer = train(task, files=sampler("Curriculum"), trainer__total_training_steps=2)
    assert trainer.train_dataloader.sampler.updates == 2
    assert trainer.train_dataloader.sampler.weights.min() < 1


@pytest.fixture
def plain_rows(tmp_path):
    """Prompts as plain text, and columns verl knows nothing of."""
    rows = [
        {
            "data_source": "digits",
            "prompt": f"Say a number, number {i}",
            "reward_model": {"style": "rule", "ground_truth": "1"},
            "extra_info": {"index": i},
            "level": i,
            "tags": ["a", "b"],
        }
        for i in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plain.parquet")
    return tmp_path / "plain.parquet"


@pytest.mark.parametrize("form", ["[{0},{0}]", "['{0}', '{1}']", '["{0}"]', "{0}"])
def test_plain_prompts_and_lists_of_files(task, plain_rows, form):
    files = {"data.train_files": form.format(plain_rows, task["data.train_files"])}
    trainer = train(task, files=files)
    row = trainer.train_dataset[0]
    assert row["level"] == 0 and list(row["tags"]) == ["a", "b"]


def test_paths_from_home_and_from_here(task, plain_rows, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(FILES)
    trainer = train(
        task,
        files={
            "data.train_files": "~/plain.parquet",
            "custom_reward_function.path": "rewards_plain.py",
            "data.custom_cls.path": "./my_datasets.py",
            "data.custom_cls.name": "TaggedDataset",
            "trainer.default_local_dir": "~/checkpoints",
        },
        trainer__save_freq=1,
    )
    assert len(trainer.train_dataset) == 8 and (tmp_path / "checkpoints" / "global_step_1" / "actor").is_dir()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("~/a.parquet", "~/a.parquet"),
        ("[~/a.parquet, ~/b.parquet]", ["~/a.parquet", "~/b.parquet"]),
        ("'~/a b.parquet'", "~/a b.parquet"),
    ],
)
def test_a_tilde_needs_no_quotes(word, value):
    config = load_ppo_config([*(f"{k}={v}" for k, v in DEFAULTS.items()), f"data.val_files={word}"])
    assert config.data.val_files == value
