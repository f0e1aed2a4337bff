"""The main job: ``python -m verl.trainer.main_ppo key=value ...``

This file is the door and nothing more. The command line is checked before anything heavy is imported, so a misspelt
key costs a fraction of a second.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl.config.load import run_from_command_line
from verl.utils.garbage import no_collection

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig


def run_ppo(config: PPOConfig) -> None:
    """Train as ``config`` says, in this process as the driver; returns when the run is complete."""
    with no_collection():
        from verl.trainer.ppo.job import PPOJob

    PPOJob(config, command_line=sys.argv[1:]).run()


def main() -> None:
    run_from_command_line(run_ppo, sys.argv[1:])


if __name__ == "__main__":
    main()
