"""Data of the recipes: known-good answers score 1 by the recipe's reward, known-bad ones 0."""

import json
import sys

import pyarrow.parquet as pq
import pytest

from recipe.char_count.create_dataset import main as make_char_count
from recipe.char_count.reward_function import char_count_reward_function
from tests.support.commands import ROOT
from verl.rewards.scorers import default_compute_score


def rows_of(path):
    return pq.read_table(path).to_pylist()


def test_answers_of_counting_letters_are_right_and_splits_share_no_word(tmp_path):
    make_char_count(["--local_dir", str(tmp_path), "--total_number", "60", "--test_number", "20"])
    questions = {}
    for split, number in (("train", 40), ("test", 20)):
        sft, rl = (rows_of(tmp_path / kind / f"{split}.parquet") for kind in ("sft", "rl"))
        assert len(sft) == len(rl) == number
        questions[split] = {row["prompt"].split()[5].rstrip("?") for row in sft}
        for shown, asked in zip(sft, rl, strict=True):
            assert asked["prompt"][0]["content"] == shown["prompt"]
            truth = asked["reward_model"]["ground_truth"]
            words = shown["prompt"].split()
            assert int(truth) == words[5].rstrip("?").count(words[2])
            assert char_count_reward_function("char_count", shown["response"], truth) == 1
            assert char_count_reward_function("char_count", f"\\boxed{{{int(truth) + 1}}}", truth) == 0
    assert not questions["train"] & questions["test"]


@pytest.mark.parametrize("response", ["", "3", "\\boxed{3", "\\boxed{}", "\\boxed{three}", "\\boxed{3} or \\boxed{4}"])
def test_what_is_no_answer_to_counting_letters_scores_nothing(response):
    assert char_count_reward_function("char_count", response, "3") == 0


@pytest.fixture
def examples(monkeypatch):
    """Modules of examples/data_preprocess are found, and forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples" / "data_preprocess"), *sys.path])
    yield
    for name in set(sys.modules) - before:
        if name.startswith("recipe.") or name in ("aime", "loading", "saving", "math_dataset", "dapo17k"):
            del sys.modules[name]


def test_problems_of_the_r1_recipe_are_scored_by_the_built_in_rules(examples, tmp_path):
    from recipe.r1.data_process import main

    choices = {"Correct Answer": "four", **{f"Incorrect Answer {i}": f"wrong {i}" for i in (1, 2, 3)}}
    of_task = {
        "aime2024/train": {"problem": "1 + 1?", "answer": "2"},
        "math500/test": {"problem": "1 + 2?", "solution": "\\boxed{3}", "answer": "3", "subject": "a", "level": 1},
        "gpqa_diamond/train": {"Question": "2 + 2?", **choices},
    }
    for name, example in of_task.items():
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps(example) + "\n")
    tasks = "aime2024,math500,gpqa_diamond"
    main(["--local_dir", str(tmp_path / "out"), "--tasks", tasks, "--local_dataset_path", str(tmp_path)])
    rows = rows_of(tmp_path / "out" / "test.parquet")
    assert len(rows) == 3
    for row in rows:
        truth, source = row["reward_model"]["ground_truth"], row["data_source"]
        good, bad = (f"So the answer is \\boxed{{{x}}}.\nAnswer: {x}" for x in (truth, "C" if truth == "B" else "B"))
        for response, expected in ((good, 1), (bad, 0)):
            score = default_compute_score(source, response, truth)
            score = score["acc"] if isinstance(score, dict) else score
            assert score == expected, (source, response)
    letter = rows[2]["reward_model"]["ground_truth"]
    assert f"{letter}) four" in rows[2]["prompt"][0]["content"]


def test_solutions_of_open_math_reasoning_become_conversations(examples, tmp_path):
    from recipe.open_math_reasoning.prepare_sft import main

    solved = {"problem": "1 + 1?", "generated_solution": "<think>...</think>\\boxed{2}", "expected_answer": "2"}
    kinds = ("has_answer_extracted", "no_answer_extracted")
    (tmp_path / "cot.jsonl").write_text("\n".join(json.dumps({**solved, "problem_type": kind}) for kind in kinds))
    for flags, number in (([], 1), (["--all"], 2)):
        main(["--local_dir", str(tmp_path / "out"), "--local_dataset_path", str(tmp_path), *flags])
        rows = rows_of(tmp_path / "out" / "train.parquet")
        assert len(rows) == number and [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]
        assert rows[0]["messages"][1]["content"] == solved["generated_solution"]
