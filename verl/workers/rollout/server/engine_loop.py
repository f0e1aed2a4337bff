"""The one thread that steps a rollout engine while requests come and go.

Requests may be handed over from any thread; the engine is touched by this thread alone while the loop serves, and by
others only while it is paused. Ranks that share an engine run one loop each: the first rank's loop decides, the others
follow its commands (`Broadcast`). Knows no HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch.distributed as dist

from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.base import Completion, Request, RolloutEngine, empty_completion
from verl.workers.rollout.memory import out_of_memory_error

_HEARTBEAT_S = 5.0  # longest time without a message to the following ranks, whose wait has a deadline


_OF_A_REQUEST = (ValueError, TypeError, NotImplementedError, LookupError, ArithmeticError, AttributeError)
"""Errors that an engine raises on a request it cannot read, before it is taken in."""


class EngineDied(RuntimeError):
    """The engine raised while it generated; its running requests are lost. The cause is the engine's own error."""

    exit_class = ExitCode.WORKER


class Event(NamedTuple):
    """An update of one request: more tokens (``ended`` is false), its end, or the error that ended it."""

    number: int
    completion: Completion | None
    error: BaseException | None = None
    ended: bool = True
    is_paused: bool = False
    """It ended because the loop was paused, not because a caller aborted it."""


@dataclass
class Commands:
    """Changes before the next step, the same on every rank of an engine."""

    version: int | None = None
    submit: list[tuple[int, Request]] = field(default_factory=list)
    abort: list[int] = field(default_factory=list)
    pause: bool = False
    stop: bool = False

    def __bool__(self) -> bool:
        return bool(self.submit or self.abort or self.pause or self.stop)


Broadcast = Callable[[Commands | None], Commands]
"""Gives the commands of an engine's first tensor-parallel rank to all its ranks; the others call it with None."""


class _Waiting(NamedTuple):
    priority: int
    number: int
    request: Request


class EngineLoop:
    """Steps ``engine`` while it has requests. Starts paused; `resume` lets it go.

    Args:
        engine: awake and synced whenever the loop is resumed.
        deliver: gets the events of a step, in the loop's thread. Ranks that follow need none.
        broadcast: to the other tensor-parallel ranks of the engine; None: it has one rank.
        follows: this rank receives its commands from the first one.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        deliver: Callable[[list[Event]], None] | None = None,
        broadcast: Broadcast | None = None,
        follows: bool = False,
    ):
        self.engine = engine
        self.version: int | None = None
        self.error: BaseException | None = None
        self.num_steps = 0
        self.last_step = time.monotonic()
        self._deliver = deliver or (lambda events: None)
        self._broadcast, self._follows = broadcast, follows
        self._changed = threading.Condition()
        self._serves = self._is_idle = False
        # resumed, but the thread has not noticed yet: it must, or ranks that follow would wait
        self._is_resuming = False
        self._wants_stop = False
        self._waiting: list[_Waiting] = []
        self._to_abort: set[int] = set()
        self._watched: set[int] = set()
        self._request_id_of: dict[int, int] = {}  # number of a request -> the engine's request id
        self._number_of: dict[int, int] = {}
        self._requests: dict[int, Request] = {}  # by number, of those the engine runs
        self._submitting: set[int] = set()  # taken from those that wait, not yet with the engine
        self._thread = threading.Thread(target=self._run, name="verl-engine-loop", daemon=True)

    # -- from any thread -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def submit(self, number: int, request: Request, priority: int = 0, watch: bool = False) -> None:
        """Generate for ``request``; its events are delivered under ``number``.

        Args:
            number: unlike any given before.
            priority: among requests that wait for the loop, higher ones go first.
            watch: deliver its tokens as they come, if the engine reports them.
        """
        with self._changed:
            if self.error is None:
                self._waiting.append(_Waiting(-priority, number, request))
                if watch:
                    self._watched.add(number)
                self._changed.notify_all()
                return
        self._deliver([Event(number, None, self._engine_died())])

    def abort(self, numbers: Iterable[int] | None = None) -> None:
        """End these requests, or all; each is delivered with the tokens generated so far."""
        with self._changed:
            if numbers is None:
                numbers = [*self._request_id_of, *(waiting.number for waiting in self._waiting)]
            self._to_abort.update(numbers)
            self._changed.notify_all()

    def resume(self, version: int) -> None:
        """Serve with the engine's weights, which are of this version."""
        with self._changed:
            self.version, self._serves, self._is_resuming = version, True, True
            self.last_step = time.monotonic()
            self._changed.notify_all()

    def pause(self) -> None:
        """Abort what runs, and return when the loop no longer uses the engine. Waiting requests stay queued."""
        with self._changed:
            self._serves = False
            self._changed.notify_all()
            while (self._is_resuming or not self._is_idle) and self.error is None and self._thread.is_alive():
                self._changed.wait(0.1)

    def stop(self) -> None:
        """End the thread; what runs is aborted, what waits fails."""
        with self._changed:
            self._wants_stop, self._serves = True, False
            self._changed.notify_all()
        if self._thread.is_alive() and not self._follows:
            self._thread.join(timeout=10)

    def state(self) -> dict[str, Any]:
        """State for health checks; ``idle_s`` is the time since the last step ended."""
        return {
            "running": len(self._request_id_of),
            "waiting": len(self._waiting),
            "steps": self.num_steps,
            "idle_s": time.monotonic() - self.last_step,
            "serving": self._serves and self.error is None,
            "version": self.version,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._await_resume()
            while not self._wants_stop:
                own = None if self._follows else self._next_commands()
                commands = own if self._broadcast is None else self._broadcast(own)
                assert commands is not None, "a rank that follows has a broadcast"
                self._publish(self._advance(commands))
                if commands.pause:
                    self._await_resume()
                if commands.stop:
                    break
        except BaseException as error:  # of any kind: callers must not wait for a thread that has ended
            self._fail(error)
        else:
            self._fail(RuntimeError("The rollout server was stopped."))

    def _await_resume(self) -> None:
        with self._changed:
            self._is_idle = True
            self.engine.monitor.stop_serving()
            self._changed.notify_all()
            while not self._is_resuming and not self._wants_stop:
                self._abort_waiting()
                self._changed.wait()
            self._is_resuming = self._is_idle = False

    def _abort_waiting(self) -> None:
        """Answer the requests that were aborted before the engine saw them."""
        aborted = [waiting for waiting in self._waiting if waiting.number in self._to_abort]
        self._waiting = [waiting for waiting in self._waiting if waiting.number not in self._to_abort]
        self._to_abort -= {waiting.number for waiting in aborted}
        if aborted:
            self._publish([Event(waiting.number, empty_completion(waiting.request)) for waiting in aborted])

    def _next_commands(self) -> Commands:
        """Wait until there is something to do."""
        with self._changed:
            while True:
                self._abort_waiting()
                commands = Commands(self.version)
                if self._wants_stop or not self._serves:
                    commands.pause, commands.stop = not self._serves, self._wants_stop
                    return commands
                commands.abort = [number for number in self._to_abort if number in self._request_id_of]
                self._to_abort.clear()
                commands.submit = [
                    (number, request) for _, number, request in sorted(self._waiting, key=itemgetter(0, 1))
                ]
                self._waiting = []
                if commands or self._request_id_of:
                    return commands
                if not self._changed.wait(_HEARTBEAT_S) and self._broadcast is not None:
                    return commands

    def _advance(self, commands: Commands) -> list[Event]:
        """Carry out the commands and step once."""
        aborted = list(self._request_id_of) if commands.pause or commands.stop else commands.abort
        request_ids = [self._request_id_of[number] for number in aborted]
        events = self._ended(self.engine.abort(request_ids) if request_ids else {}, is_paused=commands.pause)
        self._submitting = {number for number, _ in commands.submit}
        for number, request in commands.submit:
            assert commands.version is not None
            try:
                request_id = self.engine.submit(request, commands.version)
            except _OF_A_REQUEST as error:
                # this request cannot be served; the others continue
                events.append(Event(number, None, error))
            else:
                self._request_id_of[number], self._number_of[request_id] = request_id, number
                self._requests[number] = request
            self._submitting.discard(number)
        self.engine.monitor.serving(self._requests)
        if self._request_id_of:
            events += self._ended(self.engine.step())
            self.num_steps += 1
            for number in self._watched & self._request_id_of.keys():
                partial = self.engine.partial(self._request_id_of[number])
                if partial is not None:
                    events.append(Event(number, partial, ended=False))
        self.last_step = time.monotonic()
        return events

    def _ended(self, completions: dict[int, Completion], is_paused: bool = False) -> list[Event]:
        events = []
        for request_id, completion in completions.items():
            number = self._number_of.pop(request_id)
            del self._request_id_of[number]
            self._watched.discard(number)
            if completion.version is None:  # said here: the loop may have other weights when the answer is sent
                completion = replace(completion, version=self.version)
            self.engine.monitor.count([self._requests.pop(number)], [completion])
            events.append(Event(number, completion, is_paused=is_paused))
        return events

    def _publish(self, events: list[Event]) -> None:
        if events and not self._follows:
            self._deliver(events)

    def _fail(self, error: BaseException) -> None:
        self.engine.monitor.stop_serving(failed=not self._wants_stop)
        if memory_error := out_of_memory_error(error, self.engine.config, "generate"):
            memory_error.__cause__ = error
            error = memory_error
        with self._changed:
            self.error = error
            numbers = [*self._request_id_of, *self._submitting, *(waiting.number for waiting in self._waiting)]
            self._request_id_of, self._number_of, self._submitting, self._waiting = {}, {}, set(), []
            self._is_idle = True
            self._changed.notify_all()
        self._publish([Event(number, None, self._engine_died()) for number in numbers])

    def _engine_died(self) -> EngineDied:
        died = EngineDied(f"{type(self.error).__name__}: {self.error}")
        died.__cause__ = self.error
        return died


def tensor_parallel_broadcast(size: int) -> Broadcast | None:
    """The broadcast among the ranks of this rank's engine, where ``size`` neighbouring ranks share one; else None.

    Collective over all ranks of the process group.
    """
    if size == 1:
        return None
    mine: tuple[int, dist.ProcessGroup] | None = None
    for first in range(0, dist.get_world_size(), size):
        # a gloo group that nothing else uses: commands must not wait behind an engine's own collectives
        group = dist.new_group(list(range(first, first + size)), backend="gloo")
        if first <= dist.get_rank() < first + size:
            mine = first, group
    assert mine is not None
    source, own_group = mine

    def broadcast(commands: Commands | None) -> Commands:
        message = [commands]
        dist.broadcast_object_list(message, src=source, group=own_group)
        assert message[0] is not None
        return message[0]

    return broadcast
