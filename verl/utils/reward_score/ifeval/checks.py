"""One function per instruction: (response, what the instruction names) -> whether it is followed."""

import json
import re
from collections.abc import Callable

from verl.utils.reward_score.ifeval.language import is_in_language, main_script
from verl.utils.reward_score.ifeval.text import count_sentences, count_words, words

Check = Callable[..., bool]

CHECKS: dict[str, Check] = {}
"""Instruction id -> its check."""

_CHOICES = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-)\s*[^\s*-]", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")


def instruction(name: str) -> Callable[[Check], Check]:
    def enter(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return enter


def compares(count: int, relation: str, wanted: int) -> bool:
    """``at least`` or ``less than``.

    Raises:
        ValueError: another relation.
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation={relation!r} is not known: use 'at least' or 'less than'.")
    return count >= wanted if relation == "at least" else count < wanted


# -- words ------------------------------------------------------------------------------------------------------------


@instruction("keywords:existence")
def has_keywords(response: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in response.lower() for keyword in keywords)


@instruction("keywords:forbidden_words")
def lacks_words(response: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) for word in forbidden_words)


@instruction("keywords:frequency")
def has_keyword_often(response: str, keyword: str, frequency: int, relation: str = "at least") -> bool:
    return compares(response.lower().count(keyword.strip().lower()), relation, frequency)


@instruction("keywords:letter_frequency")
def has_letter_often(response: str, letter: str, let_frequency: int, let_relation: str = "at least") -> bool:
    return compares(response.lower().count(letter.lower()), let_relation, let_frequency)


@instruction("language:response_language")
def is_in(response: str, language: str) -> bool:
    return is_in_language(response, language)


# -- lengths ----------------------------------------------------------------------------------------------------------


@instruction("length_constraints:number_words")
def has_words(response: str, num_words: int, relation: str = "at least") -> bool:
    return compares(count_words(response), relation, num_words)


@instruction("length_constraints:number_sentences")
def has_sentences(response: str, num_sentences: int, relation: str = "at least") -> bool:
    return compares(count_sentences(response), relation, num_sentences)


@instruction("length_constraints:number_paragraphs")
def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Paragraphs stand between dividers ``***``; one may stand before the first and behind the last."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    return all(parts[1:-1]) and len([part for part in parts if part]) == num_paragraphs


@instruction("length_constraints:nth_paragraph_first_word")
def has_paragraph_that_begins(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are parted by empty lines."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", response) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    found = words(parts[nth_paragraph - 1])
    return bool(found) and found[0].lower() == first_word.strip().lower()


# -- content and format -----------------------------------------------------------------------------------------------


@instruction("detectable_content:number_placeholders")
def has_placeholders(response: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]*\]", response)) >= num_placeholders


@instruction("detectable_content:postscript")
def has_postscript(response: str, postscript_marker: str = "P.S.") -> bool:
    letters = re.findall(r"\w", postscript_marker)
    return re.search(r"(?<!\w)" + r"\.\s?".join(letters) + r"\b.*\S", response, re.IGNORECASE) is not None


@instruction("detectable_format:number_bullet_lists")
def has_bullets(response: str, num_bullets: int) -> bool:
    return len(_BULLET.findall(response)) == num_bullets


@instruction("detectable_format:number_highlighted_sections")
def has_highlights(response: str, num_highlights: int) -> bool:
    return sum(bool((one or other).strip()) for one, other in _HIGHLIGHT.findall(response)) >= num_highlights


@instruction("detectable_format:multiple_sections")
def has_sections(response: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s+\d+", response)) >= num_sections


@instruction("detectable_format:constrained_response")
def is_one_of_the_choices(response: str) -> bool:
    return any(choice in response.lower() for choice in _CHOICES)


@instruction("detectable_format:json_format")
def is_json(response: str) -> bool:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", response.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


@instruction("detectable_format:title")
def has_title(response: str) -> bool:
    return any(title.strip() for title in re.findall(r"<<([^\n<>]+)>>", response))


# -- whole responses --------------------------------------------------------------------------------------------------


@instruction("combination:two_responses")
def is_two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    inner = [part for part in parts if part]
    return len(inner) == 2 and all(parts[1:-1]) and inner[0] != inner[1]


@instruction("combination:repeat_prompt")
def repeats(response: str, prompt_to_repeat: str) -> bool:
    return response.strip().lower().startswith(prompt_to_repeat.strip().lower())


@instruction("startend:end_checker")
def ends_with(response: str, end_phrase: str) -> bool:
    return response.strip().strip('"').lower().endswith(end_phrase.strip().lower())


@instruction("startend:quotation")
def is_quoted(response: str) -> bool:
    text = response.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


@instruction("change_case:english_capital")
def is_upper(response: str) -> bool:
    return response.isupper() and main_script(response) == "LATIN"


@instruction("change_case:english_lowercase")
def is_lower(response: str) -> bool:
    return response.islower() and main_script(response) == "LATIN"


@instruction("change_case:capital_word_frequency")
def has_capital_words(response: str, capital_frequency: int, capital_relation: str = "at least") -> bool:
    return compares(sum(word.isupper() for word in words(response)), capital_relation, capital_frequency)


@instruction("punctuation:no_comma")
def has_no_comma(response: str) -> bool:
    return "," not in response
