"""Checks that span options: each a small function named after its rule, all of them run, all problems told at once.

A rule reads the typed tree and yields ``Problem``s. To add one, write a function in the module of its subject and
decorate it with ``@rule``. Range and choice of a single option are not rules: they stand with the option.
"""

from verl.config.base import Problem
from verl.config.ppo import PPOConfig
from verl.config.rules import batch, data, engine, objective, rewards, run, sampling
from verl.config.rules.base import RULES, rule

__all__ = ["RULES", "broken_rules", "rule"]

_ORDER = [subject.__name__ for subject in (data, batch, sampling, objective, rewards, engine, run)]
RULES.sort(key=lambda check: _ORDER.index(check.__module__))


def broken_rules(config: PPOConfig) -> list[Problem]:
    """Every problem every rule finds, in the order of the subjects."""
    return [problem for check in RULES for problem in check(config)]
