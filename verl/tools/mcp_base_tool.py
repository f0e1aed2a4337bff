"""Tools of MCP servers, through the package ``mcp`` (``pip install verl-trainer[mcp]``), which only this imports."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.calls import ToolThread
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

CONNECT_S = 60.0
"""Seconds in which a server must be connected and name its tools."""

_CLOSED = -32000
"""Code of the package's errors of a connection that is closed."""


class MCPBaseTool(BaseTool):
    """One tool of an MCP server. ``config`` may have ``timeout``, seconds of a call (30)."""

    server: "McpServer"

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.timeout = float(self.config.get("timeout") or 30)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        text, metrics = await self._call_tool(instance_id, parameters)
        return ToolResponse(text=text), None, metrics

    async def _call_tool(self, instance_id: str, parameters: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        result = await self.server.call(self.name, parameters, self.timeout)
        text, metrics = self._parse_tool_result(result.content)
        if result.is_error:
            raise RuntimeError(text or "the server gives no cause")
        return text, metrics

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        """Return the text of an answer's parts, and metrics; a tool of yours may override this.

        Raises:
            NotImplementedError: a part is no text.
        """
        for part in content:
            if not hasattr(part, "text"):
                raise NotImplementedError(f"it answered with a part of type {getattr(part, 'type', type(part))!r}")
        return "\n".join(part.text for part in content), {}

    def close(self) -> None:
        self.server.close()


class McpServer:
    """Connection to an MCP server, opened at the first call, and again after it broke.

    Args:
        name: for messages.
        options: ``{url, auth_token}``, or ``{command, args, env, cwd}`` of a program that talks on its pipes.
        thread: event loop of the connection.
    """

    def __init__(self, name: str, options: Mapping[str, Any], thread: ToolThread):
        if not options.get("url") and not options.get("command"):
            raise ValueError(f"mcpServers.{name}: it has neither url nor command. Give one of them.")
        self.name, self.options, self.thread = name, options, thread
        self._client: asyncio.Future | None = None
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task | None = None

    async def tools(self) -> list[Any]:
        """Return the tools that it offers: name, description and input_schema of each."""
        client = await self._connected()
        tools, cursor = [], None
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if not cursor:
                return tools

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        """Return its answer to a call.

        Raises:
            asyncio.TimeoutError: it did not answer in time.
        """
        client = await self._connected()
        try:
            return await asyncio.wait_for(client.call_tool(name, dict(arguments)), timeout_s)
        except asyncio.TimeoutError:
            raise
        except Exception as error:
            # what a tool raises comes as an answer; an error of the protocol has a code
            if getattr(error, "code", _CLOSED) == _CLOSED and self._stop is not None:
                self._client = None  # the next call connects again
                self._stop.set()
            raise

    async def _connected(self) -> Any:
        loop = asyncio.get_running_loop()
        if self._client is None or self._task is None or self._task.done() or self._client.get_loop() is not loop:
            self._client, self._stop = loop.create_future(), asyncio.Event()
            self._task = loop.create_task(self._serve(self._client, self._stop))
        return await asyncio.wait_for(asyncio.shield(self._client), CONNECT_S)

    async def _serve(self, ready: asyncio.Future, stop: asyncio.Event) -> None:
        """Keep the connection open: what opens it must close it, in the same task."""
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._open(stack))
                ready.set_result(client)
                await stop.wait()
        except Exception as error:
            if ready.done():
                raise
            cause = getattr(error, "exceptions", [error])[0]  # of a group
            ready.set_exception(
                RuntimeError(f"MCP server {self.name!r} cannot be reached: {type(cause).__name__}: {cause}")
            )

    async def _open(self, stack: AsyncExitStack) -> Any:
        from mcp import Client, StdioServerParameters

        options = self.options
        if options.get("command"):
            names = ("command", "args", "env", "cwd")
            given = {name: options[name] for name in names if options.get(name) is not None}
            return Client(StdioServerParameters(**given))
        if not options.get("auth_token"):
            return Client(options["url"])
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {options['auth_token']}"}
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers))
        return Client(streamable_http_client(options["url"], http_client=http))

    def close(self) -> None:
        """Close the connection; a program that was started for it ends."""
        if self._task is not None and not self._task.done():
            self.thread.run_and_wait(self._close(), 10)
        self._task = None

    async def _close(self) -> None:
        assert self._stop is not None and self._task is not None
        self._stop.set()
        await asyncio.wait({self._task}, timeout=8)


def mcp_tools(
    cls: type, config: Mapping[str, Any], options: Mapping[str, Any], where: str, thread: ToolThread
) -> list[BaseTool]:
    """Return the tools of the servers of ``options["mcp_servers_config_path"]``.

    Raises:
        ModuleNotFoundError: the package ``mcp`` is missing.
        ValueError: the file, or a tool that is selected, is missing.
    """
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{where}: config.type=mcp needs the package mcp. Install it: pip install 'verl-trainer[mcp]'."
        ) from error
    path = options.get("mcp_servers_config_path")
    if not path or not Path(path).expanduser().is_file():
        raise ValueError(f"{where}: mcp.mcp_servers_config_path={path!r} is no file. Give a JSON file with mcpServers.")
    servers = json.loads(Path(path).expanduser().read_text()).get("mcpServers") or {}
    selected = options.get("tool_selected_list")
    tools: list[BaseTool] = []
    seen: list[str] = []
    for name, entry in servers.items():
        server = McpServer(name, entry, thread)
        for offered in thread.run_and_wait(server.tools(), CONNECT_S):
            seen.append(offered.name)
            if not selected or offered.name in selected:
                tool = cls(config=config, tool_schema=_schema(offered))
                tool.server = server
                tools.append(tool)
    missing = [name for name in selected or () if name not in seen]
    if missing:
        raise ValueError(
            f"{where}: mcp.tool_selected_list names {missing[0]!r}; the servers of {path} offer "
            f"{', '.join(seen) or 'nothing'}."
        )
    return tools


def _schema(offered: Any) -> OpenAIFunctionToolSchema:
    parameters = dict(offered.input_schema or {"type": "object", "properties": {}})
    function = {"name": offered.name, "description": offered.description or "", "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
