"""Scores a second of the built-in scorers, and the time of validation metrics.

``python -m benchmarks.scorers [--save]``: ``gsm8k`` reads long responses; ``math``: answers as spelt in data sets, of
which one in eight needs algebra; ``algebra``: answers that all do, each another, next to math-verify called bare in the
same processes; ``code``: programs with three tests each. One and two workers, each with the child that does its
algebra. ``metrics``: 10k prompts of 16 samples, 1000 resamples, without and with majority votes.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from benchmarks.measure import report
from verl.rewards.scorers import default_compute_score

Row = tuple[str, str, Any]
CHUNK = 50
REPEAT = 3
WORK = {
    "gsm8k": "responses of {length:,} characters",
    "math": "answers of eight spellings, one in eight needs algebra",
    "algebra": "answers that all need algebra, in a fork server",
    "math-verify, bare": "answers as for algebra, in the worker, without limits",
    "code": "programs of three tests, each in its own sandbox",
}
WORDS = "so then we have that the sum of these two is more than what she sold on the day before".split()


def gsm8k_rows(count: int) -> list[Row]:
    draw = random.Random(0)
    text = " ".join(draw.choices(WORDS, k=400))
    return [("openai/gsm8k", f"{text}\n#### {n:,}", str(n + n % 2)) for n in range(count)]


def math_rows(count: int) -> list[Row]:
    forms = [
        lambda n: (f"{n}", f"{n}.0"),
        lambda n: (rf"\frac{{{n}}}{{7}}", rf"\dfrac{{{n}}}{{7}}"),
        lambda n: (f"({n},{n + 1})", rf"\left( {n}, {n + 1} \right)"),
        lambda n: (rf"{n}\text{{ cm}}", f"{n}"),
        lambda n: (f"{n}", f"{n + 1}"),
        lambda n: (f"{n}%", f"{n}"),
        lambda n: (rf"\text{{name {n}}}", f"name {n}"),
        lambda n: (rf"\sqrt{{{4 * n}}}", rf"2\sqrt{{{n}}}"),
    ]
    pairs = (forms[n % len(forms)](n) for n in range(1, count + 1))
    return [("lighteval/MATH", rf"thus \boxed{{{answer}}}.", gold) for gold, answer in pairs]


def algebra_rows(count: int) -> list[Row]:
    return [("lighteval/MATH", rf"\boxed{{{n} + x}}", f"x+{n}") for n in range(count)]


def code_rows(count: int) -> list[Row]:
    cases = {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7", "11"]}
    return [("taco", f"```python\nprint(sum(map(int, input().split())))  # {n}\n```", cases) for n in range(count)]


def score(rows: list[Row]) -> float:
    results = [default_compute_score(*row) for row in rows]
    return sum(result["score"] if isinstance(result, dict) else result for result in results)


def bare_math_verify(rows: list[Row]) -> float:
    """Cost of a scorer that calls math-verify for every row, without limits."""
    from math_verify import parse, verify

    logging.disable(logging.WARNING)
    read = partial(parse, parsing_timeout=None)
    return sum(verify(read(rf"\boxed{{{gold}}}"), read(text), timeout_seconds=None) for _, text, gold in rows)


def throughput(
    pool: ProcessPoolExecutor, name: str, rows: list[Row], scorer: Callable[[list[Row]], float], chunk: int = CHUNK
) -> dict[str, Any]:
    """The most rows a second of ``REPEAT`` rounds, each of other rows so that no answer is known already."""
    chunks = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
    share = len(chunks) // (REPEAT + 1)
    best = 0.0
    for number in range(REPEAT + 1):  # in the first the workers start their children
        some = chunks[number * share : (number + 1) * share]
        start = time.perf_counter()
        list(pool.map(scorer, some))
        seconds = time.perf_counter() - start
        best = max(best, sum(map(len, some)) / seconds) if number else 0.0
    scored, length = share * chunk, 100 * round(sum(len(row[1]) for row in rows) / len(rows) / 100)
    work = f"{scored:,} {WORK[name].format(length=length)}"
    counts = {"workers": pool._max_workers, "rows": scored}
    return {"name": name, "work": work, **counts, "rows_per_s": best, "ms_a_row": 1000 / best}


def scorer_rows() -> Iterator[dict[str, Any]]:
    sets = {"gsm8k": gsm8k_rows(40_000), "math": math_rows(4_000), "algebra": algebra_rows(800)}
    for workers in (1, 2):
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            for name, rows in sets.items():
                yield throughput(pool, name, rows, score)
            yield throughput(pool, "math-verify, bare", sets["algebra"], bare_math_verify)
            yield throughput(pool, "code", code_rows(80), score, chunk=5)


def metrics_rows() -> Iterator[dict[str, Any]]:
    import numpy as np  # here, since worker processes import this module too

    from verl.trainer.ppo.metric_utils import process_validation_metrics

    draw = np.random.default_rng(0)
    prompts, n = 10_000, 16
    skill = np.repeat(draw.random(prompts), n)
    columns: dict[str, list] = {"reward": (draw.random(prompts * n) < skill).astype(float).tolist()}
    sources, uids = ["s"] * (prompts * n), np.repeat(np.arange(prompts), n).tolist()
    votes = draw.integers(0, 8, prompts * n).tolist()
    for name, more in (("metrics", {}), ("metrics, with votes", {"pred": list(map(str, votes))})):
        start = time.process_time()
        process_validation_metrics(sources, uids, columns | more)
        seconds = time.process_time() - start
        counts = {"prompts": prompts, "samples": n, "draws": 1000}
        work = f"{prompts:,} prompts, {n} samples each, 1,000 resamples"
        yield {"name": name, "work": work, **counts, "cpu_s": seconds}


def main() -> None:
    report("scorers", [*scorer_rows(), *metrics_rows()])


if __name__ == "__main__":
    sys.exit(main())
