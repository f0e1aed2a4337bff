"""What data.train_files and data.val_files name is looked for before anything heavy starts."""

import pytest

from verl.config.checks.run import missing_files

from .helpers import loaded_with


def missing(*words) -> list[str]:
    return [problem.text for problem in missing_files(loaded_with(*words).config) if problem.key == "data.train_files"]


@pytest.mark.parametrize(
    "named", ["s3://a/b.parquet", "openai/gsm8k", "'openai/gsm8k:main:train[:5]'", "{}/x", "{}/*.x"]
)
def test_what_is_there_or_may_be_elsewhere_is_let_through(named, tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "a.x").write_text("")
    assert missing(f"data.train_files={named.format(tmp_path)}") == []


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("{}/*.parquet", "no file matches"),
        ("{}/no", "does not exist. Give a file"),
        ("here/train.parquet", "does not exist. Give a file"),
        ("[{}/no.csv,s3://a/b]", "no.csv does not exist"),
    ],
)
def test_what_is_not_there_is_named(named, said, tmp_path):
    (text,) = missing(f"data.train_files={named.format(tmp_path)}")
    assert said in text and text.startswith("data.train_files=") and text.endswith(".")
