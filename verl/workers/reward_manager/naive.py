"""One call of the reward function per response."""

import inspect
from typing import Any

from verl.utils.py_functional import gather_awaitables
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rule import Failure, RuleRewardManager, Sample
from verl.workers.reward_manager.watch import SlowCallWatch


@register("naive")
class NaiveRewardManager(RuleRewardManager):
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=, **reward_kwargs)`` per response.

    It returns a number or a dict with one under ``score``; all keys of the dict become columns of
    ``reward_extra_info``, with ``None`` for samples that lack them. An ``async def`` function is awaited for many
    samples at once. ``extra_info`` is a copy of the row's, with ``num_turns``.
    """

    parameters = ("data_source", "solution_str", "ground_truth", "extra_info")

    def score(self, samples: list[Sample]) -> list[Any]:
        results: list[Any] = []
        with SlowCallWatch(lambda i: f"sample {i} (data_source={samples[i].data_source!r})") as watch:
            for i, sample in enumerate(samples):
                watch.begin(i)
                try:
                    results.append(self.compute_score(**vars(sample), **self.reward_kwargs))
                except (Exception, SystemExit) as error:
                    results.append(Failure(error))
                    if self.on_error == "stop":  # the rest would be thrown away
                        break
                finally:
                    watch.end(i)
            self._await(results, watch)
        return results

    def _await(self, results: list[Any], watch: SlowCallWatch) -> None:
        """Replace awaitables by what they come to."""

        async def watched(i: int, awaitable: Any) -> Any:
            watch.begin(i)
            try:
                return await awaitable
            except SystemExit as error:  # would take the event loop down with it
                return Failure(error)
            finally:
                watch.end(i)

        waiting = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
        if not waiting:
            return
        outcomes = gather_awaitables([watched(i, results[i]) for i in waiting], self.max_concurrent)
        for i, outcome in zip(waiting, outcomes, strict=True):
            results[i] = Failure(outcome) if isinstance(outcome, Exception) else outcome
