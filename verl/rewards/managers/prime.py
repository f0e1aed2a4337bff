"""Concurrent calls of the reward function."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.rewards.functions.calling import RawRewardFn, Sample, arguments_of, check_signature
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.registry import register
from verl.sandbox.pool import SandboxedFunction


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
        check_signature(function, self.parameters, self.reward_kwargs, by_place=True)

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        if isinstance(function, SandboxedFunction):
            return super().call(function, samples)
        naive = super().call
        with ThreadPoolExecutor(self.num_processes) as threads:
            return [result for [result] in threads.map(lambda sample: naive(function, [sample]), samples)]
