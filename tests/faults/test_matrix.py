"""Each fault at each stage ends the run with its class, its place and its words, and leaves nothing."""

import errno
import os
import re
import signal
import threading

import pytest
import torch

import verl.trainer.ppo.job  # noqa: F401 - imported once, for all forks
from tests.faults.harness import (
    Ending,
    Strike,
    by,
    config_of,
    hangs,
    leaves,
    outgrows_its_limit,
    raises,
    run_cell,
)
from tests.support.runs import make_task
from verl.checkpoint import checkpoint_manager, run_state
from verl.trainer.ppo import run_log
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.exit_codes import ExitCode
from verl.workers.disjoint import ActorWorker, RolloutWorker
from verl.workers.engine.local import LocalEngine

pytestmark = pytest.mark.ranks

KILLED = by(signal.SIGKILL)
CODE = ExitCode


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def ending(task, tmp_path):
    def of(strike: Strike, **settings) -> Ending:
        ending = run_cell(config_of(task, tmp_path, **settings), tmp_path, strike)
        assert ending.strikes >= 1, f"the fault did not strike\n{ending.text[-3000:]}"
        assert not ending.left, ending.left
        return ending

    return of


def validating(worker, data, *args, **kwargs):
    return bool(data.meta_info.get("validate"))


DIED = {
    "start": (ActorWorker, "__init__", "actor.__init__"),
    "load": (RolloutWorker, "init_model", "rollout.init_model"),
    "log-prob": (ActorWorker, "compute_log_prob", "actor.compute_log_prob"),
    "update": (ActorWorker, "update_actor", "actor.update_actor"),
    "save": (ActorWorker, "save_checkpoint", "actor.save_checkpoint"),
}


@pytest.mark.parametrize("stage", DIED)
def test_a_worker_that_is_killed_is_named_with_the_call_it_was_in(ending, stage):
    owner, name, where = DIED[stage]
    ended = ending(Strike(owner, name, KILLED), apart=True, save_freq=1)
    assert ended.code == CODE.WORKER and f"died while running {where}" in ended.text and "SIGKILL" in ended.text


WORKER_FAULTS = {
    "SIGTERM": (by(signal.SIGTERM), CODE.WORKER, "killed by SIGTERM (15)"),
    "exit(0)": (leaves, CODE.WORKER, "left with exit code 0"),
    "an exception": (
        raises(RuntimeError("no such kernel")),
        CODE.UNEXPECTED,
        "actor.update_actor failed on",
    ),
    "no memory": (raises(MemoryError("for gradients")), CODE.MEMORY, "MemoryError: for gradients"),
    "more memory than its limit": (outgrows_its_limit, CODE.MEMORY, "out of memory"),
    "no finite numbers": (raises(FloatingPointError("grad_norm is nan")), CODE.UNHEALTHY, "grad_norm is nan"),
}


@pytest.mark.parametrize("fault", WORKER_FAULTS)
def test_a_fault_of_an_update_has_its_class(ending, fault):
    action, code, words = WORKER_FAULTS[fault]
    ended = ending(Strike(ActorWorker, "update_actor", action), apart=True)
    assert ended.code == code and words in ended.text, ended.text[-2000:]


@pytest.mark.parametrize("fault", ["stopped", "hanging"])
def test_a_worker_that_does_not_answer_is_named_at_its_deadline_with_its_samples(ending, fault):
    action = {"stopped": by(signal.SIGSTOP), "hanging": hangs}[fault]
    # of updates alone: the only one of the run is the one that never answers, so no load of the machine is too slow
    ended = ending(Strike(LocalEngine, "_run_backward", action), apart=True, **{"deadlines.update": 2.0})
    assert ended.code == CODE.WORKER and "actor.update_actor: rank 0 of 1 did not answer" in ended.text
    assert ("SIGSTOP" if fault == "stopped" else "harness.py") in ended.text
    assert re.search(r"micro-batch 1 of 1: 4 rows, the first of them \S+-\d, \S+-\d", ended.text), ended.text


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
DRIVER_FAULTS = {
    "killed in an update": (RayPPOTrainer, "improve", KILLED, -signal.SIGKILL, ""),
    "killed in a rollout": (RayPPOTrainer, "rollout", KILLED, -signal.SIGKILL, ""),
    "an exception in advantages": (
        RayPPOTrainer,
        "estimate_advantages",
        raises(KeyError("uid")),
        CODE.UNEXPECTED,
        "uid",
    ),
    "SIGTERM without checkpoints": (RayPPOTrainer, "rollout", by(signal.SIGTERM), CODE.TERMINATED, ""),
    "no memory in rewards": (RayPPOTrainer, "score", raises(MemoryError()), CODE.MEMORY, "out of memory"),
    "a full disk in a save": (run_state, "save_options", raises(NO_SPACE), CODE.CHECKPOINT, "No space left on device"),
    "a full disk in torch": (torch, "save", raises(NO_SPACE), CODE.CHECKPOINT, "its disk has"),
}


@pytest.mark.parametrize("fault", DRIVER_FAULTS)
def test_a_fault_of_the_driver_has_its_class(ending, fault):
    owner, name, action, code, words = DRIVER_FAULTS[fault]
    ended = ending(Strike(owner, name, action), apart="killed" in fault, save_freq=1 if "disk" in fault else -1)
    assert ended.code == code and words in ended.text, ended.text[-2000:]


def test_a_disk_that_is_full_behind_training_ends_the_run(task, tmp_path):
    config = config_of(task, tmp_path, save_freq=1).with_values({"actor_rollout_ref.actor.checkpoint.async_save": True})
    ended = run_cell(config, tmp_path, Strike(checkpoint_manager, "write_file", raises(NO_SPACE)))
    assert ended.code == CODE.CHECKPOINT and ended.strikes == 1 and not ended.left, ended.text[-2000:]
    assert "No space left on device" in ended.text and not (tmp_path / "run/latest_checkpointed_iteration.txt").exists()


def test_a_disk_that_is_full_of_samples_ends_the_run(task, tmp_path):
    samples = tmp_path / "samples"
    samples.mkdir()

    def fill():
        (samples / f"1.jsonl.{os.getpid()}-{threading.get_ident()}.part").symlink_to("/dev/full")

    ended = run_cell(
        config_of(task, tmp_path, rollout_data_dir=str(samples)), tmp_path, Strike(run_log, "_write_samples", fill)
    )
    assert ended.code == CODE.CHECKPOINT and not ended.left, ended.text[-2000:]
    assert "keep no samples: trainer.rollout_data_dir=null" in ended.text


HANGING = """
import os, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if extra_info["index"] >= 0 and not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        time.sleep(1000)
    return 1.0
"""


def test_a_reward_that_hangs_ends_the_run_with_the_sample(task, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGING.format(mark=str(tmp_path / "struck")))
    config = config_of(task, tmp_path).with_values(
        {
            "custom_reward_function.path": str(tmp_path / "hangs.py"),
            "reward_model.sandbox.timeout_s": 2.0,
        }
    )
    ended = run_cell(config, tmp_path, None)
    assert (tmp_path / "struck").exists() and ended.code == CODE.DATA and not ended.left, ended.text[-2000:]
    assert "it was under way for 2 s" in ended.text and "index=" in ended.text
