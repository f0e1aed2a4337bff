"""Small helpers on plain Python values: dicts, names, text. No torch, no numpy."""

import asyncio
import difflib
import functools
import hashlib
import ipaddress
import os
import re
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any


def append_to_dict(data: dict[str, list], new_data: Mapping[str, Any], prefix: str = "") -> None:
    """Append every value of ``new_data`` to the list of its key in ``data``; missing lists are begun.

    Args:
        prefix: put before keys that do not begin with it.
    """
    for key, value in new_data.items():
        data.setdefault(key if key.startswith(prefix) else f"{prefix}{key}", []).append(value)


def timeout_limit(seconds: float, use_signals: bool = False) -> Callable[[Callable], Callable]:
    """Decorator: a call that takes longer raises TimeoutError.

    Args:
        use_signals: interrupt the call with SIGALRM; the main thread only. Else it runs in a thread of its own, which
            Python cannot end: after the TimeoutError it goes on until it returns.
    """

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            late = TimeoutError(f"{function.__name__} took longer than {seconds} s.")
            if use_signals:
                return _with_alarm(lambda: function(*args, **kwargs), seconds, late)
            answer: Future = Future()
            work = functools.partial(_answer, answer, functools.partial(function, *args, **kwargs))
            # a daemon, or a call that hangs would keep the process from ending
            threading.Thread(target=work, name=f"verl-{function.__name__}", daemon=True).start()
            done, _ = wait([answer], timeout=seconds)
            if not done:
                raise late
            return answer.result()

        return limited

    return decorate


def _answer(answer: Future, work: Callable[[], Any]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:  # it is raised in the thread that waits
        answer.set_exception(error)


def _with_alarm(work: Callable[[], Any], seconds: float, late: TimeoutError) -> Any:
    def ring(number: int, frame: Any) -> None:
        raise late

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def union_two_dict(dict1: dict, dict2: Mapping) -> dict:
    """Add the items of ``dict2`` to ``dict1`` and return it. A key of both must hold equal values.

    Raises:
        ValueError: a key holds two different values.
    """
    for key, value in dict2.items():
        if key in dict1 and dict1[key] != value:
            raise ValueError(f"{key!r} is {dict1[key]!r} in one dict and {value!r} in the other: rename one of them.")
        dict1[key] = value
    return dict1


def convert_to_regular_types(obj: Any) -> Any:
    """Plain dicts, lists and scalars of a config tree or any other nest of mappings and sequences."""
    if isinstance(obj, (str, bytes)) or obj is None:
        return obj
    if hasattr(obj, "keys") and hasattr(obj, "__getitem__"):
        return {key: convert_to_regular_types(obj[key]) for key in obj.keys()}
    if isinstance(obj, Iterable) and hasattr(obj, "__len__") and not hasattr(obj, "shape"):
        return [convert_to_regular_types(item) for item in obj]
    return obj


def nearest_name(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for a name close to one of ``known`` or whole words of it, else an empty string."""
    known = [str(item) for item in known]
    # difflib finds spelling errors, not a missing prefix: ``lr`` in ``optim.lr``
    words = re.compile(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])")
    close = difflib.get_close_matches(name, known, n=1) or [item for item in known if name and words.search(item)]
    return f" Did you mean {close[0]!r}?" if close else ""


def excerpt(value: Any, limit: int = 300) -> str:
    """``repr`` of a value for an error message, at most about ``limit`` characters: both ends, the middle left out."""
    text = repr(value)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... [{len(text) - 2 * half} characters] ... {text[-half:]}"


def gather_awaitables(awaitables: list[Awaitable | None], max_concurrent: int) -> list[Any]:
    """Run awaitables from ordinary code, at most ``max_concurrent`` at once, and wait for all of them.

    An exception takes the place of its result, so that the caller knows whose it is. ``None`` entries stay ``None``.
    All calls of a process share one event loop: a session or semaphore that a user's module keeps stays usable.
    """

    async def run_all() -> list[Any]:
        # made inside, since a semaphore belongs to the loop that runs it
        gate = asyncio.Semaphore(max_concurrent)

        async def run_one(awaitable: Awaitable | None) -> Any:
            if awaitable is None:
                return None
            async with gate:
                return await awaitable

        return await asyncio.gather(*map(run_one, awaitables), return_exceptions=True)

    return asyncio.run_coroutine_threadsafe(run_all(), _background_loop(os.getpid())).result()


@functools.cache
def _background_loop(pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process, in a daemon thread. Keyed by pid: a forked child does not inherit threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verl-awaitables", daemon=True).start()
    return loop


@contextmanager
def unchanged_environment(*names: str) -> Iterator[None]:
    """Inside, these environment variables may be set or removed; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- Seeds that depend on what they are for, and on nothing else -----------------------------------------------------


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from all ``parts``: the same in any process, at any number of workers, after any restart.

    The k-th response to a prompt has derive_seed(run seed, purpose, step, prompt, k).
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
