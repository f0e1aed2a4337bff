"""How the first rank of an engine tells the others what to do next, over a process group of their own.

A step without news costs one broadcast of eight bytes.
"""

from __future__ import annotations

import pickle

import torch
import torch.distributed as dist

from verl.workers.rollout.engine_loop import Commands


class GroupRelay:
    """Carries commands from the first rank of ``ranks`` to the others.

    Args:
        ranks: global ranks that share an engine.
        group: a gloo group of theirs that nothing else uses.
    """

    def __init__(self, ranks: list[int], group: dist.ProcessGroup):
        self._source, self._group = ranks[0], group
        self._version: int | None = None

    def send(self, commands: Commands) -> None:
        has_news = bool(commands) or commands.version != self._version
        self._version = commands.version
        content = pickle.dumps(commands) if has_news else b""
        self._broadcast(torch.tensor([len(content)]))
        if content:
            self._broadcast(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def receive(self) -> Commands:
        size = self._broadcast(torch.zeros(1, dtype=torch.int64))
        if not int(size):
            return Commands(self._version)
        content = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        commands = pickle.loads(content.numpy().tobytes())
        self._version = commands.version
        return commands

    def _broadcast(self, content: torch.Tensor) -> torch.Tensor:
        dist.broadcast(content, src=self._source, group=self._group)
        return content


def make_relay(size: int) -> GroupRelay | None:
    """The relay of this rank's engine, where ``size`` neighbouring ranks share one; None for engines of one rank.

    Collective over all ranks of the process group.
    """
    if size == 1:
        return None
    relay = None
    for first in range(0, dist.get_world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo")
        if dist.get_rank() in ranks:
            relay = GroupRelay(ranks, group)
    return relay
