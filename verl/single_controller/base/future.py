"""GroupFuture: the DataProtoFuture of a call on a worker group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from verl.protocol import DataProto, DataProtoFuture


@dataclass
class GroupFuture(DataProtoFuture):
    """Waits through its group, so that a worker that fails or dies meanwhile is named."""

    wait_fn: Callable[[list], list] = list
    """Futures of the group -> their outputs."""

    def chunk(self, chunks: int) -> list[GroupFuture]:
        """Chunk i of what will come, for each i; nothing is waited for."""
        return [replace(self, dispatch_fn=partial(_take_chunk, self.dispatch_fn, chunks, i)) for i in range(chunks)]

    def get(self) -> DataProto:
        """Wait for the outputs and join them."""
        data = self.collect_fn(self.wait_fn(self.futures))
        return data if self.dispatch_fn is None else self.dispatch_fn(data)


def _take_chunk(whole: Callable | None, chunks: int, i: int, data: DataProto) -> DataProto:
    return (data if whole is None else whole(data)).chunk(chunks)[i]
