"""One row's conversation with its interaction: who answers, how long it may take, and what an answer must be."""

import asyncio
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.interactions.utils.interaction_registry import interactions_of, select_interaction


@dataclass
class UserAnswer:
    """What a simulated user says to a turn."""

    content: str
    is_last: bool
    """The conversation is over."""
    score: float | None
    """Of the turn."""
    info: dict[str, Any] = field(default_factory=dict)
    """Numbers of its metadata."""


class InteractionSession:
    """A conversation with a simulated user. Use as: `start`, `answer` once a turn, `close`.

    Args:
        interaction: the row's.
        kwargs: the row's ``interaction_kwargs``.
        start_timeout, answer_timeout: seconds; None: no limit.
    """

    def __init__(
        self,
        interaction: BaseInteraction,
        kwargs: Mapping[str, Any],
        start_timeout: float | None = None,
        answer_timeout: float | None = None,
    ):
        self.interaction = interaction
        # Parquet fills in nulls for fields that only other rows have
        self.kwargs = {name: value for name, value in kwargs.items() if value is not None}
        self._start_timeout, self._answer_timeout = start_timeout, answer_timeout
        self._instance_id: str | None = None

    @classmethod
    def of_row(cls, path: str, row: Mapping[str, Any], **timeouts: float | None) -> "InteractionSession":
        """Return the session of a row.

        Args:
            path: ``multi_turn.interaction_config_path``.
            row: its ``interaction_kwargs`` choose the interaction by ``name``; without that column its ``extra_info``.

        Raises:
            ValueError: no interaction has this name.
        """
        kwargs = interaction_kwargs(row)
        return cls(select_interaction(interactions_of(path), kwargs.get("name")), kwargs, **timeouts)

    async def start(self) -> None:
        """Begin the conversation."""
        begun = self.interaction.start_interaction
        self._instance_id = await self._limited("start_interaction", self._start_timeout, begun, None, **self.kwargs)

    async def answer(self, messages: Sequence[Mapping[str, Any]]) -> UserAnswer:
        """Return what the user says to the last of ``messages``, which is the policy's.

        Raises:
            TypeError: it answers with something else than (should_terminate, content, score, metadata).
            ValueError: the score is no finite number.
            TimeoutError: it takes too long.
        """
        given = await self._limited(
            "generate_response",
            self._answer_timeout,
            self.interaction.generate_response,
            self._instance_id,
            [dict(message) for message in messages],
            **self.kwargs,
        )
        if not isinstance(given, tuple | list) or len(given) != 4:
            raise TypeError(f"{self._name}.generate_response returned {given!r}. {_RULE}")
        is_last, content, score, metadata = given
        if not isinstance(content, str) or not isinstance(metadata, Mapping | None):
            raise TypeError(f"{self._name}.generate_response returned {given!r}. {_RULE}")
        if score is not None and not (isinstance(score, Real) and math.isfinite(score)):
            raise ValueError(f"{self._name}.generate_response gave the score {score!r}: it must be a finite number.")
        info = {name: value for name, value in (metadata or {}).items() if isinstance(value, Real)}
        return UserAnswer(content, bool(is_last), None if score is None else float(score), info)

    async def close(self) -> None:
        """End the conversation; may be called twice, and without `start`."""
        instance_id, self._instance_id = self._instance_id, None
        if instance_id is not None:
            finish = self.interaction.finalize_interaction
            await self._limited("finalize_interaction", self._answer_timeout, finish, instance_id)

    @property
    def _name(self) -> str:
        return f"interaction {getattr(self.interaction, 'name', None) or type(self.interaction).__name__!r}"

    async def _limited(self, method: str, timeout: float | None, call: Any, *args: Any, **kwargs: Any) -> Any:
        # verl's methods are coroutines; one that is none must not hold up the event loop of all rows
        asked = call(*args, **kwargs) if inspect.iscoroutinefunction(call) else asyncio.to_thread(call, *args, **kwargs)
        try:
            return await asyncio.wait_for(asked, timeout)
        except asyncio.TimeoutError as error:
            raise TimeoutError(
                f"{self._name}.{method} did not answer within {timeout:g} s. Raise env.reset_timeout (of its start) or "
                "env.step_timeout, if it only is slow."
            ) from error


_RULE = "It must return (should_terminate, content, score, metadata): a bool, a text, a number or None, a dict."


def interaction_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's ``interaction_kwargs``, from the column of that name or from ``extra_info``."""
    extra = row.get("extra_info")
    return (
        row.get("interaction_kwargs") or (extra.get("interaction_kwargs") if isinstance(extra, Mapping) else {}) or {}
    )
