"""Whether each data source has a scorer and each row an agent loop, checked before a model is loaded."""

import logging
from collections.abc import Iterable
from typing import Any

from verl.config.rollout import needs_agent_loops
from verl.utils.dataset.table import RowTable
from verl.utils.reward_functions.routing import BySource, is_built_in
from verl.utils.reward_score import UnknownDataSource, built_in_options, has_scorer, rule_of
from verl.utils.reward_score.registry import is_for_judge, unknown
from verl.workers.reward_manager.rule import RuleRewardManager

logger = logging.getLogger(__name__)


def check_data_sources(config: Any, reward_fn: Any, datasets: Iterable[Any]) -> None:
    """Refuse rows that no scorer would score.

    Datasets that are not rows of files, and managers that score by themselves, tell when their rows come.

    Raises:
        UnknownDataSource: the built-in rules would be asked about a data source they do not know. With
            ``reward_model.on_error`` other than ``stop`` it is a warning.
    """
    section = config.reward_model
    if section.enable or not isinstance(reward_fn, RuleRewardManager):
        return
    options = built_in_options(section)
    judge, score_as = options.get("judge"), options.get("score_as")
    for source in _sources(datasets, reward_fn.reward_fn_key):
        function = reward_fn.compute_score
        if isinstance(function, BySource):
            function = function.function_for(source)
        is_judged = judge is not None and is_for_judge(source, judge["data_sources"])
        if is_built_in(function) and not is_judged and not has_scorer(rule_of(source, score_as)[0]):
            _tell(unknown(source), section.on_error)


AGENT_COLUMN = "agent_name"


def check_agent_names(config: Any, datasets: Iterable[Any]) -> None:
    """Refuse rows whose ``agent_name`` no agent loop of this run has; datasets as in `check_data_sources`.

    Raises:
        ValueError: see `agent_name_problem`.
    """
    if problem := agent_name_problem(config.actor_rollout_ref.rollout, _distinct(datasets, AGENT_COLUMN)):
        raise ValueError(problem)


def agent_name_problem(rollout: Any, names: Iterable[Any]) -> str | None:
    """Why rows with these values of ``agent_name`` cannot be trained on, in words; None: they can.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``. With ``mode=async`` the user's agent loops are imported.
        names: values of the column; empty ones are of ``rollout.agent.default_agent_loop``.
    """
    names = sorted({str(name) for name in names if name})
    if rollout.mode != "async":
        return needs_agent_loops(rollout.mode, names)
    from verl.agent_loop import single_turn  # noqa: F401 - registers the built-in loop; brings the servers' client
    from verl.agent_loop.base import agent_loop, load_agent_loops

    if path := rollout.agent.agent_loop_config_path:
        load_agent_loops(path)
    for name in [*names, rollout.agent.default_agent_loop]:
        try:
            agent_loop(name)
        except ValueError as error:
            return str(error)
    return None


def _tell(problem: UnknownDataSource, on_error: str) -> None:
    if on_error == "stop":
        raise problem
    logger.warning("%s", problem)


def _sources(datasets: Iterable[Any], key: str) -> list[str]:
    return [source for source in _distinct(datasets, key) if isinstance(source, str)]


def _distinct(datasets: Iterable[Any], column: str) -> list[Any]:
    """The values of a column over all datasets that are rows of files."""
    found: dict[Any, None] = {}
    for dataset in datasets:
        rows = getattr(dataset, "dataframe", None)
        if isinstance(rows, RowTable) and column in rows.column_names:
            found |= dict.fromkeys(rows.distinct(column))
    return list(found)
