"""Packed rows against padded ones, and shared prompts against prompts that run for every response: whole train steps.

``python -m benchmarks.packing [--save]``: forward, backward and optimizer of one mini-batch on a model of 2.5M, CPU
seconds of one thread. ``packed``: log-normal lengths, the same rows and limits both ways. ``shared``: n = 8 responses a
prompt, packed both ways. ``tokens_ratio`` is what could be won if every token, real or padding, cost the same. On CPU
micro-batches are kept small, where like lengths meet and there is little to pad; ``kept_small=false`` lets them be as
large as the limit says, as on a GPU. The two ways of a row take turns, so that whatever else the machine does falls on
both; ratios compare, tokens a second of two machines do not.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.measure import report, work_words
from tests.support.losses import optim_section, ppo_loss
from tests.support.tiny_models import join_batch, make_tiny_model
from verl.batch.balancing import plan_micro_batches
from verl.models.loader import ModelSpec
from verl.protocol import DataProto
from verl.workers.engine import Engine, MicroBatching, build_engine
from verl.workers.engine.engine import BEST_TOKENS

REPEAT = 3
N = 8
MODEL = "2.5M"


def batch(prompts: Sequence[int], responses: Sequence[Sequence[int]]) -> DataProto:
    """Random rows: of each prompt's length, and of each of its responses'."""
    draw = torch.Generator().manual_seed(0)
    rows, answers = [], []
    for length, lengths in zip(prompts, responses, strict=True):
        prompt = torch.randint(4, 100, (length,), generator=draw)
        rows += [prompt] * len(lengths)
        answers += [torch.randint(4, 100, (one,), generator=draw) for one in lengths]
    return join_batch(rows, answers, max(prompts), max(map(len, answers)), draw)


def log_normal(count: int, median: int, longest: int, seed: int) -> list[int]:
    draw = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return (draw * 0.8).exp().mul(median).long().clamp(1, longest).tolist()


def engine(folder: str, **spec: bool) -> Engine:
    built = ModelSpec(folder, gradient_checkpointing=False, **spec)
    return build_engine("local", built, None, optim_section(), total_steps=1000, grad_clip=1.0)


def seconds(engines: Sequence[Engine], data: DataProto, split: MicroBatching) -> tuple[list[float], float]:
    """The least seconds of a step of each engine, and the median over rounds of the first's over the last's."""
    rounds = []
    for number in range(REPEAT + 1):
        took = []
        for one in engines:
            start = time.process_time()
            one.train_step(data, ppo_loss(), split)
            took.append(time.process_time() - start)
        rounds += [took] if number else []
    return [min(column) for column in zip(*rounds, strict=True)], statistics.median(t[0] / t[-1] for t in rounds)


def row(
    name: str, engines: Sequence[Engine], data: DataProto, split: MicroBatching, lengths: str, **details: Any
) -> dict[str, Any]:
    counts = {"rows": len(data), "tokens": int(data.ragged("input_ids").layout.lengths.sum())}
    tokens = counts["tokens"]
    took, ratio = seconds(engines, data, split)
    without, having = (tokens / one for one in took)
    limits = {name: value for name, value in split._asdict().items() if value is not None}
    speeds = {"tokens_per_s_without": without, "tokens_per_s": having, "speed_up": ratio}
    work = f"{MODEL}, {work_words(counts)}, {lengths}"
    return {"name": name, "work": work, **limits, **details, **counts, **speeds}


def padded_cells(data: DataProto, split: MicroBatching) -> int:
    lengths = data.ragged("input_ids").layout.lengths.tolist()
    groups = plan_micro_batches(lengths, split, best_tokens=BEST_TOKENS.get("cpu"))
    return sum(len(group) * max(lengths[row] for row in group) for group in groups)


def packed_rows(folder: str) -> Iterator[dict[str, Any]]:
    engines = engine(folder), engine(folder, remove_padding=True)
    data = batch(log_normal(32, 40, 128, seed=2), [[one] for one in log_normal(32, 100, 600, seed=1)])
    tokens = sum(data.ragged("input_ids").layout.lengths.tolist())
    for kept_small in (True, False):
        with patch.dict(BEST_TOKENS, clear=not kept_small):
            for split in (MicroBatching(size=8), MicroBatching(max_tokens=4096)):
                details = {"kept_small": kept_small, "tokens_ratio": padded_cells(data, split) / tokens}
                yield row("packed", engines, data, split, "log-normal lengths", **details)


def shared_rows(folder: str) -> Iterator[dict[str, Any]]:
    packed = engine(folder, remove_padding=True)
    shared = engine(folder, remove_padding=True, share_prompts=True)
    for prompt, response in ((512, 64), (512, 128), (128, 128), (64, 256)):
        data = batch([prompt] * 2, [[response] * N] * 2)
        details = {"prompt": prompt, "response": response, "n": N}
        details["tokens_ratio"] = N * (prompt + response) / (prompt + N * response)
        lengths = f"{prompt} prompt and {response} response tokens, n={N}"
        found = row("shared", (packed, shared), data, MicroBatching(max_tokens=8192), lengths, **details)
        yield found | {"share_of_bound": found["speed_up"] / found["tokens_ratio"]}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(folder, "qwen2", size=MODEL)
        report("packing", [*packed_rows(model), *shared_rows(model)])


if __name__ == "__main__":
    sys.exit(main())
