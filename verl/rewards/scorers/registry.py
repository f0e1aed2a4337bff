"""Which scorer belongs to which data source. A scorer's module is imported when its first row comes."""

import fnmatch
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from verl.utils.py_functional import nearest_name

_HERE = "verl.rewards.scorers"

_SCORERS: dict[str, tuple[str, ...]] = {
    "gsm8k:compute_score": ("openai/gsm8k", "svamp", "ChilleD/SVAMP"),
    "math:compute_score": (
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "HuggingFaceH4/MATH-500",
        "amc*",
        "math-ai/amc23",
        "math",
    ),
    "math_dapo:compute_score": ("math_dapo",),
    "math_dapo:compute_score_boxed_too": ("aime*",),
    "prime_math:compute_score": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "geo3k:compute_score": ("hiyouga/geometry3k",),
    "search_r1_like_qa_em:compute_score": (
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    ),
    "code:compute_score": ("codecontests", "apps", "codeforces", "taco"),
    "code:compute_score_of_tests": ("code",),
    "code:compute_score_of_asserts": (
        "google/mbpp",
        "google-research-datasets/mbpp",
        "mbpp",
        "openai/human-eval",
        "openai/openai_humaneval",
        "humaneval",
    ),
    "multiple_choice:compute_score": (
        "multiple_choice",
        "Rowan/hellaswag",
        "cais/mmlu",
        "TIGER-Lab/MMLU-Pro",
        "allenai/ai2_arc",
        "allenai/openbookqa",
        "tau/commonsense_qa",
        "Idavidrein/gpqa",
    ),
    "ifeval:compute_score": ("google/IFEval", "ifeval"),
    "countdown:compute_score": ("countdown",),
    "knights_and_knaves:compute_score": ("kk_logic",),
    "reasoning_gym_tasks:compute_score": ("reasoning_gym/*",),
    "tool_use:compute_score": ("rlla",),
    "arithmetic:compute_score": (
        "digit_add",
        "arithmetic/add1",
        "arithmetic/mul1",
        "arithmetic/max3",
        "arithmetic/even",
    ),
    "brightness:compute_score": ("brightness",),
    "digits:compute_score": ("digits",),
}
"""Function -> its data sources; a name that ends in ``*`` stands for all that begin so."""

SOURCES: dict[str, str] = {source: path for path, sources in _SCORERS.items() for source in sources}
"""Data source -> its function."""


class UnknownDataSource(NotImplementedError):
    """No built-in scorer belongs to a data source."""


def known_data_sources() -> list[str]:
    """The data sources that have a built-in scorer; ``aime*`` stands for all names that begin with ``aime``."""
    return list(SOURCES)


def has_scorer(data_source: str) -> bool:
    """Whether a data source has a built-in scorer."""
    return _entry(data_source) is not None


def is_for_judge(data_source: str, named: Sequence[str]) -> bool:
    """Whether a judge scores a data source: a pattern fits, or there is none and no built-in scorer."""
    return any(fnmatch.fnmatchcase(data_source, one) for one in named) if named else not has_scorer(data_source)


def scorer_of(data_source: str) -> tuple[Callable[..., float | dict], Mapping[str, Any]]:
    """The function that scores a data source, and its parameters by name.

    Raises:
        UnknownDataSource: there is none; names the nearest and all there are.
    """
    path = _entry(data_source)
    if path is None:
        raise unknown(data_source)
    return _load(path)


def unknown(data_source: str) -> UnknownDataSource:
    """What to say of a data source without a scorer."""
    return UnknownDataSource(
        f"data_source={data_source!r} has no built-in scorer.{nearest_name(str(data_source), SOURCES)} Name a "
        "function of your own with custom_reward_function.path, for this source alone with reward_model.by_source. "
        f"Known are {', '.join(SOURCES)}."
    )


def _entry(data_source: str) -> str | None:
    path = SOURCES.get(data_source)
    if path is not None or not isinstance(data_source, str):
        return path
    families = (name for name in SOURCES if name.endswith("*") and data_source.startswith(name[:-1]))
    return SOURCES.get(max(families, key=len, default=""))


@cache
def _load(path: str) -> tuple[Callable[..., float | dict], Mapping[str, Any]]:
    module, name = path.split(":")
    function = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    return function, inspect.signature(function).parameters
