"""Self-test of a reward function before the first step: known-good answers must score more than known-bad ones."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.config.rollout import loops_may_reward
from verl.rewards.functions.calling import BySource, functions_of, lacks_scorer
from verl.rewards.functions.trial import Trial, TrialRow, mean, try_function
from verl.rewards.managers.built_in import BatchRewardManager
from verl.rewards.managers.rule import RewardError, RuleRewardManager
from verl.rewards.scorers import built_in_options, default_compute_score
from verl.sandbox.messages import name_of


@dataclass(frozen=True)
class Report:
    """Result of the self-test of a function.

    ``known_good`` and ``known_bad`` are mean scores, of right answers in the form that scores best and of texts that
    answer nothing; None: none was scored.
    """

    function: str
    signature: str
    rows: int
    calls: int
    seconds: float
    known_good: float | None
    known_bad: float | None
    alarms: tuple[str, ...]

    def __str__(self) -> str:
        means = {"known-good answers": self.known_good, "known-bad answers": self.known_bad}
        numbers = [f"{name} {value:.3g}" for name, value in means.items() if value is not None]
        tried = f"; {', '.join(numbers)} in {self.calls} calls, {self.seconds:.2f} s" if numbers else ""
        is_built_in = self.function == name_of(default_compute_score)
        return ("built-in rules" if is_built_in else f"{self.function}{self.signature}") + tried


def self_test(
    function: Callable,
    rows: Sequence[Mapping[str, Any]],
    *,
    is_batch: bool = False,
    reward_fn_key: str = "data_source",
    seconds: float = 1.0,
    timeout_s: float = 5.0,
    **reward_kwargs: Any,
) -> Report:
    """Score known-good and known-bad answers of a few rows, and report what looks wrong.

    Args:
        function: a reward function, here or in a sandbox.
        rows: as a data file has them: a data source, ``reward_model`` with ``ground_truth``, perhaps ``extra_info``.
        is_batch: it takes lists (``reward_manager=batch``).
        seconds: no call is begun later than that, but for the first, which does not count.
        timeout_s: a sandboxed call that takes longer is ended.
        reward_kwargs: for every call.
    """
    by_source: dict[Any, list[TrialRow]] = {}
    for number, row in enumerate(rows):
        source, goal, info = (row.get(name) for name in (reward_fn_key, "reward_model", "extra_info"))
        truth = goal.get("ground_truth") if isinstance(goal, Mapping) else None
        info = info if isinstance(info, Mapping) else {}
        by_source.setdefault(source, []).append(TrialRow(f"row {number}", source, truth, info))
    trials: list[Trial] = []
    for source, part in by_source.items():
        # the time is that of all data sources; the first call of each is not on the clock
        left = seconds - sum(trial.seconds for trial in trials)
        if left <= 0:
            break
        options: dict[str, Any] = {"is_batch": is_batch, "timeout_s": timeout_s, "reward_kwargs": reward_kwargs}
        trials.append(try_function(function, source, part, seconds=left, **options))
    try:
        signature = "" if isinstance(function, BySource) else str(inspect.signature(function))
    except (TypeError, ValueError):  # builtins may not tell
        signature = "(...)"
    known_good = [score for trial in trials for score in trial.known_good]
    known_bad = [score for trial in trials for score in trial.known_bad]
    return Report(
        ", ".join(map(name_of, functions_of(function))),
        signature,
        sum(trial.tried for trial in trials),
        sum(trial.calls for trial in trials),
        sum(trial.seconds for trial in trials),
        mean(known_good) if known_good else None,
        mean(known_bad) if known_bad else None,
        tuple(alarm for trial in trials if (alarm := _alarm(trial))),
    )


def _alarm(trial: Trial) -> str | None:
    if trial.error:
        return f"it failed at {trial.error.rstrip('.')}"
    if trial.constant is not None:
        what = "known-good and known-bad answers alike" if trial.known_good else "whatever the text"
        return f"it scores {trial.constant:g} {what}: a constant reward teaches nothing"
    if trial.known_good and mean(trial.known_good) <= mean(trial.known_bad):
        good, bad = mean(trial.known_good), mean(trial.known_bad)
        return f"known-good answers score {good:.3g}, known-bad ones {bad:.3g}: right answers would not be reinforced"
    return None


SELF_TEST_ROWS = 3


def _with_scorer(rows: list[Any], reward_fn: RuleRewardManager, config: Any) -> list[Any]:
    """Return the rows that a reward function scores; of the others the agent loops may return the rewards."""
    options, key = built_in_options(config.reward_model), reward_fn.reward_fn_key
    return [row for row in rows if not lacks_scorer(reward_fn.compute_score, str(row.get(key)), options)]


def try_reward_function(config: Any, reward_fn: Any, dataset: Any) -> Report | None:
    """The report of `self_test` on a run's reward function and first rows; None where there is nothing to try.

    Raises:
        RewardError: something looks wrong, and ``reward_model.self_test=stop``; or, unless it is ``off``, rows lack
            what the manager reads.
    """
    section = config.reward_model
    # a judge of the run's own does not answer before its workers run
    is_off = section.self_test == "off" or section.enable or getattr(section, "runs_judge", False)
    if is_off or not isinstance(reward_fn, RuleRewardManager):
        return None
    if config.env.reward == "environment":
        return None
    rows = [dataset[i] for i in range(min(SELF_TEST_ROWS, len(dataset)))]
    if loops_may_reward(config.actor_rollout_ref.rollout, [row.get("agent_name") for row in rows]):
        rows = _with_scorer(rows, reward_fn, config)
        if not rows:
            return None
    # a manager with a `read` of its own may need other columns
    if rows and isinstance(rows[0], Mapping) and type(reward_fn).read is RuleRewardManager.read:
        reward_fn.check_columns(rows[0])
    report = self_test(
        reward_fn.compute_score,
        [row for row in rows if isinstance(row, Mapping) and "reward_model" in row],
        is_batch=isinstance(reward_fn, BatchRewardManager),
        reward_fn_key=reward_fn.reward_fn_key,
        **reward_fn.reward_kwargs,
    )
    if report.alarms and section.self_test == "stop":
        raise RewardError(
            f"The reward function {report.function} failed its self-test: {'; '.join(report.alarms)}. Correct it, or "
            "go on all the same with reward_model.self_test=warn."
        )
    return report
