"""Environments: worlds in which an agent acts by text, and how to write one.

from verl.envs import register

@register("CountUp")
class CountUp:
    def reset(self, *, seed, **task): return "Say 1.", {}
    def step(self, action): return "", float(action.strip() == "1"), True, False, {"success": action.strip() == "1"}
"""

from verl.envs.base import Environment, Message, Observation, make, register

__all__ = ["Environment", "Message", "Observation", "make", "register"]
