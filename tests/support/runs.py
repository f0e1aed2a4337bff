"""Small real runs of the main job: a tiny model, generated prompts, a reward in a file, the command line's own keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.learning import SEED
from verl.utils.tiny_model import make_tiny_model

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits among the first eight characters: dense, so a random model can climb it."""
    return min(1.0, sum(c.isdigit() for c in solution_str) / 8)
'''
THINGS = "cat dog sun tree book lamp fish moon star rain road bird cake milk door king".split()


def write_prompts(path: Path, rows: int = 64, first: int = 0) -> Path:
    """Prompts in the standard columns, numbered from ``first``; the reward above needs no ground truth."""
    records = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"Say something about a {THINGS[i % len(THINGS)]} {i}."}],
            "ability": "test",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(first, first + rows)
    ]
    pq.write_table(pa.Table.from_pylist(records), path)
    return path


def make_task(folder: Path, size: str = "tiny", rows: int = 64, seed: int = SEED) -> dict[str, str]:
    """A model, data and reward under ``folder``, as the keys that name them."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tiny_model(folder / "model", family="qwen2", size=size, seed=seed)
    (folder / "reward.py").write_text(REWARD)
    return {
        "data.train_files": str(write_prompts(folder / "train.parquet", rows)),
        "data.val_files": str(write_prompts(folder / "val.parquet", 8)),
        "actor_rollout_ref.model.path": str(folder / "model"),
        "critic.model.path": str(folder / "model"),
        "custom_reward_function.path": str(folder / "reward.py"),
        "trainer.default_local_dir": str(folder / "run"),
    }


DEFAULTS: dict[str, Any] = {
    "trainer.device": "cpu",
    "trainer.controller": "local",
    "trainer.n_gpus_per_node": 1,
    "trainer.logger": "[console]",
    "trainer.val_before_train": False,
    "trainer.progress_bar": False,
    "trainer.total_epochs": 1000,
    "trainer.seed": 1 + SEED,
    "data.max_prompt_length": 64,
    "data.max_response_length": 12,
    "data.train_batch_size": 4,
    "data.dataloader_num_workers": 0,
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.name": "hf",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.strategy": "local",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.optim.lr": "1e-3",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
}


def overrides(task: dict[str, str], **settings: Any) -> list[str]:
    """Command-line overrides: the defaults above, the task, then ``settings`` with ``__`` for dots."""
    merged = {**DEFAULTS, **task, **{key.replace("__", "."): value for key, value in settings.items()}}
    return [f"{key}={'null' if value is None else value}" for key, value in merged.items()]


def run_job(arguments: list[str]) -> Any:
    """Run the main job in this process, checked as the command is; returns the trainer, its loop complete."""
    from tests.support.composing import load_over
    from verl.config.base import ConfigError
    from verl.config.unused_options import remember_given
    from verl.trainer.ppo.job import PPOJob

    loaded = load_over((), arguments)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    return PPOJob(remember_given(loaded.config, loaded.tree, loaded.given, loaded.warnings)).run()


def train_sft(arguments: list[str], job: Any = None) -> tuple[Any, dict[int, dict[str, float]]]:
    """Run supervised fine-tuning in this process; returns the trainer, and metrics by step of the logger ``file``.

    Args:
        job: class of another program on the same loop.
    """
    from verl.config.base import ConfigError
    from verl.config.load import load
    from verl.trainer.sft.job import SFTJob

    job = job or SFTJob
    loaded = load(arguments, config_name=job.root.config_name, root=job.root)
    if loaded.problems:
        raise ConfigError([problem.text for problem in loaded.problems])
    trainer = job(loaded.config).run()
    return trainer, {row["step"]: row["data"] for row in read_metrics(trainer.run_log.places["metrics"])}


def main_ppo(arguments: list[str], timeout_s: float = 300, **env: str) -> subprocess.CompletedProcess:
    """Run ``python -m verl.trainer.main_ppo`` as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **env},
    )


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of a JSONL metrics file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
