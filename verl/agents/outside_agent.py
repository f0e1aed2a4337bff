"""Agent loop of agents written outside, which know OpenAI's chat completions and nothing of verl.

The agent is an ``async`` function, an ordinary one, or a program. It gets the URL of a session (`verl.agents.gateway`);
what it asks there and is answered becomes the trajectory.
"""

import asyncio
import inspect
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl.agents.base import AgentLoopBase, AgentLoopOutput, EpisodeStatus, at_close, register
from verl.agents.conversation import ChatRenderer
from verl.agents.episode import EpisodeLimits
from verl.agents.gateway import Gateway
from verl.agents.session import Session
from verl.sandbox.forked_calls import ForkedCalls, close_all, plain, result_of
from verl.sandbox.outcomes import Outcome
from verl.sandbox.supervisor import Limits, command, end, outcome_of
from verl.utils.exit_codes import ExitCode
from verl.utils.import_utils import load_extern_type, split_file_name

at_close(close_all)

_END_S = 5.0
"""Seconds in which an agent that is stopped must end."""
_WORDS = 2000
"""Last characters of what a failed program printed, in the error."""


class AgentFailed(RuntimeError):
    """The agent raised, or its program failed."""

    exit_class = ExitCode.DATA


@register("openai_agent")
class OpenAIAgentLoop(AgentLoopBase):
    """Runs an agent against a session, and returns what passed there as rows.

    A subclass that overrides `agent` needs no ``function``. Options of an entry in
    ``rollout.agent.agent_loop_config_path`` (``function``, ``command``, ``runs_in``) take the place of those of
    ``rollout.agent.openai_agent``.
    """

    ends_in_time = True

    async def agent(self, base_url: str, api_key: str, row: dict[str, Any]) -> Any:
        """Hold one episode: the configured function or program.

        Args:
            base_url: of an OpenAI client.
            api_key: of the same.
            row: columns of the row, with ``messages`` (its prompt) and ``reward_url``.

        Returns:
            None, the reward, or a mapping with ``reward``, ``turn_rewards`` (one a call) and any other numbers.
        """
        options = self.config.actor_rollout_ref.rollout.agent.openai_agent
        program = self.options.get("command", options.command)
        if program:
            return await in_thread(lambda stop: run_program(program, base_url, api_key, row, self._limits(), stop))
        name = self.options.get("function", options.function)
        runs_in = self.options.get("runs_in", options.runs_in)
        if not name:
            raise ValueError(
                "agent loop 'openai_agent': actor_rollout_ref.rollout.agent.openai_agent.function is null, and so is "
                ".command. Name the agent: function=path/file.py:function or command=[program,argument]."
            )
        if runs_in == "process":
            return await self._forked(*place_of(name)).call(base_url, api_key, row)
        function = load_extern_type(*place_of(name))
        if runs_in == "thread" or runs_in == "auto" and not inspect.iscoroutinefunction(function):
            return await in_thread(lambda stop: result_of(function, base_url, api_key, row))
        result = function(base_url, api_key, row)
        return await result if inspect.isawaitable(result) else result

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        rollout = self.config.actor_rollout_ref.rollout
        session = Session(
            self.server_manager,
            ChatRenderer.of(self.tokenizer, self.processor, self.config),
            sampling_params,
            self._episode_limits(),
            row,
            in_turn=rollout.partial_rollout,
        )
        gateway, start = await Gateway.of(rollout.server_host), time.perf_counter()
        with gateway.opened(session) as url:
            own = {**row, "messages": messages_of(row), "reward_url": f"{url}/reward"}
            task = asyncio.ensure_future(guarded(self.agent(f"{url}/v1", gateway.api_key or "none", own)))
            try:
                status = await self._status(session, task)
            finally:
                session.end()
                await stopped(task)
        seconds = time.perf_counter() - start - self.server_manager.seconds
        outputs = session.outputs(status, max(0.0, seconds))
        return outputs[0] if len(outputs) == 1 else outputs

    async def _status(self, session: Session, task: asyncio.Future) -> EpisodeStatus:
        """Wait for the end of an episode; how it ended.

        Raises:
            AgentFailed: the agent raised, and no limit explains it; or it asked for nothing.
            TimeoutError: ``env.episode_timeout`` is over and no answer was complete.
        """
        ended = asyncio.ensure_future(session.ended.wait())
        try:
            await asyncio.wait({task, ended}, timeout=self.config.env.episode_timeout, return_when="FIRST_COMPLETED")
        finally:
            ended.cancel()
        if session.failure is not None:
            raise session.failure
        if not task.done() and not session.ended.is_set():
            if not session.num_turns:
                raise asyncio.TimeoutError
            return EpisodeStatus.TIMEOUT
        status = session.status or EpisodeStatus.COMPLETED
        if task.done() and not session.ended.is_set():
            if error := task.exception():
                # most agents do not catch the refusal of a request at a limit
                if session.status is None or not session.num_turns:
                    raise AgentFailed(f"{type(error).__name__}: {error}") from error
            else:
                session.take_result(task.result())
        if not session.num_turns:
            raise AgentFailed(
                "the agent ended without an answer of the policy. Have it send chat completions to the base_url that "
                "it is given."
            )
        return status

    def _episode_limits(self) -> EpisodeLimits:
        options = self.config.actor_rollout_ref.rollout.multi_turn
        return EpisodeLimits(
            options.max_assistant_turns, options.max_user_turns, options.max_tool_calls, options.max_tokens_per_turn
        )

    def _limits(self) -> Limits:
        return Limits(memory_mb=self.config.env.memory_mb, output_mb=64)

    def _forked(self, path: str, name: str) -> ForkedCalls:
        return ForkedCalls.of(path, name, self._limits())


def place_of(name: str) -> tuple[str, str]:
    """Split ``path/file.py:function`` or ``pkg://module:function``.

    Raises:
        ValueError: it is neither.
    """
    place = split_file_name(name)
    if place is None:
        raise ValueError(
            f"actor_rollout_ref.rollout.agent.openai_agent.function={name!r} must be path/file.py:function or "
            "pkg://package.module:function."
        )
    return place


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row's prompt.

    Raises:
        ValueError: the row has token ids only.
    """
    if row.get("raw_prompt") is None:
        raise ValueError(
            "agent loop 'openai_agent': the row has no messages, only token ids, and an agent outside reads messages. "
            "Set data.return_raw_chat=true."
        )
    return [dict(message) for message in row["raw_prompt"]]


async def guarded(coroutine: Any) -> Any:
    """Await an agent; one that leaves its process must not take the driver along.

    Raises:
        AgentFailed: it called `sys.exit`.
    """
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentFailed(f"{type(error).__name__}: {error}") from error


async def stopped(task: asyncio.Future) -> None:
    """Cancel an agent that runs still, and wait for its end, though not for ever."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_END_S)
    if task.done() and not task.cancelled():
        task.exception()  # read: what it raises once it is stopped is of no interest


async def in_thread(work: Callable[[threading.Event], Any]) -> Any:
    """Return what ``work`` returns in a thread of its own; the event that it gets is set when nobody waits any more."""
    loop, stop = asyncio.get_running_loop(), threading.Event()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def run() -> None:
        result, failure = None, None
        try:
            result = work(stop)
        except Exception as error:
            failure = error
        except BaseException as error:
            failure = AgentFailed(f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="agent", daemon=True).start()
    try:
        return await future
    finally:
        stop.set()


def run_program(
    program: Sequence[str], base_url: str, api_key: str, row: Mapping[str, Any], limits: Limits, stop: threading.Event
) -> None:
    """Run a program to its end, or until ``stop`` is set; then it and all that it started is killed.

    It reads the row as JSON from its standard input, and ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and
    ``VERL_REWARD_URL`` from its environment.

    Raises:
        AgentFailed: it ended with another exit code than 0; with what it printed last.
    """
    own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "VERL_REWARD_URL": row["reward_url"]}
    with tempfile.TemporaryDirectory(prefix="verl-agent-") as folder:
        given, printed = Path(folder, "row.json"), Path(folder, "output")
        given.write_text(json.dumps(row, default=plain))
        with given.open() as stdin, printed.open("wb") as output:
            popen = subprocess.Popen(
                command(limits, [str(word) for word in program]),
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **own},
            )
        while popen.poll() is None and not stop.wait(0.02):
            pass
        if popen.poll() is None:
            end(popen)
            return
        if popen.returncode:
            outcome = outcome_of(popen.returncode)
            cause = f"exit code {popen.returncode}" if outcome is Outcome.EXIT else str(outcome.value)
            words = printed.read_bytes()[-_WORDS:].decode("utf-8", "replace")
            raise AgentFailed(f"{program[0]} failed ({cause}): {words}".rstrip())
