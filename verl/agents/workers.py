"""Agent loops in processes of their own: rows go there, outputs and progress logs come back, tokens as arrays.

Each process has an event loop, tools, environments and connections to the rollout servers of its own, and is a worker
group of its own: one that dies is started again alone. What a row becomes depends on its seed and its requests alone,
and so neither on the number of processes nor on which one runs it.
"""

import asyncio
import copy
import dataclasses
import logging
import pickle
import secrets
import threading
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Protocol

from verl.agents.base import AgentLoopOutput, close_shared
from verl.agents.clients import BorrowingClient, WorkersClient, shifted
from verl.agents.episode import AssistantTurn, ConversationEnvironment, Reply, ReplyLog
from verl.agents.rows import EventLoopPulse, RowOutput, RowRunner
from verl.config.base import READ, Config, get_path
from verl.envs.host import close_hosts
from verl.single_controller import get_controller
from verl.single_controller.background import run_concurrently
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import Worker
from verl.single_controller.errors import WorkerDied, WorkerGroupError
from verl.utils.import_utils import import_users_modules
from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.monitor import Span
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.messages import RolloutServerError

logger = logging.getLogger(__name__)

_GRACE_S = 10.0  # for a row that is cancelled to say how far it came, and for a process to close
_START_S = 60.0  # for a process to connect

_SPLIT = (
    "env.num_workers",
    "env.max_concurrent_steps",
    "actor_rollout_ref.rollout.multi_turn.tool_num_workers",
)
"""Limits of the whole run, of which each process has its part."""


class SentSample(Protocol):
    """Client of one sample that travels with its row: pickled it is its progress log and what it needs to go on."""

    sample_id: str
    log: Any
    """Its progress log: ``turns`` and ``replies``."""
    version: int
    is_stopped: bool
    running: str | None
    idle: asyncio.Event

    def attach(self, client: RolloutClient, gate: asyncio.Event) -> None:
        """Use ``client``, and ``gate`` where the sample had one."""

    def stop(self) -> None:
        """Refuse further requests."""


# -- messages ----------------------------------------------------------------------------------------------------------
_LENGTH_BYTES = 8
_TOKEN_BYTES = 32
NO_ANSWER = 0
"""Number of a message to which no answer is expected; calls have numbers from 1."""
_ARRAYS = {"prompt_ids": "i", "response_ids": "i", "response_mask": "b", "response_logprobs": "d"}


def packed(output: RowOutput) -> RowOutput:
    """Return an output with its tokens, mask and log-probs as arrays, bit for bit; what is no plain number stays."""
    return _converted(output, lambda values, kind: array(kind, values))


def unpacked(output: RowOutput) -> RowOutput:
    """Return the output that `packed` was given, with lists for its arrays."""
    return _converted(output, lambda values, kind: values.tolist() if isinstance(values, array) else values)


def _converted(output: RowOutput, convert: Callable[[Any, str], Any]) -> RowOutput:
    def of_row(one: AgentLoopOutput) -> AgentLoopOutput:
        found = {}
        for name, kind in _ARRAYS.items():
            with suppress(TypeError, OverflowError):
                found[name] = convert(getattr(one, name), kind)
        return dataclasses.replace(one, **found)

    return [of_row(one) for one in output] if isinstance(output, list) else of_row(output)


def framed(number: int, *content: Any) -> bytes:
    """Return a message: its length, the number of its call, and its content."""
    data = pickle.dumps(content, protocol=5)
    return len(data).to_bytes(_LENGTH_BYTES, "little") + number.to_bytes(_LENGTH_BYTES, "little") + data


async def receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return the number of the next message and its content, which `pickle.loads` may refuse.

    Raises:
        asyncio.IncompleteReadError: the other end has closed the connection.
    """
    head = await reader.readexactly(2 * _LENGTH_BYTES)
    length, number = (int.from_bytes(part, "little") for part in (head[:_LENGTH_BYTES], head[_LENGTH_BYTES:]))
    return number, await reader.readexactly(length)


# -- the process -------------------------------------------------------------------------------------------------------
class AgentLoopWorker(Worker):
    """A process of agent loops. They run in a thread, so that calls of its group are answered meanwhile.

    Args:
        config, tokenizer, processor, trainer_config: as `RowRunner`.
        processes: how many there are; of the limits in ``_SPLIT`` each has its part.
    """

    def __init__(self, config: Any, tokenizer: Any, processor: Any, trainer_config: Any, processes: int):
        super().__init__()
        import_users_modules(config.actor_rollout_ref.model.external_lib)
        own_tree = None if trainer_config is None else part_of(trainer_config, processes)
        self.runner = RowRunner(part_of(config, processes), tokenizer, processor, own_tree)
        self.client: RolloutClient
        self._server_set = 0
        """Number of the client's servers; 0: there are none yet."""
        self.samples: dict[str, SentSample] = {}
        """Those that run, by the name of the run: one that is stopped may begin again at once."""
        self.kept: dict[str, ConversationEnvironment] = {}
        """Environments of samples that were stopped and may go on, by id."""
        self._tasks: dict[int, asyncio.Task] = {}
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-agent-loops", daemon=True)
        self._thread.start()
        self._pulse = EventLoopPulse(self._loop, self._thread, config.env.idle_timeout)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect(self, host: str, port: int, token: str, number: int) -> None:
        """Take rows from the driver at this address, as its process of this number."""
        asyncio.run_coroutine_threadsafe(self._connect(host, port, token, number), self._loop).result(_START_S)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check(self) -> None:
        """Raise `AgentLoopIdle` if an agent loop blocks the event loop for too long."""
        self._pulse.check()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def options_read(self) -> list[str]:
        """Dotted keys of the options read in this process so far."""
        return list(READ)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Close tools, environments and connections."""
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_GRACE_S)
        self._loop.call_soon_threadsafe(close_hosts, self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)

    async def _connect(self, host: str, port: int, token: str, number: int) -> None:
        reader, self._writer = await asyncio.open_connection(host, port)
        self._writer.write(token.encode() + number.to_bytes(_LENGTH_BYTES, "little"))
        self._reading = asyncio.ensure_future(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, data = await receive(reader)
                if number == NO_ANSWER:
                    method, arguments = pickle.loads(data)
                    getattr(self, f"on_{method}")(*arguments)
                    continue
                task = asyncio.ensure_future(self._answer(number, data))
                self._tasks[number] = task
                task.add_done_callback(partial(self._ended, number))
                await asyncio.sleep(0)  # a task that is cancelled before it has begun would not answer
        for task in list(self._tasks.values()):  # the driver has ended
            task.cancel()

    def _ended(self, number: int, task: asyncio.Task) -> None:
        del self._tasks[number]

    async def _answer(self, number: int, data: bytes) -> None:
        try:
            method, arguments = pickle.loads(data)
            content, error = await getattr(self, f"on_{method}")(*arguments), None
        except BaseException as raised:
            content, error = None, raised
        try:
            message = framed(number, content, error and sendable(error))
        except Exception as unsendable:  # the row's output has something that cannot be pickled
            message = framed(number, None, sendable(unsendable))
        self._writer.write(message)

    async def _close(self) -> None:
        self._reading.cancel()
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.on_forget(list(self.kept))
        await close_shared()
        await self.client.close()
        self._writer.close()

    # what the driver asks for

    def on_cancel(self, number: int) -> None:
        """Cancel a call."""
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def on_lend(self, server_set: int, *answer: Any) -> None:
        """Send the request that waits for this slot; see `BorrowingClient.take`."""
        if server_set == self._server_set and isinstance(self.client, BorrowingClient):
            self.client.take(*answer)

    async def on_servers(self, addresses: Sequence[str], token: str, is_limited: bool, server_set: int) -> None:
        """Send requests to these servers from now on.

        Args:
            is_limited: the driver lends a slot for each request.
            server_set: number of these servers: those that were started again have another.
        """
        if server_set == self._server_set:
            return
        if hasattr(self, "client"):
            await self.client.close()
        self._server_set = server_set
        if is_limited:
            self.client = BorrowingClient(addresses, token, partial(self._tell, server_set))
        else:
            self.client = RolloutClient(addresses, token)

    def _tell(self, server_set: int, method: str, *arguments: Any) -> None:
        self._writer.write(framed(NO_ANSWER, method, server_set, arguments))

    async def on_row(
        self,
        number: int | str,
        row: dict[str, Any],
        seed: int,
        sampling: SamplingParams,
        sample: Any,
        batch: int,
        name: str,
    ) -> tuple[RowOutput | None, BaseException | None, Any, bool]:
        """Run the agent loop of a row.

        Args:
            name: of this run of the sample.

        Returns:
            output; or what it raised; or None twice, if it was stopped. Then the sample's progress log, and whether its
            environment is kept here.
        """
        output: RowOutput | None = None
        failure: BaseException | None = None
        kept = False
        if sample is not None:
            sample.attach(self.client, self._gate)
            sample.log.replies.environment = self.kept.pop(sample.sample_id, None)
            self.samples[name] = sample
        try:
            output = packed(await self.runner.run(number, row, seed, sampling, sample or self.client, batch))
        except asyncio.CancelledError:
            pass  # a scheduler has stopped the sample, or the driver cancelled the call
        except Exception as error:
            failure = sendable(error)
        if sample is None:
            return output, failure, None, False
        del self.samples[name]
        replies: ReplyLog = sample.log.replies
        if sample.is_stopped and (environment := replies.take_environment()) is not None:
            self.kept[sample.sample_id], kept = environment, True
        await replies.close()
        return output, failure, sample.log, kept

    async def on_stop(self, names: Sequence[str]) -> None:
        """Stop runs of samples: their rows end soon."""
        found = [sample for name in names if (sample := self.samples.get(name)) is not None]
        for sample in found:
            sample.stop()
        await self.client.abort([sample.running for sample in found if sample.running is not None])

    async def on_forget(self, ids: Sequence[str]) -> None:
        """Close the environments of samples that do not go on."""
        for sample_id in ids:
            if (environment := self.kept.pop(sample_id, None)) is not None:
                await environment.close()

    async def on_hold(self) -> None:
        """Send no request of samples that have a gate, until `on_release`."""
        self._gate.clear()

    async def on_release(self, version: int) -> None:
        """Let the requests of samples be sent, under the weights of ``version``."""
        for sample in self.samples.values():
            sample.version = version
        self._gate.set()

    async def on_logs(self, interrupts: bool) -> dict[str, Any]:
        """Return the progress logs of the samples that run; ``interrupts``: hold them, and end their requests first."""
        if interrupts:
            self._gate.clear()
            while running := [sample for sample in self.samples.values() if sample.running is not None]:
                await self.client.abort([sample.running for sample in running if sample.running is not None])
                # again: a request on its way to its server is not known there yet
                await asyncio.wait([asyncio.ensure_future(one.idle.wait()) for one in running], timeout=0.05)
        return {sample.sample_id: sample.log for sample in self.samples.values()}

    async def on_spans(self, since: float | None) -> list[Span]:
        """Return `RolloutClient.take_spans` in seconds of `time.time`, which processes of other nodes share."""
        shift = time.time() - time.monotonic()
        return shifted(self.client.take_spans(None if since is None else since - shift), shift)


def sendable(error: BaseException) -> BaseException:
    """Return an error that can be pickled, with its traceback as a note."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"In a process of the agent loops:\n{text}")
    return error


def part_of(config: Any, processes: int) -> Any:
    """Return a configuration in which the limits of ``_SPLIT`` are those of one process, rounded up."""
    changes = {key: -(-value // processes) for key in _SPLIT if (value := get_path(config, key))}
    if isinstance(config, Config):
        return config.with_values(changes)
    from omegaconf import OmegaConf  # the tree of a script

    config = copy.deepcopy(config)
    for key, value in changes.items():
        OmegaConf.update(config, key, value)
    return config


# -- the driver --------------------------------------------------------------------------------------------------------
class ProcessLost(RolloutServerError):
    """The connection to a process of the agent loops has ended."""

    def __init__(self, process: int):
        super().__init__(f"process {process} of the agent loops has closed its connection")
        self.process = process


class Link:
    """The connection to one process.

    Args:
        on_message: takes messages of the process that answer no call: (link, method, server set, arguments).
    """

    def __init__(self, process: int, writer: asyncio.StreamWriter, on_message: Callable[..., None]):
        self.process, self.writer, self.on_message = process, writer, on_message
        self.rows = 0
        """Rows that run there."""
        self.is_lost = False
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future] = {}

    def submit(self, method: str, *arguments: Any) -> tuple[int, asyncio.Future]:
        """Call a method there; returns the number of the call, and the future of its result."""
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        if self.is_lost:
            future.set_exception(ProcessLost(self.process))
            return number, future
        self.writer.write(framed(number, method, arguments))
        self._waiting[number] = future
        return number, future

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method there."""
        return await self.submit(method, *arguments)[1]

    def notify(self, method: str, *arguments: Any) -> None:
        """Send a message to which there is no answer."""
        if not self.is_lost:
            self.writer.write(framed(NO_ANSWER, method, arguments))

    def cancel(self, number: int) -> None:
        """Cancel a call; it is answered all the same."""
        self.notify("cancel", number)

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Take answers until the connection ends."""
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, data = await receive(reader)
                if number == NO_ANSWER:
                    self.on_message(self, *pickle.loads(data))
                    continue
                future = self._waiting.pop(number, None)
                if future is None or future.done():
                    continue
                try:
                    content, error = pickle.loads(data)
                except Exception as unreadable:
                    content, error = None, self._unreadable(unreadable)
                if error is None:
                    future.set_result(content)
                elif isinstance(error, asyncio.CancelledError):
                    future.cancel()
                else:
                    future.set_exception(error)
        self.is_lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ProcessLost(self.process))
        self._waiting.clear()

    def _unreadable(self, cause: Exception) -> RuntimeError:
        return RuntimeError(
            f"an answer of process {self.process} of the agent loops cannot be read here: {type(cause).__name__}: "
            f"{cause}. It has an object that pickle writes and cannot make again; return numbers, texts and "
            "collections of them in extra_fields."
        )


class AgentLoopWorkers:
    """The processes of agent loops, as the driver has them.

    Args:
        config, tokenizer, processor, trainer_config: as `RowRunner`.
        controller: name of the controller that starts them.
        loop: the driver's event loop of agent loops.
        wait_for: returns the result of a coroutine that runs there, and calls `check` meanwhile.

    Raises:
        ValueError: this controller starts no processes for them.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        processor: Any,
        trainer_config: Any,
        controller: str,
        loop: asyncio.AbstractEventLoop,
        wait_for: Callable[[Coroutine], Any],
    ):
        self.loop, self.wait_for, self.env = loop, wait_for, config.env
        self.links: dict[int, Link] = {}
        """Connections by number of the process; read and written in the thread of ``loop``."""
        self._connected = asyncio.Event()
        self._restarts: Counter[int] = Counter()
        """How often each process was started again since `next_batch`."""
        self._runs = count(1)
        self._servers: tuple[Any, ...] = ()
        self._client: WorkersClient | None = None
        self.released: int | None = None
        """Version of the weights under which samples with a gate may send requests; None: they are held."""
        self._server: asyncio.Server | None = None
        self._controller, self._token = get_controller(controller), secrets.token_hex(_TOKEN_BYTES // 2)
        self.size, trainer = config.actor_rollout_ref.rollout.agent.num_workers, config.trainer
        if not self._controller.driver_host:
            raise ValueError(
                f"actor_rollout_ref.rollout.agent.num_workers={self.size} needs processes besides the ranks, which the "
                f"controller {controller!r} does not start. Set it to 1, or use trainer.controller=ray or local."
            )
        arguments = {"tokenizer": tokenizer, "processor": processor, "trainer_config": trainer_config}
        classes = self._controller.ClassWithInitArgs(AgentLoopWorker, config=config, processes=self.size, **arguments)
        starts = [partial(self._start, number, classes, trainer) for number in range(self.size)]
        # actors import everything first; forks of the driver are made where no other of its threads is busy
        is_ray = self._controller.name == "ray"
        self.groups = run_concurrently(*starts) if is_ray else [start() for start in starts]

    def _start(self, number: int, classes: Any, trainer: Any) -> Any:
        """Start a process; returns its worker group."""
        pool, role = self._controller.ResourcePool([1], max_colocate_count=1), f"agent_loop_{number}"
        pool.use_gpu, pool.concurrent = False, self.size  # never the driver itself
        group = self._controller.WorkerGroup(
            pool,
            self._controller.create_colocated_worker_cls({role: classes}),
            ray_wait_register_center_timeout=trainer.ray_wait_register_center_timeout,
            timeout=trainer.worker_timeout,
            device_name="cpu",
        )
        group.set_deadlines(trainer.deadlines)
        return group.spawn(prefix_set=[role])[role]

    def connect(self) -> None:
        """Wait for the connection of every process."""
        self._port = self._wait(self._listen())
        for number in range(self.size):
            self._connect(number)
        self._wait(self._all_connected())

    def _connect(self, number: int) -> None:
        self.groups[number].connect(self._controller.driver_host, self._port, self._token, number)

    def _wait(self, coroutine: Coroutine) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(_START_S)

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._welcome, self._controller.driver_host, 0)
        return self._server.sockets[0].getsockname()[1]

    async def _all_connected(self) -> None:
        while len(self.links) < self.size:
            self._connected.clear()
            await self._connected.wait()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # before anything is unpickled: other users and machines may reach the port
        try:
            said = await asyncio.wait_for(reader.readexactly(_TOKEN_BYTES + _LENGTH_BYTES), _GRACE_S)
        except (asyncio.IncompleteReadError, asyncio.TimeoutError, OSError):
            said = b""
        number = int.from_bytes(said[_TOKEN_BYTES:], "little")
        if not secrets.compare_digest(said[:_TOKEN_BYTES], self._token.encode()) or number in self.links:
            writer.close()
            return
        link = Link(number, writer, self._take_message)
        # servers and version that every process has; messages arrive in order, so before the first row
        known = [link.submit("servers", *self._servers)] if self._servers else []
        known += [link.submit("release", self.released)] if self.released is not None else []
        self.links[number] = link
        self._connected.set()
        try:
            await asyncio.gather(link.serve(reader), *(future for _, future in known), return_exceptions=True)
        finally:
            writer.close()
            if self._client is not None:
                self._client.reclaim(link)

    def _take_message(self, link: Link, method: str, server_set: int, arguments: tuple) -> None:
        # slots of servers that others have replaced are no longer there: neither are those that a process has of them
        if self._client is not None and self._client.server_set == server_set:
            getattr(self._client, f"on_{method}")(link, *arguments)

    def use_servers(self, addresses: Sequence[str], token: str, max_running: int | None) -> WorkersClient:
        """Have the processes send their requests to these servers; returns the driver's client of them.

        Args:
            max_running: requests under way at one server at most, of all processes; the driver lends them the slots.
        """
        server_set = 1 if self._client is None else self._client.server_set + 1
        self._client = WorkersClient(self, addresses, token, max_running, server_set)
        self._servers = (addresses, token, max_running is not None, server_set)
        self._wait(self.all("servers", *self._servers))
        return self._client

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every process that runs; returns the results of those that did not end meanwhile."""
        calls = [link.call(method, *arguments) for link in self.links.values()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ProcessLost):
                raise result
        return [result for result in results if not isinstance(result, ProcessLost)]

    def next_batch(self) -> None:
        """Let processes that die be started again, each as often as ``env.on_error`` and ``env.max_retries`` say."""
        self._restarts.clear()

    def check(self) -> None:
        """Raise if a process is dead, or an agent loop blocks one for too long.

        While restarts are left a dead one is started again instead, and what ran in it begins again there.
        """
        for number, group in enumerate(self.groups):
            try:
                group.check()
                if (link := self.links.get(number)) is not None and link.is_lost:
                    group.check()  # which answered, it may be, just before it died
                    raise ProcessLost(number)
            except WorkerDied as error:
                if self.env.on_error != "retry" or self._restarts[number] >= self.env.max_retries:
                    raise
                self._restarts[number] += 1
                what = f"process {number} of the agent loops is started again, and its conversations begin again"
                logger.warning("%s: %s", what, str(error).splitlines()[0])
                self.loop.call_soon_threadsafe(self._drop, number)
                group.restart()
                self._connect(number)

    def _drop(self, number: int) -> None:
        """End the connection to a dead process, which may stay open where its whole node is gone."""
        if (link := self.links.pop(number, None)) is not None:
            link.writer.transport.abort()

    async def run(
        self,
        number: int | str,
        row: dict[str, Any],
        seed: int,
        sampling: SamplingParams,
        sample: SentSample | None,
        batch: int,
    ) -> RowOutput:
        """Run the agent loop of a row as `RowRunner.run` does, in the process with the fewest rows.

        If that dies, the row begins again in the one that takes its place, and endangers no other.

        Args:
            sample: its client; None: the row is none of a scheduler's samples. Its log has afterwards, also if it was
                stopped or cancelled, what was generated.
        """
        process: int | None = None
        while True:
            links = [one for one in self.links.values() if not one.is_lost and process in (None, one.process)]
            if not links:  # until `check` has started it again, or ended the run with its name
                self._connected.clear()
                await self._connected.wait()
                continue
            link = min(links, key=lambda one: (one.rows, one.process))
            try:
                return await self._run(link, sample, number, row, seed, sampling, sample, batch)
            except ProcessLost as error:
                process = error.process

    async def _run(self, link: Link, sample: SentSample | None, number: int | str, *arguments: Any) -> RowOutput:
        name = f"run {next(self._runs)}"
        if sample is not None:
            kept: ReplyLog = sample.log.replies
            while kept.abandoned:
                await kept.abandoned.pop().close()
            environment = kept.take_environment()
            if isinstance(environment, RemoteEnvironment) and not environment.link.is_lost:
                link = environment.link
            sample.running = name
            sample.idle.clear()
        link.rows += 1
        call, future = link.submit("row", number, *arguments, name)
        try:
            output, failure, log, keeps = await asyncio.shield(future)
        except asyncio.CancelledError:
            link.cancel(call)
            await asyncio.wait([future], timeout=_GRACE_S)
            if future.done() and not future.cancelled() and future.exception() is None and sample is not None:
                self._note(sample, link, *future.result()[2:])
            raise
        finally:
            link.rows -= 1
            if sample is not None:
                sample.running = None
                sample.idle.set()
        if sample is not None:
            self._note(sample, link, log, keeps)
        if failure is not None:
            raise failure
        if output is None:
            raise asyncio.CancelledError(f"the agent loop of row {number} was stopped")
        return unpacked(output)

    @staticmethod
    def _note(sample: SentSample, link: Link, log: Any, keeps_environment: bool) -> None:
        sample.log.turns, sample.log.replies.replies = log.turns, log.replies.replies
        if keeps_environment:
            sample.log.replies.environment = RemoteEnvironment(link, sample.sample_id)

    def close(self) -> None:
        """End the processes. May be called with dead ones."""

        def end(group: Any) -> None:
            with suppress(WorkerGroupError):
                group.close()
            group.stop()

        run_concurrently(*(partial(end, group) for group in self.groups))
        if self._server is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._server.close)


class RemoteEnvironment(ConversationEnvironment):
    """An environment that a process keeps, while no episode runs."""

    def __init__(self, link: Link, sample_id: str):
        self.link, self.sample_id = link, sample_id

    async def reply(self, turn: AssistantTurn) -> Reply:
        raise NotImplementedError("it answers in its own process")

    async def close(self) -> None:
        with suppress(RolloutServerError):
            await self.link.call("forget", [self.sample_id])
