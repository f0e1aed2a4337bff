"""Interaction ``gsm8k``: a user who knows the answer, says whether the policy's is right, and asks it to try again."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.rewards.scorers import gsm8k


class Gsm8kInteraction(BaseInteraction):
    """User of GSM8K: a right answer scores 1 and ends the conversation, a wrong one scores 0.

    An answer is the number behind ``####``; a turn without the mark is taken for the bare number.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        self._answers: dict[str, dict[str, str]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Begin a conversation about a question whose answer is ``ground_truth``.

        Raises:
            ValueError: the row gives no answer.
        """
        if ground_truth is None:
            raise ValueError(
                f"extra_info.interaction_kwargs of a row for the interaction {self.name!r} has no ground_truth: the "
                "user could not tell right from wrong. Make the data with "
                "examples/data_preprocess/gsm8k_multiturn_w_interaction.py."
            )
        instance_id = await super().start_interaction(instance_id)
        self._answers[instance_id] = {"ground_truth": str(ground_truth), "response": ""}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        said = next((str(item.get("content") or "") for item in reversed(messages) if item["role"] == "assistant"), "")
        self._answers[instance_id]["response"] = said if "####" in said else f"#### {said.strip()}"
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "Your response is correct!", score, {"success": True}
        return False, "Your response is incorrect! Reflect on your answer and try again.", score, {"success": False}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        answer = self._answers[instance_id]
        return gsm8k.compute_score(answer["response"], answer["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._answers.pop(instance_id, None)
