"""What is read of a run's folder: numbers as they come, options that differ, warnings, and how it ended."""

import json
import os
import socket

import pytest

from verl.view.runs import CHARTS, Run, differences, find_runs, names_of

HERE = socket.gethostname()


def read(folder):
    return Run(folder, folder.name)


def test_numbers_are_read_once_and_as_they_come(run_folder):
    run = read(run_folder)
    assert run.steps == [0, 1, 2, 3] and run.curve("critic/score/mean")[1] == pytest.approx([0.5, 0.6, 0.7, 0.8])
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "data": {"critic/score/mean": 1.5, "actor/entropy": "NaN"}}\n{"step": 5, "da')
        file.flush()
        run.refresh(0)
        assert run.steps[-1] == 4 and run.unread == 0  # the half line is waited for
        file.write('ta": {"critic/score/mean": 2}}\nno JSON\n')
    run.refresh(0)
    assert run.curve("critic/score/mean")[1][-2:] == [1.5, 2.0] and run.unread == 1
    # not a number is a gap and a warning, never a zero
    assert run.curve("actor/entropy")[1][-1] is None
    assert "actor/entropy was NaN" in [warning["text"] for warning in run.warnings]


def test_a_step_trained_again_has_its_newest_numbers(run_folder):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "data": {"critic/score/mean": 9}}\n')
    run = read(run_folder)
    assert run.curve("critic/score/mean")[1] == pytest.approx([0.5, 0.6, 9, 0.8])
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 3}}\n')
    run.refresh(0)
    assert run.steps == [1]


def test_long_curves_are_means_of_neighbours(run_folder):
    rows = [json.dumps({"step": i, "data": {"x": float(i)}}) for i in range(1000)]
    (run_folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    steps, values = read(run_folder).curve("x", most=100)
    assert len(steps) == 100 and values[0] == 4.5 and steps[-1] == 999


def test_without_the_logger_file_numbers_come_from_the_log(run_folder):
    (run_folder / "metrics.jsonl").unlink()
    with open(run_folder / "run.log", "a") as file:
        file.write("step:7 - critic/score/mean:0.25 - actor/lr:2e-05\n  perf/throughput:12.5\nother - text:1\n")
    run = read(run_folder)
    assert run.metrics == {7: {"critic/score/mean": 0.25, "actor/lr": 2e-05, "perf/throughput": 12.5}}


def test_warnings_are_listed_once_with_their_count(run_folder):
    found = read(run_folder).summary()["warnings"]
    assert [(w["step"], w["text"], w["count"]) for w in found] == [
        (None, "verl: no flash attention", 1),
        (2, "in 5 of the last 5 steps every reward was equal", 2),
    ]


def test_the_state_says_how_a_run_ended_or_that_it_has_not(run_folder):
    run = read(run_folder)
    assert run.state == "finished: 3 steps in 3 s."

    def after(text, pid=2**22 + 1, host=HERE):
        (run_folder / "run.log").write_text(text)
        (run_folder / "run.lock").write_text(json.dumps({"host": host, "pid": pid}))
        return read(run_folder).state

    assert after("== start\n", os.getpid()) == "running"
    assert after("== start\n") == "ended without a word"
    assert after("== start\nTraceback\nerror: no memory\n") == "failed: no memory"
    assert after("== start\nerror: old\n== start\n", os.getpid()) == "running"
    assert after("== start\nStopped after step 4 of 9: SIGTERM. To go on\n") == "stopped: after step 4 of 9: SIGTERM"
    assert after("== start\n", 1, "another") == "running on another"  # and wrote just now
    os.utime(run_folder / "run.log", (0, 0)), os.utime(run_folder / "metrics.jsonl", (0, 0))
    assert read(run_folder).state == "ended without a word"


def test_options_that_differ_are_named_without_folders_and_secrets(run_folders):
    runs = [read(folder) for folder in run_folders]
    assert differences(runs) == [("actor_rollout_ref.actor.optim.lr", [0.001, 0.01])]
    assert runs[0].config["trainer.wandb_token"] == "********"
    assert not differences(runs[:1])


def test_runs_are_found_below_a_folder_and_named_by_what_tells_them_apart(run_folders, tmp_path):
    assert find_runs([tmp_path]) == run_folders == find_runs([*run_folders, tmp_path / "runs"])
    assert names_of(run_folders) == ["one", "two"]
    other = tmp_path / "copy" / "one"
    assert names_of([run_folders[0], other]) == ["runs/one", "copy/one"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has no run.*trainer.default_local_dir"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        find_runs([tmp_path / "nowhere"])


def test_a_folder_with_broken_files_is_still_shown(run_folder):
    (run_folder / "config.yaml").write_text("a: [")
    (run_folder / "environment.json").write_text("[]")
    (run_folder / "run.lock").write_text("{")
    facts = read(run_folder).summary()
    assert facts["last_step"] == 3 and "config.yaml cannot be read" in facts["warnings"][0]["text"]


def test_charts_name_metrics_once():
    known = ["critic/score/mean", "val-core/a/reward/mean@1", "val-core/b/reward/mean@1", "timing_s/gen", "other/x"]
    charts = {chart.title: names for chart in CHARTS if (names := chart.names(known))}
    assert charts == {
        "Reward": ["critic/score/mean"],
        "Validation": ["val-core/a/reward/mean@1", "val-core/b/reward/mean@1"],
        "Time per phase": ["timing_s/gen"],
    }
