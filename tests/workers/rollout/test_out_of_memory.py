"""An out-of-memory error says what helps; other errors are left as they are."""

import errno

import pytest
import torch

from tests.workers.rollout.conftest import rollout_config
from verl.workers.rollout.memory import RolloutOutOfMemory, memory_errors

CONFIG = rollout_config(name="vllm", update_weights_bucket_megabytes=512)
SMALL_CACHE = (
    "To serve at least one request with the model's max seq len (4096), 2.0 GiB KV cache is needed, which is larger "
    "than the available KV cache memory (1.0 GiB)."
)


@pytest.mark.parametrize(
    "error, phase, helps",
    [
        (ValueError(SMALL_CACHE), "start", "Raise actor_rollout_ref.rollout.gpu_memory_utilization=0.5"),
        (ValueError("No available memory for the cache blocks."), "start", "lower actor_rollout_ref.rollout.max_model"),
        (ValueError("Free memory on device (3/80 GiB) on startup is less than desired GPU memory utilization (0.5)"),
         "start", "param_offload"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "generate", "max_num_batched_tokens=8192"),
        (torch.OutOfMemoryError("CUDA out of memory."), "sync", "update_weights_bucket_megabytes=512"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "wake", "max_num_seqs=1024"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "wake", "tensor_model_parallel_size"),
        (MemoryError(), "generate", "max_num_seqs=1024"),
    ],
)  # fmt: skip
def test_lack_of_memory_names_the_phase_the_cause_and_the_keys(error, phase, helps):
    with pytest.raises(RolloutOutOfMemory, match=f"rollout.name=vllm: no memory left in phase {phase}") as caught:
        with memory_errors(CONFIG, phase):
            raise error
    assert helps in str(caught.value) and caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [ValueError("max_model_len is odd"), RuntimeError("shape"), OSError(errno.ENOSPC, "x")]
)
def test_other_errors_are_left_alone(error):
    with pytest.raises(type(error)) as caught, memory_errors(CONFIG, "start"):
        raise error
    assert caught.value is error
