"""Interactions: simulated users that answer the policy turn by turn and score its turns. Know no model and no tokens."""

from verl.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
