"""Notes outlive the process that wrote them, and one of them is always whole."""

import os
import signal

import pytest

from verl.single_controller.processes import Child
from verl.telemetry.flight_recorder import RECORDER_VARIABLE, FlightRecorder, OwnedRecorder, flight_recorder


@pytest.fixture
def box():
    box = OwnedRecorder()
    yield box
    box.close()


def test_notes_are_added_removed_and_cleared():
    box = FlightRecorder()
    assert box.read().notes == {}
    box.note(engine="hf", requests=3)
    box.note(requests=None, phase="sync")
    assert box.read().notes == {"engine": "hf", "phase": "sync"} == box.notes
    box.forget()
    assert box.read().notes == {}


def test_what_is_too_long_is_cut_and_stays_readable():
    box = FlightRecorder()
    box.note(engine="hf", first_requests=["x" * 5000] * 50)
    assert box.read().notes == {"engine": "hf", "first_requests": ["x" * 80] * 4}


def test_what_a_killed_process_noted_last_is_there(box, monkeypatch):
    monkeypatch.setenv(RECORDER_VARIABLE, box.address)

    def live():
        for i in range(1000):
            flight_recorder().note(number=i)
        flight_recorder().beat()
        flight_recorder().tick()
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(live)
    assert child.outcome() == (signal.SIGKILL, None)
    reading = box.read()
    assert reading.notes == {"number": 999} and reading.rss > 1 << 20 and 0 < reading.alive <= reading.progress


@pytest.mark.parametrize(
    "spoil", [lambda a: a[:-1] + ("0" if a[-1] != "0" else "1"), lambda a: "/no/such:00", lambda a: ""]
)
def test_memory_that_is_not_the_drivers_is_never_written_to(box, spoil, monkeypatch):
    monkeypatch.setenv(RECORDER_VARIABLE, spoil(box.address))
    flight_recorder().note(engine="hf")
    assert flight_recorder().read().notes == {"engine": "hf"} and box.read().notes == {}
