"""The main job: ``python -m verl.trainer.main_ppo key=value ...``

This file is the door and nothing more. The command line is checked before anything heavy is imported, so a misspelt
key costs a fraction of a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.doctor.door import asks_for_a_run, run_or_examine
from verl.utils.garbage import no_collection
from verl.utils.run_record import say_early
from verl.version import __version__

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig


def run_ppo(config: PPOConfig | Any, command_line: Sequence[str] | None = None) -> None:
    """Train as ``config`` says, in this process as the driver; returns when the run is complete.

    An application with an ``@hydra.main`` of its own may pass what hydra gave it. What the run leaves of itself in
    ``trainer.default_local_dir`` is there before anything heavy is imported.

    Args:
        command_line: the words after ``main_ppo`` that ``config`` came from. None: it was made in Python.
    """
    from verl.trainer.run_folder import recorded_run
    from verl.utils.config import to_ppo_config

    config = to_ppo_config(config)
    with recorded_run(config, command_line):
        if config.trainer.progress_bar:
            print("loading torch and transformers", flush=True)
        with no_collection():
            from verl.trainer.ppo.job import PPOJob

        PPOJob(config, command_line=command_line).run()


def create_rl_dataset(data_paths: Any, data_config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> Any:
    """The dataset of the ``data`` section over ``data_paths``; None if those are empty, as ``data.val_files`` may be.

    Further arguments of later releases have no effect.
    """
    if not data_paths:
        return None
    from verl.utils.dataset.loader import build_dataset

    return build_dataset(data_config, data_paths, tokenizer, processor)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """The training order the ``data`` section asks for."""
    from verl.utils.dataset.loader import build_sampler

    return build_sampler(data_config, dataset)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_a_run(words):
        say_early(f"verl {__version__}: reading the configuration")

    def run(config: PPOConfig) -> None:
        run_ppo(config, words)

    run_or_examine(run, words)


if __name__ == "__main__":
    main()
