"""The main job: ``python -m verl.trainer.main_ppo key=value ...``

The entry point only. The command line is checked before anything heavy is imported, so a misspelt
key costs a fraction of a second.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.compat import missing
from verl.preflight.command import asks_for_a_run, run_or_examine
from verl.telemetry.run_record import say_early
from verl.utils.process import no_collection
from verl.version import __version__

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig
    from verl.trainer.ppo.job import PPOJob


class Recipe(NamedTuple):
    """A variation of the main job, as a module of its own starts it."""

    program: str
    """The module, ``recipe.dapo.main_dapo``: what the commands that a run leaves behind start."""
    config_path: str
    """Folder of the YAML file that it starts from."""
    config_name: str
    job: str = "verl.trainer.ppo.job:PPOJob"
    """``module:class``, a `PPOJob` with another trainer or workers; imported once the configuration is checked."""
    root: type[PPOConfig] | None = None
    """Class of the tree, where the recipe has options of its own."""


def run_ppo(
    config: PPOConfig | Any,
    task_runner_class: Any = None,
    command_line: Sequence[str] | None = None,
    job: str = "verl.trainer.ppo.job:PPOJob",
) -> None:
    """Train as ``config`` says, in this process as the driver; returns when the run is complete.

    An application with an ``@hydra.main`` of its own may pass what hydra gave it; a warning names keys of its own. What
    the run leaves of itself in ``trainer.default_local_dir`` is there before anything heavy is imported.

    Args:
        task_runner_class: a ``TaskRunner`` of the application's, whose ``run(config)`` trains; wrapped by
            ``ray.remote`` it does so in an actor.
        command_line: the words after ``main_ppo`` that ``config`` came from; a first one ``-m MODULE`` names another
            program. None: it was made in Python.
        job: ``module:class``, the `PPOJob` to run.
    """
    from verl.utils.config import adopt_config, typed_config

    if task_runner_class is not None:
        with no_collection():
            from verl.trainer.ppo.job import run_task
        run_task(task_runner_class, config)
        return
    tree = adopt_config(config)
    if typed_config(tree).trainer.max_restarts:
        from verl.trainer.restarts import run_with_restarts

        run_with_restarts(tree, lambda tree: _run_once(tree, command_line, job))
    else:
        _run_once(tree, command_line, job)


def _run_once(tree: Any, command_line: Sequence[str] | None, job_class: str) -> None:
    """Train as ``tree`` says, typed or as a script composed it."""
    from verl.trainer.ppo.placement import workers_ahead
    from verl.trainer.run_folder import recorded_run
    from verl.utils.config import typed_config

    config = typed_config(tree)
    # opened before torch is imported, so that a run which fails at that leaves its record too
    with recorded_run(config, command_line):
        if config.trainer.progress_bar:
            print("loading torch and transformers", flush=True)
        with workers_ahead(config):
            with no_collection():
                cls: type[PPOJob] = pkgutil.resolve_name(job_class)

            job = cls(config, command_line=command_line)
            # as the application gave it: classes of its own may read sections that the typed tree has not
            job.script_config = tree
            job.run()


def create_rl_dataset(
    data_paths: Any,
    data_config: Any,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """The dataset of the ``data`` section over ``data_paths``; None if those are empty, as ``data.val_files`` may be.

    Args:
        is_train: with ``data.datagen`` it grows as training goes on.
        max_samples: at most so many rows; -1: as many as ``data.train_max_samples`` or ``val_max_samples`` says.
    """
    if not data_paths:
        return None
    from verl.data.loader import build_dataset

    return build_dataset(data_config, data_paths, tokenizer, processor, is_train, max_samples)


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """Return the sampler of the ``data`` section."""
    from verl.data.loader import build_sampler

    return build_sampler(data_config, dataset)


def main(arguments: Sequence[str] | None = None, recipe: Recipe | None = None) -> None:
    """Run ``key=value ...``; None: the words of this process. With a ``recipe``, that variation of the main job."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_a_run(words):
        say_early(f"verl {__version__}: reading the configuration")

    def run(config: PPOConfig) -> None:
        if recipe is None:
            run_ppo(config, command_line=words)
        else:
            run_ppo(config, command_line=[f"-m {recipe.program}", *words], job=recipe.job)

    if recipe is None:
        run_or_examine(run, words)
    else:
        run_or_examine(run, words, config_name=recipe.config_name, config_path=recipe.config_path, root=recipe.root)


def __getattr__(name: str) -> Any:
    if name == "TaskRunner":
        from verl.trainer.ppo.job import TaskRunner

        return TaskRunner
    if name == "get_ppo_ray_runtime_env":
        from verl.trainer.ppo.placement import get_ppo_ray_runtime_env

        return get_ppo_ray_runtime_env
    raise missing(__name__, name)


if __name__ == "__main__":
    main()
