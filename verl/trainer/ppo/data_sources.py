"""Whether somebody scores each data source there is, asked before a model is loaded."""

import logging
from collections.abc import Iterable
from typing import Any

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


def _tell(problem: UnknownDataSource, on_error: str) -> None:
    if on_error == "stop":
        raise problem
    logger.warning("%s", problem)


def _sources(datasets: Iterable[Any], key: str) -> list[str]:
    found: dict[str, None] = {}
    for dataset in datasets:
        rows = getattr(dataset, "dataframe", None)
        if isinstance(rows, RowTable) and key in rows.column_names:
            found |= dict.fromkeys(source for source in rows.distinct(key) if isinstance(source, str))
    return list(found)
