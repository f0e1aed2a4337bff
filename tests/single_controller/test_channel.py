"""Objects between processes: what arrives, what is shared, what memory is used again, what is left behind."""

import gc
import os
import socket

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.channel import Channel, MessageEndpoint, SharedMemoryPool


@pytest.fixture
def ends():
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def through(ends, content):
    ends[0].send("head", content)
    head, open_content = ends[1].receive()
    assert head == "head"
    return open_content()


BIG = np.arange(100_000)


@pytest.mark.parametrize("content", [None, {"a": [1, "é"]}, b"x" * 100_000, "x" * 500_000, list(range(50_000))])
def test_plain_objects_arrive_whatever_their_size(ends, content):
    assert through(ends, content) == content


@pytest.mark.parametrize("array", [BIG, BIG[:3], np.zeros((0, 4)), np.asfortranarray(BIG.reshape(10, -1)), BIG[::7]])
def test_arrays_arrive_equal(ends, array):
    received = through(ends, (array, "tail"))[0]
    assert received.dtype == array.dtype and np.array_equal(received, array)


def test_a_batch_arrives_with_its_packed_columns(ends):
    mask = (torch.rand(64, 512) > 0.5).long()
    data = DataProto.from_dict(
        {"attention_mask": mask, "v": torch.randn(64, 99, dtype=torch.bfloat16)}, {"o": np.array(["a"] * 64)}
    )
    received = through(ends, data)
    assert torch.equal(received.batch["attention_mask"], mask) and torch.equal(received.batch["v"], data.batch["v"])


def test_what_the_receiver_writes_stays_with_the_receiver(ends):
    first = through(ends, BIG)
    first[:] = -1
    ends[0].send("again", BIG)
    assert np.array_equal(ends[1].receive()[1](), BIG) and (first == -1).all()


def test_memory_is_not_used_again_while_the_receiver_looks_into_it(ends):
    first = through(ends, BIG)
    second = through(ends, BIG + 1)
    assert np.array_equal(first, BIG) and np.array_equal(second, BIG + 1)


def segments_of(memory_pool: SharedMemoryPool) -> int:
    return len(memory_pool._segments)


def test_memory_is_used_again_once_the_receiver_let_go():
    memory_pool = SharedMemoryPool()
    ours, theirs = (Channel(end, memory_pool if i == 0 else None) for i, end in enumerate(socket.socketpair()))
    for _ in range(5):
        through((ours, theirs), BIG)
        gc.collect()
        theirs.send("answer", "ok")  # takes the news along
        ours.receive()
    assert segments_of(memory_pool) == 1
    held = [through((ours, theirs), BIG) for _ in range(3)]
    assert segments_of(memory_pool) == 3 and len(held) == 3
    held.clear()
    theirs.send("answer", "ok")
    ours.receive()
    through((ours, theirs), np.zeros(10_000_000))  # too large for the free ones: these go
    assert segments_of(memory_pool) == 1
    ours.close()
    theirs.close()


def test_one_parcel_can_go_to_several_receivers():
    memory_pool, pairs = SharedMemoryPool(), [socket.socketpair() for _ in range(2)]
    packed = memory_pool.pack(BIG)
    ours = [Channel(pair[0], memory_pool) for pair in pairs]
    theirs = [Channel(pair[1]) for pair in pairs]
    for sender in ours:
        sender.send("head", packed)
    assert all(np.array_equal(receiver.receive()[1](), BIG) for receiver in theirs)
    assert segments_of(memory_pool) == 1
    for channel in ours + theirs:
        channel.close()


def test_a_message_for_a_closed_end_is_an_error(ends):
    ends[1].close()
    with pytest.raises(OSError):
        ends[0].send("head", BIG)


def test_a_closed_end_is_the_end_of_file(ends):
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()


def test_segments_have_no_name_in_the_file_system(ends):
    before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    received = through(ends, BIG)
    after = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    assert after == before and len(received)


def test_an_endpoint_opens_a_segment_of_another_process_by_its_number():
    memory_pool = SharedMemoryPool()
    wire_message = MessageEndpoint(memory_pool).address(memory_pool.pack(BIG))
    reader = MessageEndpoint()
    received = reader.open(wire_message)()
    assert wire_message.number is not None and np.array_equal(received, BIG)
    reader.close()
