"""Each instruction of IFEval, followed and not."""

import importlib.util
import json

import pytest

from verl.rewards.scorers.ifeval import CHECKS, compute_score, count_sentences, follows

CASES = [
    ("keywords:existence", {"keywords": ["mom", "Mother"]}, "My Mom, a mother", "my mom"),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, "rocket", "Rock on"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2}, "war and War", "war"),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "less than"}, "war", "war, war"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 2, "let_relation": "at least"}, "#a #b", "#a"),
    ("keywords:letter_frequency", {"letter": "t", "let_frequency": 2, "let_relation": "less than"}, "Tea", "that"),
    ("length_constraints:number_words", {"relation": "at least", "num_words": 3}, "one two three", "one two"),
    ("length_constraints:number_words", {"relation": "less than", "num_words": 3}, "one two", "one two three"),
    ("length_constraints:number_sentences", {"relation": "at least", "num_sentences": 2}, "A b. C d!", "Dr. A b."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\none\n***\ntwo", "one\n***\n***\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "summary"},
        'One.\n\n"Summary: two."',
        "Summary.\n\nTwo.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. one more", "Bye."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S. one more", "Bye.\nP.S. one"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n* b", "* a\n* b\n- c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\na",
    ),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", "Maybe."),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
    ("detectable_format:title", {}, "<<A poem>>\nx", "<< >>"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a haiku."}, "write a haiku. Yes", "Yes: write a haiku."),
    ("startend:end_checker", {"end_phrase": "Any questions?"}, '"So. any questions?"', "Any questions? So."),
    ("startend:quotation", {}, ' "all of it" ', '"'),
    ("change_case:english_capital", {}, "ALL OF IT 1", "ALL OF It"),
    ("change_case:english_lowercase", {}, "all of it 1", "All of it"),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "less than", "capital_frequency": 2},
        "ONE word",
        "TWO WORDS",
    ),
    ("punctuation:no_comma", {}, "no such thing", "well, no"),
    ("language:response_language", {"language": "kn"}, "ನಮಸ್ಕಾರ ಜಗತ್ತು", "hello world"),
    ("language:response_language", {"language": "ja"}, "こんにちは世界", "世界你好"),
]


@pytest.mark.parametrize("instruction, kwargs, good, bad", CASES)
def test_an_instruction_is_followed_or_not(instruction, kwargs, good, bad):
    assert follows(good, instruction, kwargs) and not follows(bad, instruction, kwargs)
    assert not follows(" \n", instruction, kwargs)


def test_every_instruction_has_a_case():
    assert {case[0] for case in CASES} == set(CHECKS) and len(CHECKS) == 25


@pytest.mark.parametrize(
    "text, count",
    [
        ("One. Two? Three!", 3),
        ("Mr. Smith went to the U.S. yesterday.", 1),
        ("It costs 3.50 dollars.", 1),
        ("No end", 1),
        ("1. First.\n2. Second.", 2),
        ('He said "Stop!" and left.', 2),
        ("Wait... what?!", 2),
        ("one\n\ntwo", 2),
        ("你好。再见。", 2),
        ("", 0),
        ("...", 0),
        ("A.", 1),
    ],
)
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


GOLD = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"relation": "at least", "num_words": 3}],
}


def test_all_instructions_or_none_and_the_share_next_to_it():
    assert compute_score("one two three", json.dumps(GOLD)) == {"score": 1.0, "acc": True, "instruction_acc": 1.0}
    assert compute_score("one two", GOLD) == {"score": 0.0, "acc": False, "instruction_acc": 0.5}
    assert compute_score("one two", GOLD, continuous=True)["score"] == 0.5


def test_an_unknown_instruction_is_named_with_the_nearest():
    with pytest.raises(ValueError, match="'punctuation:no_commas'.*Did you mean 'punctuation:no_comma'"):
        follows("x", "punctuation:no_commas")


@pytest.mark.skipif(importlib.util.find_spec("langdetect") is not None, reason="langdetect is installed")
def test_languages_of_one_script_need_a_package():
    assert not follows("hello world", "language:response_language", {"language": "hi"})
    with pytest.raises(ImportError, match=r"pip install -e '[^']*\[ifeval\]'"):
        follows("नमस्ते दुनिया", "language:response_language", {"language": "hi"})
