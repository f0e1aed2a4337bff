"""One call of the reward function for all responses of a batch."""

import inspect
from typing import Any

from verl.utils.py_functional import gather_awaitables
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rule import Failure, RuleRewardManager, Sample
from verl.workers.reward_manager.watch import SlowCallWatch


@register("batch")
class BatchRewardManager(RuleRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

    It returns a list with a number or a dict per response, as for :class:`NaiveRewardManager`. When the call itself
    raises, no sample has a score.
    """

    parameters = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

    def score(self, samples: list[Sample]) -> list[Any]:
        columns = {f"{name}s": [getattr(sample, name) for sample in samples] for name in Sample.__dataclass_fields__}
        with SlowCallWatch(lambda key: f"a batch of {len(samples)} responses") as watch:
            watch.begin("batch")
            try:
                results = self.compute_score(**columns, **self.reward_kwargs)
                if inspect.isawaitable(results):
                    [results] = gather_awaitables([results], 1)
                    if isinstance(results, Exception):
                        raise results
                results = results.tolist() if hasattr(results, "tolist") else list(results)
                if len(results) != len(samples):
                    raise ValueError(f"the function returned {len(results)} scores for {len(samples)} responses")
                return results
            except (Exception, SystemExit) as error:
                return [Failure(error)] * len(samples)
            finally:
                watch.end("batch")
