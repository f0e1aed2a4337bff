"""Small messages from workers to the driver while a call runs, on Ray and on the local controller alike.

A call returns once, when all of it is done; what the driver can use before that goes here. Nothing waits for a message:
one that is lost, on a connection that broke, leaves the driver with what the call returns.
"""

from __future__ import annotations

import logging
import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from verl.sandbox.messages import BadFrame, FrameReader, encode, framed

logger = logging.getLogger(__name__)

_SEND_S = 5.0
"""Seconds a worker tries to connect or to send before it gives up."""

_HERE: dict[str, Mailbox] = {}
"""Mailboxes of this process, by their token."""


class Mailbox:
    """Receives the messages of workers in a thread.

    Args:
        host: the address of this machine that the workers reach.
        take: gets the messages that have arrived, plain values, some at a time; in the thread.

    Attributes:
        address: for `sender`; it travels as plain values.
    """

    def __init__(self, host: str, take: Callable[[Sequence[Any]], None]):
        self.take, self._pid = take, os.getpid()
        self._listener = socket.create_server((host, 0))
        token = secrets.token_hex(16)  # other users and machines may reach the port
        self.address = [host, self._listener.getsockname()[1], token]
        self._selector = selectors.DefaultSelector()
        self._ends, self._wake = socket.socketpair()
        for channel in (self._listener, self._ends):
            channel.setblocking(False)
            self._selector.register(channel, selectors.EVENT_READ)
        _HERE[token] = self
        self._thread = threading.Thread(target=self._run, name="verl-mailbox", daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that receives, and no fork of it."""
        return self._pid == os.getpid()

    def close(self) -> None:
        """Stop listening; may be called twice."""
        if _HERE.pop(self.address[2], None) is not None and self.is_here:
            with suppress(OSError):
                self._wake.send(b".")
            self._thread.join(5.0)

    def _run(self) -> None:
        readers: dict[socket.socket, FrameReader] = {}
        welcome: set[socket.socket] = set()
        try:
            while True:
                for key, _ in self._selector.select():
                    channel: Any = key.fileobj
                    if channel is self._ends:
                        return
                    if channel is self._listener:
                        with suppress(OSError):
                            accepted, _ = self._listener.accept()
                            accepted.setblocking(False)
                            readers[accepted] = FrameReader()
                            self._selector.register(accepted, selectors.EVENT_READ)
                        continue
                    try:
                        messages = self._read(channel, readers[channel], welcome)
                    except (OSError, EOFError, BadFrame):
                        self._selector.unregister(channel)
                        readers.pop(channel)
                        welcome.discard(channel)
                        channel.close()
                        continue
                    if messages:
                        self._hand_on(messages)
        finally:
            for channel in (*readers, self._listener, self._ends, self._wake):
                channel.close()
            self._selector.close()

    def _read(self, channel: socket.socket, reader: FrameReader, welcome: set[socket.socket]) -> list[Any]:
        """The messages of a connection since the last call, whose first was the token."""
        data = channel.recv(1 << 18)
        if not data:
            raise EOFError
        messages = reader.feed(data)
        if messages and channel not in welcome:
            if not secrets.compare_digest(str(messages.pop(0)), self.address[2]):
                raise BadFrame("not a worker of this run")
            welcome.add(channel)
        return messages

    def _hand_on(self, messages: Sequence[Any]) -> None:
        try:
            self.take(messages)
        except Exception:  # nothing waits for a message; the thread goes on with the next
            logger.exception("messages of workers were not read")


@contextmanager
def sender(address: Sequence[Any] | None) -> Iterator[Callable[[Any], None] | None]:
    """Within the block a function that sends a message to a mailbox; None without an address.

    A failure to connect or to send is logged once, and ends the sending.
    """
    if address is None:
        yield None
        return
    host, port, token = address
    here = _HERE.get(token)
    if here is not None and here.is_here:
        yield lambda message: here._hand_on([message])
        return
    channel: socket.socket | None = None
    try:
        channel = socket.create_connection((host, port), timeout=_SEND_S)
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.sendall(framed(encode(token)))
    except OSError as error:
        logger.warning("the driver at %s:%s takes no messages (%s): it gets the results at the end", host, port, error)
        yield None
        return

    def send(message: Any) -> None:
        nonlocal channel
        if channel is None:
            return
        try:
            channel.sendall(framed(encode(message)))
        except OSError as error:
            logger.warning("messages to the driver end (%s): it gets the results at the end", error)
            channel.close()
            channel = None

    try:
        yield send
    finally:
        if channel is not None:
            with suppress(OSError):  # until the driver has read all of it
                channel.shutdown(socket.SHUT_WR)
                channel.recv(1)
            channel.close()
