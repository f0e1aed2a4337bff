"""IFEval: instructions that can be checked by rule (Zhou et al. 2023, arXiv:2311.07911)."""

import json
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.ifeval.checks import CHECKS
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
