"""Rows of any data source may be scored by the built-in rule of another."""

import json

import pytest

from tests.config.helpers import typed
from verl.rewards.functions.calling import reward_function
from verl.rewards.scorers import UnknownDataSource, built_in_options, default_compute_score
from verl.rewards.scorers.ifeval import by_function, compute_score

PLACES = {"mine/*": "builtin:math", "rules/*": {"function": "builtin:ifeval", "continuous": True}, "*": "builtin"}


def test_by_source_names_a_rule_and_its_arguments():
    options = built_in_options({"by_source": PLACES})
    of_rules = {"name": "ifeval", "continuous": True}
    assert options["score_as"] == {"mine/*": {"name": "math"}, "rules/*": of_rules, "*": {}}
    assert default_compute_score("mine/anything", r"so \boxed{4}", "4", **options) == 1.0
    assert default_compute_score("openai/gsm8k", "#### 4", "4", **options) == 1.0
    goal = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_capital"], "kwargs": [{}, {}]}
    assert default_compute_score("rules/x", "no comma", json.dumps(goal), **options)["score"] == 0.5
    with pytest.raises(UnknownDataSource, match="'maths' has no built-in scorer.*'math'"):
        built_in_options({"by_source": {"mine": "builtin:maths"}})


def test_the_runs_function_scores_by_it():
    config = typed().with_values({"reward_model.by_source": PLACES})
    function = reward_function(config, in_sandbox=False)
    assert function("mine/x", r"\boxed{5}", "4") == 0.0


@pytest.mark.parametrize(
    ("goal", "good", "bad"),
    [
        ({"func_name": "validate_lowercase", "N": None}, "all small", "Not small"),
        ({"func_name": "verify_keywords", "keyword_list": ["sun", "moon"]}, "sun and moon", "sun"),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at least"}, "a b c d", "a b"),
        ({"func_name": "validate_word_constraint", "N": 3, "quantifier": "at most"}, "a b c", "a b c d"),
        ({"func_name": "validate_word_constraint", "N": 20, "quantifier": "around"}, "a " * 22, "a " * 23),
        ({"func_name": "verify_keyword_frequency", "word": "sun", "N": 2}, "sun sun", "sun sun sun"),
        ({"func_name": "validate_no_commas"}, "none", "one, here"),
        ({"func_name": "validate_end", "end_phrase": "the end"}, "this is the end", "no"),
    ],
)
def test_goals_of_rlvr_ifeval_are_instructions(goal, good, bad):
    assert compute_score(good, json.dumps(goal))["score"] == 1.0
    assert compute_score(bad, json.dumps(goal))["score"] == 0.0


def test_every_function_names_an_instruction_and_its_arguments():
    import inspect

    from verl.rewards.scorers.ifeval import _FUNCTIONS, CHECKS

    for name, (instruction, names) in _FUNCTIONS.items():
        assert set(names.values()) <= set(inspect.signature(CHECKS[instruction]).parameters), name
    assert {instruction for instruction, _ in _FUNCTIONS.values()} == set(CHECKS)
    with pytest.raises(ValueError, match="func_name='validate_lowercaze'.*'validate_lowercase'"):
        by_function({"func_name": "validate_lowercaze"})
