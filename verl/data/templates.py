"""Chat templates: rendering, and what a template writes after a turn of the policy.

Knows texts, and no token ids.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError

from verl.data.tokenization import template_error
from verl.utils.py_functional import excerpt

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

CONFIGURED = "Use another template with actor_rollout_ref.model.custom_chat_template"


class TemplateRefusal(ValueError):
    """A chat template cannot render these messages, or does not show what the policy must see."""


class ChatTemplate:
    """Chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        arguments: further arguments of the template (``data.apply_chat_template_kwargs``).
        option: the option by which the user gives another template.
    """

    def __init__(
        self,
        tokenizer: Any,
        arguments: Mapping[str, Any] | None = None,
        option: str = "actor_rollout_ref.model.custom_chat_template",
    ):
        self.tokenizer, self.option = tokenizer, option
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
                f"turns needs one. Use an instruct model, or set {self.option}."
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
        written = closing.removesuffix(end) if end else common_beginning(closing, rest)
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
                f"{excerpt(text, 2000)}. Use another template with {self.option}."
            )
        return text[at + len(self._mark) :]

    def _last_special(self, text: str) -> str:
        found = [text.rfind(token) for token in self.tokenizer.all_special_tokens if token in text]
        return text[max(found) :] if found else ""


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


def common_beginning(one: str, other: str) -> str:
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
