"""The index of samples: every line once, found again at its place, also while files come and change."""

import json
import tracemalloc

import pytest

from tests.view.conftest import sample, write_lines
from verl.telemetry.trajectories import parse
from verl.view import samples as samples_module
from verl.view.runs import Run
from verl.view.samples import Samples


@pytest.fixture
def samples(run_folder):
    found = Samples(Run(run_folder, "r"))
    assert found.refresh()
    return found


def look_again(samples):
    samples._looked = 0.0
    return samples.refresh()


def column(samples, name):
    answer = samples.rows()
    values = answer["columns"][name]
    return [answer["words"][name][value] for value in values] if name in answer["words"] else values


def test_every_line_is_a_row_and_is_read_again_from_its_place(samples):
    assert len(samples) == 3 * 5 + 2 * 3
    kinds, steps, uids = (column(samples, name) for name in ("kind", "step", "uid"))
    assert kinds.count("validation") == 6 and set(zip(kinds, steps, strict=True)) == {
        *(("training", step) for step in (1, 2, 3)),
        *(("validation", step) for step in (0, 3)),
    }
    for number in range(len(samples)):
        t = samples.trajectory(number)
        assert (t.step, t.uid) == (steps[number], uids[number])
    with pytest.raises(IndexError, match="sample 21 does not exist"):
        samples.trajectory(21)


def test_prompts_of_the_same_text_have_the_same_number(samples):
    prompts = column(samples, "prompt")
    same = [p for p, source, kind in zip(prompts, column(samples, "source"), column(samples, "kind"), strict=True)
            if source == "sums" and kind == "training"]  # fmt: skip
    assert len(set(same)) == 1 and len(set(prompts)) == 1 + 1 + 3


def test_reading_can_be_divided_and_newest_steps_come_first(run_folder):
    found = Samples(Run(run_folder, "r"))
    seen = []
    while not found.refresh(0.0):
        seen.append(len(found))
    assert len(seen) > 3 and len(found) == 21
    assert column(found, "step")[:3] == [3, 3, 3]


def test_new_files_are_added_and_a_step_trained_again_replaces_its_samples(samples, run_folder):
    write_lines(run_folder / "samples" / "4.jsonl", [sample(4, "u", "p", "new", 1.0)])
    assert look_again(samples) and len(samples) == 22 and samples.generation == 0
    assert samples.rows(21)["columns"]["step"] == [4]
    write_lines(run_folder / "samples" / "4.jsonl", [sample(4, "u", "p", "newer and longer", 0.5)])
    assert look_again(samples) and len(samples) == 22 and samples.generation == 1
    assert 0.5 in column(samples, "score")


def test_a_line_that_cannot_be_read_is_named_and_the_others_are_there(samples, run_folder):
    path = run_folder / "samples" / "9.jsonl"
    path.write_text(json.dumps(sample(9, "u", "p", "x", 1.0)) + "\nhalf a li\n")
    look_again(samples)
    assert len(samples) == 22 and samples.rows()["problems"][0].startswith(f"{path}:2: no JSON")


def test_samples_are_found_by_their_text(samples):
    found = samples.search("GUESS 3")
    assert [samples.trajectory(n).step for n in found] == [3, 3, 3]
    assert len(samples.search('img src=x onerror="window')) == 6 and samples.search("no such words") == []


def test_a_report_takes_whole_groups_from_all_over_a_run(samples):
    chosen = samples.representative(11)
    picked = [samples.trajectory(n) for n in chosen]
    groups = {(t.step, t.uid) for t in picked if t.uid.startswith("step")}
    assert len(chosen) <= 11 and groups and all(sum((t.step, t.uid) == g for t in picked) == 4 for g in groups)
    assert {t.step for t in picked} >= {0, 3} and any(t.uid == "talk" for t in picked)
    assert len(samples.representative(1000)) == 21


def test_samples_elsewhere_are_found_by_the_options_of_the_run(run_folder, tmp_path):
    (run_folder / "samples").rename(tmp_path / "elsewhere")
    config = json.loads((run_folder / "config.yaml").read_text())
    config["trainer"]["rollout_data_dir"] = str(tmp_path / "elsewhere")
    (run_folder / "config.yaml").write_text(json.dumps(config))
    found = Samples(Run(run_folder, "r"))
    assert found.refresh() and len(found) == 21


def test_many_samples_are_read_once_and_kept_in_little_memory(run_folder, monkeypatch):
    rows = [sample(10, f"u{i}", f"question {i}", "some words of an answer " * 200, i % 2) for i in range(2_000)]
    write_lines(run_folder / "samples" / "10.jsonl", rows)
    found, read = Samples(Run(run_folder, "r")), []
    monkeypatch.setattr(samples_module, "parse", lambda *line: read.append(line[1:]) or parse(*line))
    tracemalloc.start()
    try:
        found.refresh()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert look_again(found) and len(found) == 2_021 and len(read) == len(set(read)) == 2_021
    assert kept < 1_500 * len(found), "bytes a sample, of which each answer alone has 4,800"
