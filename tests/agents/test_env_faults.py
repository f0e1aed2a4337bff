"""Runs in environments that fail: the others train, the share that may fail is held, and nothing is left of a run."""

import json

import pytest

from tests.support.runs import overrides, run_job
from tests.trainer.test_faults import alive, descendants, start, wait_for
from verl.utils.tiny_model import make_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"
ENVIRONMENT = '''
import ctypes
import os
import time
from pathlib import Path


class Faulty:
    """Does what `how` says where the seed is a multiple of `every`, in whichever process; counts its episodes."""

    def __init__(self, how, every=1, log=None):
        self.how, self.every, self.log = how, every, log

    def reset(self, *, seed):
        self.fails, self.turn = seed // 2 % self.every == 0, 0
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{os.getpid()} {self.fails}\\n")
        return "go", {}

    def step(self, action):
        self.turn += 1
        if self.fails and self.how == "exit":
            os._exit(3)
        if self.fails and self.how == "exit_in_c":
            ctypes.CDLL(None)._exit(3)
        if self.how == "sleep":
            time.sleep(1000)
        if self.fails and self.how == "raise":
            raise KeyError("no such cell")
        return "go", len(action) / 8, self.turn == 2, False, {"success": True}
'''


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Command-line words of a run whose one environment fails."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faulty.py").write_text(ENVIRONMENT)
    make_tiny_model(tmp_path / "model", family="qwen2", size="tiny", seed=1)

    def make(how, every=1, **settings):
        kwargs = f"{{how: {how}, every: {every}, log: {tmp_path}/episodes}}"
        limits = "max_steps: 2, max_tokens_per_step: 4"
        task = {
            "actor_rollout_ref.model.path": str(tmp_path / "model"),
            "env.train.tags": "[Faulty]",
            "env.train.n_groups": 8,
            "env.val.tags": "[]",
            "env.registry": f"{{Faulty: {{type: '{tmp_path}/faulty.py:Faulty', {limits}, kwargs: {kwargs}}}}}",
            "trainer.total_training_steps": 2,
            "trainer.default_local_dir": str(tmp_path / "run"),
            "trainer.rollout_data_dir": str(tmp_path / "samples"),
            "data.train_batch_size": 8,
        }
        return overrides(task, **settings)

    return make


@pytest.mark.parametrize("how", ["exit", "exit_in_c"])
def test_episodes_whose_environment_ends_its_process_are_left_out_and_the_others_train(words, tmp_path, how):
    trainer = run_job(words(how, every=4, env__num_workers=1, env__max_error_share=0.95, env__max_retries=4))
    rows = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    failed = [row for row in rows if row["score"] is None or row.get("status") == "error"]
    fates = [line.split()[1] for line in (tmp_path / "episodes").read_text().splitlines()]
    assert 0 < len(failed) < 32 and "True" in fates
    assert trainer.metrics["env/Faulty/success"] == 1.0
    assert 0 < trainer.metrics["env/Faulty/error"] < 1


def test_a_run_in_which_too_many_fail_ends_with_the_cause(words):
    with pytest.raises(Exception, match=r"environment 'Faulty': step failed, raised: KeyError: 'no such cell'"):
        run_job(words("raise", every=1))


@pytest.mark.ranks
def test_a_killed_driver_leaves_no_environment(words, tmp_path):
    with open(tmp_path / "log", "w") as log:
        driver = start(words("sleep", env__num_workers=2, env__step_timeout=600), log)
    family = []
    try:
        wait_for(lambda: (tmp_path / "episodes").exists() or driver.poll() is not None, "an episode")
        assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
        family = [process for process in descendants(driver.pid) if "verl.envs.worker" in " ".join(process.cmdline())]
        assert len(family) >= 2
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(alive(process) for process in family), "the environments to be gone", 20)
