"""Environments that an OpenEnv server runs: ``openenv:http://127.0.0.1:8000``."""

import json
from collections.abc import Mapping
from typing import Any

from openenv.core.generic_client import GenericEnvClient


class OpenEnvEnvironment:
    """One session on an OpenEnv server (WebSocket). Several at a time need a server that allows them.

    Args:
        name: the server's URL.
        action_key: field of the action that holds the policy's text, as ``message`` or ``code``.
        action: the action's other fields.
        observation_key: field of the observation that the policy reads. None: all of them, as JSON.
        success_reward: the reward of a last step from which an episode counts as success.
        timeout: seconds in which the server must answer.
    """

    def __init__(
        self,
        name: str,
        action_key: str = "message",
        action: Mapping[str, Any] | None = None,
        observation_key: str | None = None,
        success_reward: float = 1.0,
        timeout: float = 60.0,
    ):
        self.url, self.action_key, self.action = name, action_key, dict(action or {})
        self.observation_key, self.success_reward, self.timeout = observation_key, success_reward, timeout
        self.client: Any = None

    async def reset(self, *, seed: int, **task: Any) -> tuple[str, dict[str, Any]]:
        """Begin an episode; the server decides what it does with the seed."""
        if self.client is None:
            self.client = GenericEnvClient(self.url, message_timeout_s=self.timeout)
        return self._text((await self.client.reset(seed=seed, **task)).observation), {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send the policy's text as an action."""
        result = await self.client.step({**self.action, self.action_key: action})
        reward, done = float(result.reward or 0.0), bool(result.done)
        return self._text(result.observation), reward, done, False, {"success": done and reward >= self.success_reward}

    async def close(self) -> None:
        if self.client is not None:
            await self.client.close()
            self.client = None

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.observation_key is None:
            fields = {key: value for key, value in observation.items() if key not in ("reward", "done", "metadata")}
            return json.dumps(fields, ensure_ascii=False)
        if self.observation_key not in observation:
            raise ValueError(
                f"openenv:{self.url}: observation_key={self.observation_key!r} is no field of the observation; it has "
                f"{', '.join(observation)}. Set it in env.registry.<tag>.kwargs.observation_key."
            )
        value = observation[self.observation_key]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
