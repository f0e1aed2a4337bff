"""Agent ``tool_agent``: tools answer the policy's calls and, where a row has one, a simulated user its other turns."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl.agents.base import at_close, register
from verl.agents.episode import AssistantTurn, ConversationEnvironment, EpisodeLoop, Reply, ToolCall
from verl.compat import missing
from verl.config.rollout import MultiTurnConfig
from verl.tools.calls import CallOutcome, CallResult
from verl.tools.toolbox import RowToolbox, close_toolboxes, toolbox_of

at_close(close_toolboxes)


class ToolEnvironment(ConversationEnvironment):
    """Tools of one row, and its simulated user if it has one.

    Args:
        options: ``rollout.multi_turn``.
        row: its tools are those of `verl.tools.toolbox.row_tools`.
        user: answers turns without a tool call: an `InteractionSession`; None: such a turn ends the episode.
    """

    def __init__(self, options: MultiTurnConfig, row: Mapping[str, Any], user: Any = None):
        self.options, self.user = options, user
        self.toolbox = RowToolbox(toolbox_of(options), row)
        self.tools = self.toolbox.schemas
        self.calls: list[CallResult] = []
        self.user_scores: list[float] = []
        self.num_calls = 0
        """Calls that were made, failed ones too."""

    async def start(self, row: Mapping[str, Any]) -> Reply | None:
        if self.tools and row.get("raw_prompt") is None:
            raise ValueError(
                "tool_agent: the row has no raw_prompt, the messages to which the schemas of tools are added. Set "
                "data.return_raw_chat=true."
            )
        await self.toolbox.create()
        if self.user is not None:
            await self.user.start()
        return None

    async def resume(self, row: Mapping[str, Any], turns: Sequence[AssistantTurn], replies: Sequence[Reply]) -> None:
        await self.start(row)
        self.num_calls = sum(reply.num_calls for reply in replies)

    async def reply(self, turn: AssistantTurn) -> Reply:
        """Answer the calls of a turn, in their order; or have the simulated user answer."""
        if turn.tool_calls:
            return await self._answer_calls(turn.tool_calls)
        if self.user is None:
            return Reply(terminated=True)
        answer = await self.user.answer(turn.messages)
        if answer.score is not None:
            self.user_scores.append(answer.score)
        messages = () if answer.is_last else ({"role": "user", "content": answer.content},)
        return Reply(messages, answer.score, terminated=answer.is_last, info=answer.info)

    async def _answer_calls(self, calls: Sequence[ToolCall]) -> Reply:
        room, most = self.options.max_parallel_calls, self.options.max_tool_calls
        left = len(calls) if most is None else max(0, most - self.num_calls)
        made = calls[: min(room, left)]
        results = list(
            await asyncio.gather(*(self.toolbox.call(call.name, call.arguments, call.error) for call in made))
        )
        for call in calls[len(made) :]:
            rule = f"a turn may have {room}" if len(made) == room else f"the conversation may have {most}"
            results.append(self._refused(call, f"Error: {call.name[:100]} was not called: {rule} tool calls."))
        self.num_calls += len(made)
        self.calls += results
        rewards = [result.reward for result in results if result.reward is not None]
        messages = [_message(call, result) for call, result in zip(calls, results, strict=True)]
        return Reply(messages, sum(rewards) if rewards else None, info=_numbers(results), num_calls=len(made))

    def _refused(self, call: ToolCall, text: str) -> CallResult:
        name = call.name if call.name in self.toolbox.tools else "unknown"
        return CallResult(name, CallOutcome.NOT_CALLED, text)

    async def finish(self) -> Mapping[str, Any]:
        """Return ``tool_calls``, ``tool_rewards`` (of each call that gave one), ``turn_scores`` (the simulated user's)
        and ``reward_scores``: each tool's `calc_reward` by name, and the simulated user's scores."""
        rewards: dict[str, Any] = dict(await self.toolbox.rewards())
        if self.user is not None:
            rewards["user_turn_rewards"] = list(self.user_scores)
        return {
            "tool_calls": [
                {"name": call.name, "outcome": str(call.outcome), "seconds": call.seconds} for call in self.calls
            ],
            "tool_rewards": [call.reward for call in self.calls if call.reward is not None],
            "turn_scores": list(self.user_scores),
            "reward_scores": rewards,
        }

    async def close(self) -> None:
        try:
            await self.toolbox.release()
        finally:
            if self.user is not None:
                await self.user.close()


def _message(call: ToolCall, result: CallResult) -> dict[str, Any]:
    message = {"role": "tool", "name": call.name, "content": result.text}
    return {**message, "tool_call_id": call.id} if call.id else message


def _numbers(results: Sequence[CallResult]) -> dict[str, float]:
    """Return the numbers among the metrics of tools, as ``<tool>/<metric>``."""
    return {
        f"{result.name}/{name}": float(value)
        for result in results
        for name, value in result.metrics.items()
        if isinstance(value, (int, float))
    }


@register("tool_agent")
class ToolAgentLoop(EpisodeLoop):
    """Agent loop of tools."""

    seconds_name = "tool_calls"

    # turns are scored where a simulated user answers them
    scores_turns = False

    def environment(self, row: Mapping[str, Any]) -> ToolEnvironment:
        options = self.config.actor_rollout_ref.rollout.multi_turn
        return ToolEnvironment(options, row, self._user(row))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        self.scores_turns = self._has_user(row)
        return await super().run(sampling_params, **row)

    def _has_user(self, row: Mapping[str, Any]) -> bool:
        """Whether a simulated user takes part in this row's conversation."""
        options = self.config.actor_rollout_ref.rollout.multi_turn
        if not options.interaction_config_path:
            return False
        from verl.interactions.session import interaction_kwargs

        return bool(interaction_kwargs(row))

    def _user(self, row: Mapping[str, Any]) -> Any:
        if not self._has_user(row):
            return None
        from verl.interactions.session import InteractionSession

        env = self.config.env
        path = self.config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
        return InteractionSession.of_row(path, row, start_timeout=env.reset_timeout, answer_timeout=env.step_timeout)


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
