"""Python objects between two processes of one node: small ones in a message, arrays through shared memory.

A message is pickled with protocol 5, which leaves the bytes of its arrays out. If stream and arrays are large together,
they go into a segment of shared memory, of which the receiver gets a descriptor once. A segment is used again when the
receiver has released all arrays in it. Segments have no name, so that none outlives its processes.

The receiver maps a segment privately: its arrays start as the shared pages, and writes to them stay private.
"""

import mmap
import os
import pickle
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from verl.telemetry.flight_recorder import anonymous_file

INLINE_BYTES = 32 * 1024
"""Up to this size everything goes into the message: below the buffer of a socket, so that a send does not wait."""
_SMALLEST_SEGMENT = 1 << 20
_ALIGNMENT = 64
_LENGTH = struct.Struct("=Q")


class SharedMemorySegment:
    """Anonymous shared memory of one sender."""

    def __init__(self, number: int, capacity: int):
        self.number, self.capacity = number, capacity
        self.holders = 0
        self.fd = anonymous_file()
        os.ftruncate(self.fd, capacity)
        self.memory = mmap.mmap(self.fd, capacity)

    def close(self) -> None:
        self.memory.close()
        os.close(self.fd)


class PackedMessage(NamedTuple):
    """A packed object, ready for any number of receivers."""

    sizes: list[int]
    """Bytes of the pickle stream and of each array."""
    inline: bytearray | None
    segment: SharedMemorySegment | None

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class SharedMemoryPool:
    """The segments of one sender, free or in use."""

    def __init__(self, dumps: Callable[..., bytes] = pickle.dumps):
        self._dumps = dumps
        self._segments: dict[int, SharedMemorySegment] = {}
        self._next = 0

    def pack(self, content: Any) -> PackedMessage:
        """Pickle ``content`` and copy its arrays once."""
        arrays: list[pickle.PickleBuffer] = []
        stream = self._dumps(content, protocol=5, buffer_callback=arrays.append)
        parts = [memoryview(stream), *(array.raw() for array in arrays)]
        sizes = [part.nbytes for part in parts]
        size = _spans(sizes)[-1][1]
        # it counts as free until `MessageEndpoint.address` has a receiver for it: address before the next pack
        segment = None if size <= INLINE_BYTES else self._take(size)
        inline = bytearray(size) if segment is None else None
        with memoryview(inline if segment is None else segment.memory) as memory:
            for part, (first, last) in zip(parts, _spans(sizes), strict=True):
                memory[first:last] = part
        return PackedMessage(sizes, inline, segment)

    def release(self, number: int) -> None:
        """Subtract one from the receivers that hold a segment; without any it is free."""
        self._segments[number].holders -= 1

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()

    def knows(self, number: int) -> bool:
        return number in self._segments

    def _take(self, size: int) -> SharedMemorySegment:
        """The smallest free segment that holds ``size`` bytes; or a new one, in place of the free ones too small."""
        free = [segment for segment in self._segments.values() if not segment.holders]
        fitting = [segment for segment in free if segment.capacity >= size]
        if fitting:
            return min(fitting, key=lambda segment: segment.capacity)
        # batches grow over a run: without this the segments outgrown would stay for good
        for segment in free:
            self._segments.pop(segment.number).close()
        self._next += 1
        capacity = max(_SMALLEST_SEGMENT, 1 << (size - 1).bit_length())  # pages not written cost nothing
        self._segments[self._next] = segment = SharedMemorySegment(self._next, capacity)
        return segment


class ArgumentMessages:
    """Packs the arguments of one call for several ranks; those that get the same objects share one message."""

    def __init__(self, memory_pool: SharedMemoryPool, call: str):
        self._memory_pool, self._call = memory_pool, call
        self._packed: dict[tuple, PackedMessage] = {}
        self.nbytes = 0
        """Bytes of all messages packed so far, each once."""

    def pack(self, args: tuple, kwargs: dict) -> PackedMessage:
        # by identity, while the requests of the call hold them: an id may be given again afterwards
        same = (*map(id, args), *((name, id(value)) for name, value in kwargs.items()))
        if same not in self._packed:
            try:
                self._packed[same] = self._memory_pool.pack((args, kwargs))
            except Exception as error:
                raise TypeError(
                    f"{self._call}: its arguments cannot be sent to another process: {error}. Functions and classes "
                    "must be importable by name: define them in a module, not inside a function."
                ) from error
            self.nbytes += self._packed[same].nbytes
        return self._packed[same]


class WireMessage(NamedTuple):
    """A packed message for one receiver, small enough for any transport, with what became of earlier segments."""

    sizes: list[int]
    inline: bytearray | None
    number: int | None
    """Segment the content is in; None if it is inline."""
    fd: int | None
    """Descriptor of that segment in the sender."""
    pid: int
    """The sender."""
    released: list[int]
    """Segments of the receiver in which the sender holds no array any longer (one entry for each message)."""
    closed: list[int]
    """Segments that the sender has closed."""

    @property
    def nbytes(self) -> int:
        """Bytes of its content."""
        return sum(self.sizes)


class MessageEndpoint:
    """One of two processes that exchange messages, with the segments that each has opened."""

    def __init__(self, memory_pool: SharedMemoryPool | None = None):
        self.memory_pool = memory_pool or SharedMemoryPool()
        self._sent: set[int] = set()  # segments of ours the other end knows
        self._theirs: dict[int, int] = {}  # segments of the other end -> our descriptor
        self._released: deque[int] = deque()  # segments of the other end without an array here

    def address(self, packed: PackedMessage) -> WireMessage:
        """Return a packed message as it is sent to this receiver, which holds its segment from now on."""
        closed = [number for number in self._sent if not self.memory_pool.knows(number)]
        # one by one: a finalizer may append meanwhile, from any thread
        released = [self._released.popleft() for _ in range(len(self._released))]
        self._sent.difference_update(closed)
        number = fd = None
        if packed.segment is not None:
            packed.segment.holders += 1
            number, fd = packed.segment.number, packed.segment.fd
            self._sent.add(number)
        return WireMessage(packed.sizes, packed.inline, number, fd, os.getpid(), released, closed)

    def open(self, wire_message: WireMessage, fd: int | None = None) -> Callable[[], Any]:
        """Record released and closed segments; returns a function that unpickles the content, to be called once.

        ``fd``: a descriptor of the segment, received with the message. Without it a new segment is opened
        through /proc, which the same user may on Linux.
        """
        # at once, and not with the content: the counts must hold even if that cannot be unpickled
        for mine in wire_message.released:
            self.memory_pool.release(mine)
        for old in wire_message.closed:
            os.close(self._theirs.pop(old))
        if wire_message.number is None:
            return partial(_unpack, wire_message.sizes, wire_message.inline)
        if wire_message.number not in self._theirs:
            self._theirs[wire_message.number] = (
                os.open(f"/proc/{wire_message.pid}/fd/{wire_message.fd}", os.O_RDONLY) if fd is None else fd
            )
        return partial(self._map, wire_message.number, wire_message.sizes)

    def close(self) -> None:
        for fd in self._theirs.values():
            os.close(fd)
        self._theirs.clear()

    def _map(self, number: int, sizes: list[int]) -> Any:
        """Unpickle over a private mapping of a segment; the last array to be freed releases the segment."""
        # private: a worker may write into its arguments while other ranks read the same pages
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        memory = mmap.mmap(self._theirs[number], _spans(sizes)[-1][1], flags=flags, prot=access)
        # every array made below holds the mapping
        weakref.finalize(memory, self._released.append, number).atexit = False
        return _unpack(sizes, memory)


class Channel:
    """One end of a socket between two processes. Not for use by several threads at once."""

    def __init__(self, connection: socket.socket, memory_pool: SharedMemoryPool | None = None):
        self._socket = connection
        self._endpoint = MessageEndpoint(memory_pool)
        self._passed: set[int] = set()  # segments whose descriptor went over the socket
        self.last_received = 0
        """Bytes of the content of the message that `receive` returned last."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        self._endpoint.close()

    def send(self, head: Any, content: Any) -> None:
        """Send a small ``head`` and a ``content`` of any size, an object or a `PackedMessage`.

        Raises:
            OSError: the other end is closed.
            pickle.PicklingError, TypeError, AttributeError: the content cannot be pickled; nothing was sent.
        """
        packed = content if isinstance(content, PackedMessage) else self._endpoint.memory_pool.pack(content)
        wire_message = self._endpoint.address(packed)
        message = pickle.dumps((head, tuple(wire_message)), protocol=5)
        self._passed.difference_update(wire_message.closed)
        # a descriptor crosses once: each copy received would have to be closed
        is_new = wire_message.number is not None and wire_message.number not in self._passed
        # with the length, of a fixed size: the receiver asks for descriptors in that read alone
        socket.send_fds(self._socket, [_LENGTH.pack(len(message))], [wire_message.fd] if is_new else [])
        self._socket.sendall(message)
        if is_new:
            self._passed.add(wire_message.number)

    def receive(self) -> tuple[Any, Callable[[], Any]]:
        """Wait for a message and return its head, and a function that unpickles its content, to be called once.

        Raises:
            EOFError: the other end is closed.
        """
        try:
            prefix, fds, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1, socket.MSG_WAITALL)
            message = self._read(_LENGTH.unpack(prefix)[0]) if len(prefix) == _LENGTH.size else b""
        except ConnectionError:
            message = b""
        if not message:
            raise EOFError("the other end of the channel is closed")
        head, content = pickle.loads(message)
        wire_message = WireMessage(*content)
        self.last_received = wire_message.nbytes
        return head, self._endpoint.open(wire_message, fds[0] if fds else None)

    def _read(self, size: int) -> bytes:
        message = bytearray()
        while len(message) < size:
            piece = self._socket.recv(size - len(message))
            if not piece:
                return b""
            message += piece
        return bytes(message)


def _unpack(sizes: list[int], memory: "bytearray | mmap.mmap") -> Any:
    whole = memoryview(memory)
    stream, *arrays = [whole[first:last] for first, last in _spans(sizes)]
    return pickle.loads(stream, buffers=arrays)


def _spans(sizes: list[int]) -> list[tuple[int, int]]:
    """Return (first, last) of each part in memory, aligned for vectorised code."""
    spans, first = [], 0
    for size in sizes:
        spans.append((first, first + size))
        first += -(-size // _ALIGNMENT) * _ALIGNMENT
    return spans
