"""What ``algorithm.{reward_shaping,sample_mask,advantage}`` ask of a batch, between the scores and the update.

Reads and writes columns; the arithmetic is that of `verl.algorithms.reward_shaping`. With default options nothing is
changed, and no metric is added.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantage import get_adv_estimator_fn
from verl.algorithms.estimating import require_finite
from verl.algorithms.reward_shaping import (
    Moments,
    centre_and_spread,
    clip_scores,
    clip_tokens,
    cut_at_limit,
    merge_moments,
    overlong_penalty,
    rescore,
    right_or_short,
    whiten_tokens,
    within_difficulty,
)
from verl.batch.ragged import Ragged
from verl.protocol import DataProto
from verl.trainer.ppo.experience import put_response_column, response_column, whitens_by_itself


class Shaping:
    """The shaping of a run's batches, one after the other; remembers the running moments of the scores.

    Args:
        algorithm: the ``algorithm`` section.
        response_length: tokens at which responses are cut.
        source_key: column that holds the data source of each row.
    """

    def __init__(self, algorithm: Any, response_length: int, source_key: str = "data_source"):
        self.rewards, self.advantage = algorithm.reward_shaping, algorithm.advantage
        self.sample_mask = algorithm.sample_mask
        self.estimator = algorithm.adv_estimator
        self.response_length = response_length
        self.source_key = source_key
        self.running: dict[str, Moments] = {}

    @property
    def whitens_after(self) -> bool:
        """Whether advantages are whitened here: asked for, and not done by the estimator."""
        return self.advantage.whiten is True and not whitens_by_itself(get_adv_estimator_fn(self.estimator))

    def shape_scores(self, batch: DataProto) -> dict[str, float]:
        """Add ``token_level_rewards`` (B, R), which KL has not touched yet; returns metrics."""
        options, norm = self.rewards, self.rewards.norm
        does_change = options.overlong_buffer.enable or norm.mean or norm.std or options.clip is not None
        does_change = does_change or options.clip_range is not None
        if not does_change and (options.scale, options.shift) == (1, 0):
            batch.put("token_level_rewards", batch.ragged("token_level_scores"))
            return {}
        metrics: dict[str, float] = {}
        given, mask = (response_column(batch, name) for name in ("token_level_scores", "response_mask"))
        scores = given.double().sum(-1)
        require_finite("token_level_scores", scores)
        if options.overlong_buffer.enable:
            penalty = self._overlong_penalty(batch)
            scores = scores + penalty
            metrics["reward_shaping/overlong_fraction"] = (penalty < 0).double().mean().item()
            metrics["reward_shaping/overlong_penalty"] = penalty.mean().item()
        if norm.mean or norm.std:
            centre, spread = self._centre_and_spread(batch, scores, metrics)
        else:
            centre, spread = torch.zeros_like(scores), torch.ones_like(scores)
        scores = (scores - centre) / spread * options.scale + options.shift
        if options.clip_range is not None:
            low, high = options.clip_range
            scores, metrics["reward_shaping/clip_range_fraction"] = clip_scores(scores, high, low)
        if options.clip is not None:
            scores, metrics["reward_shaping/clip_fraction"] = clip_scores(scores, options.clip)
        put_response_column(batch, "token_level_rewards", rescore(given, mask, scores, options.scale / spread))
        return metrics

    def _overlong_penalty(self, batch: DataProto) -> Tensor:
        buffer = self.rewards.overlong_buffer
        lengths = batch.ragged("responses").layout.lengths
        return overlong_penalty(lengths, self.response_length, buffer.len, buffer.penalty_factor)

    def _centre_and_spread(self, batch: DataProto, scores: Tensor, metrics: dict) -> tuple[Tensor, Tensor]:
        """What normalises the scores; lets the running moments see them, and notes those in ``metrics``."""
        norm, sources = self.rewards.norm, None
        if {"running", "source"} & {norm.mean, norm.std}:
            sources = batch.non_tensor_batch.get(self.source_key, np.full(len(batch), "all", dtype=object))
            sources = [str(source) for source in sources]
        if "running" in (norm.mean, norm.std):
            self.running = merge_moments(self.running, scores, sources)
            for source in dict.fromkeys(sources):
                metrics[f"reward_shaping/running_mean/{source}"] = self.running[source].mean
                metrics[f"reward_shaping/running_std/{source}"] = self.running[source].std
        return centre_and_spread(scores, batch.non_tensor_batch["uid"], norm.mean, norm.std, self.running, sources)

    def finish_rewards(self, batch: DataProto) -> dict[str, float]:
        """Bound and whiten ``token_level_rewards``, and take responses out of the loss; returns metrics.

        A response is taken out by zeros in its ``response_mask``. Its score still counts among its siblings.
        """
        metrics: dict[str, float] = {}
        if self.rewards.clip is not None:
            rewards, mask = (response_column(batch, name) for name in ("token_level_rewards", "response_mask"))
            rewards, metrics["reward_shaping/token_clip_fraction"] = clip_tokens(rewards, mask, self.rewards.clip)
            put_response_column(batch, "token_level_rewards", rewards)
        if self.rewards.whiten:
            rewards, mask = (response_column(batch, name) for name in ("token_level_rewards", "response_mask"))
            put_response_column(batch, "token_level_rewards", whiten_tokens(rewards, mask))
        return metrics | self._mask_samples(batch)  # last: a masked response still has its reward among its siblings

    def _mask_samples(self, batch: DataProto) -> dict[str, float]:
        dropped: dict[str, Tensor] = {}
        if self.sample_mask.drop_truncated:
            dropped["truncated"] = is_truncated(batch, self.response_length)
        scores = response_column(batch, "token_level_scores").double().sum(-1)
        if self.sample_mask.error_max_len is not None:
            lengths = batch.ragged("responses").layout.lengths
            dropped["long_error"] = ~right_or_short(scores, lengths, self.sample_mask.error_max_len)
        if self.sample_mask.difficulty is not None:
            dropped["difficulty"] = ~within_difficulty(
                scores, batch.non_tensor_batch["uid"], *self.sample_mask.difficulty
            )
        if not dropped:
            return {}
        keep = ~torch.stack(list(dropped.values())).any(0)
        mask = batch.ragged("response_mask")
        keep_cell = keep.to(mask.values.device).repeat_interleave(mask.layout.lengths)
        batch.put("response_mask", Ragged(mask.values * keep_cell.to(mask.values.dtype), mask.layout))
        metrics = {f"sample_mask/{why}_fraction": rows.double().mean().item() for why, rows in dropped.items()}
        return {**metrics, "sample_mask/kept_fraction": keep.double().mean().item()}

    def shape_advantages(self, batch: DataProto) -> dict[str, float]:
        """Whiten and bound ``advantages``; ``returns`` stay as they are. Returns metrics."""
        whitens = self.whitens_after
        if not whitens and self.advantage.clip is None:
            return {}
        metrics: dict[str, float] = {}
        advantages, mask = (response_column(batch, name) for name in ("advantages", "response_mask"))
        if whitens:
            advantages = whiten_tokens(advantages, mask)
        if self.advantage.clip is not None:
            advantages, metrics["critic/advantage_clip_frac"] = clip_tokens(advantages, mask, self.advantage.clip)
        put_response_column(batch, "advantages", advantages)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values: the moments of each data source."""
        return {source: list(moments) for source, moments in self.running.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the moments of the checkpoint."""
        self.running = {source: Moments(*moments) for source, moments in state.items()}


def is_truncated(batch: DataProto, response_length: int) -> Tensor:
    """Whether each response was cut at a length limit, (B,) bool.

    By ``finish_reason``; without that column, a response that fills the window counts as cut.
    """
    lengths = batch.ragged("responses").layout.lengths
    return cut_at_limit(lengths, response_length, batch.non_tensor_batch.get("finish_reason"))
