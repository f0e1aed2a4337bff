"""Cost of a training step on each engine: tokens a second, share of the device's peak, memory.

``python -m benchmarks.training [--size 0.5B] [--variants fsdp2,prefetch] [--save]``; several ranks under
``torchrun --nproc_per_node N -m benchmarks.training``. Weights are random, in the shape of ``--size`` or of the config
in ``--model FOLDER``. The engine's step (PPO loss, entropy, AdamW) is compared with transformers' model in a bare loop
over as many tokens (logits, cross entropy, AdamW), measured in the same run where one process holds the model.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import report
from tests.support.losses import optim_section, ppo_loss
from tests.support.tiny_models import make_batch
from verl.batch import MicroBatching
from verl.models.loader import ModelSpec, load_model
from verl.telemetry.metric import FlopsCounter, get_device_flops
from verl.utils.device import current_device, get_device_name
from verl.utils.distributed import barrier, ensure_process_group, get_rank, get_world_size
from verl.utils.tiny_model import SIZES, save_config
from verl.workers.engine import build_engine

VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "local": ("local", {}, {}),
    "fsdp2": ("fsdp2", {}, {}),
    "fsdp": ("fsdp", {}, {}),
    "prefetch": ("fsdp2", {"forward_prefetch": True}, {}),
    "gather often": ("fsdp2", {"gather_once": False}, {}),
    "keep gathered": ("fsdp2", {"reshard_after_forward": False}, {}),
    "compiled layers": ("fsdp2", {}, {"compile_layers": True}),
    "compiled layers, local": ("local", {}, {"compile_layers": True}),
    "offload policy": ("fsdp2", {"offload_policy": True}, {}),
    "keep activations": ("fsdp2", {}, {"gradient_checkpointing": False}),
    "offload activations": ("fsdp2", {}, {"activation_offload": True}),
}
"""Name -> strategy, entries of ``fsdp_config``, entries of the model's section."""


def timed(step: Callable[[], Any], steps: int, device: torch.device) -> dict[str, float | None]:
    """Least and middle seconds of ``step`` after one to warm up, and the device's peak memory."""
    is_cuda, seconds = device.type == "cuda", []
    step()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        barrier()
        start = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else None
    return {"s": min(seconds), "s_middle": sorted(seconds)[len(seconds) // 2], "peak_GiB": peak}


def speed(took: dict[str, Any], lengths: list[int], config: Any, device: torch.device) -> dict[str, Any]:
    """Tokens a second of all ranks, and MFU where the peak is known."""
    peak, world = get_device_flops(device=device.type), get_world_size()
    done, _ = FlopsCounter(config).estimate_flops(lengths, took["s"])
    mfu = done / peak if math.isfinite(peak) else None
    return {**took, "tokens_a_s": world * sum(lengths) / took["s"], "TFLOPS": done, "mfu": mfu, "ranks": world}


def measure(name: str, spec: ModelSpec, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    strategy, config, changes = VARIANTS[name]
    spec = ModelSpec(**{**vars(spec), **changes})
    engine = build_engine(
        strategy, spec, config, optim_section(lr=1e-6), total_steps=10, grad_clip=1.0, device=device.type
    )
    vocab = engine.model_config.vocab_size
    data = make_batch(args.rows, args.length // 4, args.length - args.length // 4, vocab, seed=get_rank())
    split, loss = MicroBatching(max_tokens=args.tokens), ppo_loss()

    def step() -> None:
        with engine.on_device(optimizer=True):
            engine.train_step(data, loss, split)

    lengths = list(map(int, data.ragged("input_ids").layout.lengths.tolist()))
    return {"what": name, **speed(timed(step, args.steps, device), lengths, engine.model_config, device)}


def bare(spec: ModelSpec, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """transformers' model in a loop, row by row: fp32 weights, autocast to bf16, whole logits."""
    model = load_model(spec).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    data = make_batch(args.rows, args.length // 4, args.length - args.length // 4, model.config.vocab_size)
    rows = [row.to(device)[None] for row in data.ragged("input_ids").rows()]

    def step() -> None:
        for ids in rows:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss / len(rows)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    lengths = [ids.shape[1] for ids in rows]
    return {"what": "bare loop", **speed(timed(step, args.steps, device), lengths, model.config, device)}


def chosen_engines(args: argparse.Namespace, device: torch.device) -> list[str]:
    """The variants asked for; of all, those that differ here."""
    if args.variants:
        unknown = [name for name in args.variants.split(",") if name not in VARIANTS]
        if unknown:
            raise SystemExit(f"--variants {unknown[0]!r} is unknown: choose from {', '.join(VARIANTS)}")
        return args.variants.split(",")
    alone = get_world_size() == 1
    useless = {"local"} if not alone else {"fsdp", "prefetch", "gather often", "keep gathered"}
    useless |= {"compiled layers, local"} if device.type == "cuda" or not alone else {"compiled layers"}
    useless |= {"fsdp", "offload policy", "offload activations"} if device.type == "cpu" else set()
    return [name for name in VARIANTS if name not in useless]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="folder with a config")
    parser.add_argument("--size", default="2.5M", choices=SIZES)
    parser.add_argument("--variants", help=f"of {', '.join(VARIANTS)}, separated by commas")
    parser.add_argument("--device", default=get_device_name(), choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, default=16, help="of a step, on each rank")
    parser.add_argument("--length", type=int, default=512, help="longest row, tokens")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    ensure_process_group(args.device)
    device = current_device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        spec = ModelSpec(args.model or save_config(folder, args.size), load=False)
        rows = [bare(spec, args, device)] if get_world_size() == 1 else []
        for name in chosen_engines(args, device):
            gc.collect()
            torch.cuda.empty_cache()
            rows.append(measure(name, spec, args, device))
    for row in rows:
        row |= {"model": args.model or args.size, "device": str(device), "rows": args.rows, "length": args.length}
        row["ratio_to_bare"] = row["tokens_a_s"] / rows[0]["tokens_a_s"] if get_world_size() == 1 else None
    if get_rank() == 0:
        report("training", rows)


if __name__ == "__main__":
    main()
