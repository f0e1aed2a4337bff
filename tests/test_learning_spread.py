"""The bounds of the learning tests leave room for other seeds and other CPUs."""

import json
from pathlib import Path

import pytest

from tests.support.learning import BOUNDS

ROWS = json.loads((Path(__file__).parent / "learning-spread.json").read_text())
RUNS = sorted({row["run"] for row in ROWS})


@pytest.mark.parametrize("name", RUNS)
def test_every_measured_run_is_within_its_bound_with_a_margin(name):
    """A tenth of the way from the one bound to the other."""
    rows, bound = [row for row in ROWS if row["run"] == name], BOUNDS[name]
    room = (bound.last - bound.first) / 10
    assert max(row["first"] for row in rows) < bound.first
    assert min(row["last"] for row in rows) > bound.last + room


def test_the_reward_of_none_behind_lies_within_the_spread_of_two_steps_behind():
    none, two = ([row["last"] for row in ROWS if row["run"] == f"{behind} steps behind"] for behind in (0, 2))
    assert len(none) >= 4 and len(two) >= 4
    assert min(two) <= sum(none) / len(none) <= max(two)
