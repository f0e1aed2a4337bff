"""What a user waits for before anything is learned: import, help, a misspelt key, the end of the first step.

``python -m benchmarks.startup [--save] [--repeat N]``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.measure import command_cost, report, spread
from tests.support.runs import make_task, overrides


def main() -> None:
    repeat = int(sys.argv[sys.argv.index("--repeat") + 1]) if "--repeat" in sys.argv else 3
    job = [sys.executable, "-m", "verl.trainer.main_ppo"]
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(Path(folder) / "task")
        first_step = {"trainer__total_training_steps": 1, "trainer__default_local_dir": f"{folder}/ckpt"}
        two_ranks = {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__actor__strategy": "fsdp2"}
        commands = {
            "bare interpreter": ([sys.executable, "-c", "pass"], 0),
            "import torch": ([sys.executable, "-c", "import torch"], 0),
            "import verl": ([sys.executable, "-c", "import verl"], 0),
            "--help": ([*job, "--help"], 0),
            "misspelt key": ([*job, "trainer.sav_freq=5"], None),
            "first step, local": (job + overrides(task, **first_step), 0),
            "first step, local, 2 ranks": (job + overrides(task, **first_step, **two_ranks), 0),
            "first step, ray": (job + overrides(task, **first_step, trainer__controller="ray"), 0),
        }
        rows = []
        for name, (command, expect) in commands.items():
            costs = [command_cost(command, {"OMP_NUM_THREADS": "1"}, expect) for _ in range(repeat)]
            cpu, wall = ([cost[kind] for cost in costs] for kind in ("cpu_s", "wall_s"))
            rows.append({"what": name, "cpu_s": spread(cpu), "wall_s": min(wall)})
    torch_seconds = rows[1]["cpu_s"]["min"]
    for row in rows:
        row["ratio_to_import_torch"] = row["cpu_s"]["min"] / torch_seconds
    report("startup", rows)


if __name__ == "__main__":
    main()
