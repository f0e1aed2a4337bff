"""One call of the reward function for all responses of a batch."""

import inspect
from typing import Any

from verl.rewards.functions.calling import BATCH_PARAMETERS, RawRewardFn, Sample, in_columns
from verl.rewards.managers.registry import register
from verl.rewards.managers.rule import RuleRewardManager, SlowCallWatch
from verl.sandbox.outcomes import Failure, scored_batch
from verl.sandbox.pool import SandboxedFunction
from verl.utils.py_functional import gather_awaitables


@register("batch")
class BatchRewardManager(RuleRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

    It returns a list with a number or a dict per response, as for :class:`NaiveRewardManager`. When the call itself
    raises, no sample has a score.
    """

    parameters = BATCH_PARAMETERS

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        columns = {**in_columns(samples), **self.reward_kwargs}
        if isinstance(function, SandboxedFunction):
            return function.batch(len(samples), columns)
        with SlowCallWatch(lambda key: f"a batch of {len(samples)} responses") as watch:
            watch.begin("batch")
            try:
                results = function(**columns)
                if inspect.isawaitable(results):
                    [results] = gather_awaitables([results], 1)
                    if isinstance(results, Exception):
                        raise results
                return scored_batch(results, len(samples))
            except (Exception, SystemExit) as error:
                return [Failure.of(error)] * len(samples)
            finally:
                watch.end("batch")
