"""Advantages and losses of one batch: CPU milliseconds of one thread, beside a copy of the same bytes.

``python -m benchmarks.algorithms [--save]``. The functions read and write padded (B, R) tensors:
``ratio_to_padded_copy`` compares with copying those, ``ratio_to_real_copy`` with copying their real tokens only.
Rows of one run compare; runs on a busy machine do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import block_cost, report
from verl.algorithms.advantage import get_adv_estimator_fn
from verl.algorithms.policy_loss import compute_policy_loss
from verl.algorithms.value_loss import compute_value_loss

GROUP = 8
CONFIG = SimpleNamespace(gamma=0.99)


def make_batch(rows: int, width: int, mean_length: int, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-normal response lengths in a window of ``width``: the int64 mask, and float32 columns."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean_length), 0.8, rows).astype(int).clip(1, width)
    mask = (torch.arange(width) < torch.as_tensor(lengths)[:, None]).long()
    g = torch.Generator().manual_seed(seed)
    names = ("token_level_rewards", "values", "returns", "advantages", "old_log_prob")
    return mask, {name: torch.randn(rows, width, generator=g) * mask for name in names}


def calls(mask: Tensor, columns: dict[str, Tensor]) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """(name, number of (B, R) float tensors read and written, the call)."""
    rewards, values = columns["token_level_rewards"], columns["values"]
    index = np.repeat([f"prompt-{i}" for i in range(len(mask) // GROUP)], GROUP).astype(object)
    gae = get_adv_estimator_fn("gae")
    yield "gae", 4, lambda: gae(rewards, values, mask, 0.99, 0.95)
    for name in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        yield name, 2, partial(get_adv_estimator_fn(name), rewards, mask, index)
    reinforce = get_adv_estimator_fn("reinforce_plus_plus")
    yield "reinforce_plus_plus", 3, lambda: reinforce(rewards, mask, CONFIG)

    old = columns["old_log_prob"]
    new = (old + 0.1 * columns["returns"]).requires_grad_(True)

    def policy_loss() -> None:
        new.grad = None
        compute_policy_loss(old, new, columns["advantages"], mask, 0.2)[0].backward()

    def value_loss() -> None:
        new.grad = None
        compute_value_loss(new, columns["returns"], values, mask, 0.5)[0].backward()

    yield "policy loss, forward and backward", 4, policy_loss
    yield "value loss, forward and backward", 4, value_loss


def copy_ms(num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return block_cost(lambda: target.copy_(source), repeat=15)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for count, width in ((1024, 4096), (1024, 2048), (1024, 8192), (256, 4096)):
        mask, columns = make_batch(count, width, mean_length=200)
        tokens = int(mask.sum())
        for name, num_tensors, call in calls(mask, columns):
            cost = block_cost(call, repeat=15)
            # float32 columns and the int64 mask
            padded, real = (copy_ms(cells * (4 * num_tensors + 8)) for cells in (mask.numel(), tokens))
            ratios = {"ratio_to_padded_copy": cost / padded, "ratio_to_real_copy": cost / real}
            rows.append({"name": name, "rows": count, "width": width, "tokens": tokens, "cpu_ms": cost, **ratios})
    report("algorithms", rows)


if __name__ == "__main__":
    sys.exit(main())
