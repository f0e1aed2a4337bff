"""The lines a person reads."""

import io
import re
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.waiting import wait_for
from verl.telemetry import progress
from verl.telemetry.progress import (
    Progress,
    RunSummary,
    command_line,
    core_metrics,
    format_duration,
    format_numbers,
    format_summary,
    print_summary,
    set_overrides,
    stop_notice,
)

METRICS = {
    "critic/score/mean": 0.31249,
    "response_length/mean": 6.25,
    "actor/grad_norm": 1.5,
    "perf/throughput": 84.6,
    "perf/time_per_step": 5.0,
}


@pytest.mark.parametrize(
    "seconds, text", [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (187, "3 min 07 s"), (7500, "2 h 05 min")]
)
def test_durations_read_well(seconds, text):
    assert format_duration(seconds) == text


def test_numbers_that_are_missing_are_left_out():
    assert format_numbers(METRICS) == "reward 0.312  length 6.2  grad 1.50  tok/s 85  s/step 5.0"
    assert format_numbers({}) == ""


def test_core_metrics_keep_data_sources_with_slashes():
    metrics = {
        "val-core/openai/gsm8k/reward/mean@4": 0.5,
        "val-core/openai/gsm8k/acc/maj@4/mean": 0.25,
        "val-aux/x/reward/mean@4": 9,
    }
    assert core_metrics(metrics) == {
        ("openai/gsm8k", "reward mean@4"): 0.5,
        ("openai/gsm8k", "acc maj@4"): 0.25,
    }


def test_without_a_terminal_each_step_is_one_line_with_the_time_left():
    stream = io.StringIO()
    with Progress(25, stream=stream) as progress:
        progress.validated(0, {"val-core/add1/reward/mean@1": 0.6})
        progress.update(3, METRICS)
    assert stream.getvalue().splitlines() == [
        "validation at step 0: add1 reward mean@1 0.600",
        "step  3/25  reward 0.312  length 6.2  grad 1.50  tok/s 85  s/step 5.0  eta 1 min 50 s",
    ]


def test_on_a_terminal_a_bar_is_drawn_and_lines_appear_above_it():
    stream = io.StringIO()
    progress = Progress(2, stream=stream, is_terminal=True)
    progress.say("resumed [from] step 1")
    progress.update(2, METRICS)
    progress.finish()
    progress.finish()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "resumed [from] step 1" in text
    assert "2/2" in text and "reward 0.312" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_part_of_a_step_that_takes_long_is_named(monkeypatch, is_terminal):
    monkeypatch.setattr(progress, "SILENT_S", 0.05)
    monkeypatch.setattr(progress, "PHASE_S", 0.05)
    stream = io.StringIO()
    with Progress(3, stream=stream, is_terminal=is_terminal) as shown:
        with shown.phase("testing"), shown.phase("unlisted"):
            wait_for(lambda: "validating " in stream.getvalue(), "the name of the part")
        assert shown.phase_text() == ""
    assert ("validating 0 s" if is_terminal else "validating for 1 s") in stream.getvalue()


@pytest.mark.parametrize("width", [60, 80, 110, 160])
def test_the_line_of_a_bar_fits_its_terminal(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    progress = Progress(100, stream=stream, is_terminal=True)
    progress.update(7, {**METRICS, "actor/entropy": 0.5})
    progress.finish()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).rstrip().splitlines()[-1].split("\r")[-1]
    assert len(last) <= width and last.startswith("step   7/100") and last.endswith("eta 7 min 45 s")
    assert (
        "reward 0.312" in last and ("tok/s" in last) == (width >= 110) and last.count("━") >= (7 if width < 130 else 19)
    )


def test_a_progress_that_is_switched_off_still_says_what_must_be_said():
    stream = io.StringIO()
    progress = Progress(2, enabled=False, stream=stream)
    progress.update(1, METRICS)
    progress.validated(1, {"val-core/a/reward/mean@1": 1})
    progress.say("important")
    assert stream.getvalue() == "important\n"


def test_overrides_are_replaced_in_place_or_appended_and_said_once():
    assert set_overrides(["a=1", "+b=2", "c=3", "a=7"], {"b": 5, "d": 6}) == ["a=7", "b=5", "c=3", "d=6"]


def test_a_command_survives_the_shell():
    overrides = ["trainer.logger=[console, file]", "data.train_files=/data/my files/x.parquet", "a='b'"]
    words = shlex.split(command_line(overrides, width=40).replace("\\\n", " "))
    assert words[1:] == ["-m", "verl.trainer.main_ppo", *overrides]


GPU = ["trainer.device=cuda", "trainer.default_local_dir=run-gpu"]


def finished_run(tmp_path) -> RunSummary:
    validations = [(step, {"val-core/add1/reward/mean@1": value}) for step, value in ((0, 0.6), (10, 0.8), (25, 0.95))]
    return RunSummary(
        steps=25,
        seconds=151,
        validations=validations,
        places={"metrics": tmp_path / "run/metrics.jsonl", "checkpoint": "run/global_step_25", "nothing": None},
        overrides=["trainer.device=cpu", "trainer.total_training_steps=25", "trainer.resume_mode=disable"],
        gpu_options=GPU,
    )


def test_the_summary_says_before_and_after_where_things_lie_and_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = format_summary(finished_run(tmp_path))
    assert "Done: 25 steps in 2 min 31 s." in text
    assert "Validation, step 0 -> step 25\n  add1 reward mean@1  0.600 -> 0.950" in text
    assert "metrics     run/metrics.jsonl\ncheckpoint  run/global_step_25" in text
    assert "nothing" not in text
    resume, gpu = text.replace("\\\n", " ").split("To train on")[1].split("The same on a GPU")
    assert "trainer.total_training_steps=50" in resume and "trainer.resume_mode=auto" in resume
    words = shlex.split(gpu.split("\n", 1)[1])
    assert words[3:] == [*finished_run(tmp_path).overrides, *GPU], "of two settings of a key the last one holds"


def test_the_command_to_resume_is_left_as_a_script_next_to_the_checkpoint(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    stream = io.StringIO()
    print_summary(replace(finished_run(tmp_path), again=tmp_path / "run" / "command.sh"), stream)
    assert stream.getvalue().endswith(
        "To train on from the checkpoint, up to step 50:\n  bash run/resume.sh\n\n"
        "The same on a GPU, from the start and in a folder of its own:\n"
        "  bash run/command.sh trainer.device=cuda trainer.default_local_dir=run-gpu\n"
    )
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\npwd\necho "$@"\n')
    stub.chmod(0o755)
    script = tmp_path / "run" / "resume.sh"
    script.write_text(script.read_text().replace(sys.executable, str(stub)))
    done = subprocess.run(["bash", str(script), "a=1"], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        str(tmp_path),
        "-m verl.trainer.main_ppo trainer.device=cpu trainer.total_training_steps=50 trainer.resume_mode=auto a=1",
    ]


def test_kl_is_shown_where_a_reference_is_kept_near():
    assert "kl" not in format_numbers({"actor/ppo_kl": 0.0})
    assert format_numbers({"actor/ppo_kl": 0.0, "actor/kl_loss": 0.01}) == "kl 0.0100"


def test_a_run_that_was_stopped_says_how_it_goes_on(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    words = ["trainer.total_training_steps=40", "trainer.resume_mode=disable"]
    assert stop_notice(3, 40, None, words).startswith("Stopped in step 3 of 40. No checkpoint")
    assert stop_notice(7, 40, tmp_path / "run/global_step_6", words) == (
        "Stopped in step 7 of 40. To go on from run/global_step_6:\n  bash run/resume.sh"
    )
    script = (tmp_path / "run/resume.sh").read_text()
    assert "trainer.total_training_steps=40" in script and "trainer.resume_mode=auto" in script
    assert "main_ppo" in stop_notice(7, 40, tmp_path / "no folder/global_step_6", words), (
        "what cannot be written is shown"
    )


def test_without_a_checkpoint_the_summary_offers_no_resume():
    text = format_summary(RunSummary(steps=2, seconds=1, overrides=["a=1"], device="cuda", can_resume=False))
    assert "main_ppo" not in text


def test_success_of_episodes_stands_next_to_the_reward_and_in_the_summary():
    metrics = {**METRICS, "env/Lake/success": 0.25, "agent/search/success": 0.75, "val-env/Lake/success": 1.0}
    assert format_numbers(metrics).startswith("reward 0.312  success 0.500  length")
    assert core_metrics(metrics) == {("Lake", "success"): 1.0}


def test_the_summary_names_the_command_that_shows_trajectories(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run = finished_run(tmp_path)
    assert "trajectories" not in format_summary(run)
    text = format_summary(replace(run, places={"samples": "run/samples"}))
    assert "To see what the policy did:" in text and "-m verl trajectories run/samples\n" in text
    text = format_summary(replace(run, places={"samples": "run/samples", "validation samples": "run/val"}))
    assert "-m verl trajectories run/val --diff 0 25 --best 1\n" in text
    text = format_summary(replace(run, places={"log": "run/run.log"}))
    assert "-m verl view run\n" in text


@pytest.mark.parametrize("is_terminal", [True, False])
def test_work_is_counted_once_it_takes_long_and_silent_where_it_is_quick(monkeypatch, is_terminal):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for seconds in (0.1, 1.0):
        stream = io.StringIO()
        stream.isatty = lambda: is_terminal
        for _ in progress.watched([10] * 6, "prompts read", 60, lambda item: item, stream):
            clock[0] += seconds
        text = stream.getvalue()
        assert bool(text) == (seconds == 1.0)
    assert "prompts read 30/60, 3 s left" in text and text.endswith("prompts read 60/60 in 6 s\n")
    assert text.count("left") == (4 if is_terminal else 1)
