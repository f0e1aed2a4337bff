"""Messages between a process and its sandbox: a length, then as many bytes.

To the sandbox goes pickle, from it comes msgpack: what runs there is not trusted, and unpickling would run its code
here.
"""

import socket
import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from verl.sandbox.outcomes import plain_number, shown

LONGEST = 32 * 1024 * 1024
"""Bytes of one message from the sandbox."""

_HEAD = struct.Struct("=I")


class BadFrame(ValueError):
    """The other side broke the protocol."""


def framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload)) + payload


def receive(channel: socket.socket) -> bytes | None:
    """The next message, waiting for it; None: the other side has closed."""
    head = _receive_exactly(channel, _HEAD.size)
    return None if head is None else _receive_exactly(channel, _HEAD.unpack(head)[0])


def _receive_exactly(channel: socket.socket, size: int) -> bytes | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        got = channel.recv_into(view[filled:])
        if not got:
            return None
        filled += got
    return bytes(buffer)


class FrameReader:
    """Puts messages together from the pieces in which they arrive."""

    def __init__(self):
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """The messages complete by now.

        Raises:
            BadFrame: what arrives is none.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEAD.size:
            size = _HEAD.unpack_from(self._buffer)[0]
            if size > LONGEST:
                raise BadFrame(f"a message of {size} bytes")
            if len(self._buffer) < _HEAD.size + size:
                break
            messages.append(decode(bytes(self._buffer[_HEAD.size : _HEAD.size + size])))
            del self._buffer[: _HEAD.size + size]
        return messages


def encode(message: Any) -> bytes:
    """As msgpack; what it has no form for becomes the nearest it has, or its ``repr``."""
    return msgpack.packb(_plain(message, 0), default=shown, strict_types=False, unicode_errors="surrogatepass")


def decode(payload: bytes) -> Any:
    """
    Raises:
        BadFrame: it is no msgpack.
    """
    try:
        return msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadFrame(str(error)) from None


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else float(value) if abs(value) < 1e308 else str(value)[:300]
    if depth > 50:
        return shown(value)
    if isinstance(value, Mapping):
        return {_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    number = plain_number(value)
    if number is not value:
        return _plain(number, depth + 1)
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), depth + 1)
    return shown(value)


def _key(key: Any) -> Any:
    return key if isinstance(key, (str, int, float, bool)) else str(key)
