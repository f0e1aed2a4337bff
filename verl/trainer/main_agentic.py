"""The job of agents in environments: ``python -m verl.trainer.main_agentic env.train.tags=[FrozenLake] key=value ...``

It is ``main_ppo`` with environment groups as rows, in place of data files: the same trainer, options and checks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.trainer.main_ppo import run_ppo

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig


def run_agentic(config: PPOConfig, command_line: Sequence[str] | None = None) -> None:
    """Train in environments as ``config`` says, in this process as the driver; returns when the run is complete.

    Args:
        command_line: the words that ``config`` came from. None: it was made in Python.

    Raises:
        ConfigError: it names no environment.
    """
    from verl.config.base import ConfigError

    if not config.env.makes_rows:
        raise ConfigError(
            [
                "env.train.tags is empty, and main_agentic trains in environments. Name some, as in "
                "env.train.tags=[FrozenLake], or run verl.trainer.main_ppo to train on data files."
            ]
        )
    run_ppo(config, command_line=command_line)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    from verl.preflight.command import asks_for_a_run, run_or_examine
    from verl.telemetry.run_record import say_early
    from verl.version import __version__

    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_a_run(words):
        say_early(f"verl {__version__}: reading the configuration")

    def run(config: PPOConfig) -> None:
        run_agentic(config, command_line=words)

    run_or_examine(run, words, config_name="agentic_trainer")


if __name__ == "__main__":
    main()
