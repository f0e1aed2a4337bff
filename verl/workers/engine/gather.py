"""Whole weights of their slices on all ranks, each gathered while the one before it is used.

Knows collectives; no engine, no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

Wait: TypeAlias = Callable[[], Tensor]
"""Waits for a collective that has begun; returns the weight."""

# the older name is deprecated where there is the newer
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def one_ahead(weights: Iterable[tuple[str, Callable[[], Wait]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights by name; all ranks iterate together.

    Args:
        weights: with each name what begins to gather the weight, and returns what waits for it.
    """
    pending: tuple[str, Wait] | None = None
    try:
        for name, start in weights:
            # two under way at most: more of gloo at once have corrupted the heap
            before, pending = pending, (name, start())
            if before is not None:
                yield before[0], before[1]()
            del before  # its memory, before the next takes some
        if pending is not None:
            (name, wait), pending = pending, None
            yield name, wait()
    finally:
        if pending is not None:  # the caller gave up
            pending[1]()


def start_gathering(part: Tensor, group: dist.ProcessGroup | None) -> Wait:
    """Begin to join the contiguous parts of all ranks of ``group``, which have one shape, along their first axis."""
    whole = part.new_empty(len(part) * dist.get_world_size(group), *part.shape[1:])
    return partial(_finished, _all_gather(whole, part, group=group, async_op=True), whole, part)


def start_adding(tensor: Tensor) -> Wait:
    """Begin to add up ``tensor`` of all ranks, in its own memory."""
    return partial(_finished, dist.all_reduce(tensor, async_op=True), tensor, tensor)


def _finished(work: dist.Work, whole: Tensor, part: Tensor) -> Tensor:
    """Wait for ``whole``; ``part``, which the collective reads, must live until then."""
    work.wait()
    return whole
