"""Write the metrics of three-step runs of many kinds, or compare two files: a change of structure changes no number.

    python scripts/loss_curves.py write before.json          some twenty runs, two minutes
    python scripts/loss_curves.py write after.json grpo ppo  these runs only
    python scripts/loss_curves.py compare before.json after.json

Both files must come from one machine: sums differ in their last bits between instruction sets. Figures of time, memory
and throughput are left out. Exits with 1 where any other differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

ACTOR, ROLLOUT, CRITIC = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__", "critic__"
LOSS = f"{ACTOR}policy_loss__loss_mode"
REF = {"actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu": 8}
FSDP = {f"{ACTOR}strategy": "fsdp2", "trainer__n_gpus_per_node": 2}
TAILS = {f"{ROLLOUT}mode": "async", f"{ROLLOUT}partial_rollout": True, f"{ROLLOUT}max_staleness": 2}
TAILS |= {f"{ROLLOUT}calculate_log_probs": True}
RUNS: dict[str, dict] = {
    "grpo": {},
    "grpo packed, dynamic": {
        "actor_rollout_ref__model__use_remove_padding": True,
        f"{ACTOR}use_dynamic_bsz": True,
        f"{ACTOR}ppo_max_token_len_per_gpu": 300,
    },
    "grpo with KL and entropy": {
        **REF,
        f"{ACTOR}use_kl_loss": True,
        f"{ACTOR}kl_loss_type": "low_var_kl",
        f"{ACTOR}entropy_coeff": 0.01,
        f"{ACTOR}ppo_mini_batch_size": 2,
        f"{ACTOR}ppo_epochs": 2,
    },
    "ppo": {
        **REF,
        "algorithm__adv_estimator": "gae",
        "algorithm__use_kl_in_reward": True,
        f"{CRITIC}strategy": "local",
        f"{CRITIC}ppo_micro_batch_size_per_gpu": 8,
    },
    "rloo": {"algorithm__adv_estimator": "rloo"},
    "remax": {"algorithm__adv_estimator": "remax"},
    "reinforce_plus_plus": {"algorithm__adv_estimator": "reinforce_plus_plus"},
    "optimal_token_baseline": {
        "algorithm__adv_estimator": "optimal_token_baseline",
        f"{ACTOR}calculate_sum_pi_squared": True,
    },
    "gspo": {LOSS: "gspo", f"{ACTOR}loss_agg_mode": "seq-mean-token-mean", f"{ACTOR}ppo_mini_batch_size": 2},
    "cispo": {LOSS: "cispo", f"{ACTOR}ppo_mini_batch_size": 2},
    "kl_cov": {LOSS: "kl_cov", f"{ACTOR}ppo_mini_batch_size": 2},
    "tis": {LOSS: "tis", f"{ROLLOUT}calculate_log_probs": True},
    "dapo": {
        f"{ACTOR}clip_ratio_high": 0.28,
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__metric": "score",
        "algorithm__filter_groups__max_num_gen_batches": 4,
    },
    "adapter": {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__model__lora_alpha": 8},
    "async": {f"{ROLLOUT}mode": "async"},
    "partial rollouts": TAILS,
    "two ranks": FSDP,
    "two ranks share a sequence": {
        **FSDP,
        f"{ACTOR}ulysses_sequence_parallel_size": 2,
        "actor_rollout_ref__model__use_remove_padding": True,
    },
    "deepspeed": {f"{ACTOR}strategy": "deepspeed"},
    "ray": {"trainer__controller": "ray"},
}
LEFT_OUT = ("timing", "perf/", "memory", "_per_s", "_share", "engine/running", "engine/steps", "waiting")


def run(name: str, folder: Path) -> list[dict[str, float]] | str:
    """The steps' metrics of one run, or the end of what it printed."""
    from tests.support.runs import make_task, overrides

    task = make_task(folder / "task")
    file = folder / "metrics.jsonl"
    settings = {"trainer__total_training_steps": 3, "trainer__logger": "[file]", **RUNS[name]}
    environment = {**os.environ, "VERL_FILE_LOGGER_PATH": str(file), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(task, **settings)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stdout + done.stderr)[-1500:]
    rows = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    return [{k: v for k, v in row.items() if not any(word in k for word in LEFT_OUT)} for row in rows]


def write(file: Path, names: list[str]) -> None:
    """Run and write what each gave."""
    found = {}
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run(name, Path(folder))
        print(f"{name}: {'failed' if isinstance(found[name], str) else len(found[name])}", flush=True)
    file.write_text(json.dumps(found, indent=1))


def compare(before: Path, after: Path) -> int:
    """The number of runs that differ; prints where."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    wrong = 0
    for name in new:
        if isinstance(new[name], str) or isinstance(old[name], str):
            differ = [] if isinstance(new[name], str) == isinstance(old[name], str) else [str(new[name])]
        else:
            differ = [
                f"step {step}, {key}: {one.get(key)} -> {other.get(key)}"
                for step, (one, other) in enumerate(zip(old[name], new[name], strict=True))
                for key in sorted({*one, *other})
                if one.get(key) != other.get(key) and not any(word in key for word in LEFT_OUT)
            ]
        wrong += bool(differ)
        print(f"{name}: {'; '.join(differ[:6]) or 'equal'}")
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"] and len(sys.argv) > 2:
        write(Path(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1:2] == ["compare"] and len(sys.argv) == 4:
        sys.exit(bool(compare(Path(sys.argv[2]), Path(sys.argv[3]))))
    else:
        sys.exit(__doc__)
