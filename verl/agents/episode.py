"""Episode loop: the policy's turns and the answers to them, until one side or a limit ends the conversation.

Tools, simulated users and environments are all a `ConversationEnvironment`: the loop, its limits, its failures and its
measurements exist once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.agents.base import AgentLoopBase, AgentLoopOutput, EpisodeStatus
from verl.agents.conversation import ChatRenderer, Conversation
from verl.agents.tool_parser import ToolCall


@dataclass
class AssistantTurn:
    """One turn of the policy."""

    number: int
    """From 0."""
    text: str
    """Without end markers and special tokens."""
    token_ids: Sequence[int]
    finish_reason: str | None
    tool_calls: Sequence[ToolCall] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation so far, this turn's message the last."""


@dataclass
class Reply:
    """An answer to a turn of the policy."""

    messages: Sequence[Mapping[str, Any]] = ()
    """What the policy reads next; nothing: the episode is over."""
    reward: float | None = None
    """Of the turn that it answers."""
    terminated: bool = False
    truncated: bool = False
    status: EpisodeStatus | None = None
    """Why the episode is over, where the answer says more than ``terminated`` and ``truncated``."""
    state_id: Any = None
    """State in which the next turn begins."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Numbers for metrics and dumps; those of the last answer become columns."""
    num_calls: int = 0
    """Tool calls that it answers."""

    @property
    def is_last(self) -> bool:
        return self.terminated or self.truncated or self.status is not None or not self.messages


class ConversationEnvironment(ABC):
    """What answers the policy in one episode. Every method may fail by raising: then the episode fails."""

    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI schemas of the tools that the prompt shows."""

    async def start(self, row: Mapping[str, Any]) -> Reply | None:
        """Begin the episode. Returns the first messages, or None where the row's own prompt is the beginning."""
        return None

    @abstractmethod
    async def reply(self, turn: AssistantTurn) -> Reply:
        """Answer a turn of the policy."""

    async def finish(self) -> Mapping[str, Any]:
        """End the episode, however it ended. Returns further columns; ``reward_score`` becomes the row's reward."""
        return {}

    async def close(self) -> None:  # noqa: B027
        """Give resources back; called once, also after a failure or a cancellation."""


class EpisodeLoop(AgentLoopBase):
    """Agent loop of a `ConversationEnvironment`. A subclass says which, by a row of data."""

    seconds_name = "environment"
    """Name under ``agent_loop/*`` of the seconds that answers took."""

    scores_turns = True
    """Whether answers reward the turns. Then the last turn, and one that a limit of tokens cut, are answered too though
    the policy does not read the answer; tools are not called for nobody."""

    @abstractmethod
    def environment(self, row: Mapping[str, Any]) -> ConversationEnvironment:
        """Return the environment of this row's episode; `ConversationEnvironment.start` may take its time."""

    def limits(self, row: Mapping[str, Any]) -> "EpisodeLimits":
        """Return the limits of this row's episode: those of ``rollout.multi_turn``."""
        options = self.config.actor_rollout_ref.rollout.multi_turn
        return EpisodeLimits(
            options.max_assistant_turns, options.max_user_turns, options.max_tool_calls, options.max_tokens_per_turn
        )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        log = self.server_manager.replies
        environment = log.take_environment() or self.environment(row)
        try:
            episode = Episode(self, environment, self.limits(row), sampling_params, row)
            outputs = await episode.run()
        except BaseException:
            # a sample that a scheduler stopped goes on later, in the same environment
            if self.server_manager.is_stopped:
                log.keep_environment(environment)
            else:
                await environment.close()
            raise
        await environment.close()
        return outputs


@dataclass
class EpisodeLimits:
    """Limits of an episode; None: no limit."""

    assistant_turns: int | None = None
    user_turns: int | None = None
    tool_calls: int | None = None
    tokens_per_turn: int | None = None


class Episode:
    """One conversation of an `EpisodeLoop`.

    Args:
        loop: gives the tokenizer, the rollout servers and the configuration.
        sampling_params: of every turn; ``max_tokens`` is the response window, which all turns share.
        row: columns of the row.
    """

    def __init__(
        self,
        loop: EpisodeLoop,
        environment: ConversationEnvironment,
        limits: EpisodeLimits,
        sampling_params: dict[str, Any],
        row: Mapping[str, Any],
    ):
        self.loop, self.environment, self.limits, self.row = loop, environment, limits, row
        self.sampling_params = sampling_params
        self.turn_rewards: list[float] = []
        self.state_ids: list[Any] = []
        self.user_turns = self.tool_calls = 0
        self.seconds = 0.0
        self.turn_seconds: list[float] = []
        self.info: dict[str, Any] = {}

    async def run(self) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Hold the conversation; one output, or one a turn where the chat template rewrites the history."""
        first = await self._answered(0, lambda: self.environment.start(self.row))
        conversation = self._conversation(first)
        self.state_ids.append(first.state_id if first else None)
        status = None
        while status is None:
            turn = await self._turn(conversation)
            status = await self._answer(conversation, turn)
        columns = dict(await self.environment.finish())
        return self._outputs(conversation, status, columns)

    def _conversation(self, first: Reply | None) -> Conversation:
        renderer = ChatRenderer.of(self.loop.tokenizer, self.loop.processor, self.loop.config)
        length = self.sampling_params["max_tokens"]
        tools = list(self.environment.tools)
        if first is not None:
            return Conversation(renderer, first.messages, tools=tools, response_length=length)
        messages = self.row.get("raw_prompt")
        ids = None if tools or messages is None else self.row["raw_prompt_ids"]
        return Conversation(renderer, messages or (), tools=tools, prompt_ids=ids, response_length=length)

    async def _turn(self, conversation: Conversation) -> AssistantTurn:
        """Generate one turn of the policy and append it."""
        room, number = conversation.room, len(conversation.turns)
        limit = self.limits.tokens_per_turn
        images = (self.row.get("multi_modal_data") or {}).get("image")
        start = time.perf_counter()
        completion = await self.loop.server_manager.generate(
            "episode",
            prompt_ids=conversation.ids,
            sampling_params={**self.sampling_params, "max_tokens": min(room, limit) if limit else room},
            image_data=images,
        )
        self.turn_seconds.append(time.perf_counter() - start)
        turn = conversation.add_generated(completion.token_ids, completion.log_probs, completion.finish_reason)
        self.turn_rewards.append(0.0)
        return AssistantTurn(
            number, turn.text, completion.token_ids, completion.finish_reason, turn.tool_calls, conversation.messages
        )

    async def _answer(self, conversation: Conversation, turn: AssistantTurn) -> EpisodeStatus | None:
        """Have a turn answered, and append what the policy reads next. Returns why the episode is over, or None."""
        is_cut = turn.finish_reason != "stop"
        is_last = self.limits.assistant_turns is not None and turn.number + 1 >= self.limits.assistant_turns
        ended = None
        if is_cut:
            ended = EpisodeStatus.TOKENS if conversation.room <= 0 else EpisodeStatus.TURN_TOKENS
        elif is_last:
            ended = EpisodeStatus.ASSISTANT_TURNS
        if ended is not None and not self.loop.scores_turns:
            # a last turn that asks for no tool is an answer like any other
            return EpisodeStatus.COMPLETED if not is_cut and not turn.tool_calls else ended
        reply = await self._answered(turn.number + 1, lambda: self.environment.reply(turn))
        self.info |= reply.info
        self.tool_calls += reply.num_calls
        if reply.reward is not None:
            self.turn_rewards[-1] += float(reply.reward)
        if reply.is_last:
            return reply.status or (EpisodeStatus.TRUNCATED if reply.truncated else EpisodeStatus.COMPLETED)
        # a cut turn of an environment is an action like any other, as long as there is room for the next
        if ended is not None and ended is not EpisodeStatus.TURN_TOKENS:
            return ended
        if is_last:
            return EpisodeStatus.ASSISTANT_TURNS
        if self.limits.tool_calls is not None and self.tool_calls >= self.limits.tool_calls:
            return EpisodeStatus.TOOL_CALLS
        if any(message.get("role") == "user" for message in reply.messages):
            self.user_turns += 1
            if self.limits.user_turns is not None and self.user_turns > self.limits.user_turns:
                return EpisodeStatus.USER_TURNS
        if not conversation.add_messages(reply.messages):
            return EpisodeStatus.TOKENS
        self.state_ids.append(reply.state_id)
        return None

    async def _answered(self, number: int, ask: Any) -> Reply | None:
        """The environment's answer of this number: the one that is kept, or a new one, which is kept from now on."""
        log = self.loop.server_manager.replies
        if number < len(log.replies):
            return log.replies[number]
        start = time.perf_counter()
        reply = await ask()
        self.seconds += time.perf_counter() - start
        log.replies.append(reply)
        return reply

    def _outputs(
        self, conversation: Conversation, status: EpisodeStatus, columns: dict[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        reward = columns.pop("reward_score", None)
        rows = conversation.rows()
        outputs = []
        for row in rows:
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=row.prompt_ids,
                    response_ids=row.response_ids,
                    response_mask=row.response_mask,
                    response_logprobs=row.response_logprobs,
                    reward_score=None if reward is None else float(reward) if row is rows[-1] else 0.0,
                    turn_rewards=[self.turn_rewards[number] for number in row.turns],
                    turn_spans=row.turn_spans,
                    turn_state_ids=[self.state_ids[number] for number in row.turns],
                    status=status,
                    messages=conversation.messages,
                    num_turns=1 + len(conversation.turns) + self.user_turns,
                    metrics={self.loop.seconds_name: self.seconds},
                    extra_fields={"episode_info": self.info, "turn_seconds": self.turn_seconds, **columns},
                )
            )
        return outputs[0] if len(outputs) == 1 else outputs
