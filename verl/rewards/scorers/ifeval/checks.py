"""One function per instruction: (response, what the instruction names) -> whether it is followed."""

import importlib.util
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable

from verl.utils.distribution import install_command

# -- In which language a text is: by its script where that decides, else by langdetect, an optional package ----------


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
    script, wanted = main_script(text), SCRIPTS.get(language, "LATIN")
    if script is None:
        return False
    if script != wanted:
        return False
    if language == "ja" or wanted == "CJK":
        return (language == "ja") == any(_script(character) in _JAPANESE for character in text)
    rivals = [other for other, its in SCRIPTS.items() if its == wanted and other != language]
    if wanted != "LATIN" and not rivals:
        return True
    if language == "en" and _looks_english(text):
        return True
    return _detect(text, language)


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
    """Whether common English words are there; a short text gets the benefit of the doubt."""
    found = re.findall(r"[a-z']+", text.lower())
    common = {
        "the",
        "a",
        "an",
        "and",
        "of",
        "to",
        "in",
        "is",
        "i",
        "you",
        "it",
        "for",
        "my",
        "this",
        "that",
        "be",
        "with",
    }
    return len(found) < 8 or sum(word in common for word in found) >= len(found) / 20


def _detect(text: str, language: str) -> bool:
    if importlib.util.find_spec("langdetect") is None:
        raise ImportError(
            f"language:response_language with language={language!r} shares its script with others and is told apart by "
            f"the package langdetect, which is not installed: {install_command('ifeval')}."
        )
    import langdetect

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


def count_words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def count_sentences(text: str) -> int:
    """Pieces that end in a full stop, a question or an exclamation mark, or with the paragraph."""
    text = _ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    text = re.sub(r"^\s*\d+\.\s", "", text, flags=re.MULTILINE)
    pieces = (piece for paragraph in re.split(r"\n\s*\n", text) for piece in _END.split(paragraph))
    return sum(re.search(r"\w", piece) is not None for piece in pieces)


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
