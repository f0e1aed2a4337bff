"""Calls of the reward function side by side."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.utils.sandbox.function import SandboxedFunction
from verl.workers.reward_manager.abstract import RawRewardFn
from verl.workers.reward_manager.naive import NaiveRewardManager
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.rule import Sample, signature_of_function


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """As ``naive``, with as many samples at a time as ``reward_model.sandbox.workers`` says, by default one a core.

    A function that does not take the names of ``naive`` gets its arguments by their place: data source, response,
    ground truth, extra info. Without sandbox the calls run in threads.

    Args:
        num_processes: threads, where there is no sandbox.
    """

    def __init__(self, *args: Any, num_processes: int = 16, **kwargs: Any):
        self.num_processes = num_processes
        super().__init__(*args, **kwargs)

    def arguments(self, function: RawRewardFn, sample: Sample) -> tuple[tuple, dict[str, Any]]:
        if self._takes_names(function):
            return super().arguments(function, sample)
        return tuple(vars(sample).values()), dict(self.reward_kwargs)

    def _takes_names(self, function: RawRewardFn) -> bool:
        signature = signature_of_function(function)
        keywords = {**dict.fromkeys(self.parameters), **self.reward_kwargs, **getattr(function, "keywords", {})}
        return signature is None or _binds(signature, (), keywords)

    def check_signature(self, function: RawRewardFn) -> None:
        signature = signature_of_function(function)
        keywords = {**self.reward_kwargs, **getattr(function, "keywords", {})}
        if signature is None or not _binds(signature, self.parameters, keywords):
            super().check_signature(function)

    def call(self, function: RawRewardFn, samples: list[Sample]) -> list[Any]:
        if isinstance(function, SandboxedFunction):
            return super().call(function, samples)
        naive = super().call
        with ThreadPoolExecutor(self.num_processes) as threads:
            return [result for [result] in threads.map(lambda sample: naive(function, [sample]), samples)]


def _binds(signature: Any, args: tuple, keywords: dict[str, Any]) -> bool:
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True
