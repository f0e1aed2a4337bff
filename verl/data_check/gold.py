"""What a right answer looks like as a response: a row's ground truth in each form that scorers read.

A scorer wants its answer marked (``#### 18``, ``\\boxed{18}``, ``<answer>18</answer>``, a code block, ...) and does not
say how. So the forms are tried, and the one that scores best on the first rows of a data source is kept for the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GARBAGE = "I am not sure about this one, so let me talk about the weather instead."
"""A response that answers nothing."""

_SOLUTIONS = ("solution", "answer", "one_solution", "reference", "canonical_solution", "response", "gold")
"""Names under which ``extra_info`` holds a worked solution, an expression or a program."""

_ANSWERS = ("solution_text_format", "answer", "target", "expected_answer")
"""Names under which a ground truth that is a mapping holds its answer."""

FORMS: dict[str, Callable[[str], str]] = {
    "answer": "{}".format,
    "#### answer": "So the answer is\n#### {}".format,
    "\\boxed{answer}": lambda answer: f"The answer is $\\boxed{{{answer}}}$.",
    "Answer: answer": "So we are done.\n\nAnswer: {}".format,
    "<answer>answer</answer>": "<think>It follows.</think>\n<answer>{}</answer>".format,
    "<think>...</think> \\boxed{answer}": lambda answer: f"<think>It follows.</think> \\boxed{{{answer}}}",
    "```python answer```": "```python\n{}\n```".format,
}
"""Name -> an answer written that way."""


def gold_responses(ground_truth: Any, extra_info: Any) -> dict[str, str]:
    """Form -> response; empty where the row does not say what would be right."""
    info = extra_info if isinstance(extra_info, Mapping) else {}
    found: dict[str, str] = {}
    for name in _SOLUTIONS:
        text = info.get(name)
        if isinstance(text, str) and text.strip():
            found[f"extra_info.{name}"] = text
            found |= {shown.format(name): FORMS[form](text) for form, shown in _WRAPPED.items()}
            if name == "canonical_solution" and isinstance(info.get("prompt"), str):
                found["prompt + canonical_solution"] = FORMS["```python answer```"](info["prompt"] + text)
    for answer in _answers(ground_truth):
        for form, write in FORMS.items():
            found.setdefault(form, write(answer))
    return found


_WRAPPED = {
    "<answer>answer</answer>": "<answer>{}</answer>",
    "\\boxed{answer}": "\\boxed{{{}}}",
    "```python answer```": "```python {}```",
}
"""Forms that a worked solution may need, and what to call them of it."""


def _answers(ground_truth: Any) -> Iterator[str]:
    """Texts that a ground truth may mean, the likeliest first."""
    if isinstance(ground_truth, str):
        parsed = _parsed(ground_truth)
        if isinstance(parsed, (Mapping, list)):
            yield from _answers(parsed)
        if not isinstance(parsed, Mapping):  # a mapping in JSON is a set of tests or rules, nothing to be said
            yield ground_truth
    elif isinstance(ground_truth, (bool, int, float)):
        yield str(ground_truth)
    elif isinstance(ground_truth, list) and ground_truth:
        yield from _answers(ground_truth[0])
    elif isinstance(ground_truth, Mapping):
        for name in _ANSWERS:
            if ground_truth.get(name) is not None:
                yield from _answers(ground_truth[name])


def _parsed(text: str) -> Any:
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
