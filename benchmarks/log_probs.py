"""Log-probs, entropy and their gradients from hidden states: peak memory and time of chunks next to whole logits.

``python -m benchmarks.log_probs [--tokens 4096] [--vocab 151936] [--hidden 256] [--save]``. Every way runs in a process
of its own, forward and backward. On CUDA the same by ``torch.cuda`` (bf16, ``triton`` where liger-kernel is installed).
Memory is counted above the inputs. The naive way at the default size needs 17 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.measure import report
from verl.models.token_outputs import chunked_log_probs

LinearCrossEntropyOptions = getattr(
    torch.nn, "LinearCrossEntropyOptions", None
)  # newer than the oldest torch we run on
MB = 1 << 20
Scores = tuple[Tensor, Tensor | None]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, want_entropy: bool) -> Scores:
    """Through whole fp32 logits and their log-softmax."""
    log_p = torch.log_softmax((hidden @ weight.t()).float(), -1)
    entropy = -(log_p.exp() * log_p).sum(-1) if want_entropy else None
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor, want_entropy: bool, **how: bool) -> Scores:
    """As engines do."""
    return chunked_log_probs(hidden, weight, targets, want_entropy=want_entropy, **how)


def torchs(hidden: Tensor, weight: Tensor, targets: Tensor, want_entropy: bool) -> Scores:
    """torch's own fused loss, in chunks of 512 rows; gives no entropy, and log-probs in the weights' precision."""
    options = LinearCrossEntropyOptions(batch_chunk_size=512)
    loss = torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
    return -loss, None


def ways(device: str) -> dict[str, Callable[..., Scores]]:
    """Implementations that run here, by name."""
    found = {"naive": naive, "chunked": chunked}
    if LinearCrossEntropyOptions is not None:
        found["torch linear_cross_entropy"] = torchs
    if device == "cuda":
        found["chunked, compiled"] = partial(chunked, compiled=True)
        if find_spec("liger_kernel") is not None:
            found["chunked, triton"] = partial(chunked, triton=True)
    return found


def has_entropy(name: str) -> bool:
    return name not in ("torch linear_cross_entropy", "chunked, triton")


def cost(name: str, entropy: bool, sizes: argparse.Namespace) -> dict[str, float]:
    """Peak memory above the inputs and the time of one forward and backward pass, in this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype, requires_grad=True)
    weight = (torch.randn(sizes.vocab, sizes.hidden, device=device, dtype=dtype) * 0.05).requires_grad_()
    targets = torch.randint(sizes.vocab, (sizes.tokens,), device=device)
    way = ways(device)[name]

    def run() -> None:
        log_probs, entropies = way(hidden, weight, targets, entropy)
        loss = log_probs.sum() if entropies is None else log_probs.sum() + 0.1 * entropies.sum()
        loss.backward()

    if device == "cuda":
        for _ in range(2):  # compiles
            run()
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before, start, end = torch.cuda.memory_allocated(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        return {"peak_mb": (torch.cuda.max_memory_allocated() - before) / MB, "ms": start.elapsed_time(end)}
    before, start = psutil.Process().memory_info().rss, time.process_time()
    run()
    spent = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    return {"peak_mb": (peak - before) / MB, "cpu_ms": spent * 1000}


def measured(name: str, entropy: bool, sizes: argparse.Namespace) -> dict[str, float]:
    """``cost`` in a process of its own."""
    words = [word for key in ("tokens", "vocab", "hidden") for word in (f"--{key}", str(getattr(sizes, key)))]
    command = [sys.executable, "-m", "benchmarks.log_probs", "--only", name, *words, *(["--entropy"] * entropy)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"{name}: {run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, size in (("tokens", 4096), ("vocab", 151936), ("hidden", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--only", help="one way, in this process")
    parser.add_argument("--entropy", action="store_true")
    parser.add_argument("--save", action="store_true")
    sizes = parser.parse_args()
    if sizes.only:
        print(json.dumps(cost(sizes.only, sizes.entropy, sizes)))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = {"tokens": sizes.tokens, "vocab": sizes.vocab, "hidden": sizes.hidden, "device": device}
    rows: list[dict[str, Any]] = []
    for entropy in (False, True):
        whole: dict[str, float] = {}
        for name in ways(device):
            if entropy and not has_entropy(name):
                continue
            found = measured(name, entropy, sizes)
            whole = whole or found
            ratios = {f"{key}_share_of_naive": value / whole[key] for key, value in found.items()}
            rows.append({"way": name, "entropy": entropy, **shape, **found, **ratios})
    report("log_probs", rows)


if __name__ == "__main__":
    main()
