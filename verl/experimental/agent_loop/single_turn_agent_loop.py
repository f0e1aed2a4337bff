"""Public name of `verl.agent_loop`."""

from verl.agent_loop import SingleTurnAgentLoop

__all__ = ["SingleTurnAgentLoop"]
