"""Cost of the tail of long responses: a batch in one call, request by request, over-sampled, and partial rollouts.

``python -m benchmarks.long_tails [--save]``: two replicas (processes with a real rollout server and the hf engine) of
sixteen slots each; 32 prompts x 2 responses a step. Lengths are forced: log-normal around a median of the prompt's own,
cut at 384 tokens. No training: the weights change in name only, and seconds are those of generation. A "batch" is what
``mode=sync`` does: each replica is given its half of the rows, and goes through them in their order.

The variants take turns, step by step, so that whatever else the machine does falls on all of them; ratios are to the
batch. ``decode_steps``, the forwards of the busier replica, do not depend on the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.measure import report
from verl.data.loader import build_train_loader
from verl.trainer.buffer.over_sampling import GroupScheduler
from verl.trainer.buffer.prompt_pool import PromptPool
from verl.utils.tiny_model import make_tiny_model
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.monitor import occupancy
from verl.workers.rollout.server.client import RolloutClient

PROMPTS, BATCH, N, SLOTS, LONGEST = 128, 32, 2, 16, 384
STEPS, WARM_UP = 12, 2
REPLICAS = 2


class Prompts(Dataset):
    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict[str, Any]:
        ids = [10 + i // 64, 10 + i % 64]
        return {"input_ids": torch.tensor(ids), "raw_prompt_ids": ids, "index": i}


def length(prompt: int, seed: int) -> int:
    """Tokens of one response: log-normal, half of the spread the prompt's, half the sample's."""
    median = 30 * random.Random(prompt).lognormvariate(0, 0.8)
    return max(1, min(LONGEST, int(median * random.Random(seed).lognormvariate(0, 0.6))))


def serve(folder: str, pipe: Any) -> None:
    """A replica: its process ends with the pipe."""
    from verl.workers.rollout.hf.rollout import HFRollout
    from verl.workers.rollout.server.server import RolloutServer

    torch.set_num_threads(1)
    names = ("dtype", "load_format", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "limit_images")
    values = ("float32", "auto", SLOTS, 8192, None, None)
    sizes = {"prompt_length": 8, "response_length": LONGEST, "gpu_memory_utilization": 0.2}
    engine = HFRollout(folder, SimpleNamespace(**dict(zip(names, values, strict=True)), **sizes))
    server = RolloutServer(engine)
    pipe.send(server.start())
    while (version := pipe.recv()) is not None:
        server.pause()
        engine.version = version
        server.resume(version)
        pipe.send(version)
    server.stop()


def sampler(**settings: Any) -> GroupScheduler:
    config = {"n": N, "response_length": LONGEST, "over_sample_rate": 0.0, "max_postponements": None}
    config |= {"partial_rollout": False, "max_staleness": 1}
    loader = build_train_loader({"train_batch_size": BATCH, "dataloader_num_workers": 0}, Prompts())
    config |= {"staleness": settings.get("max_staleness", 1), **settings}
    return GroupScheduler(SimpleNamespace(**config), PromptPool(loader), BATCH, seed=1)


async def draw(client: Any, prompts: Any, row: int, seed: int) -> int:
    ids = prompts.non_tensor_batch["raw_prompt_ids"][row]
    sampling = SamplingParams(
        length(prompts.non_tensor_batch["index"][row], seed), ignore_eos=True, want_log_probs=True
    )
    return len((await client.generate(Request(tuple(ids), sampling, seed))).token_ids)


class Variant:
    """One way to draw, and what its steps cost."""

    def __init__(self, addresses: list[str], is_batch: bool, **settings: Any) -> None:
        self.sampler = sampler(**settings)
        if is_batch:
            self.sampler.history.expected = lambda key: 0.0  # rows go in their order
        parts = [[address] for address in addresses] if is_batch else [addresses]
        self.clients = [RolloutClient(part, max_running=SLOTS) for part in parts]
        self.rows: list[dict[str, float]] = []

    async def step(self, number: int, version: int) -> None:
        prompts = self.sampler.take(number)
        homes = list(itertools.islice(itertools.cycle(self.clients), len(prompts)))
        router = Router(homes, prompts.non_tensor_batch["uid"])
        before, start = await self.engine_steps(), time.perf_counter()
        sampled = await self.sampler.sample(
            prompts, router, version, lambda row, seed, own: draw(own, prompts, row, seed)
        )
        took = time.perf_counter() - start
        forwards = max(b - a for a, b in zip(before, await self.engine_steps(), strict=True))
        spans = [span for client in self.clients for span in client.take_spans()]
        row = {**sampled.metrics, **occupancy(spans, REPLICAS), "s": took, "forwards": forwards}
        self.rows.append(row | {"tokens": sum(sampled.outcomes)})

    async def engine_steps(self) -> list[int]:
        return [state["steps"] for client in self.clients for state in await client.health()]

    def result(self) -> dict[str, float]:
        """Means a step, but for those that warm up."""
        rows = self.rows[WARM_UP:]
        total = {name: sum(row[name] for row in rows) for name in rows[0]}
        return {
            "s_a_step": total["s"] / len(rows),
            "mean_length": total["tokens"] / (len(rows) * BATCH * N),
            "tokens_a_s": total["tokens"] / total["s"],
            "decode_steps": total["forwards"] / len(rows),
            "tokens_a_decode_step": total["tokens"] / total["forwards"],
            "bubble_share": total["rollout/bubble_share"] / len(rows),
            "idle_slot_share": total["rollout/idle_slot_share"] / len(rows),
            "discarded_token_share": total["rollout/tokens_discarded"] / total["tokens"],
            "stale_token_share": total.get("rollout/stale_token_share", 0.0) / len(rows),
        }


class Router:
    """Sends the requests of each prompt to the client of its row."""

    def __init__(self, homes: list[RolloutClient], uids: Any) -> None:
        self.homes = dict(zip(uids, homes, strict=True))

    async def generate(self, request: Request, *, request_id: str, **options: Any) -> Any:
        return await self.homes[request_id.split("/")[0]].generate(request, request_id=request_id, **options)

    async def abort(self, request_ids: Any = None) -> None:
        for client in set(self.homes.values()):
            await client.abort(request_ids)


VARIANTS: dict[str, dict[str, Any]] = {
    "batch": {},
    "request by request, longest first": {},
    "over_sample_rate=0.25": {"over_sample_rate": 0.25},
    "over_sample_rate=0.25, partial_rollout": {"over_sample_rate": 0.25, "partial_rollout": True},
    "the same, max_staleness=4": {"over_sample_rate": 0.25, "partial_rollout": True, "max_staleness": 4},
}


async def measure(addresses: list[str], pipes: list[Any]) -> list[dict[str, Any]]:
    variants = {name: Variant(addresses, name == "batch", **settings) for name, settings in VARIANTS.items()}
    for number in range(1, STEPS + 1):
        for pipe in pipes:
            pipe.send(number)
            pipe.recv()
        for variant in variants.values():
            await variant.step(number, version=number)
    rows: list[dict[str, Any]] = []
    mean = variants["batch"].result()["mean_length"]
    work = f"{REPLICAS} replicas of {SLOTS} slots, {BATCH} prompts x {N} responses a step, {STEPS - WARM_UP} steps; "
    work += f"log-normal lengths with mean {mean:.0f}, at most {LONGEST} tokens"
    for name, variant in variants.items():
        row = variant.result()
        base = rows[0] if rows else row
        ratios = {f"{key}_ratio": row[key] / base[key] for key in ("tokens_a_s", "tokens_a_decode_step")}
        rows.append({"what": name, "work": work, **row, **ratios})
        for client in variant.clients:
            await client.close()
    return rows


def main() -> None:
    context, pipes = multiprocessing.get_context("spawn"), []
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", family="qwen2")
        for _ in range(REPLICAS):
            mine, theirs = context.Pipe()
            context.Process(target=serve, args=(str(model), theirs), daemon=True).start()
            pipes.append(mine)
        rows = asyncio.run(measure([pipe.recv() for pipe in pipes], pipes))
        for pipe in pipes:
            pipe.send(None)
    report("long_tails", rows)


if __name__ == "__main__":
    main()
