"""verl from Python: configurations, rewards and rows given as objects, and runs driven step by step."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas
import psutil
import pytest

import verl
from tests.support.runs import DEFAULTS, THINGS, make_task, overrides, read_metrics, run_job
from verl.api import _json_lines
from verl.config.base import READ, ConfigError
from verl.config.load import load
from verl.data.table import DataError
from verl.rewards.functions.given import GivenFunction, given_function
from verl.rewards.functions.given import load as load_given

OPTIONS = {"actor_rollout_ref.rollout.name": "hf", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}
OPTIONS |= {"actor_rollout_ref.actor.use_dynamic_bsz": True}
ROWS = [{"prompt": f"Say something about a {THINGS[i % len(THINGS)]} {i}."} for i in range(64)]
EIGHT = 8


def digits(data_source, solution_str, ground_truth, extra_info=None):
    return min(1.0, sum(c.isdigit() for c in solution_str) / EIGHT)


# -- configurations ---------------------------------------------------------------------------------------------------


def test_every_form_of_a_configuration_says_the_same(tmp_path):
    nested = {"trainer": {"seed": 3, "logger": ["console", "file"]}, "data": {"train_files": Path("a b.parquet")}}
    dotted = {"trainer.seed": np.int64(3), "trainer.logger": ("console", "file"), "data.train_files": "a b.parquet"}
    words = ["trainer.seed=3", "trainer.logger=[console,file]", "data.train_files='a b.parquet'"]
    section = "trainer: {seed: 3, logger: [console, file]}\ndata: {train_files: a b.parquet}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [ppo_trainer, _self_]\n{section}")
    expected = load([*words, *(f"{key}={value}" for key, value in OPTIONS.items())]).config.to_dict()
    for form in (nested, dotted, words, tmp_path / "mine.yaml"):
        assert verl.make_config(form, **{k.replace(".", "__"): v for k, v in OPTIONS.items()}).to_dict() == expected
    assert verl.make_config(verl.make_config(dotted | OPTIONS)).to_dict() == expected
    assert verl.make_config(nested, trainer={"seed": 4}, **OPTIONS).trainer.seed == 4


TEXTS = ["a b", "it's", 'x"y', "back\\slash", "end\\", "new\nline", "", "a,b", "{a}", "[1]", "true", "1e-3", "ü#%"]


def test_texts_and_keys_of_free_form_options_arrive_as_they_are():
    kwargs = {"one": "it's", "all": TEXTS, "deep": {"text": "x=y, z", "none": None, "no": False, "n": 1e-7}}
    by_source = {"math/*": "builtin:math", "my sums, all": "f.py"}
    reward = {"custom_reward_function": {"path": "f.py", "reward_kwargs": kwargs}, "reward_model.by_source": by_source}
    config = verl.make_config(OPTIONS | reward).to_dict()
    found = config["custom_reward_function"]["reward_kwargs"]
    assert list(found.pop("all")) == TEXTS and found == {name: kwargs[name] for name in ("one", "deep")}
    assert config["reward_model"]["by_source"] == by_source


def test_what_is_no_option_is_refused_as_on_the_command_line():
    with pytest.raises(ConfigError) as here:
        verl.make_config(OPTIONS, trainer={"sav_freq": 3})
    with pytest.raises(ConfigError) as there:
        load(["trainer.sav_freq=3"])
    assert str(here.value) == str(there.value) and "did you mean 'trainer.save_freq'" in str(here.value)
    with pytest.raises(ConfigError, match="trainer.seed"):
        verl.make_config(OPTIONS, trainer__seed="many")
    with pytest.raises(TypeError, match="functions are given as Trainer\\(reward="):
        verl.make_config(OPTIONS, custom_reward_function__name=digits)
    with pytest.raises(TypeError, match="config is a int"):
        verl.make_config(3)
    with pytest.raises(ConfigError, match="is no YAML file"):
        verl.make_config("nowhere.yaml")


# -- rewards and rows -------------------------------------------------------------------------------------------------


def test_a_given_function_is_itself_here_and_a_copy_elsewhere(tmp_path):
    mark = "x" * 3
    path = tmp_path / "given" / "reward.py"
    given = given_function(lambda *row, **named: mark, "reward")
    given.save(path)
    assert load_given(str(path)) is given.function
    program = "import sys; from verl.utils.import_utils import load_extern_type as load; print(load(*sys.argv[1:])())"
    command = [sys.executable, "-c", program, str(path), "compute_score"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "xxx\n"
    assert path.with_suffix(".pkl").stat().st_mode & 0o777 == 0o600
    before = path.read_text()
    GivenFunction(given.function, None).save(path)
    assert path.read_text() == before, "by which a resumed run knows it"
    assert "Start the run from Python again" in subprocess.run(command, capture_output=True, text=True).stderr


def test_a_reward_that_cannot_be_sent_is_refused_with_the_reason_and_what_to_do(tmp_path):
    lock = threading.Lock()

    def locked(data_source, solution_str, ground_truth, extra_info=None):
        with lock:
            return 1.0

    options = OPTIONS | {"trainer.default_local_dir": str(tmp_path)}
    with pytest.raises(TypeError, match=r"it uses lock, a _thread.lock, which has no pickle.*sandbox.enable=false"):
        verl.Trainer(options, train_data=ROWS, reward=locked)
    kept = verl.Trainer(options, train_data=ROWS, reward=locked, reward_model__sandbox__enable=False)
    assert kept._function == GivenFunction(locked, None)
    with pytest.raises(TypeError, match="a reward is a function"):
        verl.Trainer(options, train_data=ROWS, reward=3)
    with pytest.raises(ConfigError, match="custom_reward_function.path and reward are both given"):
        verl.Trainer(options, train_data=ROWS, reward=digits, custom_reward_function__path="f.py")


def test_rows_of_every_kind_become_the_same_file(tmp_path):
    trainer = verl.Trainer(OPTIONS, train_data=ROWS, reward=digits, trainer__default_local_dir=str(tmp_path))
    [(path, text)] = trainer._files.items()
    assert list(trainer.config.data.train_files) == [str(path)] and not trainer.config.has_validation
    first = '{"prompt": "Say something about a cat 0."'
    assert text.startswith(first) and text.count("\n") == len(ROWS) and '"data_source": "custom"' in text
    numbers_of_numpy = [{**row, "extra_info": {"index": np.int64(i)}} for i, row in enumerate(ROWS)]
    for rows in (pandas.DataFrame(ROWS), numbers_of_numpy, (row for row in ROWS)):
        assert set(map(order_free, json_lines(rows))) == set(map(order_free, text.splitlines()))
    [row] = json_lines([{"prompt": "3 + 5?", "ground_truth": 8, "data_source": "sums"}])
    assert json.loads(row)["reward_model"] == {"style": "rule", "ground_truth": 8}


def json_lines(rows):
    return _json_lines(rows, "train_data", has_reward=True).splitlines()


def order_free(line):
    return json.dumps(json.loads(line), sort_keys=True)


@pytest.mark.parametrize(
    "rows, words",
    [
        ([], "train_data has no rows"),
        ([{"prompt": "a"}, "b"], r"train_data\[1\] is a str"),
        ([{"prompt": "a", "image": object()}], r"train_data\[0\] cannot be written as JSON: a builtins.object"),
    ],
)
def test_rows_that_are_none_are_named(rows, words):
    with pytest.raises(DataError, match=words):
        json_lines(rows)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


def trainer_of(task, folder, **more):
    options = DEFAULTS | {"actor_rollout_ref.model.path": task["actor_rollout_ref.model.path"]}
    options |= {"trainer.default_local_dir": str(folder), "trainer.total_training_steps": 3, "trainer.logger": "file"}
    options |= {"trainer.device": "cpu", "trainer.progress_bar": False, "trainer.save_freq": -1}
    given = {"train_data": ROWS, "val_data": ROWS[:8], "reward": digits}
    return verl.Trainer(options, **(given | more))


@pytest.fixture
def started():
    """``started()``: processes that this one has started since the test began, and that live."""
    before = set(psutil.Process().children(recursive=True))  # of trackers, whose tests ran before
    return lambda: set(psutil.Process().children(recursive=True)) - before


NUMBERS = ["critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "response_length/mean"]


def test_steps_from_python_are_those_of_the_command_line(task, tmp_path, capsys, started):
    words = overrides(task, trainer__default_local_dir=tmp_path / "a", trainer__total_training_steps=3)
    words += ["trainer.logger=file", "trainer.save_freq=-1", "trainer.progress_bar=false"]
    run_job(words)
    lines = [row for row in read_metrics(tmp_path / "a" / "metrics.jsonl") if row["step"]]
    expected = pandas.DataFrame([row["data"] for row in lines], index=[row["step"] for row in lines])[NUMBERS]

    async def in_a_notebook():  # whose cells run inside an event loop
        with trainer_of(task, tmp_path / "b", trainer__test_freq=3) as trainer:
            before = trainer.validate()
            for step in trainer.steps():
                if step.number == 2:
                    break
            assert "2 steps" in repr(trainer) and len(trainer.metrics) == 2
            with pytest.raises(RuntimeError, match="is open in this process"):
                trainer_of(task, tmp_path / "c").start()
            assert [step.number for step in trainer.steps()] == [3]
            return trainer, before

    trainer, before = asyncio.run(in_a_notebook())
    pandas.testing.assert_frame_equal(trainer.metrics[NUMBERS], expected, check_exact=True, check_names=False)
    samples = trainer.samples
    assert len(samples) == 16 and list(samples.columns[:5]) == ["input", "output", "gts", "score", "step"]
    assert np.allclose(samples["score"], [digits("", text, "") for text in samples["output"]])
    assert set(before) <= set(trainer.metrics.loc[3].dropna().index), "validated at the last step"
    assert not started()
    with pytest.raises(RuntimeError, match="is closed"):
        trainer.fit()


def test_an_interrupt_ends_after_the_step_and_leaves_no_process(task, tmp_path, capfd, started):
    calls = []

    def interrupting(data_source, solution_str, ground_truth, extra_info=None):
        calls.append(solution_str)  # in this process: what it does is seen here
        if len(calls) == 20:
            os.kill(os.getpid(), signal.SIGINT)
        return float(len(solution_str))

    options = {"reward": interrupting, "val_data": None, "reward_model__sandbox__enable": False}
    options |= {"reward_model__self_test": "off", "trainer__val_before_train": False, "trainer__test_freq": -1}
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    trainer = trainer_of(task, tmp_path, **options, trainer__save_freq=3)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert (tmp_path / "global_step_2").is_dir() and list(trainer.metrics.index) == [1, 2]
    again = trainer_of(task, tmp_path, **options, trainer__save_freq=3)
    assert [step.number for step in again.steps()] == [3], "goes on where it was"

    calls.clear()
    trainer = trainer_of(task, tmp_path / "unsaved", **options)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert list(trainer.metrics.index) == [1] and not started()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_error_in_a_reward_closes_the_trainer_and_the_next_one_starts(task, tmp_path, started):
    def broken(data_source, solution_str, ground_truth, extra_info=None):
        raise KeyError("no such thing")

    with pytest.raises(Exception, match="no such thing"):
        trainer_of(task, tmp_path / "a", reward=broken, val_data=None, reward_model__self_test="off").fit()
    assert not started()
    READ["actor_rollout_ref.actor.no_more"] = "an earlier run"
    with trainer_of(task, tmp_path / "b", val_data=None) as trainer:
        assert trainer.start() is trainer and "actor_rollout_ref.actor.no_more" not in READ


def test_a_loss_of_the_notebook_needs_workers_that_see_it(task, tmp_path, monkeypatch):
    from verl.algorithms.losses import get_policy_loss_fn

    monkeypatch.setattr(get_policy_loss_fn("vanilla"), "__module__", "__main__")
    trainer = trainer_of(task, tmp_path, val_data=None, trainer__controller="ray")
    with pytest.raises(ConfigError, match="loss_mode=vanilla was registered in this notebook.*external_lib"):
        trainer.start()
