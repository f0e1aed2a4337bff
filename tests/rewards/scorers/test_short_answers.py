"""Questions with short answers, multiple choice, puzzles and tool calls."""

import pytest

from verl.rewards.scorers import default_compute_score, search_r1_like_qa_em, tool_use
from verl.rewards.scorers.short_answers import countdown, knights_and_knaves, multiple_choice

CAPITAL = {"target": ["Washington, D.C.", "Washington"]}


@pytest.mark.parametrize(
    "text, gold, score",
    [
        ("<answer>Washington</answer>", CAPITAL, 1.0),
        ("<answer> the  WASHINGTON d.c. </answer>", CAPITAL, 1.0),
        ("<answer>Paris</answer> no <answer>Washington!</answer>", CAPITAL, 1.0),
        ("<answer>Washington</answer> no <answer>Paris</answer>", CAPITAL, 0.0),
        ("<answer>Washington State</answer>", CAPITAL, 0.0),
        ("Washington", CAPITAL, 0.0),
        ("<answer></answer>", CAPITAL, 0.0),
        ("<answer>Washington", CAPITAL, 0.0),
        ("", CAPITAL, 0.0),
        ("<answer>Beatles</answer>", "The Beatles", 1.0),
        ("<answer>1,000</answer>", ["1000"], 1.0),
        ("<ANSWER>Beyoncé</ANSWER>", {"target": "Beyoncé"}, 1.0),
        ("<answer>Jean-Luc</answer>", {"target": ["Jean Luc"]}, 0.0),
        ("<answer>\nWashington\n</answer>", CAPITAL, 1.0),
    ],
)
def test_search_r1_wants_one_of_the_golden_answers(text, gold, score):
    assert search_r1_like_qa_em.compute_score(text, gold) == score


def test_search_r1_pays_for_the_format_and_finds_within_on_request():
    assert search_r1_like_qa_em.compute_score("<answer>x</answer>", CAPITAL, format_score=0.1) == 0.1
    assert search_r1_like_qa_em.compute_score("x", CAPITAL, format_score=0.1) == 0.0
    assert search_r1_like_qa_em.compute_score("<answer>in Washington now</answer>", CAPITAL, method="subem") == 1.0
    with pytest.raises(ValueError, match="method='lax'"):
        search_r1_like_qa_em.compute_score("", CAPITAL, method="lax")


@pytest.mark.parametrize(
    "text, gold, is_right",
    [
        (r"\boxed{B}", "B", True),
        (r"\boxed{\text{(B)}}", "B", True),
        ("The answer is B.", "B", True),
        ("The correct answer is (B) because A is wrong", "B", True),
        ("**Answer: B**", "B", True),
        ("<answer>B</answer>", "B", True),
        ("<answer>(B) the second</answer>", "B", True),
        ("<think>Answer: A</think> Answer: B", "B", True),
        ("I think\nB\n", "B", True),
        ("B) the second", "B", True),
        ("B.", "B", True),
        ("A cat sat. The answer is B", "B", True),
        ("A cat sat", "A", False),
        ("The answer is Berlin", "B", False),
        ("Answer: A", "B", False),
        (r"Answer: B \boxed{A}", "B", False),
        (r"\boxed{}", "B", False),
        ("", "B", False),
        ("Answer: C", "2", True),
        ("Answer: 2", "2", True),
        ("Answer: 2", 2, True),
        ("Answer: B", "2", False),
    ],
)
def test_multiple_choice_reads_the_option_a_response_settles_on(text, gold, is_right):
    result = multiple_choice(text, gold)
    assert result["acc"] is is_right and result["score"] == float(is_right)


NUMBERS = {"target": 46, "numbers": [5, 4, 47]}


@pytest.mark.parametrize(
    "answer, score",
    [
        ("(4 + 47) - 5", 1.0),
        ("47-5+4", 1.0),
        ("47 - (5 - 4)", 1.0),
        ("47 - 5 + 4 = 46", 1.0),
        ("47 - 5 + 4 = 46 = 46", 0.1),
        ("47 - 1", 0.1),
        ("47 - 5 + 4 + 0", 0.1),
        ("46", 0.1),
        ("47 - 5", 0.1),
        ("5 * 4 + 47", 0.1),
        ("47 / (5 - 5)", 0.1),
        ("9**9**9**9", 0.1),
        ("__import__('os').system('echo')", 0.0),
        ("__import__('os').system('echo 46')", 0.1),
        ("(" * 400 + "46" + ")" * 400, 0.1),
        ("x", 0.0),
        ("", 0.0),
        ("47 − 5 + 4", 0.1),
        ("47 - 5 + 4.0", 0.1),
        ("47 ÷ 47 × 46", 0.1),
    ],
)
def test_countdown_pays_for_an_equation_of_the_numbers_and_a_little_for_any(answer, score):
    assert countdown(f"<think>46</think><answer>{answer}</answer>", NUMBERS) == score


def test_countdown_knows_fractions():
    gold = {"target": 24, "numbers": [3, 3, 8, 8]}
    assert countdown("<answer>8 / (3 - 8 / 3)</answer>", gold) == 1.0
    assert countdown("8 / (3 - 8 / 3)", gold) == 0.0


KINDS = "(1) Amelia is a knight\n(2) Penelope is a knave"


@pytest.mark.parametrize(
    "text, score",
    [
        (f"<answer>{KINDS}</answer>", 1.0),
        ("<answer>Penelope is a knave, and Amelia is a knight.</answer>", 1.0),
        ("<answer>amelia: Knight; penelope: KNAVE</answer>", 1.0),
        ("<answer>**Amelia** is a **knight**, **Penelope** is a **knave**</answer>", 1.0),
        (f"<think><answer>no</answer></think><answer>{KINDS}</answer>", 1.0),
        ("<answer>Amelia is a knave, Penelope is a knave</answer>", 0.0),
        ("<answer>Amelia is a knight</answer>", 0.0),
        (f"<answer>{KINDS} Amelia is a knave</answer>", 0.0),
        (f"<answer>{KINDS} (3) Evelyn is a knave</answer>", 0.0),
        (f"<think><answer>{KINDS}</answer></think>", 0.0),
        (KINDS, 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_knights_and_knaves_wants_everybody(text, score):
    assert knights_and_knaves(text, {"solution_text_format": KINDS}) == score
    assert knights_and_knaves(text, KINDS) == score


def test_knights_and_knaves_pays_for_naming_everybody_on_request():
    wrong = "<answer>Amelia is a knave, Penelope is a knave</answer>"
    assert knights_and_knaves(wrong, KINDS, format_score=0.2) == 0.2


CALL = '<think> so </think>\n<tool_call>\n{"name": "news", "parameters": {"page": "1", "of": "Azure"}}\n</tool_call>'
REPLY = "<think> so </think>\n<response> Sure. </response>"


@pytest.mark.parametrize(
    "text, gold, score",
    [
        (CALL, CALL, 1.0),
        (CALL.replace('"page": "1", "of": "Azure"', '"of": "Azure", "page": "1"'), CALL, 1.0),
        (CALL.replace("parameters", "arguments"), CALL, 1.0),
        (CALL + "\n<response> Wait. </response>", CALL, 1.0),
        (CALL.replace("Azure", "Excel"), CALL, 3 / 4),
        (CALL.replace('"of"', '"about"'), CALL, (1 + 1 / 3 + 1) / 4),
        (CALL.replace("news", "weather"), CALL, 0.0),
        (CALL.replace("</tool_call>", '{"name": "more", "parameters": {}}\n</tool_call>'), CALL, (0.5 + 3) / 4),
        (CALL.removeprefix("<think> so </think>\n"), CALL, 0.0),
        (CALL.replace("}}", "}"), CALL, 0.0),
        (CALL.replace('"news"', "7"), CALL, 0.0),
        (REPLY, CALL, 0.0),
        (REPLY, REPLY, 1.0),
        (REPLY.replace("Sure.", "Other words."), REPLY, 1.0),
        (REPLY.replace(" Sure. ", " "), REPLY, 0.0),
        (CALL, REPLY, 0.0),
        ("Sure.", REPLY, 0.0),
        ("", CALL, 0.0),
        ("<think>" * 3000, CALL, 0.0),
        ('<think></think><tool_call>{"name": "a", "parameters": ' + '{"a":' * 5000 + "</tool_call>", CALL, 0.0),
    ],
)
def test_tool_use_is_the_share_of_names_parameters_and_values(text, gold, score):
    result = tool_use.compute_score(text, gold)
    assert result["score"] == pytest.approx(score) and result["acc"] is (score == 1.0)


ENTRY = '{"question": "8 + 5 =", "answer": "13", "metadata": {"source_dataset": "chain_sum", "source_index": 0}}'


def test_reasoning_gym_is_asked_for_its_own_rule():
    pytest.importorskip("reasoning_gym")
    info = {"entry": ENTRY, "dataset": "chain_sum"}
    for text, score in (("<answer>13</answer>", 1.0), ("13", 0.0), ("<answer>12</answer>", 0.0), ("", 0.0)):
        assert default_compute_score("reasoning_gym/chain_sum", text, "13", info) == pytest.approx(score, abs=0.02)
    with pytest.raises(ValueError, match="no task 'chain_summ'"):
        default_compute_score("reasoning_gym/chain_summ", "<answer>1</answer>", "13", {"entry": ENTRY})
    with pytest.raises(ValueError, match="'entry'"):
        default_compute_score("reasoning_gym/chain_sum", "<answer>1</answer>", "13", {})


def test_reasoning_gym_names_the_way_to_install_it(monkeypatch):
    from verl.rewards.scorers import reasoning_gym_tasks

    monkeypatch.setattr(reasoning_gym_tasks.importlib.util, "find_spec", lambda name: None)
    reasoning_gym_tasks._check_installed.cache_clear()
    with pytest.raises(ImportError, match=r"pip install -e '[^']*\[reasoning-gym\]'"):
        default_compute_score("reasoning_gym/chain_sum", "<answer>13</answer>", "13", {"entry": ENTRY})
