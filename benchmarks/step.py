"""Cost of a whole GRPO step, in one process and one thread: sample, score, evaluate, improve.

``python -m benchmarks.step [--save]`` measures a random 2.5M-parameter model; with ``--smollm2 FOLDER`` (made by
scripts/prepare_smollm2.py) SmolLM2-135M on one-digit additions too. CPU seconds a step, CPU milliseconds a token
(prompts and responses), and the ratio to one bare forward and backward pass over as many tokens in the same run.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import report, spread
from tests.support.runs import make_task, overrides
from verl.config.load import load_ppo_config
from verl.protocol import DataProto
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.generation import RolloutRole
from verl.workers.model_worker import HybridWorker

LEARNING = {
    "trainer__progress_bar": False,
    "actor_rollout_ref__rollout__n": 8,
    "actor_rollout_ref__rollout__dtype": "bfloat16",
    "actor_rollout_ref__actor__fsdp_config__mixed_precision__param_dtype": "bf16",
    "actor_rollout_ref__model__enable_gradient_checkpointing": False,
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 64,
    "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 64,
    "trainer__logger": "[file]",
}


@contextmanager
def timed_steps() -> Iterator[list[tuple[float, int]]]:
    """Process seconds at the end of every step, and its tokens. A trainer of another class would skip less."""
    ends: list[tuple[float, int]] = []
    finish_step = RayPPOTrainer.finish_step

    def timed(self: RayPPOTrainer, step: int, batch: DataProto) -> None:
        finish_step(self, step, batch)
        ends.append((time.process_time(), int(self.metrics["perf/total_num_tokens"])))

    with patch.object(RayPPOTrainer, "finish_step", timed):
        yield ends


@contextmanager
def timed_canaries() -> Iterator[list[float]]:
    """Process seconds of every canary: of its generation, and of its comparison."""
    spent: list[float] = []

    def timed(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            start = time.process_time()
            result = method(*args)
            spent.append(time.process_time() - start)
            return result

        return call

    with (
        patch.object(RolloutRole, "generate_canary", timed(RolloutRole.generate_canary)),
        patch.object(HybridWorker, "compare_canaries", timed(HybridWorker.compare_canaries)),
    ):
        yield spent


def whole_steps(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a job; leaves out its first two steps, which warm up."""
    with timed_canaries() as canaries, timed_steps() as ends:
        PPOJob(load_ppo_config(arguments)).run()
    seconds = [later - earlier for (earlier, _), (later, _) in pairwise(ends[1:])]
    tokens = [count for _, count in ends[2:]]
    per_token = [1000 * s / t for s, t in zip(seconds, tokens, strict=True)]
    row = {"what": name, "work": f"{name}; {tokens[-1]:,} tokens", "tokens": tokens[-1]}
    row |= {"cpu_s_a_step": spread(seconds), "cpu_ms_a_token": spread(per_token)}
    # two calls a step
    return row | {"canary_share": sum(canaries[4:]) / sum(seconds)}


def bare_ms_a_token(model_path: str, rows: int, length: int) -> float:
    """CPU milliseconds a token of one forward and backward pass of transformers' model in bf16, logits included."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    ids = torch.randint(5, 90, (rows, length))
    costs = []
    for _ in range(3):
        start = time.process_time()
        model(input_ids=ids, labels=ids).loss.backward()
        costs.append(time.process_time() - start)
    return 1000 * min(costs) / ids.numel()


def measure(name: str, task: dict[str, str], rows: int, length: int, folder: str, **settings: Any) -> dict[str, Any]:
    row = whole_steps(name, overrides(task, **{**LEARNING, "trainer__default_local_dir": folder, **settings}))
    row["bare_forward_backward_ms_a_token"] = bare_ms_a_token(task["actor_rollout_ref.model.path"], rows, length)
    row["ratio_to_bare"] = row["cpu_ms_a_token"]["min"] / row["bare_forward_backward_ms_a_token"]
    return row


def smollm2_task(model: str, folder: Path) -> dict[str, str]:
    """One-digit additions, as the quickstart has them."""
    script = Path(__file__).parents[1] / "examples/data_preprocess/arithmetic.py"
    command = [sys.executable, str(script), "--task", "add1", "--local_dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return {
        "data.train_files": str(folder / "train.parquet"),
        "data.val_files": str(folder / "test.parquet"),
        "actor_rollout_ref.model.path": model,
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tiny = {
            "data__train_batch_size": 8,
            "data__max_response_length": 16,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
            "actor_rollout_ref__actor__optim__lr": "3e-4",
            "trainer__total_training_steps": 10,
        }
        task = make_task(Path(folder) / "tiny", size="2.5M")
        rows.append(measure("2.5M, 8 prompts x 8, 16 tokens", task, 64, 64, folder, **tiny))
        large = {**tiny, "data__train_batch_size": 32, "data__max_response_length": 64}
        large |= {"actor_rollout_ref__actor__ppo_mini_batch_size": 32, "trainer__total_training_steps": 5}
        rows.append(measure("2.5M, 32 prompts x 8, 64 tokens", task, 64, 128, folder, **large))
        if "--smollm2" in sys.argv:
            model = sys.argv[sys.argv.index("--smollm2") + 1]
            small = {
                "data__max_response_length": 10,
                "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 32,
                "actor_rollout_ref__actor__optim__lr": "2e-5",
                "trainer__total_training_steps": 6,
            }
            task = smollm2_task(os.path.abspath(model), Path(folder) / "add1")
            rows.append(measure("SmolLM2-135M, 4 prompts x 8, 10 tokens", task, 16, 56, folder, **small))
    report("step", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
