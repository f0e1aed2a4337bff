"""What a user sees of an error: the sentence where verl foresaw it, the traceback where it did not."""

import errno
import pickle
import sys
from pathlib import Path

import pytest
import torch

from verl.checkpoint.run_state import step_of
from verl.config.base import ConfigError
from verl.config.compose import compose
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.rewards.managers.rule import RewardError
from verl.single_controller.errors import WorkerDied, WorkerError, WorkerGroupStopped, WorkerTimeout
from verl.utils.exit_codes import ExitCode, StoppedEarly, exit_code
from verl.utils.import_utils import load_class_from_fqn, load_extern_type
from verl.utils.process import Terminated, explanation, plain_ending
from verl.workers.rollout.server.engine_loop import EngineDied


def caught(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        return error


def test_a_package_that_is_not_there_points_to_the_environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "hydra", None)
    message = explanation(caught(compose, [], [], "ppo_trainer", PPOConfig))
    assert "hydra" in message and sys.executable in message and "setup_env.sh" in message


def failing(error):
    raise error


def test_what_verl_raises_explains_itself():
    assert "is not a dotted name" in explanation(caught(load_class_from_fqn, "nodots"))


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(caught(failing, ValueError("of a user's file")), id="raised elsewhere"),
        pytest.param(caught(load_extern_type, "pkg://no.such.module", "x"), id="raised by Python below verl"),
        pytest.param(caught(load_class_from_fqn, None), id="an operation of verl's that failed"),
        pytest.param(caught(DataProto.concat, []), id="a broken assert"),
    ],
)
def test_what_verl_did_not_foresee_has_no_explanation(error):
    assert explanation(error) is None


def test_an_error_of_a_worker_gives_the_explanation_of_the_worker():
    where = ("critic", 1, 2, "init_model", "ValueError: bad", "Traceback ...")
    assert explanation(caught(failing, WorkerError(*where))) is None
    error = pickle.loads(pickle.dumps(WorkerError(*where, "model.path=x is bad: give another")))
    assert explanation(error) == "critic.init_model failed on rank 1 of 2: model.path=x is bad: give another"


def test_a_program_ends_with_the_message_and_a_code(capsys, monkeypatch):
    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)
    with pytest.raises(SystemExit) as ending, plain_ending():
        load_class_from_fqn("nodots")
    assert ending.value.code == 1
    assert capsys.readouterr().err == "error: class='nodots' is not a dotted name: write it as package.module.nodots.\n"


def test_tracebacks_are_there_for_the_asking_and_where_nothing_was_foreseen(monkeypatch):
    with pytest.raises(ZeroDivisionError), plain_ending():
        failing(ZeroDivisionError())
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "debug")
    with pytest.raises(ValueError), plain_ending():
        load_class_from_fqn("nodots")


@pytest.mark.parametrize("stop, code", [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_ends_a_program_without_a_word(capsys, stop, code):
    with pytest.raises(SystemExit) as ending, plain_ending():
        raise stop
    assert ending.value.code == code and capsys.readouterr() == ("", "")


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught_error:
        return caught_error


WHERE = ("actor", 1, 2, "update_actor")
NOT_READ = caught(step_of, Path("/nowhere/step"))
DIED = WorkerDied(*WHERE, 17, 9, report="The kernel killed 1 processes for lack of memory since this group started.")


@pytest.mark.parametrize(
    "error, code",
    [
        (ConfigError(["actor.lr is 0"]), ExitCode.CONFIGURATION),
        (RewardError("no number"), ExitCode.DATA),
        (NOT_READ, ExitCode.CHECKPOINT),
        (OSError(errno.ENOSPC, "No space left on device"), ExitCode.CHECKPOINT),
        (WorkerDied(*WHERE, 17, 9), ExitCode.WORKER),
        (WorkerTimeout("actor", "update_actor", [1], 2, 3.0), ExitCode.WORKER),
        (pickle.loads(pickle.dumps(DIED)), ExitCode.MEMORY),
        (MemoryError(), ExitCode.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.MEMORY),
        (FloatingPointError("grad_norm is NaN"), ExitCode.UNHEALTHY),
        (raised(RuntimeError("no answer"), EngineDied("its thread ended")), ExitCode.WORKER),
        (raised(WorkerGroupStopped("stopped"), RewardError("no number")), ExitCode.DATA),
        (caught(failing, ZeroDivisionError()), ExitCode.UNEXPECTED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_has_the_exit_code_of_its_class_also_as_that_of_a_worker(error, code):
    assert exit_code(error) is code
    sent = pickle.loads(pickle.dumps(WorkerError(*WHERE, "x", "Traceback ...", exit_class=exit_code(error))))
    assert exit_code(sent) is code


def test_an_error_with_a_class_of_its_own_leaves_with_its_traceback_its_class_and_its_code(capsys):
    with pytest.raises(SystemExit) as ending, plain_ending():
        failing(OSError(errno.ENOSPC, "No space left on device"))
    assert ending.value.code == 4
    text = capsys.readouterr().err
    assert "Traceback" in text and text.endswith("exit code 4: checkpoint, model files or disk\n")


def test_a_run_that_saved_and_stopped_says_so_by_its_exit_code():
    with pytest.raises(SystemExit) as ending, plain_ending():
        raise StoppedEarly
    assert ending.value.code == 75
