"""Loggers: what is written where, and what a wrong name or a missing package says."""

import json
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.waiting import wait_for
from verl.telemetry import delivery
from verl.telemetry import tracking as tracking_module
from verl.telemetry.trackers import tensorboard_folder, wandb_has_key
from verl.telemetry.tracking import (
    Backend,
    Tracking,
    ValidationGenerationsLogger,
    metrics_file,
    register_backend,
)
from verl.utils import process

SAMPLES = [("1+1=", "2", 1.0), ("2+2=", "5", 0.0)]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("VERL_FILE_LOGGER_ROOT", "VERL_FILE_LOGGER_PATH", "TENSORBOARD_DIR", "WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.chdir(tmp_path)
    process.forget_warnings()


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_console_prints_one_line_of_numbers(capsys):
    tracking = Tracking("p", "e", "console")
    tracking.log({"a/b": 0.5, "n": np.int64(3), "t": torch.tensor(2.0), "text": "no", "d": np.float64(0.25)}, step=7)
    assert capsys.readouterr().out == "step:7 - a/b:0.5 - n:3 - t:2.0 - d:0.25\n"


def test_a_step_of_many_numbers_is_a_block_a_person_can_read(capsys):
    data = {f"{group}/{name}": 0.123456 for group in ("actor", "timing_s", "perf") for name in "abcdefghij"}
    data |= {"critic/score/mean": 0.5, "val-core/x/reward/mean@1": 0.75, "perf/big": 123456.789, "perf/n": 123456}
    Tracking("p", "e", "console").log(data, step=7)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step:7 - val-core/x/reward/mean@1:0.75 - critic/score/mean:0.5"
    assert all(len(line) <= 120 and line.startswith("  ") for line in lines[1:])
    assert all(len({word.partition("/")[0] for word in line[2:].split(" - ")}) == 1 for line in lines[1:])
    words = [word.strip() for line in lines for word in line.split(" - ") if not word.startswith("step:")]
    found = dict(word.rsplit(":", 1) for word in words)
    assert found.keys() == data.keys(), "every key can be searched for"
    assert (found["actor/a"], found["perf/big"], found["perf/n"]) == ("0.1235", "123500.0", "123456")


def test_the_console_can_print_all_on_one_line_as_verl_does(capsys):
    data = {f"actor/{name}": 0.123456789 for name in "abcdefghij"}
    Tracking("p", "e", "console", {"trainer": {"tracker_kwargs": {"console": {"format": "line"}}}}).log(data, step=7)
    assert capsys.readouterr().out == "step:7 - " + " - ".join(f"{name}:0.123456789" for name in data) + "\n"
    with pytest.raises(ValueError, match="console.format='table' must be one of block, line"):
        Tracking("p", "e", "console", {"trainer": {"tracker_kwargs": {"console": {"format": "table"}}}})


def test_console_prints_generations(capsys):
    Tracking("p", "e", "console").log_generations(SAMPLES, step=1)
    assert "1+1=" in capsys.readouterr().out


def test_file_is_appended_to_and_each_line_is_valid_json(tmp_path):
    for step in (1, 2):  # the second is a resumed run
        with Tracking("p", "e", ["file"]) as tracking:
            tracking.log({"x": step, "bad": float("nan"), "inf": -np.inf, "list": torch.tensor([1, 2])}, step=step)
    lines = read_lines(tmp_path / "p" / "e.jsonl")
    assert lines[0] == {"step": 1, "data": {"x": 1, "bad": "NaN", "inf": "-Infinity", "list": [1, 2]}}
    assert lines[1]["step"] == 2


def test_file_lies_in_the_run_folder_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    config = {"trainer": {"default_local_dir": str(tmp_path / "run")}}
    assert metrics_file("p", "e", config) == tmp_path / "run" / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "root"))
    assert metrics_file("p", "e", config) == tmp_path / "root" / "p" / "e.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "here.jsonl"))
    assert metrics_file("p", "e", config) == tmp_path / "here.jsonl"


def test_tracker_kwargs_reach_their_backend(tmp_path):
    config = {"trainer": {"tracker_kwargs": {"file": {"path": str(tmp_path / "mine.jsonl")}}}}
    with Tracking("p", "e", ["file"], config) as tracking:
        tracking.log({"x": 1}, step=0)
    assert read_lines(tmp_path / "mine.jsonl")[0]["data"] == {"x": 1}


def test_tracker_kwargs_of_a_backend_that_was_not_chosen_are_warned_about(caplog):
    Tracking("p", "e", "console", {"trainer": {"tracker_kwargs": {"file": {"path": "x"}}}})
    assert "trainer.tracker_kwargs.file has no effect" in caplog.text


def test_tensorboard_writes_scalars_that_can_be_read_back(tmp_path):
    with Tracking("p", "e", "tensorboard") as tracking:
        tracking.log({"a/b": 0.5, "text": "no"}, step=3)
        tracking.log_generations(SAMPLES, step=3)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / tensorboard_folder("p", "e"))).Reload()
    assert [(event.step, event.value) for event in events.Scalars("a/b")] == [(3, 0.5)]
    assert "text" not in events.Tags()["scalars"]
    assert "val/generations/0/text_summary" in events.Tags()["tensors"]


def test_tensorboard_folder_follows_the_environment(monkeypatch):
    assert tensorboard_folder("p", "e") == "tensorboard_log/p/e"
    monkeypatch.setenv("TENSORBOARD_DIR", "/elsewhere")
    assert tensorboard_folder("p", "e") == "/elsewhere"


def test_wandb_key_is_looked_for_in_environment_and_netrc(monkeypatch, tmp_path):
    assert not wandb_has_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password made-up\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert wandb_has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not wandb_has_key()
    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    assert wandb_has_key()


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(
        ValueError,
        match=r"trainer.logger='tensorbord'.*aim, clearml, console, file, .*mlflow, .*tensorboard, .*'tensorboard'",
    ):
        Tracking("p", "e", ["console", "tensorbord"])


def test_a_missing_package_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"trainer.logger=wandb needs .*`pip install wandb`"):
        Tracking("p", "e", "wandb")


def test_tracking_is_the_old_name_of_wandb(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="needs the package wandb"):
        Tracking("p", "e", "tracking")
    assert "old name of 'wandb'" in caplog.text


def test_a_backend_of_the_user_is_used_and_closed(monkeypatch):
    monkeypatch.setattr(tracking_module, "_BACKENDS", dict(tracking_module._BACKENDS))
    seen = []

    @register_backend("mine")
    class Mine(Backend):
        def log(self, data, step):
            seen.append((step, data["x"]))

        def finish(self):
            seen.append("closed")

    with Tracking("p", "e", ["mine"]) as tracking:
        tracking.log({"x": 1}, step=1)
        tracking.log({"x": 2}, step=2, backend="console")
    tracking.finish()
    assert seen == [(1, 1), "closed"]


class Scripted(Backend):
    """Does in `log` what the test says."""

    script = staticmethod(lambda step: None)

    def __init__(self, *names, opening=None, **kwargs):
        if opening is not None:
            raise opening
        self.steps = []

    def log(self, data, step):
        self.script(step)
        self.steps.append(step)

    def finish(self):
        self.steps.append("failed" if self.failed else "finished")


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(tracking_module, "_BACKENDS", {**tracking_module._BACKENDS, "mine": Scripted})
    return monkeypatch


def test_a_tracker_that_fails_is_warned_about_once_and_counted(scripted, caplog):
    def refuse(step):
        if step in (2, 3):
            raise ConnectionError("no route, api_key=abcdefgh")

    scripted.setattr(Scripted, "script", staticmethod(refuse))
    tracking = Tracking("p", "e", ["mine"])
    backend = tracking.logger["mine"]
    for step in range(5):
        tracking.log({"x": 1}, step=step)
    tracking.finish()
    assert backend.steps == [0, 1, 4, "finished"]
    assert caplog.text.count("trainer.logger=mine failed (ConnectionError: no route, api_key=****") == 1
    assert "abcdefgh" not in caplog.text and "2 records of this run were lost" in caplog.text


def test_a_tracker_that_hangs_slows_neither_the_run_nor_its_end(scripted, caplog):
    hangs, begun = threading.Event(), []
    scripted.setattr(Scripted, "script", staticmethod(lambda step: begun.append(step) or hangs.wait()))
    scripted.setattr(delivery, "QUEUE_LENGTH", 10)
    tracking = Tracking("p", "e", ["mine"], {"trainer": {"tracker_timeout": 0.2}})
    for step in range(50):
        tracking.log({"x": 1}, step=step)
    tracking.finish()
    assert begun == [0] and not hangs.is_set()  # the run has ended, and none of the 50 has
    assert "mine does not keep up: 10 records wait" in caplog.text
    assert "has not finished in time" in caplog.text and "records of this run were lost" in caplog.text
    hangs.set()


def test_a_tracker_that_cannot_be_opened_is_left_out_and_a_wrong_argument_is_refused(scripted, caplog):
    def opening(error):
        return {"trainer": {"tracker_kwargs": {"mine": {"opening": error}}}}

    with Tracking("p", "e", ["mine"], opening(OSError("down"))) as tracking:
        tracking.log({"x": 1}, step=0)
    assert "trainer.logger=mine cannot be opened (OSError: down). The run goes on without it" in caplog.text
    with pytest.raises(TypeError, match="no such argument"):
        Tracking("p", "e", ["mine"], opening(TypeError("no such argument")))


def test_a_tracker_learns_that_the_run_failed(scripted):
    with pytest.raises(KeyError), Tracking("p", "e", ["mine"]) as tracking:
        backend = tracking.logger["mine"]
        tracking.log({"x": 1}, step=1)
        raise KeyError
    assert backend.steps == [1, "failed"]


def test_lines_that_a_full_disk_refuses_are_written_when_there_is_space(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    tracking = Tracking("p", "e", "file", {"trainer": {"tracker_kwargs": {"file": {"path": str(path)}}}})
    tracking.log({"x": 0}, step=0)
    file = tracking.logger["file"].file
    with open("/dev/full", "ab", buffering=0) as tracking.logger["file"].file:
        tracking.log({"x": 1}, step=1)
        tracking.log({"x": 2}, step=2)
    tracking.logger["file"].file = file
    tracking.log({"x": 3}, step=3)
    tracking.finish()
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2, 3]
    assert caplog.text.count("cannot be written") == 1


# -- trackers of others, each with its real package where that is installed ------------------------------------------

SECRET = "of-an-" + "option"  # ClearML stores the text of this file
OPTIONS = {"algorithm": {"adv_estimator": "grpo", "lr": 1e-6}, "ray_init": {"env": {"MY_API_KEY": SECRET}}}
METRICS = {"critic/score/mean": 0.5, "val-core/x/reward/mean@1": np.float64(0.25), "bad": float("nan"), "text": "no"}


def track(name, monkeypatch, tmp_path, caplog):
    """Log a step and samples with the command line of a user; returns the backend, closed."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip(name)
    monkeypatch.setattr(sys, "argv", ["main_ppo.py", f"ray_init.env.MY_API_KEY={SECRET}"])
    with Tracking("p", "e", [name], OPTIONS) as tracking:
        tracking.log(METRICS, step=3)
        ValidationGenerationsLogger(tracking=tracking).log([name], SAMPLES, step=3)
        backend = tracking.logger[name]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert f"trainer.logger={name}" not in caplog.text, "nothing was lost"
    return backend


def test_wandb_without_a_key_logs_offline_and_says_so(monkeypatch, tmp_path, caplog):
    assert track("wandb", monkeypatch, tmp_path, caplog).run.settings.mode == "offline"
    assert caplog.text.count("no API key is configured") == 1
    (records,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    wait_for(lambda: b"val-core/x/reward/mean@1" in records.read_bytes(), "a process of wandb's")


def test_mlflow_has_metrics_parameters_and_a_table_of_samples(monkeypatch, tmp_path, caplog):
    run = track("mlflow", monkeypatch, tmp_path, caplog)
    found = run.client.get_run(run.run_id)
    assert found.info.status == "FINISHED" and found.info.run_name == "e"
    assert found.data.metrics["critic/score/mean"] == 0.5
    assert found.data.metrics["val-core/x/reward/mean_at_1"] == 0.25
    assert found.data.params["algorithm/adv_estimator"] == "grpo"
    table = json.loads(Path(run.client.download_artifacts(run.run_id, "val_generations/3.json")).read_text())
    assert table == {"columns": ["step", "input", "output", "score"], "data": [[3, *sample] for sample in SAMPLES]}


def test_swanlab_is_offline_without_a_key(monkeypatch, tmp_path, caplog):
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    track("swanlab", monkeypatch, tmp_path, caplog)
    assert "no API key is configured" in caplog.text
    texts = [path.read_text() for path in (tmp_path / "swanlog").rglob("media/text/*.txt")]
    assert sorted(texts) == [f"input: {a}\n\noutput: {b}\n\nscore: {score}" for a, b, score in SAMPLES]
    (records,) = (tmp_path / "swanlog").rglob("run-*.swanlab")
    assert b"val-core/x/reward/mean@1" in records.read_bytes()


def test_clearml_keeps_an_offline_session(monkeypatch, tmp_path, caplog):
    track("clearml", monkeypatch, tmp_path, caplog)
    assert "bad is nan at step 3" in caplog.text
    (path,) = tmp_path.rglob("metrics.jsonl")
    events = [event for line in path.read_text().splitlines() for event in json.loads(line)]
    values = {(event["metric"], event["variant"]): event.get("value") for event in events}
    assert values["critic", "score/mean"] == 0.5 and ("val/generations", "samples") in values
    assert ("bad", "bad") not in values
    assert "adv_estimator" in (path.parent / "task.json").read_text()


def test_trackio_has_metrics_and_a_table_of_samples(monkeypatch, tmp_path, caplog):
    track("trackio", monkeypatch, tmp_path, caplog)
    (path,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(path) as database:
        rows = {step: json.loads(text) for step, text in database.execute("select step, metrics from metrics")}
        all_text = str(database.execute("select metrics from metrics").fetchall())
    assert rows.keys() == {3} and "val-core/x/reward/mean@1" in all_text and "1+1=" in all_text


def test_aim_has_metrics_and_samples(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("verl.telemetry.trackers.AimBackend.finish", lambda self: None)  # it is read while open
    run = track("aim", monkeypatch, tmp_path, caplog).run
    assert run["config"]["algorithm"]["adv_estimator"] == "grpo" and run.name == "e"
    names = {sequence.name for sequence in run.metrics()}
    assert {"critic/score/mean", "val-core/x/reward/mean@1"} <= names
    run.close()


def test_importing_tracking_imports_no_backend():
    code = (
        "import sys, verl.telemetry.tracking, verl.telemetry.progress; "
        "print([m for m in ('torch', 'wandb', 'tensorboard', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
