"""A small configuration that can run, and loading with a few words changed."""

import warnings
from functools import cache

from tests.support.composing import load_over
from verl.config.base import ConfigError, ConfigWarning

RUNNABLE = (
    "actor_rollout_ref.rollout.name=hf",
    "trainer.n_gpus_per_node=2",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "critic.ppo_micro_batch_size_per_gpu=2",
)
"""PPO with a critic on two workers; later words win over these."""


def typed(*words):
    """The typed tree; raises ConfigError."""
    loaded = load_over(RUNNABLE, words)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    for warning in loaded.warnings:
        warnings.warn(warning, ConfigWarning, stacklevel=2)
    return loaded.config


@cache  # more cases than the default keeps
def loaded_with(*words):
    """What ``RUNNABLE`` and ``words`` come to, problems included."""
    return load_over(RUNNABLE, words)


def problems(*words):
    """Sentences about what is wrong, as one text."""
    return "\n".join(problem.text for problem in loaded_with(*words).problems)


def notes(*words):
    """Sentences about what has no effect, as one text."""
    loaded = loaded_with(*words)
    assert not loaded.problems, loaded.problems
    return "\n".join(loaded.warnings)
