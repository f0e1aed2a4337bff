"""Weights are gathered one ahead of their use, over any ranks."""

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from verl.workers.engine.gather import one_ahead, start_adding, start_gathering


def scripted(events, count):
    """Weights 0, 1, ... whose starts and waits are noted."""

    def start(number):
        events.append(f"start {number}")

        def wait():
            events.append(f"wait {number}")
            return torch.tensor(number)

        return wait

    return ((str(number), lambda number=number: start(number)) for number in range(count))


def test_the_next_weight_is_under_way_while_one_is_used_and_no_third():
    events = []
    for name, tensor in one_ahead(scripted(events, 3)):
        assert int(tensor) == int(name)
        events.append(f"use {name}")
    assert events == [
        *("start 0", "start 1", "wait 0", "use 0"),
        *("start 2", "wait 1", "use 1"),
        *("wait 2", "use 2"),
    ]


def test_a_caller_that_gives_up_leaves_nothing_under_way():
    for taken in range(1, 4):
        events = []
        weights = one_ahead(scripted(events, 3))
        for _ in range(taken):
            next(weights)
        weights.close()
        assert {e.split()[1] for e in events if e.startswith("start")} == {
            e.split()[1] for e in events if e.startswith("wait")
        }
    assert list(one_ahead(scripted([], 0))) == []


def _joined():
    rank = dist.get_rank()
    starts = {
        "rows": lambda: start_gathering(torch.full((2, 3), rank), None),
        "sums": lambda: start_adding(torch.full((4,), rank + 1.0)),
    }
    return dict(one_ahead(starts.items()))


def test_slices_are_joined_and_sums_are_of_all_ranks():
    for found in run_ranks(2, _joined):
        assert found["rows"].tolist() == [[0] * 3] * 2 + [[1] * 3] * 2
        assert found["sums"].tolist() == [3.0] * 4
