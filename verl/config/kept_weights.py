"""What ``trainer.weight_sync_freq`` above 1 needs: an engine that keeps its weights from step to step."""

from collections.abc import Iterator

from verl.config.base import Problem
from verl.config.ppo import PPOConfig


def kept_weights(config: PPOConfig) -> Iterator[Problem]:
    """Problems of a rollout engine that would have to draw with weights it no longer holds, or gets anyway."""
    key, every = "trainer.weight_sync_freq", config.trainer.weight_sync_freq
    shared, place = config.actor_rollout_ref, "actor_rollout_ref.rollout"
    if every == 1:
        return
    if not shared.hybrid_engine:
        yield Problem(key, f"{key}={every}: a rollout on devices of its own is sent weights as rollout.async_ratio says. "
                      "Set actor_rollout_ref.hybrid_engine=true, or leave it 1.")  # fmt: skip
    elif shared.rollout.mode == "async":
        yield Problem(key, f"{key}={every}: servers are handed the newest weights at every step. Set {place}.mode=sync, "
                      "or leave it 1.", (f"{place}.mode",))  # fmt: skip
    elif shared.rollout.free_cache_engine:
        yield Problem(key, f"{key}={every}: the engine gives its weights back between steps. Set "
                      f"{place}.free_cache_engine=false, or leave it 1.", (f"{place}.free_cache_engine",))  # fmt: skip
