"""Two ranks that share one vLLM engine; prints what each of them saw. A fresh process: vLLM's groups live in globals.

python -m tests.workers.rollout.vllm.tensor_parallel_job MODEL_FOLDER tensor|pipeline
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.workers.rollout.conftest import rollout_config, standing_still, weights_of
from tests.workers.rollout.test_contract import FUSED, a_noisy_line, flip_a_bit, mixed_requests, only
from verl.models.loader import ModelSpec
from verl.utils.distributed import all_gather_objects
from verl.workers.engine.fsdp import FSDPEngine
from verl.workers.generation import RolloutRole
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams, WeightSyncError
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.engine_loop import EngineLoop, tensor_parallel_broadcast
from verl.workers.rollout.server.server import RolloutServer
from verl.workers.rollout.weights.sync import checksum, compare_memory, sync_weights

SPREAD = {
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"engine_kwargs": {"vllm": {"pipeline_parallel_size": 2}}},
}


def job(folder: str, spread: str) -> dict:
    rollout = get_rollout_class("vllm")(folder, rollout_config(**SPREAD[spread], max_num_seqs=32))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    generated = [(c.token_ids, c.log_probs) for c in rollout.generate(mixed_requests(), 1)]
    rollout.sleep(level=2)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=2)
    again = [(c.token_ids, c.log_probs) for c in rollout.generate(mixed_requests(), 2)]
    return {
        "generated": generated,
        "same after sleep": again == generated,
        "held": sum(parameter.numel() for parameter in rollout.model.parameters()),
        "served": serve(rollout),
        "sharded": sync_shards(rollout, folder) if spread == "tensor" else None,
        "caught": spoil_a_shard(rollout, model),
        "lost": lose_a_tensor(rollout, model),
        "shared memory": shared_memory_name() if spread == "tensor" else None,
    }


def serve(rollout) -> dict:
    """Rank 0 behind a server, rank 1 in step with it: two turns, an abort, a quiet turn, and a clean end."""
    broadcast = tensor_parallel_broadcast(2)
    if dist.get_rank():
        follower = EngineLoop(rollout, broadcast=broadcast, follows=True)
        follower.start()
        for turn in range(3):
            with standing_still(rollout, 5) if turn == 1 else nullcontext():
                follower.resume(2)
                dist.barrier()
                follower.pause()
                dist.barrier()
        follower.stop()
        follower._thread.join(timeout=20)
        return {"ended": not follower._thread.is_alive(), "left": rollout.num_running}
    server = RolloutServer(rollout, broadcast=broadcast)
    server.start()
    found = []
    for turn in (generate_all, generate_and_abort, None):
        with standing_still(rollout, 5) if turn is generate_and_abort else nullcontext():
            server.resume(2)
            if turn is not None:
                found.append(asyncio.run(turn(server.address)))
            dist.barrier()
            server.pause()
            dist.barrier()
    server.stop()
    return {"generated": found[0], "aborted": found[1], "left": rollout.num_running}


async def generate_all(address: str) -> list:
    client = RolloutClient([address])
    generated = await asyncio.gather(*(client.generate(request) for request in mixed_requests()))
    await client.close()
    return [(completion.token_ids, completion.log_probs) for completion in generated]


async def generate_and_abort(address: str) -> list:
    client = RolloutClient([address])
    long = Request((5, 6), SamplingParams(180, ignore_eos=True))
    tasks = [asyncio.ensure_future(client.generate(long)) for _ in range(3)]
    while (await client.health())[0]["running"] < 3:
        await asyncio.sleep(0.001)
    await client.abort()
    generated = await asyncio.gather(*tasks)
    await client.close()
    return [(completion.finish_reason, len(completion.token_ids)) for completion in generated]


def sync_shards(rollout, folder: str) -> dict:
    """Syncs from an actor that is sharded over the ranks of the engine: whole tensors, then rows without a gather."""
    actor, versions, held = FSDPEngine(ModelSpec(folder, compute_dtype="fp32")), count(3), []
    for parameter in actor.module.parameters():
        parameter.detach().to_local().mul_(1.5)

    def sync(sharded=frozenset(), change=lambda named: named) -> str:
        try:
            named = change(actor.weights(None, sharded))
            sync_weights(named, rollout, next(versions), bucket_bytes=64 << 10, sharded=sharded)
        except WeightSyncError as error:
            return str(error)
        return ""

    def sharded_names() -> frozenset[str]:
        return RolloutRole.sharded_names(SimpleNamespace(actor=actor, rollout=rollout, sharded=None))

    def compared() -> str:
        sums = all_gather_objects(rollout.read_back())
        return compare_memory(actor.weights(None, names), sums, torch.float32, all_gather_objects)

    def spoils(named=()):
        yield from named
        if dist.get_rank() == 1:
            flip_a_bit("", rollout.model.model.layers[0].self_attn.qkv_proj.weight)

    names = sharded_names()
    for sharded in (frozenset(), names):
        rollout.sleep(level=2)
        rollout.wake()
        problem = sync(sharded)
        held.append({name: checksum(parameter) for name, parameter in rollout.model.named_parameters()})
    found = {"names": sorted(names), "problem": problem, "equal": held[0] == held[1], "compared": compared()}
    list(spoils())
    found["spoiled in memory"] = compared()
    spoiled = sync(names, spoils)
    found |= {"spoiled": spoiled, "after a failure": sharded_names(), "again": sync()}
    found |= {"lost": sync(sharded_names(), lambda named: (pair for pair in named if "1.mlp.up_proj" not in pair[0]))}
    return found


def spoil_a_shard(rollout, model) -> str:
    """Rank 1's memory changes after the load; both ranks must say so."""

    def spoils():
        yield from weights_of(model)
        if dist.get_rank() == 1:
            flip_a_bit("", rollout.model.model.layers[-1].mlp.down_proj.weight)

    try:
        sync_weights(spoils(), rollout, version=13, bucket_bytes=1)
    except WeightSyncError as error:
        return str(error)
    return ""


def lose_a_tensor(rollout, model) -> str:
    """A tensor that reaches rank 0 only."""
    with a_noisy_line(rollout, only(FUSED, lambda n, t: [(n, t)] if dist.get_rank() == 0 else [])):
        try:
            sync_weights(weights_of(model), rollout, version=14)
        except WeightSyncError as error:
            return str(error)
    return ""


def shared_memory_name() -> str:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.parallel_state import get_tp_group

    return _CPUSHMDistributed.make_group_name(get_tp_group().device_communicator)


if __name__ == "__main__":
    print("RESULT", json.dumps(run_ranks(2, job, *sys.argv[1:], timeout_s=200)))
