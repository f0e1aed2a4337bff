"""A run that was stopped and resumed equals, bit for bit, the run that never stopped."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job

PPO = {
    "algorithm__adv_estimator": "gae",
    "algorithm__use_kl_in_reward": True,
    "algorithm__kl_ctrl__type": "adaptive",
    "actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8,
    "critic__ppo_micro_batch_size_per_gpu": 8,
    "critic__strategy": "local",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "actor_rollout_ref__actor__shuffle": True,
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 5,
    "trainer__save_freq": 1,
    "data__train_batch_size": 4,
}


def run(tmp_path, monkeypatch, name, **settings):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    task = make_task(tmp_path / "task", rows=12)  # an epoch is three steps: the resume crosses into the second
    run_job(overrides(task, **{**PPO, "trainer__default_local_dir": str(tmp_path / name), **settings}))
    return {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}


def checkpoint_files(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*.pt") if p.name != "data.pt")


def assert_equal_trees(one, other, where=""):
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal_trees(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal_trees(a, b, f"{where}/{i}")
    else:
        assert one == other, where


def assert_same_checkpoint(one, other):
    names = checkpoint_files(one)
    assert names == checkpoint_files(other) and len(names) >= 3
    for name in names:
        assert_equal_trees(
            torch.load(one / name, weights_only=True), torch.load(other / name, weights_only=True), str(name)
        )


def numbers(metrics):
    """What must be equal: everything but clocks and memory."""
    return {k: v for k, v in metrics.items() if not k.startswith(("timing", "perf/", "rollout/engine/"))}


@pytest.mark.parametrize("step", [2, 3])
def test_resumed_run_equals_the_run_never_stopped(tmp_path, monkeypatch, step):
    whole = run(tmp_path, monkeypatch, "whole")
    source = tmp_path / "whole" / f"global_step_{step}"
    resumed = run(
        tmp_path, monkeypatch, "resumed", trainer__resume_mode="resume_path", trainer__resume_from_path=str(source)
    )
    assert sorted(resumed) == list(range(step + 1, 6))
    assert all(numbers(resumed[s]) == numbers(whole[s]) for s in resumed)
    last = [tmp_path / name / "global_step_5" for name in ("whole", "resumed")]
    assert_same_checkpoint(*last)
    states = [json.loads((folder / "trainer.json").read_text()) for folder in last]
    assert states[0]["health"] == states[1]["health"] and states[0]["health"]["steps"] == 5


def test_killed_run_resumes_by_the_same_command(tmp_path, monkeypatch):
    whole = run(tmp_path, monkeypatch, "whole")
    arguments = overrides(
        make_task(tmp_path / "task", rows=12), **{**PPO, "trainer__default_local_dir": str(tmp_path / "killed")}
    )
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(tmp_path / "killed.jsonl")}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    driver = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tracker = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + 120
    while not (tracker.exists() and int(tracker.read_text()) >= 2) and driver.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = run(tmp_path, monkeypatch, "killed")
    assert numbers(done[5]) == numbers(whole[5])
    assert_same_checkpoint(tmp_path / "whole" / "global_step_5", tmp_path / "killed" / "global_step_5")
