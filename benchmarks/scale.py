"""The driver's part of a step between generation and the end of the update, with the workers simulated.

``python -m benchmarks.scale [--save]``: rows of 1k prompt and 15k response tokens on average, GRPO with a reference.
Batches are divided, sent, joined and united as in `RayPPOTrainer`, rewards (one number a row) attached, advantages
estimated, values looked through for NaN and infinity, and the metrics of data, time and throughput made. Each message
is pickled and copied into shared memory as it is for a worker: to the ranks of the driver's node as `RayHosts` sends it
there, to those of other nodes as it goes into Ray's object store, what several ranks get once. What a worker does with
it is not counted, nor are reward functions, generation, and what Ray itself does in a call.

Each row is measured in a process of its own: CPU seconds of the driver a step, how far memory rises in a step above
what the process had with its batch, the peak of the whole process, and how the seconds grow with rows, tokens a row,
ranks and nodes (exponents of a power law through two rows).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.dispatch import StepWorker
from benchmarks.measure import peak_extra_mb, report
from verl.algorithms.aggregate import agg_rows
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch.layout import Layout
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost
from verl.batch.ragged import Ragged, RemoteRows, RowValues
from verl.batch.windows import join_windows
from verl.config.algorithm import AlgorithmConfig
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import (
    ClassWithInitArgs,
    Hosts,
    Request,
    ResourcePool,
    WorkerGroup,
)
from verl.single_controller.batch_cache import BatchLedger, KeptOutput, SentBatch
from verl.single_controller.channel import SharedMemoryPool
from verl.single_controller.local import Call
from verl.single_controller.ray.base import _Stored
from verl.trainer.ppo.experience import Shaping, attach_reward, balance_metrics, compute_advantage
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics
from verl.trainer.ppo.nonfinite import NonFiniteGuard

COST = RowCost()
GROUP = 8
SMALL = (64, 64, 2, 1)
BASE = (2048, 4096, 128, 1)
"""Rows, tokens a row, ranks, nodes."""
LARGER = {
    "rows": [(8192, 4096, 128, 1)],
    "tokens_a_row": [(2048, 16384, 128, 1)],
    "ranks": [(2048, 4096, 512, 1)],
    "nodes": [(2048, 4096, 128, nodes) for nodes in (2, 4, 8)],
}
"""What the seconds grow by -> larger sizes; the last of each gives the exponent."""
LARGEST = [(8192, 16384, 512, 1), (8192, 16384, 512, 64)]
RETURNS = {"compute_log_prob": ("old_log_probs", "entropys"), "compute_ref_log_prob": ("ref_log_prob",)}


class SimulatedHosts(Hosts):
    """Ranks without processes: they answer with float32 columns of their rows, made of one buffer.

    Args:
        nodes: they are divided among so many; the first is the driver's.
    """

    def __init__(self, world_size: int, nodes: int):
        super().__init__()
        self.near = world_size // nodes
        self.object_store, self.put_bytes = SharedMemoryPool(), 0
        self.world_size, self.pids = world_size, [0] * world_size
        self.ledger = BatchLedger()
        self.pools = [SharedMemoryPool() for _ in range(world_size)]  # segments are used again, as in a run
        self.simulated_s = 0.0
        self.layout: Any = None
        self.buffer = torch.zeros(1)

    @contextmanager
    def _simulated(self):
        start = time.process_time()
        yield
        self.simulated_s += time.process_time() - start

    def _submit(self, role: str, method: str, requests: Sequence[Request], exposed: bool) -> list:
        stored = _Stored(requests)
        with patch("ray.put", self._put):
            for rank, args, kwargs, _ in requests:
                if rank >= self.near:
                    args, kwargs = tuple(map(stored, args)), {name: stored(value) for name, value in kwargs.items()}
                self.traffic.add(role, method, sent=self.pools[rank].pack((args, kwargs)).nbytes)
        with self._simulated():
            calls = [Call(self, request.rank, role, method) for request in requests]
            for call, request in zip(calls, requests, strict=True):
                sent = next((value for value in request.args if isinstance(value, SentBatch)), None)
                call.finish(output=self._output(method, sent))
        self.traffic.add(role, method, sent=self.put_bytes)
        self.put_bytes = 0
        return calls

    def _put(self, value: Any) -> bytes:
        """Copy a value into the simulated object store; returns its name there."""
        self.put_bytes += self.object_store.pack(value).nbytes
        return b"a name as long as that of an object of Ray's"

    def _output(self, method: str, sent: SentBatch | None) -> Any:
        if sent is None:
            return {}
        if method not in RETURNS:
            return DataProto(meta_info={"metrics": {"loss": [0.0]}})
        layout = self.layout.select(torch.from_numpy(sent.rows))
        names = RETURNS[method]
        columns: dict[str, Ragged] = {name: Ragged(self.buffer[: layout.total], layout) for name in names}
        columns |= {name: RemoteRows(layout, 0, torch.float32, (), True) for name in names if name in sent.stays}
        output = DataProto.from_ragged(columns)
        if method == "compute_log_prob":
            output.put("entropy_sums", torch.zeros(len(layout), dtype=torch.float64))
        return KeptOutput(output, names)

    def _wait(self, handles: Sequence, timeout: float | None) -> list:
        return [handle.outcome() for handle in handles]

    def _stop(self, at_once: bool) -> None:
        for pool in (*self.pools, self.object_store):
            pool.close()


class SimulatedGroup(WorkerGroup):
    """A worker group on `SimulatedHosts`."""

    def _start(
        self, resource_pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs], timeout: float, **_: Any
    ) -> Hosts:
        return SimulatedHosts(resource_pool.world_size, len(resource_pool.store))


def make_batch(rows: int, tokens: int, ranks: int) -> DataProto:
    """Rows of ``tokens`` tokens on average, a sixteenth of them the prompt's, in groups of ``GROUP``."""
    random = np.random.default_rng(0)
    sizes = np.minimum(random.lognormal(np.log(tokens * 0.75), 0.6, rows), 2 * tokens).astype(np.int64) + 1
    prompt = np.repeat(random.integers(tokens // 32 + 1, tokens // 11 + 2, -(-rows // GROUP)), GROUP)[:rows]
    width = 2 * tokens + 1
    prompts = ragged(prompt, width, "left")
    responses = ragged(sizes, width, "right")
    columns = {"prompts": prompts, "responses": responses, **join_windows(prompts, responses)}
    columns["response_mask"] = responses.constant(1)
    data = DataProto.from_ragged(columns, non_tensors={"uid": [f"prompt-{row // GROUP}" for row in range(rows)]})
    data.meta_info["global_token_num"] = data.ragged("input_ids").layout.lengths.tolist()
    calls = {name: CallPlan(True, follows="update_actor") for name in ("compute_log_prob", "compute_ref_log_prob")}
    calls["update_actor"] = CallPlan(True, MiniBatches(max(ranks, rows // 4)))
    data.partition_plan = PartitionPlan(calls, COST)
    return data


def ragged(lengths: np.ndarray, width: int, side: Any) -> Ragged:
    """Token ids of rows of these lengths."""
    sizes = torch.from_numpy(lengths)
    starts = width - sizes if side == "left" else torch.zeros_like(sizes)
    total = int(sizes.sum())
    return Ragged(torch.arange(total, dtype=torch.int64) % 150_000, Layout(starts, sizes, width))


def run_step(group: Any, data: DataProto, scores: Tensor, ranks: int) -> dict[str, float]:
    """The stages of a GRPO step after generation, as the trainer runs them; returns its metrics.

    Args:
        scores: (B,) rewards.
    """
    start = time.perf_counter()
    guard, shaping = NonFiniteGuard(3), Shaping(AlgorithmConfig(), response_length=data.ragged("responses").shape[1])
    metrics = balance_metrics(data, data.partition_plan, COST, ranks, "global_seqlen")
    scored = group.compute_log_prob(data)
    counts = valid_tokens(data.ragged("response_mask")).lengths.double()
    metrics["actor/entropy"] = agg_rows(scored.column("entropy_sums"), counts, "token-mean", 1.0).item()
    data = data.union(scored.select(["old_log_probs"]))
    guard.check_columns(data, 1)
    data = data.union(group.compute_ref_log_prob(data))
    guard.check_columns(data, 1)
    rewards = RowValues.on_last_tokens(scores, data.ragged("responses").layout)
    data = attach_reward(data, rewards, {})
    metrics |= shaping.shape_scores(data) | shaping.finish_rewards(data)
    data = compute_advantage(data, "grpo", num_repeat=GROUP)
    metrics |= shaping.shape_advantages(data)
    group.update_actor(data)
    group.release_batches()
    timing = {"step": time.perf_counter() - start}
    metrics |= compute_data_metrics(data, use_critic=False) | compute_timing_metrics(data, timing)
    return metrics | compute_throughout_metrics(data, timing, ranks)


def measure(rows: int, tokens: int, ranks: int, nodes: int, repeats: int = 3) -> dict[str, Any]:
    """One row, in this process, which has run nothing before; a small step takes what only a first one needs."""
    if rows > SMALL[0]:
        measure(*SMALL, repeats=1)
    group: Any = SimulatedGroup(ResourcePool([ranks // nodes] * nodes), ClassWithInitArgs(StepWorker))
    hosts = group._hosts
    seconds, extra = [], 0.0
    for number in range(repeats):
        data = make_batch(rows, tokens, ranks)
        total, hosts.layout = data.ragged("input_ids").layout.total, data.ragged("responses").layout
        scores = torch.randn(rows)
        hosts.buffer, hosts.simulated_s = torch.zeros(int(hosts.layout.lengths.max()) * (rows // ranks + 8) * 2), 0.0
        _ = hosts.layout.offsets
        sent = group.traffic.nbytes

        def step(data: DataProto = data, scores: Tensor = scores) -> dict[str, float]:
            start = time.process_time()
            metrics = run_step(group, data, scores, ranks)
            seconds.append(time.process_time() - start - hosts.simulated_s)
            return metrics

        if number == 0:
            extra = peak_extra_mb(step) or 0.0  # the first finds no segment of shared memory to use again
        else:
            gc.collect()
            step()
        sent = group.traffic.nbytes - sent
    group.stop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    size = {"rows": rows, "tokens_a_row": total / rows, "ranks": ranks, "nodes": nodes}
    work = f"{rows:,} rows of {total / rows:,.0f} tokens, {ranks} ranks on {nodes} node{'s' * (nodes > 1)}"
    row = {"work": work, **size, "tokens": total, "driver_cpu_s": min(seconds), "sent_bytes_a_token": sent / total}
    memory = {"step_extra_MiB": extra, "step_extra_bytes_a_token": extra * 2**20 / total, "peak_rss_GiB": peak}
    return {**row, **memory}


def apart(*size: int) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--only", *map(str, size)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    print(done.stdout.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def exponent(small: dict[str, float], large: dict[str, float], by: str) -> float:
    """Of the power law through two measurements."""
    return math.log(large["driver_cpu_s"] / small["driver_cpu_s"]) / math.log(large[by] / small[by])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs=4, metavar=("ROWS", "TOKENS", "RANKS", "NODES"), help="one row")
    parser.add_argument("--save", action="store_true", help="write results/scale.json")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(*given.only)))
        return
    base = apart(*BASE)
    rows, exponents = [base], {}
    for by, sizes in LARGER.items():
        rows += [apart(*size) for size in sizes]
        exponents[by] = exponent(base, rows[-1], by)
    rows += [apart(*size) for size in LARGEST]
    report("scale", [*rows, {"what": "exponents of driver CPU seconds", **exponents}])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
