"""Reward files as users of verl have them: which run, and what is said about those that do not."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.compat.support import FILES, train
from tests.support.runs import main_ppo, overrides
from verl.config.base import ConfigError
from verl.workers.reward_manager import RewardError

PLAIN, BROKEN = str(FILES / "rewards_plain.py"), str(FILES / "rewards_broken.py")


def function(path: str, name: str) -> dict[str, str]:
    return {"custom_reward_function.path": path, "custom_reward_function.name": name}


@pytest.mark.parametrize("name", ["compute_score", "keywords", "awaited", "sometimes_a_dict"])
def test_a_function_trains_and_validates(task, name):
    trainer = train(task, files=function(PLAIN, name), trainer__test_freq=1)
    assert trainer.metrics["critic/score/max"] > 0
    assert any(key.startswith("val-core/digits") for key in trainer.metrics)


def test_dict_results_become_columns_and_reward_kwargs_arrive(task):
    trainer = train(
        task,
        "+custom_reward_function.reward_kwargs.weight=2.0",
        "+custom_reward_function.reward_kwargs.names=[a,b]",
        files=function(PLAIN, "columns"),
        trainer__test_freq=1,
        actor_rollout_ref__rollout__val_kwargs__n=2,
        actor_rollout_ref__rollout__val_kwargs__do_sample=True,
        actor_rollout_ref__rollout__val_kwargs__temperature=1.0,
    )
    assert "val-core/digits/acc/mean@2" in trainer.metrics and "val-core/digits/acc/maj@2/mean" in trainer.metrics


def test_a_batch_function_scores_all_at_once(task):
    trainer = train(
        task,
        "custom_reward_function.reward_kwargs.scale=3",
        files=function(PLAIN, "batch"),
        reward_model__reward_manager="batch",
        trainer__test_freq=1,
    )
    assert trainer.metrics["critic/score/max"] % 3 == 0 and "val-aux/digits/chars/mean@1" in trainer.metrics


MISTAKES = {
    "raises": "JSONDecodeError",
    "nan": "returned nan; a score must be finite",
    "nothing": "returned None of type NoneType",
    "text": "returned '1.0' of type str",
    "pair": "of type tuple",
    "other_key": "a dict without 'score'; its keys are reward",
    "leaves": "SystemExit: 3",
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_is_loaded_and_the_message_says_where(task, name):
    with pytest.raises(ConfigError) as error:
        train(task, files=function(BROKEN, name))
    lines = str(error.value).splitlines()
    place = f"{task['data.train_files']}, row 0"
    assert MISTAKES[name] in lines[0] and f"{name} ({BROKEN}:" in lines[0] and f"failed on {place} (" in lines[0]
    sample, response, truth, way_out = lines[-4:]
    assert f"sample: {place}, data_source='digits', index=0" in sample
    assert "response: " in response and "ground_truth: ''" in truth
    assert "custom_reward_function.path" in way_out and "reward_model.on_error=zero_and_count" in way_out
    assert "reward_model.self_test=off" in way_out and "verl/utils" not in str(error.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_stops_the_run_and_the_end_of_the_message_says_where(task, name):
    with pytest.raises(RewardError) as error:
        train(task, files=function(BROKEN, name), reward_model__self_test="off")
    lines = str(error.value).splitlines()
    assert MISTAKES[name] in lines[0] and f"{name} ({BROKEN}:" in lines[0] and "batch at step 1" in lines[0]
    sample, response, truth, way_out = lines[-4:]
    assert "sample: 0 of the batch at step 1, data_source='digits', index=" in sample
    assert "response: " in response and "ground_truth: ''" in truth
    assert "custom_reward_function.path" in way_out and "reward_model.on_error=zero_and_count" in way_out
    assert "verl/workers/reward_manager" not in str(error.value)  # the frames shown are the user's


@pytest.mark.parametrize("name", [*MISTAKES, "batch_too_short"])
def test_a_mistake_can_be_counted_instead(task, name, caplog):
    manager = "batch" if name.startswith("batch") else "naive"
    trainer = train(
        task,
        files=function(BROKEN, name),
        reward_model__on_error="zero_and_count",
        reward_model__reward_manager=manager,
        trainer__test_freq=1,
        trainer__total_training_steps=2,
    )
    assert trainer.metrics["reward/errors"] == 16 and trainer.metrics["critic/score/max"] == 0
    assert trainer.metrics["val-aux/digits/reward_error/mean@1"] == 1
    in_training = [r.getMessage() for r in caplog.records if "failed on 16 of 16" in r.getMessage()]
    assert len(in_training) == 2 and len(in_training[1].splitlines()) == 1  # shown once in full


@pytest.fixture
def test_split(task, tmp_path):
    """Validation rows that say they are."""
    rows = pq.read_table(task["data.val_files"]).to_pylist()
    for row in rows:
        row["extra_info"]["split"] = "test" if row["extra_info"]["index"] % 2 else "dev"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "val.parquet")
    return {"data.val_files": str(tmp_path / "val.parquet")}


def test_a_mistake_in_validation_is_said_to_be_there(task, test_split):
    files = {**function(BROKEN, "raises_in_validation"), **test_split}
    with pytest.raises(RewardError, match="sample 1 of the validation batch at step 0 .*KeyError: 'answer'"):
        train(task, files=files, trainer__val_before_train=True)


def test_a_failed_sample_counts_as_wrong_in_validation(task, test_split):
    trainer = train(
        task,
        files={**function(BROKEN, "raises_in_validation"), **test_split},
        reward_model__on_error="zero_and_count",
        trainer__test_freq=1,
    )
    assert trainer.metrics["val-aux/digits/reward_error/mean@1"] == 0.5
    assert trainer.metrics["val-core/digits/acc/mean@1"] == trainer.metrics["val-aux/digits/reward/mean@1"] == 0.5


def test_the_last_lines_printed_name_the_sample_and_the_way_out(task):
    result = main_ppo(overrides({**task, **function(BROKEN, "raises")}, trainer__total_training_steps=1))
    assert result.returncode != 0
    end = "\n".join(result.stderr.strip().splitlines()[-8:])
    place = f"sample: {task['data.train_files']}, row 0"
    for part in ("JSONDecodeError", "data_source='digits'", place, "response: ", "reward_model.on_error="):
        assert part in end, end
    assert "[rank0]" not in result.stderr


@pytest.mark.parametrize(
    ("name", "manager", "said"),
    [
        ("other_signature", "naive", "response, answer.*is called with the keywords data_source, solution_str"),
        ("batch_too_short", "naive", "set that"),
        ("nan", "batch", "reward_model.reward_manager=naive: set that"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_loaded(task, name, manager, said):
    with pytest.raises(ConfigError, match=said):
        train(task, files=function(BROKEN, name), reward_model__reward_manager=manager)


def test_a_data_source_without_rule_names_the_key_to_set(task):
    with pytest.raises(ConfigError, match="There is no built-in scorer for ability='test'") as error:
        train(task, files={"custom_reward_function.path": "null"}, data__reward_fn_key="ability")
    for part in ("custom_reward_function.path", "reward_model.by_source", f"{task['data.train_files']}, row 0"):
        assert part in str(error.value)
    assert "Did you mean" not in str(error.value)  # of codecontests, which has the four letters in it
