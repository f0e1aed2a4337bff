"""Search through a retrieval service: POST ``{queries, topk, return_scores}``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.scorers.http_json import ServiceError, post
from verl.tools.blocking import BlockingTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class SearchTool(BlockingTool):
    """Searches with a list of queries, and answers with passages.

    ``config``: ``retrieval_service_url``, which must be set; ``topk`` (3) passages a query; ``timeout`` (30 s) of a
    request; ``tries`` (3); ``num_workers``, ``rate_limit`` (120) requests at a time, ``enable_global_rate_limit``.
    """

    num_workers = 120

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.url = self.config.get("retrieval_service_url")
        if not self.url:
            raise ValueError(
                f"tool {self.name!r}: config.retrieval_service_url is not set. Give the address of the retrieval "
                "service, http://host:port/retrieve."
            )
        self.topk = int(self.config.get("topk") or 3)
        self.timeout = float(self.config.get("timeout") or 30)
        self.tries = int(self.config.get("tries") or 3)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        queries = {"type": "array", "items": {"type": "string"}, "description": "Complete questions or key words."}
        return self.tool_schema or schema(
            "search", "Search for passages that answer queries.", ["query_list"], query_list=queries
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        queries = parameters.get("query_list")
        queries = [queries] if isinstance(queries, str) else queries
        if not isinstance(queries, list) or not queries or not all(isinstance(one, str) for one in queries):
            raise ValueError("query_list must be a list of queries, at least one")
        found = await self.in_thread(self.search, queries)
        text = "\n---\n".join(map(passages_text, found))
        metrics = {"query_count": len(queries), "total_results": sum(map(len, found)), "status": "success"}
        return ToolResponse(text=json.dumps({"result": text}, ensure_ascii=False)), 0.0, metrics

    def search(self, queries: Sequence[str]) -> list[Sequence[Any]]:
        """Return the passages for each query.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        body = {"queries": list(queries), "topk": self.topk, "return_scores": True}
        answer = post(self.url, body, self.timeout, self.tries)
        found = answer.get("result") if isinstance(answer, Mapping) else None
        if not isinstance(found, list) or len(found) != len(queries):
            raise ServiceError("malformed", f"{self.url} answered without a list 'result' of one entry a query")
        return found


def passages_text(passages: Sequence[Any]) -> str:
    """Return the passages of one query: their first lines are titles."""
    blocks = []
    for number, passage in enumerate(passages, start=1):
        document = passage.get("document", passage) if isinstance(passage, Mapping) else passage
        contents = str(document.get("contents", "") if isinstance(document, Mapping) else document)
        title, _, text = contents.partition("\n")
        blocks.append(f"Doc {number} (Title: {title})\n{text}\n")
    return "\n".join(blocks).strip() or "No search results found."
