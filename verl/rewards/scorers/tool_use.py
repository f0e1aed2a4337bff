"""Tool calls as ToolRL scores them (Qian et al. 2025, arXiv:2504.13958), on a scale from 0 to 1.

A response is ``<think>...</think>`` and then ``<tool_call>`` with one JSON object a line, ``<response>``, or both.
"""

import json
from collections import Counter
from typing import Any


def tool_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the calls of a response: an empty list if it makes none; None if the text between the tags is no call."""
    written = _between(text, "<tool_call>", "</tool_call>")
    if written is None:
        return []
    calls = []
    for line in filter(None, map(str.strip, written.splitlines())):
        try:
            call = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        # models write either name, and null for no arguments
        arguments = call.get("parameters", call.get("arguments")) or {}
        if not isinstance(arguments, dict):
            return None
        calls.append({"name": call["name"], "parameters": arguments})
    return calls


def compute_score(solution_str: str, ground_truth: str) -> dict[str, float | bool]:
    """Share of the reference response's tool use that a response has, between 0 and 1.

    Names, parameter names and values count alike: with the calls paired as they fit best,

        score = (names in common / all names + parameter names in common / all of each pair + equal values)
                / (1 + pairs + values of the reference calls)

    Where the reference response calls nothing, the score is 1.0 for a ``<response>`` without a call. It is 0 for
    another layout, for calls that are no JSON, and for calls where there should be none, or none where there should be
    some.

    Returns:
        ``score``, ``acc`` (whether the score is 1) and ``format`` (whether the layout is right).
    """
    is_laid_out = _is_laid_out(solution_str)
    gold, answer = tool_calls(ground_truth) or [], tool_calls(solution_str)
    share = 0.0
    if is_laid_out and answer is not None:
        if gold and answer:
            share = _share(gold, answer)
        elif not gold and not answer:
            share = float(bool((_between(solution_str, "<response>", "</response>") or "").strip()))
    return {"score": share, "acc": share == 1.0, "format": is_laid_out}


def _is_laid_out(text: str) -> bool:
    """Whether a text is a thought, then calls or a response or both, and nothing else."""
    rest = text.strip()
    for number, name in enumerate(("think", "tool_call", "response")):
        opening, closing = f"<{name}>", f"</{name}>"
        if rest.startswith(opening):
            _, is_closed, rest = rest.partition(closing)
            if not is_closed:
                return False
            rest = rest.lstrip()
        elif number == 0:
            return False
    return not rest


def _between(text: str, opening: str, closing: str) -> str | None:
    """Return the text between the first opening and the next closing; None if one is missing."""
    _, is_open, rest = text.partition(opening)
    inner, is_closed, _ = rest.partition(closing)
    return inner if is_open and is_closed else None


def _share(gold: list[dict[str, Any]], answer: list[dict[str, Any]]) -> float:
    names, other_names = (Counter(call["name"] for call in calls) for calls in (gold, answer))
    reached = (names & other_names).total() / (names | other_names).total()
    # of the reference alone: superfluous calls cost through the names only
    best = 1.0 + len(gold) + sum(len(call["parameters"]) for call in gold)
    # places are negated, so that of equal fits the reversed order takes the first calls first
    fits = sorted(((_fit(ours, call), -i, -j) for i, ours in enumerate(gold) for j, call in enumerate(answer)))
    rows, columns = set(range(len(gold))), set(range(len(answer)))
    for fit, i, j in reversed(fits):  # the best fit first; each call is paired once
        if -i in rows and -j in columns:
            reached += fit
            rows.discard(-i)
            columns.discard(-j)
    return reached / best


def _fit(gold: dict[str, Any], call: dict[str, Any]) -> float:
    if gold["name"] != call["name"]:
        return 0.0
    these, those = gold["parameters"], call["parameters"]
    everything = these.keys() | those.keys()
    in_common = len(these.keys() & those.keys()) / len(everything) if everything else 1.0
    return in_common + sum(name in those and those[name] == value for name, value in these.items())
