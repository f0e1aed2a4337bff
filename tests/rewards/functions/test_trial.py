"""Right answers must score high and wrong ones low, whatever the reward function does."""

import inspect
import json
import re
import time

import pytest

from verl.preflight.command import read_options
from verl.rewards.functions.calling import MANAGERS_OWN, check_signature, reward_function
from verl.rewards.functions.trial import TrialRow, known_good_responses, try_function
from verl.rewards.managers.rule import REWARD_MANAGER_REGISTRY, RuleRewardManager


def scored(function, truths=("8", "9", "10"), infos=None, **options):
    infos = infos or [{}] * len(truths)
    rows = [TrialRow(f"a.parquet, row {i}", "mine", t, infos[i]) for i, t in enumerate(truths)]
    return try_function(function, "mine", rows, 30, **options)


def exact(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == f"<think>It follows.</think>\n<answer>{ground_truth}</answer>")


def test_the_form_that_the_scorer_wants_is_found():
    found = scored(exact)
    assert found.form == "<answer>answer</answer>" and found.known_good == [1.0] * 3 and found.known_bad == [0.0] * 9
    assert found.other == [0.0] * 2 and found.constant is None and found.problems() == ([], [])
    assert (found.rows, found.tried) == (30, 3)


def test_no_text_is_scored_twice():
    asked = []

    def counts(data_source, solution_str, ground_truth, extra_info):
        asked.append((solution_str, ground_truth))
        return solution_str == ground_truth

    assert scored(counts).calls == len(asked) == len(set(asked))


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


def test_a_slow_function_is_not_asked_for_ever():
    calls = []

    def slow(solution_str, **sample):
        time.sleep(0.02)
        calls.append(solution_str)
        return float(len(calls))

    found = scored(slow, ("1",) * 50, seconds=0.3)
    assert found.is_cut and 0 < found.tried < 50 and "the others were left out" in found.problems()[1][-1]


FAULTS = {
    "raises": ("return 1 / 0", "row 0 (data_source='mine', index=None): ZeroDivisionError: division by zero [raised]"),
    "nan": ("return float('nan')", "must be finite [not_finite]"),
    "shape": ("return [1.0, 2.0]", "[wrong_type]"),
    "no score": ("return {'acc': 1.0}", "a dict without 'score'"),
    "none": ("return None", "None of type NoneType"),
    "exit": ("raise SystemExit(3)", "row 0 (data_source='mine', index=None): SystemExit: 3 [exit]"),
    "os._exit": ("import os; os._exit(7)", "it left its process with exit code 7 [exit]"),
    "hangs": (
        "import time; time.sleep(60 if ground_truth == '9' else 0); return 0.5",
        "row 1 (data_source='mine', index=None): TimeoutError",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_function_is_an_error_with_its_row(fault, tmp_path):
    body, message = FAULTS[fault]
    (tmp_path / "reward.py").write_text(f"def compute_score(ground_truth, **sample):\n    {body}\n")
    function = reward_function(read_options([f"reward={tmp_path}/reward.py"])[0])
    [error, *_], _ = scored(function, timeout_s=0.3 if fault == "hangs" else 10.0).problems()
    assert message in error
    function.pool.close()


def test_a_function_without_these_names_is_refused():
    with pytest.raises(TypeError, match="has the parameters .text. and is called with the keywords data_source"):
        check_signature(lambda text: 1.0, ("data_source",), {})
    [error], _ = scored(lambda text: 1.0).problems()
    assert re.search(r"row 0 \(data_source=.*\): TypeError", error)


def test_what_managers_keep_of_their_keywords_is_known():
    own = set()
    for cls in (RuleRewardManager, *REWARD_MANAGER_REGISTRY.values()):
        if issubclass(cls, RuleRewardManager) and cls.__module__.startswith("verl."):
            parameters = inspect.signature(cls.__init__).parameters.values()
            own |= {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    assert own - {"self", "tokenizer", "num_examine", "compute_score", "reward_fn_key"} == set(MANAGERS_OWN)


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
    assert text in known_good_responses(truth, info)[form]


def test_tests_and_rules_are_no_answers():
    for truth in (
        json.dumps({"test_list": ["assert f() == 1"]}),
        json.dumps({"instruction_id_list": []}),
        None,
        {},
        [],
    ):
        assert known_good_responses(truth, {}) == {}
    found = scored(lambda **sample: 0.0, [json.dumps({"test_list": []})])
    errors, [warning] = found.problems()
    assert not errors and "do not say what would be right" in warning


@pytest.mark.parametrize("kind", ["plain", "async", "batch", "kwargs", "by place"])
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
        "by place": "def compute_score(source, text, truth, info):\n    return text == truth",
    }
    (tmp_path / "reward.py").write_text(bodies[kind])
    words = [f"reward={tmp_path}/reward.py"]
    words += ["custom_reward_function.reward_kwargs.bonus=1"] if kind == "kwargs" else []
    function = reward_function(read_options(words)[0])
    found = scored(function, is_batch=kind == "batch")
    assert found.known_good == [1.0] * 3 and not found.error
    function.pool.close()
