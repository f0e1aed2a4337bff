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
        why, way_out = (
            "a rollout on devices of its own is sent weights as it goes",
            "actor_rollout_ref.hybrid_engine=true",
        )
    elif shared.rollout.mode == "async":
        why, way_out = "servers are handed the newest weights at every step", f"{place}.mode=sync"
    elif shared.rollout.free_cache_engine:
        why, way_out = "the engine gives its weights back between steps", f"{place}.free_cache_engine=false"
    else:
        return
    yield Problem(key, f"{key}={every}: {why}. Set {way_out}, or leave it 1.", (way_out.partition("=")[0],))
