"""A reward function on right and wrong answers: right ones must score high, wrong ones low.

Scorers expect the answer in different forms. So all of ``FORMS`` are tried, and the one that scores best on the first
rows of a data source is kept for the others. Works on rows and a function; independent of model and manager.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.rewards.functions.calling import BySource, RawRewardFn, Sample, call, is_built_in, story_of
from verl.sandbox.outcomes import Failure, NotCalled, Outcome, Scored
from verl.utils.py_functional import excerpt

# -- Texts to try a reward function on: a row's ground truth in each form that scorers read, and what answers nothing


KNOWN_BAD = ("", "I do not know.", "zqx vbn wfg")
"""Responses that answer nothing."""

UNRELATED = ("7", "yes", "A", "the quick brown fox\n" * 5)
"""Responses for rows without a right answer: some text should earn another score than the rest."""

_SOLUTIONS = ("solution", "answer", "one_solution", "reference", "canonical_solution", "response", "gold")
"""Names under which ``extra_info`` holds a worked solution, an expression or a program."""

_ANSWERS = ("solution_text_format", "answer", "target", "expected_answer")
"""Names under which a ground truth that is a mapping holds its answer."""

# lambdas where a form has braces of its own, which str.format would read as a field
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


def known_good_responses(ground_truth: Any, extra_info: Any) -> dict[str, str]:
    """Return form -> response; empty where the row holds no right answer."""
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
            # the likeliest answer comes first, and keeps the form
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
        # lists in parquet files arrive as arrays
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


FIRST_S = 10.0
"""Seconds the first call may take, if later ones have fewer: it imports what the function needs."""

_TRIED = 4
"""Rows on which all forms of a right answer are tried before one is chosen."""

HIGH, LOW = 0.95, 0.05
"""A right answer should score more than the first and a wrong one less than the second."""


@dataclass(frozen=True)
class TrialRow:
    """One row, as the reward function gets it."""

    where: str
    data_source: Any
    ground_truth: Any
    extra_info: Mapping[str, Any]


@dataclass
class Trial:
    """Rewards of one data source."""

    data_source: str
    rows: int
    """Rows of this data source in the files."""
    form: str | None = None
    """Form of the right answers; None: the rows hold none."""
    known_good: list[float] = field(default_factory=list)
    """Scores of right answers."""
    known_bad: list[float] = field(default_factory=list)
    """Scores of texts that answer nothing."""
    other: list[float] = field(default_factory=list)
    """Scores of the right answers of other rows."""
    unrelated: list[float] = field(default_factory=list)
    """Scores of texts of several kinds, where the rows hold no right answer."""
    low_known_good: list[str] = field(default_factory=list)
    """Rows whose right answer did not score high."""
    error: str | None = None
    """Row, cause and kind of the failure that ended the trial."""
    kind: Outcome | None = None
    """Outcome of that failure."""
    story: str = ""
    """Report on that failure, in lines: the function with its file, its frames, the row, the response, the goal."""
    has_no_scorer: bool = False
    """Whether the built-in rules have no scorer for the data source."""
    tried: int = 0
    """Rows of which an answer was scored."""
    calls: int = 0
    seconds: float = 0.0
    is_cut: bool = False
    """Whether time was up before the last row."""

    @property
    def constant(self) -> float | None:
        """The only score there is, of right and wrong answers alike; None if they differ."""
        scores = {*self.known_good, *self.known_bad, *self.other, *self.unrelated}
        is_enough = len(self.known_bad) > 0 and bool(self.known_good or self.unrelated)
        return next(iter(scores)) if len(scores) == 1 and is_enough else None

    def problems(self) -> tuple[list[str], list[str]]:
        """Return errors, which would spoil a training, and warnings."""
        name, errors, warnings = f"data_source={self.data_source!r}", [], []
        if self.error:
            errors.append(self.story)
        elif self.known_good and self.constant is not None:
            errors.append(
                f"{name}: right and wrong answers all score {self.constant:g}, so nothing could be learned. Look at "
                "the scorer, and at the form of the answers it wants."
            )
        elif self.known_good and mean(self.known_good) < HIGH:
            worst = f" The first that does not: {self.low_known_good[0]}." if self.low_known_good else ""
            warnings.append(
                f"{name}: right answers, written as {self.form!r}, score {mean(self.known_good):.3f} on average.{worst}"
            )
        elif not self.known_good and not self.is_cut and self.constant is not None:
            warnings.append(
                f"{name}: the rows do not say what would be right, and whatever the text, it scores {self.constant:g}."
            )
        wrong = {"an answer that says nothing": self.known_bad, "the right answer of another row": self.other}
        for kind, scores in wrong.items():
            # a constant score has been reported above, and once is enough
            if self.known_good and scores and mean(scores) > LOW and self.constant is None:
                warnings.append(f"{name}: {kind} scores {mean(scores):.3f} on average.")
        if self.is_cut:
            warnings.append(f"{name}: {self.tried} rows took {self.seconds:.1f} s to score; the others were left out.")
        return errors, warnings


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def try_function(
    function: RawRewardFn,
    source: Any,
    rows: Sequence[TrialRow],
    count: int | None = None,
    *,
    is_batch: bool = False,
    timeout_s: float = 10.0,
    seconds: float = 100.0,
    reward_kwargs: Mapping[str, Any] | None = None,
) -> Trial:
    """Score right and wrong answers of some rows of a data source, up to the first failure.

    Args:
        function: in a sandbox, where one that hangs, exits or crashes costs the process; or here.
        count: rows of that source in the files; None: ``rows`` are all.
        is_batch: it takes lists (``reward_manager=batch``).
        timeout_s: seconds one call may take, in a sandbox; the first has ``FIRST_S`` at least.
        seconds: no call is begun later than that, but for the first, which does not count.
        reward_kwargs: for every call.
    """
    if isinstance(function, BySource):
        function = function.function_for(source)
    found = Trial(str(source), len(rows) if count is None else count)
    calls = _Calls(function, rows, found, is_batch, timeout_s, seconds, reward_kwargs)
    try:
        if rows:
            _score_rows(rows, found, calls)
    except _Over:
        pass
    found.seconds = time.monotonic() - calls.begin
    return found


class _Over(Exception):
    """A call failed, or time is up."""


def _score_rows(rows: Sequence[TrialRow], found: Trial, calls: "_Calls") -> None:
    begin = time.monotonic()
    calls.scores([(0, KNOWN_BAD[-1])])  # by itself: it tells how long a call takes, and may import what it needs
    if time.monotonic() - begin > calls.seconds:
        # a slow first call may have been an import, and is not on the clock: the second one is
        calls.scores([(0, KNOWN_BAD[0])])
    known_good = [known_good_responses(row.ground_truth, row.extra_info) for row in rows]
    form = _best_form(known_good[:_TRIED], calls)
    last: tuple[str, str] | None = None
    for i, (row, responses) in enumerate(zip(rows, known_good, strict=True)):
        right, truth = responses.get(form) if form else None, repr(row.ground_truth)
        # the right answer of another row must score low, unless both rows have the same
        swapped = last[1] if right is not None and last is not None and last[0] != truth else None
        texts = [*KNOWN_BAD, *(UNRELATED if form is None else ()), right, swapped]
        scores = calls.scores([(i, text) for text in texts if text is not None])
        found.known_bad += scores[: len(KNOWN_BAD)]
        rest = scores[len(KNOWN_BAD) :]
        if swapped is not None:
            # texts end with the right and the swapped answer: taken from the end
            found.other.append(rest.pop())
        if right is None:
            found.unrelated += rest
        else:
            found.known_good.append(rest[-1])
            if rest[-1] < HIGH:
                found.low_known_good.append(f"{row.where}: {rest[-1]:g} for {excerpt(right, 120)}")
            last = truth, right
        found.form, found.tried = form, i + 1


def _best_form(known_good: Sequence[Mapping[str, str]], calls: "_Calls") -> str | None:
    """The form in which the right answers of these rows score best; of equals the first."""
    best, best_mean = None, -math.inf
    for form in dict.fromkeys(form for responses in known_good for form in responses):
        scores = calls.scores([(i, texts[form]) for i, texts in enumerate(known_good) if form in texts])
        if mean(scores) > best_mean:
            best, best_mean = form, mean(scores)
        if best_mean >= 1:
            break
    return best


class _Calls:
    """Calls of a function in a trial. A text is scored a second time only for another row."""

    def __init__(
        self,
        function: RawRewardFn,
        rows: Sequence[TrialRow],
        found: Trial,
        is_batch: bool,
        timeout_s: float,
        seconds: float,
        reward_kwargs: Mapping[str, Any] | None,
    ):
        self.function, self.rows, self.found = function, rows, found
        self.is_batch, self.timeout_s, self.seconds, self.reward_kwargs = is_batch, timeout_s, seconds, reward_kwargs
        self.begin = time.monotonic()
        self.known: dict[tuple[int, str], float] = {}

    def scores(self, requests: Sequence[tuple[int, str]]) -> list[float]:
        """Scores of responses to rows.

        Raises:
            _Over: there is none of one of them.
        """
        new = [one for one in dict.fromkeys(requests) if one not in self.known]
        is_first = not self.found.calls
        if not is_first and new and time.monotonic() - self.begin > self.seconds:
            self.found.is_cut = True
            raise _Over
        rows = [self.rows[i] for i, _ in new]
        samples = [
            # with the key that `RuleRewardManager.read` adds: a function may read it
            Sample(row.data_source, text, row.ground_truth, {"num_turns": None, **row.extra_info})
            for row, (_, text) in zip(rows, new, strict=True)
        ]
        timeout_s = max(self.timeout_s, FIRST_S) if is_first else self.timeout_s
        outcomes = call(
            self.function, samples, is_batch=self.is_batch, timeout_s=timeout_s, reward_kwargs=self.reward_kwargs
        )
        if is_first:
            # the clock starts behind the first call, which may import for seconds
            self.begin = time.monotonic()
        self.found.calls += sum(not isinstance(outcome, NotCalled) for outcome in outcomes)
        for row, sample, outcome in zip(rows, samples, outcomes, strict=True):
            if isinstance(outcome, Failure):
                cause = outcome.cause.splitlines()[0]
                # by its text: a failure comes out of a sandbox without the class of its error
                is_unknown = outcome.kind is Outcome.RAISED and "UnknownDataSource" in cause.partition(":")[0]
                self.found.has_no_scorer = is_built_in(self.function) and is_unknown
                self.found.kind, self.found.error = outcome.kind, f"{row.where}: {cause} [{outcome.kind.value}]"
                self.found.story = story_of(self.function, sample, row.where, outcome)
                raise _Over
        # after a failure none is made: those that are left have scores
        self.known |= {one: o.score for one, o in zip(new, outcomes, strict=True) if isinstance(o, Scored)}
        return [self.known[one] for one in requests]
