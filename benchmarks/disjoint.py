"""Cost and gain of a rollout on devices of its own: seconds of a transfer, and steps a second, one step ahead or not.

``python -m benchmarks.disjoint [--save]``: bf16 weights of a random model through a `WeightLink` between two processes,
next to a plain copy of as many bytes in the same run; and GRPO of the 2.5M-parameter model colocated, apart, and apart
with one batch ahead. Wall seconds: run it on an idle machine.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.measure import report
from benchmarks.step import LEARNING
from tests.support.ranks import run_ranks
from tests.support.runs import make_task, overrides
from verl.config.load import load_ppo_config
from verl.config.rollout import RolloutConfig
from verl.trainer.ppo.job import PPOJob
from verl.trainer.ppo.ray_trainer import OneStepOffTrainer, RayPPOTrainer
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.weights.link import WeightLink, find_store, open_store

WARM_UP = 3
APART = {"actor_rollout_ref__hybrid_engine": False, "actor_rollout_ref__rollout__n_gpus_per_node": 1}
WAYS = {"colocated": {}, "apart": APART, "one step ahead": {**APART, "actor_rollout_ref__rollout__max_staleness": 1}}
SIZES = {
    "2.5M": {"size": "2.5M"},
    "86M": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 5, "head_dim": 64},
}


def transfers(folder: str, bucket_bytes: int, times: int = 5) -> list[float]:
    """Wall seconds of each transfer into an hf rollout, receipts included; on rank 0, and those of a plain copy."""
    rank = dist.get_rank()
    store = open_store("127.0.0.1", 60.0) if rank == 0 else None
    ports: list[Any] = [store and store.port, None]
    dist.broadcast_object_list(ports, 0)
    link = WeightLink(store or find_store("127.0.0.1", ports[0], 60.0), rank, 2, "cpu", 60.0)
    if rank == 0:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    else:
        rollout = HFRollout(folder, RolloutConfig(dtype="bfloat16", prompt_length=8, response_length=8))
        rollout.wake()
    seconds = []
    for version in range(times):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            link.send(weights.items(), version, bucket_bytes, torch.bfloat16)
        else:
            link.receive(rollout)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    if rank == 0:
        start = time.perf_counter()
        copies = [tensor.clone() for tensor in weights.values()]
        return [*seconds, time.perf_counter() - start, sum(copy.nbytes for copy in copies)]
    return []


class TimedTrainer(RayPPOTrainer):
    """Notes when every step ended and what it said of its sampling."""

    ends: list[float]

    def finish_step(self, step: int, batch: Any) -> None:
        super().finish_step(step, batch)
        vars(self).setdefault("ends", []).append(time.perf_counter())
        vars(self).setdefault("said", []).append({**self.metrics})


def steps(task: dict[str, str], **settings: Any) -> dict[str, Any]:
    """Steps a second of a job, its first steps left out, and the share of generation that training hid."""
    is_ahead = "actor_rollout_ref__rollout__max_staleness" in settings
    base = OneStepOffTrainer if is_ahead else RayPPOTrainer

    class Job(PPOJob):
        trainer_cls = type("Timed", (TimedTrainer, base), {})

    trainer = Job(load_ppo_config(overrides(task, **{**LEARNING, **settings}))).run()
    said = trainer.said[WARM_UP:]
    names = ("timing_s/gen", "timing_s/generate_sequences", "timing_s/sync_weights", "timing_s/update_actor")
    row: dict[str, Any] = {name.split("/")[1] + "_s": _mean(said, name) for name in names}
    if is_ahead:
        row["overlap"] = _mean(said, "perf/rollout_overlap")
    return {"steps_a_second": (len(said) - 1) / (trainer.ends[-1] - trainer.ends[WARM_UP]), **row}


def _mean(said: list[dict[str, float]], name: str) -> float | None:
    numbers = [metrics[name] for metrics in said if name in metrics]
    return sum(numbers) / len(numbers) if numbers else None


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for name, options in SIZES.items():
            folder = make_tiny_model(Path(place) / name, family="qwen2", **options)
            for bucket_mib in (16, 512):
                *seconds, copy, nbytes = run_ranks(2, transfers, folder, bucket_mib << 20)[0]
                row = {"what": f"transfer, {name} parameters", "bucket_mib": bucket_mib, "mib": nbytes / 2**20}
                best = min(seconds[1:])
                rows.append(
                    {**row, "seconds": best, "gib_a_second": nbytes / best / 2**30, "ratio_to_copy": best / copy}
                )
        task = make_task(Path(place) / "task", size="2.5M")
        for way, settings in WAYS.items():
            size = {"data__train_batch_size": 8, "actor_rollout_ref__actor__ppo_mini_batch_size": 8}
            length = {**size, "data__max_response_length": 64, "trainer__total_training_steps": 20}
            folder = {"trainer__default_local_dir": Path(place) / way.replace(" ", "_")}
            rows.append({"what": f"GRPO, 64 x 64 tokens, {way}", **steps(task, **length, **folder, **settings)})
    report("disjoint", rows)


if __name__ == "__main__":
    main()
