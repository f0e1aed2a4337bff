"""Where in a response its answer stands: the last ``\\boxed{}``, the last ``<answer>``, the last block of code."""

import re

_OPENED = re.compile("<answer>", re.IGNORECASE)
_CLOSED = re.compile("</answer>", re.IGNORECASE)
_FENCED = re.compile(r"```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_BOXES = ("\\boxed", "\\fbox")


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` (or ``\\boxed 7``), braces balanced; None without one, or one left open.

    >>> last_boxed(r"\\boxed{1} no, \\boxed{\\frac{1}{2}}")
    '\\\\frac{1}{2}'
    """
    start, command = max((text.rfind(command), command) for command in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        return re.split(r"[\s$]", rest, maxsplit=1)[0] if rest else None
    depth = 0
    for i, character in enumerate(rest):
        if character in "{}" and (i == 0 or rest[i - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:i]
    return None


def last_tagged(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``, stripped; None without one."""
    ends = [found.start() for found in _CLOSED.finditer(text)]  # one search for both would try every opening to the end
    starts = [found.end() for found in _OPENED.finditer(text, 0, ends[-1])] if ends else []
    return text[starts[-1] : ends[-1]].strip() if starts else None


def after_thinking(text: str) -> str:
    """The text behind the last ``</think>``; all of it without one."""
    return text.rpartition("</think>")[2]


def code_block(text: str, languages: tuple[str, ...] = ("python", "py", "python3")) -> str:
    """The last fenced block in one of ``languages``, else the last block of any, else the whole text.

    A block that was cut off, without its closing fence, counts.
    """
    blocks = _FENCED.findall(text)
    named = [code for language, code in blocks if language.lower() in languages]
    return (named or [code for _, code in blocks] or [text])[-1]
