"""Interactions: simulated users that answer the policy turn by turn and score its turns. They know no model."""

from verl.interactions.base import BaseInteraction

__all__ = ["BaseInteraction"]
