"""Base class of tools that have a state for each conversation."""

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.py_functional import convert_to_regular_types


class BaseTool:
    """A tool with a state for each conversation: made by `create`, read by `calc_reward`, given back by `release`.

    One object serves all conversations; its methods run in an event loop that all tools share, next to that of the
    agent loops. A method that blocks holds up the other tools, so that they run into ``multi_turn.tool_timeout``.

    Args:
        config: the entry's ``config``.
        tool_schema: the entry's ``tool_schema``; None: that of `get_openai_tool_schema`.
    """

    tool_schema: OpenAIFunctionToolSchema | None = None

    def __init__(self, config: Mapping[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None):
        self.config = convert_to_regular_types(config or {})
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"tool {type(self).__name__}: it has no schema. Give tool_schema in the tool_config_path, or return "
                "one from get_openai_tool_schema."
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """Return the schema; a tool that brings its own overrides this."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        """Begin a conversation.

        Args:
            kwargs: the row's ``tools_kwargs[name]["create_kwargs"]``, and once more, whole, as ``create_kwargs``.

        Returns:
            the id that the other methods get, or a tuple (id, ToolResponse).
        """
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Answer a call.

        Args:
            parameters: its arguments, checked against the schema.
            kwargs: the row's ``execute_kwargs``.

        Returns:
            (text or ToolResponse, reward of the turn or None, dict of metrics).
        """
        return ToolResponse(text=""), None, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the conversation's reward: the entry of this tool's name in ``reward_scores``."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""

    def close(self) -> None:
        """Give back what all conversations share; called at the end of a run."""
