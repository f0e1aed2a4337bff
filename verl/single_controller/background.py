"""Calls on several worker groups at the same time, for work in which their processes talk to one another."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl.single_controller.errors import WorkerDied

_GRACE_S = 3.0
"""Seconds to look for the cause in the other groups when one failed: a lost process is reported by its own group."""


def run_concurrently(*calls: Callable[[], Any], is_echo: Callable[[BaseException], bool] = lambda error: False) -> list:
    """Run blocking calls, each on a group of its own, concurrently; returns their outputs in order.

    If one fails the others are not waited for, since they may wait for it: stop their groups.

    Args:
        is_echo: whether an error only says that another group's process has ended or gave up.

    Raises:
        the first failure; an error that is no echo takes precedence, and a WorkerDied over all.
    """
    done: queue.SimpleQueue = queue.SimpleQueue()

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            done.put((number, call(), None))
        except BaseException as error:  # it is raised in the caller's thread
            done.put((number, None, error))

    for number, call in enumerate(calls):
        # daemons: a call that hangs after another has failed must not keep the driver from ending
        threading.Thread(target=run, args=(number, call), daemon=True).start()
    outputs = [None] * len(calls)
    for finished in range(1, len(calls) + 1):
        number, outputs[number], error = done.get()
        if error is not None:
            raise _cause(error, done, len(calls) - finished, is_echo)
    return outputs


class BackgroundCall:
    """A call that runs in a thread of its own; ``get()`` waits for its output, or raises what it raised."""

    def __init__(self, call: Callable[[], Any]):
        self._outcome: Future = Future()
        # not of a ThreadPoolExecutor, whose threads keep the process alive until they end
        threading.Thread(target=self._run, args=(call,), daemon=True).start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.set_result(call())
        except BaseException as error:  # it is raised in the thread that calls ``get``
            self._outcome.set_exception(error)

    def get(self) -> Any:
        return self._outcome.result()


def _cause(error: BaseException, done: queue.SimpleQueue, running: int, is_echo: Callable) -> BaseException:
    """Of this error and those that follow within the grace, the one that explains the others."""
    errors, deadline = [error], time.monotonic() + _GRACE_S
    # a death explains everything: no need to look on
    while running and not isinstance(errors[-1], WorkerDied) and (left := deadline - time.monotonic()) > 0:
        try:
            _, _, other = done.get(timeout=left)
        except queue.Empty:
            break
        running -= 1
        if other is not None:
            errors.append(other)
    return min(errors, key=lambda error: (not isinstance(error, WorkerDied), is_echo(error)))
