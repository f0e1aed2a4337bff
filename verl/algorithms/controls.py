"""Options around an estimator and a loss: option -> function, as names choose an estimator.

Nothing is looked up here when a run starts: callers know their functions. It is kept so that each such option has its
equation, its source and its test in one record, and docs/algorithms.md its rows. Keys are options of the config;
``actor.`` is short for ``actor_rollout_ref.actor.``.
"""

from collections.abc import Callable

from verl.algorithms.registry import Registry

CONTROLS: Registry[Callable] = Registry("a control", "@CONTROLS.register(option)")

STEPS = (
    "algorithm.reward_shaping.overlong_buffer",
    "algorithm.reward_shaping.norm",
    "algorithm.reward_shaping.scale",
    "algorithm.reward_shaping.shift",
    "algorithm.reward_shaping.clip_range",
    "algorithm.reward_shaping.clip",
    "algorithm.use_kl_in_reward",
    "algorithm.reward_shaping.whiten",
    "algorithm.sample_mask.drop_truncated",
    "algorithm.sample_mask.error_max_len",
    "algorithm.sample_mask.difficulty",
    "algorithm.advantage.whiten",
    "algorithm.advantage.clip",
)
"""What is done between the scores of a batch and its update, in this order; the estimator comes before the last two."""
