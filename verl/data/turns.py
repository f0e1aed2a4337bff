"""Token ids of a conversation, and which of them the assistant wrote: what supervised fine-tuning learns.

The text is that of the whole conversation as the chat template writes it. A learned turn begins where the template's
generation prompt ends, so that the policy later meets what it has learned, and ends with the token that ends a turn.
A template that does not allow that is refused with the reason. Knows no files and no batches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from verl.data.templates import ChatTemplate, Message, TemplateRefusal, common_beginning
from verl.utils.py_functional import excerpt

Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WEIGHTS = ("loss_mask", "weight")
"""Keys of a message that say whether its turn is learned: 1 or 0."""
_TOLERATED = "data.ignore_input_ids_mismatch=true learns from it as the template writes it"


class MaskRefusal(ValueError):
    """Which tokens of a conversation to learn cannot be said."""


class TurnTokens:
    """Tokenizes conversations and marks the tokens of learned turns.

    Args:
        tokenizer: a Hugging Face tokenizer.
        arguments: further arguments of the template.
        tolerates_mismatch: learn from conversations that are otherwise refused; ``data.ignore_input_ids_mismatch``.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None, tolerates_mismatch: bool = False):
        self.tokenizer, self.tolerates_mismatch = tokenizer, tolerates_mismatch
        self.template = ChatTemplate(tokenizer, arguments, option="model.custom_chat_template")
        template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
        self.marks_itself = bool(_GENERATION.search(template))
        """Whether the template marks the assistant's text with ``{% generation %}``."""

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] = ()) -> tuple[list[int], list[bool]]:
        """Return the token ids of a conversation, and for each whether it is learned.

        Args:
            messages: of any roles; all turns of the assistant are learned, but those with ``weight: 0`` or
                ``loss_mask: 0``.
            tools: schemas that the template shows.

        Raises:
            MaskRefusal: no turn is to be learned, or the template does not show where they are.
            TemplateRefusal: the template does not render the conversation.
        """
        learned, messages = split_weights(messages)
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
        text, spans = (self._marked_spans if self.marks_itself else self._spans)(messages, learned, tools)
        return self._tokens(text, spans)

    # the text -------------------------------------------------------------------------------------------------------

    def _spans(self, messages: Sequence[Message], learned: Sequence[int], tools: Any) -> tuple[str, list[Span]]:
        """The text of the conversation, and where the learned turns stand in it."""
        text = self.template.render(messages, tools, generate=False)
        spans: list[Span] = []
        for turn in learned:
            begin = self._begin(messages, turn, tools, text)
            end = self._end(messages, turn, tools, text, begin)
            if spans and begin < spans[-1][1]:
                raise MaskRefusal(f"the chat template writes turn {turn} (from 0) into the turn before")
            self._check_shown(messages[turn], turn, text[begin:end])
            spans.append((begin, end))
        return text, spans

    def _begin(self, messages: Sequence[Message], turn: int, tools: Any, text: str) -> int:
        """Position after the generation prompt, which the whole conversation must have before this turn, too."""
        if not turn:
            raise MaskRefusal("it begins with a turn of the assistant, which answers nothing")
        prompt = self.template.render(messages[:turn], tools)
        if text.startswith(prompt):
            return len(prompt)
        at = len(common_beginning(prompt, text))
        if self.tolerates_mismatch and at >= len(common_beginning(prompt, self._history(messages, turn, tools))):
            return at
        raise MaskRefusal(
            f"the chat template writes the conversation before turn {turn} (from 0) otherwise than when it asks for "
            f"that turn: {excerpt(text[max(at - 20, 0) : at + 60])} where the policy would meet "
            f"{excerpt(prompt[max(at - 20, 0) : at + 60])}. Give another template with model.custom_chat_template; "
            f"{_TOLERATED}"
        )

    def _history(self, messages: Sequence[Message], turn: int, tools: Any) -> str:
        return self.template.render(messages[:turn], tools, generate=False)

    def _end(self, messages: Sequence[Message], turn: int, tools: Any, text: str, begin: int) -> int:
        """Position after the token that ends a turn; without such a token, where the next message begins."""
        closing = self._closing
        if closing:
            at = text.find(closing, begin)
            if at >= 0:
                if closing in str(messages[turn].get("content") or ""):
                    raise MaskRefusal(f"the text of turn {turn} (from 0) holds {closing!r}, which ends a turn")
                return at + len(closing)
        until = self.template.render(messages[: turn + 1], tools, generate=False)
        if text.startswith(until):
            return len(until)
        raise MaskRefusal(
            f"the chat template ends turn {turn} (from 0) with no special token, and writes it otherwise when more "
            "messages follow: where it ends cannot be said. Give another template with model.custom_chat_template"
        )

    @property
    def _closing(self) -> str:
        """Text from a turn's last word to the special token that ends it; empty where the template has none."""
        end = self.template.end_of_turn
        special = {*self.tokenizer.all_special_tokens, *self.tokenizer.get_added_vocab()}
        found = [end.find(token) + len(token) for token in special if token in end]
        return end[: min(found)] if found else ""

    def _check_shown(self, message: Message, turn: int, span: str) -> None:
        """Refuse a turn of which the template leaves out a part, earlier reasoning for example."""
        shown = _without_spaces(span)
        names = [call["function"].get("name") for call in message.get("tool_calls") or () if call.get("function")]
        for what, part in (
            ("text", _text_of(message.get("content"))),
            ("reasoning", message.get("reasoning_content")),
            *(("tool call", name) for name in names),
        ):
            is_reasoning = what == "reasoning" or "</think>" in str(part)
            if not part or _without_spaces(str(part)) in shown or self.tolerates_mismatch and is_reasoning:
                continue
            raise MaskRefusal(
                f"the chat template does not show the {what} of turn {turn} (from 0), {excerpt(part, 80)}: it writes "
                f"{excerpt(span, 120)}. Split the conversation so that this turn is its last, give it weight: 0, or "
                f"use another template with model.custom_chat_template; {_TOLERATED}"
            )

    def _marked_spans(self, messages: Sequence[Message], learned: Sequence[int], tools: Any) -> tuple[str, list[Span]]:
        """The same for a template that marks the assistant's text itself."""
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **self.template.arguments}
        template = self.tokenizer.get_chat_template(tools=tools or None)
        chats = [[{key: value for key, value in one.items() if value is not None} for one in messages]]
        try:
            texts, marked = render_jinja_template(
                chats, tools or None, chat_template=template, return_assistant_tokens_mask=True, **arguments
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateRefusal(f"the chat template refuses the conversation: {error}") from error
        spans = [(int(begin), int(end)) for begin, end in marked[0]]
        turns = [turn for turn, message in enumerate(messages) if message.get("role") == "assistant"]
        if len(spans) != len(turns):
            raise MaskRefusal(
                f"the chat template marks {len(spans)} texts with {{% generation %}}, and the conversation has "
                f"{len(turns)} turns of the assistant. Give another template with model.custom_chat_template"
            )
        return texts[0], [span for span, turn in zip(spans, turns, strict=True) if turn in learned]

    # the tokens -----------------------------------------------------------------------------------------------------

    def _tokens(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        if not getattr(self.tokenizer, "is_fast", False):
            return self._tokens_of_pieces(text, spans)
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True, verbose=False
        )
        learned, at = [], 0
        for first, last in encoded["offset_mapping"]:
            while at < len(spans) and first >= spans[at][1]:
                at += 1
            is_in = at < len(spans) and last > spans[at][0]
            if is_in and (first < spans[at][0] or last > spans[at][1]) and not self.tolerates_mismatch:
                raise MaskRefusal(
                    f"the tokenizer joins {text[first:last]!r} across the begin or end of a turn, which the policy "
                    f"would meet as separate tokens. Change the text there; {_TOLERATED}"
                )
            learned.append(is_in)
        return encoded["input_ids"], learned

    def _tokens_of_pieces(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[bool]]:
        """The same for a tokenizer that does not say where its tokens stand in the text."""
        cuts = [0, *(place for span in spans for place in span), len(text)]
        ids: list[int] = []
        learned: list[bool] = []
        for number, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False)):
            piece = self._ids(text[first:last]) if last > first else []
            ids += piece
            learned += [number % 2 == 1] * len(piece)
        if ids != self._ids(text) and not self.tolerates_mismatch:
            raise MaskRefusal(f"the tokenizer joins tokens across the begin or end of a turn; {_TOLERATED}")
        return ids, learned

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def split_weights(messages: Sequence[Message]) -> tuple[list[int], list[Message]]:
    """Return the turns to learn, and the messages without what says so.

    Raises:
        MaskRefusal: none is to be learned, or a weight is none.
    """
    learned: list[int] = []
    plain: list[Message] = []
    for number, message in enumerate(messages):
        weights = {key: message[key] for key in _WEIGHTS if message.get(key) is not None}
        wrong = next((key for key, value in weights.items() if value not in (0, 1)), None)
        if wrong:
            raise MaskRefusal(f"message {number} (from 0) has {wrong}={weights[wrong]!r}, which must be 0 or 1")
        is_own = message.get("role") == "assistant"
        if not is_own and any(weights.values()):
            raise MaskRefusal(
                f"message {number} (from 0) is of the role {message.get('role')!r} and has a weight of 1: only turns "
                "of the assistant are learned"
            )
        if is_own and all(weights.values()):
            learned.append(number)
        plain.append({key: value for key, value in message.items() if key not in _WEIGHTS and value is not None})
    if not learned:
        raise MaskRefusal("it has no turn of the assistant to learn")
    return learned, plain


def _text_of(content: Any) -> str:
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content or ""


def _without_spaces(text: str) -> str:
    return "".join(text.split())
