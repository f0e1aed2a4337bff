"""One-step-off-policy training: ``python -m recipe.one_step_off_policy.main_ppo key=value ...``

The main job with another configuration to start from; the stages that differ are in `OneStepOffTrainer`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from verl.preflight.command import run_or_examine
from verl.trainer.run_folder import recorded_run
from verl.utils.process import no_collection

CONFIG_DIR = Path(__file__).parent / "config"
CONFIG_NAME = "one_step_off_ppo_trainer"


def run_ppo(config: Any) -> None:
    """Train as ``config`` says; returns when the run is complete."""
    start_from = [f"--config-path={CONFIG_DIR}", f"--config-name={CONFIG_NAME}"]
    words = [*start_from, *sys.argv[1:]]  # as main_ppo takes them: a run is resumed by it
    with recorded_run(config, words):
        with no_collection():
            from verl.trainer.ppo.job import PPOJob
            from verl.trainer.ppo.ray_trainer import OneStepOffTrainer

        class OneStepOffJob(PPOJob):
            trainer_cls = OneStepOffTrainer

        OneStepOffJob(config, command_line=words).run()


def main() -> None:
    run_or_examine(run_ppo, sys.argv[1:], config_name=CONFIG_NAME, config_path=str(CONFIG_DIR))


if __name__ == "__main__":
    main()
