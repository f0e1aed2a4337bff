"""Loggers: what is written where, and what a wrong name or a missing package says."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from verl.telemetry.tracking import (
    Backend,
    Tracking,
    ValidationGenerationsLogger,
    metrics_file,
    register_backend,
    tensorboard_folder,
    wandb_has_key,
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


def test_wandb_without_a_key_logs_offline_and_says_so(tmp_path, caplog):
    with Tracking("p", "e", "wandb", {"lr": 1}) as tracking:
        tracking.log({"x": 1.0}, step=1)
        ValidationGenerationsLogger(tracking=tracking).log(["wandb"], SAMPLES, step=1)
        assert tracking.logger["wandb"].run.settings.mode == "offline"
    assert caplog.text.count("no API key is configured") == 1
    assert list((tmp_path / "wandb").glob("offline-run-*"))


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
        ValueError, match=r"trainer.logger='tensorbord'.*console, file, tensorboard, wandb.*'tensorboard'"
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
    from verl.telemetry import tracking as module

    monkeypatch.setattr(module, "_BACKENDS", dict(module._BACKENDS))
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


def test_importing_tracking_imports_no_backend():
    code = (
        "import sys, verl.telemetry.tracking, verl.telemetry.progress; "
        "print([m for m in ('torch', 'wandb', 'tensorboard', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
