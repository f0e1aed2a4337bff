"""Messages between a process and its sandbox, and the description of a function that they carry.

A message is a length, then as many bytes.

To the sandbox goes pickle, from it comes msgpack: what runs there is not trusted, and unpickling would run its code
here.
"""

import functools
import inspect
import logging
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgpack

from verl.sandbox.outcomes import plain_number, shown

logger = logging.getLogger(__name__)

LONGEST = 32 * 1024 * 1024
"""Bytes of one message from the sandbox."""

_HEAD = struct.Struct("=I")


_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"


def start_child(module: str, env: dict[str, str], **pipes: Any) -> tuple[subprocess.Popen, socket.socket]:
    """Start ``main()`` of a module in a new interpreter, with the number of its socket as the argument.

    Args:
        pipes: ``stdout`` and ``stderr`` of the child.

    Returns:
        the process, and the other end of its socket.
    """
    channel, theirs = socket.socketpair()
    root = str(Path(__file__).parents[2])
    line = [sys.executable, "-c", _START.format(module), root, str(theirs.fileno())]
    # closes our copy of the child's end: while it is open no read here sees that the child is gone
    with theirs:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=env, **pipes), channel


def without_keys(variables: Mapping[str, str], visible: Sequence[str] = ()) -> dict[str, str]:
    """Return environment variables without those whose names are of keys, tokens and passwords.

    Args:
        visible: names, or patterns such as ``OPENAI_*``, of those that stay.
    """
    from verl.telemetry.run_record import is_secret  # not at the top: children import this file, and start sooner

    hidden = [name for name in variables if is_secret(name) and not any(fnmatchcase(name, one) for one in visible)]
    if hidden:
        _say_hidden(tuple(sorted(hidden)))
    return {name: value for name, value in variables.items() if name not in hidden}


@functools.cache
def _say_hidden(names: tuple[str, ...]) -> None:
    logger.info("Reward functions do not see %s (reward_model.sandbox.visible_keys).", ", ".join(names))


class BadFrame(ValueError):
    """The other side broke the protocol."""


def framed(payload: bytes) -> bytes:
    return _HEAD.pack(len(payload)) + payload


def receive(channel: socket.socket, seconds: float | None = None) -> bytes | None:
    """Return the next message; None: the other side has closed.

    Raises:
        TimeoutError: it was not there after ``seconds``.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    head = _receive_exactly(channel, _HEAD.size, deadline)
    return None if head is None else _receive_exactly(channel, _HEAD.unpack(head)[0], deadline)


def _receive_exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        if deadline is not None:
            # never 0, which would make the socket non-blocking
            channel.settimeout(max(1e-3, deadline - time.monotonic()))
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
        """Return the messages that are complete by now.

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
    """Return ``message`` as msgpack; a value of a type it lacks as the nearest it has, or as its ``repr``."""
    # surrogatepass: text decoded from broken bytes may hold half characters, which UTF-8 refuses
    return msgpack.packb(_plain(message, 0), default=shown, strict_types=False, unicode_errors="surrogatepass")


def decode(payload: bytes) -> Any:
    """Return the object that `encode` wrote.

    Raises:
        BadFrame: it is no msgpack.
    """
    try:
        # keys may be numbers: a reward function names its columns as it likes
        return msgpack.unpackb(payload, strict_map_key=False, unicode_errors="surrogatepass")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadFrame(str(error)) from None


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, (bool, float, str, bytes)):
        return value
    if isinstance(value, int):
        # msgpack's integers have 64 bits
        return value if -(2**63) <= value < 2**64 else float(value) if abs(value) < 1e308 else str(value)[:300]
    # a list may hold itself
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


# -- Name and signature of a function, as values of msgpack -----------------------------------------------------------


class _Shown:
    """A default value of which only the text is known."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def describe(function: Callable) -> dict[str, Any]:
    """Return name, parameters (None where it has no signature) and ``is_async`` of a function."""
    parameters: list[list] | None = []
    try:
        for one in inspect.signature(function).parameters.values():
            default = None if one.default is one.empty else repr(one.default)[:100]
            kind = one.annotation if isinstance(one.annotation, str) else inspect.formatannotation(one.annotation)
            parameters.append([one.name, int(one.kind), default, None if one.annotation is one.empty else kind])
    except (TypeError, ValueError):  # builtins may not tell
        parameters = None
    is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
    return {"name": name_of(function), "parameters": parameters, "is_async": is_async}


def signature_of(parameters: list | None) -> inspect.Signature | None:
    """Return the signature that `describe` took apart; None if there was none."""
    if parameters is None:
        return None
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect._ParameterKind(kind),
                default=inspect.Parameter.empty if default is None else _Shown(default),
                annotation=inspect.Parameter.empty if annotation is None else _Shown(annotation),
            )
            for name, kind, default, annotation in parameters
        ]
    )


TOKENIZER = "reward_model_tokenizer"
"""An argument of reward functions: the tokenizer of the reward model."""


def taken_by(signature: inspect.Signature, names: Iterable[str]) -> list[str]:
    """Those of ``names`` that a function takes as keywords."""
    parameters = signature.parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return [name for name in names if takes_any or name in parameters]


def name_of(function: Any) -> str:
    """Return ``compute_score (path/to/file.py:3)``, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "described_name"):
        return function.described_name
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
