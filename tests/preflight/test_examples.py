"""`verl doctor sft` says before a run what it would learn, and what stops it, in the names of its own options."""

import json

import pytest

from verl.preflight.command import doctor
from verl.utils.tiny_model import make_tiny_model

ROWS = 40


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    make_tiny_model(folder / "model", family="qwen2", size="tiny", seed=1)
    rows = [{"question": f"{i}?", "answer": "ab" * (i % 5 + 1)} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [f"model.path={folder / 'model'}", f"data.train_files={folder / 'rows.jsonl'}", "trainer.device=cpu"]
    return [*options, "trainer.n_gpus_per_node=1", "data.train_batch_size=8", "data.max_length=96"]


def report(capsys, words):
    code = doctor(["sft", "--json", *words])
    found = json.loads(capsys.readouterr().out)
    return code, found


def test_the_plan_the_memory_and_what_is_learned_are_shown(words, capsys):
    code, found = report(capsys, words)
    assert code == 0 and not found["errors"]
    numbers = {number["name"]: number for number in found["derivation"]}
    assert numbers["epoch"]["value"] == ROWS // 8 and numbers["run"]["value"] == ROWS // 8 * 4
    assert [row["phase"] for row in found["memory"]] == ["start", "update"]
    assert "  learned 'ab<|im_end|>'" in found["preview"] and found["preview"][0].startswith("  shown   ")
    assert "actor_rollout_ref" not in json.dumps(found) and "rollout" not in json.dumps(found["memory"])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["data.max_length=20"], "data.max_length=20 is less than the tokens of"),
        (["data.train_batch_size=64"], "data.train_batch_size=64 is larger than the 40 rows"),
        (["data.response_key=reply"], "the columns are question, answer"),
        (["model.path=/nowhere/model"], "model.path=/nowhere/model"),
        (["data.max_lenght=20"], "max_length"),
        (["engine.ulysses_sequence_parallel_size=2"], "engine.ulysses_sequence_parallel_size=2"),
    ],
)
def test_what_would_stop_the_run_is_an_error_that_names_the_option(words, capsys, more, expected):
    code, found = report(capsys, [*words, *more])
    assert code == 2 and any(expected in error["text"] for error in found["errors"]), found["errors"]
    assert "actor_rollout_ref" not in json.dumps(found)


def test_rows_whose_mask_cannot_be_told_are_named_and_the_rest_is_counted(words, capsys, tmp_path):
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"messages": good if i else good[:1]} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, found = report(capsys, [*words, f"data.train_files={tmp_path / 'rows.jsonl'}"])
    [error] = found["errors"]
    assert code == 2 and error["text"].startswith("1 of 9 rows of data.train_files cannot be learned from")
    assert "rows.jsonl, row 0" in error["text"] and "7 of 9 rows of data.train_files are repeated." in found["notes"]
