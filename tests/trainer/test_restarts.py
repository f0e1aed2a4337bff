"""A run that lost a process starts again from its newest checkpoint, and never twice into the same failing step."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_for
from verl.config.ppo import PPOConfig
from verl.single_controller.errors import WorkerDied
from verl.trainer.restarts import is_attempt, note_step, run_with_restarts
from verl.utils.exit_codes import StoppedEarly


@pytest.fixture
def attempts(tmp_path):
    """A function that runs attempts, each one of the given actions; returns what each noted, and the exit code."""
    notes = tmp_path / "attempts"

    def of(*actions, max_restarts=5, wait=0.0, resume_mode="disable"):
        keys = {"max_restarts": max_restarts, "restart_wait": wait, "resume_mode": resume_mode}
        keys["default_local_dir"] = str(tmp_path)
        config = PPOConfig().with_values({f"trainer.{key}": value for key, value in keys.items()})

        def attempt(config):
            done = notes.read_text().splitlines() if notes.exists() else []
            with notes.open("a") as file:
                file.write(f"{config.trainer.resume_mode} {is_attempt()}\n")
            actions[min(len(done), len(actions) - 1)]()

        code = 0
        try:
            run_with_restarts(config, attempt)
        except SystemExit as ending:
            code = ending.code
        return notes.read_text().splitlines(), code

    return of


def in_step(step, *actions):
    def act():
        note_step(step)
        for action in actions:
            action()

    return act


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def lose_worker():
    raise WorkerDied("actor", 0, 2, "update_actor", 17, signal.SIGKILL)


def stop():
    raise StoppedEarly


def fail():
    raise ZeroDivisionError


def done():
    pass


def test_a_lost_worker_or_a_killed_driver_is_followed_by_an_attempt(attempts, capfd):
    assert attempts(in_step(3, lose_worker), in_step(4, killed), done) == (["disable True"] * 3, 0)
    said = capfd.readouterr().err
    assert "the run ended with exit code 5 in step 3; restart 1 of 5 from where it began in 0 s" in said
    assert "the run was killed by SIGKILL in step 4; restart 2 of 5" in said


def test_an_attempt_goes_on_from_a_checkpoint_of_this_run_and_of_no_earlier_one(attempts, tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("100")  # of an earlier run
    os.utime(tracker, (1, 1))
    noted, code = attempts(in_step(1, killed), in_step(3, lambda: tracker.write_text("2"), killed), done)
    assert noted == ["disable True", "disable True", "auto True"] and code == 0


@pytest.mark.parametrize("step", [0, 7])
def test_a_step_that_fails_again_ends_the_run(attempts, step, capfd):
    noted, code = attempts(in_step(step, lose_worker))
    assert len(noted) == 2 and code == 5
    assert "for the second time: it is not started again" in capfd.readouterr().err


def test_restarts_are_counted(attempts, capfd):
    noted, code = attempts(*(in_step(step, killed) for step in range(1, 9)), max_restarts=2)
    assert len(noted) == 3 and code == 5 and "trainer.max_restarts=2 is used up" in capfd.readouterr().err


@pytest.mark.parametrize("action, code", [(fail, 1), (stop, 75), (lambda: os._exit(4), 4)])
def test_what_would_come_again_and_what_was_asked_for_is_not_tried_again(attempts, action, code):
    assert attempts(in_step(2, action)) == (["disable True"], code)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_signal_reaches_the_attempt_and_no_other_follows(attempts, tmp_path, is_waiting):
    def send():
        while not (tmp_path / "attempts").exists():
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send).start()
    # neither the attempt nor the wait for the next would end by itself
    action = in_step(2, lose_worker) if is_waiting else in_step(2, lambda: time.sleep(1000))
    assert attempts(action, wait=1000.0) == (["disable True"], 143)


def test_an_attempt_dies_with_its_parent(tmp_path):
    pid = os.fork()
    if pid == 0:
        config = PPOConfig().with_values({"trainer.max_restarts": 1, "trainer.default_local_dir": str(tmp_path)})

        def attempt(config):
            (tmp_path / "pid").write_text(str(os.getpid()))
            time.sleep(60)

        try:
            run_with_restarts(config, attempt)
        finally:
            os._exit(0)
    file = Path(tmp_path / "pid")
    wait_for(lambda: file.exists() and file.read_text(), "the attempt")
    child = int(file.read_text())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not is_running(child), "the attempt to be gone")


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
