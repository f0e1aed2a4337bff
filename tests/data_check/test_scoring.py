"""Right answers must score high and wrong ones low, whatever the reward function does."""

import json
import time

import pytest

from verl.data_check.command import read_options
from verl.data_check.gold import gold_responses
from verl.data_check.scoring import ScoredRow, reward_function, score_source


def scored(function, truths=("8", "9", "10"), patience=5.0, infos=None):
    infos = infos or [{}] * len(truths)
    rows = [ScoredRow(f"a.parquet, row {i}", "mine", t, infos[i]) for i, t in enumerate(truths)]
    return score_source(function, "mine", rows, 30, patience)


def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == f"<think>It follows.</think>\n<answer>{ground_truth}</answer>")


def test_the_form_that_the_scorer_wants_is_found():
    found = scored(exact)
    assert found.form == "<answer>answer</answer>" and found.gold == [1.0] * 3 and found.garbage == [0.0] * 3
    assert found.other == [0.0] * 2 and found.constant is None and found.problems() == ([], [])


@pytest.mark.parametrize("value", [0.0, 1.0, True, -1])
def test_a_constant_reward_raises_the_alarm(value):
    [error], _ = scored(lambda **sample: value).problems()
    assert f"all score {value:g}" in error and "'mine'" in error


def test_a_reward_that_ignores_the_answer_is_noticed():
    def likes_boxes(data_source, solution_str, ground_truth, extra_info):
        return {"score": float("boxed" in solution_str), "pred": "x"}

    errors, [warning] = scored(likes_boxes).problems()
    assert not errors and "right answer of another row scores 1.000" in warning


def test_right_answers_that_score_low_are_named():
    def forgets_ten(data_source, solution_str, ground_truth, extra_info):
        return solution_str == ground_truth != "10"

    found = scored(forgets_ten)
    _, [warning] = found.problems()
    assert "score 0.667 on average. The first that does not: a.parquet, row 2: 0 for '10'" in warning


def stops(data_source, solution_str, ground_truth, extra_info):
    raise SystemExit(3)


def leaves(data_source, solution_str, ground_truth, extra_info):
    import os

    os._exit(7)


def sleeps(data_source, solution_str, ground_truth, extra_info):
    time.sleep(60 if ground_truth == "9" else 0)
    return 0.5


FAULTS = {
    "raises": (lambda **sample: 1 / 0, "row 0: ZeroDivisionError"),
    "signature": (lambda text: 1.0, "row 0: TypeError"),
    "nan": (lambda **sample: float("nan"), "must be finite"),
    "shape": (lambda **sample: [1.0, 2.0], "is no score"),
    "no score": (lambda **sample: {"acc": 1.0}, "a dict without 'score'"),
    "none": (lambda **sample: None, "None of type NoneType"),
    "exit": (stops, "SystemExit: '3'"),
    "os._exit": (leaves, "row 0: it ended the process (exit code 7)"),
    "hangs": (sleeps, "row 1: no score within 0.3 s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_function_is_an_error_with_its_row(fault):
    function, told = FAULTS[fault]
    begin = time.monotonic()
    [error, *_], _ = scored(function, patience=0.3 if fault == "hangs" else 10.0).problems()
    assert told in error and time.monotonic() - begin < 5


GOLD = {
    "number": (8, {}, "#### answer", "So the answer is\n#### 8"),
    "boxed": ("\\frac{1}{2}", {}, "\\boxed{answer}", "The answer is $\\boxed{\\frac{1}{2}}$."),
    "worked": ("18", {"answer": "9 * 2 = 18\n#### 18"}, "extra_info.answer", "9 * 2 = 18\n#### 18"),
    "targets": ({"target": ["Paris", "paris"]}, {}, "<answer>answer</answer>", "<answer>Paris</answer>"),
    "nested": ({"solution_text_format": "(1) A is a knight"}, {}, "answer", "(1) A is a knight"),
    "json list": ('["Paris", "x"]', {}, "answer", "Paris"),
    "expression": ({"target": 46}, {"one_solution": "(4+47)-5"}, "<answer>one_solution</answer>", "(4+47)-5"),
    "program": ("{}", {"reference": "def f(): pass"}, "```python reference```", "```python\ndef f(): pass\n```"),
    "body": (
        "{}",
        {"prompt": "def f():\n", "canonical_solution": "  return 1"},
        "prompt + canonical_solution",
        "f():\n  r",
    ),
}


@pytest.mark.parametrize("case", GOLD)
def test_right_answers_are_read_off_the_row(case):
    truth, info, form, text = GOLD[case]
    assert text in gold_responses(truth, info)[form]


def test_tests_and_rules_are_no_answers():
    for truth in (
        json.dumps({"test_list": ["assert f() == 1"]}),
        json.dumps({"instruction_id_list": []}),
        None,
        {},
        [],
    ):
        assert gold_responses(truth, {}) == {}
    found = scored(lambda **sample: 0.0, [json.dumps({"test_list": []})])
    errors, [warning] = found.problems()
    assert not errors and "do not say what would be right" in warning


@pytest.mark.parametrize("kind", ["plain", "async", "batch", "kwargs"])
def test_functions_are_called_as_their_manager_calls(tmp_path, kind):
    bodies = {
        "plain": "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return ground_truth == solution_str",
        "async": "async def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth == solution_str)",
        "batch": "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [float(a == b) for a, b in zip(solution_strs, ground_truths)]",
        "kwargs": "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    return (ground_truth == solution_str) * bonus",
    }
    (tmp_path / "reward.py").write_text(bodies[kind])
    words = [f"reward={tmp_path}/reward.py"]
    words += ["reward_model.reward_manager=batch"] if kind == "batch" else []
    words += ["custom_reward_function.reward_kwargs.bonus=1"] if kind == "kwargs" else []
    function, name = reward_function(read_options(words)[0])
    found = scored(function)
    assert name.endswith("reward.py:compute_score") and found.gold == [1.0] * 3 and not found.errors
