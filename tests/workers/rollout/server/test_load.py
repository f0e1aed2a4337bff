"""The bubble of a step in closed form."""

import pytest

from verl.workers.rollout.monitor import Span, occupancy


def test_two_replicas_of_which_one_waits_for_the_tail_of_the_other():
    spans = [Span("a", 0, 0, 10), Span("a", 0, 2, 4), Span("b", 0, 0, 4)]
    metrics = occupancy(spans, num_replicas=2)
    assert metrics["rollout/bubble_share"] == pytest.approx(6 / 20)  # b has nothing to do from 4 to 10
    assert metrics["rollout/idle_slot_share"] == pytest.approx(1 - 16 / 30)  # three slots of ten seconds
    assert metrics["rollout/waiting_s/mean"] == pytest.approx(2 / 3) and metrics["rollout/waiting_s/max"] == 2


def test_a_replica_without_any_request_is_idle_all_the_time():
    assert occupancy([Span("a", 0, 0, 5)], 2)["rollout/bubble_share"] == 0.5


def test_requests_one_after_the_other_leave_no_bubble():
    metrics = occupancy([Span("a", 0, 0, 1), Span("a", 0, 1, 3)], 1)
    assert metrics["rollout/bubble_share"] == metrics["rollout/idle_slot_share"] == 0


def test_nothing_generated_measures_nothing():
    assert occupancy([], 3) == {}
