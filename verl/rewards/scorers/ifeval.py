"""IFEval: instructions that can be checked by rule (Zhou et al. 2023, arXiv:2311.07911)."""

import importlib.util
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from verl.utils.distribution import install_command
from verl.utils.py_functional import nearest_name


def compute_score(
    solution_str: str, ground_truth: str | Mapping[str, Any], continuous: bool = False
) -> dict[str, float | bool]:
    """1.0 if a response follows all its instructions, else 0.0. An empty response follows none.

    Args:
        ground_truth: ``{"instruction_id_list": [...], "kwargs": [{...}, ...]}``, as JSON or dict; or
            ``{"func_name": ..., ...}``, one instruction as RLVR-IFeval writes it.
        continuous: the score is the share of instructions that are followed.

    Returns:
        ``score``, ``acc`` (whether all are followed) and ``instruction_acc`` (the share that is).

    Raises:
        ValueError: an instruction is not known.
    """
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    gold = by_function(gold) if "func_name" in gold else gold
    names, kwargs = list(gold["instruction_id_list"]), list(gold["kwargs"])
    followed = [follows(solution_str, name, some) for name, some in zip(names, kwargs, strict=True)]
    share = sum(followed) / len(followed)
    return {"score": share if continuous else float(all(followed)), "acc": all(followed), "instruction_acc": share}


def follows(response: str, instruction: str, kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a response follows one instruction, e.g. ``punctuation:no_comma``."""
    check = CHECKS.get(instruction)
    if check is None:
        raise ValueError(
            f"instruction_id={instruction!r} is not known.{nearest_name(instruction, CHECKS)} "
            f"Known are {', '.join(CHECKS)}."
        )
    # parquet has one struct for the arguments of all instructions: None is another one's
    given = {name: value for name, value in (kwargs or {}).items() if value is not None}
    return bool(response.strip()) and check(response, **given)


_FUNCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter", "N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words"}),
    "verify_sentence_constraint": ("length_constraints:number_sentences", {"N": "num_sentences"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"},
    ),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_title": ("detectable_format:title", {}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": ("change_case:capital_word_frequency", {"N": "capital_frequency"}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""RLVR-IFeval's function -> the instruction it checks, its argument -> ours."""

_RELATIONS = {
    "keywords:frequency": "relation",
    "keywords:letter_frequency": "let_relation",
    "length_constraints:number_words": "relation",
    "length_constraints:number_sentences": "relation",
    "change_case:capital_word_frequency": "capital_relation",
}


def by_function(gold: Mapping[str, Any]) -> dict[str, list]:
    """``instruction_id_list`` and ``kwargs`` of a ground truth ``{"func_name": ..., ...}``.

    ``at most`` is "less than one more", ``around`` within a tenth, and a count without a quantifier is exact.

    Raises:
        ValueError: the function is not known.
    """
    name = str(gold["func_name"])
    if name not in _FUNCTIONS:
        raise ValueError(
            f"func_name={name!r} is not known.{nearest_name(name, _FUNCTIONS)} Known are {', '.join(_FUNCTIONS)}."
        )
    instruction, names = _FUNCTIONS[name]
    kwargs = {ours: gold[theirs] for theirs, ours in names.items() if gold.get(theirs) is not None}
    relation = _RELATIONS.get(instruction)
    if relation is None:
        return {"instruction_id_list": [instruction], "kwargs": [kwargs]}
    counted, count, quantifier = names["N"], int(gold["N"]), gold.get("quantifier")
    spread = max(round(count * 0.1), 1) if quantifier == "around" else 0
    bounds = []
    if quantifier != "at most":
        bounds.append({**kwargs, counted: count - spread, relation: "at least"})
    if quantifier != "at least":
        bounds.append({**kwargs, counted: count + spread + 1, relation: "less than"})
    return {"instruction_id_list": [instruction] * len(bounds), "kwargs": bounds}


# -- Language of a text: by its script where that decides, else by langdetect, an optional package ------------------


SCRIPTS = {
    "ar": "ARABIC", "bn": "BENGALI", "el": "GREEK", "gu": "GUJARATI", "he": "HEBREW", "hy": "ARMENIAN",
    "ka": "GEORGIAN", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM", "or": "ORIYA", "pa": "GURMUKHI",
    "ta": "TAMIL", "te": "TELUGU", "th": "THAI", "am": "ETHIOPIC", "km": "KHMER", "lo": "LAO", "my": "MYANMAR",
    "si": "SINHALA",
    "hi": "DEVANAGARI", "mr": "DEVANAGARI", "ne": "DEVANAGARI",
    "fa": "ARABIC", "ur": "ARABIC",
    "bg": "CYRILLIC", "mk": "CYRILLIC", "ru": "CYRILLIC", "uk": "CYRILLIC",
    "ja": "CJK", "zh": "CJK", "zh-cn": "CJK", "zh-tw": "CJK",
}  # fmt: skip
"""Language -> the script it is written in; all others in Latin letters."""

_JAPANESE = ("HIRAGANA", "KATAKANA")


def is_in_language(text: str, language: str) -> bool:
    """Whether a text is in a language, given by its ISO 639-1 code.

    Raises:
        ImportError: several languages share the script and langdetect is not installed.
    """
    language = language.lower()
    script = SCRIPTS.get(language, "LATIN")
    if main_script(text) != script:
        return False
    if script == "CJK":  # Japanese has letters that Chinese has not
        return (language == "ja") == any(_script(character) in _JAPANESE for character in text)
    if script != "LATIN" and list(SCRIPTS.values()).count(script) == 1:
        return True
    # the cheap look first: rows in English then need no langdetect
    return language == "en" and _looks_english(text) or _detect(text, language)


def main_script(text: str) -> str | None:
    """The script of most letters; None without letters. Chinese and Japanese writing is ``CJK``."""
    counts = Counter(_script(character) for character in text if character.isalpha())
    if not counts:
        return None
    script = counts.most_common(1)[0][0]
    return "CJK" if script in _JAPANESE else script


def _script(character: str) -> str:
    return unicodedata.name(character, "UNKNOWN").partition(" ")[0]


def _looks_english(text: str) -> bool:
    """Whether common English words are there; a text of fewer than 8 words counts as English."""
    found = re.findall(r"[a-z']+", text.lower())
    common = set("the a an and of to in is i you it for my this that be with".split())
    return len(found) < 8 or sum(word in common for word in found) >= len(found) / 20


def _detect(text: str, language: str) -> bool:
    if importlib.util.find_spec("langdetect") is None:
        raise ImportError(
            f"language:response_language with language={language!r} shares its script with others and is recognised by "
            f"the package langdetect, which is not installed: {install_command('ifeval')}."
        )
    import langdetect

    # it samples: without a seed one text may be two languages
    langdetect.DetectorFactory.seed = 0
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return False


# -- Words and sentences of a text -----------------------------------------------------------------------------------


_WORD = re.compile(r"\w+(?:['’.-]\w+)*")
_ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|Inc|Ltd|Co|Corp|Fig|No|approx|e\.g|i\.e|a\.m|p\.m|U\.S|[A-Z])\.(?=\s|$)"
)
_END = re.compile(r"[.!?。！？।]+[\"'”’)\]*_]*(?=\s|$)|[。！？।]")


def words(text: str) -> list[str]:
    """Runs of letters and digits; what an apostrophe, hyphen or inner full stop joins is one word."""
    return _WORD.findall(text)


def count_sentences(text: str) -> int:
    """Pieces that end in a full stop, a question or an exclamation mark, or with the paragraph."""
    text = _ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    # numbers of a list end in a full stop and are no sentences
    text = re.sub(r"^\s*\d+\.\s", "", text, flags=re.MULTILINE)
    pieces = (piece for paragraph in re.split(r"\n\s*\n", text) for piece in _END.split(paragraph))
    return sum(re.search(r"\w", piece) is not None for piece in pieces)


# -- One check an instruction: (response, what the instruction names) -> whether it is followed ----------------------


_BULLET = re.compile(r"^\s*(?:\*(?!\*)|-)\s*[^\s*-]", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*")


def compares(count: int, relation: str, bound: int) -> bool:
    """Compare a count with a bound: ``at least`` or ``less than``.

    Raises:
        ValueError: another relation.
    """
    if relation not in ("at least", "less than"):
        raise ValueError(f"relation={relation!r} is not known: use 'at least' or 'less than'.")
    return count >= bound if relation == "at least" else count < bound


def has_paragraphs(response: str, num_paragraphs: int) -> bool:
    """Paragraphs stand between dividers ``***``; one may stand before the first and behind the last."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", response)]
    return all(parts[1:-1]) and len([part for part in parts if part]) == num_paragraphs


def has_paragraph_that_begins(response: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are parted by empty lines."""
    parts = [part.strip() for part in re.split(r"\n\s*\n", response) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    found = words(parts[nth_paragraph - 1])
    return bool(found) and found[0].lower() == first_word.strip().lower()


def has_postscript(response: str, postscript_marker: str = "P.S.") -> bool:
    letters = re.findall(r"\w", postscript_marker)
    return re.search(r"(?<!\w)" + r"\.\s?".join(letters) + r"\b.*\S", response, re.IGNORECASE) is not None


def is_json(response: str) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json)?\s*|\s*```$", "", response.strip(), flags=re.IGNORECASE))
    except (ValueError, RecursionError):
        return False
    return True


def is_two_responses(response: str) -> bool:
    parts = [part.strip() for part in response.split("******")]
    inner = [part for part in parts if part]
    return len(inner) == 2 and all(parts[1:-1]) and inner[0] != inner[1]


CHECKS: dict[str, Callable[..., bool]] = {
    # IFEval finds keywords within words, too, but forbids whole words only
    "keywords:existence": lambda response, keywords: all(word.lower() in response.lower() for word in keywords),
    "keywords:forbidden_words": lambda response, forbidden_words: (
        not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", response, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:frequency": lambda response, keyword, frequency, relation="at least": compares(
        response.lower().count(keyword.strip().lower()), relation, frequency
    ),
    "keywords:letter_frequency": lambda response, letter, let_frequency, let_relation="at least": compares(
        response.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "language:response_language": lambda response, language: is_in_language(response, language),
    # not `words`: IFEval counts runs of \w+, so that "don't" is two
    "length_constraints:number_words": lambda response, num_words, relation="at least": compares(
        len(re.findall(r"\w+", response)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda response, num_sentences, relation="at least": compares(
        count_sentences(response), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:nth_paragraph_first_word": has_paragraph_that_begins,
    "detectable_content:number_placeholders": lambda response, num_placeholders: (
        len(re.findall(r"\[[^\[\]]*\]", response)) >= num_placeholders
    ),
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": lambda response, num_bullets: (
        len(_BULLET.findall(response)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": lambda response, num_highlights: (
        sum(bool((one or other).strip()) for one, other in _HIGHLIGHT.findall(response)) >= num_highlights
    ),
    "detectable_format:multiple_sections": lambda response, section_spliter, num_sections: (
        len(re.findall(rf"(?<!\w){re.escape(section_spliter.strip())}\s+\d+", response)) >= num_sections
    ),
    "detectable_format:constrained_response": lambda response: any(
        f"my answer is {choice}." in response.lower() for choice in ("yes", "no", "maybe")
    ),
    "detectable_format:json_format": is_json,
    "detectable_format:title": lambda response: any(map(str.strip, re.findall(r"<<([^\n<>]+)>>", response))),
    "combination:two_responses": is_two_responses,
    "combination:repeat_prompt": lambda response, prompt_to_repeat: (
        response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda response, end_phrase: (
        response.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda response: re.fullmatch(r'".*"', response.strip(), re.DOTALL) is not None,
    "change_case:english_capital": lambda response: response.isupper() and main_script(response) == "LATIN",
    "change_case:english_lowercase": lambda response: response.islower() and main_script(response) == "LATIN",
    "change_case:capital_word_frequency": lambda response, capital_frequency, capital_relation="at least": compares(
        sum(word.isupper() for word in words(response)), capital_relation, capital_frequency
    ),
    "punctuation:no_comma": lambda response: "," not in response,
}
"""Instruction id -> its check."""
