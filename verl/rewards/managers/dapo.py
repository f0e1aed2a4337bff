"""Rewards with a penalty for responses that come near the limit."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from verl.algorithms.reward_shaping import overlong_penalty
from verl.protocol import DataProto
from verl.rewards.managers.naive import NaiveRewardManager
from verl.rewards.managers.registry import register
from verl.rewards.managers.rule import REWARD_ERROR_KEY, place_on_last_token


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """As ``naive``, and a response pays for the part of a buffer before the limit that it used up.

    Args:
        max_resp_len: the limit, in tokens.
        overlong_buffer_cfg: ``enable``; ``len``, tokens of the buffer; ``penalty_factor``, the most it costs; ``log``,
            whether to report the columns ``overlong_reward`` and ``overlong``.

    Source: Yu et al. 2025, DAPO, section 3.4 (arXiv:2503.14476).
    """

    def __init__(
        self,
        *args: Any,
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.max_resp_len, self.buffer = max_resp_len, dict(overlong_buffer_cfg or {})
        super().__init__(*args, **kwargs)
        if unknown := set(self.buffer) - {"enable", "len", "penalty_factor", "log"}:
            raise ValueError(
                f"reward_model.reward_kwargs.overlong_buffer_cfg has {', '.join(sorted(unknown))}; known are enable, "
                "len, penalty_factor and log."
            )
        if self.buffer.get("enable"):
            length = self.buffer.get("len")
            if not max_resp_len or not length or not 0 < length <= max_resp_len:
                raise ValueError(
                    f"reward_model.reward_kwargs.overlong_buffer_cfg.len={length} with max_resp_len={max_resp_len}: "
                    "the buffer lies before the limit, so 0 < len <= max_resp_len. Set both; the limit is usually "
                    "data.max_response_length."
                )

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        result = super().__call__(data, return_dict=True)
        if self.buffer.get("enable") and "rm_scores" not in data.keys():
            responses = data.ragged("responses")
            penalty = overlong_penalty(
                responses.layout.lengths, self.max_resp_len, self.buffer["len"], self.buffer.get("penalty_factor", 1.0)
            ).cpu()
            columns = result["reward_extra_info"]
            failed = columns.get(REWARD_ERROR_KEY)
            penalties = [0.0 if failed and failed[i] else value for i, value in enumerate(penalty.tolist())]
            result["reward_tensor"] = result["reward_tensor"] + place_on_last_token(penalties, responses)
            if self.buffer.get("log"):
                columns["overlong_reward"] = penalties
                columns["overlong"] = [value < 0 for value in penalties]
        return result if return_dict else result["reward_tensor"]
