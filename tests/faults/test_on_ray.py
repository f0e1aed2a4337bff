"""A sample of the faults on Ray, where a process is an actor of the cluster."""

import os
import signal
from pathlib import Path

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
