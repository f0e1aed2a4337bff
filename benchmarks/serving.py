"""Cost of single requests over HTTP against one call: tokens a second, CPU, requests a second, and whole steps.

``python -m benchmarks.serving [--model FOLDER] [--engines hf,vllm] [--steps 8] [--save]``. Every engine runs in a
process of its own; client and server share it, as with one local worker. The steps are those of the main job, sync and
async, on the same prompts. Without ``--model`` a random 2.5M-parameter model is made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import report
from benchmarks.rollout import PROMPT, RESPONSE, ROUNDS, is_installed, timed
from tests.support.runs import make_task, overrides
from verl.config.rollout import RolloutConfig
from verl.models.loader import ModelSpec, load_model
from verl.models.weight_names import checkpoint_tensors, tied_duplicates
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, RolloutEngine, SamplingParams
from verl.workers.rollout.weights.sync import sync_weights

SEQUENCES, SMALL = 64, 512


def measure_engine(name: str, model_path: str) -> dict[str, Any]:
    """All numbers of one engine, in this process."""
    from verl.workers.rollout.server.server import RolloutServer

    engine = synced_engine(name, model_path)
    whole = [a_request(i, RESPONSE) for i in range(SEQUENCES)]
    small = [a_request(i, 1) for i in range(SMALL)]
    row: dict[str, Any] = {"engine": name}
    row["call"] = best(lambda: engine.generate(whole, 1), SEQUENCES * RESPONSE)
    row["call_of_one_token"] = best(lambda: engine.generate(small, 1), SMALL)
    server = RolloutServer(engine, 1)
    server.start()
    row["served"] = best(lambda: asyncio.run(ask(server.address, whole)), SEQUENCES * RESPONSE)
    row["served_one_token"] = best(lambda: asyncio.run(ask(server.address, small)), SMALL)
    row["served_over_call_cpu"] = row["served"]["cpu_ms"] / row["call"]["cpu_ms"]
    extra = row["served_one_token"]["cpu_ms"] - row["call_of_one_token"]["cpu_ms"]
    row["http_cpu_ms_a_request"] = extra
    row["requests_a_second"] = row["served_one_token"]["a_second"]
    return row


def synced_engine(name: str, model_path: str, **options: Any) -> RolloutEngine:
    lengths = {"prompt_length": PROMPT, "response_length": RESPONSE}
    config = RolloutConfig(
        name=name, dtype="float32", tensor_model_parallel_size=1, ignore_eos=True, **{**lengths, **options}
    )
    engine = get_rollout_class(name)(model_path, config)
    actor = load_model(ModelSpec(model_path))
    tied = tied_duplicates(actor)
    weights = ((name, tensor) for name, tensor in actor.state_dict().items() if name not in tied)
    engine.wake()
    sync_weights(checkpoint_tensors(actor, weights), engine, version=1)
    return engine


def a_request(number: int, length: int) -> Request:
    prompt = tuple(5 + (number * 7 + i * 3) % 85 for i in range(PROMPT))
    return Request(prompt, SamplingParams(length, ignore_eos=True, want_log_probs=True), seed=number)


async def ask(address: str, requests: list[Request]) -> None:
    from verl.workers.rollout.server.client import RolloutClient

    client = RolloutClient([address])
    await asyncio.gather(*(client.generate(request) for request in requests))
    await client.close()


def best(call: Any, count: int) -> dict[str, float]:
    """The least of several rounds, for each of ``count`` things done; the first round warms up."""
    rounds = [timed(call)[:2] for _ in range(ROUNDS + 1)][1:]
    return {
        "a_second": count / min(wall for wall, _ in rounds),
        "cpu_ms": 1000 * min(cpu for _, cpu in rounds) / count,
    }


def measure_steps(name: str, mode: str, steps: int) -> dict[str, float]:
    """Medians over the steps of the main job, the first two left out."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "trainer__total_training_steps": steps,
            "trainer__save_freq": -1,
            "trainer__logger": "[file]",
            "trainer__default_local_dir": folder + "/run",
            "data__train_batch_size": 8,
            "data__max_response_length": RESPONSE,
            "actor_rollout_ref__rollout__name": name,
            "actor_rollout_ref__rollout__mode": mode,
            "actor_rollout_ref__rollout__n": 8,
            "actor_rollout_ref__rollout__ignore_eos": True,
            "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        }
        arguments = overrides(make_task(Path(folder), size="2.5M"), **settings)
        file = Path(folder) / "metrics.jsonl"
        env = {"OMP_NUM_THREADS": "1", **os.environ, "VERL_FILE_LOGGER_PATH": str(file)}
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        rows = [json.loads(line)["data"] for line in file.read_text().splitlines()][2:]
    keys = ("step", "gen", "reshard", "generate_sequences")
    return {f"{key}_s": statistics.median(row[f"timing_s/{key}"] for row in rows) for key in keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hugging Face folder; a random small model if not given")
    parser.add_argument("--engines", default="hf,vllm")
    parser.add_argument("--steps", type=int, default=8, help="of the main job, in each mode; 0 leaves them out")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure_engine(given.only, given.model)), flush=True)
        os._exit(0)  # the engines' own threads need no goodbye
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or str(make_tiny_model(folder, size="2.5M"))
        rows = []
        for name in filter(is_installed, given.engines.split(",")):
            command = [sys.executable, "-m", "benchmarks.serving", "--only", name, "--model", model]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row = json.loads(done.stdout.strip().splitlines()[-1])
            for mode in ("sync", "async") if given.steps else ():
                row[f"step_{mode}"] = measure_steps(name, mode, given.steps)
            rows.append(row)
    label = Path(given.model).name if given.model else "random model of 2.5M"
    work = f"{label}, {SEQUENCES} prompts of {PROMPT} and responses of {RESPONSE} tokens; {SMALL} of one token"
    report("serving", [{**row, "work": work} for row in rows])


if __name__ == "__main__":
    main()
