"""Built-in formats of tool calls, as chat templates of their families write them."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from verl.agents.tool_parser import DECODER, Schemas, ToolCall, ToolParser
from verl.utils.py_functional import excerpt

# Markers are replaced by noncharacters of Unicode: a marker that is a special token then differs from the same letters
# written as text, and a pattern need not care which of both a tokenizer has.
_FIRST_MARK = 0xFDD0
_NONCHARACTERS = re.compile("[\ufdd0-\ufdef]")
_THINKING_BEGINS, _THINKING_ENDS = "<think>", "</think>"

Span = tuple[int, int, list[ToolCall]]
"""First and last + 1 character of what is no content, and its calls."""


class MarkedToolParser(ToolParser):
    """Parser of a format whose calls begin and end at markers."""

    markers: ClassVar[Sequence[str]] = ()

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        # both of the thinking: a chat template that reads the content looks for them
        markers = (*self.markers, _THINKING_BEGINS, _THINKING_ENDS)
        self._marks = {marker: chr(_FIRST_MARK + index) for index, marker in enumerate(markers)}
        self._special = {
            token: self._marks[marker] for marker in markers if (token := self._special_id(marker)) is not None
        }

    def _special_id(self, marker: str) -> int | None:
        """Return the id of a marker that decoded text does not show."""
        token = self.tokenizer.convert_tokens_to_ids(marker)
        if token is None or self.tokenizer.convert_ids_to_tokens(token) != marker:
            return None
        return None if self.tokenizer.decode([token], skip_special_tokens=True) else token

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        marked = self._marked(token_ids, text)
        spans = list(self.spans(marked, {name: schema for name, schema in map(_named_schema, tools)}))
        thought = self._end_of_thinking(marked, spans)
        content, calls, at = "", [], 0
        for start, end, found in spans:
            if start < thought:
                continue
            content, at = content + marked[at:start].rstrip(), end
            calls += found
        content += marked[at:].rstrip() if calls else marked[at:]
        return self._text(content), calls

    def spans(self, marked: str, schemas: Mapping[str, Any]) -> Iterator[Span]:
        """Yield the calls of a text with marks, in order and without overlap.

        Args:
            schemas: parameter schemas by the name of the tool.
        """
        raise NotImplementedError

    def _marked(self, token_ids: Sequence[int], text: str) -> str:
        if self._special and any(token in self._special for token in token_ids):
            parts: list[str] = []
            run: list[int] = []
            for token in token_ids:
                if token in self._special:
                    parts += [self._decoded(run), self._special[token]]
                    run = []
                else:
                    run.append(token)
            text = "".join([*parts, self._decoded(run)])
        else:
            text = _NONCHARACTERS.sub("\ufffd", text)
        for marker, mark in self._marks.items():
            if mark not in self._special.values():
                text = text.replace(marker, mark)
        return text

    def _decoded(self, token_ids: list[int]) -> str:
        return _NONCHARACTERS.sub("\ufffd", self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _text(self, marked: str) -> str:
        """Return the text with its markers as letters."""
        for marker, mark in self._marks.items():
            marked = marked.replace(mark, marker)
        return marked

    def _end_of_thinking(self, marked: str, spans: Sequence[Span]) -> int:
        """Return the character from which calls count: those that a thinking policy only considers are none."""
        for match in re.finditer(self._marks[_THINKING_ENDS], marked):
            if not any(start < match.start() < end for start, end, _ in spans):
                return match.end()
        return 0

    def _mark(self, marker: str) -> str:
        return self._marks[marker]

    def _json_at(self, marked: str, start: int) -> tuple[Any, int, str | None]:
        """Read the JSON value that begins here. Returns (value, its end, what is wrong with it)."""
        start = _skip_space(marked, start)
        try:
            _, end = DECODER.raw_decode(marked, start)
            value = DECODER.decode(self._text(marked[start:end]))
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return None, start, "its text is no valid Unicode (half of a surrogate pair)"
        except RecursionError:
            return None, start, "its JSON is nested too deeply"
        except ValueError as error:
            return None, start, f"it is no JSON: {error}"
        return value, end, None

    def _broken(self, raw: str, error: str, name: str = "") -> ToolCall:
        return ToolCall(
            name or _name_in(raw), None, error=f"The tool call cannot be read: {error}.", raw=self._text(raw)
        )

    def _from_object(self, value: Any, raw: str) -> ToolCall:
        """Return the call of ``{"name": ..., "arguments": {...}}``."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or not value["name"]:
            return self._broken(raw, 'it is no object with a "name"')
        name = value["name"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments, _, error = self._json_at(arguments, 0)
            if error:
                return self._broken(raw, f"its arguments are a text, and {error}", name)
        if not isinstance(arguments, Mapping):
            return self._broken(raw, f"its arguments are no JSON object but {excerpt(arguments, 60)}", name)
        given = value.get("id")
        return ToolCall(name, dict(arguments), id=given if isinstance(given, str) else "", raw=self._text(raw))


@ToolParser.register("qwen")
@ToolParser.register("hermes")
class HermesToolParser(MarkedToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    markers = ("<tool_call>", "</tool_call>")

    def spans(self, marked: str, schemas: Mapping[str, Any]) -> Iterator[Span]:
        begin, end = map(self._mark, self.markers)
        at = 0
        while (start := marked.find(begin, at)) >= 0:
            value, stop, error = self._json_at(marked, start + 1)
            at, is_closed = _closing(
                marked, stop if error is None else start + 1, begin, end, anywhere=error is not None
            )
            raw = marked[start:at]
            if error is None and not is_closed:
                error = "something follows its JSON object"
            yield start, at, [self._broken(raw, error) if error else self._from_object(value, raw)]


class TaggedToolParser(MarkedToolParser):
    """Parser of a format that writes each argument as text between two tags."""

    expected: ClassVar[str]
    name: re.Pattern
    """Of the tool, its first group."""
    pair: re.Pattern
    """Key and value of an argument."""
    ends: re.Pattern = re.compile("")

    def value(self, text: str) -> str:
        """Return an argument without what the template puts around it."""
        return text

    def spans(self, marked: str, schemas: Mapping[str, Any]) -> Iterator[Span]:
        begin, end = map(self._mark, self.markers[:2])
        at = 0
        while (start := marked.find(begin, at)) >= 0:
            name = self.name.match(marked, start + 1)
            values, stop = {}, name.end() if name else start + 1
            while name and (pair := self.pair.match(marked, stop)):
                values[self._text(pair[1]).strip()], stop = self.value(self._text(pair[2])), pair.end()
            ends = self.ends.match(marked, stop) if name else None
            at, is_closed = _closing(marked, ends.end() if ends else start + 1, begin, end, anywhere=not ends)
            raw = marked[start:at]
            if ends and is_closed:
                yield start, at, [ToolCall(name[1], typed(values, schemas.get(name[1])), raw=self._text(raw))]
            else:
                yield start, at, [self._broken(raw, f"{self.expected} was expected", name[1] if name else "")]


@ToolParser.register("qwen3_coder")
class Qwen3CoderToolParser(TaggedToolParser):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5."""

    markers = ("<tool_call>", "</tool_call>")
    expected = "<function=name>, <parameter=key>value</parameter>, </function>"
    name = re.compile(r"\s*<function=([^>\n]+)>")
    pair = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
    ends = re.compile(r"\s*</function>")

    def value(self, text: str) -> str:
        # the template puts each value on lines of its own
        return text.removeprefix("\n").removesuffix("\n")


@ToolParser.register("glm")
class GlmToolParser(TaggedToolParser):
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: GLM-4.5 and later."""

    markers = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    expected = "name, <arg_key>key</arg_key>, <arg_value>value</arg_value>"

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        key, key_ends, value, value_ends = map(self._mark, self.markers[2:])
        self.name = re.compile("\\s*([^\\s\ufdd0-\ufdef]+)")
        self.pair = re.compile(f"\\s*{key}(.*?){key_ends}\\s*{value}(.*?){value_ends}", re.DOTALL)


@ToolParser.register("llama3_json")
class Llama3JsonToolParser(MarkedToolParser):
    """``{"name": ..., "parameters": {...}}``, several parted by ``;``, or after ``<|python_tag|>``: Llama 3."""

    markers = ("<|python_tag|>",)
    _begins = re.compile(r'^[ \t]*(?=\{\s*"(?:name|type|function)"\s*:)', re.MULTILINE)
    _built_in = re.compile(r"\s*([\w.]+)\.call\((.*)\)\s*$", re.DOTALL)
    _keyword = re.compile(r'\s*(\w+)\s*=\s*("(?:[^"\\]|\\.)*"|[^,"]+)\s*(?:,|$)', re.DOTALL)

    def spans(self, marked: str, schemas: Mapping[str, Any]) -> Iterator[Span]:
        tag = marked.find(self._mark("<|python_tag|>"))
        begins = self._begins.search(marked)
        if tag >= 0:
            yield tag, len(marked), self._calls(marked, tag + 1, schemas)
        elif begins:
            yield begins.start(), len(marked), self._calls(marked, begins.end(), schemas)

    def _calls(self, marked: str, at: int, schemas: Mapping[str, Any]) -> list[ToolCall]:
        if built_in := self._built_in.match(marked, at):
            return [self._built_in_call(built_in, schemas)]
        calls: list[ToolCall] = []
        while at < len(marked):
            value, stop, error = self._json_at(marked, at)
            if error:
                return [*calls, self._broken(marked[at:], error)]
            calls.append(self._from_object(value, marked[at:stop]))
            at = _skip_space(marked, stop)
            if at < len(marked) and marked[at] in ";,":
                at = _skip_space(marked, at + 1)
        return calls or [self._broken(marked, "nothing follows <|python_tag|>")]

    def _built_in_call(self, match: re.Match, schemas: Mapping[str, Any]) -> ToolCall:
        """Return the call of ``name.call(key="value")``, the form of Llama's own tools."""
        values, at, inside = {}, 0, self._text(match[2])
        while at < len(inside):
            pair = self._keyword.match(inside, at)
            if pair is None:
                return self._broken(match[0], 'name.call(key="value", ...) was expected', match[1])
            values[pair[1]], at = pair[2].strip().removeprefix('"').removesuffix('"'), pair.end()
        return ToolCall(match[1], typed(values, schemas.get(match[1])), raw=self._text(match[0]))


@ToolParser.register("mistral")
class MistralToolParser(MarkedToolParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`` or ``[TOOL_CALLS]name[ARGS]{...}``: Mistral."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, tokenizer: Any):
        super().__init__(tokenizer)
        _, call_id, arguments = map(self._mark, self.markers)
        self._name = re.compile(f"\\s*([\\w.\\-/]+)\\s*(?:{call_id}\\s*(\\w+)\\s*)?{arguments}?")

    def spans(self, marked: str, schemas: Mapping[str, Any]) -> Iterator[Span]:
        begin = self._mark("[TOOL_CALLS]")
        at = 0
        while (start := marked.find(begin, at)) >= 0:
            name = self._name.match(marked, start + 1)
            value, at, error = self._json_at(marked, name.end() if name else start + 1)
            if error:
                following = marked.find(begin, start + 1)
                at = following if following >= 0 else len(marked)
            raw = marked[start:at]
            if error:
                yield start, at, [self._broken(raw, error, name[1] if name else "")]
            elif name:
                call = {"name": name[1], "arguments": value, "id": name[2]}
                yield start, at, [self._from_object(call, raw)]
            else:
                yield (
                    start,
                    at,
                    [self._from_object(item, raw) for item in (value if isinstance(value, list) else [value])],
                )


@ToolParser.register("gpt-oss")
class HarmonyToolParser(MarkedToolParser):
    """Messages of gpt-oss (harmony): a call is a message to ``functions.<name>``, ended by ``<|call|>``.

    The content is what the channel ``final`` says. With calls and without it, the thinking: where a turn calls tools,
    the chat template shows its content as thinking.
    """

    markers = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
    _recipient = re.compile(r"\bto=([^\s\ufdd0-\ufdef]+)")

    def parse(self, token_ids: Sequence[int], text: str, tools: Schemas = ()) -> tuple[str, list[ToolCall]]:
        said: dict[str, str] = {}
        calls = []
        for header, body in self._messages(self._marked(token_ids, text)):
            recipient = self._recipient.search(header)
            _, _, channel = header.partition(self._mark("<|channel|>"))
            name = re.match(r"\s*(\w*)", channel)[1]
            if recipient is None:
                said[name] = said.get(name, "") + self._text(body)
                continue
            value, stop, error = self._json_at(body, 0)
            raw, called = self._text(header + body), recipient[1].removeprefix("functions.")
            if error is None and body[stop:].strip():
                error = "something follows its JSON object"
            call = (
                self._broken(raw, error, called)
                if error
                else self._from_object({"name": called, "arguments": value}, raw)
            )
            calls.append(call)
        content = said.get("final", "") + said.get("", "")
        if calls and not content:
            content = said.get("analysis", "") or said.get("commentary", "")
        return content or said.get("commentary", ""), calls

    def _messages(self, marked: str) -> Iterator[tuple[str, str]]:
        """Yield header and body of each message; the first begins behind the prompt's ``<|start|>assistant``."""
        start, message = self._mark("<|start|>"), self._mark("<|message|>")
        ends = "".join(map(self._mark, ("<|end|>", "<|call|>", "<|return|>")))
        for part in re.split(f"[{start}{ends}]", marked):
            header, found, body = part.partition(message)
            if found:
                yield header, body
            elif part.strip():
                # no header at all: what a policy writes that does not know the format
                yield "", part


# -- Values ----------------------------------------------------------------------------------------------------------


def typed(values: Mapping[str, str], parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return arguments that came as text with the types that the tool's schema names.

    What a schema calls a string stays text, "5" too. An argument that no schema names is JSON where it can be read as
    such, and else text. A text that is not of its type stays text: the tool's check of its arguments says so.
    """
    known = (parameters or {}).get("properties") or {}
    return {name: _typed(text, known.get(name)) for name, text in values.items()}


def _typed(text: str, schema: Any) -> Any:
    types = _types(schema)
    try:
        value = DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        value = _PYTHON_NAMES.get(text.strip(), text) if types else text
    if types is None:
        return text if isinstance(value, str) else value
    kind = _JSON_TYPES[type(value)]
    if kind in types or (kind == "integer" and "number" in types):
        return text if kind == "string" else value
    return text


def _types(schema: Any) -> set[str] | None:
    """Return the JSON types that a parameter's schema allows; None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    kinds = schema.get("type")
    found = set(kinds if isinstance(kinds, list) else [kinds] if kinds else [])
    for part in schema.get("anyOf") or schema.get("oneOf") or ():
        found |= _types(part) or set()
    return found or None


_JSON_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip
_PYTHON_NAMES = {"True": True, "False": False, "None": None}


def _named_schema(tool: Mapping[str, Any]) -> tuple[str, Any]:
    function = tool.get("function", tool)
    return function.get("name", ""), function.get("parameters")


def _skip_space(text: str, start: int) -> int:
    return re.compile(r"\s*").match(text, start).end()


def _closing(marked: str, start: int, begin: str, end: str, anywhere: bool) -> tuple[int, bool]:
    """Return where the call that is read up to ``start`` ends, and whether nothing stands before its end.

    A call ends at its end marker, at the next call, or with the text: a stop string may have left its end marker out.

    Args:
        anywhere: the call is broken: its end marker is looked for.
    """
    at = _skip_space(marked, start)
    if not anywhere:
        if at == len(marked) or marked[at] == begin:
            return at, True
        if marked[at] == end:
            return at + 1, True
    found = marked.find(end, at)
    following = marked.find(begin, at)
    if found >= 0 and not 0 <= following < found:
        return found + 1, False
    return (following if following >= 0 else len(marked)), False


def _name_in(raw: str) -> str:
    """Return the name of a call that cannot be read, as far as one can see it: for the tool's metrics."""
    match = re.search(r'"name"\s*:\s*"([^"\\]{1,100})"', raw)
    return match[1] if match else ""
