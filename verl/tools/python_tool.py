"""Python programs of the policy, run on this machine under limits."""

import queue
import threading
from dataclasses import asdict
from typing import Any

from verl.sandbox.code_runner import MEMORY_MB, PROCESSES, refuse_uncontained
from verl.sandbox.containment import is_allowed
from verl.sandbox.fork_server import ForkServer
from verl.sandbox.outcomes import Outcome, SandboxError
from verl.sandbox.supervisor import Limits
from verl.tools.blocking import BlockingTool, schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_MARGIN_S = 5.0


class PythonTool(BlockingTool):
    """Runs a Python program and answers with what it printed.

    Each program has a process of its own, contained (`verl.sandbox.containment`) or refused; whatever it starts ends
    with it. Calls share nothing: variables of an earlier one are gone.

    ``config``: ``timeout`` (10 s) of a program, ``memory_limit_mb`` (1024), ``output_kb`` (64) that it may print,
    ``num_workers`` (4) programs at a time.
    """

    num_workers = 4

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self.timeout = float(self.config.get("timeout") or 10)
        self.memory_mb = int(self.config.get("memory_limit_mb") or MEMORY_MB)
        self.output_kb = int(self.config.get("output_kb") or 64)
        self._idle: queue.SimpleQueue[ForkServer] = queue.SimpleQueue()
        self._all: list[ForkServer] = []
        self._lock = threading.Lock()

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {"type": "string", "description": "The program. It prints what you want to see."}
        return self.tool_schema or schema(
            "python", "Run a Python program and read what it prints.", ["code"], code=code
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        found = await self.in_thread(self.run, str(parameters.get("code", "")))
        return ToolResponse(text=self._text(found)), None, {"outcome": found["outcome"]}

    def run(self, code: str) -> dict[str, Any]:
        """Return ``outcome``, ``output`` and ``detail`` of a program, as ``program_runs.run`` does."""
        limits = Limits(
            wall_s=self.timeout,
            cpu_s=self.timeout,
            memory_mb=self.memory_mb,
            output_mb=64,
            processes=PROCESSES,
            network=False,
        )
        server = self._take()
        try:
            call_s = self.timeout + _MARGIN_S
            task, is_free = [{"stdin": ""}], is_allowed()
            found = server(code, task, asdict(limits), self.output_kb, self.timeout, is_free, timeout_s=call_s)
            refuse_uncontained(found)
            return found[0]
        except SandboxError as error:
            if error.failure.kind is Outcome.RAISED:  # here, not in the program
                raise
            kind = Outcome.TIMEOUT if error.failure.kind is Outcome.TIMEOUT else Outcome.CRASH
            return {"outcome": kind.value, "output": "", "detail": error.failure.cause}
        finally:
            self._idle.put(server)

    def _take(self) -> ForkServer:
        """Return a fork server that runs no program: each runs one at a time."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            # looser than the limits of the program, which end it and say which
            server = ForkServer("verl.sandbox.program_runs:run", self.timeout + _MARGIN_S, memory_mb=8 * 1024)
            with self._lock:
                self._all.append(server)
            return server

    def _text(self, found: dict[str, Any]) -> str:
        outcome, output, detail = Outcome(found["outcome"]), found["output"], found["detail"].strip()
        causes = {
            Outcome.TIMEOUT: f"Error: the program took longer than {self.timeout:g} seconds.",
            Outcome.MEMORY: f"Error: the program held more than {self.memory_mb} MiB.",
            Outcome.OUTPUT: f"Error: the program printed more than {self.output_kb} KiB.",
            Outcome.PROCESSES: f"Error: the program had more than {PROCESSES} processes.",
        }
        if outcome is Outcome.DONE:
            return output or detail or "The program printed nothing. Use print."
        return "\n".join(filter(None, [output, causes.get(outcome) or detail or "Error: the program crashed."]))

    def close(self) -> None:
        super().close()
        with self._lock:
            while self._all:
                self._all.pop().close()
