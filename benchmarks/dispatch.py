"""Sending a batch to two workers and back: its cost follows the real tokens, not the maximum length.

``python -m benchmarks.dispatch [--save]``; CPU milliseconds of the driver and wall milliseconds of the round trip, with
a plain copy of the same real bytes next to them. Then, by method, the bytes a valid token that the calls of a PPO step
and of a GRPO step send and receive, generation aside.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from benchmarks.measure import report, work_words
from verl.algorithms.aggregate import agg_rows
from verl.batch.layout import Layout
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost
from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
from verl.protocol import DataProto
from verl.single_controller import get_controller
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.nonfinite import NonFiniteGuard

TOKENS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask", "uid")
UPDATE_COLUMNS = (
    *TOKENS,
    *("old_log_probs", "ref_log_prob", "rollout_log_probs", "advantages", "returns", "values"),
    *("token_level_rewards", "token_level_scores"),
)
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


class StepWorker(Worker):
    """The calls of a step after generation: each reads and returns the columns that the real one does."""

    @staticmethod
    def _scored(data: DataProto, *names: str) -> DataProto:
        ids, responses = data.ragged("input_ids"), data.ragged("responses")
        first = ids.values.sum() + data.ragged("response_mask").values.sum()  # read, so that they are made
        values = torch.full((responses.layout.total,), float(first))
        values += torch.arange(responses.layout.total) / 7
        return DataProto.from_ragged({name: responses.like(values + i) for i, name in enumerate(names)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=TOKENS, balanced=True, stays=("old_log_probs", "entropys"))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        scored = self._scored(data, "old_log_probs", "entropys")
        return scored.put("entropy_sums", scored.ragged("entropys").row_sums(data.ragged("response_mask")))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=TOKENS, balanced=True, stays=("ref_log_prob",))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._scored(data, "ref_log_prob")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=TOKENS, balanced=True)
    def compute_values(self, data: DataProto) -> DataProto:
        return self._scored(data, "values")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=UPDATE_COLUMNS, balanced=True)
    def update_critic(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": [float(data.ragged("returns").values.sum())]}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=UPDATE_COLUMNS, balanced=True)
    def update_actor(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": [float(data.ragged("advantages").values.sum())]}})


def make_rollouts(rows: int, width: int, mean_length: int, seed: int = 0) -> DataProto:
    """The batch of `make_batch` as a rollout returns it, in single turns."""
    given = make_batch(rows, width, mean_length, seed)
    whole, response = given.ragged("input_ids").layout, given.ragged("responses")
    prompt = whole.window(0, whole.width - response.layout.width)
    prompts = Ragged(torch.randint(0, 50000, (prompt.total,)), prompt)
    columns = {"prompts": prompts, "responses": response, **join_windows(prompts, response)}
    columns["response_mask"] = response.like(torch.ones_like(response.values))
    data = DataProto.from_ragged(columns, non_tensors={"uid": [f"{row // 8}" for row in range(rows)]})
    data.meta_info["global_token_num"] = whole.lengths.tolist()
    mini = MiniBatches(rows // 4)
    scores = {"compute_log_prob": "actor", "compute_ref_log_prob": "actor", "compute_values": "critic"}
    calls = {name: CallPlan(True, follows=f"update_{role}") for name, role in scores.items()}
    calls |= {name: CallPlan(True, mini) for name in ("update_actor", "update_critic")}
    data.partition_plan = PartitionPlan(calls, RowCost())
    return data


def run_step(group: Any, data: DataProto, with_critic: bool) -> None:
    """The calls of a step and, between them, the columns that the driver makes and those that it reads."""
    scored = group.compute_log_prob(data)
    mask = data.ragged("response_mask")
    agg_rows(scored.column("entropy_sums"), mask.row_sums(), "token-mean", 1.0).item()
    scored.pop(["entropys", "entropy_sums"])
    data = data.union(scored).union(group.compute_ref_log_prob(data))
    guard = NonFiniteGuard(3)
    guard.check_columns(data, 1)
    responses = data.ragged("responses")
    layout = responses.layout
    rewards = torch.zeros(layout.total)
    rewards[layout.offsets[1:] - 1] = torch.randn(len(layout))
    data.put("token_level_scores", responses.like(rewards)).put("token_level_rewards", responses.like(rewards))
    if with_critic:
        data = data.union(group.compute_values(data))
        guard.check_columns(data, 1)
        data.put("advantages", responses.like(torch.randn(layout.total)))
        data.put("returns", responses.like(torch.randn(layout.total)))
        group.update_critic(data)
    else:
        advantages = layout.spread(torch.randn(len(layout)))
        data.put("advantages", responses.like(advantages)).put("returns", responses.like(advantages))
    group.update_actor(data)


def step_traffic(group: Any, name: str, with_critic: bool) -> dict[str, Any]:
    """Bytes per valid token of one step, in all and by method, and the driver's CPU seconds."""
    data = make_rollouts(1024, 4096, 200)
    tokens = data.ragged("input_ids").layout.total
    run_step(group, make_rollouts(1024, 4096, 200, seed=1), with_critic)  # the first step finds new memory
    before = Counter(group.traffic.sent), Counter(group.traffic.received)
    start = time.process_time()
    run_step(group, data, with_critic)
    cpu = time.process_time() - start
    now = group.traffic
    sent, received = now.sent - before[0], now.received - before[1]
    by_method = {
        method: {"sent": round(sent[key] / tokens, 2), "received": round(received[key] / tokens, 2)}
        for key in now.sent
        if sent[key] and (method := key[1]).startswith(("compute", "update", "__fetch"))
    }
    row = {"what": "bytes per real token a step", "controller": name, "kind": "ppo" if with_critic else "grpo"}
    total = sum(part["sent"] + part["received"] for part in by_method.values())
    size = {"rows": 1024, "width": 4096, "tokens": tokens}
    row |= {"work": work_words({**size, "ranks": 2}), **size, "responses": data.ragged("responses").layout.total}
    return {**row, "total": round(total, 2), "by_method": by_method, "driver_cpu_ms": round(1000 * cpu, 1)}


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
                counts = {"rows": count, "width": width, "tokens": data.ragged("input_ids").layout.total}
                row = {"controller": name, "work": work_words({**counts, "ranks": 2}), **counts}
                rows.append({**row, "real_MB": size / 1e6, **cost, "ratio_to_copy": cost["wall_ms"] / copy_ms(size)})
            group.stop()
            group = controller.WorkerGroup(pool, controller.ClassWithInitArgs(StepWorker), device_name="cpu")
            rows += [step_traffic(group, name, with_critic) for with_critic in (False, True)]
        finally:
            controller.stop()
    report("dispatch", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
