"""Agent loop ``interaction_agent``: a conversation with a simulated user, who scores the policy's turns."""

from collections.abc import Mapping
from typing import Any

from verl.agents.base import register
from verl.agents.episode import AssistantTurn, ConversationEnvironment, EpisodeLoop, Reply
from verl.interactions.session import InteractionSession


def open_session(config: Any, row: Mapping[str, Any]) -> InteractionSession:
    """Return the conversation of a row with its interaction, within the time limits of ``env``.

    Raises:
        ValueError: no file names interactions, or none has the row's name.
    """
    path = config.actor_rollout_ref.rollout.multi_turn.interaction_config_path
    if not path:
        raise ValueError(
            "agent_name='interaction_agent' needs actor_rollout_ref.rollout.multi_turn.interaction_config_path, which "
            "is null: no simulated user is there to answer. Name a YAML file with a list 'interaction'."
        )
    timeouts = {"start_timeout": config.env.reset_timeout, "answer_timeout": config.env.step_timeout}
    return InteractionSession.of_row(path, row, **timeouts)


class InteractionEnvironment(ConversationEnvironment):
    """The simulated user of a conversation, as what answers the policy. The row's prompt is the beginning."""

    def __init__(self, session: InteractionSession):
        self.session = session

    async def start(self, row: Mapping[str, Any]) -> None:
        await self.session.start()

    async def reply(self, turn: AssistantTurn) -> Reply:
        answer = await self.session.answer(turn.messages)
        messages = [] if answer.is_last else [{"role": "user", "content": answer.content}]
        return Reply(messages, reward=answer.score, terminated=answer.is_last, info=answer.info)

    async def close(self) -> None:
        await self.session.close()


@register("interaction_agent")
class InteractionAgentLoop(EpisodeLoop):
    """Each turn of the policy is answered by the interaction of the row, whose score is the reward of the turn."""

    seconds_name = "interaction"

    def environment(self, row: Mapping[str, Any]) -> ConversationEnvironment:
        return InteractionEnvironment(open_session(self.config, row))
