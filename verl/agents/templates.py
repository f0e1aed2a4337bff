"""A report on chat templates: what one does to the history of a conversation.

Rendering is in ``verl/data/templates.py``. Knows texts, and no token ids.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from verl.agents.tool_parser import ToolCall
from verl.data.templates import CONFIGURED, ChatTemplate, Message, TemplateRefusal, Tools, common_beginning
from verl.utils.py_functional import excerpt

__all__ = ["ChatTemplate", "Message", "TemplateRefusal", "TemplateReport", "Tools", "examine", "tool_call_message"]


def tool_call_message(call: ToolCall) -> dict[str, Any]:
    """Return a tool call as an entry of a message's ``tool_calls``."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments or {})}}


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
                f"renders a call and its result as {excerpt(self.rendering, 3000)}. {CONFIGURED}; "
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
        at = len(common_beginning(stream, now))
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
