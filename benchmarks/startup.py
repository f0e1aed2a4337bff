"""Waiting time before anything is learned: import, help, a misspelt key, the end of the first step.

python -m benchmarks.startup [--save] [--repeat N]
python -m benchmarks.startup --trial                 what the trial of the model costs, next to the first step
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import command_cost, report, spread
from tests.support.runs import make_task, overrides

SMOLLM2 = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
"""The shape of SmolLM2-135M; its weights are random here."""

MODEL_CLASSES = "AutoTokenizer, Qwen2ForCausalLM"
"""What any program that trains the model of the first step imports."""


def trial_cost() -> None:
    """Seconds, of the clock and of the processor, that the trials of engine and rollout add before a first GRPO step of
    4 prompts x 4 responses x 64 tokens; both in one process, float32.
    """
    import verl.trainer.ppo.ray_trainer as trainer
    from verl.trainer.main_ppo import main as run
    from verl.workers.engine.engine import Engine
    from verl.workers.rollout.hf.rollout import HFRollout

    spent: dict[str, list[float]] = {}

    def measured(owner: Any, name: str) -> None:
        wrapped: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            try:
                return wrapped(*args, **kwargs)
            finally:
                first = spent.setdefault(name, [0.0, 0.0])
                first[0] += time.perf_counter() - wall
                first[1] += time.process_time() - cpu

        setattr(owner, name, call)

    steps = ("rollout", "score", "evaluate", "estimate_advantages", "improve")
    for owner, names in ((Engine, ["_try"]), (HFRollout, ["_check_cache"]), (trainer.RayPPOTrainer, steps)):
        for name in names:
            measured(owner, name)
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(Path(folder) / "task")
        from transformers import AutoConfig, AutoModelForCausalLM

        shape = dict(SMOLLM2)
        config = AutoConfig.for_model(shape.pop("model_type"), **shape)
        AutoModelForCausalLM.from_config(config).save_pretrained(Path(folder) / "task" / "model")
        once = {
            "trainer__total_training_steps": 1,
            "data__max_response_length": 64,
            "actor_rollout_ref__rollout__ignore_eos": True,
        }
        run(overrides(task, **once))
    trial = [sum(spent[name][kind] for name in ("_try", "_check_cache")) for kind in (0, 1)]
    inside = spent["_check_cache"]  # the first request waits for it
    step = [sum(spent[name][kind] for name in steps) - inside[kind] for kind in (0, 1)]
    print(json.dumps({"seconds (wall, CPU)": spent}))
    print(f"trial {trial[0]:.2f} s, CPU {trial[1]:.2f}; first step {step[0]:.2f} s, CPU {step[1]:.2f}", end="; ")
    print(f"trial / first step: {trial[0] / step[0]:.1%} of the clock, {trial[1] / step[1]:.1%} of the processor")


def work_of(command: list[str]) -> str:
    """Return the work of a run's step in words, from the keys on its command line and the model they name."""
    keys = dict(word.split("=", 1) for word in command if "=" in word)
    model = json.loads((Path(keys["actor_rollout_ref.model.path"]) / "config.json").read_text())
    prompts, n = keys["data.train_batch_size"], keys["actor_rollout_ref.rollout.n"]
    size = f"{model['num_hidden_layers']} layers {model['hidden_size']} wide"
    return f"{prompts} prompts x {n} responses of at most {keys['data.max_response_length']} tokens, {size}"


def main() -> None:
    if "--trial" in sys.argv:
        trial_cost()
        return
    repeat = int(sys.argv[sys.argv.index("--repeat") + 1]) if "--repeat" in sys.argv else 3
    job = [sys.executable, "-m", "verl.trainer.main_ppo"]
    with tempfile.TemporaryDirectory() as folder:
        task = make_task(Path(folder) / "task")
        first_step = {"trainer__total_training_steps": 1, "trainer__default_local_dir": f"{folder}/ckpt"}
        two_ranks = {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__actor__strategy": "fsdp2"}
        commands = {
            "bare interpreter": ([sys.executable, "-c", "pass"], 0),
            "import torch": ([sys.executable, "-c", "import torch"], 0),
            "torch and a model": ([sys.executable, "-c", f"import torch; from transformers import {MODEL_CLASSES}"], 0),
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
            work = work_of(command) if name.startswith("first step") else ""
            rows.append({"what": name, "work": work, "cpu_s": spread(cpu), "wall_s": min(wall)})
    torch_seconds = rows[1]["cpu_s"]["min"]
    for row in rows:
        row["ratio_to_import_torch"] = row["cpu_s"]["min"] / torch_seconds
    report("startup", rows)


if __name__ == "__main__":
    main()
