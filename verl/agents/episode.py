"""Episode loop: the policy's turns and the answers to them, until one side or a limit ends the conversation.

Tools, simulated users and environments are all a `ConversationEnvironment`: the loop, its limits, its failures and its
measurements exist once.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from verl.agents.base import AgentLoopBase, AgentLoopOutput, EpisodeStatus
from verl.agents.tool_parser import ToolCall
from verl.algorithms.advantages.gigpo import state_key

if TYPE_CHECKING:
    from verl.agents.conversation import Conversation


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

    def __post_init__(self):
        # kept answers go into checkpoints, which hold no arrays; equal states have equal names
        if not isinstance(self.state_id, (str, int, type(None))):
            self.state_id = blake2b(repr(state_key(self.state_id)).encode(), digest_size=12).hexdigest()

    @property
    def is_last(self) -> bool:
        """Whether it ends the episode."""
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

    async def resume(self, row: Mapping[str, Any], turns: Sequence[AssistantTurn], replies: Sequence[Reply]) -> None:
        """Bring a new environment to where an earlier one was, of which the answers so far are kept.

        Args:
            turns: of the policy so far.
            replies: ``replies[0]`` began the episode, ``replies[k + 1]`` answered ``turns[k]``. They stay as they are.
        """
        await self.start(row)

    async def finish(self) -> Mapping[str, Any]:
        """End the episode, however it ended. Returns further columns; ``reward_score`` becomes the row's reward."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give resources back; called once, also after a failure or a cancellation."""


@dataclass
class ReplyLog:
    """Answers of an episode's environment so far. A sample that a scheduler stops goes on with them in a later step."""

    replies: list[Reply] = field(default_factory=list)
    """``replies[0]`` began the episode, ``replies[k + 1]`` answered turn k of the policy."""
    environment: ConversationEnvironment | None = None
    """The environment that gave them, while no episode runs."""
    abandoned: list[ConversationEnvironment] = field(default_factory=list)
    """Environments whose episode starts again: to be closed by the next one to run."""

    def __getstate__(self) -> dict[str, Any]:
        return {"replies": self.replies, "environment": None, "abandoned": []}  # environments stay in their process

    def take_environment(self) -> ConversationEnvironment | None:
        """Return the environment that was kept, if it is still there; whoever takes it closes or keeps it."""
        environment, self.environment = self.environment, None
        return environment

    def truncate(self, count: int) -> None:
        """Forget all but the first ``count`` answers, and the environment, which has gone further."""
        if count < len(self.replies):
            del self.replies[count:]
            if (environment := self.take_environment()) is not None:
                self.abandoned.append(environment)

    async def close(self) -> None:
        """Close the environments: the episode does not go on."""
        if (environment := self.take_environment()) is not None:
            self.abandoned.append(environment)
        while self.abandoned:
            await self.abandoned.pop().close()

    def state(self) -> list[dict[str, Any]]:
        """Return JSON values; environments are lost, and `ConversationEnvironment.resume` makes new ones."""
        return json.loads(json.dumps([asdict(reply) for reply in self.replies], default=str))

    @classmethod
    def from_state(cls, state: Sequence[Mapping[str, Any]]) -> ReplyLog:
        replies = [Reply(**{**reply, "status": reply["status"] and EpisodeStatus(reply["status"])}) for reply in state]
        return cls(replies)


class EpisodeLoop(AgentLoopBase):
    """Agent loop of a `ConversationEnvironment`. A subclass says which, by a row of data."""

    ends_in_time = True

    seconds_name = "environment"
    """Name under ``agent_loop/*`` of the seconds that answers took."""

    scores_turns = True
    """Whether answers reward the turns. Then the last turn, and one that a limit of tokens cut, are answered too though
    the policy does not read the answer; tools are not called for nobody."""

    @abstractmethod
    def environment(self, row: Mapping[str, Any]) -> ConversationEnvironment:
        """Return the environment of this row's episode; `ConversationEnvironment.start` may take its time."""

    def limits(self, row: Mapping[str, Any]) -> EpisodeLimits:
        """Return the limits of this row's episode: those of ``rollout.multi_turn``."""
        options = self.config.actor_rollout_ref.rollout.multi_turn
        return EpisodeLimits(
            options.max_assistant_turns, options.max_user_turns, options.max_tool_calls, options.max_tokens_per_turn
        )

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        log = self.server_manager.replies
        while log.abandoned:
            await log.abandoned.pop().close()
        kept = log.take_environment()
        episode = Episode(self, kept, self.limits(row), sampling_params, row)
        try:
            outputs = await episode.run()
        except BaseException:
            if self.server_manager.is_stopped and episode.is_consistent:
                log.environment = episode.environment
            else:
                await episode.environment.close()
            raise
        await episode.environment.close()
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
        environment: one that gave the answers kept so far; None: a new one is made.
        sampling_params: of every turn; ``max_tokens`` is the response window, which all turns share.
        row: columns of the row.
    """

    def __init__(
        self,
        loop: EpisodeLoop,
        environment: ConversationEnvironment | None,
        limits: EpisodeLimits,
        sampling_params: dict[str, Any],
        row: Mapping[str, Any],
    ):
        self.loop, self.limits, self.row = loop, limits, row
        self.log = loop.server_manager.replies
        self.environment = environment or loop.environment(row)
        self.answered = len(self.log.replies) if environment else 0
        """Answers that ``environment`` itself has given."""
        self.is_consistent = True
        """False while an answer is awaited: an environment that is stopped within one cannot be asked again."""
        self.sampling_params = sampling_params
        self.turns: list[AssistantTurn] = []
        self.turn_rewards: list[float] = []
        self.turn_seconds: list[float] = []
        self.state_ids: list[Any] = []
        self.user_turns = self.tool_calls = 0
        self.seconds = 0.0
        self.info: dict[str, Any] = {}
        self.conversation: Conversation | None = None

    async def run(self) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Hold the conversation; one output, or one a turn where the chat template rewrites the history.

        Past ``env.episode_timeout`` the turns that are complete are the trajectory.

        Raises:
            TimeoutError: no turn is complete by then.
        """
        timeout, start = self.loop.config.env.episode_timeout, time.monotonic()
        try:
            status = await asyncio.wait_for(self._converse(), timeout)
        except asyncio.TimeoutError:
            # one that the environment raised, or nothing to train on
            if timeout is None or time.monotonic() - start < timeout or self.conversation is None or not self.turns:
                raise
            status = EpisodeStatus.TIMEOUT
        # stopped within an answer: what the environment would say of the episode now means nothing
        columns = dict(await self.environment.finish()) if self.is_consistent else {}
        return self._outputs(self.conversation, status, columns)

    async def _converse(self) -> EpisodeStatus:
        first = await self._reply(0, lambda: self.environment.start(self.row))
        self.conversation = conversation = self._conversation(first)
        self.state_ids.append(first.state_id)
        status = None
        while status is None:
            turn = await self._turn(conversation)
            status = await self._continue(conversation, turn)
        return status

    def _conversation(self, first: Reply) -> Conversation:
        from verl.agents.conversation import ChatRenderer, Conversation  # with transformers: not where replies are kept

        renderer = ChatRenderer.of(self.loop.tokenizer, self.loop.processor, self.loop.config)
        length, tools = self.sampling_params["max_tokens"], list(self.environment.tools)
        if first.messages:
            return Conversation(renderer, first.messages, tools=tools, response_length=length)
        messages = self.row.get("raw_prompt")
        # the ids of the data are those of the prompt without tools
        ids = None if tools and messages is not None else self.row["raw_prompt_ids"]
        messages = () if messages is None else list(messages)
        return Conversation(renderer, messages, tools=tools, prompt_ids=ids, response_length=length)

    async def _turn(self, conversation: Conversation) -> AssistantTurn:
        """Generate one turn of the policy and append it."""
        room, limit = conversation.room, self.limits.tokens_per_turn
        images = (self.row.get("multi_modal_data") or {}).get("image")
        start = time.perf_counter()
        completion = await self.loop.server_manager.generate(
            "episode",
            prompt_ids=conversation.ids,
            sampling_params={**self.sampling_params, "max_tokens": min(room, limit) if limit else room},
            image_data=images,
        )
        self.turn_seconds.append(time.perf_counter() - start)
        generated = conversation.add_generated(completion.token_ids, completion.log_probs, completion.finish_reason)
        self.turn_rewards.append(0.0)
        turn = AssistantTurn(
            len(self.turns),
            generated.text,
            completion.token_ids,
            completion.finish_reason,
            generated.tool_calls,
            list(conversation.messages),
        )
        self.turns.append(turn)
        return turn

    async def _continue(self, conversation: Conversation, turn: AssistantTurn) -> EpisodeStatus | None:
        """Have a turn answered, and append what the policy reads next. Returns why the episode is over, or None."""
        is_cut = turn.finish_reason != "stop"
        limits, ended = self.limits, None
        if is_cut:
            ended = EpisodeStatus.TOKENS if conversation.room <= 0 else EpisodeStatus.TURN_TOKENS
        elif limits.assistant_turns is not None and turn.number + 1 >= limits.assistant_turns:
            ended = EpisodeStatus.ASSISTANT_TURNS
        if ended is not None and not self.loop.scores_turns:
            # a last turn that calls no tool is an answer like any other
            return EpisodeStatus.COMPLETED if not is_cut and not turn.tool_calls else ended
        reply = await self._reply(turn.number + 1, lambda: self.environment.reply(turn))
        self.info |= reply.info
        self.tool_calls += reply.num_calls
        self.turn_rewards[-1] += reply.reward or 0.0
        if reply.is_last:
            return reply.status or (EpisodeStatus.TRUNCATED if reply.truncated else EpisodeStatus.COMPLETED)
        if ended is EpisodeStatus.TURN_TOKENS:
            # an environment takes a cut turn as an action like any other; it may be the last one all the same
            is_last = limits.assistant_turns is not None and turn.number + 1 >= limits.assistant_turns
            ended = EpisodeStatus.ASSISTANT_TURNS if is_last else None
        if ended is not None:
            return ended
        if limits.tool_calls is not None and self.tool_calls >= limits.tool_calls:
            return EpisodeStatus.TOOL_CALLS
        # as in verl, results of tools are an answer too
        if limits.user_turns is not None and self.user_turns >= limits.user_turns:
            return EpisodeStatus.USER_TURNS
        self.user_turns += 1
        if not conversation.add_messages(reply.messages):
            return EpisodeStatus.TOKENS
        self.state_ids.append(reply.state_id)
        return None

    async def _reply(self, number: int, ask: Callable[[], Awaitable[Reply | None]]) -> Reply:
        """Return the answer of this number: the one that is kept, or a new one, which is kept from now on."""
        kept = self.log.replies
        if number < len(kept):
            return kept[number]
        start = time.perf_counter()
        self.is_consistent = False
        if self.answered > number:
            # an earlier turn was generated again: the environment has seen another one
            await self.environment.close()
            self.environment, self.answered = self.loop.environment(self.row), 0
        if self.answered < number:
            await self.environment.resume(self.row, self.turns[: number - 1], kept[:number])
        reply = await ask() or Reply()
        kept.append(reply)
        self.answered, self.is_consistent = number + 1, True
        self.seconds += time.perf_counter() - start
        return reply

    def _outputs(
        self, conversation: Conversation, status: EpisodeStatus, columns: dict[str, Any]
    ) -> AgentLoopOutput | list[AgentLoopOutput]:
        reward = columns.pop("reward_score", None)
        rows = conversation.rows()
        outputs = [
            AgentLoopOutput(
                prompt_ids=row.prompt_ids,
                response_ids=row.response_ids,
                response_mask=row.response_mask,
                response_logprobs=row.response_logprobs,
                # the episode's reward belongs to its last turn
                reward_score=None if reward is None else float(reward) if row is rows[-1] else 0.0,
                turn_rewards=[self.turn_rewards[number] for number in row.turns],
                turn_spans=row.turn_spans,
                turn_state_ids=[self.state_ids[number] for number in row.turns],
                status=status,
                messages=conversation.messages,
                num_turns=1 + len(self.turns) + self.user_turns,
                metrics={self.loop.seconds_name: self.seconds},
                extra_fields={"episode_info": self.info, "turn_seconds": self.turn_seconds, **columns},
            )
            for row in rows
        ]
        return outputs[0] if len(outputs) == 1 else outputs
