"""Rollout engines compared: tokens a second, what a weight sync costs over a plain copy, what a switch costs.

``python -m benchmarks.rollout [--model FOLDER] [--dtype float32] [--actor-dtype float32] [--engines hf,vllm] [--save]``

Every engine runs in a process of its own, one after the other, on the same prompts and lengths; engines that are not
installed are left out and named. CPU seconds count the engine's own children too. Without ``--model`` a random
2.5M-parameter model is made; without ``--dtype`` fp32 weights go into an engine in fp32 and into one in bf16, for which
they are cast on the way. ``sync_over_copy`` is the larger of two ratios: of a sync into memory that sleep gave back to
a copy into fresh memory, and of one awake to a copy into memory that is there.

vLLM, which alone takes requests without a seed, also generates the same prompts without: ``over_unseeded`` is what a
seed of each sample adds to its CPU seconds, of both ways in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.measure import report
from verl.config.rollout import RolloutConfig
from verl.models.loader import ModelSpec, load_model
from verl.models.weight_names import checkpoint_tensors, tied_duplicates
from verl.utils.tiny_model import make_tiny_model
from verl.utils.torch_functional import PrecisionType
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, RolloutEngine, SamplingParams
from verl.workers.rollout.weights.sync import sync_weights

ENGINES = ("hf", "vllm", "sglang")
SEQUENCES = (1, 16, 64)
SEEDED_SEQUENCES = (16, 64)
PROMPT, RESPONSE = 64, 64
ROUNDS = 3
DTYPES = ("float32", "float32"), ("bfloat16", "float32")
"""Of the engine and of the actor, where none is given."""


def measure_engine(name: str, model_path: str, dtype: str, actor_dtype: str) -> dict[str, Any]:
    """All numbers of one engine, in this process."""
    config = RolloutConfig(
        name=name,
        dtype=dtype,
        tensor_model_parallel_size=1,
        prompt_length=PROMPT,
        response_length=RESPONSE,
        max_num_seqs=max(SEQUENCES),
        ignore_eos=True,
    )
    start, start_cpu = time.perf_counter(), cpu_seconds()
    engine = get_rollout_class(name)(model_path, config)
    row: dict[str, Any] = {
        "engine": name,
        "dtype": dtype,
        "actor_dtype": actor_dtype,
        "start_s": time.perf_counter() - start,
        "start_cpu_s": cpu_seconds() - start_cpu,
    }
    actor = load_model(ModelSpec(model_path), dtype=PrecisionType.to_dtype(actor_dtype))
    row |= switch_costs(engine, actor)
    for count in SEQUENCES:
        row[f"{count}_sequences"] = speed(engine, count)
    if name == "vllm":
        row["seeds"] = [seed_costs(engine, count) for count in SEEDED_SEQUENCES]
    return row


def speed(engine: RolloutEngine, count: int) -> dict[str, float]:
    """The best of several rounds of ``count`` different prompts; the first round warms up and does not count."""
    sampling = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, want_log_probs=True)
    rounds = [generation_cost(engine, count, round_, sampling) for round_ in range(ROUNDS + 1)]
    wall, cpu = (min(costs[1:]) for costs in zip(*rounds, strict=True))
    tokens = count * RESPONSE
    return {"tokens_a_second": tokens / wall, "cpu_ms_a_token": 1000 * cpu / tokens}


def seed_costs(engine: RolloutEngine, count: int) -> dict[str, Any]:
    """CPU milliseconds a token with a seed of each sample and without, in turns: medians, and that of their ratios.

    A seed of null, among the engine's own sampling parameters, takes the place of the request's.
    """
    seeded = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, want_log_probs=True)
    ways = {"unseeded": replace(seeded, extra={"seed": None}), "seeded": seeded}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    numbers = itertools.count(ROUNDS + 1)  # new prompts each time: none is in the cache of prefixes
    for _ in range(4 * ROUNDS + 1):
        for name, sampling in ways.items():
            costs[name].append(generation_cost(engine, count, next(numbers), sampling)[1])
    tokens = count * RESPONSE
    middle = {f"{name}_cpu_ms_a_token": 1000 * statistics.median(values[1:]) / tokens for name, values in costs.items()}
    ratios = [seeded / unseeded for unseeded, seeded in zip(*(values[1:] for values in costs.values()), strict=True)]
    return {"rows": count, **middle, "over_unseeded": statistics.median(ratios) - 1}


def generation_cost(engine: RolloutEngine, count: int, round_: int, sampling: SamplingParams) -> tuple[float, float]:
    """Wall and CPU seconds of ``count`` prompts, others in each round."""
    generator = torch.Generator().manual_seed(1000 * round_ + count)
    prompts = torch.randint(5, 90, (count, PROMPT), generator=generator).tolist()
    requests = [Request(tuple(ids), sampling, 1000 * round_ + i) for i, ids in enumerate(prompts)]
    wall, cpu, completions = timed(lambda: engine.generate(requests, expect_version=engine.version))
    assert all(len(one.token_ids) == RESPONSE for one in completions)
    return wall, cpu


def switch_costs(engine: RolloutEngine, actor: torch.nn.Module) -> dict[str, Any]:
    """CPU seconds of the four parts of a switch and of a sync awake, and the sync against a plain copy of what is sent.

    Memory that sleep gave back is taken again by ``wake`` or, where an engine leaves that, by ``sync``: the fair copy
    is then one into fresh memory. The first round, in which engines learn where weights belong, does not count.
    """
    tied = tied_duplicates(actor)
    weights = [(name, tensor) for name, tensor in actor.state_dict().items() if name not in tied]
    seconds: dict[str, list[float]] = {
        "wake_weights": [],
        "sync": [],
        "wake_cache": [],
        "sync_awake": [],
        "sleep": [],
        "copy": [],
        "fresh_copy": [],
    }
    engine.sleep(level=2)
    num_bytes = sum(tensor.nbytes for _, tensor in weights)
    target = [torch.empty_like(tensor) for _, tensor in weights]
    versions = iter(range(1, 2 * ROUNDS + 3))

    def sync() -> None:
        sync_weights(checkpoint_tensors(actor, iter(weights)), engine, version=next(versions))

    for round_ in range(ROUNDS + 1):
        parts = {
            "wake_weights": lambda: engine.wake(("weights",)),
            "sync": sync,
            "wake_cache": lambda: engine.wake(("kv_cache",)),
            "sync_awake": sync,
            "copy": lambda: [to.copy_(tensor) for to, (_, tensor) in zip(target, weights, strict=True)],
            "fresh_copy": lambda: [tensor.clone() for _, tensor in weights],
            "sleep": lambda: engine.sleep(level=2),
        }
        for part, call in parts.items():
            if part == "sleep" and round_ == ROUNDS:
                continue  # stay awake for what follows
            seconds[part].append(timed(call)[1])
    least = {f"{part}_cpu_s": min(values[1:]) for part, values in seconds.items()}
    asleep, awake = least["sync_cpu_s"] / least["fresh_copy_cpu_s"], least["sync_awake_cpu_s"] / least["copy_cpu_s"]
    ratios = {"sync_over_fresh_copy": asleep, "sync_awake_over_copy": awake, "sync_over_copy": max(asleep, awake)}
    return {**least, "bytes": num_bytes, **ratios}


def timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds with all children, and the result of a call."""
    start, start_cpu = time.perf_counter(), cpu_seconds()
    result = call()
    return time.perf_counter() - start, cpu_seconds() - start_cpu, result


def cpu_seconds() -> float:
    """CPU seconds of this process, to the microsecond, and of its living descendants, to 10 ms."""
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in times)


def is_installed(name: str) -> bool:
    try:
        get_rollout_class(name)
    except (ImportError, NotImplementedError):
        return False
    return True


def run_engine(name: str, model_path: str, dtype: str, actor_dtype: str) -> dict[str, Any]:
    """`measure_engine` in a process of its own; its row is the last line it prints."""
    command = [sys.executable, "-m", "benchmarks.rollout", "--only", name, "--model", model_path]
    command += ["--dtype", dtype, "--actor-dtype", actor_dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="Hugging Face folder; a random small model if not given")
    parser.add_argument("--dtype", help="of the engine; fp32 and bf16 if not given")
    parser.add_argument("--actor-dtype", help="of the weights that are sent; the engine's if not given with --dtype")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure_engine(given.only, given.model, given.dtype, given.actor_dtype)), flush=True)
        os._exit(0)  # the engines' own children and threads need no goodbye
    pairs = [(given.dtype, given.actor_dtype or given.dtype)] if given.dtype else DTYPES
    names = [name for name in given.engines.split(",") if is_installed(name)]
    for name in set(given.engines.split(",")) - set(names):
        print(f"{name} is left out: it is not installed", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model or make_tiny_model(folder, size="2.5M")
        rows = [run_engine(name, model, *pair) for pair in pairs for name in names]
    label = Path(given.model).name if given.model else "random model of 2.5M"
    for row in rows:
        work = f"{label}, {row['bytes'] / 2**20:.1f} MiB of weights in {row['actor_dtype']}"
        row |= {"work": work, "work_of_a_sequence": f"{PROMPT} prompt and {RESPONSE} new tokens"}
        first = next(other for other in rows if other["dtype"] == row["dtype"])
        for count in SEQUENCES:
            key = f"{count}_sequences"
            row[key]["speed_over_first"] = row[key]["tokens_a_second"] / first[key]["tokens_a_second"]
    report("rollout", [*rows, *seed_rows(rows, label)])


def seed_rows(rows: list[dict[str, Any]], label: str) -> list[dict[str, Any]]:
    """Take what seeds cost out of the engines' rows, each number of sequences a row of its own."""
    found = []
    for row in rows:
        for costs in row.pop("seeds", []):
            work = f"{label}, {costs['rows']} rows of {PROMPT} prompt and {RESPONSE} new tokens"
            found.append({"what": "seeds", "engine": row["engine"], "dtype": row["dtype"], "work": work, **costs})
    return found


if __name__ == "__main__":
    main()
