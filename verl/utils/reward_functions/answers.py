"""Texts to try a reward function on: a row's ground truth in each form that scorers read, and what answers nothing.

A scorer wants its answer marked (``#### 18``, ``\\boxed{18}``, ``<answer>18</answer>``, a code block, ...) and does not
say how.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

GARBAGE = ("", "I do not know.", "zqx vbn wfg")
"""Responses that answer nothing."""

UNRELATED = ("7", "yes", "A", "the quick brown fox\n" * 5)
"""Tried where a row does not say what would be right: some text should earn another score than the rest."""

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
    "<answer>\\boxed{answer}</answer>": lambda answer: f"<answer>\\boxed{{{answer}}}</answer>",
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
    for answer in filter(str.strip, _answers(ground_truth)):
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
    if hasattr(ground_truth, "tolist"):
        ground_truth = ground_truth.tolist()
    if isinstance(ground_truth, str):
        parsed = _parsed(ground_truth)
        if isinstance(parsed, (Mapping, list)):
            yield from _answers(parsed)
        if not isinstance(parsed, Mapping):  # a mapping in JSON is a set of tests or rules, nothing to be said
            yield ground_truth
    elif isinstance(ground_truth, (bool, int, float)):
        yield str(ground_truth)
    elif isinstance(ground_truth, (list, tuple)) and ground_truth:
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
