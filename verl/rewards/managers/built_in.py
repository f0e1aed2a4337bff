"""Reward managers by the way they call the reward function: one call a response, several at a time, one a batch."""

import inspect
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.algorithms.reward_shaping import overlong_penalty
from verl.batch.ragged import Column, RowValues
from verl.protocol import DataProto
from verl.rewards.functions import calling
from verl.rewards.functions.calling import (
    BATCH_PARAMETERS,
    PARAMETERS,
    RawRewardFn,
    Sample,
    arguments_of,
    function_for,
    functions_of,
)
from verl.rewards.managers.rule import REWARD_ERROR_KEY, RuleRewardManager, SlowCallWatch, register
from verl.sandbox.outcomes import Failure, NotCalled, scored_batch
from verl.sandbox.pool import SandboxedFunction
from verl.utils.py_functional import gather_awaitables


@register("naive")
class NaiveRewardManager(RuleRewardManager):
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs)`` per response.

    It returns a number or a dict with one under ``score``; all keys of the dict become columns of
    ``reward_extra_info``, with ``None`` for samples that lack them. An ``async def`` function is awaited for many
    samples at once. ``extra_info`` is a copy of the row's, with ``num_turns``.
    """

    parameters = PARAMETERS

    def arguments(self, function: RawRewardFn, sample: Sample) -> tuple[tuple, dict[str, Any]]:
        """Positional and named arguments of a call about a sample."""
        return (), {**vars(sample), **self.reward_kwargs}

    @property
    def begins_early(self) -> bool:
        # a user's subclass may call the function in another way, or with other texts
        plain = (NaiveRewardManager.call, PrimeRewardManager.call)
        is_plain = type(self).call in plain and type(self).read is RuleRewardManager.read
        return is_plain and all(isinstance(one, SandboxedFunction) for one in functions_of(self.compute_score))

    def begin(self, samples: Sequence[Sample]) -> None:
        by_function: dict[int, tuple[Any, list[Sample]]] = {}
        for sample in samples:
            function = function_for(self.compute_score, sample.data_source)
            by_function.setdefault(id(function), (function, []))[1].append(sample)
        for function, own in by_function.values():
            function.begin([self.arguments(function, sample) for sample in own])

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        arguments = [self.arguments(function, sample) for sample in samples]
        if isinstance(function, SandboxedFunction):
            return function.rows(arguments, self.bears)
        results: list[Any] = []
        with SlowCallWatch(lambda i: f"sample {i} (data_source={samples[i].data_source!r})") as watch:
            for i, (args, kwargs) in enumerate(arguments):
                try:
                    with watch.call(i):
                        results.append(function(*args, **kwargs))
                except (Exception, SystemExit) as error:
                    results.append(Failure.of(error))
                    if self.bears == 0:  # the rest would be thrown away
                        break

            async def finished(i: int) -> Any:
                try:
                    with watch.call(i):
                        return await results[i]
                except SystemExit as error:  # would take the event loop down with it
                    return Failure.of(error)

            waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
            outcomes = gather_awaitables([finished(i) for i in waiting], self.max_concurrent) if waiting else []
        for i, outcome in zip(waiting, outcomes, strict=True):
            results[i] = Failure.of(outcome) if isinstance(outcome, Exception) else outcome
        return [*results, *[NotCalled()] * (len(samples) - len(results))]


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As ``naive``, with as many samples at a time as ``reward_model.sandbox.workers``, by default one a core.

    A function that does not take the names of ``naive`` gets its arguments by their place: data source, response,
    ground truth, extra info. Without sandbox the calls run in threads.

    Args:
        num_processes: threads, where there is no sandbox.
    """

    def __init__(self, *args: Any, num_processes: int = 16, **kwargs: Any):
        self.num_processes = num_processes
        super().__init__(*args, **kwargs)

    def arguments(self, function: RawRewardFn, sample: Sample) -> tuple[tuple, dict[str, Any]]:
        return arguments_of(function, sample, self.reward_kwargs)

    def check_signature(self, function: RawRewardFn) -> None:
        calling.check_signature(function, self.parameters, self.reward_kwargs, by_place=True)

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        if isinstance(function, SandboxedFunction):
            return super().call(function, samples)
        # taken here: within the lambda super() would take the sample for self
        naive = super().call
        with ThreadPoolExecutor(self.num_processes) as threads:
            return [result for [result] in threads.map(lambda sample: naive(function, [sample]), samples)]


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As ``naive``, less a penalty for the part of a buffer before the length limit that a response used.

    Args:
        max_resp_len: the limit, in tokens.
        overlong_buffer_cfg: ``enable``; ``len``, tokens of the buffer; ``penalty_factor``, the most it costs; ``log``,
            whether to report the columns ``overlong_reward`` and ``overlong``.

    Source: Yu et al. 2025, DAPO, section 3.4 (arXiv:2503.14476).
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.max_resp_len, self.buffer = max_resp_len, dict(overlong_buffer_cfg or {})
        super().__init__(*args, **kwargs)
        if unknown := set(self.buffer) - {"enable", "len", "penalty_factor", "log"}:
            raise ValueError(
                f"reward_model.reward_kwargs.overlong_buffer_cfg has {', '.join(sorted(unknown))}; known are enable, "
                "len, penalty_factor and log."
            )
        length = self.buffer.get("len")
        if self.buffer.get("enable") and not (max_resp_len and length and 0 < length <= max_resp_len):
            raise ValueError(
                f"reward_model.reward_kwargs.overlong_buffer_cfg.len={length} with max_resp_len={max_resp_len}: "
                "the buffer lies before the limit, so 0 < len <= max_resp_len. Set both; the limit is usually "
                "data.max_response_length."
            )

    def rewards(self, data: DataProto) -> tuple[Column, dict[str, list]]:
        rewards, columns = super().rewards(data)
        if not self.buffer.get("enable"):
            return rewards, columns
        assert isinstance(rewards, RowValues)
        responses, factor = data.ragged("responses"), self.buffer.get("penalty_factor", 1.0)
        # the whole response, tool output included: that is what the limit counts
        penalty = overlong_penalty(responses.layout.lengths, self.max_resp_len, self.buffer["len"], factor)
        # a sample without a score gets 0, or is left out: it pays nothing
        failed = columns.get(REWARD_ERROR_KEY) or [0.0] * len(data)
        penalties = [0.0 if has_failed else value for value, has_failed in zip(penalty.tolist(), failed, strict=True)]
        if self.buffer.get("log"):
            columns["overlong_reward"] = penalties
            columns["overlong"] = [value < 0 for value in penalties]
        total = rewards.numbers + rewards.numbers.new_tensor(penalties)
        return RowValues.on_last_tokens(total, responses.layout), columns


@register("batch")
class BatchRewardManager(RuleRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

    It returns a list with a number or a dict per response, as for :class:`NaiveRewardManager`. When the call itself
    raises, no sample has a score.
    """

    parameters = BATCH_PARAMETERS

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        columns = {**calling.in_columns(samples), **self.reward_kwargs}
        if isinstance(function, SandboxedFunction):
            return function.batch(len(samples), columns)
        try:
            with SlowCallWatch(lambda key: f"a batch of {len(samples)} responses") as watch, watch.call("batch"):
                return scored_batch(calling.awaited(function(**columns)), len(samples))
        except (Exception, SystemExit) as error:
            return [Failure.of(error)] * len(samples)
