"""Whole runs that defer prompts: they learn, and a resumed or killed run equals the uninterrupted one."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support.learning import check_learned
from tests.support.runs import make_task, overrides, read_metrics
from tests.support.waiting import wait_for
from tests.trainer.buffer import over_sampling_job
from tests.trainer.test_learning import TINY, rewards_of
from tests.trainer.test_resume import assert_same_checkpoint
from verl.checkpoint.rows_file import load_rows

ROLLOUT = "actor_rollout_ref__rollout__"
OVER_SAMPLED = {
    f"{ROLLOUT}mode": "async",
    f"{ROLLOUT}over_sample_rate": 0.5,
    f"{ROLLOUT}max_running_requests": 6,
    f"{ROLLOUT}calculate_log_probs": True,
    "data__max_response_length": 24,
    "trainer__logger": "[file]",
    "trainer__total_training_steps": 5,
    "trainer__save_freq": 1,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,  # two versions of the weights a step
}
PARTIAL = {f"{ROLLOUT}partial_rollout": True, f"{ROLLOUT}max_staleness": 2, f"{ROLLOUT}max_postponements": 3}
CLOCKS = ("timing", "perf/", "rollout/bubble", "rollout/idle", "rollout/waiting")


def arguments(tmp_path, name, **settings):
    """Of a run over twelve prompts: an epoch is three steps, and prompts are deferred from one into the next."""
    task = make_task(tmp_path / "task", rows=12)
    return overrides(task, **{**OVER_SAMPLED, "trainer__default_local_dir": str(tmp_path / name), **settings})


def run(tmp_path, monkeypatch, name, **settings):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / f"{name}.jsonl"))
    over_sampling_job.run(arguments(tmp_path, name, **settings))
    return {row["step"]: row["data"] for row in read_metrics(tmp_path / f"{name}.jsonl")}


def numbers(metrics):
    return {key: value for key, value in metrics.items() if not key.startswith(CLOCKS)}


def buffers(folder):
    """The deferred prompts, as plain values."""
    state = json.loads((folder / "rollout.json").read_text())
    files = [folder / f"rollout_{name}.safetensors" for name in ("back", "fresh")]
    rows = [load_rows(path)[0].non_tensor_batch if path.exists() else {} for path in files]
    return state, [[list(columns.get(name, ())) for name in ("uid", "index")] for columns in rows]


@pytest.mark.parametrize("mode", [{}, PARTIAL], ids=["over_sampled", "partial"])
def test_a_resumed_run_equals_the_run_never_stopped(tmp_path, monkeypatch, mode):
    whole = run(tmp_path, monkeypatch, "whole", **mode)
    source = tmp_path / "whole" / "global_step_3"
    assert bool(buffers(source)[0]["journals"]) == bool(mode)
    resume = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(source)}
    resumed = run(tmp_path, monkeypatch, "resumed", **mode, **resume)
    assert sorted(resumed) == [4, 5]
    assert all(numbers(resumed[step]) == numbers(whole[step]) for step in resumed)
    ends = [tmp_path / name / "global_step_5" for name in ("whole", "resumed")]
    assert_same_checkpoint(*ends)
    assert buffers(ends[0]) == buffers(ends[1])
    if mode:
        assert any(metrics["rollout/staleness/max"] > 0 for metrics in whole.values())
        assert all(metrics["rollout/staleness/max"] <= 2 for metrics in whole.values())


def test_a_killed_run_goes_on_with_the_tokens_it_had(tmp_path, monkeypatch):
    whole = run(tmp_path, monkeypatch, "whole", **PARTIAL)
    command = [
        sys.executable,
        "-m",
        "tests.trainer.buffer.over_sampling_job",
        *arguments(tmp_path, "killed", **PARTIAL),
    ]
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(tmp_path / "killed.jsonl")}
    driver = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    tracker = tmp_path / "killed" / "latest_checkpointed_iteration.txt"
    wait_for(
        lambda: (tracker.exists() and int(tracker.read_text()) >= 2) or driver.poll() is not None,
        "the second checkpoint",
    )
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    resumed = run(tmp_path, monkeypatch, "killed", **PARTIAL)
    assert numbers(resumed[5]) == numbers(whole[5])
    ends = [tmp_path / name / "global_step_5" for name in ("whole", "killed")]
    assert_same_checkpoint(*ends)
    assert buffers(ends[0]) == buffers(ends[1])


def test_remax_compares_with_the_greedy_responses_of_the_prompts_of_the_batch(tmp_path, monkeypatch):
    seen = []

    class Watching(over_sampling_job.InProcessTrainer):
        def rollout(self, prompts):
            batch = super().rollout(prompts)
            seen.append((len(prompts), batch))
            return batch

        def greedy_rewards(self, prompts):
            rewards = super().greedy_rewards(prompts)
            seen.append(dict(zip(prompts.non_tensor_batch["uid"], rewards.tolist(), strict=True)))
            return rewards

    monkeypatch.setattr(over_sampling_job.InProcessJob, "trainer_cls", Watching)
    run(tmp_path, monkeypatch, "remax", algorithm__adv_estimator="remax", trainer__total_training_steps=2)
    for rewards, (started, batch) in zip(seen[::2], seen[1::2], strict=True):
        uids, baselines = batch.non_tensor_batch["uid"], batch.column("reward_baselines").tolist()
        assert started == 6 and len(batch) == 16 and set(uids) == set(rewards) and len(rewards) == 4
        assert all(rewards[uid] == baseline for uid, baseline in zip(uids, baselines, strict=True))


@pytest.mark.learning
def test_grpo_learns_from_partial_rollouts(tmp_path, monkeypatch):
    settings = {
        f"{ROLLOUT}mode": "async",
        f"{ROLLOUT}over_sample_rate": 0.5,
        f"{ROLLOUT}partial_rollout": True,
        f"{ROLLOUT}calculate_log_probs": True,
        f"{ROLLOUT}max_running_requests": 24,
    }
    check_learned("partial rollouts", rewards_of(tmp_path, monkeypatch, **TINY, **settings))
    rows = [row["data"] for row in read_metrics(tmp_path / "metrics.jsonl")]
    stale = [row["rollout/stale_token_share"] for row in rows]
    assert max(stale) > 0 and max(row["rollout/staleness/max"] for row in rows) == 1
    assert sum(row["rollout/tokens_discarded"] for row in rows) == 0
