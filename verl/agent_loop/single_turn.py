"""One prompt, one response."""

from __future__ import annotations

from typing import Any

from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, register


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Draws what ``mode=sync`` draws: the same tokens from the same seeds."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        prompt_ids = list(row["raw_prompt_ids"])
        images = (row.get("multi_modal_data") or {}).get("image")
        completion = await self.server_manager.generate(
            prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=completion.token_ids,
            response_mask=[1] * len(completion.token_ids),
            response_logprobs=completion.log_probs,
        )
