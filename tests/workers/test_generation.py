"""What a role does around its rollout engine, without the engine."""

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from verl.workers import generation
from verl.workers.generation import RolloutRole


def test_memory_cached_by_the_update_is_given_back_before_the_engine_wakes(monkeypatch):
    events = []
    monkeypatch.setattr(generation, "empty_cache", lambda device: events.append(f"empty {device}"))
    quiet = SimpleNamespace(phase=lambda name: nullcontext())
    role = SimpleNamespace(
        device="cuda", ledger=quiet, rollout=SimpleNamespace(monitor=quiet), config=SimpleNamespace(rollout=None)
    )
    for phase in ("wake", "sync", "wake_cache"):
        with RolloutRole.rollout_phase(role, phase):
            events.append(phase)
    assert events == [f"empty {torch.device('cuda')}", "wake", "sync", "wake_cache"]
