"""GSM8K: the policy hands in an answer and reads whether it is right."""

from typing import Any

from verl.rewards.scorers import gsm8k
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

NO_PROGRESS = -0.05
"""Reward of a turn whose answer is no better than the one before."""


class AnswerTool(BaseTool):
    """A tool that scores an answer against the row's ``ground_truth``.

    A call's reward is 0 if the answer is better than the last one, else ``NO_PROGRESS``; the conversation's reward is
    that of the last answer, 0 without one.
    """

    def __init__(self, config: Any, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self._instances: dict[str, dict[str, Any]] = {}

    def score(self, answer: str, ground_truth: str) -> float:
        """Return the score of an answer."""
        raise NotImplementedError

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id, _ = await super().create(instance_id)
        if ground_truth is None:
            ground_truth = (kwargs.get("create_kwargs") or {}).get("ground_truth")
        if ground_truth is None:
            raise ValueError(
                f"tools_kwargs[{self.name!r}]['create_kwargs'] has no ground_truth, which answers are compared with. "
                "Add it to the row."
            )
        self._instances[instance_id] = {"answer": None, "ground_truth": str(ground_truth), "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        state = self._instances[instance_id]
        state["answer"] = answer = str(parameters.get("answer", ""))
        reward = await self.calc_reward(instance_id)
        step_reward = 0.0 if reward > state["reward"] else NO_PROGRESS
        state["reward"] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), step_reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        state = self._instances[instance_id]
        return 0.0 if state["answer"] is None else self.score(state["answer"], state["ground_truth"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)


class Gsm8kTool(AnswerTool):
    """Scores an answer to a GSM8K problem, with or without ``####``."""

    def score(self, answer: str, ground_truth: str) -> float:
        marked = answer if answer.startswith("#### ") else f"#### {answer}"
        return gsm8k.compute_score(marked, ground_truth, method="flexible")
