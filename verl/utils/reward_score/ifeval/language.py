"""In which language a text is: by its script where that decides, else by langdetect, an optional package."""

import importlib.util
import re
import unicodedata
from collections import Counter

from verl.utils.distribution import install_command

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
