"""A run that was stopped and resumed equals, bit for bit, the run that never stopped."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.support.runs import make_task, overrides, read_metrics, run_job
from tests.support.waiting import wait_for

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref__actor", "actor_rollout_ref__model", "actor_rollout_ref__rollout"
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
    # an epoch is three steps: the resume crosses into the second
    task = make_task(tmp_path / "task", rows=12, size="2.5M" if ROLLOUT + "__name" in settings else "tiny")
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


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory):
    """Folder and metrics of the run that others are compared with."""
    folder = tmp_path_factory.mktemp("never_stopped")
    with pytest.MonkeyPatch.context() as monkeypatch:
        return folder, run(folder, monkeypatch, "whole")


@pytest.mark.parametrize("step", [2, 3])
def test_resumed_run_equals_the_run_never_stopped(tmp_path, monkeypatch, never_stopped, step):
    folder, whole = never_stopped
    source = folder / "whole" / f"global_step_{step}"
    resumed = run(
        tmp_path, monkeypatch, "resumed", trainer__resume_mode="resume_path", trainer__resume_from_path=str(source)
    )
    assert sorted(resumed) == list(range(step + 1, 6))
    assert all(numbers(resumed[s]) == numbers(whole[s]) for s in resumed)
    last = [place / "global_step_5" for place in (folder / "whole", tmp_path / "resumed")]
    assert_same_checkpoint(*last)
    states = [json.loads((folder / "trainer.json").read_text()) for folder in last]
    assert states[0]["health"] == states[1]["health"] and states[0]["health"]["steps"] == 5


def test_killed_run_resumes_by_the_same_command(tmp_path, monkeypatch, never_stopped):
    folder, whole = never_stopped
    arguments = overrides(
        make_task(tmp_path / "task", rows=12), **{**PPO, "trainer__default_local_dir": str(tmp_path / "killed")}
    )
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(tmp_path / "killed.jsonl")}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    driver = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tracker = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    wait_for(
        lambda: (tracker.exists() and int(tracker.read_text()) >= 2) or driver.poll() is not None,
        "the second checkpoint",
    )
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    done = run(tmp_path, monkeypatch, "killed")
    assert numbers(done[5]) == numbers(whole[5])
    assert_same_checkpoint(folder / "whole" / "global_step_5", tmp_path / "killed" / "global_step_5")


TWO_RANKS = {
    "trainer__n_gpus_per_node": 2,
    f"{ACTOR}__strategy": "fsdp2",
    f"{ACTOR}__ppo_micro_batch_size_per_gpu": 4,
    "critic__strategy": "fsdp2",
    "critic__ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref__ref__strategy": "fsdp2",
}
EVERYTHING = {
    **PPO,
    **TWO_RANKS,
    f"{ROLLOUT}__mode": "async",
    f"{MODEL}__lora_rank": 4,
    f"{MODEL}__lora_alpha": 8,
    "algorithm__filter_groups__enable": True,
    "algorithm__filter_groups__max_num_gen_batches": 8,
    "trainer__total_training_steps": 3,
}
NOT_OF_THE_RUN = ("timing", "perf/", "rollout/bubble", "rollout/idle", "rollout/waiting", "rollout/engine/")
"""Metrics of clocks and memory, also of servers."""


def assert_resumed_alike(tmp_path, monkeypatch, steps, where=None, **settings):
    """Compare what a run did after step 2 with what a run did that was resumed from there.

    Args:
        where: further settings of the resumed run.
    """
    whole = run(tmp_path, monkeypatch, "whole", **settings)
    path = str(tmp_path / "whole" / "global_step_2")
    resume = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": path, **(where or {})}
    resumed = run(tmp_path, monkeypatch, "resumed", **{**settings, **resume})
    assert sorted(resumed) == list(range(3, steps + 1))
    for step, metrics in resumed.items():
        expected = {name: value for name, value in whole[step].items() if not name.startswith(NOT_OF_THE_RUN)}
        assert {name: metrics.get(name) for name in expected} == expected
    names = [tmp_path / name / f"global_step_{steps}" for name in ("whole", "resumed")]
    for file in checkpoint_files(names[0]):
        assert (names[0] / file).read_bytes() == (names[1] / file).read_bytes(), file


def test_two_ranks_with_critic_adapter_servers_and_a_filter_of_groups_go_on_alike(tmp_path, monkeypatch):
    assert_resumed_alike(tmp_path, monkeypatch, 3, **EVERYTHING)


@pytest.mark.ray
def test_a_run_of_the_local_controller_goes_on_alike_on_ray(tmp_path, monkeypatch):
    ray = {"trainer__controller": "ray"}
    assert_resumed_alike(tmp_path, monkeypatch, 3, ray, **{**PPO, "trainer__total_training_steps": 3})


@pytest.mark.vllm
def test_a_run_with_vllm_goes_on_with_the_same_tokens(tmp_path, monkeypatch):
    grpo = {"algorithm__adv_estimator": "grpo", "algorithm__use_kl_in_reward": False}
    settings = {f"{ROLLOUT}__name": "vllm", "trainer__total_training_steps": 3, **grpo}
    assert_resumed_alike(tmp_path, monkeypatch, 3, **settings)
