"""Parsers of tool calls, by the name of ``multi_turn.format``: from the tokens of a turn to its content and its calls.

Knows no tool: a call that no tool answers, or whose arguments a schema refuses, is the business of `verl.tools`.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.utils.import_utils import load_extern_type, split_file_name
from verl.utils.py_functional import excerpt, nearest_name

Schemas = Sequence[Mapping[str, Any]]
"""OpenAI schemas of tools: ``{"type": "function", "function": {"name", "parameters"}}``."""


@dataclass
class ToolCall:
    """One tool call of the policy, as parsed from its tokens."""

    name: str
    arguments: dict[str, Any] | None
    """None: they are no JSON object; ``error`` says why."""
    id: str = ""
    error: str | None = None
    raw: str = ""
    """Text of the call."""


@dataclass
class FunctionCall:
    """One tool call as parsers of verl's interface return it: ``arguments`` is JSON text."""

    name: str
    arguments: str


TOOL_FORMATS: dict[str, type["ToolParser"]] = {}
"""Parsers by name; `ToolParser.register` adds to them."""

FORMAT_KEY = "actor_rollout_ref.rollout.multi_turn.format"


class ToolParser:
    """Parser of one format of tool calls. A subclass overrides `extract_tool_calls` (verl's interface), or `parse`.

    Args:
        tokenizer: the policy's.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    @classmethod
    def register(cls, name: str) -> Callable[[type["ToolParser"]], type["ToolParser"]]:
        """Class decorator: ``multi_turn.format=name`` means this parser."""

        def enter(parser: type["ToolParser"]) -> type["ToolParser"]:
            if parser.parse is ToolParser.parse and parser.extract_tool_calls is ToolParser.extract_tool_calls:
                raise TypeError(
                    f"ToolParser.register({name!r}): {parser.__name__} overrides neither extract_tool_calls nor parse. "
                    "Write one of them."
                )
            TOOL_FORMATS[name] = parser
            return parser

        return enter

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Return the parser of this format, a registered name or ``FILE.py:CLASS``.

        Raises:
            ValueError: no parser has this name; lists those that exist.
            TypeError: the class is no parser.
        """
        if in_file := split_file_name(name):
            found = load_extern_type(*in_file)
            if not (isinstance(found, type) and issubclass(found, ToolParser)):
                raise TypeError(f"{FORMAT_KEY}={name} is no subclass of verl.agents.tool_parser.ToolParser.")
            return found(tokenizer)
        if name not in TOOL_FORMATS:
            known = sorted(TOOL_FORMATS)
            raise ValueError(
                f"{FORMAT_KEY}={name!r} is not a known format of tool calls; known are {', '.join(known)}."
                f"{nearest_name(name, known)} Give the file of yours, FILE.py:CLASS."
            )
        return TOOL_FORMATS[name](tokenizer)

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        """Split a turn into its content and its tool calls.

        Args:
            token_ids: of the turn, with or without its end marker.
            text: the same without special tokens; read where the format's markers are no special tokens.
            tools: schemas, from which formats without types (qwen3_coder, glm) know a number from a text of digits.

        Returns:
            content, calls: a call that cannot be read has ``error``; no text of the policy raises.
        """
        # a parser of the user's may await an executor of the running loop: it gets a loop of its own
        content, calls = _wait_for(self._extract(list(token_ids), tools))
        return content, [_from_json_text(call) for call in calls]

    def _extract(self, token_ids: list[int], tools: Schemas) -> Any:
        takes_tools = "tools" in inspect.signature(self.extract_tool_calls).parameters
        return self.extract_tool_calls(token_ids, *([tools] if takes_tools else []))

    async def extract_tool_calls(self, responses_ids: list[int]) -> tuple[str, list[FunctionCall]]:
        """Return the content of a turn and its calls, as verl's agent loops ask for them."""
        text = self.tokenizer.decode(responses_ids, skip_special_tokens=True)
        content, calls = self.parse(responses_ids, text)
        return content, [FunctionCall(call.name, _arguments_text(call)) for call in calls]


def get_tool_parser(format: str, tokenizer: Any) -> ToolParser:
    """Return the parser of this format. Raises ValueError for an unknown one."""
    return ToolParser.get_tool_parser(format, tokenizer)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)
"""Of strict JSON, which knows no NaN; line breaks within strings are let pass."""


def _arguments_text(call: ToolCall) -> str:
    return call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)


def _from_json_text(call: Any) -> ToolCall:
    """Return the call of a parser of verl's interface."""
    text, arguments, problem = str(call.arguments), None, None
    try:
        arguments = call.arguments if isinstance(call.arguments, Mapping) else DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        problem = f"its arguments are no JSON: {error}"
    if problem is None and not isinstance(arguments, Mapping):
        problem = f"its arguments are no JSON object but {excerpt(arguments, 60)}"
    if problem:
        return ToolCall(call.name, None, error=f"The tool call cannot be read: {problem}.", raw=text)
    return ToolCall(call.name, dict(arguments), raw=text)


def _wait_for(coroutine: Any) -> Any:
    """Run a coroutine in an event loop of its own, in a thread: this thread's loop may be running."""
    outcome: dict[str, Any] = {}

    def work() -> None:
        try:
            outcome["value"] = asyncio.run(coroutine)
        except BaseException as error:  # it is raised in the thread that waits
            outcome["error"] = error

    thread = threading.Thread(target=work, name="verl-tool-parser", daemon=True)
    thread.start()
    thread.join()
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]
