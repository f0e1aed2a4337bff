"""Programs of the policy, run by a sandbox-fusion service."""

from typing import Any

from verl.rewards.scorers.sandbox_fusion import post_program, read_answer
from verl.sandbox.code_runner import MEMORY_MB
from verl.tools.blocking import BlockingTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse


class SandboxFusionTool(BlockingTool):
    """Runs a program and answers with what it printed.

    ``config``: ``sandbox_fusion_url``, which must be set; ``default_timeout`` (30 s) of a program, ``default_language``
    (python), ``memory_limit_mb``; ``num_workers``, ``rate_limit`` (10) at a time, ``enable_global_rate_limit``.
    """

    num_workers = 10

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.sandbox_fusion_url = self.config.get("sandbox_fusion_url")
        if not self.sandbox_fusion_url:
            raise ValueError(
                f"tool {self.name!r}: config.sandbox_fusion_url is not set. Give the address of the service, "
                "http://host:port/run_code; without one, use verl.tools.python_tool.PythonTool."
            )
        self.default_timeout = float(self.config.get("default_timeout") or 30)
        self.default_language = self.config.get("default_language") or "python"
        self.memory_limit_mb = int(self.config.get("memory_limit_mb") or MEMORY_MB)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {"type": "string", "description": "The program. It prints what you want to see."}
        return self.tool_schema or schema("code_interpreter", "Run a program.", ["code"], code=code)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        code = parameters.get("code", "")
        timeout = min(float(parameters.get("timeout") or self.default_timeout), self.default_timeout)
        language = parameters.get("language") or self.default_language
        text = await self.in_thread(self.execute_code, instance_id, str(code), timeout, language)
        return ToolResponse(text=text), None, {}

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """Return what a program printed, or how it failed.

        Raises:
            ServiceError: the service gave no usable answer.
        """
        url = self.sandbox_fusion_url
        answer = post_program(url, code, "", timeout, self.memory_limit_mb, language)
        outcome, output, errors = read_answer(answer, url)
        if outcome == "timeout":
            return f"The program took longer than {timeout:g} seconds. {errors}".strip()
        return f"{output}{errors}" or "The program printed nothing."
