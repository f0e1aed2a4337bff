"""All tools of a run: loaded once, chosen by rows, called with checked arguments under a time limit."""

import asyncio
import atexit
import inspect
import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from verl.config.rollout import MultiTurnConfig
from verl.sandbox.supervisor import Limits
from verl.tools.arguments import check_arguments
from verl.tools.base_tool import BaseTool
from verl.tools.calls import (
    CallFailed,
    CallOutcome,
    CallResult,
    ToolThread,
    call_in_thread,
    described,
    text_of,
    truncated,
)
from verl.tools.function_tool import FunctionTool, functions_in
from verl.tools.processes import FunctionProcesses
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import initialize_tools_from_config
from verl.utils.py_functional import nearest_name

PROCESSES = 64
"""Processes that a function may have at a time."""

Tool = BaseTool | FunctionTool


@dataclass
class RowTools:
    """Tools of a row of data: their names, and what the row says to each."""

    names: list[str]
    kwargs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``{name: {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}}``."""

    def of(self, name: str, purpose: str) -> dict[str, Any]:
        return dict((self.kwargs.get(name) or {}).get(purpose) or {})


def row_tools(row: Mapping[str, Any], known: Sequence[str]) -> RowTools:
    """Return the tools that a row chooses among the known ones.

    Reads ``tools_kwargs``, ``tool_selection`` and ``need_tools_kwargs`` of the row, or of its ``extra_info``: the tools
    of ``tool_selection``; without it and with ``need_tools_kwargs`` those of ``tools_kwargs``; else all.

    Raises:
        ValueError: it names a tool that there is not.
    """
    kwargs = {name: value for name, value in _json(_of_row(row, "tools_kwargs") or {}).items() if value is not None}
    selection = _of_row(row, "tool_selection")
    if selection is not None:
        names = [str(name) for name in selection]
        where = "extra_info.tool_selection"
    elif _of_row(row, "need_tools_kwargs") and kwargs:
        names, where = list(kwargs), "tools_kwargs"
    else:
        # a row may have kwargs for tools that this run does not have
        return RowTools(list(known), kwargs)
    for name in names:
        if name not in known:
            raise ValueError(
                f"{where}: the row asks for a tool {name!r}; tools are {', '.join(known) or 'none'}."
                f"{nearest_name(name, known)} Add it to rollout.multi_turn.tool_config_path or function_tool_path."
            )
    return RowTools(names, kwargs)


def _of_row(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    return value if value is not None else (row.get("extra_info") or {}).get(name)


def _json(value: Any) -> dict[str, Any]:
    return json.loads(value) if isinstance(value, str) else dict(value)


class Toolbox:
    """All tools of a run.

    Args:
        options: ``rollout.multi_turn``.

    Raises:
        ValueError: two tools have one name, or an entry is wrong.
    """

    def __init__(self, options: MultiTurnConfig):
        self.options = options
        self.thread = ToolThread()
        self.processes: FunctionProcesses | None = None
        found: list[Tool] = []
        if options.tool_config_path:
            found += initialize_tools_from_config(options.tool_config_path, self.thread)
        if options.function_tool_path:
            found += functions_in(options.function_tool_path)
            if options.tool_num_workers:
                path = str(Path(options.function_tool_path).expanduser().resolve())
                limits = Limits(memory_mb=options.tool_memory_mb, processes=PROCESSES)
                self.processes = FunctionProcesses(path, options.tool_num_workers, limits)
        self.tools: dict[str, Tool] = {}
        for tool in found:
            if tool.name in self.tools:
                raise ValueError(
                    f"two tools of multi_turn.tool_config_path={options.tool_config_path} and function_tool_path="
                    f"{options.function_tool_path} are called {tool.name!r}: the policy could not tell them apart. "
                    "Rename one."
                )
            self.tools[tool.name] = tool

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the OpenAI schemas of these tools, of all by default: what the prompt shows."""
        chosen = self.tools if names is None else names
        return [self.tools[name].tool_schema.model_dump(exclude_unset=True, exclude_none=True) for name in chosen]

    def close(self) -> None:
        """End the processes and the thread."""
        for tool in self.tools.values():
            if isinstance(tool, BaseTool):
                tool.close()
        if self.processes is not None:
            self.processes.close()
        self.thread.close()


_OPEN: dict[tuple, Toolbox] = {}
_LOCK = threading.Lock()


def toolbox_of(options: MultiTurnConfig) -> Toolbox:
    """Return the tools of a run, loaded at the first call."""
    key = (options.tool_config_path, options.function_tool_path, options.tool_num_workers, options.tool_memory_mb)
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = Toolbox(options)
        return _OPEN[key]


@atexit.register
def close_toolboxes() -> None:
    """Close all that `toolbox_of` has returned. Called at the end of a run."""
    with _LOCK:
        while _OPEN:
            _OPEN.popitem()[1].close()


class RowToolbox:
    """Tools of one conversation.

    Args:
        toolbox: of the run.
        row: of the data.
    """

    def __init__(self, toolbox: Toolbox, row: Mapping[str, Any]):
        self.toolbox, self.options = toolbox, toolbox.options
        self.row_tools = row_tools(row, list(toolbox.tools))
        self.tools = {name: toolbox.tools[name] for name in self.row_tools.names}
        self.instances: dict[str, str] = {}
        """Id of each `BaseTool`'s state."""
        for tool in self.tools.values():
            if isinstance(tool, FunctionTool):
                self._check_row_parameters(tool)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return self.toolbox.schemas(list(self.tools))

    def _check_row_parameters(self, tool: FunctionTool) -> None:
        known, needed = tool.row_parameters()
        given = set(self.row_tools.of(tool.name, "execute_kwargs"))
        if given - known or needed - given:
            raise ValueError(
                f"tools_kwargs[{tool.name!r}]['execute_kwargs'] of a row has {sorted(given)}, the keyword-only "
                f"parameters of the function are {sorted(known)}. Give {sorted(needed) or 'none'}, and no "
                "others."
            )

    # -- states of tools ---------------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Create the state of each `BaseTool`."""
        made = await asyncio.gather(*(self._create(tool) for tool in self.base_tools()), return_exceptions=True)
        for error in made:
            if isinstance(error, BaseException):
                await self.release()
                raise error

    async def _create(self, tool: BaseTool) -> None:
        kwargs = self.row_tools.of(tool.name, "create_kwargs")
        names = inspect.signature(tool.create).parameters
        is_open = any(one.kind is one.VAR_KEYWORD for one in names.values())
        # verl's later tools look for them under this name, its earlier ones in the arguments
        whole = {"create_kwargs": kwargs} if is_open or "create_kwargs" in names else {}
        found = await self._run(tool, "create", tool.create(str(uuid4()), **kwargs, **whole))
        self.instances[tool.name] = found[0] if isinstance(found, tuple) else found

    async def rewards(self) -> dict[str, float]:
        """Return the reward of each `BaseTool` for the conversation."""
        rewards = {}
        for tool in self.base_tools():
            kwargs = self.row_tools.of(tool.name, "calc_reward_kwargs")
            work = tool.calc_reward(self.instances[tool.name], **kwargs)
            rewards[tool.name] = float(await self._run(tool, "calc_reward", work) or 0.0)
        return rewards

    async def release(self) -> None:
        """Give all states back."""
        for name, instance in list(self.instances.items()):
            tool = self.tools[name]
            assert isinstance(tool, BaseTool)
            del self.instances[name]
            kwargs = self.row_tools.of(name, "release_kwargs")
            await self._run(tool, "release", tool.release(instance, **kwargs))

    def base_tools(self) -> list[BaseTool]:
        return [tool for tool in self.tools.values() if isinstance(tool, BaseTool)]

    async def _run(self, tool: BaseTool, what: str, work: Any) -> Any:
        try:
            return await self.toolbox.thread.run(work, self.options.tool_timeout)
        except CallFailed as failed:
            raise RuntimeError(f"tool {tool.name!r}, {what}: {failed.cause}") from None
        except Exception as error:
            raise RuntimeError(f"tool {tool.name!r}, {what}: {described(error)}") from error

    # -- calls -------------------------------------------------------------------------------------------------------

    async def call(self, name: str, arguments: Mapping[str, Any] | None, problem: str | None = None) -> CallResult:
        """Call a tool; whatever fails is an answer that says so.

        Args:
            arguments: None: they are no JSON object, as ``problem`` says.
        """
        start, waited = time.perf_counter(), 0.0
        reward: float | None = None
        metrics: dict[str, Any] = {}
        try:
            tool, checked = self._checked(name, arguments, problem)
            called = time.perf_counter()
            if isinstance(tool, BaseTool):
                text, reward, metrics = await self._execute(tool, checked)
            else:
                text, seconds = await self._call_function(tool, checked)
                waited = time.perf_counter() - called - seconds
            outcome = CallOutcome.OK
        except CallFailed as failed:
            outcome, text = failed.outcome, f"Error: {failed.cause}"
        text = truncated(text, self.options.max_tool_response_length, self.options.tool_response_truncate_side)
        shown_name = name if name in self.tools else "unknown"
        return CallResult(shown_name, outcome, text, time.perf_counter() - start - waited, reward, metrics)

    def _checked(
        self, name: str, arguments: Mapping[str, Any] | None, problem: str | None
    ) -> tuple[Tool, dict[str, Any]]:
        if name not in self.tools:
            known = ", ".join(self.tools) or "none"
            raise CallFailed(CallOutcome.UNKNOWN_TOOL, f"there is no tool {name[:100]!r}; tools are: {known}")
        if arguments is None:
            cause = f": {problem}" if problem else ""
            raise CallFailed(CallOutcome.INVALID_JSON, f"the arguments of {name} are no JSON object{cause}")
        tool = self.tools[name]
        parameters = tool.tool_schema.function.parameters
        schema = parameters.model_dump(exclude_unset=True) if parameters else None
        checked, problems = check_arguments(arguments, schema, is_closed=isinstance(tool, FunctionTool))
        if problems:
            raise CallFailed(CallOutcome.INVALID_ARGUMENTS, f"arguments of {name}: {'; '.join(problems)}")
        return tool, checked

    async def _execute(self, tool: BaseTool, arguments: dict[str, Any]) -> tuple[str, float | None, dict[str, Any]]:
        kwargs = self.row_tools.of(tool.name, "execute_kwargs")
        work = tool.execute(self.instances[tool.name], arguments, **kwargs)
        try:
            found = await self.toolbox.thread.run(work, self.options.tool_timeout)
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(CallOutcome.ERROR, described(error)) from error
        response, reward, metrics = (*found, None, None)[:3] if isinstance(found, tuple) else (found, None, None)
        if isinstance(response, ToolResponse):
            if response.image or response.video:
                raise NotImplementedError(
                    f"tool {tool.name!r} answered with images or videos: an update reads only those of the row. Answer "
                    "with text."
                )
            response = response.text
        metrics = dict(metrics) if isinstance(metrics, Mapping) else {}
        return text_of(response), None if reward is None else float(reward), metrics

    async def _call_function(self, tool: FunctionTool, arguments: dict[str, Any]) -> tuple[str, float]:
        """Return the answer, and the seconds it took."""
        arguments |= self.row_tools.of(tool.name, "execute_kwargs")
        processes, timeout = self.toolbox.processes, self.options.tool_timeout
        if processes is not None and not tool.is_async:
            return await processes.call(tool.attribute, arguments, timeout)
        start = time.perf_counter()
        try:
            typed = tool.typed(arguments)
            if tool.is_async:
                found = await self.toolbox.thread.run(tool.function(**typed), timeout)
            else:
                found = await call_in_thread(tool.function, typed, timeout)
        except CallFailed:
            raise
        except Exception as error:
            raise CallFailed(CallOutcome.ERROR, described(error)) from error
        return text_of(found), time.perf_counter() - start
