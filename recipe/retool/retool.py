"""ReTool's task: problems that are solved with a code interpreter, and answers in a box.

The names are those of verl's recipe: ``data.custom_cls.name=CustomRLHFDataset``,
``custom_reward_function.name=compute_score`` and the tool ``recipe.retool.retool.CustomSandboxFusionTool``.
"""

import re
from collections.abc import Mapping
from typing import Any

from verl.data.rl_dataset import RLHFDataset
from verl.rewards.scorers import math_dapo
from verl.tools.sandbox_fusion_tools import SandboxFusionTool

ANSWER_FORMAT = "\nThe answer format must be: \\boxed{'The final answer goes here.'}"
_FENCED = re.compile(r"```(?:py|python)?\s*\n(.*?)```", re.DOTALL)


class CustomRLHFDataset(RLHFDataset):
    """Problems with a sentence about the form of the answer behind the last message."""

    def _build_messages(self, example: Mapping[str, Any], key: str | None = None) -> list[dict[str, Any]]:
        *before, last = super()._build_messages(dict(example), key)
        return [*before, {**last, "content": last["content"] + ANSWER_FORMAT}]


class CustomSandboxFusionTool(SandboxFusionTool):
    """`SandboxFusionTool` that takes a program out of a fenced block of Markdown."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        fenced = _FENCED.search(str(parameters.get("code", "")))
        code = fenced[1] if fenced else parameters.get("code", "")
        return await super().execute(instance_id, {**parameters, "code": code}, **kwargs)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 for the right answer in a box, else -1, and up to -0.6 for a wrong one that used the tool.

    A wrong answer gains 0.1 for each call. ``extra_info.num_turns`` counts the messages of all sides.
    """
    result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    if result["score"] < 0:
        num_calls = max(0, int((extra_info or {}).get("num_turns") or 2) - 2) / 2
        result["score"] = min(-0.6, result["score"] + 0.1 * num_calls)
    return {**result, "pred": str(result["pred"])}
