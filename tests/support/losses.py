"""Losses for engine tests, from the smallest config sections that the real loss classes take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl.algorithms.losses import PPOLoss, ValueLoss
from verl.config.actor import ActorConfig
from verl.config.engine import OptimConfig


class Section(SimpleNamespace):
    """A config section with attribute and mapping access."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def optim_section(**changes: Any) -> OptimConfig:
    """AdamW at a constant rate."""
    defaults = {
        "lr": 1e-3,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "min_lr_ratio": None,
        "num_cycles": 0.5,
        "warmup_style": "constant",
    }
    return OptimConfig(**{**defaults, **changes})


def ppo_loss(**changes: Any) -> PPOLoss:
    """Clipped policy loss with KL to the reference and entropy."""
    defaults = {
        "loss_agg_mode": "token-mean",
        "policy_loss": Section(loss_mode="vanilla"),
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 3.0,
        "use_kl_loss": True,
        "kl_loss_coef": 0.01,
        "kl_loss_type": "low_var_kl",
        "entropy_coeff": 0.01,
    }
    return PPOLoss(Section(**{**vars(ActorConfig()), **defaults, **changes}), response_length=16)


def value_loss(**changes: Any) -> ValueLoss:
    """Clipped value loss."""
    return ValueLoss(Section(**{"loss_agg_mode": "token-mean", "cliprange_value": 0.5, **changes}), response_length=16)
