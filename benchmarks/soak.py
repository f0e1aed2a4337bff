"""Memory of a long run, process by process: what grows from step to step, on both controllers.

python -m benchmarks.soak [--save] [--steps N] [--controller local|ray]

A tiny model, two ranks with critic, reward functions in the sandbox, validation and checkpoints as a long run has them.
A row a process that lives to the end, one for all of them, one for shared memory: MiB of its own after a fifth of the
steps and at the end, and the growth between them a step, by least squares.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import command_cost, report
from tests.support.runs import DEFAULTS, make_task, overrides

SETTINGS = {
    "algorithm__adv_estimator": "gae",
    "critic__strategy": "fsdp2",
    "critic__ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref__actor__strategy": "fsdp2",
    "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref__actor__optim__lr": "1e-5",
    "trainer__n_gpus_per_node": 2,
    "trainer__logger": "[file]",
    "trainer__memory_ledger": True,
    "trainer__test_freq": 25,
    "trainer__save_freq": 25,
    "trainer__max_actor_ckpt_to_keep": 2,
    "trainer__max_critic_ckpt_to_keep": 2,
}
_MiB = 2**20


def soak(controller: str, steps: int) -> list[dict[str, Any]]:
    """Run ``steps`` steps; return the rows of one controller."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        task = make_task(folder / "task")
        run = {**SETTINGS, "trainer__controller": controller, "trainer__total_training_steps": steps}
        words = overrides(task, **run, trainer__default_local_dir=folder / "run")
        cost = command_cost([sys.executable, "-m", "verl.trainer.main_ppo", *words])
        ledger = [json.loads(line) for line in (folder / "run" / "memory.jsonl").read_text().splitlines()]
        metrics = [json.loads(line)["data"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    settled = ledger[len(ledger) // 5 :]
    by_name = [{process["name"]: process["own"] for process in row["processes"]} for row in settled]
    last, common = by_name[-1], set(by_name[0])
    rows = [
        _row(controller, name, [sizes[name] for sizes in by_name])
        for name in last
        if name in common and all(name in sizes for sizes in by_name)
    ]
    rows.append(_row(controller, "all processes", [sum(sizes.values()) for sizes in by_name]))
    rows.append(_row(controller, "shared memory", [row["shared_memory"] for row in settled]))
    seconds = [row["timing_s/step"] for row in metrics if "timing_s/step" in row]
    fifth = max(1, len(seconds) // 5)
    rows[-2] |= {
        "processes": [len(by_name[0]), len(last)],
        "seconds_a_step": [round(float(np.median(part)), 4) for part in (seconds[:fifth], seconds[-fifth:])],
        "cpu_s": round(cost["cpu_s"], 1),
    }
    ranks, test, save = (SETTINGS[f"trainer__{name}"] for name in ("n_gpus_per_node", "test_freq", "save_freq"))
    size = f"{DEFAULTS['data.train_batch_size']} prompts x {DEFAULTS['actor_rollout_ref.rollout.n']} responses"
    work = f"tiny model with a critic, {ranks} ranks, {steps} steps of {size}, a validation every {test}, "
    work += f"a checkpoint every {save}"
    return [{"work": work, "steps": steps, **row} for row in rows]


def _row(controller: str, name: str, sizes: list[int]) -> dict[str, Any]:
    values = np.asarray(sizes) / _MiB
    slope = float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0
    ends = [round(float(np.median(part)), 1) for part in (values[:10], values[-10:])]
    return {"controller": controller, "process": name, "MiB": ends, "KiB_a_step": round(slope * 1024, 2)}


def _option(name: str, default: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


def main() -> None:
    chosen = _option("--controller", "")
    controllers = [chosen] if chosen else ["local", "ray"]
    report("soak", [row for name in controllers for row in soak(name, int(_option("--steps", "500")))])


if __name__ == "__main__":
    main()
