"""The driver's part of a step between generation and the end of the update, with the workers simulated.

``python -m benchmarks.scale [--save]``: rows of 1k prompt and 15k response tokens on average, GRPO with a reference.
Batches are divided, sent, joined and united as in `RayPPOTrainer`; each message is pickled and copied into shared
memory as it is for a worker. What a worker does with it is not counted, nor are rewards, advantages and metrics. Driver
CPU seconds and the memory that a step adds, and how the seconds grow with rows, tokens a row and ranks (exponents of a
power law).
"""

from __future__ import annotations

import gc
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.dispatch import StepWorker
from benchmarks.measure import report
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost
from verl.batch.ragged import Layout, Ragged, RemoteRows, join_windows
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

RETURNS = {"compute_log_prob": ("old_log_probs",), "compute_ref_log_prob": ("ref_log_prob",)}


class SimulatedHosts(Hosts):
    """Ranks without processes: they answer with float32 columns of their rows, made of one buffer."""

    def __init__(self, world_size: int):
        super().__init__()
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
        calls = []
        for rank, args, kwargs, _ in requests:
            packed = self.pools[rank].pack((args, kwargs))
            self.traffic.add(role, method, sent=packed.nbytes)
            with self._simulated():
                call = Call(self, rank, role, method)
                sent = next((value for value in args if isinstance(value, SentBatch)), None)
                call.finish(output=self._output(method, sent))
                calls.append(call)
        return calls

    def _output(self, method: str, sent: SentBatch | None) -> Any:
        if sent is None:
            return {}
        if method not in RETURNS:
            return DataProto(meta_info={"metrics": {"loss": [0.0]}})
        layout = self.layout.select(torch.from_numpy(sent.rows))
        names = RETURNS[method]
        columns: dict[str, Ragged] = {name: Ragged(self.buffer[: layout.total], layout) for name in names}
        columns |= {name: RemoteRows(layout, 0, torch.float32, (), True) for name in names if name in sent.stays}
        return KeptOutput(DataProto.from_ragged(columns), names)

    def _wait(self, handles: Sequence, timeout: float | None) -> list:
        return [handle.outcome() for handle in handles]

    def _stop(self, at_once: bool) -> None:
        for pool in self.pools:
            pool.close()


class SimulatedGroup(WorkerGroup):
    """A worker group on `SimulatedHosts`."""

    def _start(
        self, resource_pool: ResourcePool, roles: Mapping[str, ClassWithInitArgs], timeout: float, **_: Any
    ) -> Hosts:
        return SimulatedHosts(resource_pool.world_size)


def make_batch(rows: int, tokens: int, ranks: int) -> DataProto:
    """Rows of ``tokens`` tokens on average, a sixteenth of them the prompt's, in groups of 8."""
    random = np.random.default_rng(0)
    sizes = np.minimum(random.lognormal(np.log(tokens * 0.75), 0.6, rows), 2 * tokens).astype(np.int64) + 1
    prompt = np.repeat(random.integers(tokens // 32 + 1, tokens // 11 + 2, -(-rows // 8)), 8)[:rows]
    width = 2 * tokens + 1
    prompts = ragged(prompt, width, "left")
    responses = ragged(sizes, width, "right")
    columns = {"prompts": prompts, "responses": responses, **join_windows(prompts, responses)}
    columns["response_mask"] = responses.constant(1)
    data = DataProto.from_ragged(columns, non_tensors={"uid": [f"prompt-{row // 8}" for row in range(rows)]})
    data.meta_info["global_token_num"] = data.ragged("input_ids").layout.lengths.tolist()
    calls = {name: CallPlan(True, follows="update_actor") for name in ("compute_log_prob", "compute_ref_log_prob")}
    calls["update_actor"] = CallPlan(True, MiniBatches(max(ranks, rows // 4)))
    data.partition_plan = PartitionPlan(calls, RowCost())
    return data


def ragged(lengths: np.ndarray, width: int, side: Any) -> Ragged:
    """Token ids of rows of these lengths."""
    sizes = torch.from_numpy(lengths)
    starts = width - sizes if side == "left" else torch.zeros_like(sizes)
    total = int(sizes.sum())
    return Ragged(torch.arange(total, dtype=torch.int64) % 150_000, Layout(starts, sizes, width))


def run_step(group: Any, data: DataProto, advantages: Ragged) -> None:
    """The calls of a GRPO step, and how their results become columns of the batch."""
    data = data.union(group.compute_log_prob(data))
    data = data.union(group.compute_ref_log_prob(data))
    data.put("advantages", advantages).put("returns", advantages)
    group.update_actor(data)
    group.release_batches()


def measure(rows: int, tokens: int, ranks: int, repeats: int = 3) -> dict[str, float]:
    group: Any = SimulatedGroup(ResourcePool([ranks]), ClassWithInitArgs(StepWorker))
    hosts = group._hosts
    best = math.inf
    for _ in range(repeats):
        data = make_batch(rows, tokens, ranks)
        total = data.ragged("input_ids").layout.total
        responses = data.ragged("responses")
        hosts.layout = responses.layout
        advantages = responses.like(responses.layout.spread(torch.randn(rows)))
        hosts.buffer, hosts.simulated_s = torch.zeros(int(hosts.layout.lengths.max()) * (rows // ranks + 8) * 2), 0.0
        _ = hosts.layout.offsets
        gc.collect()
        sent, start = group.traffic.nbytes, time.process_time()
        run_step(group, data, advantages)
        best = min(best, time.process_time() - start - hosts.simulated_s)
        sent = group.traffic.nbytes - sent
    group.stop()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    row = {"rows": rows, "tokens_a_row": total / rows, "ranks": ranks, "tokens": total, "driver_cpu_s": best}
    return {**row, "sent_bytes_a_token": sent / total, "peak_rss_GiB": peak}


def exponent(small: dict[str, float], large: dict[str, float], by: str) -> float:
    """Of the power law through two measurements."""
    return math.log(large["driver_cpu_s"] / small["driver_cpu_s"]) / math.log(large[by] / small[by])


def main() -> None:
    base = measure(2048, 4096, 128)
    rows = [base]
    exponents = {}
    for by, sizes in (("rows", (8192, 4096, 128)), ("tokens_a_row", (2048, 16384, 128)), ("ranks", (2048, 4096, 512))):
        rows.append(measure(*sizes))
        exponents[by] = exponent(base, rows[-1], by)
    rows.append(measure(8192, 16384, 512))
    report("scale", [*rows, {"what": "exponents of driver CPU seconds", **exponents}])


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
