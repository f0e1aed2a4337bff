"""Chat templates: rendering, and what a template writes after a turn of the policy. Knows texts, and no token ids."""

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from verl.data.tokenization import template_error

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]


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
        self._sentinel = f"turn{secrets.token_hex(8)}"
        self._end: str | None = None

    def render(self, messages: Sequence[Message], tools: Tools = (), generate: bool = True) -> str:
        """Return the text of a conversation; with ``generate`` the header of the policy's next turn at its end.

        Raises:
            TemplateRefusal: there is no template, or it refuses the messages.
        """
        if not self.tokenizer.chat_template:
            raise TemplateRefusal(
                f"The tokenizer {self.tokenizer.name_or_path!r} has no chat template, and a conversation of several "
                "turns needs one. Use an instruct model, or set actor_rollout_ref.model.custom_chat_template."
            )
        error: Exception | None = None
        # arguments of calls are objects to most templates, and JSON texts to some
        for arguments_of in (_as_object, json.dumps):
            chat = [_plain(message, arguments_of) for message in messages]
            try:
                return self.tokenizer.apply_chat_template(
                    chat,
                    tools=[dict(tool) for tool in tools] or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self.arguments,
                )
            except (TemplateError, TypeError) as raised:
                error = error or raised
            if not any(message.get("tool_calls") for message in messages):
                break
        assert error is not None
        raise TemplateRefusal(template_error([dict(message) for message in messages], self.tokenizer, error)) from error

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
        """
        before = list(messages) or [{"role": "user", "content": "."}]
        results = [message for message in new if message.get("role") == "tool"]
        turn: dict[str, Any] = {"role": "assistant", "content": self._sentinel}
        if not (results and calls):
            try:
                return self._after_sentinel(self.render([*before, turn, *new], tools))
            except TemplateRefusal:
                # some templates refuse results of no call: the turn gets a call for each
                if not results:
                    raise
                calls = [_call_of(result, number) for number, result in enumerate(results)]
        turn["tool_calls"] = [_with_arguments(call, {"x": self._sentinel}) for call in calls]
        alone, whole = self.render([*before, turn], tools, generate=False), self.render([*before, turn, *new], tools)
        rest = self._after_sentinel(whole)  # begins with the end of the call
        end = self.end_of_turn
        if not whole.startswith(alone):
            at = rest.find(end)
            return rest[max(at, 0) :]
        closing = self._after_sentinel(alone)
        return (end if closing.endswith(end) else self._last_special(closing)) + whole[len(alone) :]

    @property
    def end_of_turn(self) -> str:
        """Text after the content of the policy's last message, such as ``<|im_end|>`` and a newline."""
        if self._end is None:
            chat = [{"role": "user", "content": "."}, {"role": "assistant", "content": self._sentinel}]
            self._end = self._after_sentinel(self.render(chat, generate=False))
        return self._end

    def _after_sentinel(self, text: str) -> str:
        at = text.rfind(self._sentinel)
        if at < 0:
            raise TemplateRefusal(
                f"The chat template of {self.tokenizer.name_or_path!r} does not show a message of the policy that it "
                f"is given: {text!r}. Use another with actor_rollout_ref.model.custom_chat_template."
            )
        return text[at + len(self._sentinel) :]

    def _last_special(self, text: str) -> str:
        found = [text.rfind(token) for token in self.tokenizer.all_special_tokens if token in text]
        return text[max(found) :] if found else ""


def tool_call_message(call: Any, number: int) -> dict[str, Any]:
    """Return a `ToolCall` as an entry of a message's ``tool_calls``."""
    return {
        "id": call.id or f"call{number:05d}",
        "type": "function",
        "function": {"name": call.name, "arguments": dict(call.arguments or {})},
    }


def _call_of(result: Message, number: int) -> dict[str, Any]:
    """A call that a message of role tool answers."""
    function = {"name": result.get("name") or "tool"}
    return {"id": result.get("tool_call_id") or f"call{number:05d}", "type": "function", "function": function}


def _with_arguments(call: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _as_object(arguments: Any) -> Any:
    return arguments


def _plain(message: Message, arguments_of: Any) -> dict[str, Any]:
    """A message as templates read it: a dict without nulls."""
    plain = {key: value for key, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": arguments_of(call["function"]["arguments"])}}
            for call in calls
        ]
    return plain
