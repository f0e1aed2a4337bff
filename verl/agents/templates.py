"""Chat templates: rendering, what a template writes after a turn of the policy, and a report on its history.

Knows texts, and no token ids.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from jinja2 import TemplateError

from verl.agents.tool_parser import ToolCall
from verl.data.tokenization import template_error
from verl.utils.py_functional import excerpt

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_CONFIGURED = "Use another template with actor_rollout_ref.model.custom_chat_template"


class TemplateRefusal(ValueError):
    """A chat template cannot render these messages, or does not show what the policy must see."""


class ChatTemplate:
    """Chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        arguments: further arguments of the template (``data.apply_chat_template_kwargs``).
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        # in no text by chance, and nobody can write it who does not know it
        self._mark, self._other_mark = f"m{secrets.token_hex(8)}", f"m{secrets.token_hex(8)}"

    def render(self, messages: Sequence[Message], tools: Tools = (), generate: bool = True) -> str:
        """Return the text of a conversation; with ``generate`` the header of the policy's next turn at its end.

        Raises:
            TemplateRefusal: there is no template, or it refuses the messages.
        """
        return self._render(messages, tools, generate, self._wants_parts)

    def _render(self, messages: Sequence[Message], tools: Tools, generate: bool, in_parts: bool) -> str:
        if not self.tokenizer.chat_template:
            raise TemplateRefusal(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template, and a conversation of several "
                "turns needs one. Use an instruct model, or set actor_rollout_ref.model.custom_chat_template."
            )
        errors: list[Exception] = []
        # arguments of calls are objects to most templates, and JSON texts to some
        for arguments_of in (_as_object, _as_text):
            try:
                return self.tokenizer.apply_chat_template(
                    [_plain(message, arguments_of, in_parts) for message in messages],
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self.arguments,
                )
            except (TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
                errors.append(error)  # whatever the template's own code raises
            if not any(message.get("tool_calls") for message in messages):
                break
        raise TemplateRefusal(template_error([dict(m) for m in messages], self.tokenizer, errors[0])) from errors[0]

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template reads contents as lists of parts only, as those of some vision models do."""
        chat = [{"role": "user", "content": self._mark}]
        for in_parts in (False, True):
            try:
                if self._mark in self._render(chat, (), False, in_parts):
                    return in_parts
            except TemplateRefusal:
                continue
        return False

    def after_turn(
        self, messages: Sequence[Message], calls: Sequence[Mapping[str, Any]], new: Sequence[Message], tools: Tools = ()
    ) -> str:
        """Return what follows the last token of a turn's own text: end of the turn, ``new``, header of the next turn.

        The difference of two renderings in which the turn has a text of ours, so that nothing a template does to
        contents (strip, drop, move) counts.

        Args:
            messages: the conversation before the turn.
            calls: the turn's tool calls, as in a message's ``tool_calls``.
            new: messages that answer the turn.

        Raises:
            TemplateRefusal: the template does not render them.
        """
        # where the prompt came as token ids, the conversation begins with the policy's turn, which templates refuse
        has_prompt = bool(messages) and messages[0].get("role") != "assistant"
        before = [*([] if has_prompt else [{"role": "user", "content": "."}]), *messages]
        results = [message for message in new if message.get("role") == "tool"]
        turns: list[dict[str, Any]] = [{"role": "assistant", "content": self._mark}]
        if results:
            # templates differ: some show no results without calls, some take one call a turn at most
            answered = _with_arguments([_call_of(result, i) for i, result in enumerate(results)], {"x": self._mark})
            with_calls = {"role": "assistant", "content": "", "tool_calls": answered}
            turns = [*(turns if self._shows_lone_results else []), with_calls]
            if calls:
                turns.insert(0, {**with_calls, "tool_calls": _with_arguments(calls, {"x": self._mark})})
        errors = []
        for turn in turns:
            try:
                return self._after(before, turn, new, tools)
            except TemplateRefusal as error:
                errors.append(error)
        raise errors[0]

    def _after(self, before: Sequence[Message], turn: Message, new: Sequence[Message], tools: Tools) -> str:
        whole = self.render([*before, turn, *new], tools)
        rest = self._after_mark(whole)
        if not turn.get("tool_calls"):
            return rest
        # rest begins with the end of the call, which the policy wrote itself
        alone = self.render([*before, turn], tools, generate=False)
        closing, end = self._after_mark(alone), self.end_of_turn
        if whole.startswith(alone):
            return (end if closing.endswith(end) else self._last_special(closing)) + whole[len(alone) :]
        written = closing.removesuffix(end) if end else _common(closing, rest)
        return rest.removeprefix(written)

    @cached_property
    def end_of_turn(self) -> str:
        """Text after the content of the policy's last message, such as ``<|im_end|>`` and a newline."""
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": self._mark}]
        return self._after_mark(self.render(chat, generate=False))

    @lru_cache(maxsize=4)  # noqa: B019 - a template lives as long as its tokenizer
    def before_answer(self, role: str) -> str | None:
        """Text between a turn and the content of the message of this role that answers it; None: not known."""
        call = {"id": "call00000", "type": "function", "function": {"name": "x"}}
        answer = {"role": role, "content": self._other_mark, "name": "x", "tool_call_id": call["id"]}
        try:
            text = self.after_turn([], [call], [answer])
        except TemplateRefusal:
            return None
        head, mark, _ = text.partition(self._other_mark)
        return head if mark else None

    @cached_property
    def _shows_lone_results(self) -> bool:
        """Whether a result is shown after a turn without calls."""
        chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": "."}]
        try:
            return self._mark in self.render([*chat, {"role": "tool", "name": "x", "content": self._mark}])
        except TemplateRefusal:
            return False

    def _after_mark(self, text: str) -> str:
        at = text.rfind(self._mark)
        if at < 0:
            raise TemplateRefusal(
                f"The chat template of {self.tokenizer.name_or_path!r} does not show a message of the policy: "
                f"{excerpt(text, 2000)}. {_CONFIGURED}."
            )
        return text[at + len(self._mark) :]

    def _last_special(self, text: str) -> str:
        found = [text.rfind(token) for token in self.tokenizer.all_special_tokens if token in text]
        return text[max(found) :] if found else ""


def tool_call_message(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as an entry of a message's ``tool_calls``."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}


def _call_of(result: Message, number: int) -> dict[str, Any]:
    """A call that a message of role tool answers."""
    function = {"name": result.get("name") or "tool"}
    return {"id": result.get("tool_call_id") or f"call{number:05d}", "type": "function", "function": function}


def _with_arguments(calls: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{**call, "function": {**call["function"], "arguments": arguments}} for call in calls]


def _as_object(arguments: Any) -> Any:
    """Arguments of a call as a dict: OpenAI's messages have them as JSON text."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments
    return arguments


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _common(one: str, other: str) -> str:
    """Longest common beginning of two texts."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _plain_call(call: Mapping[str, Any], arguments_of: Callable[[Any], Any]) -> Mapping[str, Any]:
    named: Mapping[str, Any] | None = call.get("function")
    if not named:
        return call
    return {**call, "function": {**named, "arguments": arguments_of(named.get("arguments") or {})}}


def _plain(message: Message, arguments_of: Callable[[Any], Any], in_parts: bool) -> dict[str, Any]:
    """A message as templates read it: a dict without nulls."""
    plain = {key: value for key, value in message.items() if value is not None}
    if in_parts and isinstance(plain.get("content"), str):
        plain["content"] = [{"type": "text", "text": plain["content"]}]
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, arguments_of) for call in calls]
    return plain


# -- Report: what the template does to the history of a conversation ------------------------------------------------

BY_DESIGN = {
    "header": "it writes a finished turn otherwise than it begins one",
    "reasoning": "it leaves out the reasoning of earlier turns",
}
_OTHERWISE = {"whitespace": "it changes whitespace", "history": "it rewrites what came before"}


@dataclass(frozen=True)
class Difference:
    """First prompt of a conversation that does not begin with all that came before it."""

    conversation: str
    """``messages``, ``reasoning`` (the turns think first) or ``tools``."""
    turn: int
    """The turn, from 0, that this prompt asks for."""
    kind: str
    """A key of ``BY_DESIGN``, ``whitespace`` or ``history``."""
    stream: str
    """Excerpt of what came before, where they part."""
    template: str
    """Excerpt of the prompt there."""

    def __str__(self) -> str:
        why = {**BY_DESIGN, **_OTHERWISE}[self.kind]
        return (
            f"with {self.conversation}, in the prompt of turn {self.turn} (from 0), {why}: {self.template!r} where the "
            f"conversation had {self.stream!r}"
        )


@dataclass
class TemplateReport:
    """What a chat template does to conversations of several turns."""

    end_of_turn: str = ""
    """Text after a finished turn, up to the next message."""
    differences: dict[str, Difference] = field(default_factory=dict)
    """By conversation; those that are missing are append-only: each prompt begins with all that came before."""
    not_shown: list[str] = field(default_factory=list)
    """Of ``tools``, ``tool calls`` and ``tool results``; looked for only with tools."""
    rendering: str = ""
    """The conversation with tools, or what the template says where it refuses one."""
    other_end: str = ""
    """End-of-sequence token of the tokenizer, where the template does not end a turn with it."""
    has_tools: bool = False
    refused: str = ""
    """What the template says where it renders no conversation at all."""

    @property
    def is_append_only(self) -> bool:
        return not self.differences and not self.refused

    def lines(self) -> list[str]:
        """The report for people."""
        if self.refused:
            return [f"not checked: {self.refused}"]
        shown = "tools, tool calls and tool results are shown" if self.has_tools and not self.not_shown else ""
        if self.not_shown:
            shown = f"{', '.join(self.not_shown)} are not shown"
        history = ["append-only: each prompt begins with all tokens before it"]
        if self.differences:
            history = [f"not append-only: {difference}" for difference in self.differences.values()]
        end = f"a turn ends with {self.end_of_turn!r}"
        if self.other_end:
            end += f" and not with the tokenizer's {self.other_end!r}: generation_config.json must name what ends it"
        return [line for line in (end, shown, *history) if line]

    def refusal(self, mode: str, uses_template_history: bool) -> str | None:
        """Why ``multi_turn.tokenization_sanity_check_mode`` does not permit this template; None: it does.

        Args:
            mode: ``strict``: no difference but by design; ``ignore_strippable``: nor one of whitespace; ``disable``:
                any.
            uses_template_history: rows follow the template's history, so that it may rewrite what it wants.
        """
        key = "actor_rollout_ref.rollout.multi_turn"
        if mode == "disable":
            return None
        if self.not_shown:
            return (
                f"The chat template does not show {', '.join(self.not_shown)}: the policy could not see them. It "
                f"renders a call and its result as {excerpt(self.rendering, 3000)}. {_CONFIGURED}; "
                f"{key}.tokenization_sanity_check_mode=disable runs it all the same."
            )
        permitted = {*BY_DESIGN, *(["whitespace"] if mode == "ignore_strippable" else [])}
        refused = [difference for difference in self.differences.values() if difference.kind not in permitted]
        if uses_template_history or not refused:
            return None
        return (
            f"{key}.tokenization_sanity_check_mode={mode} does not permit this chat template: {refused[0]}. A policy "
            f"trained on the tokens as generated would not meet them later. Set {key}.use_inference_chat_template=true "
            "to train on what the template writes, or another tokenization_sanity_check_mode."
        )


_SCHEMA = {
    "type": "function",
    "function": {
        "name": "lookup_zq",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "What."}}},
    },
}


def example_conversation(kind: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages and tools of the conversation that a report of this kind looks at."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": "first question"}]
    if kind == "tools":
        for number, word in enumerate(("alpha", "beta")):
            function = {"name": "lookup_zq", "arguments": {"key": f"{word}_argument"}}
            name = f"call0000{number}"
            chat.append(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": name, "type": "function", "function": function}],
                }
            )
            chat.append({"role": "tool", "name": "lookup_zq", "tool_call_id": name, "content": f"{word}_result"})
    thought = "<think>\nsome thought {}\n</think>\n\n" if kind == "reasoning" else ""
    for number, word in enumerate(("second", "third", "")):
        chat.append({"role": "assistant", "content": f"{thought.format(number)}answer {number}"})
        if word:
            chat.append({"role": "user", "content": f"{word} question"})
    return chat, [_SCHEMA] if kind == "tools" else []


def examine(template: ChatTemplate, has_tools: bool = False) -> TemplateReport:
    """Return the report on a template.

    Raises:
        TemplateRefusal: it does not render a conversation of user and policy.
    """
    differences: dict[str, Difference] = {}
    report = TemplateReport(template.before_answer("user") or "", differences, has_tools=has_tools)
    last_token = template.tokenizer.eos_token or ""
    report.other_end = last_token if last_token not in report.end_of_turn else ""
    for kind in ("messages", "reasoning"):
        if difference := _first_difference(template, kind):
            differences[kind] = difference
    plain, thinking = differences.get("messages"), differences.get("reasoning")
    if thinking and (plain is None or plain.kind == "header"):
        differences["reasoning"] = replace(thinking, kind="reasoning")
    if has_tools:
        report.rendering, report.not_shown = _what_is_shown(template)
        if not report.not_shown and (difference := _first_difference(template, "tools")):
            differences["tools"] = difference
    return report


def _what_is_shown(template: ChatTemplate) -> tuple[str, list[str]]:
    """A rendering with tools, a call and its result, and which of these are not in it."""
    chat, tools = example_conversation("tools")
    try:
        text = template.render(chat[:3], tools)
    except TemplateRefusal as refusal:
        return str(refusal), ["tools", "tool calls", "tool results"]
    without_schemas = text.replace(template.render(chat[:1], tools, generate=False), "", 1)
    return text, [
        what
        for what, word, where in (
            ("tools", "lookup_zq", template.render(chat[:1], tools)),
            ("tool calls", "alpha_argument", without_schemas),
            ("tool results", "alpha_result", without_schemas),
        )
        if word not in where
    ]


def _first_difference(template: ChatTemplate, kind: str) -> Difference | None:
    chat, tools = example_conversation(kind)
    turns = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    for number, (start, end) in enumerate(pairwise(turns), 1):
        turn, new = chat[start], chat[start + 1 : end]
        before, now = template.render(chat[:start], tools), template.render(chat[:end], tools)
        after = template.after_turn(chat[:start], turn.get("tool_calls", ()), new, tools)
        if _joins(before, after, now) and all(word in now[len(before) :] for word in _words(turn)):
            continue
        stream = before + turn["content"] + after
        at = len(_common(stream, now))
        places = (stream[max(at - 20, 0) : at + 60], now[max(at - 20, 0) : at + 60])
        if _joins(template.render(chat[:start], tools, generate=False), after, now):
            return Difference(kind, number, "header", *places)
        texts = [_THINKING.sub("", text) for text in (before, after, now)]
        if texts != [before, after, now] and _joins(*texts):
            return Difference(kind, number, "reasoning", *places)
        is_whitespace = _joins(*("".join(text.split()) for text in (before, after, now)))
        return Difference(kind, number, "whitespace" if is_whitespace else "history", *places)
    return None


_THINKING = re.compile(r"<think>.*?(</think>|$)\s*", re.DOTALL)


def _joins(before: str, after: str, whole: str) -> bool:
    return len(whole) >= len(before) + len(after) and whole.startswith(before) and whole.endswith(after)


def _words(turn: Message) -> list[str]:
    calls = [call["function"]["arguments"]["key"] for call in turn.get("tool_calls", ())]
    return [*re.sub("</?think>", "", turn["content"]).split(), *calls]
