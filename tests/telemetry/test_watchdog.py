"""A process whose announced work makes no progress is ended; one that goes on, or has nothing to do, lives."""

import os
import signal
import time

from verl.single_controller.processes import Child
from verl.telemetry.flight_recorder import STALLED, OwnedRecorder, Watchdog


def outcome(live):
    """How a child ends that runs ``live(box, dog)``, and what it noted."""
    box = OwnedRecorder()
    child = Child(lambda: live(box, Watchdog(box)))
    try:
        return child.outcome(), box.read().notes
    finally:
        box.close()


def test_work_without_progress_ends_its_process():
    def live(box, dog):
        dog.arm(0.3, lambda waited: f"stuck for {waited:.1f} s")
        time.sleep(30)

    (killed, code), notes = outcome(live)
    assert (killed, code) == (None, STALLED) and notes["ended"].startswith("stuck for 0.")


def test_progress_and_the_end_of_the_work_keep_a_process_alive():
    def live(box, dog):
        dog.arm(0.5, str)
        for _ in range(12):
            time.sleep(0.1)
            box.tick()
        dog.disarm()
        time.sleep(1.5)  # nothing is announced, and no timer is left: one would fire after 2 * 0.5 + 1 s
        dog.arm(0, str)
        time.sleep(1)

    assert outcome(live) == ((None, 0), {})


def test_the_driver_is_asked_to_end_first():
    def live(box, dog):
        Watchdog(box, is_driver=True).arm(0.2, str)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
        time.sleep(30)

    assert outcome(live)[0] == (None, 3)


def test_a_process_shows_that_it_lives():
    box = OwnedRecorder()
    Watchdog(box).start()
    first = box.read().alive
    time.sleep(1.3)
    assert box.read().alive > first > 0 and box.read().rss > 0
