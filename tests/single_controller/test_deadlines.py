"""Deadlines follow what calls took, count from the last progress, and not while the driver itself was stopped."""

import pytest

from verl.config.trainer import DeadlinesConfig
from verl.single_controller import deadlines
from verl.single_controller.deadlines import CLASSES, Deadlines, Wait, class_of


class Clock:
    """Stands for the module ``time``."""

    now = 5000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(deadlines, "time", clock := Clock())
    return clock


def begin(limits=None, method="update_actor", progress=lambda rank: 0.0, **options):
    limits = limits if limits is not None else Deadlines()
    known = {"progress": progress, "pid": lambda rank: None, "describe": lambda rank: f"of rank {rank}"}
    return Wait(limits, "actor", method, 2, **known, **options)


def seconds_until_stop(wait, clock, most=30_000):
    start = clock.now
    while clock.now - start < most:
        clock.now += min(5.0, max(wait.slice_s, 0.001))
        if why := wait.reason_to_stop([1]):
            return round(clock.now - start), why
    return None, None


def test_every_class_has_its_option():
    assert [name for name in DeadlinesConfig() if name != "_target_"] == list(CLASSES)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("init_model", "load"), ("generate_sequences", "generate"), ("compute_ref_log_prob", "score"),
        ("update_critic", "update"), ("receive_weights", "sync"), ("finish_saving", "save"), ("my_method", "other"),
    ],
)  # fmt: skip
def test_a_method_has_a_class(method, name):
    assert class_of(method) == name


def test_the_limit_is_measured_unless_it_is_given(clock):
    limits = Deadlines()
    assert limits.limit("actor", "update_actor") == 7200
    limits.answered("actor", "update_actor", 30.0)
    limits.answered("actor", "update_actor", 10.0)
    assert limits.limit("actor", "update_actor") == 1800
    limits.answered("actor", "update_actor", 600.0)
    assert limits.limit("actor", "update_actor") == 12000 and limits.limit("critic", "update_actor") == 7200
    limits.seconds = {"update": 50.0, "save": 0}
    assert limits.limit("actor", "update_actor") == 50 and limits.limit("actor", "save_checkpoint") is None


def test_a_wait_ends_at_its_limit_with_the_option_that_sets_it(clock):
    seconds, why = seconds_until_stop(begin(Deadlines({"update": 100.0})), clock)
    assert seconds == 100
    assert why == "and made no progress for 100.0 s, which is more than trainer.deadlines.update allows"
    assert seconds_until_stop(begin(Deadlines({"update": 0})), clock) == (None, None)
    assert seconds_until_stop(begin(timeout=12.0), clock)[0] == 12


def test_calls_that_are_answered_first_have_their_time_too(clock):
    limits = Deadlines({"generate": 300.0, "other": 100.0})
    ahead = [("rollout", "generate_sequences")]
    assert seconds_until_stop(begin(limits, "rollout_metrics", ahead=ahead), clock)[0] == 400


def test_time_counts_from_the_last_progress(clock):
    start = clock.now
    wait = begin(Deadlines({"update": 100.0}), progress=lambda rank: min(clock.now, start + 1000))
    assert seconds_until_stop(wait, clock)[0] == 1100


def test_a_driver_that_was_stopped_itself_blames_nobody(clock):
    wait = begin(Deadlines({"update": 100.0}))
    clock.now += 5000
    assert wait.reason_to_stop([1]) is None and wait.waited == 10


def test_a_long_wait_is_said_once_in_a_while_with_its_subject(clock, capfd):
    limits = Deadlines()
    limits.answered("actor", "update_actor", 20.0)
    wait = begin(limits)
    for _ in range(50):
        clock.now += 5
        assert wait.reason_to_stop([1]) is None
    warnings = capfd.readouterr().err.split("warning: ")[1:]
    assert len(warnings) == 2  # after 100 and 200 seconds
    first = "waits in actor.update_actor for rank 1 of 2 for 100 s, the last 100 s without progress; the longest before"
    assert first in warnings[0] and "took 20.0 s, the run ends after 1800 s without progress" in warnings[0]
    assert "trainer.deadlines.update" in warnings[0] and "Rank 1:\nof rank 1\n" in warnings[0]
