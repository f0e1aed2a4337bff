"""Which function scores a row: by its data source."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.utils.reward_functions.calling import RawRewardFn
from verl.utils.reward_score import default_compute_score

BUILT_IN = "pkg://verl.utils.reward_score"


class BySource:
    """Reward functions by the data sources whose rows they score; called like one, it asks the one that fits.

    Args:
        functions: data source, or a pattern such as ``math/*``, -> function; the first that fits is taken.
        default: for rows that fit none.
    """

    def __init__(self, functions: Mapping[str, RawRewardFn], default: RawRewardFn):
        self.functions, self.default = dict(functions), default

    def function_for(self, data_source: Any) -> RawRewardFn:
        for pattern, function in self.functions.items():
            if fnmatch.fnmatchcase(str(data_source), pattern):
                return function
        return self.default

    def __call__(self, data_source: Any, *args: Any, **kwargs: Any) -> Any:
        return self.function_for(data_source)(data_source, *args, **kwargs)

    def share_out(self, samples: Sequence[Any], call: Callable[[RawRewardFn, list], list]) -> list[Any]:
        """The results of ``call(function, its samples)`` of all functions, in the order of the samples."""
        parts: dict[int, tuple[RawRewardFn, list[int]]] = {}
        for i, sample in enumerate(samples):
            function = self.function_for(sample.data_source)
            parts.setdefault(id(function), (function, []))[1].append(i)
        results: list[Any] = [None] * len(samples)
        with ThreadPoolExecutor(max(1, len(parts))) as threads:
            done = [
                (rows, threads.submit(call, function, [samples[i] for i in rows])) for function, rows in parts.values()
            ]
        for rows, future in done:
            for i, result in zip(rows, future.result(), strict=True):
                results[i] = result
        return results


def functions_of(function: RawRewardFn) -> list[RawRewardFn]:
    """The functions there are to call, each once."""
    if isinstance(function, BySource):
        return list({id(one): one for one in (*function.functions.values(), function.default)}.values())
    return [function]


def is_built_in(function: RawRewardFn) -> bool:
    """Whether it is the built-in scorers, here or in a sandbox."""
    source = getattr(getattr(function, "pool", None), "source", None)
    return function is default_compute_score or source is not None and source.path == BUILT_IN
