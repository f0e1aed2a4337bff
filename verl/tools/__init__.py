"""Tools that the policy may call: functions, classes with a state for each conversation, and those of MCP servers."""

from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import function_tool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "function_tool"]
