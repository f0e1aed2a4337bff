"""Sending a batch to two workers and back: its cost follows the real tokens, not the maximum length.

``python -m benchmarks.dispatch [--save]``; CPU milliseconds of the driver and wall milliseconds of the round trip, with
a plain copy of the same real bytes next to them.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch

from benchmarks.measure import report
from verl.batch.ragged import Layout, Ragged
from verl.protocol import DataProto
from verl.single_controller import get_controller
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register

READS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "old_log_probs", "advantages")


class EchoWorker(Worker):
    """Reads what a log-prob call reads and returns a column of the responses' size."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=READS)
    def score(self, data: DataProto) -> DataProto:
        responses = data.ragged("responses")
        return DataProto.from_ragged({"old_log_probs": responses.like(responses.values.float())})


def make_batch(rows: int, width: int, mean_length: int, seed: int = 0) -> DataProto:
    """Log-normal response lengths in a window of ``width``, half as long prompts; ragged, as rollouts make it."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean_length), 0.8, (2, rows)).astype(int)
    response = torch.as_tensor(lengths[0]).clamp(1, width)
    prompt = torch.as_tensor(lengths[1] // 2).clamp(1, width // 4)
    p = width // 4
    whole = Layout(p - prompt, prompt + response, p + width)
    answer = Layout(torch.zeros_like(response), response, width)
    ids = torch.randint(0, 50000, (int(whole.lengths.sum()),))
    tokens = torch.randint(0, 50000, (int(answer.lengths.sum()),))
    real = torch.randn(len(tokens))
    return DataProto.from_ragged(
        {
            "input_ids": Ragged(ids, whole),
            "attention_mask": Ragged(torch.ones_like(ids), whole),
            "position_ids": Ragged(torch.arange(len(ids)), whole, "position"),
            "responses": Ragged(tokens, answer),
            "response_mask": Ragged(torch.ones_like(tokens), answer),
            "advantages": Ragged(real, answer),
            "old_log_probs": Ragged(real.clone(), answer),
        }
    )


def round_trip(group: object, data: DataProto, repeat: int = 15) -> dict[str, float]:
    wall, cpu = [], []
    for _ in range(repeat):
        start, start_cpu = time.perf_counter(), time.process_time()
        result = group.score(data)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        assert len(result) == len(data)
    return {"wall_ms": min(wall) * 1000, "driver_cpu_ms": min(cpu) * 1000}


def real_bytes(data: DataProto) -> int:
    return sum(data.ragged(name).values.nbytes for name in READS)


def copy_ms(count: int) -> float:
    source = torch.zeros(count, dtype=torch.uint8)
    times = []
    for _ in range(15):
        start = time.perf_counter()
        source.clone()
        times.append(time.perf_counter() - start)
    return min(times) * 1000


def main() -> None:
    rows = []
    for name in ("local", "ray"):
        controller = get_controller(name)
        controller.start({"num_cpus": 2})
        try:
            pool = controller.ResourcePool(process_on_nodes=[2])
            group = controller.WorkerGroup(pool, controller.ClassWithInitArgs(EchoWorker), device_name="cpu")
            for count, width, mean in ((256, 4096, 200), (1024, 4096, 200), (2048, 4096, 200), (1024, 8192, 200)):
                data = make_batch(count, width, mean)
                size = real_bytes(data)
                cost = round_trip(group, data)
                row = {"controller": name, "rows": count, "width": width, "real_MB": size / 1e6, **cost}
                rows.append({**row, "ratio_to_copy": cost["wall_ms"] / copy_ms(size)})
        finally:
            controller.stop()
    report("dispatch", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
