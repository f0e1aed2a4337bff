"""The agent loop of one row: its rollout servers, attempts, limits of time and measurements.

Runs in the driver or in a process of `verl.agents.workers`; knows no batch.
"""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verl.agents.base import AgentLoopOutput, TrainerConfig, agent_loop, load_agent_loops
from verl.agents.episode import ReplyLog
from verl.agents.outputs import check_images, failed_output
from verl.utils.exit_codes import ExitCode
from verl.utils.py_functional import derive_seed
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.messages import RolloutServerError, sampling_from_json

RowOutput = AgentLoopOutput | list[AgentLoopOutput]
"""What an agent loop returns of a row; several where each turn of a trajectory is a row."""

_GRACE_S = 10.0  # for an episode to end after env.episode_timeout
_SAY_BLOCKED_S = 30.0  # without a sign of the event loop

logger = logging.getLogger(__name__)

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


class RowRunner:
    """Runs the agent loops of rows in the running event loop.

    Args:
        config: the whole configuration.
        tokenizer, processor: the policy's.
        trainer_config: configuration of agent loops, such as a script's tree; None: ``config``.

    Raises:
        ValueError: ``rollout.agent.default_agent_loop`` is no loop.
    """

    def __init__(self, config: Any, tokenizer: Any, processor: Any = None, trainer_config: Any = None):
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.trainer_config = TrainerConfig(config if trainer_config is None else trainer_config)
        agent = config.actor_rollout_ref.rollout.agent
        if agent.agent_loop_config_path:
            load_agent_loops(agent.agent_loop_config_path)
        agent_loop(agent.default_agent_loop)  # a wrong name fails before anything is generated

    async def run(
        self, number: int | str, row: dict[str, Any], seed: int, sampling: SamplingParams, client: Any, batch: int = 0
    ) -> RowOutput:
        """Run the agent loop of a row, again if it fails and ``env.on_error`` says so; what it returns in the end.

        Args:
            number: of the row, or its name.
            client: of the rollout servers.
            batch: number of its batch: row 3 of the next one is another conversation.

        Raises:
            RuntimeError: the loop raised, with ``env.on_error=stop``; names the row.
            RolloutServerError: a server does not answer.
        """
        env, start = self.config.env, time.perf_counter()
        name = row.get("agent_name") or self.config.actor_rollout_ref.rollout.agent.default_agent_loop
        attempts = 1 + (env.max_retries if env.on_error == "retry" else 0)
        for attempt in range(attempts):
            if attempt and isinstance(client, KeepsReplies):
                client.restart()
            # other tokens than those that led to the failure
            own_seed = derive_seed(seed, "retry", attempt) if attempt else seed
            try:
                return await self._attempt(f"{batch}.{number}", name, row, own_seed, sampling, client)
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
        self, session: str, name: str, row: dict[str, Any], seed: int, sampling: SamplingParams, client: Any
    ) -> RowOutput:
        start = time.perf_counter()
        servers = AsyncLLMServerManager(client, seed, name=session)
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
