import pytest

from verl.utils.reward_score import default_compute_score, known_data_sources
from verl.utils.reward_score.gsm8k import compute_score, extract_solution


@pytest.mark.parametrize(
    "text, answer",
    [
        ("so 3 + 4 = 7\n#### 7", "7"),
        ("#### 5 no, #### 1,234", "1234"),
        ("#### -3.5", "-3.5"),
        ("the answer is 7", None),
        ("####7", None),
        ("#### 7" + "x" * 300, None),
        ("", None),
    ],
)
def test_gsm8k_strict_takes_the_last_marked_number_of_the_last_300_characters(text, answer):
    assert extract_solution(text) == answer


@pytest.mark.parametrize("text, answer", [("it is 7", "7"), ("7 or 1,200.", "1200."), ("no number ...", None)])
def test_gsm8k_flexible_takes_the_last_number(text, answer):
    assert extract_solution(text, method="flexible") == answer


def test_gsm8k_pays_for_the_answer_and_on_request_for_the_format():
    assert compute_score("#### 7", "7") == 1.0
    assert compute_score("#### 8", "7") == 0.0
    assert compute_score("#### 8", "7", format_score=0.1) == 0.1
    assert compute_score("7", "7", format_score=0.1) == 0.0


def test_gsm8k_unknown_method_is_refused():
    with pytest.raises(ValueError, match="method='lax'"):
        extract_solution("#### 7", method="lax")


@pytest.mark.parametrize(
    "source, text, truth, score",
    [
        ("openai/gsm8k", "#### 72", "72", 1.0),
        ("arithmetic/add1", "3 + 5 is 8.", "8", 1.0),
        ("arithmetic/add1", "8 is 3 + 5", "8", 0.0),
        ("arithmetic/add1", "eight", "8", 0.0),
        ("arithmetic/mul1", "18", "8", 0.0),
        ("arithmetic/max3", "80 is larger than 35, 12: 80", "80", 1.0),
        ("arithmetic/even", "Yes, it is.", "yes", 1.0),
        ("arithmetic/even", "nothing", "no", 0.0),
        ("arithmetic/even", "It is: yes", "yes", 0.0),
        ("digits", "1a2", "5", 0.4),
        ("digits", "123456789", "5", 1.0),
        ("digits", "none", "", 0.0),
    ],
)
def test_default_score_follows_the_data_source(source, text, truth, score):
    result = default_compute_score(data_source=source, solution_str=text, ground_truth=truth, extra_info={}, more=1)
    assert result == score and source in known_data_sources()


def test_unknown_data_source_names_the_known_ones_and_the_way_out():
    with pytest.raises(NotImplementedError) as error:
        default_compute_score("gsm8k", "x", "y")
    for part in ("data_source='gsm8k'", "openai/gsm8k", "Did you mean", "custom_reward_function.path"):
        assert part in str(error.value)
