"""A conversation with a served model: answers as a stream of text, tools called and answered, the messages kept.

Speaks OpenAI's protocol to a rollout server; knows no engine and no terminal.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp

from verl.tools.toolbox import RowToolbox
from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.server.messages import RolloutServerError


class AnswerRefused(RuntimeError):
    """The server did not answer a request; the message says why."""

    exit_class = ExitCode.WORKER


class Chat:
    """Messages between a user and a model.

    Args:
        address: of the server.
        token: what it wants.
        sampling: fields of the request, such as ``temperature`` and ``max_tokens``.
        toolbox: tools that the model may call; None: it has none.
        system: the first message; None: the chat template's own.
        write: gets the text of answers, piece by piece.
        note: gets what is no text of the model's: calls of tools, and what they answered.
    """

    def __init__(
        self,
        address: str,
        token: str,
        sampling: Mapping[str, Any],
        toolbox: RowToolbox | None = None,
        system: str | None = None,
        write: Callable[[str], None] = lambda text: None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.url, self.token, self.sampling, self.toolbox = f"{address}/v1/chat/completions", token, sampling, toolbox
        self.write, self.note, self.system = write, note, system
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self, system: str | None = None) -> None:
        """Forget the conversation; ``system``: of the next one."""
        self.system = system or self.system
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    async def ask(self, text: str, most_turns: int = 8) -> str:
        """Return the model's answer to a message of the user; tools that it calls are answered on the way.

        A turn that fails or is cancelled is taken back, so that the conversation can go on.

        Raises:
            AnswerRefused: the server refused it: the conversation may be longer than the model's context.
        """
        before = len(self.messages)
        self.messages.append({"role": "user", "content": text})
        try:
            for _ in range(most_turns):
                answer = await self._answer()
                self.messages.append(answer)
                if not answer.get("tool_calls"):
                    return answer["content"] or ""
                for call in answer["tool_calls"]:
                    self.messages.append(await self._called(call))
            raise AnswerRefused(f"the model has called tools in {most_turns} turns without an answer to the user.")
        except BaseException:
            del self.messages[before:]
            raise

    async def _answer(self) -> dict[str, Any]:
        """The model's next message."""
        content, calls = "", {}
        body = {"messages": self.messages, "stream": True, **self.sampling}
        if self.toolbox is not None:
            body["tools"] = self.toolbox.schemas
        async for choice in self._choices(body):
            delta = choice["delta"]
            if piece := delta.get("content"):
                content += piece
                self.write(piece)
            for call in delta.get("tool_calls") or ():
                calls[call["index"]] = {name: value for name, value in call.items() if name != "index"}
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return message

    async def _choices(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The choices of a stream of server-sent events."""
        headers, timeout = {"Authorization": f"Bearer {self.token}"}, aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout, read_bufsize=1 << 22) as session,
            session.post(self.url, json=body) as response,
        ):
            if response.status != 200:
                raise AnswerRefused(_reason(await response.text(), response.status))
            async for line in response.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                found = json.loads(text)
                if "error" in found:
                    raise RolloutServerError(found["error"]["message"])
                for choice in found["choices"]:
                    yield choice

    async def _called(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool; returns the message with its answer."""
        assert self.toolbox is not None, "the server parses calls only where there are tools"
        name, given = call["function"]["name"], call["function"]["arguments"]
        arguments, problem = None, None
        try:
            arguments = json.loads(given)
        except ValueError as error:
            problem = f"its arguments are no JSON: {error}"
        self.note(f"[{name}({given})]")
        result = await self.toolbox.call(name, arguments if isinstance(arguments, dict) else None, problem)
        self.note(f"[{name} -> {result.text}]")
        return {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result.text}


def _reason(body: str, status: int) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}: {body[:200]}"
