"""Optimizer and learning-rate schedule of a trained role."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from verl.config.base import Config, option


@dataclass
class OptimConfig(Config):
    """Optimizer and learning-rate schedule. The schedule advances once per training step, however many mini-batches
    that step has."""

    _target_: ClassVar[str] = "verl.workers.config.FSDPOptimizerConfig"

    optimizer: Literal["AdamW", "AdamW8bit"] = "AdamW"
    """``AdamW`` (Loshchilov & Hutter 2019, arXiv:1711.05101): torch's, fused, two fp32 numbers of state a weight.
    ``AdamW8bit``: two bytes a weight instead of eight, by torchao (``pip install -e '.[torchao]'``), compiled at its
    first step. Source: Dettmers et al. 2021 (arXiv:2110.02861)."""

    lr: float = option(1e-6, above=0)
    """Peak learning rate. verl's default is 1e-6 for the actor and 1e-5 for the critic."""

    lr_warmup_steps_ratio: float = option(0.0, at_least=0, at_most=1)
    """Share of all training steps spent warming up; read only while ``lr_warmup_steps`` is negative."""

    total_training_steps: int = -1
    """Length of the schedule in training steps. -1: the trainer fills in the length of the run."""

    weight_decay: float = option(0.01, at_least=0)
    """Decoupled weight decay, multiplied by the learning rate at every optimizer step; of all trained weights, norms
    and biases too, as in verl."""

    lr_warmup_steps: int | None = -1
    """Training steps over which the rate rises linearly. Negative or null: from ``lr_warmup_steps_ratio``."""

    min_lr_ratio: float | None = option(0.0, at_least=0, at_most=1)
    """With ``cosine``, ``linear`` and ``wsd``: the rate ends at this share of ``lr``, and warms up from it. Null: 0."""

    num_cycles: float = option(0.5, above=0)
    """With ``cosine``: waves over the run; 0.5 is one fall from peak to floor."""

    warmup_style: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    """Course after the warm-up; ``lr_scheduler_type`` is a second name of this option. ``constant``; ``cosine`` decay
    (Loshchilov & Hutter 2017, arXiv:1608.03983); ``linear`` decay; ``wsd``, warmup-stable-decay: constant, with a
    decay at the end (Hu et al. 2024, arXiv:2404.06395)."""

    lr_wsd_decay_steps: int | None = option(None, at_least=0)
    """With ``wsd``: training steps of the decay. Null: a tenth of those after the warm-up."""

    lr_wsd_decay_style: Literal["cosine", "linear", "exponential", "minus_sqrt"] = "cosine"
    """With ``wsd``: shape of the decay. ``minus_sqrt``: 1 - sqrt(x) (Hagele et al. 2024, arXiv:2405.18392)."""

    betas: list[float] = option([0.9, 0.999], at_least=0, below=1)
    """Decay of AdamW's running means of gradient and squared gradient. Not in verl's YAML, read by it."""

    eps: float = option(1e-8, above=0)
    """Added to AdamW's denominator."""
