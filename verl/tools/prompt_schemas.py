"""Tools that the prompt of a row shows: what data sets render and measure it with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.rollout import AGENT_LOOPS, RolloutConfig
from verl.tools.toolbox import row_tools, toolbox_of

_WITHOUT_TOOLS = frozenset(AGENT_LOOPS) - {"tool_agent"}


@dataclass
class PromptSchemas:
    """Schemas of a row's tools, as a function of the row. Rows of an agent loop that calls no tools have none."""

    schemas: dict[str, dict[str, Any]]
    """OpenAI schemas by the name of the tool."""
    default_loop: str
    """Agent loop of rows without ``agent_name``."""

    def __call__(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raises ValueError for a row that asks for a tool that there is not."""
        if (row.get("agent_name") or self.default_loop) in _WITHOUT_TOOLS:
            return []
        return [self.schemas[name] for name in row_tools(row, list(self.schemas)).names]


def prompt_schemas(rollout: RolloutConfig) -> PromptSchemas | None:
    """Return the schemas of a run's tools, which are loaded; None: none are named, or no agent loop reads them.

    Raises:
        ValueError: the files of the tools are wrong.
    """
    options = rollout.multi_turn
    if rollout.mode != "async" or not (options.tool_config_path or options.function_tool_path):
        return None
    toolbox = toolbox_of(options)
    return PromptSchemas(dict(zip(toolbox.tools, toolbox.schemas(), strict=True)), rollout.agent.default_agent_loop)
