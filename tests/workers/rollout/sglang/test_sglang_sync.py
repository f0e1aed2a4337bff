"""Buckets of weights on their way to SGLang: one is packed while the one before it is loaded."""

import pytest
import torch

from tests.workers.rollout.conftest import weights_of
from verl.workers.rollout.base import WeightSyncError
from verl.workers.rollout.sglang.process import EngineProcess, SharedMemoryBuffer
from verl.workers.rollout.weights.sync import sync_weights

pytestmark = pytest.mark.sglang

SMALL = 20_000
"""Bytes of a bucket, such that the model takes many."""


@pytest.fixture
def events(monkeypatch):
    """What happens in order: ("pack", buffer), ("load", call) and ("loaded", call)."""
    seen, loads = [], set()
    pack, start, result = SharedMemoryBuffer.pack, EngineProcess.start_call, EngineProcess.result

    def packing(self, bucket):
        seen.append(("pack", self))
        return pack(self, bucket)

    def starting(self, name, *args):
        number = start(self, name, *args)
        if args and args[0] == "load":
            loads.add(number)
            seen.append(("load", number))
        return number

    def waiting(self, number):
        answer = result(self, number)
        if number in loads:
            seen.append(("loaded", number))
        return answer

    monkeypatch.setattr(SharedMemoryBuffer, "pack", packing)
    monkeypatch.setattr(EngineProcess, "start_call", starting)
    monkeypatch.setattr(EngineProcess, "result", waiting)
    return seen


def test_a_bucket_is_packed_while_the_one_before_it_is_loaded(awake, reference, events):
    sync_weights(weights_of(reference("tied")), awake, version=1, bucket_bytes=SMALL)
    kinds, count = [kind for kind, _ in events], len(events) // 3
    assert count > 3
    assert kinds == ["pack", "load", *["pack", "loaded", "load"] * (count - 1), "loaded"]
    buffers = [what for kind, what in events if kind == "pack"]
    assert len(set(map(id, buffers))) == 2
    assert all(one is not other for one, other in zip(buffers, buffers[1:], strict=False))
    loaded = [what for kind, what in events if kind == "loaded"]
    assert loaded == [what for kind, what in events if kind == "load"]


def test_no_bucket_follows_one_that_does_not_load(awake, reference, events):
    wrong = ("model.norm.weight", torch.zeros(3))
    named = [wrong, *(pair for pair in weights_of(reference("tied")) if pair[0] != wrong[0])]
    with pytest.raises(WeightSyncError, match="model.norm.weight"):
        sync_weights(named, awake, version=1, bucket_bytes=SMALL)
    assert [kind for kind, _ in events] == ["pack", "load", "pack", "loaded"]
    sync_weights(weights_of(reference("tied")), awake, version=2, bucket_bytes=SMALL)
    assert awake.version == 2


def test_a_sender_that_fails_while_a_bucket_is_loaded_leaves_an_engine_that_takes_the_next_sync(awake, reference):
    def failing():
        for number, pair in enumerate(weights_of(reference("tied"))):
            if number == 6:
                raise RuntimeError("the sender is gone")
            yield pair

    with pytest.raises(RuntimeError, match="the sender is gone"):
        sync_weights(failing(), awake, version=1, bucket_bytes=SMALL)
    assert awake.version is None
    sync_weights(weights_of(reference("tied")), awake, version=2, bucket_bytes=SMALL)
    assert awake.version == 2
