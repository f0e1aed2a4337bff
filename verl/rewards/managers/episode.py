"""Reward of a trajectory where both the environment (agent loop) and the reward function may have a say: env.reward."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.batch.ragged import Ragged
from verl.protocol import DataProto
from verl.rewards.managers.scoring import call_manager


def reward_of_episodes(reward_fn: Callable, source: str) -> Callable:
    """Return a reward manager that gives what ``env.reward`` says.

    ``auto``: ``reward_fn`` itself, whose managers hand on the environment's rewards where there are any.
    ``environment``: those rewards. ``function``: those of ``reward_fn``, which finds the environment's in
    ``extra_info["rollout_reward_scores"]``. ``sum``: both, each on the tokens where it stands.

    Args:
        reward_fn: a reward manager.
        source: ``env.reward``.
    """
    return reward_fn if source == "auto" else _EpisodeReward(reward_fn, source)


class _EpisodeReward:
    def __init__(self, reward_fn: Callable, source: str) -> None:
        self.reward_fn, self.source = reward_fn, source

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        columns: dict[str, list] = {}
        rewards = environment_rewards(data) if self.source in ("environment", "sum") else None
        if self.source != "environment":
            own, columns = self._of_function(data)
            rewards = own if rewards is None else rewards + own
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def _of_function(self, data: DataProto) -> tuple[Tensor, dict[str, list]]:
        asked = data.select(deepcopy=False)
        if "rm_scores" in asked.keys():
            asked.pop(batch_keys=["rm_scores"])
        infos = data.non_tensor_batch.get("extra_info", [None] * len(data))
        asked.non_tensor_batch["extra_info"] = np.empty(len(data), dtype=object)
        asked.non_tensor_batch["extra_info"][:] = [
            {**(info if isinstance(info, Mapping) else {}), "rollout_reward_scores": scores}
            for info, scores in zip(infos, _scores_by_name(data), strict=True)
        ]
        return call_manager(asked, self.reward_fn)


def environment_rewards(data: DataProto) -> Tensor:
    """Return the environment's rewards (B, R): ``rm_scores``, or the rewards of turns on the last token of each.

    Raises:
        ValueError: the agent loops gave none.
    """
    if "rm_scores" in data.keys():
        return data.column("rm_scores")
    turns, mask = data.non_tensor_batch.get("turn_rewards"), data.ragged("response_mask")
    if turns is None:
        raise ValueError(
            "env.reward asks for rewards of the environment, and the agent loops of this batch return none "
            "(AgentLoopOutput.reward_score or turn_rewards). Have them return one, or set env.reward=function."
        )
    spans = data.non_tensor_batch.get("turn_spans")
    values = torch.zeros(len(mask.values), dtype=torch.float32)
    for row, (first, last) in enumerate(zip(mask.layout.offsets, mask.layout.offsets[1:], strict=False)):
        own = (mask.values[first:last] != 0).int()
        given = None if spans is None else spans[row]
        # the last token of each run of ones, where the loop says nothing else
        ends = ((own - torch.cat([own[1:], own.new_zeros(1)])) > 0).nonzero()[:, 0].tolist()
        ends = ends if given is None else [span[1] - 1 for span in given]
        for place, reward in zip(ends, turns[row] or (), strict=turns[row] is not None):
            values[int(first) + place] += float(reward)
    return Ragged(values, mask.layout).padded()


def _scores_by_name(data: DataProto) -> list[dict[str, Any]]:
    """Return what the environment gave each row: ``reward_score``, the sum of its rewards, and ``turn_rewards``."""
    scores: list[dict[str, Any]] = [{} for _ in range(len(data))]
    if "rm_scores" in data.keys():
        for row, score in zip(scores, data.column("rm_scores").sum(-1).tolist(), strict=True):
            row["reward_score"] = score
    for row, rewards in zip(scores, data.non_tensor_batch.get("turn_rewards", ()), strict=False):
        if rewards is not None:
            row["turn_rewards"] = list(rewards)
    return scores
