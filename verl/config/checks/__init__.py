"""Checks of a configuration that span options: one registry of validators, in a module a subject.

A validator reads the typed tree and yields a ``Problem`` for each thing it finds; its severity says whether that is an
error, a warning or advice. All validators run, and everything found is reported together. To add one, write a function
in the module of its subject and decorate it with ``@validator("error")`` or ``@validator("warning")``; two settings of
which one excludes the other are a row of ``contradictions``. Range and choice of a single option, and the option
without which it is not read, stand with the option.
"""

from typing import Any

from verl.config.base import Problem
from verl.config.checks import (
    base,
    batch,
    conversations,
    distillation,
    engine,
    environments,
    megatron,
    objective,
    rewards,
    run,
    sampling,
    support,
)
from verl.config.checks.base import VALIDATORS, Severity, Validator, validator
from verl.config.ppo import PPOConfig

__all__ = ["VALIDATORS", "Validator", "find", "validator"]

_ORDER = [
    subject.__name__
    for subject in (
        support,
        base,
        conversations,
        environments,
        batch,
        sampling,
        objective,
        distillation,
        rewards,
        engine,
        megatron,
        run,
    )
]
VALIDATORS.sort(key=lambda check: _ORDER.index(check.subject))


def find(config: PPOConfig, severity: Severity, **arguments: Any) -> list[Problem]:
    """Everything the validators of one severity find, in the order of the subjects, equal sentences once.

    Args:
        arguments: ``is_given`` for warnings, ``total_steps`` (None if unknown) for advice.
    """
    found = [
        problem
        for check in VALIDATORS
        if check.severity == severity
        for problem in check.function(config, *(arguments[name] for name in check.arguments))
    ]
    return list({problem.text: problem for problem in found}.values())
