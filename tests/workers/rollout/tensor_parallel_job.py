"""Two ranks that share one vLLM engine; prints what each of them saw. A fresh process: vLLM's groups live in globals.

python -m tests.workers.rollout.tensor_parallel_job MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.support.ranks import run_ranks
from tests.workers.rollout.conftest import rollout_config, weights_of
from tests.workers.rollout.test_contract import FUSED, a_noisy_line, flip_a_bit, mixed_requests, only
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import WeightSyncError
from verl.workers.rollout.weight_sync import sync_weights


def job(folder: str) -> dict:
    rollout = get_rollout_class("vllm")(folder, rollout_config(tensor_model_parallel_size=2, max_num_seqs=32))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=1)
    drawn = [(c.token_ids, c.log_probs) for c in rollout.generate(mixed_requests(), 1)]
    rollout.sleep(level=2)
    rollout.wake()
    sync_weights(weights_of(model), rollout, version=2)
    again = [(c.token_ids, c.log_probs) for c in rollout.generate(mixed_requests(), 2)]
    return {
        "drawn": drawn,
        "same after sleep": again == drawn,
        "held": sum(parameter.numel() for parameter in rollout.model.parameters()),
        "caught": spoil_a_shard(rollout, model),
        "lost": lose_a_tensor(rollout, model),
        "shared memory": shared_memory_name(),
    }


def spoil_a_shard(rollout, model) -> str:
    """Rank 1's memory changes after the load; both ranks must say so."""
    load_weights = rollout.model.load_weights

    def loads_and_spoils(weights):
        load_weights(weights)
        if dist.get_rank() == 1:
            flip_a_bit("", rollout.model.model.layers[0].mlp.down_proj.weight)

    rollout.model.load_weights = loads_and_spoils
    try:
        sync_weights(weights_of(model), rollout, version=3)
    except WeightSyncError as error:
        return str(error)
    finally:
        del rollout.model.load_weights
    return ""


def lose_a_tensor(rollout, model) -> str:
    """A tensor that reaches rank 0 only."""
    with a_noisy_line(rollout, only(FUSED, lambda n, t: [(n, t)] if dist.get_rank() == 0 else [])):
        try:
            sync_weights(weights_of(model), rollout, version=4)
        except WeightSyncError as error:
            return str(error)
    return ""


def shared_memory_name() -> str:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.distributed.parallel_state import get_tp_group

    return _CPUSHMDistributed.make_group_name(get_tp_group().device_communicator)


if __name__ == "__main__":
    print("RESULT", json.dumps(run_ranks(2, job, sys.argv[1], timeout_s=200)))
