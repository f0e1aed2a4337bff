"""The order in which a loader draws rows: sequential, shuffled anew each epoch, or the user's own.

Knows indices only. A sampler states its position so that a resumed run draws what an uninterrupted one would have.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler


class AbstractSampler(Sampler[int]):
    """Base of samplers named by ``data.sampler.{class_path,class_name}``.

    A sampler whose order changes from epoch to epoch should offer ``state_dict``/``load_state_dict``: they are asked
    at the start of an epoch, and on resume the epoch is drawn again from that state up to the saved position.

    Args:
        data_source: the dataset.
        data_config: the ``data`` section of the config.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]):
        pass


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that hears about every finished batch and may change its order. Needs ``dataloader_num_workers=0``.

    Its ``state_dict``, if it has one, is asked when a checkpoint is written and must hold the position inside the
    epoch too: iterating after ``load_state_dict`` continues from there.
    """

    @abstractmethod
    def update(self, batch: Any) -> None:
        """Learn from a finished batch (DataProto with rewards and advantages)."""


class ShuffleSampler(Sampler[int]):
    """Every row once per epoch in an order that depends on (seed, epoch) alone, not on how many draws came before."""

    def __init__(self, data_source: Sized, seed: int):
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        state = int(np.random.SeedSequence([abs(self.seed), int(self.seed < 0), self.epoch]).generate_state(1)[0])
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(state)).tolist()
        self.epoch += 1
        return iter(order)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.epoch, self.seed = state["epoch"], state["seed"]


class SkippingBatchSampler(BatchSampler):
    """Groups a sampler's rows into batches, and leaves out the first ``skip_rows`` of the next epoch, once."""

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
