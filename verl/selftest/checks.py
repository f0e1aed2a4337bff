"""The trials of ``verl selftest``: each compares what the device computes with the CPU's numbers, or measures.

``python -m verl.selftest.checks NAME DEVICE SIZE FOLDER SECONDS`` runs one and prints its outcome as JSON. On a CPU the
trials compare other code paths (sharded with plain, packed with padded), so that the command is the same everywhere.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.batch import MicroBatching
from verl.protocol import DataProto
from verl.selftest.base import (
    BF16,
    FP32,
    TRIALS,
    At,
    CannotRun,
    Found,
    Training,
    check,
    check_close,
    compare_training,
    copy_rate,
    engine_of,
    needs,
    rollout_model,
    rollout_of,
    steps_of,
    timed,
    tiny_model,
    token_columns,
    training_of,
    trial,
)
from verl.single_controller.base.worker import free_port
from verl.utils.device import current_device, empty_cache

# -- the device -------------------------------------------------------------------------------------------------------


@trial("device", "matrix products, memory bandwidth, free memory")
def try_device(at: At) -> Found:
    device = current_device(at.device)
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=draw, dtype=torch.float64) for _ in range(2))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        product = left.to(device, dtype) @ right.to(device, dtype)
        check_close(product, left @ right, tolerance, f"products in {dtype}")
    rate = copy_rate(device)
    text = f"products right in fp32 and bf16; copies at {rate / 1e9:.0f} GB/s (read and write)"
    if at.is_cuda:
        free, total = torch.cuda.mem_get_info()
        text += f"; {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return Found(text, {"copy_bytes_per_s": rate})


# -- kernels ----------------------------------------------------------------------------------------------------------


def _head(at: At, compiled: bool, triton: bool = False) -> Found:
    from verl.models.token_outputs import LogitTransform, chunked_log_probs, full_log_probs

    device, worst = current_device(at.device), 0.0
    for dtype, near, tolerance in ((torch.float32, FP32, FP32), (torch.bfloat16, 1e-3, BF16)):
        for rows, temperature in ((300, 1.0), (1, 0.7), (1500, 0.7)):
            draw = torch.Generator().manual_seed(0)
            leaves = (
                torch.randn(rows, 64, generator=draw).to(dtype),
                (torch.randn(32_000, 64, generator=draw) / 8).to(dtype),
            )
            targets = torch.randint(0, 32_000, (rows,), generator=draw)
            pull = torch.randn(2, rows, generator=draw)
            wants_entropy = not triton
            kernels: dict[str, Any] = {"triton": True} if triton else {"compiled": compiled}
            hidden, weight = here = tuple(leaf.to(device, copy=True).requires_grad_() for leaf in leaves)
            on_cpu = tuple(leaf.requires_grad_() for leaf in leaves)
            options = (LogitTransform(temperature), wants_entropy)
            found = chunked_log_probs(hidden, weight, targets.to(device), *options, **kernels)
            logits = on_cpu[0].float() @ on_cpu[1].float().t()
            exact = full_log_probs(logits, targets, temperature, wants_entropy)
            for name, one, other, row in zip(("log-probs", "entropies"), found, exact, pull, strict=True):
                if other is None:
                    continue
                worst = max(worst, check_close(one, other, near, f"{name} in {dtype}"))
                grads, expected = (
                    torch.autograd.grad((values * row.to(values.device)).sum(), inputs, retain_graph=True)
                    for values, inputs in ((one, here), (other, on_cpu))
                )
                for grad, right in zip(grads, expected, strict=True):
                    check_close(grad, right, tolerance, f"gradients of {name} in {dtype}")
    text = f"log-probs{'' if triton else ' and entropies'} within {worst:.0e} of whole logits on the CPU, and gradients"
    return Found(text)


@trial("log-probs", "log-probs and entropy from hidden states in chunks, against whole logits")
def try_head(at: At) -> Found:
    return _head(at, compiled=False)


@trial("compile", "the same under torch.compile (use_torch_compile), and compiled layers (model.compile_layers)", 240)
def try_compile(at: At) -> Found:
    from verl.models.compilation import missing_for_compile

    if missing := missing_for_compile(at.device):
        raise CannotRun(f"torch.compile needs {missing}")
    head = _head(at, compiled=True)
    layers = engine_of(at, at.device, compile_layers=True)
    apart = compare_training(training_of(layers, 1), training_of(engine_of(at, "cpu"), 1), FP32)
    return Found(f"{head.text}; an update of compiled layers within {apart:.0e}")


@trial("attention", "attention of packed rows: every kernel there is, against each row alone in fp32 on the CPU")
def try_attention(at: At) -> Found:
    from verl.models.attention import kernels as attention

    device = current_device(at.device)
    candidates = {"row by row": attention.attend_row_by_row}
    absent = _absent_kernels(at)
    if "torch varlen" not in absent:
        candidates["torch varlen"] = attention.torch_varlen
    if "flash-attn" not in absent:
        candidates["flash-attn"] = attention.flash_attn
    on_cpu = attention.Packing.of_lengths((3, 700, 1, 130, 64))
    lengths = on_cpu.to(device)
    apart: dict[str, float] = {}
    for options in (attention.AttentionOptions(0.125), attention.AttentionOptions(0.2, window=50)):
        for width in (64, 128):
            parts = _layer(lengths.tokens, width, device)
            wide = [part.detach().cpu().float().requires_grad_() for part in parts]
            narrow = [part.detach().cpu().requires_grad_() for part in parts]
            truth = _attended(attention.attend_row_by_row, wide, on_cpu, options)
            coarse = _attended(attention.attend_row_by_row, narrow, on_cpu, options)
            for name, kernel in candidates.items():
                for one, dense, exact in zip(_attended(kernel, parts, lengths, options), coarse, truth, strict=True):
                    # twice what bf16 costs on the CPU: a kernel of another device adds in another order
                    limit = 2 * (dense - exact).norm() + 1e-3 * exact.norm()
                    far = (one.cpu() - exact).norm().detach()
                    check(
                        bool(far <= limit), f"{name}, heads of {width}, {options}: {far:.3g} away, {limit:.3g} allowed"
                    )
                    apart[name] = max(apart.get(name, 0.0), float(far / exact.norm()))
    q, _, v = _layer(8, 64, device)
    chosen = attention.choose_kernel(q, v, attention.AttentionOptions(0.125)).__name__
    each = ", ".join(f"{name} {ratio:.0e}" for name, ratio in apart.items())
    text = f"bf16 forward and backward from fp32 on the CPU: {each}; bf16 takes {chosen}"
    return Found(text + "".join(f"; {name}: {reason}" for name, reason in absent.items()))


def _absent_kernels(at: At) -> dict[str, str]:
    """Kernels of packed rows that this machine cannot run -> the reason."""
    from verl.models.attention.kernels import flash_attn_kernel

    names = ("torch varlen", "flash-attn")
    if not at.is_cuda:
        return dict.fromkeys(names, "for CUDA")
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return dict.fromkeys(names, f"for compute capability 8.0 and later, this is {'.'.join(map(str, capability))}")
    if flash_attn_kernel() is not None:
        return {}
    installed = find_spec("flash_attn") is not None
    return {"flash-attn": f"does not load with torch {torch.__version__}" if installed else "not installed"}


def _layer(tokens: int, width: int, device: torch.device) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    parts = [torch.randn(tokens, heads, width, generator=draw) for heads in (8, 2, 2)]
    return [part.to(device, torch.bfloat16).requires_grad_() for part in parts]


def _attended(kernel: Any, parts: list[Tensor], packing: Any, options: Any) -> tuple[Tensor, ...]:
    """Output and gradients."""
    out = kernel(*parts, packing, options)
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    return out.detach().float(), *(grad.float() for grad in torch.autograd.grad(out, parts, pull))


# -- training engines -------------------------------------------------------------------------------------------------


def _strategy(at: At, name: str) -> Found:
    apart = {}
    for compute, tolerance in (("fp32", FP32), ("bf16", BF16)):
        found = training_of(engine_of(at, at.device, name, compute))
        apart[compute] = compare_training(found, training_of(engine_of(at, "cpu")), tolerance)
    text = f"3 updates as on the CPU: gradient norms within {apart['fp32']:.0e} (fp32), {apart['bf16']:.0e} (bf16)"
    if at.is_cuda:
        offload = {"param_offload": True, "optimizer_offload": True}
        engine = engine_of(at, at.device, name, engine_config=offload)
        compare_training(training_of(engine), training_of(engine_of(at, "cpu")), FP32)
        check(
            all(parameter.device.type == "cpu" for parameter in engine.module.parameters()),
            "weights stayed on the device with param_offload=true",
        )
        text += "; with offload too"
    return Found(text)


@trial("local", "the plain engine: updates and scores against the CPU's")
def try_local(at: At) -> Found:
    return _strategy(at, "local")


@trial("fsdp2", "FSDP2 (strategy=fsdp2, fsdp) on one device")
def try_fsdp2(at: At) -> Found:
    return _strategy(at, "fsdp2")


@trial("fsdp1", "FSDP1 (strategy=fsdp1) on one device")
def try_fsdp1(at: At) -> Found:
    if not at.is_cuda:
        raise CannotRun("FSDP1 is for CUDA")
    return _strategy(at, "fsdp1")


@trial("packed", "packed rows (use_remove_padding) and shared prompts, against padded rows")
def try_packed(at: At) -> Found:
    worst = 0.0
    for compute, tolerance in (("fp32", FP32), ("bf16", 5e-2)):
        for share in (False, True):
            engine = engine_of(at, at.device, "local", compute, remove_padding=True, share_prompts=share)
            worst = max(worst, compare_training(training_of(engine), training_of(engine_of(at, "cpu")), tolerance))
    return Found(f"updates as with padded rows, gradient norms within {worst:.0e}")


@trial("checkpoint", "a checkpoint written and read again: the step after it is the same")
def try_checkpoint(at: At) -> Found:
    from verl.checkpoint.checkpoint_manager import CheckpointManager

    strategy = "fsdp2" if at.is_cuda else "local"
    engine, fresh = (engine_of(at, at.device, strategy) for _ in range(2))
    steps_of(engine, 2)
    with tempfile.TemporaryDirectory(dir=at.folder) as folder:
        CheckpointManager(engine).save(Path(folder) / "actor", 2)
        CheckpointManager(fresh).load(Path(folder) / "actor")
    compare_training(training_of(fresh, 1), training_of(engine, 1), 1e-6)
    return Found(f"{strategy}: weights, optimizer and schedule come back")


@trial("8-bit Adam", "AdamW8bit of torchao against AdamW")
def try_adam8bit(at: At) -> Found:
    needs("torchao", "pip install torchao")
    eight = engine_of(at, at.device, optim={"optimizer": "AdamW8bit"})
    compare_training(training_of(eight), training_of(engine_of(at, at.device)), 5e-2)
    return Found("3 updates as AdamW's, gradient norms within 5 %")


@trial("liger", "Liger's layers and head (use_liger, fused kernels) against transformers'")
def try_liger(at: At) -> Found:
    if not at.is_cuda:
        raise CannotRun("Liger's kernels are Triton's: they need a GPU")
    needs("liger_kernel", "pip install liger-kernel")
    head = _head(at, compiled=False, triton=True)
    liger = engine_of(at, at.device, use_liger=True, head_backend="triton")
    plain = training_of(engine_of(at, at.device), entropy_coeff=0.0)
    apart = compare_training(training_of(liger, entropy_coeff=0.0), plain, 1e-3)
    return Found(f"{head.text}; 3 updates within {apart:.0e}")


# -- several devices --------------------------------------------------------------------------------------------------


_ALONE = "one-process.pt"
"""File of the steps that `try_ranks` expects."""


@trial("ranks", "all-reduce over all devices of this machine, and FSDP2 over them", 150)
def try_ranks(at: At) -> Found:
    size = torch.cuda.device_count() if at.is_cuda else 2
    if size < 2:
        raise CannotRun("there is one device")
    port = free_port()
    command = [sys.executable, "-m", "verl.selftest.checks", "rank", at.device, at.size, str(at.folder), "140"]
    torch.save(training_of(engine_of(at, "cpu"))._asdict(), at.folder / _ALONE)
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    printed = [rank.communicate()[0].strip().splitlines() for rank in ranks]
    found = [json.loads(lines[-1]) if lines else None for lines in printed]
    for number, (rank, one) in enumerate(zip(ranks, found, strict=True)):
        check(one is not None, f"rank {number} ended with exit code {rank.returncode} and printed nothing")
        check(one["verdict"] == "pass", f"rank {number}: {one['text']}")
    return Found(f"{size} ranks: {found[0]['text']}", found[0]["figures"])


def _one_rank(at: At) -> Found:
    """What each rank of `try_ranks` does."""
    import torch.distributed as dist

    from verl.utils.distributed import ensure_process_group

    ensure_process_group(at.device, timeout_s=60)
    device, size = current_device(at.device), dist.get_world_size()
    tensor = torch.full((1 << 24,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(tensor)
    check(bool((tensor == size * (size + 1) / 2).all()), "the sum over ranks is wrong")
    tensor.zero_()
    seconds = timed(lambda: dist.all_reduce(tensor), device)
    rate = tensor.nbytes * 2 * (size - 1) / size / seconds
    # every rank has the whole batch: the mean over ranks is what one process computes
    alone = Training(**torch.load(at.folder / _ALONE, weights_only=True))
    apart = compare_training(training_of(engine_of(at, at.device, "fsdp2")), alone, FP32)
    dist.destroy_process_group()
    text = f"all-reduce exact, {rate / 1e9:.1f} GB/s a rank; FSDP2 within {apart:.0e} of one process"
    return Found(text, {"all_reduce_bytes_per_s": rate})


# -- rollout engines --------------------------------------------------------------------------------------------------


_MOST = 0.8  # of the weights; the rest may share an allocator's block with what stays


def _rollout(at: At, name: str) -> Found:
    """The switch of a run: sleep, wake, sync with its receipt, generate, and the log-probs against the actor's."""
    from verl.workers.rollout.base import Request, SamplingParams
    from verl.workers.rollout.weights.sync import sync_weights

    device, path = current_device(at.device), rollout_model(at)
    rollout = rollout_of(at, name, path)
    actor = engine_of(at, at.device, path=path)
    weights = sum(tensor.nbytes for _, tensor in actor.weights())
    steps_of(actor, 1)  # the rollout must generate with these weights, not with those of the folder
    freed = None
    for number in (1, 2):
        awake = _used(device)
        rollout.sleep(level=2)
        empty_cache(device)
        freed = awake - _used(device) if at.is_cuda else None
        check(
            freed is None or freed >= _MOST * weights,
            f"sleep gave {(freed or 0) / 2**20:.0f} MiB of device memory back; the weights alone have "
            f"{weights / 2**20:.0f} MiB",
        )
        rollout.wake(("weights",))
        receipt = sync_weights(actor.weights(), rollout, version=number)
        rollout.wake(("kv_cache",))
    check(rollout.version == 2, f"the rollout holds version {rollout.version} of the weights, not 2")
    sampling = SamplingParams(16, want_log_probs=True, ignore_eos=True)
    prompts = [tuple(4 + (7 * row + 3 * place) % 90 for place in range(3 + row % 5)) for row in range(12)]
    requests = [Request(ids, sampling, seed) for seed, ids in enumerate(prompts)]
    completions = rollout.generate(requests, 2)
    again = rollout.generate(requests[::-1], 2)[::-1]
    check(
        sum(one.token_ids == other.token_ids for one, other in zip(completions, again, strict=True)) >= 11,
        "a seed gives other tokens in another order of the batch",
    )
    apart = _probs_apart(actor, prompts, completions)
    check(apart < 1e-2, f"probabilities of generated tokens differ by {apart:.1e} from the actor's")
    text = f"{receipt.num_bytes / 1e6:.1f} MB synced with equal checksums, probabilities within {apart:.0e}"
    if freed is None:
        return Found(text)
    return Found(f"{text}; sleep frees {freed / 2**20:.0f} MiB, of which weights {weights / 2**20:.0f}")


def _used(device: torch.device) -> int:
    """Bytes in use on a device by all processes: an engine may live in another one."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def _probs_apart(actor: Any, prompts: list[tuple[int, ...]], completions: list[Any]) -> float:
    """The largest difference between the rollout's and the actor's probability of a generated token."""
    from verl.workers.engine import Want

    responses = [torch.tensor(one.token_ids) for one in completions]
    data = DataProto.from_ragged(token_columns([torch.tensor(prompt) for prompt in prompts], responses))
    with actor.on_device():
        result = actor.infer(data, Want.LOG_PROBS, MicroBatching(size=4))
    own_probs = result.ragged("log_probs").values.exp()
    theirs = torch.tensor([value for one in completions for value in one.log_probs]).exp()
    return float((own_probs - theirs).abs().max())


@trial("rollout hf", "transformers' rollout: sleep, sync with receipt, seeds, probabilities against the actor's")
def try_hf(at: At) -> Found:
    return _rollout(at, "hf")


@trial("rollout vllm", "the same with vLLM", 240)
def try_vllm(at: At) -> Found:
    needs("vllm", "bash scripts/install_engines.sh vllm")
    return _rollout(at, "vllm")


@trial("rollout sglang", "the same with SGLang", 240)
def try_sglang(at: At) -> Found:
    try:
        version("sglang")
    except PackageNotFoundError:
        raise CannotRun("sglang is not installed; bash scripts/install_engines.sh sglang") from None
    return _rollout(at, "sglang")


# -- a run ------------------------------------------------------------------------------------------------------------

_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of digits."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))
'''


@trial("run", "two steps of main_ppo with a critic, a save and a resume", 200)
def try_run(at: At) -> Found:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = at.folder / "run"
    folder.mkdir()
    (folder / "reward.py").write_text(_REWARD)
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"Say {number}."}],
            "reward_model": {"style": "rule", "ground_truth": ""},
        }
        for number in range(16)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    words = [
        *(f"{key}={folder / 'rows.parquet'}" for key in ("data.train_files", "data.val_files")),
        *(f"{key}={tiny_model(at)}" for key in ("actor_rollout_ref.model.path", "critic.model.path")),
        *(f"{role}.strategy={'fsdp2' if at.is_cuda else 'local'}" for role in ("actor_rollout_ref.actor", "critic")),
        *("data.train_batch_size=4", "data.max_prompt_length=48", "data.max_response_length=12"),
        *("actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "critic.ppo_micro_batch_size_per_gpu=4"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        *(f"actor_rollout_ref.{role}.log_prob_micro_batch_size_per_gpu=4" for role in ("rollout", "ref")),
        *("algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.calculate_log_probs=true"),
        f"custom_reward_function.path={folder / 'reward.py'}",
        *("trainer.logger=[file]", "trainer.controller=local", "trainer.n_gpus_per_node=1", "trainer.save_freq=1"),
        *(f"trainer.device={at.device}", f"trainer.default_local_dir={folder / 'out'}"),
    ]
    log = folder / "metrics.jsonl"
    for steps in (1, 2):
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words, f"trainer.total_training_steps={steps}"]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
        )
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        check(done.returncode == 0, f"step {steps} ended with exit code {done.returncode}: {' '.join(last)}")
    data = [json.loads(line) for line in log.read_text().splitlines()]
    found = {row["step"]: row["data"] for row in data if "actor/grad_norm" in row["data"]}
    check(set(found) == {1, 2}, f"steps {sorted(found)} were written, not 1 and 2")
    apart = max(row["training/rollout_probs_diff_max"] for row in found.values())
    check(apart < 0.1, f"rollout and actor differ by {apart:.2g} in the probability of a token")
    return Found(f"step 2 resumed from step 1; rollout and actor within {apart:.0e}")


# -- one trial in this process ----------------------------------------------------------------------------------------


@contextmanager
def _printing_to_stderr() -> Iterator[None]:
    """What engines print goes to stderr, so that stdout holds the outcome alone."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def outcome_of(run: Callable[[At], Found], at: At) -> dict[str, Any]:
    """Run a trial here; returns verdict, text and figures."""
    try:
        found = run(at)
    except CannotRun as reason:
        return {"verdict": "none", "text": str(reason), "figures": {}}
    except AssertionError as error:
        return {"verdict": "FAIL", "text": str(error), "figures": {}}
    except Exception as error:  # of any kind: the others go on, and this one says what it was
        import traceback

        traceback.print_exc()
        return {"verdict": "FAIL", "text": f"{type(error).__name__}: {error}"[:500], "figures": {}}
    return {"verdict": "pass", "text": found.text, "figures": dict(found.figures)}


def main() -> None:
    """Run the trial that the arguments name, and print its outcome."""
    import verl.selftest.figures  # noqa: F401  registers its trials

    name, device, size, folder, seconds = sys.argv[1:6]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    faulthandler.dump_traceback_later(max(1.0, float(seconds) - 2), exit=False)
    run = _one_rank if name == "rank" else TRIALS[name].run
    with _printing_to_stderr():
        outcome = outcome_of(run, At(device, size, Path(folder)))
    sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.flush()
    os._exit(0)  # engines' threads and children are ended with the session


if __name__ == "__main__":
    main()
