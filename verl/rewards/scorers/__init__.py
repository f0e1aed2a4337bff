"""Built-in rule-based scorers: text in, number out. No torch, no tokenizer.

A scorer is chosen by the row's ``data_source`` (``SOURCES`` has the table); its module is imported when its first row
comes. Anything else is scored by the function the user names with ``custom_reward_function.path``.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from verl.sandbox.code_runner import MEMORY_MB
from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import convert_to_regular_types, nearest_name

_CODE, _SHORT, _DAPO = "code:compute_score", "short_answers:", "math_dapo:compute_score"

_SCORERS = {
    "gsm8k:compute_score": "openai/gsm8k svamp ChilleD/SVAMP",
    "math:compute_score": (
        "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 amc* math-ai/amc23 math"
    ),
    _DAPO: "math_dapo",
    f"{_DAPO}_boxed_too": "aime*",
    "prime_math:compute_score": (
        "numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12 numina_olympiads"
    ),
    "geo3k:compute_score": "hiyouga/geometry3k",
    "search_r1_like_qa_em:compute_score": (
        "searchR1_nq searchR1_triviaqa searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique "
        "searchR1_bamboogle"
    ),
    _CODE: "codecontests apps codeforces taco",
    f"{_CODE}_of_asserts": (
        "code google/mbpp google-research-datasets/mbpp mbpp openai/human-eval openai/openai_humaneval humaneval"
    ),
    f"{_SHORT}multiple_choice": (
        "multiple_choice Rowan/hellaswag cais/mmlu TIGER-Lab/MMLU-Pro allenai/ai2_arc allenai/openbookqa "
        "tau/commonsense_qa Idavidrein/gpqa"
    ),
    "ifeval:compute_score": "google/IFEval ifeval",
    f"{_SHORT}countdown": "countdown",
    f"{_SHORT}knights_and_knaves": "kk_logic",
    "reasoning_gym_tasks:compute_score": "reasoning_gym/*",
    "tool_use:compute_score": "rlla",
    f"{_SHORT}arithmetic": "digit_add arithmetic/add1 arithmetic/mul1 arithmetic/max3 arithmetic/even",
    f"{_SHORT}brightness": "brightness",
    f"{_SHORT}digits": "digits",
}
"""Function -> its data sources; a name that ends in ``*`` stands for all that begin so."""

SOURCES: dict[str, str] = {source: path for path, sources in _SCORERS.items() for source in sources.split()}
"""Data source -> its function."""


class UnknownDataSource(NotImplementedError):
    """No built-in scorer belongs to a data source."""

    exit_class = ExitCode.DATA


def known_data_sources() -> list[str]:
    """The data sources that have a built-in scorer; ``aime*`` stands for all names that begin with ``aime``."""
    return list(SOURCES)


def has_scorer(data_source: str) -> bool:
    """Whether a data source has a built-in scorer."""
    return _entry(data_source) is not None


def is_for_judge(data_source: str, named: Sequence[str]) -> bool:
    """Whether a judge scores a data source: a pattern fits, or there is none and no built-in scorer."""
    return any(fnmatchcase(data_source, one) for one in named) if named else not has_scorer(data_source)


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
    """The error of a data source without a scorer."""
    return UnknownDataSource(
        f"data_source={data_source!r} has no built-in scorer.{nearest_name(str(data_source), SOURCES)} Name a "
        "function of your own with custom_reward_function.path, for this source alone with reward_model.by_source. "
        f"Known are {', '.join(SOURCES)}."
    )


def _entry(data_source: str) -> str | None:
    path = SOURCES.get(data_source)
    # an empty cell of a CSV is NaN: an unknown source, not an AttributeError
    if path is not None or not isinstance(data_source, str):
        return path
    # the longest pattern is the most particular
    families = (name for name in SOURCES if name.endswith("*") and data_source.startswith(name[:-1]))
    return SOURCES.get(max(families, key=len, default=""))


@cache
def _load(path: str) -> tuple[Callable[..., float | dict], Mapping[str, Any]]:
    module, name = path.split(":")
    function = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    return function, inspect.signature(function).parameters


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    allow_uncontained: bool | None = None,
    judge: Mapping[str, Any] | None = None,
    score_as: Mapping[str, Mapping[str, Any]] | None = None,
    **kwargs: Any,
) -> Any:
    """Score a response with the built-in rule of its data source.

    Args:
        data_source: name of the dataset, as in the row's ``data_source``.
        solution_str: the decoded response.
        ground_truth: ``reward_model.ground_truth`` of the row.
        extra_info: the row's ``extra_info``; few rules look at it.
        sandbox_fusion_url, concurrent_semaphore, memory_limit_mb: for rules that run code: the service that runs it
            (None: child processes of this machine), what limits the requests under way, MiB of one program.
        allow_uncontained: run code where this system cannot contain it; None: if the environment allows it.
        judge: settings of ``reward_model.judge``, for a model that scores the data sources they name.
        score_as: data source, or a pattern such as ``math/*``, -> ``{"name": ..., ...}``: the data source by whose rule
            its rows are scored, and keyword arguments of the rule.
        kwargs: more for the rule; those that it has no parameter for are left out.

    Returns:
        a number, or a dict with one under ``score``; of a row that the judge scores an awaitable of such a dict.

    Raises:
        UnknownDataSource: the data source has no built-in scorer.
    """
    if judge and judge.get("url"):
        # here: the module imports this one, and the config, which scorers do without
        from verl.rewards.scorers.judge import judge_of

        model = judge_of(judge)
        if model.judges(data_source):
            return model.score(data_source, solution_str, ground_truth, extra_info)
    name, rule_kwargs = rule_of(data_source, score_as)
    scorer, parameters = scorer_of(name)
    offered = {
        **kwargs,
        **rule_kwargs,
        "data_source": data_source,
        "extra_info": extra_info,
        "sandbox_fusion_url": sandbox_fusion_url,
        "concurrent_semaphore": concurrent_semaphore,
        "memory_limit_mb": memory_limit_mb,
        "allow_uncontained": allow_uncontained,
    }
    named = {name: value for name, value in offered.items() if name in parameters}
    # a rule names its two texts as it likes: they are the first parameters that are not offered by name
    first, second = [name for name in parameters if name not in offered][:2]
    return scorer(**{first: solution_str, second: ground_truth}, **named)


_default_compute_score = default_compute_score
"""The name of ``default_compute_score`` until v0.3."""


def built_in_options(reward_model: Any) -> dict[str, Any]:
    """Keyword arguments of :func:`default_compute_score` that a ``reward_model`` section asks for; empty if none."""
    fusion, judge = reward_model.get("sandbox_fusion", None) or {}, reward_model.get("judge", None) or {}
    options: dict[str, Any] = {}
    if fusion.get("url"):
        options = {"sandbox_fusion_url": fusion["url"], "max_concurrent": fusion.get("max_concurrent")}
    # only what is not the default: the dict is part of the key by which processes are shared
    if fusion.get("memory_limit_mb", MEMORY_MB) != MEMORY_MB:
        options["memory_limit_mb"] = fusion["memory_limit_mb"]
    if (reward_model.get("sandbox", None) or {}).get("allow_uncontained_code"):
        options["allow_uncontained"] = True
    if judge.get("url"):
        options["judge"] = convert_to_regular_types(judge)
    places = convert_to_regular_types(reward_model.get("by_source", None) or {})
    rules = {pattern: rule for pattern, place in places.items() if (rule := built_in_rule(place)) is not None}
    # an empty rule (`builtin` alone) stays beside others, since the first pattern that fits is taken
    return {**options, "score_as": rules} if any(rules.values()) else options


def rule_of(data_source: str, score_as: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[str, dict[str, Any]]:
    """The data source by whose built-in rule a row is scored, and keyword arguments of the rule."""
    for pattern, rule in (score_as or {}).items():
        if fnmatchcase(str(data_source), pattern):
            return rule.get("name", data_source), {name: value for name, value in rule.items() if name != "name"}
    return data_source, {}


def runs_programs(data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether the built-in rule of a data source runs programs on this machine.

    Args:
        options: of :func:`built_in_options`.
    """
    path = _entry(rule_of(data_source, options.get("score_as"))[0]) or ""
    return path.startswith(_CODE.partition(":")[0] + ":") and not options.get("sandbox_fusion_url")


def asserts_about_programs(data_source: str, options: Mapping[str, Any]) -> bool:
    """Whether the built-in rule of a data source judges programs by assertions, not by what they print."""
    return _entry(rule_of(data_source, options.get("score_as"))[0]) == f"{_CODE}_of_asserts"


def built_in_rule(place: Any) -> dict[str, Any] | None:
    """Return the built-in rule that an entry of ``reward_model.by_source`` names: ``builtin``, ``builtin:NAME``, or a
    mapping of ``function`` (one of these) and keyword arguments; None: it names another function.

    Raises:
        UnknownDataSource: there is no scorer NAME.
    """
    given = dict(place) if isinstance(place, Mapping) else {"function": place}
    what, _, name = str(given.pop("function", "")).partition(":")
    if what != "builtin":
        return None
    if name and not has_scorer(name):
        raise unknown(name)
    return {**given, **({"name": name} if name else {})}
