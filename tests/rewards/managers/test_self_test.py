"""What the self-test says of functions that are right, wrong, constant, failing or slow."""

import re
import time

import pytest

from tests.rewards.managers.batches import TOKENIZER
from tests.rewards.managers.test_scoring import config, write
from verl.config.ppo import PPOConfig
from verl.config.reward import RewardModelConfig
from verl.rewards.managers import NaiveRewardManager, RewardError
from verl.rewards.managers.scoring import load_reward_manager
from verl.rewards.managers.self_test import self_test, try_reward_function
from verl.rewards.scorers import default_compute_score

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"answer": f"Because.\n#### {number}"},
    }
    for number in (72, 10, 5)
]
NO_GOLD = [{"data_source": "digits", "reward_model": {"style": "rule", "ground_truth": ""}}] * 3


def contains(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "extra": 1}


async def contains_later(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str)


def contains_in_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(truth in text) for text, truth in zip(solution_strs, ground_truths, strict=True)]


@pytest.mark.parametrize(
    ("function", "is_batch"),
    [(contains, False), (contains_later, False), (contains_in_batch, True), (default_compute_score, False)],
)
def test_a_right_function_raises_no_alarm(function, is_batch):
    report = self_test(function, ROWS, is_batch=is_batch)
    assert (report.known_good, report.known_bad, report.alarms, report.rows) == (1.0, 0.0, (), 3)
    assert function.__name__ in report.function and "extra_info" in report.signature
    assert "known-good answers 1, known-bad answers 0" in str(report)


@pytest.mark.parametrize(
    ("function", "rows", "said"),
    [
        (lambda **kwargs: 1.0, ROWS, "it scores 1 known-good and known-bad answers alike"),
        (lambda **kwargs: 0, NO_GOLD, "it scores 0 whatever the text"),
        (lambda solution_str, **kwargs: "know" in solution_str, ROWS, "right answers would not be reinforced"),
        (lambda **kwargs: None, ROWS, "it failed at row 0: TypeError: the function returned None .*wrong_type"),
        (lambda **kwargs: 1 / 0, ROWS, "ZeroDivisionError"),
    ],
)
def test_what_looks_wrong_is_an_alarm(function, rows, said):
    assert re.search(said, " ".join(self_test(function, rows).alarms))


def test_a_function_that_is_not_about_gold_is_not_suspected():
    report = self_test(lambda solution_str, **kwargs: sum(c.isdigit() for c in solution_str), NO_GOLD)
    assert report.known_good is None and report.alarms == ()


@pytest.mark.parametrize("truth", [{"target": ["Paris"]}, ["Paris", "paris"], "Paris"])
def test_gold_is_found_where_datasets_have_it(truth):
    rows = [{"data_source": "s", "reward_model": {"ground_truth": truth}}]
    report = self_test(lambda solution_str, **kwargs: float("Paris" in solution_str), rows)
    assert (report.known_good, report.known_bad) == (1.0, 0.0)


def test_a_slow_function_is_asked_little():
    calls = []

    def slow(solution_str, **kwargs):
        calls.append(solution_str)
        time.sleep(0.06)
        return float(len(calls))

    self_test(slow, ROWS, seconds=0.05)
    assert len(calls) == 2  # the first may have been slow for what it imports, and does not count


def test_a_function_that_is_slow_only_at_first_is_asked_all():
    calls = []

    def slow_at_first(solution_str, ground_truth, **kwargs):
        time.sleep(0.0 if calls else 0.3)
        calls.append(solution_str)
        return float(ground_truth in solution_str)

    report = self_test(slow_at_first, ROWS, seconds=0.25)
    assert (report.rows, report.known_good, report.alarms) == (3, 1.0, ())


def trained(tmp_path, text, self_test):
    settings = config(write(tmp_path, text), self_test=self_test, enable=False)
    settings.reward_model.sandbox = None
    manager = load_reward_manager(settings, TOKENIZER, 0)
    return try_reward_function(PPOConfig(reward_model=settings.reward_model), manager, ROWS)


def test_a_run_is_warned_or_stopped_or_left_alone(tmp_path):
    constant = "def compute_score(**kwargs):\n    return 1\n"
    assert "constant" in trained(tmp_path, constant, "warn").alarms[0]
    assert trained(tmp_path, constant, "off") is None
    with pytest.raises(RewardError, match="failed its self-test: .*constant.*reward_model.self_test=warn"):
        trained(tmp_path, constant, "stop")


def test_a_hanging_function_is_found_out_in_time(tmp_path):
    path = write(tmp_path, "import time\ndef compute_score(**kwargs):\n    time.sleep(60)\n")
    manager = load_reward_manager(config(path), TOKENIZER, 0)
    report = self_test(manager.compute_score, ROWS, timeout_s=1.0)
    assert "timeout" in report.alarms[0]


@pytest.mark.parametrize("column", ["data_source", "reward_model"])
def test_data_that_no_manager_can_score_are_refused_before_the_first_step(column):
    rows = [{name: value for name, value in row.items() if name != column} for row in ROWS]
    settings = PPOConfig(reward_model=RewardModelConfig(self_test="warn"))
    with pytest.raises(RewardError, match=f"no column '{column}'.*there are .*reward_model.ground_truth"):
        try_reward_function(settings, NaiveRewardManager(TOKENIZER, 0), rows)


def test_of_a_built_in_rule_its_own_arguments_are_not_shown():
    report = self_test(default_compute_score, ROWS)
    assert str(report).startswith("built-in rules; ")
