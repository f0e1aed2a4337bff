"""Tools whose work blocks: requests to a service, and programs. In threads, so many at a time."""

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.rewards.scorers.http_json import slot
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema


class BlockingTool(BaseTool):
    """Base of tools whose work blocks.

    ``config`` may have ``num_workers``, threads at most; ``rate_limit``, calls under way at a time; and
    ``enable_global_rate_limit``, whether all processes of this machine share that limit.
    """

    num_workers = 16

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.rate_limit = int(self.config.get("rate_limit") or self.config.get("num_workers") or self.num_workers)
        workers = min(int(self.config.get("num_workers") or self.num_workers), self.rate_limit)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=f"verl-tool-{self.name}")
        self._is_shared = bool(self.config.get("enable_global_rate_limit", False))

    async def in_thread(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what a function returns, called in a thread."""

        def work() -> Any:
            shared = slot(f"tool {self.name}", self.rate_limit) if self._is_shared else contextlib.nullcontext()
            with shared:
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def schema(name: str, description: str, required: list[str], **properties: dict[str, Any]) -> OpenAIFunctionToolSchema:
    """Return the schema of a built-in tool."""
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
