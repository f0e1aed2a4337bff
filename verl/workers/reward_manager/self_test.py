"""A reward function tried before it is trusted: does it tell a gold answer from garbage?"""

import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.py_functional import gather_awaitables
from verl.utils.reward_score import default_compute_score
from verl.utils.sandbox.describing import name_of
from verl.utils.sandbox.function import SandboxedFunction, signature_text
from verl.utils.sandbox.outcomes import Failure, NotCalled, Scored, scored, scored_batch
from verl.workers.reward_manager.routing import BySource, functions_of

GARBAGE = ("", "I do not know.", "zqx vbn wfg")
"""Texts that answer nothing."""

_OTHERS = ("7", "yes", "A", "the quick brown fox\n" * 5)
"""Tried where there is no gold: some text should earn another score than the rest."""

_FORMS = (
    "{}",
    "#### {}",
    "\\boxed{{{}}}",
    "The answer is \\boxed{{{}}}.",
    "Answer: {}",
    "<answer>{}</answer>",
    "<answer>\\boxed{{{}}}</answer>",
)
"""How answers are written. A function that knows one form need not know the others: the best one counts."""


@dataclass(frozen=True)
class Report:
    """What came of trying a function.

    ``gold`` and ``garbage`` are mean scores, of each row's best gold answer and of all garbage; None: none was scored.
    """

    function: str
    signature: str
    rows: int
    calls: int
    seconds: float
    gold: float | None
    garbage: float | None
    alarms: tuple[str, ...]

    def __str__(self) -> str:
        numbers = [
            f"{name} {value:.3g}"
            for name, value in (("gold", self.gold), ("garbage", self.garbage))
            if value is not None
        ]
        tried = f"; {', '.join(numbers)} in {self.calls} calls, {self.seconds:.2f} s" if numbers else ""
        is_built_in = self.function == name_of(default_compute_score)
        return ("built-in rules" if is_built_in else f"{self.function}{self.signature}") + tried


@dataclass(frozen=True)
class _Trial:
    row: int
    is_gold: bool
    arguments: dict[str, Any]


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
    """Score gold answers and garbage of a few rows, and say what looks wrong.

    Args:
        function: a reward function, here or in a sandbox.
        rows: as a data file has them: a data source, ``reward_model`` with ``ground_truth``, perhaps ``extra_info``.
        is_batch: it takes lists (``reward_manager=batch``).
        seconds: no call is begun later than that.
        timeout_s: a sandboxed call that takes longer is ended.
        reward_kwargs: for every call.
    """
    start = time.monotonic()
    trials = [trial for i, row in enumerate(rows) for trial in _trials(i, row, reward_fn_key)]
    trials.sort(key=lambda trial: (trial.row, not trial.is_gold))
    outcomes: list[tuple[_Trial, Scored | Failure]] = []
    for part in _parts(trials, is_batch):
        if outcomes and time.monotonic() - start > seconds:
            break
        results = _call(function, [trial.arguments for trial in part], is_batch, timeout_s, reward_kwargs)
        outcomes += [pair for pair in zip(part, results, strict=True) if not isinstance(pair[1], NotCalled)]
    gold, garbage = _means(outcomes)
    one = functions_of(function)[0]
    return Report(
        name_of(one) if not isinstance(function, BySource) else ", ".join(map(name_of, functions_of(function))),
        signature_text(one) if not isinstance(function, BySource) else "",
        len({trial.row for trial, _ in outcomes}),
        len(outcomes),
        time.monotonic() - start,
        gold,
        garbage,
        tuple(_alarms(outcomes, gold, garbage)),
    )


def _parts(trials: list[_Trial], is_batch: bool) -> Iterator[list[_Trial]]:
    """A first call by itself, to see how long it takes; then row by row."""
    if is_batch:
        yield trials
        return
    yield trials[:1]
    for row in sorted({trial.row for trial in trials}):
        yield [trial for trial in trials[1:] if trial.row == row]


def _trials(number: int, row: Mapping[str, Any], key: str) -> Iterator[_Trial]:
    goal = row.get("reward_model")
    truth = goal.get("ground_truth") if isinstance(goal, Mapping) else None
    info = row.get("extra_info")
    info = dict(info) if isinstance(info, Mapping) else {}
    info.setdefault("num_turns", None)
    answers = _gold_answers(truth, info)
    texts = [(text, False) for text in GARBAGE] + [(text, True) for text in answers]
    texts += [] if answers else [(text, False) for text in _OTHERS]
    for text, is_gold in texts:
        arguments = {"data_source": row.get(key), "solution_str": text, "ground_truth": truth, "extra_info": info}
        yield _Trial(number, is_gold, arguments)


def _gold_answers(truth: Any, info: Mapping[str, Any]) -> list[str]:
    """Texts that give the right answer; none where the data do not have it as a text or number."""
    if isinstance(truth, Mapping):  # such as {"target": [...]}
        truth = next(iter(truth.values()), None)
    if hasattr(truth, "tolist"):
        truth = truth.tolist()
    if isinstance(truth, (list, tuple)):
        truth = truth[0] if truth else None
    if not isinstance(truth, (str, int, float)) or isinstance(truth, bool) or not str(truth).strip():
        return []
    worked = info.get("answer")
    whole = [worked] if isinstance(worked, str) and str(truth) in worked else []
    return whole + [form.format(truth) for form in _FORMS]


def _call(
    function: Callable, calls: list[dict], is_batch: bool, timeout_s: float, reward_kwargs: Mapping[str, Any]
) -> list[Scored | Failure | NotCalled]:
    if isinstance(function, BySource):
        samples = [_Row(**call) for call in calls]
        return function.share_out(
            samples, lambda one, part: _call(one, [vars(row) for row in part], is_batch, timeout_s, reward_kwargs)
        )
    if is_batch:
        columns = {f"{name}s": [call[name] for call in calls] for name in calls[0]} if calls else {}
        if isinstance(function, SandboxedFunction):
            return function.batch(len(calls), {**columns, **reward_kwargs})
        try:
            return scored_batch(_awaited(function(**columns, **reward_kwargs)), len(calls))
        except (Exception, SystemExit) as error:
            return [Failure.of(error)] * len(calls)
    if isinstance(function, SandboxedFunction):
        short = SandboxedFunction(function.pool, min(timeout_s, function.timeout_s))
        return short.rows([((), {**call, **reward_kwargs}) for call in calls])
    return [_one(function, {**call, **reward_kwargs}) for call in calls]


@dataclass
class _Row:
    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]


def _one(function: Callable, arguments: dict[str, Any]) -> Scored | Failure:
    try:
        return scored(_awaited(function(**arguments)))
    except (Exception, SystemExit) as error:
        return Failure.of(error)


def _awaited(result: Any) -> Any:
    if inspect.isawaitable(result):
        [result] = gather_awaitables([result], 1)
        if isinstance(result, Exception):
            raise result
    return result


def _means(outcomes: list[tuple[_Trial, Scored | Failure]]) -> tuple[float | None, float | None]:
    best: dict[int, float] = {}
    garbage = []
    for trial, outcome in outcomes:
        if isinstance(outcome, Scored) and trial.is_gold:
            best[trial.row] = max(outcome.score, best.get(trial.row, outcome.score))
        elif isinstance(outcome, Scored):
            garbage.append(outcome.score)
    gold = list(best.values())
    return (sum(gold) / len(gold) if gold else None), (sum(garbage) / len(garbage) if garbage else None)


def _alarms(
    outcomes: list[tuple[_Trial, Scored | Failure]], gold: float | None, garbage: float | None
) -> Iterator[str]:
    failures = [outcome for _, outcome in outcomes if isinstance(outcome, Failure)]
    scores = {outcome.score for _, outcome in outcomes if isinstance(outcome, Scored)}
    if failures:
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in Counter(f.kind for f in failures).items())
        cause = failures[0].cause.splitlines()[0].rstrip(".")
        yield f"it failed on {len(failures)} of {len(outcomes)} texts ({kinds}): {cause}"
    if len(scores) == 1 and len(outcomes) - len(failures) > 2:
        what = "gold answers and garbage alike" if gold is not None else "whatever the text"
        yield f"it scores {scores.pop():g} {what}: a constant reward teaches nothing"
    elif gold is not None and garbage is not None and gold <= garbage:
        yield f"gold answers score {gold:.3g}, garbage {garbage:.3g}: right answers would not be reinforced"
