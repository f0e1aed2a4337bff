"""Orders of data: file order, shuffled each epoch, mixed by shares, or user-defined.

Row indices only. A sampler saves its position so that a resumed run gets the same rows as an uninterrupted one.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler


class AbstractSampler(Sampler[int]):
    """Base of samplers named by ``data.sampler.{class_path,class_name}``.

    A sampler whose order changes from epoch to epoch should have ``state_dict``/``load_state_dict``: the state is
    saved at the start of an epoch, and a resumed run iterates again from that state up to the saved position.

    Args:
        data_source: the dataset.
        data_config: the ``data`` section of the config.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]):
        pass


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that is updated with every finished batch and may change its order. Needs ``dataloader_num_workers=0``.

    Its ``state_dict``, if it has one, is called when a checkpoint is written and must include the position inside the
    epoch: iterating after ``load_state_dict`` continues from there.
    """

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Learn from a finished batch (DataProto with rewards and advantages)."""


class FileOrderSampler(Sampler[int]):
    """Every row once per epoch, in the order of the files.

    ``rows_of_epoch`` limits the next epoch only. A dataset that grows in the middle of an epoch is used as a whole
    from the next epoch on.
    """

    def __init__(self, data_source: Sized):
        self.data_source = data_source
        self.rows_of_epoch: int | None = None

    def __len__(self) -> int:
        return len(self.data_source) if self.rows_of_epoch is None else self.rows_of_epoch

    def __iter__(self) -> Iterator[int]:
        rows, self.rows_of_epoch = len(self), None
        return iter(self.order(rows))

    def order(self, rows: int) -> Sequence[int]:
        """Return the rows of one epoch."""
        return range(rows)


class ShuffleSampler(FileOrderSampler):
    """Every row once per epoch, in an order that depends on (seed, epoch) alone."""

    def __init__(self, data_source: Sized, seed: int):
        super().__init__(data_source)
        self.seed = seed
        self.epoch = 0

    def order(self, rows: int) -> Sequence[int]:
        order = _permutation(rows, self.seed, self.epoch)
        self.epoch += 1
        return order

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.seed = state["epoch"], state["seed"]


class MixtureSampler(Sampler[int]):
    """Rows of several sources, mixed by shares.

    Among the first k rows there are k * share of each source, to within one per source: the source farthest behind
    its share comes next. Within a source every row is used once before any is repeated, in a new order each time. The
    length of an epoch is the total number of rows of all sources.

    Args:
        rows: source -> its rows.
        shares: source -> its share; they add up to 1.
        seed: of the orders within sources; None: the order of the files.
    """

    def __init__(self, rows: Mapping[str, Sequence[int]], shares: Mapping[str, float], seed: int | None):
        self.names = sorted(name for name in rows if shares[name] > 0)
        self.rows = [np.asarray(rows[name], dtype=np.int64) for name in self.names]
        self.shares = [float(shares[name]) for name in self.names]
        self.seed = seed
        self.taken = [0] * len(self.names)
        self.deficit = [0.0] * len(self.names)

    def __len__(self) -> int:
        return sum(map(len, self.rows))

    def __iter__(self) -> Iterator[int]:
        order = []
        queues = [self._rows_from(source, taken) for source, taken in enumerate(self.taken)]
        for _ in range(len(self)):
            for source, share in enumerate(self.shares):
                self.deficit[source] += share
            source = max(range(len(self.deficit)), key=self.deficit.__getitem__)
            order.append(next(queues[source]))
            self.deficit[source] -= 1
            self.taken[source] += 1
        return iter(order)

    def _rows_from(self, source: int, taken: int) -> Iterator[int]:
        """Yield the rows of a source endlessly, skipping the first ``taken``."""
        rows = self.rows[source]
        turn, start = divmod(taken, len(rows))
        while True:
            order = range(len(rows)) if self.seed is None else _permutation(len(rows), self.seed, turn, source)
            for place in islice(order, start, None):
                yield int(rows[place])
            turn, start = turn + 1, 0

    def state_dict(self) -> dict[str, Any]:
        # the keys "drawn" and "owed" are those of saved checkpoints
        return {"sources": self.names, "drawn": list(self.taken), "owed": list(self.deficit), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was saved; the shares may have changed, the sources may not."""
        if state["sources"] != self.names:
            raise ValueError(
                f"The checkpoint's data.mixture had the sources {', '.join(state['sources'])} and this one has "
                f"{', '.join(self.names)}: its position has no meaning here. Use those sources, or delete data.pt from "
                "the checkpoint to start the data from its beginning."
            )
        self.taken, self.deficit, self.seed = list(state["drawn"]), list(state["owed"]), state["seed"]


def _permutation(rows: int, seed: int, *turn: int) -> list[int]:
    state = int(np.random.SeedSequence([abs(seed), int(seed < 0), *turn]).generate_state(1)[0])
    return torch.randperm(rows, generator=torch.Generator().manual_seed(state)).tolist()


class SkippingBatchSampler(BatchSampler):
    """Batches of a sampler's rows, without the first ``skip_rows`` of the next epoch."""

    def __init__(self, sampler: Sampler[int], batch_size: int, drop_last: bool):
        super().__init__(sampler, batch_size, drop_last)
        self.skip_rows = 0

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        skip, self.skip_rows = self.skip_rows, 0
        next(islice(rows, skip, skip), None)
        while batch := list(islice(rows, self.batch_size)):
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch
