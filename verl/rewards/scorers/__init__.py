"""Built-in rule-based scorers: text in, number out. No torch, no tokenizer.

A scorer is chosen by the row's ``data_source`` (``registry.py`` has the table). Anything else is scored by the function
the user names with ``custom_reward_function.path``.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from verl.rewards.scorers.registry import UnknownDataSource, has_scorer, known_data_sources, scorer_of, unknown
from verl.sandbox.code_runner import MEMORY_MB
from verl.utils.py_functional import convert_to_regular_types

__all__ = [
    "UnknownDataSource",
    "built_in_options",
    "default_compute_score",
    "has_scorer",
    "known_data_sources",
    "rule_of",
]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
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
        from verl.rewards.scorers.judge import judge_of

        asked = judge_of(judge)
        if asked.judges(data_source):
            return asked.score(data_source, solution_str, ground_truth, extra_info)
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
    }
    named = {name: value for name, value in offered.items() if name in parameters}
    first, second = [name for name in parameters if name not in offered][:2]
    return scorer(**{first: solution_str, second: ground_truth}, **named)


_default_compute_score = default_compute_score
"""Its name until v0.3."""


def built_in_options(reward_model: Any) -> dict[str, Any]:
    """Keyword arguments of :func:`default_compute_score` that a ``reward_model`` section asks for; empty if none."""
    fusion, judge = reward_model.get("sandbox_fusion", None) or {}, reward_model.get("judge", None) or {}
    options: dict[str, Any] = {}
    if fusion.get("url"):
        options = {"sandbox_fusion_url": fusion["url"], "max_concurrent": fusion.get("max_concurrent")}
    if fusion.get("memory_limit_mb", MEMORY_MB) != MEMORY_MB:
        options["memory_limit_mb"] = fusion["memory_limit_mb"]
    if judge.get("url"):
        options["judge"] = convert_to_regular_types(judge)
    places = convert_to_regular_types(reward_model.get("by_source", None) or {})
    rules = {pattern: rule for pattern, place in places.items() if (rule := built_in_rule(place)) is not None}
    return {**options, "score_as": rules} if any(rules.values()) else options


def rule_of(data_source: str, score_as: Mapping[str, Mapping[str, Any]] | None = None) -> tuple[str, dict[str, Any]]:
    """The data source by whose built-in rule a row is scored, and keyword arguments of the rule."""
    for pattern, rule in (score_as or {}).items():
        if fnmatchcase(str(data_source), pattern):
            return rule.get("name", data_source), {name: value for name, value in rule.items() if name != "name"}
    return data_source, {}


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
