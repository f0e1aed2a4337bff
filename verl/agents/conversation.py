"""Conversation as tokens: the one place where messages become token ids.

Rules, whose reasons are in docs/token_rules.md:

1. Tokens that the policy generated go to the actor as they were generated. They are never decoded and encoded again.
2. What follows a turn (its end, results of tools, messages of users, the header of the next turn) is the difference of
   two renderings by the chat template, encoded from the end of the turn on, so that no separator is lost.
3. An end-of-turn marker that the policy did not generate is inserted where something follows.
4. ``response_mask`` is 1 exactly on the tokens of rule 1. Log-probabilities elsewhere are 0.
5. One row holds the stream of tokens. With ``multi_turn.use_inference_chat_template`` the policy reads what the
   template renders of all messages instead; where that is not the stream, a new row of the trajectory begins.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from verl.agents.templates import (
    ChatTemplate,
    Message,
    TemplateRefusal,
    TemplateReport,
    Tools,
    examine,
    tool_call_message,
)
from verl.agents.tool_parser import ToolCall, ToolParser, get_tool_parser
from verl.data.tokenization import encode

logger = logging.getLogger(__name__)


class ChatRenderer:
    """Messages to token ids, by the chat template of a tokenizer.

    Args:
        tokenizer: a Hugging Face tokenizer.
        processor: of a vision-language model.
        template_kwargs: further arguments of the template.
        uses_template_history: ``multi_turn.use_inference_chat_template``.
        check: ``multi_turn.tokenization_sanity_check_mode``.
        tool_format: ``multi_turn.format``, the parser of tool calls.
        prompt_length: tokens of a row's prompt; longer ones begin in the response, masked. None: any number.
    """

    def __init__(
        self,
        tokenizer: Any,
        processor: Any = None,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        uses_template_history: bool = False,
        check: str = "strict",
        tool_format: str = "hermes",
        prompt_length: int | None = None,
    ):
        self.tokenizer, self.processor = tokenizer, processor
        self.template = ChatTemplate(tokenizer, template_kwargs)
        self.uses_template_history, self.check = uses_template_history, check
        self.tool_format, self.prompt_length = tool_format, prompt_length
        self._reports: dict[bool, TemplateReport] = {}

    @classmethod
    def of(cls, tokenizer: Any, processor: Any, config: Any) -> "ChatRenderer":
        """Return the renderer of a configuration; one object for equal arguments."""
        rollout = config.actor_rollout_ref.rollout
        options = {
            "template_kwargs": dict(config.data.apply_chat_template_kwargs or {}),
            "uses_template_history": rollout.multi_turn.use_inference_chat_template,
            "check": rollout.multi_turn.tokenization_sanity_check_mode,
            "tool_format": rollout.multi_turn.format,
            "prompt_length": rollout.prompt_length,
        }
        return _renderer(tokenizer, processor, json.dumps(options, sort_keys=True))

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Token ids of a conversation that the policy goes on with."""
        return self.encode(self.template.render(messages, tools))

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, as the data set encodes prompts."""
        return encode([text], self.tokenizer)[0] if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def text_of(self, turn_ids: Sequence[int]) -> str:
        """Text of a turn without special tokens. Marks of reasoning stay: chat templates look for them."""
        special = self.special_tokens
        return self.decode([i for i in turn_ids if i not in special or special[i] in ("<think>", "</think>")])

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Text of each special token, which encodes to it wherever it stands."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        special = {number: token.content for number, token in added.items() if token.special}
        return special | dict(zip(self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens, strict=True))

    def ids_after(self, turn_ids: Sequence[int], text: str, role: str) -> list[int]:
        """Token ids of what follows a turn (`ChatTemplate.after_turn`), less the end marker that the policy generated.

        Args:
            turn_ids: the tokens of the turn.
            role: of the first message that follows.
        """
        marker = self.special_tokens.get(turn_ids[-1]) if turn_ids else None
        if marker is None:
            end = self.template.end_of_turn.strip()
            # a marker of several tokens, at which a stop string ended the turn
            is_written = end and text.startswith(end) and self.decode(turn_ids).endswith(end)
            return self.encode(text[len(end) :] if is_written else text)
        head = self.template.before_answer(role)
        if marker not in (text if head is None else head) or marker not in text:
            return self.encode(text)
        rest = text[text.index(marker) + len(marker) :]
        # encoded with the marker before it: some markers take in the whitespace around them
        ids = self.encode(marker + rest)
        return ids[1:] if ids and ids[0] == turn_ids[-1] else self.encode(rest)

    def read_turn(self, token_ids: Sequence[int], text: str, tools: Tools = ()) -> tuple[str, list[ToolCall]]:
        """Content and tool calls of a turn. Without tools its text is its content, as it is.

        Args:
            text: of the tokens, without special ones.
        """
        if tools:
            return self.tool_parser.parse(token_ids, text, tools)
        # messages of this format stand in channels, with or without tools
        return (self.tool_parser.parse(token_ids, text)[0] if self.tool_format == "gpt-oss" else text), []

    @cached_property
    def tool_parser(self) -> ToolParser:
        """Parser of the format of ``multi_turn.format``."""
        return get_tool_parser(self.tool_format, self.tokenizer)

    def report(self, has_tools: bool = False) -> TemplateReport:
        """What the chat template does to conversations; examined and compared with the check mode once.

        Raises:
            TemplateRefusal: ``multi_turn.tokenization_sanity_check_mode`` does not permit the template.
        """
        if has_tools not in self._reports:
            try:
                found = examine(self.template, has_tools)
            except TemplateRefusal as error:
                if self.check != "disable":
                    raise
                found = TemplateReport(has_tools=has_tools, refused=str(error))
            if refusal := found.refusal(self.check, self.uses_template_history):
                raise TemplateRefusal(refusal)
            self._reports[has_tools] = found
        return self._reports[has_tools]

    def is_stream(self, ids: Sequence[int], text: str) -> bool:
        """Whether a rendering says what these tokens say; however they split it."""
        stream = self.decode(ids)
        if self.check == "ignore_strippable":
            return "".join(stream.split()) == "".join(text.split())
        return stream == text or self.encode(text) == list(ids)


def check_chat_template(tokenizer: Any, processor: Any, config: Any) -> TemplateReport | None:
    """Examine the chat template if the configuration holds conversations of several turns; print what it does once.

    Raises:
        TemplateRefusal: ``multi_turn.tokenization_sanity_check_mode`` does not permit it.
    """
    rollout = config.actor_rollout_ref.rollout
    holds_episodes = rollout.agent.default_agent_loop in _EPISODE_LOOPS or config.env.makes_rows
    if not (rollout.multi_turn.enable or holds_episodes):
        return None
    has_tools = bool(rollout.multi_turn.tool_config_path or rollout.multi_turn.function_tool_path)
    renderer = ChatRenderer.of(tokenizer, processor, config)
    is_new = has_tools not in renderer._reports
    report = renderer.report(has_tools)
    if is_new:
        print(*(f"template {line}" for line in report.lines()), sep="\n", flush=True)
    return report


_EPISODE_LOOPS = ("tool_agent", "interaction_agent", "env_agent")


@lru_cache(maxsize=8)
def _renderer(tokenizer: Any, processor: Any, options: str) -> ChatRenderer:
    return ChatRenderer(tokenizer, processor, **json.loads(options))


@dataclass
class Turn:
    """One turn of the policy in a conversation."""

    text: str
    """Without special tokens."""
    token_ids: list[int]
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass
class ConversationRow:
    """One training row of a conversation: what the policy read, and what it generated there."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] | None = field(default_factory=list)
    """None: the engine gave none."""
    turn_spans: list[tuple[int, int]] = field(default_factory=list)
    """First and last + 1 of the response tokens of each turn."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns, from 0."""

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.response_ids

    def append(self, token_ids: Sequence[int], log_probs: Sequence[float] | None, is_generated: bool) -> None:
        self.response_ids += token_ids
        self.response_mask += [int(is_generated)] * len(token_ids)
        if is_generated and log_probs is None:
            self.response_logprobs = None
        elif self.response_logprobs is not None:
            self.response_logprobs += [0.0] * len(token_ids) if log_probs is None else log_probs


class Conversation:
    """Tokens of one conversation, turn by turn.

    Args:
        renderer: of the policy's tokenizer.
        messages: what the policy reads first. Empty: ``prompt_ids`` says it.
        tools: OpenAI schemas of the tools that the prompt shows.
        prompt_ids: token ids of ``messages``; None: rendered here.
        response_length: tokens of a row's response window, which all its turns and their answers share.

    Raises:
        TemplateRefusal: the chat template cannot render the messages.
        ValueError: the prompt leaves no room for a response.
        NotImplementedError: images that the data set has not encoded.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message] | str,
        tools: Tools = (),
        prompt_ids: Sequence[int] | None = None,
        response_length: int = 1024,
    ):
        self.renderer, self.tools, self.response_length = renderer, list(tools), response_length
        self.messages: list[dict[str, Any]] = [] if isinstance(messages, str) else [dict(item) for item in messages]
        self.turns: list[Turn] = []
        self._has_prompt_messages = bool(self.messages)
        if self.tools:
            renderer.report(has_tools=True)
        if prompt_ids is None:
            refuse_images(self.messages)
            prompt_ids = renderer.prompt_ids(self.messages, self.tools)
        self._rows = [self._new_row(prompt_ids)]
        if self.room < 1:
            raise ValueError(
                f"The prompt of a conversation has {len(prompt_ids)} tokens, which with "
                f"rollout.prompt_length={renderer.prompt_length} and a response window of {response_length} leaves no "
                "room for a response. Shorten what the policy reads first, or raise data.max_prompt_length."
            )

    @property
    def ids(self) -> list[int]:
        """What the policy continues."""
        return self._rows[-1].ids

    @property
    def room(self) -> int:
        """Tokens that fit the response window still."""
        return self.response_length - len(self._rows[-1].response_ids)

    def add_generated(
        self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None, finish_reason: str | None = None
    ) -> Turn:
        """Append a turn of the policy as it was generated.

        Args:
            log_probs: of each token; None: not known.
            finish_reason: not read: whether the turn's end marker is missing shows in its last token.

        Raises:
            ValueError: there is not one log-probability a token.
        """
        token_ids = list(token_ids)
        if log_probs is not None and len(log_probs) != len(token_ids):
            raise ValueError(
                f"Conversation.add_generated: {len(log_probs)} log-probs for {len(token_ids)} tokens; there is one a "
                "token, or none at all."
            )
        row, start = self._rows[-1], len(self._rows[-1].response_ids)
        row.append(token_ids, log_probs, is_generated=True)
        row.turn_spans.append((start, len(row.response_ids)))
        row.turns.append(len(self.turns))
        text = self.renderer.text_of(token_ids)
        content, calls = self.renderer.read_turn(token_ids, text, self.tools)
        for number, call in enumerate(calls):
            # nine letters and digits, which is what templates with a rule for ids ask for
            call.id = call.id or f"call{len(self.turns) % 1000:03d}{number % 100:02d}"
        self.turns.append(Turn(text, token_ids, calls))
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [tool_call_message(call) for call in calls]
        self.messages.append(message)
        return self.turns[-1]

    def add_messages(self, messages: Sequence[Message]) -> bool:
        """Append what answers the last turn. False: with it no token could be generated; nothing is appended.

        Raises:
            NotImplementedError: a message has images.
            TemplateRefusal: the chat template cannot render the messages.
            ValueError: there are no messages, or the template's history is asked for and the prompt came as ids.
        """
        if not messages:
            raise ValueError("Conversation.add_messages: there is no message. A turn is answered by one or more.")
        if self.renderer.uses_template_history and not self._has_prompt_messages:
            raise ValueError(
                "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=true renders whole conversations, "
                "and this one's prompt is known as token ids only. Set data.return_raw_chat=true."
            )
        refuse_images(messages)
        self.renderer.report(bool(self.tools))
        new, row = [dict(message) for message in messages], self._rows[-1]
        *before, last = self.messages
        calls = last.get("tool_calls") or ()
        text = self.renderer.template.after_turn(before, calls, new, self.tools)
        following = self.renderer.ids_after(self.turns[-1].token_ids, text, new[0].get("role", "user"))
        if self.renderer.uses_template_history:
            rewritten = self._rewritten(row.ids + following, [*self.messages, *new])
            if rewritten is not None:
                row, following = self._new_row(rewritten), []
        if len(row.response_ids) + len(following) >= self.response_length:
            return False
        row.append(following, None, is_generated=False)
        if row is not self._rows[-1]:
            self._rows.append(row)
        self.messages += new
        return True

    def rows(self) -> list[ConversationRow]:
        """Return the training rows, each with its turns: one, or more where the template rewrote the history."""
        return [row for row in self._rows if row.turns] or self._rows[:1]

    def _rewritten(self, stream: list[int], messages: Sequence[Message]) -> list[int] | None:
        """The template's history as token ids where it is not the stream; None: it is.

        A history that the template refuses, such as two calls in a turn where it writes one, goes on as the stream.
        """
        try:
            text = self.renderer.template.render(messages, self.tools)
        except TemplateRefusal as refusal:
            logger.warning("The conversation goes on with the tokens as generated: %s", refusal)
            return None
        if self.renderer.is_stream(stream, text):
            return None
        refuse_images(messages)  # of the prompt: the actor reads those where the data set encoded them
        return self.renderer.encode(text)

    def _new_row(self, prompt_ids: Sequence[int]) -> ConversationRow:
        """A row that begins with these tokens: those beyond the prompt window stand in the response, masked."""
        limit = self.renderer.prompt_length
        row = ConversationRow(list(prompt_ids[:limit]))
        row.append(list(prompt_ids[len(row.prompt_ids) :]), None, is_generated=False)
        return row


def refuse_images(messages: Sequence[Message]) -> None:
    """Raise NotImplementedError if a message has an image or a video: only those of the data set are encoded."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, (list, tuple)) else ():
            if part.get("type") != "text":
                raise NotImplementedError(
                    f"A message of role {message.get('role')!r} has a part of type {part.get('type')!r}: only images "
                    "of a row's own prompt are supported, without tools, and where the chat template keeps the history "
                    "as it is. Describe it in text."
                )


__all__ = ["ChatRenderer", "Conversation", "ConversationRow", "TemplateRefusal", "Turn"]
