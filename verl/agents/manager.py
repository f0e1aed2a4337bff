"""Run agent loops: one task a row in the driver's event loop, rollout servers in the workers, one batch at the end.

Takes the place of the worker group in ``mode=sync``: `generate_sequences` takes the same rows and adds the same
columns.
"""

import asyncio
import logging
import secrets
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from verl.agents.base import (
    TRAJECTORY_COLUMN,
    AgentLoopOutput,
    EpisodeStatus,
    TrainerConfig,
    agent_loop,
    close_shared,
    load_agent_loops,
)
from verl.agents.conversation import check_chat_template
from verl.agents.episode import ReplyLog
from verl.agents.outputs import assemble_outputs, check_failures, check_images, failed_output, spread
from verl.envs.host import close_hosts
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerGroupError
from verl.single_controller.mailbox import sender
from verl.telemetry.run_record import say_early
from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import derive_seed, is_loopback
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.messages import RolloutServerError, sampling_from_json, write_servers_file

# -- The rollout servers as one row's agent loop sees them -----------------------------------------------------------
_OTHER_NAMES = {"logprobs": "want_log_probs", "max_new_tokens": "max_tokens"}


@runtime_checkable
class KeepsReplies(Protocol):
    """A client of one sample, which a scheduler may stop and continue in a later step."""

    replies: ReplyLog
    is_stopped: bool

    def restart(self) -> None:
        """Start the sample again."""


class AsyncLLMServerManager:
    """Generate tokens for one row. The seed of its k-th call comes from the row's seed and k, whatever else runs.

    Args:
        client: to all servers, or of one sample.
        seed: of the row; its first call takes it as it is.
        name: of the row, for the sessions it opens.
        priority: of the row's requests.
    """

    def __init__(self, client: RolloutClient, seed: int, name: str, priority: int = 0):
        self.seconds = 0.0
        """Time its calls took, waiting included."""
        self.replies: ReplyLog = client.replies if isinstance(client, KeepsReplies) else ReplyLog()
        """Answers of the row's environment: those of earlier steps too, where the row is a partial rollout."""
        self._since = time.monotonic()
        self._running = 0
        self.last: Completion | None = None
        """Completion of its last call."""
        self._client, self._seed, self._name, self._priority = client, seed, name, priority
        self._calls = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a scheduler has stopped the row's sample, which may go on in a later step."""
        return isinstance(self._client, KeepsReplies) and self._client.is_stopped

    @property
    def idle_s(self) -> float | None:
        """Seconds since its last call ended; None while a call runs."""
        return None if self._running else time.monotonic() - self._since

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
    ) -> Completion:
        """Generate the continuation of ``prompt_ids``.

        Args:
            request_id: of the conversation: its later turns go to the server that has read its beginning.
            sampling_params: fields of `SamplingParams`; an unknown one is refused by name.
            image_data: images that stand for the placeholders among ``prompt_ids``, in order.
        """
        # the first call as in mode=sync: a single turn gives the same tokens there and here
        seed = self._seed if self._calls == 0 else derive_seed(self._seed, "turn", self._calls)
        self._calls += 1
        media = {"image": list(image_data)} if image_data else None
        sampling = sampling_from_json({_OTHER_NAMES.get(name, name): value for name, value in sampling_params.items()})
        request = Request(tuple(prompt_ids), sampling, seed, media)
        start = time.perf_counter()
        self._running += 1
        try:
            self.last = await self._client.generate(
                request, session=f"{self._name}/{request_id}" if request_id else None, priority=self._priority
            )
            return self.last
        finally:
            self._running -= 1
            self._since = time.monotonic()
            self.seconds += time.perf_counter() - start


SERVERS_FILE = "rollout_servers.json"

RowOutput = AgentLoopOutput | list[AgentLoopOutput]
"""What an agent loop returns of a row; several where each turn of a trajectory is a row."""

Generate = Callable[[RolloutClient, int, Callable[[int, int, Any], Coroutine]], Coroutine]

_CHECK_INTERVAL_S = 1.0  # between two checks of the workers while requests run
_GRACE_S = 10.0  # for an episode to end after env.episode_timeout
_SAY_BLOCKED_S = 30.0  # without a sign of the event loop

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Generate batches through agent loops.

    Args:
        config: the whole configuration.
        worker_group: of the role with the rollout; its models are loaded.
        tokenizer: the policy's; None: loaded.
        processor: the policy's, if it has one.
        trainer_config: configuration of agent loops, such as a script's tree; None: ``config``.
    """

    def __init__(
        self, config: Any, worker_group: Any, tokenizer: Any = None, processor: Any = None, trainer_config: Any = None
    ):
        self.trainer_config = TrainerConfig(config if trainer_config is None else trainer_config)
        self.config, self.worker_group, self.processor = config, worker_group, processor
        self.rollout = rollout = config.actor_rollout_ref.rollout
        model = config.actor_rollout_ref.model
        self.tokenizer = tokenizer or hf_tokenizer(
            config.data.tokenizer or model.path, chat_template=model.custom_chat_template
        )
        if rollout.agent.agent_loop_config_path:
            load_agent_loops(rollout.agent.agent_loop_config_path)
        agent_loop(rollout.agent.default_agent_loop)  # a wrong name fails before anything is generated
        check_chat_template(self.tokenizer, processor, config)
        self._start_servers()
        if not is_loopback(rollout.server_host):
            say_early(
                f"note: rollout servers listen on {rollout.server_host}: other machines can send requests, with the "
                f"api_key in {self.servers_file}"
            )
        self._unseeded_calls = self._batches = 0
        self.keeps_serving = False
        """Whether the servers serve between two batches, too."""
        self._known_causes: set[str] = set()
        """Causes of failed episodes that the user has read."""
        self._loop = asyncio.new_event_loop()
        # a loop of its own: the driver's thread waits, and checks the workers meanwhile
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-agent-loops", daemon=True)
        self._thread.start()

    def _start_servers(self) -> None:
        token = secrets.token_urlsafe(24)  # other users of this machine reach its loopback
        started = self.worker_group.start_server(token)
        self.addresses = [answer["address"] for answer in started if answer is not None]
        self.servers_file = self._publish_addresses(token)
        most = self.rollout.max_running_requests
        if most is None and self.config.actor_rollout_ref.generates_continuously:
            most = self.rollout.max_num_seqs  # what a replica could not run waits here, for whichever has room first
        self.client = RolloutClient(self.addresses, token, most)

    def reconnect(self) -> None:
        """Serve with new processes of the worker group, in the place of those that died."""
        self.keeps_serving = False
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(timeout=10)
        self._start_servers()

    def _publish_addresses(self, token: str) -> Path:
        """Write the servers' addresses and key for agents in other processes; only this user can read the file."""
        path = Path(self.config.trainer.default_local_dir).expanduser().absolute() / SERVERS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_servers_file(path, self.addresses, token)
        return path

    def wake_up(self) -> None:
        """Do nothing: `generate_sequences` starts and stops serving itself."""

    sleep = wake_up

    # -- a batch -------------------------------------------------------------------------------------------------------

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One agent loop a row; adds the columns that ``RolloutRole.generate_sequences`` adds.

        Reads ``raw_prompt_ids`` (or the valid tokens of ``input_ids``), ``seeds`` (B,) int64 and ``agent_name``; every
        object column reaches the loops. The metadata ``validate`` and ``do_sample`` choose the sampling parameters.

        Raises:
            WorkerGroupError: a worker died, or its engine failed.
            RolloutServerError: a server does not answer.
            RuntimeError: an agent loop raised, with ``env.on_error=stop``; names the row.
            EpisodeError: more agent loops failed than ``env.max_error_share`` allows.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)
        if "seeds" in prompts.keys():
            seeds = prompts.column("seeds").tolist()
        else:
            self._unseeded_calls += 1
            step, count = prompts.meta_info.get("global_steps", 0), self._unseeded_calls
            seeds = [derive_seed(self.config.trainer.seed, "unseeded", step, count, i) for i in range(len(rows))]
        with sender(prompts.meta_info.get("completions_to")) as send:
            outputs, timing = self._serve(lambda: self._all_rows(rows, seeds, sampling, send))
        return self.to_batch(prompts, outputs, timing)

    def serve_rows(self, prompts: DataProto, generate: Generate) -> tuple[Any, dict[str, float]]:
        """Serve while ``generate`` decides which rows are generated, and when they stop; return its result, seconds.

        Args:
            generate: (client, version of the weights, run) -> coroutine; ``run(row, seed, client)`` runs the agent loop
                of a row with a client of the caller's.

        Raises:
            as `generate_sequences`.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)

        async def work() -> Any:
            async def run(row: int, seed: int, client: Any) -> RowOutput:
                return await self._row(row, rows[row], seed, sampling, client)

            states = await self.client.health()
            return await generate(self.client, states[0]["version"], run)

        return self._serve(work)

    def to_batch(self, prompts: DataProto, outputs: Sequence[RowOutput], timing: Mapping[str, float]) -> DataProto:
        """The columns of outputs, one or several a row of ``prompts``; ``timing`` and their own go to the metadata.

        Where a row has several, the metadata ``source_rows`` have the row of ``prompts`` of each row of the batch, and
        the column `TRAJECTORY_COLUMN` is the same for those of one.

        Raises:
            EpisodeError: more agent loops failed than ``env.max_error_share`` allows.
        """
        groups = [output if isinstance(output, list) else [output] for output in outputs]
        causes = check_failures([group[-1] for group in groups], self.config.env.max_error_share)
        for cause in sorted(set(causes) - self._known_causes):
            self._known_causes.add(cause)
            logger.warning("%d of %d episodes failed and are left out: %s", causes[cause], len(groups), cause)
        flat = [output for group in groups for output in group]
        source_rows = [row for row, group in enumerate(groups) for _ in group]
        has_several = len(flat) > len(groups)
        batch = assemble_outputs(
            prompts.select_idxs(source_rows) if has_several else prompts,
            flat,
            self.rollout.prompt_length,
            self.rollout.response_length,
            self.tokenizer.pad_token_id,
        )
        if has_several:
            batch.meta_info["source_rows"] = source_rows
            batch.non_tensor_batch[TRAJECTORY_COLUMN] = np.array(
                [f"{self._batches}.{row}" for row in source_rows], dtype=object
            )
        batch.meta_info["timing"] = {**timing, **spread([group[-1] for group in groups])}
        return batch

    # -- rows of no batch: generated while the driver does something else ----------------------------------------------

    def keep_serving(self) -> None:
        """Serve from now on, also between two batches."""
        self.worker_group.serve()
        self.keeps_serving = True

    def stop_serving(self) -> None:
        """Interrupt what runs, for `keep_serving` to go on with other weights: requests wait."""
        self.keeps_serving = False
        self.worker_group.stop_serving()

    def wait_for(self, coroutine: Coroutine) -> Any:
        """Return the result of a coroutine that runs in the thread of the agent loops; checks the workers meanwhile."""
        return self._run(coroutine)

    def abandon(self, coroutine: Coroutine) -> None:
        """Run a coroutine that ends others, also after a failure; wait for it for a short time."""
        if self._loop.is_closed():
            coroutine.close()
            return
        wait([asyncio.run_coroutine_threadsafe(coroutine, self._loop)], _GRACE_S)

    def row_runner(self, prompts: DataProto) -> Callable[[str, dict[str, Any], int, Any], Coroutine]:
        """Return ``run(name, row, seed, client)``, the agent loop of one row of a training batch, as a coroutine.

        Args:
            prompts: their metadata choose the sampling parameters.
        """
        sampling = self._sampling(prompts)

        def run(name: str, row: dict[str, Any], seed: int, client: Any) -> Coroutine:
            return self._row(name, row, seed, sampling, client)

        return run

    def _serve(self, work: Callable[[], Coroutine]) -> tuple[Any, dict[str, float]]:
        """The result of ``work()``, run in the other thread while the servers serve, and the seconds it took."""
        self._batches += 1
        if self.keeps_serving:
            start = time.perf_counter()
            return self._run(work()), {"generate_sequences": time.perf_counter() - start}
        timings = self.worker_group.serve()
        start = time.perf_counter()
        result = self._run(work())
        seconds = time.perf_counter() - start
        # not in a finally: after a failure the workers may be gone, and `_run` knows which failures they survive
        self.worker_group.stop_serving()
        # the slowest rank's: requests begin when all ranks are ready
        return result, {"generate_sequences": seconds, "reshard": max(timing["reshard"] for timing in timings)}

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        metadata = prompts.meta_info
        return self.worker_group.sampling_of(bool(metadata.get("validate")), metadata.get("do_sample", True))

    async def _all_rows(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        sampling: SamplingParams,
        send: Callable[[Any], None] | None = None,
    ) -> list[RowOutput]:
        """Outputs in the order of the rows; the first error that is raised ends the others.

        Args:
            send: gets seed, tokens and number of turns of each response that a reward function will score.
        """

        async def run(number: int, row: dict[str, Any], seed: int) -> RowOutput:
            output = await self._row(number, row, seed, sampling)
            if send is not None and (message := early_message(output, seed)) is not None:
                send(message)
            return output

        tasks = [
            asyncio.ensure_future(run(i, row, seed)) for i, (row, seed) in enumerate(zip(rows, seeds, strict=True))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # also after a failure: no request may go on into the next batch
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _row(
        self, number: int | str, row: dict[str, Any], seed: int, sampling: SamplingParams, client: Any = None
    ) -> RowOutput:
        """Run the agent loop of a row, again if it fails and ``env.on_error`` says so; what it returns in the end."""
        env, start = self.config.env, time.perf_counter()
        name = row.get("agent_name") or self.rollout.agent.default_agent_loop
        attempts = 1 + (env.max_retries if env.on_error == "retry" else 0)
        for attempt in range(attempts):
            if attempt and isinstance(client, KeepsReplies):
                client.restart()
            # other tokens than those that led to the failure
            own_seed = derive_seed(seed, "retry", attempt) if attempt else seed
            try:
                return await self._attempt(number, name, row, own_seed, sampling, client)
            except (RolloutServerError, asyncio.CancelledError):
                raise
            except Exception as error:
                message = f"agent loop {name!r} failed on row {number}: {type(error).__name__}: {error}"
                if env.on_error == "stop":
                    raise RuntimeError(message) from error
                logger.debug("%s", message, exc_info=error)
                # of one that names its episode, what it has in common with others
                cause = f"agent loop {name!r}: {type(error).__name__}: {getattr(error, 'cause', error)}"
                if isinstance(error, asyncio.TimeoutError) and env.episode_timeout is not None:
                    cause = f"agent loop {name!r}: not done after env.episode_timeout={env.episode_timeout:g} s"
                    break
        return failed_output(row, name, cause, time.perf_counter() - start)

    async def _attempt(
        self, number: int | str, name: str, row: dict[str, Any], seed: int, sampling: SamplingParams, client: Any
    ) -> RowOutput:
        start = time.perf_counter()
        # the batch's number in the name: row 3 of the next batch is another conversation
        servers = AsyncLLMServerManager(client or self.client, seed, name=f"{self._batches}.{number}")
        loop = agent_loop(name)(
            trainer_config=self.trainer_config,
            server_manager=servers,
            tokenizer=self.tokenizer,
            processor=self.processor,
        )
        timeout = self.config.env.episode_timeout
        if timeout is not None and loop.ends_in_time:
            timeout += _GRACE_S  # it ends by itself, with the turns that are complete
        # a dict of the row's own: loops change it
        task = asyncio.ensure_future(loop.run(dict(vars(sampling)), **row))
        result = await self._watched(task, servers, timeout)
        measured = {
            "finish_reason": servers.last and servers.last.finish_reason,
            "rollout_version": servers.last and servers.last.version,
            "rollout_seconds": servers.seconds,
            "episode_seconds": time.perf_counter() - start,
            "agent_name": name,
        }
        for output in result if isinstance(result, list) else [result]:
            check_images(output, row)
            # a loop's own values win: it may call the servers in ways that are not measured here
            output.extra_fields = {**measured, **output.extra_fields}
            output.metrics = {"generate_sequences": servers.seconds, **output.seconds}
        return result

    async def _watched(self, task: asyncio.Task, servers: AsyncLLMServerManager, timeout: float | None) -> RowOutput:
        """Return the result of ``task``, which is cancelled after ``timeout``, or when it waits for no tokens too long.

        Raises:
            TimeoutError: it was.
            AgentLoopIdle: it asked for no tokens for ``env.idle_timeout``.
        """
        idle_limit, start = self.config.env.idle_timeout, time.monotonic()
        try:
            while True:
                left = None if timeout is None else max(0.0, start + timeout - time.monotonic())
                idle = servers.idle_s
                if idle_limit is not None:
                    wait_s = idle_limit - idle if idle is not None else idle_limit
                    left = wait_s if left is None else min(left, wait_s)
                done, _ = await asyncio.wait({task}, timeout=left)
                if done:
                    return task.result()
                if timeout is not None and time.monotonic() - start >= timeout:
                    raise asyncio.TimeoutError
                idle = servers.idle_s
                if idle_limit is not None and idle is not None and idle >= idle_limit:
                    raise AgentLoopIdle(
                        f"it asked for no tokens in {idle:.0f} s (env.idle_timeout={idle_limit:g}) and waits at "
                        f"{place_of(task)}. Give what it waits for a limit of time, or raise env.idle_timeout."
                    )
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # -- watching the workers ------------------------------------------------------------------------------------------

    def _run(self, coroutine: Any) -> Any:
        """Wait for a coroutine of the other thread, and check the workers meanwhile."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        pulse = EventLoopPulse(self._loop, self._thread, self.config.env.idle_timeout)
        try:
            while not wait([future], _CHECK_INTERVAL_S).done:
                self._check_workers()
                pulse.check()
            return future.result()
        except WorkerGroupError:
            raise
        except RolloutServerError:
            self._check_workers()  # a dead worker is the cause of a broken connection
            raise
        except Exception:
            wait([future], 5.0)
            with suppress(WorkerGroupError):  # if the workers can still be reached
                self.worker_group.stop_serving()
            raise
        finally:
            future.cancel()

    def _check_workers(self) -> None:
        """Raise if a worker is dead, its engine failed, or it has not finished a step for too long."""
        limit = self.worker_group.timeout
        for rank, state in enumerate(self.worker_group.server_state()):
            if limit is not None and state["running"] and state["idle_s"] > limit:
                raise RolloutServerError(
                    f"The rollout engine of rank {rank} has not finished a step for {state['idle_s']:.0f} s, longer "
                    f"than trainer.worker_timeout={limit}, with {state['running']} requests running. Look at its "
                    "stderr; raise the limit if a step is just slow."
                )

    def close(self) -> None:
        """Stop the servers and the event loop. May be called twice, and with dead workers."""
        if self._loop.is_closed():
            return
        self.servers_file.unlink(missing_ok=True)
        # in the loop that opened their connections, and so before that stops
        self._loop.call_soon_threadsafe(close_hosts, self._loop)
        try:
            for closing in (close_shared, self.client.close):
                asyncio.run_coroutine_threadsafe(closing(), self._loop).result(timeout=10)
        except FutureTimeout:
            # an agent loop blocks it: the thread is a daemon, and ends with the process
            logger.warning("the event loop of agent loops is blocked, and is left to the end of the process")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()
        with suppress(WorkerGroupError):
            self.worker_group.stop_server()


class AgentLoopIdle(RuntimeError):
    """An agent loop waits for something that does not come."""

    exit_class = ExitCode.WORKER


def place_of(task: asyncio.Task) -> str:
    """Return file, line and function where a task waits: the innermost of its own code."""
    inner: Any = task.get_coro()
    place = "a place that is not known"
    while inner is not None and getattr(inner, "cr_frame", None) is not None:
        frame = inner.cr_frame
        if "asyncio" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        inner = inner.cr_await
    return place


class EventLoopPulse:
    """Whether the event loop of agent loops still runs: one that blocks in a call stops all others.

    Args:
        limit_s: seconds without a sign of it that end the run; None: no limit. It warns after `_SAY_BLOCKED_S`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, limit_s: float | None):
        self.loop, self.thread, self.limit_s = loop, thread, limit_s
        self.asked_at: float | None = None
        """Time of a request for a sign that has not come yet."""
        self.has_said = False

    def _beat(self) -> None:
        self.asked_at = None

    def check(self) -> None:
        """Ask the loop for a sign, or look at how long ago it was asked.

        Raises:
            AgentLoopIdle: too long.
        """
        asked_at = self.asked_at
        if asked_at is None:
            self.asked_at = time.monotonic()
            self.loop.call_soon_threadsafe(self._beat)
            return
        blocked_s = time.monotonic() - asked_at
        if blocked_s < min(_SAY_BLOCKED_S, self.limit_s or _SAY_BLOCKED_S):
            return
        frame = sys._current_frames().get(self.thread.ident)
        place = "".join(traceback.format_stack(frame, limit=3)) if frame else "a place that is not known\n"
        message = (
            f"an agent loop has blocked the event loop of all of them for {blocked_s:.0f} s, at:\n{place}Blocking work "
            "belongs into self.loop.run_in_executor, or await something that does not block."
        )
        if self.limit_s is not None and blocked_s >= self.limit_s:
            raise AgentLoopIdle(f"env.idle_timeout={self.limit_s:g}: {message}")
        if not self.has_said:
            self.has_said = True
            logger.warning("%s", message)


def early_message(output: RowOutput, seed: int) -> list[Any] | None:
    """What is sent of a row whose agent loop has ended: its seed, tokens (int32) and number of turns.

    None: it is scored with the batch, or not by a reward function.
    """
    if isinstance(output, list) or not output.response_ids or output.status == EpisodeStatus.ERROR:
        return None
    if output.reward_score is not None or "reward_scores" in output.extra_fields:
        return None
    return [seed, array("i", output.response_ids).tobytes(), output.num_turns]


def rows_of(prompts: DataProto) -> list[dict[str, Any]]:
    """The object columns of each row, with ``raw_prompt_ids``, and ``validate`` in rows of a validation."""
    columns: dict[str, Any] = dict(prompts.non_tensor_batch)
    if prompts.meta_info.get("validate"):
        columns["validate"] = [True] * len(prompts)
    if "raw_prompt_ids" not in columns:
        has_ids = "input_ids" in prompts.keys()  # the rows of environment groups have no prompt yet
        rows = (
            [row.tolist() for row in prompts.ragged("input_ids").rows()]
            if has_ids
            else [[] for _ in range(len(prompts))]
        )
        columns["raw_prompt_ids"] = rows
    return [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
