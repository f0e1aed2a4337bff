"""Groups of samples that are drawn together, and when there are enough of them.

Pure asyncio over coroutines: no engine, no tokens. A group is the samples of one prompt; a batch is made of whole
groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

Group = Sequence[Callable[[], Coroutine[Any, Any, bool]]]
"""The samples of one prompt; each says at its end whether it is complete (True) or was stopped (False)."""


@dataclass
class Race:
    """Who came in, and when."""

    taken: list[int] = field(default_factory=list)
    """Numbers of the groups of the batch, in the order in which they were complete."""
    spare: list[int] = field(default_factory=list)
    """Complete too, but the batch was full."""

    def place(self, number: int, count: int, required: Collection[int]) -> None:
        """Put a complete group into the batch of ``count``, where room is kept for the required ones."""
        is_needed = number in required or not self.is_full_but_for(required, count)
        (self.taken if is_needed else self.spare).append(number)

    def is_full_but_for(self, required: Collection[int], count: int) -> bool:
        """Whether only required groups are still missing."""
        return sum(number not in required for number in self.taken) == count - len(required)


async def first_groups(
    groups: Sequence[Group],
    count: int,
    stop: Callable[[Sequence[int]], Awaitable[None]],
    *,
    required: Collection[int] = (),
    keep_going: bool = False,
) -> Race:
    """Run all groups at once until ``count`` are complete, the required ones among them, and stop the others.

    The batch is the required groups and those of the others that were complete first. Of groups that are complete at
    the same wake-up of the event loop the one of the lower number is first.

    Args:
        groups: the samples of each, started in this order.
        count: groups of the batch; at most as many are required.
        stop: told numbers of groups, makes their samples end soon.
        required: groups to wait for.
        keep_going: when only required groups are missing, let the others run on until those are complete.

    Raises:
        whatever a sample raises, once all others are cancelled.
    """
    required = frozenset(required)
    if not len(required) <= count <= len(groups):
        raise ValueError(
            f"first_groups: {count} of {len(groups)} groups are asked for and {len(required)} are required. "
            "Ask for as many as there are or fewer, and require no more than you ask for."
        )
    samples = [[asyncio.ensure_future(start()) for start in group] for group in groups]
    running = {asyncio.gather(*group): number for number, group in enumerate(samples)}
    race, stopped = Race(), frozenset()
    try:
        while len(race.taken) < count:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=running.__getitem__):
                number = running.pop(future)
                if all(future.result()):
                    race.place(number, count, required)
            if not keep_going and not stopped and race.is_full_but_for(required, count):
                stopped = frozenset(running.values()) - required
                await stop(sorted(stopped))
        await stop(sorted(set(running.values()) - stopped))
        late = [(number, all(await future)) for future, number in running.items()]
        race.spare.extend(number for number, is_complete in sorted(late) if is_complete)
        return race
    except BaseException:
        left = [sample for group in samples for sample in group]
        for sample in left:
            sample.cancel()
        await asyncio.gather(*left, *running, return_exceptions=True)
        raise
