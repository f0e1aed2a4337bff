"""The tables of benchmarks/README.md say what the saved results say; ratios to others are of equal work."""

from importlib.metadata import version
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import HERE, UnequalWork, compared, step_costs
from benchmarks.peers.environments import requirements
from benchmarks.table import methods, peers, table

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("made", [table, peers, methods])
def test_the_tables_of_benchmarks_are_those_of_the_saved_results(made):
    assert made() in (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8"), "python -m benchmarks.table"


def test_a_ratio_needs_equal_counts():
    costs = {HERE: 2.0, "trl": 5.0}
    counts = [[1, 700, 64], [2, 720, 64]]
    assert compared("step", "work", "CPU s", costs, {HERE: counts, "trl": counts})["ratio"] == {"trl": 2.5}
    with pytest.raises(UnequalWork, match="trl"):
        compared("step", "work", "CPU s", costs, {HERE: counts, "trl": [[1, 700, 64], [2, 719, 64]]})


def test_sums_of_results_may_differ_by_the_order_of_additions():
    costs = {HERE: 2.0, "verl": 5.0}
    assert compared("GAE", "work", "CPU ms", costs, {HERE: 562036.4, "verl": 562036.5})["ratio"] == {"verl": 2.5}
    with pytest.raises(UnequalWork):
        compared("GAE", "work", "CPU ms", costs, {HERE: 562036.4, "verl": 561036.4})


def test_the_first_step_counts_from_the_start_of_the_command_and_others_from_the_step_before():
    marks = [
        {"step": n, "cpu_s": cpu, "tokens": 100, "response_tokens": 64, "entropy": 4.6}
        for n, cpu in ((1, 7.0), (2, 9.0), (3, 10.5))
    ]
    costs = step_costs(marks)
    assert (costs["first_step_cpu_s"], costs["step_cpu_s"], costs["step_cpu_ms_a_token"]) == (7.0, 1.5, 15.0)


@pytest.mark.parametrize("peer", ["trl", "verl"])
def test_an_environment_of_a_peer_has_the_torch_of_this_one_build_included(peer):
    assert f"torch=={version('torch')}" in requirements(peer, "1.0")
