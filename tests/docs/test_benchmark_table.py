"""The tables of benchmarks and of docs say what the saved results say; ratios to others are of equal work."""

import json
import re
from importlib.metadata import version

import pytest

from benchmarks import measure
from benchmarks.measure import work_words
from benchmarks.peers.__main__ import HERE, RAY, compared, function_row, step_costs
from benchmarks.peers.environments import requirements
from benchmarks.render import conditions, grid
from benchmarks.table import ROOT, TABLES, between_marks


@pytest.mark.parametrize("name", TABLES)
def test_a_table_says_what_its_saved_results_say(name):
    document, made = TABLES[name]
    (found,) = between_marks(name).findall((ROOT / document).read_text(encoding="utf-8"))
    assert found[1] == f"{made()}\n", "python -m benchmarks.table --readme"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_changes_with_the_numbers_of_its_results(name, tmp_path, monkeypatch):
    def changed(value):
        if isinstance(value, dict):
            return {key: changed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [changed(one) for one in value]
        return 1.7 * value if isinstance(value, float) else value

    _, made = TABLES[name]
    before = made()
    for path in measure.RESULTS.glob("*.json"):
        if path.stem != "families":
            (tmp_path / path.name).write_text(json.dumps(changed(json.loads(path.read_text()))))
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert before.startswith("Not measured") or made() != before


@pytest.mark.parametrize("name", TABLES)
def test_what_was_not_measured_is_said(name, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert "ot measured" in TABLES[name][1]()


def test_every_table_between_marks_is_known():
    documents = [*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md"]
    marks = re.compile(r"<!-- (\w+): python -m benchmarks.table --readme -->")
    found = {name: str(path.relative_to(ROOT)) for path in documents for name in marks.findall(path.read_text("utf-8"))}
    assert found == {name: document for name, (document, _) in TABLES.items()}


def test_engines_seeds_and_processes_of_a_saved_run_are_shown(tmp_path, monkeypatch):
    speeds = {f"{count}_sequences": {"tokens_a_second": 100.0 * count} for count in (1, 16, 64)}
    sync = {"sync_over_fresh_copy": 1.25, "sync_awake_over_copy": 1.75, "sync_over_copy": 1.75}
    engine = {"engine": "vllm", "dtype": "bfloat16", "actor_dtype": "float32", "work": "a model"}
    seeds = {"what": "seeds", "engine": "vllm", "dtype": "bfloat16", "rows": 64, "work": "64 rows"}
    seeds |= {"unseeded_cpu_ms_a_token": 0.5, "seeded_cpu_ms_a_token": 0.6, "over_unseeded": 0.2}
    ranks = [
        {"controller": "ray", "process": f"actor {i} (pid {i})", "work": "9 steps", "MiB": [1.0, 2.0], "KiB_a_step": i}
        for i in range(2)
    ]
    about = {"load": [1.0, 1.5], "cores": 2, "versions": {"torch": "2.13.0"}}
    for name, rows in (("rollout", [{**engine, **sync, **speeds, "work_of_a_sequence": ""}, seeds]), ("soak", ranks)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmark": name, **about, "rows": rows}))
    monkeypatch.setattr(measure, "RESULTS", tmp_path)
    assert "| vllm | bfloat16 | a model | 1.25 | 1.75 | 100 | 1,600 | 6,400 |" in TABLES["rollout"][1]()
    assert "| vllm | bfloat16 | 64 rows | 0.500 | 0.600 | 20.0% |" in TABLES["rollout"][1]()
    stands = TABLES["table"][1]()
    assert "| the same of fp32 weights into bf16 | a model | 1.8 | 2 | 1.0 to 1.5 |" in stands
    assert "| the same in bf16 | 64 rows | 0.2 | **0.03** | 1.0 to 1.5 |" in stands
    assert "| ray | actor 0 | 1.0 | 2.0 | 0.0 |" in TABLES["soak"][1]()


def test_work_that_all_rows_share_is_said_once():
    rows = [["a", "4 rows", "1"], ["b", "4 rows", "2"]]
    assert grid(["", "the work", "ms"], rows).splitlines()[2:] == ["| a | 1 |", "| b | 2 |", "", "The work: 4 rows."]
    assert "4 rows | 1" in grid(["", "the work", "ms"], rows[:1])


def test_work_in_words_names_the_counts_that_there_are():
    assert work_words({"rows": 1024, "width": 4096, "tokens": 265037}) == "1024 x 4096, 265,037 tokens"
    assert work_words({"rows": 8192, "ranks": 64}) == "8,192 rows, 64 ranks"


def test_a_saved_result_has_load_cores_and_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["benchmark", "--save"])
    measure.report("example", [{"work": "3 rows", "cpu_ms": 1.0}])
    saved = json.loads((tmp_path / "results" / "example.json").read_text())
    assert saved == json.loads(capsys.readouterr().out)
    assert saved["versions"]["torch"] == version("torch") and len(saved["load"]) == 2
    assert f"on {saved['cores']} cores; python" in conditions(saved)


def test_a_ratio_needs_equal_counts():
    costs = {HERE: 2.0, "trl": 5.0}
    counts = [[1, 700, 64], [2, 720, 64]]
    assert compared("step", "work", "CPU s", costs, {HERE: counts, "trl": counts})["ratio"] == {"trl": 2.5}
    unequal = {HERE: counts, "trl": [[1, 700, 64], [2, 719, 64]]}
    row = compared("step", "work", "CPU s", costs, unequal)
    assert row["ratio"] == {} and row["counts"] == unequal and "719" in row["unequal"]["trl"]


def test_one_unequal_side_leaves_the_ratios_of_the_others():
    costs = {HERE: 2.0, RAY: 2.5, "trl": 5.0, "verl": 10.0}
    row = compared("step", "work", "CPU s", costs, {HERE: [700], RAY: [700], "trl": [699], "verl": [700]})
    assert row["ratio"] == {"verl": 4.0} and row["unequal"].keys() == {"trl"}


def test_sums_of_results_may_differ_by_the_order_of_additions():
    costs = {HERE: 2.0, "verl": 5.0}
    assert compared("GAE", "work", "CPU ms", costs, {HERE: 562036.4, "verl": 562036.5})["ratio"] == {"verl": 2.5}
    assert compared("GAE", "work", "CPU ms", costs, {HERE: 562036.4, "verl": 561036.4})["unequal"]


def test_another_form_of_a_function_must_compute_what_the_public_one_does():
    public = {"what": "GAE", "work": {"rows": 2, "width": 3}, "cpu_ms": 4.0, "check": 10.0}
    flat = {**public, "what": "GAE, as a run calls it", "of": "GAE", "cpu_ms": 1.0}
    assert "unequal" not in function_row({HERE: flat}, public)
    assert "12.0" in function_row({HERE: {**flat, "check": 12.0}}, public)["unequal"][HERE]


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
