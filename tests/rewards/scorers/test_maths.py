"""Answers as models really write them, against gold answers as data sets really keep them."""

import pytest

from verl.rewards.scorers import geo3k, math, math_dapo, math_verify, prime_math
from verl.rewards.scorers.matching import is_equal, last_boxed

DEEP = "(" * 500 + "1" + ")" * 500

SAME = [
    ("5", "5."),
    ("5", "x = 5"),
    ("5", "$5$"),
    ("5", r"\$5"),
    ("5", "5.00"),
    ("0.5", ".5"),
    ("-3", "−3"),
    ("1000", "1,000"),
    ("1234.5", r"\$1{,}234.50"),
    ("12000", r"12,\!000"),
    ("1000", "1e3"),
    ("1200", r"1.2 \times 10^{3}"),
    ("1000000000000", "10^{12}"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac{9}{3}", "3"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"3\frac12", "3.5"),
    ("50", r"50\%"),
    ("50", "50%"),
    ("60", r"60^\circ"),
    ("60", "60°"),
    ("18", "18 eggs"),
    ("70000", "70,000 dollars"),
    (r"10\text{ cm}", "10"),
    (r"10\text{ cm}^2", "10 cm^2"),
    ("6", r"6\text{ square units}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{even}", "Even."),
    (r"\text{(C)}", "C"),
    ("C", "(C)"),
    ("(1,2)", r"\left( 1,\ 2 \right)"),
    (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)"),
    ("[0,1)", r"[0, 1)"),
    (r"(-\infty,2)\cup(3,\infty)", r"(3,\infty) \cup (-\infty,2)"),
    ("[-2,7]", r"x \in [-2,7]"),
    (r"\{1,2\}", r"\{2, 1\}"),
    ("1,2", "2,1"),
    ("1,2", r"1 \text{ and } 2"),
    ("1,2", "x=1 or x=2"),
    ("2,-2", r"\pm 2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2.0 \end{bmatrix}"),
    (r"120_6", r"120_{6}"),
    (r"\frac{\pi}{3}", "pi/3"),
    (r"\sqrt{12}", r"2\sqrt3"),
    (r"\sqrt{2}", "2^{1/2}"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1+2i", "2i+1"),
    ("2x+3", "y=2x+3"),
]

DIFFERENT = [
    ("5", "6"),
    ("5", "-5"),
    ("5", ""),
    ("5", r"\text{}"),
    ("", ""),
    (r"\frac13", "0.333"),
    (r"\frac{1}{3}", "3"),
    ("1000", "100"),
    ("(1,2)", "(2,1)"),
    ("(2,1)", "(3,1)"),
    ("[0,1)", "(0,1)"),
    ("[0,1]", "[0,1)"),
    ("2,3,4", "2,3"),
    ("2,2", "2"),
    (r"\{1,2\}", "(1,2)"),
    (r"10\text{ cm}", "10 m"),
    (r"\text{even}", "odd"),
    (r"\text{Evelyn}", "Evelny"),
    ("120_6", "120_7"),
    ("120_6", "120"),
    ("i", "-i"),
    ("x+1", "x-1"),
    ("2", r"\pm 2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("5", "banana"),
    ("C", "B"),
]


@pytest.mark.parametrize("gold, answer", SAME)
def test_another_spelling_of_the_answer_counts(gold, answer):
    assert is_equal(answer, gold) and is_equal(gold, answer)


@pytest.mark.parametrize("gold, answer", DIFFERENT)
def test_another_answer_does_not(gold, answer):
    assert not is_equal(answer, gold) and not is_equal(gold, answer)


HOSTILE = ["9^9^9^9", "9^{9^{9^9}}", "10^{10^7}", "(9^9)^{999999}", DEEP, "9" * 100_000, "{" * 10_000, "\\frac" * 3000]
HOSTILE += [
    "+".join(f"x^{{{i}}}" for i in range(300)),
    r"\sqrt" * 300 + "2",
    "2!!!!!!!!",
    "\\left(" * 400,
    "1e" + "9" * 50,
]
HOSTILE += [",".join("()" * 2000), "1,2" * 500, "\\int_0^1 " * 30 + "x", "(((x+1)^{99}+1)^{99}+1)^{99}"]


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:20])
def test_hostile_answers_are_wrong_and_the_next_is_judged(answer):
    assert not is_equal(answer, "7/3+x")
    assert is_equal("y+2", "2+y")


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{7}", "7"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"$\boxed 7$ and done", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed{7", None),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("7", None),
        ("", None),
        (r"\boxed {7}", "7"),
    ],
)
def test_the_last_box_is_read_with_its_braces(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    "text, gold, score",
    [
        (r"so \boxed{\frac12}", r"\frac{1}{2}", 1.0),
        (r"\boxed{3}, wait, \boxed{4}", "4", 1.0),
        (r"\boxed{4}, wait, \boxed{3}", "4", 0.0),
        ("it is 4", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{4", "4", 0.0),
        (r"\boxed{4}", r"\boxed{4}", 1.0),
        (r"\boxed{4}", 4, 1.0),
        ("", "4", 0.0),
        (r"\boxed{x=4\text{ apples}.}", "4", 1.0),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{p - q}", "p - q", 1.0),
    ],
)
def test_math_scores_the_last_box(text, gold, score):
    assert math.compute_score(text, gold) == score


def test_math_keeps_the_helpers_of_preprocess_scripts():
    assert math.remove_boxed(math.last_boxed_only_string(r"so \boxed{a{b}} and \boxed{c{d}}.")) == "c{d}"
    assert math.last_boxed_only_string("none") is None
    assert math.is_equiv("1/2", "0.5") and not math.is_equiv(None, "1")
    with pytest.raises(ValueError, match="last_boxed_only_string"):
        math.remove_boxed("7")


@pytest.mark.parametrize(
    "text, gold, score, pred",
    [
        ("Answer: 204", "204", 1.0, "204"),
        ("**Answer:** $204$.", "204", 1.0, "$204$."),
        ("answer : 204", "204", 1.0, "204"),
        (r"Answer: \boxed{204}", "204", 1.0, "204"),
        ("Answer: 1\nAnswer: 204", "204", 1.0, "204"),
        ("Answer: 204\nAnswer: 1", "204", -1.0, "1"),
        ("Answer: 205", "204", -1.0, "205"),
        ("Answer: 0204", "204", 1.0, "0204"),
        ("Answer:", "204", -1.0, math_dapo.INVALID),
        ("so 204", "204", -1.0, math_dapo.INVALID),
        (r"so \boxed{204}", "204", -1.0, math_dapo.INVALID),
        ("Answer: 204" + " " * 300, "204", -1.0, math_dapo.INVALID),
        ("", "204", -1.0, math_dapo.INVALID),
    ],
)
def test_dapo_gives_plus_or_minus_one_for_the_answer_line(text, gold, score, pred):
    assert math_dapo.compute_score(text, gold) == {"score": score, "acc": score > 0, "pred": pred}


def test_dapo_strict_wants_the_box_as_it_is():
    assert math_dapo.compute_score(r"\boxed{204}", "204", strict_box_verify=True)["score"] == 1.0
    assert math_dapo.compute_score(r"\boxed{204.0}", "204", strict_box_verify=True)["score"] == -1.0
    assert math_dapo.compute_score("Answer: 204", "204", strict_box_verify=True)["score"] == -1.0


def test_aime_takes_a_box_where_there_is_no_answer_line():
    assert math_dapo.compute_score_boxed_too(r"so \boxed{204}", "204")["acc"]
    assert not math_dapo.compute_score_boxed_too(r"\boxed{204} Answer: 3", "204")["acc"]


@pytest.mark.parametrize(
    "text, gold, score, is_boxed",
    [
        (r"\boxed{12}", "12", 1.0, True),
        ("The answer is 12.", "12", 1.0, False),
        ("The final answer is $12$\nDone.", "12", 1.0, False),
        ("<answer> 12 </answer>", "12", 1.0, False),
        ("Answer: 12", "12", 1.0, False),
        ("The answer is 13, so \\boxed{12}", "12", 1.0, True),
        ("the answer is 13", "12", 0.0, False),
        ("12", "12", 0.0, False),
        (r"\boxed{13}", "12", 0.0, True),
        (r"\boxed{}", "12", 0.0, True),
        (r"\boxed{\text{all } n}", r"\text{all } n", 1.0, True),
        ("", "12", 0.0, False),
    ],
)
def test_numina_takes_a_box_or_what_the_response_says_its_answer_is(text, gold, score, is_boxed):
    result = prime_math.compute_score(text, gold)
    assert (result["score"], result["acc"], result["format"]) == (score, bool(score), is_boxed)
    assert math_verify.compute_score(text, gold) == score


@pytest.mark.parametrize(
    "text, score",
    [
        (r"<think>a</think> so \boxed{48}", 1.0),
        (r"<think>a</think> so \boxed{48^\circ}", 1.0),
        (r"<think>a</think> so \boxed{49}", 0.1),
        (r"<think>a</think> \boxed{}", 0.1),
        (r"so \boxed{48}", 0.9),
        (r"<think> \boxed{48}", 0.9),
        (r"</think> \boxed{48}", 0.9),
        (r"x <think>a</think> \boxed{48}", 0.9),
        (r"<think>a</think> 48", 0.0),
        (r"<think>\boxed{48}</think> 48", 0.9),
        (r"<think>a</think> \boxed{48.0 \text{ cm}} yes", 1.0),
        ("", 0.0),
    ],
)
def test_geometry_pays_nine_tenths_for_the_answer_and_one_for_the_format(text, score):
    assert geo3k.compute_score(text, "48") == pytest.approx(score)
    assert geo3k.compute_score("48", "48", use_boxed=False) == 0.9
