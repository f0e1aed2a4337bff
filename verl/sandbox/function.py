"""A function that stands for one in a sandbox: called like it, or with many calls at once."""

import inspect
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.sandbox.describing import signature_of
from verl.sandbox.limits import Limits
from verl.sandbox.outcomes import Failure, NotCalled, Scored
from verl.sandbox.pool import Pool, Source

_KEPT = 4
_POOLS: OrderedDict[Any, Pool] = OrderedDict()
"""The last pools asked for. Training and validation share one, as they would share the module in one process."""


class SandboxError(RuntimeError):
    """A call in a sandbox failed."""

    def __init__(self, failure: Failure):
        super().__init__(f"{failure.cause}\n{failure.trace}".strip())
        self.failure = failure


class SandboxedFunction:
    """Stands for a function that runs in processes of its own.

    Args:
        pool: its processes.
        timeout_s: seconds of a call about one sample.
        batch_timeout_s: seconds of a call about many.
    """

    def __init__(self, pool: Pool, timeout_s: float = 60.0, batch_timeout_s: float = 600.0):
        self.pool, self.timeout_s, self.batch_timeout_s = pool, timeout_s, batch_timeout_s
        self.keywords = dict(pool.source.reward_kwargs)
        description = pool.description()
        self.described_name: str = description["name"]
        self.__name__ = pool.source.name
        self.is_async: bool = description["is_async"]
        signature = signature_of(description["parameters"])
        if signature is not None:
            self.__signature__ = signature

    def rows(
        self, calls: Sequence[tuple[tuple, dict[str, Any]]], bear: int | None = None
    ) -> list[Scored | Failure | NotCalled]:
        """One call a sample, each with its arguments; none is made after more than ``bear`` failures."""
        results = self.pool([(None, args, kwargs) for args, kwargs in calls], self.timeout_s, bear)
        return [NotCalled() if outcomes is None else outcomes[0] for outcomes in results]

    def batch(self, count: int, kwargs: dict[str, Any]) -> list[Scored | Failure]:
        """One call about ``count`` samples."""
        [outcomes] = self.pool([(count, (), kwargs)], self.batch_timeout_s)
        return outcomes if len(outcomes) == count else outcomes * count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            SandboxError: the call failed.
        """
        [outcome] = self.rows([(args, kwargs)])
        if isinstance(outcome, Failure):
            raise SandboxError(outcome)
        return outcome.score if outcome.columns is None else outcome.columns


def sandboxed(source: Source, limits: Limits, workers: int, start_timeout_s: float, **options: Any) -> Pool:
    """The pool for a function, started if there is none yet that does the same; it need not be ready.

    Raises:
        FileNotFoundError: there is no such file.
    """
    stamp: Any = source.path
    if not source.path.startswith("pkg://"):
        path = Path(source.path).expanduser().resolve()
        if not path.is_file():
            raise FileNotFoundError(f"No Python file at {source.path!r} (looked for {path}).")
        source = Source(str(path), source.name, source.reward_kwargs)
        stamp = (path, path.stat().st_mtime_ns, path.stat().st_size)
    key = (stamp, source.name, repr(source.reward_kwargs), limits, workers, repr(options), os.getpid())
    pool = _POOLS.get(key)
    if pool is None:
        pool = _POOLS[key] = Pool(source, limits, workers, start_timeout_s, **options)
    pool.start_timeout_s = start_timeout_s  # the last to ask decides how long it waits
    _POOLS.move_to_end(key)
    while len(_POOLS) > _KEPT:
        _POOLS.popitem(last=False)
    return pool


def signature_text(function: Any) -> str:
    """Name and parameters, as far as the function tells."""
    try:
        return str(inspect.signature(function))
    except (TypeError, ValueError):
        return "(...)"
