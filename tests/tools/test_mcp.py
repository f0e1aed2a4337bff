"""Tools of real MCP servers: a program on its pipes, and one on HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.waiting import wait_for
from verl.tools.toolbox import RowToolbox

pytest.importorskip("mcp")

SERVER = """
import os, sys, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")


@server.tool()
def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)


@server.tool()
async def slow() -> str:
    "Take long."
    import anyio
    await anyio.sleep(100)
    return "done"


@server.tool()
def search(query: str) -> str:
    "Search."
    import json
    return json.dumps({"query": query, "results": [{"content": "one"}, {"content": "two"}]})


@server.tool()
def fail() -> str:
    "Fail."
    raise ValueError("no such thing")


@server.tool()
def leave() -> str:
    "End the server."
    os._exit(1)


if len(sys.argv) > 1:
    server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
else:
    server.run()
"""

TOOLS = """
tools:
  - class_name: verl.tools.mcp_base_tool.MCPBaseTool
    config: {{type: mcp, timeout: 5}}
    mcp:
      mcp_servers_config_path: {servers}
      tool_selected_list: [add, slow, fail, leave]
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {{type: mcp}}
    mcp: {{mcp_servers_config_path: {servers}, tool_selected_list: [search]}}
"""


@pytest.fixture
def toolbox_of(make_toolbox, tmp_path):
    def make(servers, **options):
        path = tmp_path / "servers.json"
        path.write_text(json.dumps({"mcpServers": servers}))
        return make_toolbox(yaml=TOOLS.format(servers=path), **{"tool_timeout": 5.0, **options})

    return make


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "server.py"
    path.write_text(SERVER)
    return {"command": sys.executable, "args": [str(path)]}


def calls(toolbox, *made):
    async def work():
        tools = RowToolbox(toolbox, {})
        await tools.create()
        return [await tools.call(name, arguments) for name, arguments in made]

    return asyncio.run(work())


def test_tools_of_a_program_are_offered_called_and_end_with_the_run(toolbox_of, program):
    before = set(psutil.Process().children(recursive=True))
    toolbox = toolbox_of({"numbers": program}, tool_timeout=3.0)
    assert set(toolbox.tools) == {"add", "slow", "fail", "leave", "search"}
    [schema] = toolbox.schemas(["add"])
    assert schema["function"]["description"] == "Add two numbers."
    assert schema["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    made = ("add", {"a": 1, "b": "2"}), ("add", {"a": 1}), ("fail", {}), ("slow", {}), ("search", {"query": "q"})
    found = calls(toolbox, *made)
    assert [one.outcome for one in found] == ["ok", "invalid_arguments", "error", "timeout", "ok"]
    assert found[0].text == "3" and "Error executing tool fail" in found[2].text and found[4].text == "one\n\ntwo"
    assert found[4].metrics == {"query_count": 1, "total_results": 2}
    toolbox.close()
    time.sleep(0.3)
    assert not [p for p in set(psutil.Process().children(recursive=True)) - before if p.is_running()]


def test_a_server_that_has_ended_is_started_again(toolbox_of, program):
    toolbox = toolbox_of({"numbers": program})
    left, after, again = calls(toolbox, ("leave", {}), ("add", {"a": 1, "b": 1}), ("add", {"a": 1, "b": 1}))
    assert left.outcome == "error" and after.text == again.text == "2", (left, after, again)


def accepts_connections(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_tools_of_an_http_server_are_called(toolbox_of, program):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([program["command"], *program["args"], str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: accepts_connections(port), "the server")
        toolbox = toolbox_of({"numbers": {"url": f"http://127.0.0.1:{port}/mcp", "auth_token": "secret"}})
        assert calls(toolbox, ("add", {"a": 20, "b": 3}))[0].text == "23"
        toolbox.close()
    finally:
        server.kill()
        server.wait()


def test_what_is_wrong_is_named(toolbox_of, make_toolbox, program, tmp_path):
    with pytest.raises(ValueError, match="mcpServers.x: it has neither url nor command"):
        toolbox_of({"x": {}})
    with pytest.raises(ValueError, match="tool_selected_list names 'add'; the servers of .* offer nothing"):
        toolbox_of({})
    with pytest.raises(ValueError, match="is no file. Give a JSON file with mcpServers"):
        make_toolbox(yaml=TOOLS.format(servers=tmp_path / "none.json"))
    with pytest.raises(RuntimeError, match="MCP server 'x' cannot be reached"):
        toolbox_of({"x": {"command": "/nonexistent/program"}})
