"""A data source that nobody scores stops a run before it loads a model."""

from types import SimpleNamespace

import pytest

from tests.config.helpers import typed
from tests.workers.reward_manager.batches import TOKENIZER
from verl.trainer.ppo.data_sources import check_data_sources
from verl.trainer.ppo.reward import load_reward_manager
from verl.utils.dataset.table import RowTable
from verl.utils.reward_score import UnknownDataSource

JUDGE = {"reward_model.judge.url": "http://127.0.0.1:9/v1", "reward_model.judge.model": "m"}


@pytest.fixture
def dataset(tmp_path):
    def call(*sources):
        path = tmp_path / f"{'-'.join(sources).replace('/', '_')}.jsonl"
        path.write_text("".join(f'{{"data_source": "{source}"}}\n' for source in sources))
        return SimpleNamespace(dataframe=RowTable.from_files([str(path)]))

    return call


def check(datasets, **changes):
    config = typed().with_values(changes)
    check_data_sources(config, load_reward_manager(config, TOKENIZER, num_examine=0), datasets)


def test_the_nearest_known_source_is_named(dataset):
    check([dataset("openai/gsm8k", "digits"), None])
    with pytest.raises(UnknownDataSource, match="'openai/gsm9k' has no built-in scorer.*'openai/gsm8k'"):
        check([None, dataset("digits", "openai/gsm9k")])


def test_rows_that_are_left_out_do_not_count(dataset):
    kept = dataset("nobody/knows", "digits")
    kept.dataframe = kept.dataframe.select([1])
    check([kept])


def test_a_judge_a_function_of_ones_own_or_patience_will_do(dataset, tmp_path, caplog):
    unknown = [dataset("nobody/knows")]
    check(unknown, **JUDGE)
    (tmp_path / "mine.py").write_text("def compute_score(**row):\n    return 1.0\n")
    check(unknown, **{"custom_reward_function.path": str(tmp_path / "mine.py")})
    check(unknown, **{"reward_model.by_source": {"nobody/*": str(tmp_path / "mine.py")}})
    assert not caplog.records
    check(unknown, **{"reward_model.on_error": "zero_and_count"})
    assert "'nobody/knows' has no built-in scorer" in caplog.text
