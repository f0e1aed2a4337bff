"""`verl doctor sft`, `dpo` and `rm` say before a run what it would learn, and what stops it, in their own options."""

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


def report(capsys, words, program="sft"):
    code = doctor([program, "--json", *words])
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


PAIRS = 20


@pytest.fixture(scope="module")
def pair_words(words, tmp_path_factory):
    """Texts of 24 to 32 tokens; pair 3 has two equal sides, and the last is pair 5 the other way round."""
    rows = [{"prompt": f"{i % 10}?", "chosen": "ab" * (i % 5 + 1), "rejected": "c" * (i + 1)} for i in range(PAIRS - 1)]
    rows[3]["rejected"] = rows[3]["chosen"]
    rows.append({"prompt": "5?", "chosen": rows[5]["rejected"], "rejected": rows[5]["chosen"]})
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return [*words, f"data.train_files={path}", "data.bad_rows=skip", "trainer.total_epochs=1"]


def test_pairs_are_shown_counted_and_compared_and_their_reference_takes_memory(pair_words, capsys):
    code, found = report(capsys, pair_words, "dpo")
    assert code == 0, found["errors"]
    numbers = {number["name"]: number for number in found["derivation"]}
    assert numbers["pairs"]["value"] == 8 and numbers["epoch"]["value"] == PAIRS // 8
    preview = found["preview"]
    assert [line.strip() for line in preview[:6:3]] == ["chosen", "rejected"]
    assert preview[2].endswith("'ab<|im_end|>'") and preview[5].endswith("'c<|im_end|>'")
    texts = [warning["text"] for warning in found["warnings"]]
    assert any("row 3: 'chosen' and 'rejected' are the same" in text for text in texts), texts
    assert any("1 of the pairs of data.train_files are there in both orders" in text for text in texts)
    parts = {row["phase"]: row["parts"] for row in found["memory"]}
    assert list(parts) == ["start", "reference", "update"]
    assert parts["update"]["reference weights"] > 0 and parts["update"]["logits"] > 0
    assert "actor_rollout_ref" not in json.dumps(found) and "rollout" not in json.dumps(found["memory"])


def test_a_reference_that_scores_once_is_not_held_and_a_reward_model_has_no_logits(pair_words, words, capsys):
    model = words[0].partition("=")[2]
    _, once = report(capsys, [*pair_words, f"ref.path={model}", "algorithm.precompute_ref=true"], "dpo")
    parts = {row["phase"]: row["parts"] for row in once["memory"]}
    assert "reference weights" in parts["reference"] and "reference weights" not in parts["update"]
    code, found = report(capsys, pair_words, "rm")
    assert code == 0 and [row["phase"] for row in found["memory"]] == ["start", "update"]
    assert not any("logits" in row["parts"] for row in found["memory"])
    assert [line[2:9].strip() for line in found["preview"][:3]] == ["chosen", "shown", "scored"]


def test_what_truncation_leaves_of_pairs_is_what_the_dataset_of_the_run_leaves(pair_words, words, capsys):
    from verl.data.preference_dataset import PreferenceDataset
    from verl.utils.tokenizer import hf_tokenizer

    path = next(word for word in pair_words[::-1] if word.startswith("data.train_files=")).partition("=")[2]
    tokenizer = hf_tokenizer(words[0].partition("=")[2])
    for side in ("drop", "right", "left"):
        options = {"max_length": 24, "truncation": side, "bad_rows": "skip"}
        dataset = PreferenceDataset(path, tokenizer, options)
        code, found = report(capsys, [*pair_words, "data.max_length=24", f"data.truncation={side}"], "dpo")
        assert code == 0 and any(f"(data.truncation={side})" in note for note in found["notes"])
        lengths = next(number["text"] for number in found["derivation"] if number["name"] == "lengths")
        learned = [[item[side]["loss_mask"].sum().item() for side in ("chosen", "rejected")] for item in dataset]
        means = [sum(counts) / len(dataset) for counts in zip(*learned, strict=True)]
        assert f"have {means[0]:.0f} tokens on average and rejected ones {means[1]:.0f};" in lengths
    code, found = report(capsys, [*pair_words, "data.max_length=24"], "dpo")
    assert code == 2 and "data.max_length=24 is less than the tokens of a side of" in found["errors"][0]["text"]
    code, found = report(capsys, [*pair_words, "ref.path=/nowhere"], "dpo")
    assert code == 2 and found["errors"][0]["text"].startswith("ref.path=/nowhere")
