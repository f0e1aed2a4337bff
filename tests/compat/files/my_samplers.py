"""Sampler classes of a project, for ``data.sampler``."""

from collections.abc import Sized

import torch
from omegaconf import DictConfig

from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler


class LastFirst(AbstractSampler):
    def __init__(self, data_source: Sized, data_config: DictConfig):
        self.count = len(data_source)
        assert data_config.train_batch_size == data_config.get("train_batch_size")

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))

    def __len__(self):
        return self.count


class Curriculum(AbstractCurriculumSampler):
    """Prefers what is not solved yet."""

    def __init__(self, data_source: Sized, data_config: DictConfig):
        self.weights = torch.ones(len(data_source))
        self.updates = 0

    def __iter__(self):
        for _ in range(len(self)):
            yield int(torch.multinomial(self.weights, 1))

    def __len__(self):
        return len(self.weights)

    def update(self, batch: DataProto) -> None:
        self.updates += 1
        rewards = batch.batch["token_level_rewards"].sum(-1)
        for i, reward in zip(batch.non_tensor_batch["index"], rewards, strict=True):
            self.weights[i] = max(0.1, 1 - float(reward))
