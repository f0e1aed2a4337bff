"""Base classes of user samplers, under the name users import them by; see :mod:`verl.utils.dataset.sampler`."""

from verl.utils.dataset.sampler import AbstractCurriculumSampler, AbstractSampler

__all__ = ["AbstractCurriculumSampler", "AbstractSampler"]
