"""Settings that have no effect: what the user gave and nothing reads, each said once.

A notice is no error. Values that would need something that is not built are errors and stand in ``support.py``. To add
one, write a function in the module of its subject and decorate it with ``@notice``.
"""

from verl.config.notices import batch, engine, objective, rewards, run, sampling
from verl.config.notices.base import CHECKS, IsGiven, notice
from verl.config.ppo import PPOConfig

__all__ = ["CHECKS", "notice", "notices"]

_ORDER = [subject.__name__ for subject in (batch, sampling, objective, rewards, engine, run)]
CHECKS.sort(key=lambda check: _ORDER.index(check.__module__))


def notices(config: PPOConfig, is_given: IsGiven) -> list[str]:
    """One sentence per setting without effect."""
    found = [sentence for check in CHECKS for sentence in check(config, is_given)]
    return list(dict.fromkeys(found))
