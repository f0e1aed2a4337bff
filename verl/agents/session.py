"""Session of an agent written outside: its chat completions, recorded as the rows of one trajectory.

Knows no HTTP: `verl.agents.gateway` brings the requests.
"""

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from verl.agents.base import AgentLoopOutput, EpisodeStatus
from verl.agents.conversation import ChatRenderer, Conversation, ConversationRow, TemplateRefusal, Turn
from verl.agents.episode import EpisodeLimits
from verl.workers.rollout.base import Completion
from verl.workers.rollout.server.messages import refuse_unknown
from verl.workers.rollout.server.openai_format import (
    ParsedRequest,
    named_calls,
    new_id,
    plain_messages,
    tool_calls_json,
)

logger = logging.getLogger(__name__)

REWARD_FIELDS = ("reward", "turn", "info", "final")

_told: set[str] = set()
"""Fields of requests that were warned of."""


class SessionError(Exception):
    """A request that a session refuses: HTTP status, message, and a code for the agent."""

    def __init__(self, status: int, message: str, code: str):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Answer:
    """Answer to one chat completion."""

    id: str
    content: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    prompt_ids: list[int]
    completion: Completion


@dataclass
class Strand:
    """One conversation of a session: every request whose messages continue the recorded ones is a turn of it."""

    conversation: Conversation
    messages: list[dict[str, Any]]
    """As the agent sent and read them."""
    tools: Sequence[Mapping[str, Any]]
    calls: list[int] = field(default_factory=list)
    """Number of the session's call of each turn."""
    is_busy: bool = False

    @property
    def awaits_turn(self) -> bool:
        """Whether messages were appended that the policy has not answered: the agent gave up waiting."""
        return len(self.messages) == 0 or "generated" not in self.messages[-1]

    def new_messages(self, request: ParsedRequest) -> list[dict[str, Any]] | None:
        """Return what the request adds to the recorded messages; None: it does not continue them."""
        count = len(self.messages)
        if self.is_busy or len(request.messages) < count or list(request.tools) != list(self.tools):
            return None
        if not all(map(is_same_message, self.messages, request.messages)):
            return None
        added = [dict(message) for message in request.messages[count:]]
        # a turn is answered by others, and an unanswered message by the policy
        is_next = not added if self.awaits_turn else bool(added)
        return added if is_next and all(message["role"] != "assistant" for message in added) else None


def is_same_message(recorded: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """Whether an agent sent back a message as it was recorded.

    Of a turn of the policy its text and calls count; whitespace around the text, and how arguments are written as JSON,
    do not.
    """
    if "generated" not in recorded:
        return dict(recorded) == dict(sent)
    if sent["role"] != "assistant" or sent["content"].strip() != recorded["content"].strip():
        return False
    ours, theirs = (
        [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        for message in (recorded, sent)
    )
    return ours == theirs


class Session:
    """One episode of an agent outside.

    Args:
        servers: `AsyncLLMServerManager` of the row.
        renderer: of the policy's tokenizer.
        sampling: of the run, a dict of the fields of SamplingParams; ``max_tokens`` is the response window.
        limits: of the episode.
        row: columns of the row; its ``raw_prompt`` has the tokens ``raw_prompt_ids``.
        in_turn: answer one call at a time, so that the same agent makes the same calls when it runs again.
    """

    def __init__(
        self,
        servers: Any,
        renderer: ChatRenderer,
        sampling: Mapping[str, Any],
        limits: EpisodeLimits,
        row: Mapping[str, Any],
        in_turn: bool = False,
    ):
        self.servers, self.renderer, self.limits, self.row = servers, renderer, limits, row
        self.sampling = dict(sampling)
        self.response_length: int = sampling["max_tokens"]
        self.strands: list[Strand] = []
        self.calls = self.user_turns = self.tool_results = 0
        self.turn_of_answer: dict[str, int] = {}
        self.turn_seconds: dict[int, float] = {}
        self.reward: float | None = None
        self.turn_rewards: dict[int, float] = {}
        self.info: dict[str, float] = {}
        self.status: EpisodeStatus | None = None
        """Limit that the last call met."""
        self.failure: BaseException | None = None
        """What ended the session from our side: a failed rollout server, or a scheduler that stopped the sample."""
        self.ended = asyncio.Event()
        self._running: set[asyncio.Future] = set()
        self._order: Any = asyncio.Lock() if in_turn else nullcontext()

    # -- chat completions ----------------------------------------------------------------------------------------------

    async def chat(self, request: ParsedRequest) -> Answer:
        """Generate the next turn of the conversation that the request's messages continue, or of a new one.

        Raises:
            SessionError: the session has ended, or a limit is reached.
            ValueError: the request cannot be honoured.
        """
        if request.n != 1:
            raise ValueError(f"n={request.n} is not supported in a session. Send the request {request.n} times.")
        if request.seed is not None:
            tell_once(
                "seed", f"{request.seed}; it is not read: seeds come from the run's, so that rows of a group differ."
            )
        async with self._order:
            self._check_open()
            self._check_calls()
            strand = self._strand_for(request)
            strand.is_busy = True
            try:
                return await self._turn(strand, request)
            finally:
                strand.is_busy = False

    async def _turn(self, strand: Strand, request: ParsedRequest) -> Answer:
        conversation, number = strand.conversation, self.calls
        self.calls += 1
        prompt, start = conversation.ids, time.perf_counter()
        completion = await self._generate(prompt, self._sampling_of(request, conversation.room))
        self.turn_seconds[number] = time.perf_counter() - start
        log_probs = completion.log_probs if self.sampling.get("want_log_probs") else None
        turn = conversation.add_generated(completion.token_ids, log_probs, completion.finish_reason)
        strand.calls.append(number)
        content, calls_json = self._calls_of(conversation, turn, number, request)
        ends = [at for text in request.sampling.get("stop", ()) if (at := content.find(text)) >= 0]
        content = content[: min(ends)] if ends else content
        (wire,) = plain_messages([{"role": "assistant", "content": content, "tool_calls": calls_json}])
        strand.messages.append({**wire, "generated": True})
        is_cut = completion.finish_reason == "length"
        self.status = (EpisodeStatus.TOKENS if conversation.room <= 0 else None) if is_cut else None
        answer_id = new_id("chatcmpl")
        self.turn_of_answer[answer_id] = number
        reason = "tool_calls" if calls_json else completion.finish_reason
        return Answer(answer_id, content, calls_json, reason, prompt, completion)

    @staticmethod
    def _calls_of(
        conversation: Conversation, turn: Turn, number: int, request: ParsedRequest
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return text and tool calls of a turn as the agent reads them; the recorded message says the same."""
        recorded = conversation.messages[-1]
        content, entries = turn.text, recorded.pop("tool_calls", ())
        calls: list[Any] = []
        if request.reads_tool_calls:
            content, calls = named_calls(recorded["content"], turn.tool_calls)
            entries = [entry for entry in entries if entry["function"]["name"]]
        calls_json = tool_calls_json(calls)
        for place, call in enumerate(calls_json):
            # nine letters and digits, as Mistral's templates want them
            call["id"] = entries[place]["id"] = f"c{number:05d}{place:03d}"
        recorded["content"] = content
        if calls_json:
            recorded["tool_calls"] = entries
        return content, calls_json

    def _strand_for(self, request: ParsedRequest) -> Strand:
        """Return the conversation that a request continues, with its new messages, or a new one.

        Raises:
            SessionError: it does not fit the window of a row.
        """
        found = [(strand, added) for strand in self.strands if (added := strand.new_messages(request)) is not None]
        if not found:
            return self._new_strand(request)
        strand, added = max(found, key=lambda pair: len(pair[0].messages))
        if added:
            self._check_answers(added)
            if not strand.conversation.add_messages(added):
                raise self._limit_reached(EpisodeStatus.TOKENS, "the conversation with these messages fills the window")
            strand.messages += added
        return strand

    def _new_strand(self, request: ParsedRequest) -> Strand:
        messages = [dict(message) for message in request.messages]
        own = self.row.get("raw_prompt")
        # the data set's ids, where these are its messages: the prompt of mode=sync
        is_own = own is not None and not request.tools and messages == plain_messages(list(own))
        ids = list(self.row["raw_prompt_ids"]) if is_own else None
        prompt_ids = self.renderer.prompt_ids(messages, request.tools) if ids is None else ids
        if request.tools and not self.strands and prompt_ids == self.renderer.prompt_ids(messages):
            raise TemplateRefusal(
                "tools: the model's chat template does not show them, so the model could not know of them. Set "
                "actor_rollout_ref.model.custom_chat_template to one that does, or describe them in a message."
            )
        limit = self.renderer.prompt_length
        if limit is not None and len(prompt_ids) >= limit + self.response_length:
            raise self._limit_reached(
                EpisodeStatus.TOKENS, f"the messages have {len(prompt_ids)} tokens, which fill the window"
            )
        strand = Strand(
            Conversation(self.renderer, messages, request.tools, prompt_ids, self.response_length),
            messages,
            request.tools,
        )
        self.strands.append(strand)
        return strand

    def _sampling_of(self, request: ParsedRequest, room: int) -> dict[str, Any]:
        """The run's sampling with what the request gives; a run trains on what it samples itself, and says if not."""
        given, own = dict(request.sampling), self.sampling
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos"):
            if name in given and given[name] != own.get(name):
                tell_once(
                    name,
                    f"{given[name]}, where the run samples with {own.get(name)}: tokens are sampled so, and the "
                    "update takes them for the run's own. Leave it out of the agent's requests.",
                )
        limits = (given.pop("max_tokens", None), room, self.limits.tokens_per_turn)
        return {
            **own,
            **given,
            "max_tokens": min(limit for limit in limits if limit is not None),
            "stop": (*own.get("stop", ()), *given.get("stop", ())),
            "stop_token_ids": (*own.get("stop_token_ids", ()), *given.get("stop_token_ids", ())),
            "extra": {**own.get("extra", {}), **given.get("extra", {})},
            "want_log_probs": bool(own.get("want_log_probs")) or request.logprobs,
        }

    async def _generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        task = asyncio.ensure_future(self.servers.generate("episode", prompt_ids=prompt_ids, sampling_params=sampling))
        self._running.add(task)
        try:
            completion = await task
        except ValueError:  # the engine refuses this request
            raise
        except BaseException as error:
            if self.ended.is_set():
                raise self.ended_error() from error
            if not isinstance(error, asyncio.CancelledError):
                self.failure = error
                self.end()
                raise self.ended_error() from error
            raise
        finally:
            self._running.discard(task)
        # ended while the engine's answer was on its way
        self._check_open()
        return completion

    # -- limits --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.ended.is_set():
            raise self.ended_error()

    @staticmethod
    def ended_error() -> SessionError:
        """Return the refusal of whatever comes after the end."""
        return SessionError(410, "The episode of this session has ended.", "session_ended")

    def _check_calls(self) -> None:
        limit = self.limits.assistant_turns
        if limit is not None and self.calls >= limit:
            raise self._limit_reached(EpisodeStatus.ASSISTANT_TURNS, f"max_assistant_turns={limit} are used up")

    def _check_answers(self, added: Sequence[Mapping[str, Any]]) -> None:
        self.tool_results += sum(message["role"] == "tool" for message in added)
        self.user_turns += any(message["role"] == "user" for message in added)
        limit = self.limits.tool_calls
        if limit is not None and self.tool_results > limit:
            raise self._limit_reached(EpisodeStatus.TOOL_CALLS, f"max_tool_calls={limit} are used up")
        limit = self.limits.user_turns
        if limit is not None and self.user_turns > limit:
            raise self._limit_reached(EpisodeStatus.USER_TURNS, f"max_user_turns={limit} are used up")

    def _limit_reached(self, status: EpisodeStatus, cause: str) -> SessionError:
        self.status = status
        code = "context_length_exceeded" if status is EpisodeStatus.TOKENS else str(status)
        return SessionError(400, f"The episode is at its limit: {cause}. End it.", code)

    # -- rewards and end -----------------------------------------------------------------------------------------------

    def take_reward(self, body: Any) -> None:
        """Record a posted reward: of the episode, or of the ``turn`` that its number or its answer's id names.

        Raises:
            SessionError: the session has ended.
            ValueError: names the field that is wrong.
        """
        self._check_open()
        if not isinstance(body, Mapping):
            raise ValueError('The body must be an object such as {"reward": 1.0}.')
        refuse_unknown(body, REWARD_FIELDS, "The body")
        reward = None if body.get("reward") is None else number_of(body["reward"], "reward")
        info = {name: number_of(value, f"info.{name}") for name, value in (body.get("info") or {}).items()}
        turn = body.get("turn")
        if turn is not None:
            turn = self.turn_of_answer.get(turn, turn)
            if type(turn) is not int or turn not in self.turn_of_answer.values() or reward is None:
                raise ValueError(
                    f"turn={body['turn']!r} must be the number (from 0) or the id of an answer of this session, and "
                    f"come with a reward; it has {len(self.turn_of_answer)} answers."
                )
            self.turn_rewards[turn] = reward
        elif reward is not None:
            self.reward = reward
        self.info |= info
        if body.get("final"):
            self.end()

    def take_result(self, result: Any) -> None:
        """Record what the agent's function returned: None, the reward, or a mapping with ``reward`` and numbers.

        Raises:
            ValueError: it is none of these, or a reward was posted too.
        """
        if result is None:
            return
        fields = dict(result) if isinstance(result, Mapping) else {"reward": result}
        reward, turns = fields.pop("reward", None), fields.pop("turn_rewards", None)
        if reward is not None:
            if self.reward is not None:
                raise ValueError(
                    f"The agent returned the reward {reward!r} and posted {self.reward!r}: an episode has one. Do one "
                    "of the two."
                )
            self.reward = number_of(reward, "the returned reward")
        if turns is not None:
            if len(turns) != self.calls:
                raise ValueError(f"turn_rewards: {len(turns)} were returned for {self.calls} calls. Give one for each.")
            self.turn_rewards |= {k: number_of(value, f"turn_rewards[{k}]") for k, value in enumerate(turns)}
        self.info |= {str(name): number_of(value, f"the returned {name}") for name, value in fields.items()}

    def end(self) -> None:
        """End the session: what runs is aborted, what comes is refused."""
        self.ended.set()
        for task in self._running:
            task.cancel()

    # -- rows ----------------------------------------------------------------------------------------------------------

    @property
    def num_turns(self) -> int:
        """Turns of the policy so far."""
        return sum(len(strand.calls) for strand in self.strands)

    def outputs(self, status: EpisodeStatus, seconds: float) -> list[AgentLoopOutput]:
        """Return the rows of the trajectory in the order of their last turns; the last has the episode's reward.

        Args:
            seconds: of the agent, generation left out.
        """
        rows = [(strand, row) for strand in self.strands for row in strand.conversation.rows() if row.turns]
        rows.sort(key=lambda pair: pair[0].calls[pair[1].turns[-1]])
        return [self._output(strand, row, row is rows[-1][1], status, seconds) for strand, row in rows]

    def _output(
        self, strand: Strand, row: ConversationRow, is_last: bool, status: EpisodeStatus, seconds: float
    ) -> AgentLoopOutput:
        calls = [strand.calls[turn] for turn in row.turns]
        columns = {
            "episode_info": dict(self.info),
            "turn_seconds": [seconds for _, seconds in sorted(self.turn_seconds.items())],
        }
        return AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs if self.sampling.get("want_log_probs") else None,
            reward_score=None if self.reward is None else self.reward if is_last else 0.0,
            turn_rewards=[self.turn_rewards.get(call, 0.0) for call in calls],
            turn_spans=row.turn_spans,
            status=status,
            messages=strand.conversation.messages,
            num_turns=1 + self.num_turns + self.user_turns,
            metrics={"agent": seconds},
            extra_fields=columns,
        )


def number_of(value: Any, name: str) -> float:
    """Return a finite number.

    Raises:
        ValueError: it is none.
    """
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name}={value!r} must be a finite number.")
    return number


def tell_once(name: str, rest: str) -> None:
    """Warn of a field of an agent's request, once a process."""
    if name not in _told:
        _told.add(name)
        logger.warning("an agent's request has %s=%s", name, rest)
