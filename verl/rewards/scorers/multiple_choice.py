"""Multiple choice: a letter, or the number of an option counted from 0."""

import re
import string

from verl.rewards.scorers.matching import after_thinking, last_boxed, last_tagged, normalise

_STATED = re.compile(
    r"(?i:answer|option|choice|choose|correct)\W{0,9}(?:(?i:is|would be|must be)\b)?\s{0,9}"
    r"(?i:option|choice|answer)?\W{0,6}\b([A-Z]|\d{1,2})\b(?![\w'’])"
)
_ALONE = re.compile(r"^[^\w\n]*([A-Z]|\d{1,2})[^\w\n]*$", re.MULTILINE)
_WINDOW = 2000
"""Characters at the end of a response in which an option without a mark around it is looked for."""


def choice(response: str) -> str | None:
    """The option a response settles on, as written: ``B`` or ``1``; None if it names none.

    Looked for in the last box, the last ``<answer>``, the last "answer is (B)", a line of its own, in this order.
    """
    text = after_thinking(response)
    for marked in (last_boxed(text), last_tagged(text)):
        if marked is not None:
            plain = normalise(marked).text.upper()
            found = re.fullmatch(r"(?:OPTION |CHOICE )?\W*([A-Z]|\d{1,2})\b(?:\W.*)?", plain, re.DOTALL)
            return found[1] if found else None
    for pattern in (_STATED, _ALONE):
        found = pattern.findall(text[-_WINDOW:])
        if found:
            return found[-1]
    found = re.match(r"\W*([A-Z])(?:[).:]|\s*$)", text)
    return found[1] if found else None


def compute_score(solution_str: str, ground_truth: str | int) -> dict[str, float | bool | str | None]:
    """1.0 for the right option, else 0.0; with ``acc`` and ``pred``.

    Args:
        ground_truth: the letter; or the number of the option counted from 0, which then may be answered by letter.
    """
    gold, said = str(ground_truth).strip().strip("().").upper(), choice(solution_str)
    is_right = said is not None and (
        said == gold or gold.isdigit() and int(gold) < 26 and said == string.ascii_uppercase[int(gold)]
    )
    return {"score": float(is_right), "acc": is_right, "pred": said}
