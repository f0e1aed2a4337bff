"""A sample of the faults on Ray, where a process is an actor of the cluster."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from tests.faults.harness import APART, SMALL
from tests.support.runs import make_task, overrides, run_job
from verl.single_controller import get_controller
from verl.trainer.ppo import job as job_module
from verl.trainer.ppo.placement import Role
from verl.utils.exit_codes import ExitCode, exit_code
from verl.utils.process import explanation
from verl.workers.disjoint import ActorWorker, RolloutWorker

pytestmark = pytest.mark.ray

MARK = "VERL_TEST_MARK"


class DyingRollout(RolloutWorker):
    """Killed when it is to generate the batch of the second step, once: its successor finds the mark."""

    def newest_version(self, meta):
        mark = Path(os.environ[MARK])
        if meta.get("global_steps") == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().newest_version(meta)


def test_a_rollout_that_dies_is_started_again_in_the_same_place(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    monkeypatch.setattr(
        job_module, "default_roles", lambda config: {Role.Actor: ActorWorker, Role.Rollout: DyingRollout}
    )
    settings = {**SMALL, **APART, "trainer__controller": "ray"}
    trainer = run_job(overrides(make_task(tmp_path / "task"), **settings))
    assert (tmp_path / "mark").exists() and trainer.global_steps == 2 and trainer.buffer.engine.restart_seconds > 0
    assert "the rollout is started again" in capfd.readouterr().out


def test_a_cluster_that_does_not_start_has_its_class_and_the_way_out(monkeypatch):
    def fails(**options):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", fails)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    controller = get_controller("ray")
    with pytest.raises(RuntimeError, match="timed out during startup") as caught:
        controller.start()
    assert exit_code(caught.value) is ExitCode.WORKER
    text = explanation(caught.value)
    assert "trainer.controller=local" in text and "ray_init.num_cpus" in text


def test_a_raylet_that_is_killed_ends_the_run_with_its_class_and_no_process(tmp_path):
    settings = {**SMALL, "trainer__controller": "ray", "trainer__total_training_steps": 5000}
    words = overrides(make_task(tmp_path / "task"), **settings, trainer__default_local_dir=tmp_path / "run")
    command = [sys.executable, "-u", "-m", "verl.trainer.main_ppo", *words, "trainer.logger=[console]"]
    sooner = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "2"}
    env = {**os.environ, **sooner, "RAY_health_check_timeout_ms": "3000"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as run:
        lines, started = [], []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("step:2 "):
                started = psutil.Process(run.pid).children(recursive=True)
                (raylet,) = (process for process in started if process.name() == "raylet")
                raylet.kill()
    # actors talk to each other without it until its heartbeats are missed
    text = "".join(lines)
    assert started and run.returncode == ExitCode.WORKER, text[-3000:]
    assert "died while running" in text and "its node was lost, 127.0.0.1" in text and "exit code 5" in text
    assert not psutil.wait_procs(started, timeout=20)[1]
