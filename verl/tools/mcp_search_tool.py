"""Search through an MCP server whose answers are JSON."""

import json
from collections.abc import Sequence
from typing import Any

from verl.tools.mcp_base_tool import MCPBaseTool


class MCPSearchTool(MCPBaseTool):
    """A search of an MCP server: of an answer ``{"query", "results": [{"content", ...}]}`` the contents are shown."""

    def _parse_tool_result(self, content: Sequence[Any]) -> tuple[str, dict[str, Any]]:
        text, metrics = super()._parse_tool_result(content)
        try:
            found = json.loads(text)
            results = found["results"]
            shown = "\n\n".join(str(result["content"]) for result in results)
        except (ValueError, KeyError, TypeError):
            return text, {"query_count": 1, "total_results": 0, **metrics}
        return shown, {"query_count": 1, "total_results": len(results), **metrics}
