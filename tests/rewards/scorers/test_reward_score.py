import subprocess
import sys

import pytest

from verl.rewards.scorers import UnknownDataSource, default_compute_score, has_scorer, known_data_sources
from verl.rewards.scorers.gsm8k import compute_score, extract_solution


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


def test_unknown_data_source_names_the_nearest_the_known_ones_and_the_way_out():
    with pytest.raises(UnknownDataSource) as error:
        default_compute_score("gsm8k", "x", "y")
    assert isinstance(error.value, NotImplementedError)
    for part in ("data_source='gsm8k'", "openai/gsm8k", "Did you mean", "custom_reward_function.path"):
        assert part in str(error.value)


@pytest.mark.parametrize("source", [None, 7, "", "aim", "reasoning_gy", "searchR1_"])
def test_what_only_resembles_a_data_source_has_no_scorer(source):
    assert not has_scorer(source)
    with pytest.raises(UnknownDataSource):
        default_compute_score(source, "x", "y")


@pytest.mark.parametrize(
    "source, text, gold, score",
    [
        ("svamp", "#### 145", "145", 1.0),
        ("lighteval/MATH", r"\boxed{2}", "2", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{2}", "2", 1.0),
        ("HuggingFaceH4/MATH-500", r"\boxed{2}", "2", 1.0),
        ("amc23", r"\boxed{2}", "2.0", 1.0),
        ("math_dapo", "Answer: 2", "2", 1.0),
        ("math_dapo", "2", "2", -1.0),
        ("aime_2027", "Answer: 2", "2", 1.0),
        ("numina_cn_k12", r"\boxed{2}", "2", 1.0),
        ("hiyouga/geometry3k", r"\boxed{2}", "2", 0.9),
        ("searchR1_nq", "<answer>Paris</answer>", {"target": ["Paris"]}, 1.0),
        ("Rowan/hellaswag", "Answer: C", "2", 1.0),
        ("countdown", "<answer>1+2</answer>", {"target": 3, "numbers": [1, 2]}, 1.0),
        ("kk_logic", "<answer>Zoey is a knave</answer>", {"solution_text_format": "(1) Zoey is a knave"}, 1.0),
        ("google/IFEval", "no", '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}', 1.0),
        ("google/mbpp", "f = lambda: 1", '{"test_list": ["assert f() == 1"]}', 1.0),
        ("taco", "print(input())", '{"inputs": ["a"], "outputs": ["a"]}', 1.0),
    ],
)
def test_every_family_of_data_sources_reaches_its_scorer(source, text, gold, score):
    result = default_compute_score(source, text, gold, {})
    assert (result["score"] if isinstance(result, dict) else result) == score


def test_options_reach_the_rule_that_has_them():
    gold = {"target": 3, "numbers": [1, 2]}
    assert default_compute_score("countdown", "<answer>1+1</answer>", gold, format_score=0.3, method="x") == 0.3


def test_importing_the_scorers_imports_none_of_their_libraries():
    heavy = "sympy", "math_verify", "latex2sympy2_extended", "reasoning_gym", "torch", "numpy", "asyncio"
    program = f"import sys, verl.rewards.scorers; print([name for name in {heavy!r} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert output.strip() in ("[]", "['asyncio']")


RUNAWAY = [
    "<answer>",
    "<think>",
    "```\n",
    "Answer: ",
    r"\boxed{",
    r"\boxed{1}",
    "#### ",
    "[",
    "* ",
    "the answer is ",
    "<<",
]
RUNAWAY += [
    "<tool_call>",
    "<think></think><tool_call>",
    "a",
    " ",
    "\n",
    "1",
    "1,",
    "A ",
    "Zoey is a knight ",
    "- ",
    "P.S",
    "A.B.",
]
TASKS = {
    "openai/gsm8k": "1",
    "lighteval/MATH": "1",
    "math_dapo": "1",
    "numina_cn_k12": "1",
    "hiyouga/geometry3k": "1",
    "searchR1_nq": {"target": ["b"]},
    "multiple_choice": "B",
    "countdown": {"target": 3, "numbers": [1, 2]},
    "kk_logic": "(1) Zoey is a knave",
    "rlla": '<think></think><tool_call>{"name": "a"}</tool_call>',
    "ifeval": {
        "instruction_id_list": [
            "detectable_format:title",
            "detectable_format:number_highlighted_sections",
            "detectable_format:number_bullet_lists",
            "detectable_content:number_placeholders",
            "detectable_content:postscript",
            "length_constraints:number_sentences",
            "length_constraints:number_words",
            "length_constraints:number_paragraphs",
        ],
        "kwargs": [
            {},
            {"num_highlights": 1},
            {"num_bullets": 3},
            {"num_placeholders": 1},
            {},
            {"num_sentences": 2},
            {"num_words": 2},
            {"num_paragraphs": 2},
        ],
    },
}


@pytest.mark.parametrize("source", TASKS)
def test_a_response_that_repeats_itself_to_the_end_takes_work_in_proportion_to_its_length(source):
    """A model that has lost its way writes the same few characters until its limit.

    Work that grows with the square of the length would take hours for so many characters, not the milliseconds it does.
    """
    for text in RUNAWAY:
        assert default_compute_score(source, text * (1_000_000 // len(text)), TASKS[source]) is not None, text
