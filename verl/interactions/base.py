"""Base class of interactions: the interface of verl's simulated users."""

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4


class BaseInteraction:
    """Simulated user of many conversations at a time, each known by an instance id.

    One object serves all rows that name it; what belongs to a conversation is kept under its id, from
    `start_interaction` to `finalize_interaction`. Methods may be plain functions too: those run in a thread.

    Args:
        config: entry ``config`` of its YAML, with its ``name``.
    """

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; ``kwargs`` are the row's ``interaction_kwargs``. Returns its instance id."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last turn.

        Args:
            messages: the conversation so far; the last one is the policy's.
            kwargs: the row's ``interaction_kwargs``.

        Returns:
            should_terminate: the conversation is over.
            content: what the user says next.
            score: reward of the turn; None: it has none.
            metadata: its numbers become metrics and columns of dumps.
        """
        raise NotImplementedError(f"{type(self).__name__} has no generate_response. Write it: it answers each turn.")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the score of the conversation as it stands, for `generate_response` to call."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation and forget it: called once, also after a failure."""
