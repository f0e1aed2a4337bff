"""Notes outlive the process that wrote them, and one of them is always whole."""

import os
import signal

import pytest

from verl.single_controller.processes import Child
from verl.telemetry.black_box import BOX_VARIABLE, BlackBox, OwnedBox, black_box


@pytest.fixture
def box():
    box = OwnedBox()
    yield box
    box.close()


def test_notes_are_added_removed_and_cleared():
    box = BlackBox()
    assert box.read().facts == {}
    box.note(engine="hf", requests=3)
    box.note(requests=None, phase="sync")
    assert box.read().facts == {"engine": "hf", "phase": "sync"} == box.facts
    box.forget()
    assert box.read().facts == {}


def test_what_is_too_long_is_cut_and_stays_readable():
    box = BlackBox()
    box.note(engine="hf", first_requests=["x" * 5000] * 50)
    assert box.read().facts == {"engine": "hf", "first_requests": ["x" * 80] * 4}


def test_what_a_killed_process_noted_last_is_there(box, monkeypatch):
    monkeypatch.setenv(BOX_VARIABLE, box.address)

    def live():
        for i in range(1000):
            black_box().note(number=i)
        black_box().beat()
        black_box().tick()
        os.kill(os.getpid(), signal.SIGKILL)

    child = Child(live)
    assert child.outcome() == (signal.SIGKILL, None)
    reading = box.read()
    assert reading.facts == {"number": 999} and reading.rss > 1 << 20 and 0 < reading.alive <= reading.progress


@pytest.mark.parametrize(
    "spoil", [lambda a: a[:-1] + ("0" if a[-1] != "0" else "1"), lambda a: "/no/such:00", lambda a: ""]
)
def test_memory_that_is_not_the_drivers_is_never_written_to(box, spoil, monkeypatch):
    monkeypatch.setenv(BOX_VARIABLE, spoil(box.address))
    black_box().note(engine="hf")
    assert black_box().read().facts == {"engine": "hf"} and box.read().facts == {}


def test_a_note_costs_microseconds():
    import time

    box, start = BlackBox(), time.perf_counter()
    for _ in range(1000):
        box.tick()
    assert time.perf_counter() - start < 0.1
