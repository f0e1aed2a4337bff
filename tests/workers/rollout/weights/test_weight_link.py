"""Weights that cross from one process group to another arrive whole, are checked by name, and never end in a hang."""

import os
import re
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.weights.test_weight_sync import FAULTS, NAME, NoisyLine
from verl.workers.rollout.base import Receipt, Request, RolloutEngine, SamplingParams, WeightSyncError
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.link import WeightLink, WeightLinkError, find_store, open_store, packed
from verl.workers.rollout.weights.sync import checksum

pytestmark = pytest.mark.ranks


def connected(timeout_s=20.0) -> WeightLink:
    """This rank's end of a link over all ranks; rank 0 sends."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = open_store("127.0.0.1", timeout_s) if rank == 0 else None
    ports = [None] * size
    dist.all_gather_object(ports, store and store.port)
    return WeightLink(store or find_store("127.0.0.1", ports[0], timeout_s), rank, size, "cpu", timeout_s)


def outcome(call):
    """What a call returned, or the error as text."""
    try:
        return call()
    except WeightSyncError as error:
        return f"{type(error).__name__}: {error}"


def transfer(folder, model, dtype, bucket_bytes):
    link = connected()
    if link.rank == 0:
        return link.send(weights_of(model), 3, bucket_bytes, getattr(torch, dtype))
    rollout = HFRollout(folder, rollout_config(dtype=dtype))
    rollout.wake()
    return link.receive(rollout), link.num_bytes, rollout.version, rollout.generate(REQUEST, expect_version=3)


REQUEST = [Request((5, 6, 7), SamplingParams(8, do_sample=False))]


@pytest.mark.parametrize(
    "family, dtype, bucket_bytes",
    [
        ("qwen2", "float32", 1),
        ("qwen2", "float32", 40_000),
        ("qwen2", "bfloat16", 1 << 29),
        ("qwen3_moe", "float32", 1),
    ],
)
def test_every_receiver_confirms_what_was_sent_and_generates_with_it(
    family, dtype, bucket_bytes, model_folder, reference
):
    sent = {name: tensor.clone() for name, tensor in weights_of(reference(family), getattr(torch, dtype))}
    sender, *receivers = run_ranks(3, transfer, model_folder(family), reference(family), dtype, bucket_bytes)
    for receipt, num_bytes, version, _ in receivers:
        assert version == receipt.version == sender.version == 3
        assert receipt.checksums == {name: checksum(tensor) for name, tensor in sent.items()}
        assert num_bytes == sender.num_bytes >= sum(tensor.nbytes for tensor in sent.values())
    generated = [completions[0].token_ids for *_, completions in receivers]
    assert generated[0] == generated[1] and len(generated[0]) == 8


def all_faults(folder, model):
    link, results = connected(), {}
    rollout = NoisyLine(folder, rollout_config())
    rollout.wake()
    for name, (noise, _) in FAULTS.items():
        if link.rank == 0:
            link.send(weights_of(model), 1, 10_000, torch.float32)
            continue
        rollout.noise = noise
        results[name] = outcome(lambda: link.receive(rollout)), rollout.version
    if link.rank == 0:
        link.send(weights_of(model), 2, 10_000, torch.float32)
        return None
    rollout.noise = lambda name, tensor: [(name, tensor)]
    results["at last"] = link.receive(rollout).version, rollout.version
    return results


def test_a_fault_is_caught_by_name_and_the_link_goes_on(model_folder, reference):
    _, results = run_ranks(2, all_faults, model_folder(), reference())
    assert results.pop("at last") == (2, 2)
    for fault, (said, version) in results.items():
        assert re.search(FAULTS[fault][1], said) and NAME in said and version is None, fault


def give_up(folder, model):
    link = connected()

    def breaks_off():
        yield next(iter(weights_of(model)))
        raise ValueError("the actor lost its shards")

    if link.rank == 0:
        with pytest.raises(ValueError, match="lost its shards"):
            link.send(breaks_off(), 1, 1, torch.float32)
        return link.send(weights_of(model), 2, 1 << 20, torch.float32).version
    rollout = HFRollout(folder, rollout_config())
    rollout.wake()
    return outcome(lambda: link.receive(rollout)), rollout.version, link.receive(rollout).version


def test_a_sender_that_fails_says_why_and_may_send_again(model_folder, reference):
    version, (said, unconfirmed, then) = run_ranks(2, give_up, model_folder(), reference())
    assert "gave up: ValueError: the actor lost its shards" in said and unconfirmed is None and then == version == 2


def in_turns(folder):
    """Whether the sender has made two buckets more, and a tensor of a third, by the time the receiver loads one."""
    link = connected()
    begun = os.path.join(folder, "begun")

    def made():
        for number in range(5):
            open(f"{begun}{number}", "w").close()
            yield str(number), torch.ones(16)

    class Slow(Sink):
        def update_weights(self, version, buckets):
            def watched():
                for number, bucket in enumerate(buckets):
                    end = time.monotonic() + (30 if number < 2 else 0)
                    while not (found := os.path.exists(f"{begun}{number + 3}")) and time.monotonic() < end:
                        time.sleep(0.01)
                    ahead.append(found)
                    yield bucket

            return super().update_weights(version, watched())

    ahead = []
    if link.rank == 0:
        return link.send(made(), 1, 64, torch.float32).version
    return link.receive(Slow()).version, ahead[:2]


def test_a_bucket_is_made_and_one_travels_while_one_is_loaded(tmp_path):
    assert run_ranks(2, in_turns, str(tmp_path)) == [1, (1, [True] * 2)]


def stand_still(model, timeout_s):
    """The receiver takes a bucket, and then no more."""
    link = connected(timeout_s)
    if link.rank == 0:
        said = outcome(lambda: link.send(((str(i), torch.ones(1 << 22)) for i in range(64)), 1, 1 << 24, torch.float32))
        dist.barrier()
        return said
    link._receive_message(0)
    dist.barrier()
    return None


def test_a_receiver_that_stands_still_ends_the_senders_wait_at_the_timeout(reference):
    said, _ = run_ranks(2, stand_still, None, 2.0)
    assert said.startswith(WeightLinkError.__name__) and "nccl_timeout" in said


class Sink(RolloutEngine):
    """Looks at every bucket and keeps nothing: all memory it costs is the line's."""

    weights_dtype, is_asleep = torch.float32, False

    def update_weights(self, version, buckets):
        sums = {}
        for bucket in buckets:
            sums |= {name: checksum(tensor) for name, tensor in bucket}
            del bucket
        self.version = version
        return Receipt(version, sums)

    def _generate(self, requests):
        return []

    def sleep(self, level=1):
        pass

    def wake(self, tags=()):
        pass


MIB = 1 << 20


def peak_growth(count, tensor_MiB, bucket_MiB):
    """MiB that this process grew by at most during a transfer of ``count`` tensors that it has already."""
    link = connected()
    have = torch.ones(count, tensor_MiB * MIB // 4) if link.rank == 0 else []
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak counts from here
    before = memory("VmRSS")
    if link.rank == 0:
        link.send(((f"w{i}", tensor) for i, tensor in enumerate(have)), 1, bucket_MiB * MIB, torch.float32)
    else:
        link.receive(Sink())
    return memory("VmHWM") - before


def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(f"{field}:")) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the peak is read from /proc")
def test_a_transfer_costs_two_buckets_on_each_side_whatever_is_sent():
    sender, receiver = run_ranks(2, peak_growth, 40, 8, 32)  # 320 MiB in all
    assert sender < 2 * 32 + 16 and receiver < 2 * 32 + 16  # one travels, one is laid out or loaded; some slack


def test_buckets_hold_every_tensor_once_and_stay_under_their_size():
    named = [(str(i), torch.arange(size, dtype=torch.float32)) for i, size in enumerate([10, 20, 300, 1, 1, 50, 60])]
    named.insert(3, ("whole", torch.arange(7)))
    named.append(("scalar", torch.tensor(3.0)))
    found, sizes = {}, []
    for layout, values in packed(named, 640):
        sizes.append(values.nbytes)
        for name, shape, first in layout["tensors"]:
            found[name] = values[first : first + torch.Size(shape).numel()].view(shape).clone()
    assert list(found) == [name for name, _ in named]
    assert all(torch.equal(found[name], tensor) for name, tensor in named)
    assert max(sizes) == 1200 and all(size <= 640 for size in sizes if size != 1200)


class LostPeers:
    """A process group as NCCL's is when a peer died: ``wait`` returns at once, and the work is never complete."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        self.options, self.aborted = options, False

    def broadcast(self, values, root):
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: False)

    def abort(self):
        self.aborted = True


def test_a_receiver_lost_in_a_broadcast_over_nccl_ends_the_transfer_in_time(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", LostPeers, raising=False)
    link = WeightLink(open_store("127.0.0.1", 5.0), 0, 1, "cuda", timeout_s=0.2)
    with pytest.raises(WeightLinkError, match="did not end within 0.2 s.*nccl_timeout"):
        link.send([("weight", torch.ones(4))], 1, 1 << 20, torch.float32)
    assert link._data_group.aborted
    assert link._data_group.options._timeout.total_seconds() > 0.2, "or torch's watchdog would end the process first"
    with pytest.raises(WeightLinkError, match="is closed: a broadcast of weights did not end"):
        link.send([("weight", torch.ones(4))], 2, 1 << 20, torch.float32)
