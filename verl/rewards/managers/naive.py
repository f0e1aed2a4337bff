"""One call of the reward function per response."""

import inspect
from typing import Any

from verl.rewards.functions.calling import PARAMETERS, RawRewardFn, Sample
from verl.rewards.managers.registry import register
from verl.rewards.managers.rule import RuleRewardManager, SlowCallWatch
from verl.sandbox.outcomes import Failure, NotCalled
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

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        arguments = [self.arguments(function, sample) for sample in samples]
        if isinstance(function, SandboxedFunction):
            return function.rows(arguments, self.bears)
        results: list[Any] = []
        with SlowCallWatch(lambda i: f"sample {i} (data_source={samples[i].data_source!r})") as watch:
            for i, (args, kwargs) in enumerate(arguments):
                watch.begin(i)
                try:
                    results.append(function(*args, **kwargs))
                except (Exception, SystemExit) as error:
                    results.append(Failure.of(error))
                    if self.bears == 0:  # the rest would be thrown away
                        break
                finally:
                    watch.end(i)
            self._await(results, watch)
        return [*results, *[NotCalled()] * (len(samples) - len(results))]

    def _await(self, results: list[Any], watch: SlowCallWatch) -> None:
        """Replace awaitables by what they come to."""

        async def watched(i: int, awaitable: Any) -> Any:
            watch.begin(i)
            try:
                return await awaitable
            except SystemExit as error:  # would take the event loop down with it
                return Failure.of(error)
            finally:
                watch.end(i)

        waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if not waiting:
            return
        outcomes = gather_awaitables([watched(i, results[i]) for i in waiting], self.max_concurrent)
        for i, outcome in zip(waiting, outcomes, strict=True):
            results[i] = Failure.of(outcome) if isinstance(outcome, Exception) else outcome
