"""A run that must end early finishes its step, saves it and says how to go on; a second signal ends it at once."""

import os
import signal
import threading

import pytest

from tests.support.runs import make_task, overrides, run_job
from verl.config.trainer import TrainerConfig
from verl.telemetry.flight_recorder import FlightRecorder
from verl.trainer.ppo import early_stop
from verl.trainer.ppo.early_stop import EXPIRY_VARIABLES, EarlyStop
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.run_folder import RUN_VARIABLE
from verl.utils.exit_codes import StoppedEarly, exit_code
from verl.utils.process import Terminated


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def run(task, tmp_path):
    given = {"trainer__total_training_steps": 4, "trainer__default_local_dir": str(tmp_path)}
    return lambda **settings: run_job(overrides(task, **{**given, **settings}))


def saved(tmp_path):
    return sorted(int(path.name.rpartition("_")[2]) for path in tmp_path.glob("global_step_*"))


def interrupt(monkeypatch, step, *numbers):
    """Send signals to this process while ``step`` is being scored."""
    real = RayPPOTrainer.score

    def score(trainer, batch):
        assert os.environ[RUN_VARIABLE] == trainer.config.trainer.default_local_dir  # for `verl clean`
        if trainer.global_steps == step:
            for number in numbers:
                signal.raise_signal(number)
        return real(trainer, batch)

    monkeypatch.setattr(RayPPOTrainer, "score", score)


def test_the_first_signal_saves_the_step_and_the_same_command_goes_on(run, tmp_path, monkeypatch, capfd):
    before = signal.getsignal(signal.SIGINT)
    settings = {"trainer__save_freq": 3, "trainer__test_freq": 2, "trainer__logger": "[]"}
    with monkeypatch.context() as patch, pytest.raises(StoppedEarly) as ending:
        interrupt(patch, 2, signal.SIGINT)
        run(**settings)
    text = capfd.readouterr()
    assert ending.value.code == 75 and saved(tmp_path) == [2] and signal.getsignal(signal.SIGINT) is before
    assert RUN_VARIABLE not in os.environ
    assert "SIGINT: the run ends when this step is saved. A second signal ends it at once." in text.err
    assert "Stopped after step 2 of 4: SIGINT was received. To go on from" in text.out
    trainer = run(**settings)
    assert "2 of 4 steps are done" in capfd.readouterr().out and trainer.global_steps == 4
    assert [step for step, _ in trainer.validations] == [4]  # an early end leaves no time to validate


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_a_second_signal_and_the_first_of_a_run_that_saves_nothing_end_it_at_once(run, tmp_path, monkeypatch, numbers):
    interrupt(monkeypatch, 2, *numbers)
    with pytest.raises(Terminated):
        run(trainer__save_freq=-1 if len(numbers) == 1 else 4)
    assert saved(tmp_path) == []


def test_a_signal_in_the_last_step_lets_the_run_be_complete(run, tmp_path, monkeypatch):
    interrupt(monkeypatch, 1, signal.SIGTERM)
    assert run(trainer__save_freq=4, trainer__total_training_steps=1).global_steps == 1 and saved(tmp_path) == [1]


def test_the_end_of_the_time_is_saved_before_even_where_nothing_else_is(run, tmp_path, capfd):
    with pytest.raises(StoppedEarly):
        run(trainer__max_time=0.001)
    assert saved(tmp_path) == [1]
    assert "Stopped after step 1 of 4: trainer.max_time=0.001 s allows no other step." in capfd.readouterr().out


def test_a_stall_that_the_watchdog_has_found_is_not_waited_for(monkeypatch):
    stop = EarlyStop(TrainerConfig(save_freq=1))
    stop.begin_step()
    recorder = FlightRecorder()
    recorder.note(ended="no progress")
    monkeypatch.setattr(early_stop, "flight_recorder", lambda: recorder)
    with stop.signals(), pytest.raises(Terminated) as ending:
        signal.raise_signal(signal.SIGTERM)
    assert exit_code(ending.value) == 5 and stop.reason is None


class Clock:
    """Stands for the module ``time``."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(early_stop, "time", clock := Clock())
    for name in EXPIRY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return clock


def steps_until(stop, clock, seconds=10.0, save_s=0.0):
    """Steps that a run does whose steps take ``seconds``, of which a save takes ``save_s``."""
    for step in range(1, 100):
        stop.begin_step()
        clock.now += seconds - save_s
        if stop.is_due():
            return step
        clock.now += save_s
        stop.saved(save_s)
    return None


def test_max_time_leaves_room_for_the_longest_step_and_the_longest_save(clock):
    assert steps_until(EarlyStop(TrainerConfig()), clock) is None
    # the tenth step is at its save after 98 s, and the eleventh would have saved after 110 s
    assert steps_until(EarlyStop(TrainerConfig(max_time=110.5)), clock, save_s=2.0) == 11
    assert steps_until(EarlyStop(TrainerConfig(max_time=109.5)), clock, save_s=2.0) == 10


def test_an_elastic_instance_is_left_before_its_end(clock, monkeypatch):
    monkeypatch.setenv(EXPIRY_VARIABLES[1], str(clock.now + 200))
    assert steps_until(EarlyStop(TrainerConfig(esi_redundant_time=100)), clock) == 9
    monkeypatch.setenv(EXPIRY_VARIABLES[1], "tomorrow")
    with pytest.raises(ValueError, match="SAGEMAKER.*=tomorrow is not a number"):
        EarlyStop(TrainerConfig())


def test_a_trainer_in_a_thread_leaves_the_signals_alone():
    stop, seen = EarlyStop(TrainerConfig()), []

    def work():
        with stop.signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    before = signal.getsignal(signal.SIGTERM)
    thread.start()
    thread.join()
    assert seen == [before]
