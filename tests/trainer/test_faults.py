"""What goes wrong is said, ends the run, and leaves nothing behind."""

import os
import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.support.runs import main_ppo, make_task, overrides
from tests.support.waiting import wait_for

pytestmark = pytest.mark.ranks


def start(arguments, log):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def descendants(pid):
    return psutil.Process(pid).children(recursive=True)


def test_killed_worker_ends_the_run_with_its_name_and_no_process_left(tmp_path):
    # on Ray: tests/single_controller/test_failures.py and tests/faults/test_on_ray.py
    task = make_task(tmp_path / "task")
    arguments = overrides(
        task,
        trainer__controller="local",
        trainer__n_gpus_per_node=2,
        actor_rollout_ref__actor__strategy="fsdp2",
        trainer__total_training_steps=100000,
    )
    with open(tmp_path / "log", "w+") as log:
        driver = start(arguments, log)
        try:
            wait_for(lambda: "step:2" in (tmp_path / "log").read_text() or driver.poll() is not None, "the second step")
            assert driver.poll() is None, (tmp_path / "log").read_text()[-3000:]
            family = descendants(driver.pid)
            worker = next(p for p in reversed(family) if is_worker(p, "local"))
            worker.send_signal(signal.SIGKILL)
            code = driver.wait(timeout=120)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert code == 5
    assert "actor_rollout" in text and re.search("[Rr]ank [01]", text) and "SIGKILL" in text, text[-3000:]
    wait_for(lambda: not [p for p in family if alive(p)], "the workers to be gone", 20)


def is_worker(process, controller):
    """A process that runs ranks: a forked copy of the driver, or one of Ray's actors."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "main_ppo" in command if controller == "local" else "ray::" in command and "IDLE" not in command


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_failing_reward_function_stops_the_run_and_names_the_sample(tmp_path):
    task = make_task(tmp_path / "task")
    (tmp_path / "task" / "reward.py").write_text("def compute_score(**kwargs):\n    return 1 / 0\n")
    result = main_ppo(overrides(task, trainer__total_training_steps=1))
    assert result.returncode == 2  # the self-test: no step has run
    assert "ZeroDivisionError" in result.stderr and "digits" in result.stderr and "on_error" in result.stderr


def mistakes(task, tmp_path):
    """Settings -> the exit code and the last line of what the user should see; 2: known before anything started."""
    broken = tmp_path / "broken"
    shutil.copytree(task["actor_rollout_ref.model.path"], broken)
    weights = load_file(broken / "model.safetensors")
    weights.pop(next(name for name in weights if "q_proj" in name))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    return {
        "trainer.device=cuda": (2, "error: trainer.device=cuda, and this machine has no CUDA device."),
        f"actor_rollout_ref.model.path={tmp_path}": (2, "holds no config.json"),
        f"actor_rollout_ref.model.path={broken}": (4, "actor_rollout.init_model failed on rank 0 of 1: model.path="),
    }


def test_a_mistake_of_the_users_ends_in_its_message_and_not_in_a_traceback(tmp_path):
    task = make_task(tmp_path / "task")
    for setting, (code, message) in mistakes(task, tmp_path).items():
        result = main_ppo([*overrides(task, trainer__total_training_steps=1), setting], CUDA_VISIBLE_DEVICES="")
        assert result.returncode == code
        assert "Traceback" not in result.stderr and message in result.stderr.splitlines()[-1], result.stderr


def test_ctrl_c_saves_the_step_says_how_to_go_on_and_leaves_no_process(tmp_path):
    arguments = overrides(
        make_task(tmp_path / "task"),
        trainer__n_gpus_per_node=2,
        actor_rollout_ref__actor__strategy="fsdp2",
        trainer__total_training_steps=100000,
        trainer__save_freq=100000,
        trainer__default_local_dir=tmp_path / "run",
    )
    with open(tmp_path / "log", "w+") as log:
        driver = start(arguments, log)
        try:
            wait_for(lambda: "step:4" in (tmp_path / "log").read_text() or driver.poll() is not None, "the fourth step")
            family = descendants(driver.pid)
            os.killpg(driver.pid, signal.SIGINT)
            code = driver.wait(timeout=30)
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
    text = (tmp_path / "log").read_text()
    assert code == 75 and "Traceback" not in text, text[-3000:]
    reason, command = "SIGINT was received", r"To go on from .*global_step_\1:\n  bash .*resume.sh\n$"
    assert re.search(rf"Stopped after step (\d+) of 100000: {reason}. {command}", text), text[-3000:]
    assert len(family) >= 2
    wait_for(lambda: not [p for p in family if alive(p)], "the workers to be gone", 20)


def test_misspelt_key_is_refused_with_the_nearest_name():
    result = main_ppo(["actor_rollout_ref.rollout.temprature=0.5"])
    assert result.returncode != 0 and "actor_rollout_ref.rollout.temperature" in result.stderr
