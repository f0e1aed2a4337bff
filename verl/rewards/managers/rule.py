"""Reward managers: their interface and names, and the base of those that call a Python function.

A batch of responses in, a number per response out. Reads samples, checks results, places rewards; needs no model.
"""

import logging
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch.ragged import Column, Ragged, RowValues
from verl.protocol import DataProto
from verl.rewards.functions.calling import (
    BySource,
    RawRewardFn,
    Sample,
    check_signature,
    functions_of,
    is_built_in,
    story_of,
    way_out_of,
)
from verl.rewards.scorers import default_compute_score
from verl.sandbox.messages import name_of
from verl.sandbox.outcomes import Failure, NotCalled, Outcome, Scored, scored
from verl.sandbox.pool import SandboxedFunction
from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import excerpt, nearest_name
from verl.utils.tokenizer import decode_rows


class RewardError(RuntimeError):
    """A reward function failed or returned no usable number; the message names the sample and what to do."""

    exit_class = ExitCode.DATA


class AbstractRewardManager(ABC):
    """Turns responses into token-level rewards.

    Chosen by ``reward_model.reward_manager``; register your own with ``@register("name")``. It is built once for
    training and once for validation.

    Args:
        tokenizer: decodes responses.
        num_examine: how many samples of each data source to print per batch (0 in training, 1 in validation).
        compute_score: the reward function; ``None`` for the built-in rules of ``verl.rewards.scorers``.
        reward_fn_key: the column that names a row's data source (``data.reward_fn_key``).
        reward_kwargs: everything under ``reward_model.reward_kwargs``.
    """

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ):
        pass

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score every response of the batch, R = response length.

        Returns:
            (B, R) float32 with the score on the last token of the response and zero elsewhere; with ``return_dict``
            ``{"reward_tensor": that, "reward_extra_info": {name: list of B values}}``.
        """


# -- Reward managers by the name they have in ``reward_model.reward_manager`` ----------------------------------------
REWARD_MANAGER_REGISTRY: dict[str, type[AbstractRewardManager]] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: make a reward manager known under ``name``.

    Raises:
        ValueError: another class has the name.
    """

    def enter(cls: type) -> type:
        known = REWARD_MANAGER_REGISTRY.get(name)
        # by name and not identity: a file that is loaded twice makes the same class twice
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(
                f"Reward manager name {name!r} belongs to {known.__module__}.{known.__qualname__}: register "
                f"{cls.__qualname__} under another."
            )
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return enter


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The class registered under ``name``.

    Raises:
        ValueError: there is none; lists the known names.
    """
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(
            f"reward_model.reward_manager={name!r} is not known; known are {', '.join(REWARD_MANAGER_REGISTRY)}."
            f"{nearest_name(name, REWARD_MANAGER_REGISTRY)} Register your own with "
            "verl.rewards.managers.register."
        )
    return REWARD_MANAGER_REGISTRY[name]


# -- Base of the managers that call a Python function: reads samples, checks results, places rewards -----------------


logger = logging.getLogger(__name__)

ON_ERROR = ("stop", "zero_and_count", "drop_sample")

REWARD_ERROR_KEY = "reward_error"
"""Column of ``reward_extra_info`` where failures are borne: 1.0 where scoring failed, else 0.0."""

REWARD_ERROR_KIND_KEY = "reward_error_kind"
"""Column next to it: the `Outcome` of what failed, else None."""


RESPONSE_ERROR_KEY = "response_error"
"""Column of ``reward_extra_info`` if a response made a built-in scorer fail: the `Outcome`, None for other samples."""

_REFUSED = "Uncontained"
"""Error of `verl.sandbox.containment`: this system cannot contain generated programs."""

_NOT_OF_RESPONSES = ("ServiceError", _REFUSED, "Unjudgeable", "UnknownDataSource")
"""Errors of a scorer for which the response cannot be the reason."""


@dataclass(frozen=True)
class FailedByResponse:
    """Result of a built-in scorer that failed because of the response: it scores 0."""

    failure: Failure


class RuleRewardManager(AbstractRewardManager):
    """A manager that scores decoded responses with a Python function. Subclasses call the function.

    Args:
        on_error: when the function raises, is ended, or returns no finite number: ``stop`` the run with everything
            named; ``zero_and_count``: reward 0 (and ``acc`` 0), marked in the extra columns ``reward_error`` and
            ``reward_error_kind``; ``drop_sample``: marked, too, for the trainer to leave it out. Its reward is then the
            mean of the batch, which moves no statistic of it.
        max_errors: failed samples that are borne; None: none with ``stop``, any number otherwise.
        max_concurrent: how many calls of an ``async def`` function run at once.
        reward_kwargs: handed to every call of the function.
    """

    parameters: tuple[str, ...]
    """Names under which the function receives its arguments."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        on_error: str = "stop",
        max_concurrent: int = 64,
        max_errors: int | None = None,
        **reward_kwargs: Any,
    ):
        if on_error not in ON_ERROR:
            raise ValueError(f"reward_model.on_error={on_error!r} is not known: use {', '.join(ON_ERROR)}.")
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key
        self.on_error = on_error
        self.max_errors = 0 if max_errors is None and on_error == "stop" else max_errors
        self.num_errors = 0
        self.max_concurrent = max_concurrent
        self.reward_kwargs = reward_kwargs
        self._has_warned = False
        self._kept_texts: list[dict[bytes, str]] = [{}]
        """Texts by the bytes of their token ids: of this batch, and of those before."""
        for function in functions_of(self.compute_score):
            self.check_signature(function)

    @abstractmethod
    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        """A function's result for each sample, a `Failure`, or `NotCalled` after too many of them."""

    @property
    def bears(self) -> int | None:
        """Failures that may still come; None: any number."""
        return None if self.max_errors is None else max(0, self.max_errors - self.num_errors)

    def __call__(self, data: DataProto, return_dict: bool = False, padded: bool = True) -> Any:
        """As of every manager; without ``padded`` the rewards may be a column without padding."""
        rewards: Column
        columns: dict[str, list] = {}
        if "rm_scores" not in data.keys():
            rewards, columns = self.rewards(data)
        else:  # a reward model has scored the batch
            rewards = data.ragged("rm_scores") if data.is_packed("rm_scores") else data.column("rm_scores")
        if padded and isinstance(rewards, Ragged):
            rewards = rewards.padded()
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def rewards(self, data: DataProto) -> tuple[Column, dict[str, list]]:
        """Rewards (B, R) by the reward function, padded or not, and its extra columns."""
        responses = data.ragged("responses")
        samples = self.read(data, responses)
        scores, columns = self.score(samples, data)
        if self.num_examine:
            self._print(data, samples, scores, columns)
        return RowValues.on_last_tokens(torch.tensor(scores, dtype=torch.float32), responses.layout), columns

    def score(self, samples: list[Sample], batch: DataProto) -> tuple[list[float], dict[str, list]]:
        """Scores of samples, and the function's extra columns.

        Args:
            batch: says in its ``meta_info`` where they are from.
        """
        if isinstance(self.compute_score, BySource):
            results = self.compute_score.share_out(samples, self.results)
        else:
            results = self.results(self.compute_score, samples)
        return self._collect(samples, results, batch)

    def results(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        """What `call` returns; a failure of a built-in scorer that is the response's doing as `FailedByResponse`."""
        results = list(self.call(function, samples))
        if not is_built_in(function):
            return results
        seen: set[int] = set()
        while failed := [i for i, one in enumerate(results) if isinstance(one, Failure) and i not in seen]:
            seen.update(failed)
            for i in failed:
                if self._is_of_response(function, samples[i], results[i]):
                    results[i] = FailedByResponse(results[i])
            # calls end after as many failures as are borne, and these do not count
            skipped = [i for i, one in enumerate(results) if isinstance(one, NotCalled)]
            if skipped and not any(isinstance(one, Failure) for one in results):
                for i, one in zip(skipped, self.call(function, [samples[i] for i in skipped]), strict=True):
                    results[i] = one
        return results

    def _is_of_response(self, function: RawRewardFn, sample: Sample, failure: Failure) -> bool:
        """Whether a built-in scorer scores an empty response to the same prompt, so that this response is the cause."""
        keywords = getattr(function, "keywords", {})
        waits = failure.kind is Outcome.TIMEOUT and {"judge", "sandbox_fusion_url"} & keywords.keys()
        if waits or any(name in failure.cause.splitlines()[0] for name in _NOT_OF_RESPONSES):
            return False
        [result] = self.call(function, [replace(sample, solution_str="")])
        return isinstance(result if isinstance(result, (Scored, Failure)) else scored(result), Scored)

    def check_columns(self, columns: Iterable[str]) -> None:
        """Check the columns that every row must have.

        Raises:
            RewardError: one of ``columns`` is missing.
        """
        for name, why in ((self.reward_fn_key, "data.reward_fn_key"), ("reward_model", "its ground_truth is the goal")):
            if name not in columns:
                raise RewardError(
                    f"The data have no column {name!r} ({why}); there are {', '.join(columns)}. Write it into the "
                    "files (of CSV: reward_model.ground_truth is a column of its own), or register a reward manager "
                    "that does without."
                )

    def read(self, data: DataProto, responses: Ragged) -> list[Sample]:
        """The samples of a batch; responses are decoded in one go, without special tokens."""
        rows = data.non_tensor_batch
        self.check_columns(rows)
        texts = self.texts(responses)
        nothing = [None] * len(data)
        turns, infos = rows.get("__num_turns__", nothing), rows.get("extra_info", nothing)
        tool_rewards = rows.get("reward_scores", nothing)
        columns = zip(rows[self.reward_fn_key], texts, rows["reward_model"], infos, turns, tool_rewards, strict=True)
        has_tools = "reward_scores" in rows
        return [
            sample_of(i, source, text, goal, info, count, (earned or {}) if has_tools else None)
            for i, (source, text, goal, info, count, earned) in enumerate(columns)
        ]

    def texts(self, responses: Ragged) -> list[str]:
        """The responses as texts; those that `keep_text` was given are not decoded again."""
        ends = responses.layout.lengths.cumsum(0)[:-1].tolist()
        # the tokenizer takes arrays faster than lists; of no rows, numpy's split makes one piece
        ids = np.split(responses.values.cpu().numpy(), ends)[: len(responses.layout)]
        if not any(self._kept_texts):
            return decode_rows(self.tokenizer, ids)
        keys = [row.astype(np.int32).tobytes() for row in ids]
        known = [next((kept[key] for kept in self._kept_texts if key in kept), None) for key in keys]
        left = [i for i, text in enumerate(known) if text is None]
        for i, text in zip(left, decode_rows(self.tokenizer, [ids[i] for i in left]), strict=True):
            known[i] = text
        return known

    # -- responses whose scoring begins while others are generated -----------------------------------------------------

    @property
    def begins_early(self) -> bool:
        """Whether a response can be scored before the others are there; else the manager waits for the batch."""
        return False

    @property
    def early_columns(self) -> tuple[Sequence[str], Sequence[str]]:
        """Columns that a response cannot be scored without, and others that are read where they are."""
        return (self.reward_fn_key, "reward_model"), ("extra_info",)

    def begin(self, samples: Sequence[Sample]) -> None:
        """Begin to score responses. The results are those that the same samples get when the manager is called."""
        raise NotImplementedError

    def begin_ids(self, ids: Sequence[np.ndarray], rows: Sequence[Mapping[str, Any]], turns: Sequence[Any]) -> None:
        """Begin to score responses by their token ids (int32).

        Args:
            rows: the columns of each, without the tensors.
            turns: how many turns each had; None: it is no conversation.
        """
        texts = decode_rows(self.tokenizer, ids)
        self._kept_texts[0].update((row.tobytes(), text) for row, text in zip(ids, texts, strict=True))
        self.begin(
            [
                sample_of(i, row[self.reward_fn_key], text, row["reward_model"], row.get("extra_info"), count)
                for i, (text, row, count) in enumerate(zip(texts, rows, turns, strict=True))
            ]
        )

    def next_round(self, kept: int = 1) -> int:
        """Another batch begins: forget what was begun more than ``kept`` batches ago; returns how much it was."""
        self._kept_texts = [{}, *self._kept_texts[:kept]]
        functions = [one for one in functions_of(self.compute_score) if isinstance(one, SandboxedFunction)]
        return sum(one.next_round(kept) for one in functions)

    def _collect(self, samples: list[Sample], results: Sequence[Any], data: DataProto) -> tuple[list[float], dict]:
        """Numbers and extra columns of the results; failures are counted, or one too many ends the run here."""
        scores: list[float] = []
        columns: dict[str, list] = {}
        failures: dict[int, Failure] = {}
        by_response = {i: one.failure for i, one in enumerate(results) if isinstance(one, FailedByResponse)}
        for i, result in enumerate(results):
            if not isinstance(result, (Scored, Failure, NotCalled, FailedByResponse)):
                result = scored(result)
            if isinstance(result, Scored):
                scores.append(result.score)
                for name, value in (result.columns or {}).items():
                    columns.setdefault(name, [None] * len(samples))[i] = value
                continue
            if isinstance(result, Failure):
                failures[i] = result
                self.num_errors += 1
                # no number of programs that could not be run is borne: none of them would ever earn anything
                is_refused = _REFUSED in result.cause.splitlines()[0]
                if is_refused or self.max_errors is not None and self.num_errors > self.max_errors:
                    raise RewardError(self._describe(i, samples[i], result, _in_words(data), with_way_out=True))
            # 0 for now: what a failure gets is decided below, once all are known
            scores.append(0.0)
        # not in validation: a mean in the place of a failure would be reported as a score
        if self.on_error != "zero_and_count" and failures and not data.meta_info.get("validate"):
            scores = self._filled_in(scores, failures)
        if by_response:
            kinds_by_row = {i: failure.kind.value for i, failure in by_response.items()}
            columns[RESPONSE_ERROR_KEY] = [kinds_by_row.get(i) for i in range(len(samples))]
            if "acc" in columns:
                columns["acc"] = [False if i in by_response else acc for i, acc in enumerate(columns["acc"])]
            self._warn(samples, by_response, _in_words(data), "these responses are the cause and get 0")
        if "score" in columns:
            # with what failures got: the column must agree with the rewards
            columns["score"] = list(scores)
        if self.max_errors != 0:
            # without a failure, too: the metric `reward/errors` must not come and go
            columns[REWARD_ERROR_KEY] = [float(i in failures) for i in range(len(samples))]
            kinds = [failures[i].kind.value if i in failures else None for i in range(len(samples))]
            columns[REWARD_ERROR_KIND_KEY] = kinds
            if "acc" in columns:  # what validation reports: a column with gaps would drop out of it
                columns["acc"] = [0.0 if i in failures else acc for i, acc in enumerate(columns["acc"])]
        if failures:
            what = "get 0" if self.on_error == "zero_and_count" else "are left out"
            self._warn(samples, failures, _in_words(data), f"they {what} (reward_model.on_error={self.on_error})")
        return scores, columns

    def _filled_in(self, scores: list[float], failures: Mapping[int, Failure]) -> list[float]:
        """Scores with the mean of the others where there is none: a mean moves no statistic of the batch."""
        known = [score for i, score in enumerate(scores) if i not in failures]
        if not known:
            cause = next(iter(failures.values())).cause.splitlines()[0]
            raise RewardError(
                f"The reward function {name_of(self.compute_score)} failed on all {len(scores)} samples of a batch, "
                f"the first time with {cause}: nothing is left to learn from."
            )
        mean = sum(known) / len(known)
        return [mean if i in failures else score for i, score in enumerate(scores)]

    def _warn(self, samples: list[Sample], failures: dict[int, Failure], batch: str, what: str) -> None:
        i, failure = next(iter(failures.items()))
        description = self._describe(i, samples[i], failure, batch)
        logger.warning(
            "The reward function failed on %d of %d samples; %s. The first: %s",
            *(len(failures), len(samples), what),
            description.splitlines()[0] if self._has_warned else description,
        )
        self._has_warned = True

    def _describe(self, i: int, sample: Sample, failure: Failure, batch: str, with_way_out: bool = False) -> str:
        function = self.compute_score
        if isinstance(function, BySource):
            function = function.function_for(sample.data_source)
        story = story_of(function, sample, f"sample {i} of the {batch}", failure)
        if not with_way_out:
            return story
        way_out = way_out_of(failure.kind, None if is_built_in(function) else "custom_reward_function.path")
        borne = f" It is failure {self.num_errors} of the run, reward_model.max_errors={self.max_errors}."
        return f"{story}\n{way_out}{borne if self.max_errors else ''}"

    def _print(self, data: DataProto, samples: list[Sample], scores: list[float], columns: dict[str, list]) -> None:
        """Show the first samples of each data source. Only these prompts are decoded."""
        shown: dict[str, int] = {}
        for i, sample in enumerate(samples):
            if shown.setdefault(sample.data_source, 0) >= self.num_examine:
                continue
            shown[sample.data_source] += 1
            prompt = data.slice(i, i + 1).ragged("prompts").values
            print("[prompt]", self.tokenizer.decode(prompt, skip_special_tokens=True))
            print("[response]", sample.solution_str)
            print("[ground_truth]", sample.ground_truth)
            for name, values in {"score": scores, **columns}.items():
                print(f"[{name}]", values[i])

    def check_signature(self, function: RawRewardFn) -> None:
        """Check before the first rollout that a function can be called.

        Raises:
            TypeError: it does not take what it will be given.
        """
        check_signature(function, self.parameters, self.reward_kwargs)


def sample_of(
    number: int,
    source: Any,
    text: str,
    goal: Any,
    info: Any,
    turns: Any = None,
    tool_rewards: Mapping[str, Any] | None = None,
) -> Sample:
    """The sample of a response and its row.

    Args:
        tool_rewards: what tools gave the row, under verl's name for reward functions. None: there are no tools.

    Raises:
        RewardError: the row has no ground truth.
    """
    if not isinstance(goal, Mapping) or "ground_truth" not in goal:
        raise RewardError(
            f"Sample {number} (data_source={source!r}): reward_model={excerpt(goal)} holds no ground_truth. Write "
            '{"style": "rule", "ground_truth": ...} into the data file; it may be empty.'
        )
    # a copy: a function that writes into it must not change the batch
    info = {**(info if isinstance(info, Mapping) else {}), "num_turns": turns}
    if tool_rewards is not None:
        info["rollout_reward_scores"] = tool_rewards
    return Sample(source, text, goal["ground_truth"], info)


def _in_words(data: DataProto) -> str:
    """Describe a batch: ``validation batch at step 3``, by its ``meta_info``."""
    meta = data.meta_info
    step = f" at step {meta['global_steps']}" if "global_steps" in meta else ""
    return f"{'validation ' if meta.get('validate') else ''}batch{step}"


# -- Say which sample a reward function is stuck on, instead of waiting in silence -----------------------------------
class SlowCallWatch:
    """Logs calls that have been under way for ``every_s`` seconds, again and again, with the calling thread's stack.

    Used as a context around the calls, with ``call(key)`` around each of them. Nothing is interrupted.

    Args:
        describe: key of a call -> words for the log.
        every_s: seconds between looks.
    """

    def __init__(self, describe: Callable[[Any], str], every_s: float = 60.0):
        self.describe, self.every_s = describe, every_s
        self._since: dict[Any, float] = {}
        self._over = threading.Event()
        self._caller = threading.get_ident()

    def __enter__(self) -> "SlowCallWatch":
        # daemon: a function that never returns must not keep the process alive through its watch
        threading.Thread(target=self._look, name="verl-reward-watch", daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._over.set()

    @contextmanager
    def call(self, key: Any) -> Iterator[None]:
        """Mark the call of ``key`` as under way."""
        self._since[key] = time.monotonic()
        try:
            yield
        finally:
            del self._since[key]

    def _look(self) -> None:
        while not self._over.wait(self.every_s):
            now = time.monotonic()
            # a copy: other threads begin and end calls meanwhile
            late = sorted((since, key) for key, since in self._since.copy().items() if now - since >= self.every_s)
            if late:
                since, key = late[0]
                frame = sys._current_frames().get(self._caller)
                stack = "".join(traceback.format_stack(frame)[-4:]) if frame else ""
                logger.warning(
                    "The reward function has been at %s for %.0f s (%d calls that long). The calling thread is at:\n%s",
                    *(self.describe(key), now - since, len(late), stack),
                )
