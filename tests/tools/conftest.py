"""Tools of a test: a file of functions, the options that name it, and an event loop."""

import asyncio
import textwrap

import pytest

from verl.config.rollout import MultiTurnConfig
from verl.tools.toolbox import RowToolbox, Toolbox

HEAD = "import os, sys, time, enum, asyncio\nfrom verl.tools import BaseTool, ToolResponse, function_tool\n\n\n"

ROW = {"tools_kwargs": {"look_up": {"execute_kwargs": {"table": {}}}}}
"""What a row gives to a function ``look_up``."""


@pytest.fixture
def make_toolbox(tmp_path):
    """Return a toolbox of a file of functions (and a YAML file), with options of ``multi_turn``."""
    opened = []

    def make(functions="", yaml=None, **options):
        given = {"tool_timeout": 10.0, "max_tool_response_length": 10_000, "tool_num_workers": 2, **options}
        if functions:
            path = tmp_path / f"functions_{len(opened)}.py"
            path.write_text(HEAD + textwrap.dedent(functions))
            given["function_tool_path"] = str(path)
        if yaml:
            path = tmp_path / f"tools_{len(opened)}.yaml"
            path.write_text(textwrap.dedent(yaml))
            given["tool_config_path"] = str(path)
        opened.append(Toolbox(MultiTurnConfig(**given)))
        return opened[-1]

    yield make
    for toolbox in opened:
        toolbox.close()


@pytest.fixture
def call(make_toolbox):
    """Make calls of one conversation, one after the other, and return their results."""

    def make_calls(functions, *calls, row=None, **options):
        toolbox = make_toolbox(functions, **options)

        async def work():
            tools = RowToolbox(toolbox, row or ROW)
            await tools.create()
            return [await tools.call(name, arguments) for name, arguments in calls]

        return asyncio.run(work())

    return make_calls
