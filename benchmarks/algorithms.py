"""Advantages and losses of one batch: CPU milliseconds of one thread, next to a copy of the same bytes.

``python -m benchmarks.algorithms [--save]``; ``--every`` measures every registered name at 1024 x 4096 instead: the
median of its time, and how far memory rises. The functions read and write padded (B, R) tensors, or with "without
padding" the columns of an update: ``ratio_to_padded_copy`` compares with copying those, ``ratio_to_real_copy`` with
copying their real tokens only.
Rows of one run compare; runs on a busy machine do not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import block_cost, median_cost, peak_extra_mb, report, work_words
from verl.algorithms.advantages import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
from verl.algorithms.losses import POLICY_LOSS_REGISTRY, compute_policy_loss, compute_value_loss, get_policy_loss_fn
from verl.algorithms.valid_tokens import values_of
from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.config.actor import ActorConfig

GROUP = 8
SIZES = (1024, 4096, 200), (1024, 2048, 200), (1024, 8192, 200), (256, 4096, 200), (1024, 4096, 560)
"""Rows, width, and the median length."""
CONFIG = SimpleNamespace(gamma=0.99)
OF_LOSSES = "old_log_prob", "advantages", "returns", "values"


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

    new = columns["old_log_prob"] + 0.1 * columns["returns"]
    layout = Layout.from_mask(mask)
    for form, of in (("", lambda column: column), (" without padding", lambda x: Ragged.from_padded(x, layout))):
        old, adv, returns, values, own = map(of, (*(columns[name] for name in OF_LOSSES), mask))
        leaf = values_of(of(new)).detach().requires_grad_(True)
        policy_loss = partial(compute_policy_loss, old, leaf, adv, own, 0.2)
        yield f"policy loss{form}, forward and backward", 4, _trained(policy_loss, leaf)
        value_loss = partial(compute_value_loss, leaf, returns, values, own, 0.5)
        yield f"value loss{form}, forward and backward", 4, _trained(value_loss, leaf)


def copy_ms(num_bytes: int) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    return block_cost(lambda: target.copy_(source), repeat=15)


def every_call(mask: Tensor, columns: dict[str, Tensor]) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """(kind, name, the call) of every estimator, and of every policy loss forward and backward."""
    extras = {"a": np.arange(len(mask)) % 3.0, "b": np.arange(len(mask)) % 5.0}
    known = {
        **columns,
        "response_mask": mask,
        "index": np.repeat([f"prompt-{i}" for i in range(len(mask) // GROUP)], GROUP).astype(object),
        "old_log_probs": -columns["old_log_prob"].abs(),
        "sum_pi_squared": columns["values"].sigmoid() * mask,
        "reward_baselines": columns["values"][:, 0],
        "non_tensor_batch": extras,
        "gamma": 0.99,
        "lam": 0.95,
        "config": SimpleNamespace(gamma=0.99, gdpo_reward_keys=["a", "b"], gdpo_reward_weights=None),
    }
    for name in ADV_ESTIMATOR_REGISTRY:
        yield "advantage", name, _called(get_adv_estimator_fn(name), known)
    old = known["old_log_probs"]
    new = (old + 0.1 * columns["returns"]).clamp(max=-1e-3).requires_grad_(True)
    of_losses = {
        "old_log_prob": old,
        "log_prob": new,
        "advantages": columns["advantages"],
        "response_mask": mask,
        "rollout_log_probs": old,
        "token_level_scores": columns["token_level_rewards"],
        "loss_agg_mode": "token-mean",
    }
    for name in POLICY_LOSS_REGISTRY:
        config = ActorConfig().with_values({"policy_loss.loss_mode": name})
        yield "loss", name, _trained(_called(get_policy_loss_fn(name), of_losses | {"config": config}), new)


def _called(fn: Callable, known: dict[str, object]) -> Callable[[], object]:
    """``fn`` with those arguments it names and there are."""
    return partial(fn, **{name: known[name] for name in inspect.signature(fn).parameters if name in known})


def _trained(loss: Callable[[], object], new: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        new.grad = None
        loss()[0].backward()

    return step


def measure_every() -> list[dict[str, object]]:
    """Each next to a copy of the floats it must read and write at least: two (B, R) tensors, four for a loss."""
    mask, columns = make_batch(1024, 4096, mean_length=200)
    rows = []
    for kind, name, call in every_call(mask, columns):
        cost, copy = median_cost(call), copy_ms(mask.numel() * 4 * (4 if kind == "loss" else 2))
        size = {"rows": 1024, "width": 4096, "tokens": int(mask.sum())}
        rows.append({"kind": kind, "name": name, "work": work_words(size), **size})
        rows[-1] |= {"cpu_ms": cost, "ratio_to_copy": cost / copy, "peak_extra_mb": peak_extra_mb(call)}
    return rows


def main() -> None:
    torch.set_num_threads(1)
    if "--every" in sys.argv:
        report("algorithms_every", measure_every())
        return
    rows = []
    for count, width, mean_length in SIZES:
        mask, columns = make_batch(count, width, mean_length=mean_length)
        tokens = int(mask.sum())
        size = {"rows": count, "width": width, "tokens": tokens}
        for name, num_tensors, call in calls(mask, columns):
            cost = block_cost(call, repeat=15)
            # float32 columns and the int64 mask
            padded, real = (copy_ms(positions * (4 * num_tensors + 8)) for positions in (mask.numel(), tokens))
            ratios = {"ratio_to_padded_copy": cost / padded, "ratio_to_real_copy": cost / real}
            rows.append({"name": name, "work": work_words(size), **size, "cpu_ms": cost, **ratios})
    report("algorithms", rows)


if __name__ == "__main__":
    sys.exit(main())
