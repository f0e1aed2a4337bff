"""What a user sees of an error: the sentence where verl foresaw it, the traceback where it did not."""

import pickle
import sys

import pytest

from verl.config.compose import compose
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerError
from verl.utils.import_utils import load_class_from_fqn, load_extern_type
from verl.utils.process import Terminated, explanation, plain_ending


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
