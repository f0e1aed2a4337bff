"""Checks that span options, by subject: a ``rule`` finds what must not start, a ``notice`` what has no effect.

A rule reads the typed tree and yields ``Problem``s; all rules run, and all problems are reported together. A notice is
no error: it yields a sentence for each setting that nothing reads. To add one, write a function in the module of its
subject and decorate it. Range and choice of a single option stand with the option.
"""

from verl.config.base import Problem
from verl.config.checks import batch, data, engine, objective, rewards, run, sampling
from verl.config.checks.base import CHECKS, RULES, IsGiven, notice, rule
from verl.config.ppo import PPOConfig

__all__ = ["CHECKS", "RULES", "broken_rules", "notice", "notices", "rule"]

_ORDER = [subject.__name__ for subject in (data, batch, sampling, objective, rewards, engine, run)]
RULES.sort(key=lambda check: _ORDER.index(check.__module__))
CHECKS.sort(key=lambda check: _ORDER.index(check.__module__))


def broken_rules(config: PPOConfig) -> list[Problem]:
    """Every problem every rule finds, in the order of the subjects."""
    return [problem for check in RULES for problem in check(config)]


def notices(config: PPOConfig, is_given: IsGiven) -> list[str]:
    """One sentence per setting without effect."""
    found = [sentence for check in CHECKS for sentence in check(config, is_given)]
    return list(dict.fromkeys(found))
