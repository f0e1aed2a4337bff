"""verl's part of SGLang's scheduler processes: their start, and `SchedulerExtension`, which the worker calls in them.

Runs where the model lives, so weights are loaded, read back, freed and restored in place. Imported in SGLang's
processes only.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import mm_utils
from sglang.srt.managers import scheduler as sglang_scheduler

from verl.workers.rollout.base import WeightSyncError
from verl.workers.rollout.memory import HostMemory
from verl.workers.rollout.sglang.process import open_bucket
from verl.workers.rollout.sglang.sampler import install_sampler, install_stop_texts
from verl.workers.rollout.weights.load import WeightLoad


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with our sampler, our stop texts and `SchedulerExtension`."""
    install_sampler()
    install_stop_texts(server_args.tokenizer_path, server_args.trust_remote_code)
    sglang_scheduler.Scheduler.verl_call = verl_call
    sglang_scheduler.run_scheduler_process(server_args, *args, **kwargs)


class HostedEngine(Engine):
    """SGLang's engine whose schedulers run `run_scheduler`."""

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_scheduler_processes(cls, server_args: Any, *args: Any, **kwargs: Any) -> Any:
        if server_args.device == "cpu":
            multiprocessing.set_start_method("fork", force=True)  # children need not import SGLang again
        return super()._launch_scheduler_processes(server_args, *args, **kwargs)


def verl_call(scheduler: Any, function: str, arguments: str, reply: str) -> None:
    """Call a method of `SchedulerExtension`, or ``module:function`` with it; write the result to this rank's file."""
    if not hasattr(scheduler, "verl_extension"):
        scheduler.verl_extension = SchedulerExtension(scheduler)
    try:
        module, _, name = function.rpartition(":")
        if module:
            value = getattr(importlib.import_module(module), name)(scheduler.verl_extension, **json.loads(arguments))
        else:
            value = getattr(scheduler.verl_extension, name)(**json.loads(arguments))
        answer = (True, value)
    except Exception as error:
        traceback.print_exc()
        answer = (False, f"{type(error).__name__}: {error}")
    Path(f"{reply}.{scheduler.verl_extension.rank:05d}").write_bytes(
        pickle.dumps(answer)
    )  # SGLang answers after all ranks


class SchedulerExtension:
    """Methods that the worker calls in a scheduler process; every rank of the group runs the same ones."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        worker = scheduler.tp_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.model = self.runner.model
        self.group = scheduler.tp_group.cpu_group
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.device = next(self.model.parameters()).device
        scheduler.model_config.hf_eos_token_id = None  # every request names its end tokens; SGLang may know others
        self._load: WeightLoad | None = None
        self._problem: str | None = None
        self._memory: dict[str, HostMemory] = {}
        if self.device.type == "cpu":
            self._memory = {
                "weights": HostMemory(self.model.parameters()),
                "kv_cache": HostMemory(_cache_tensors(self.runner)),
            }

    def ping(self) -> None:
        """Create this extension before the first request."""

    def partial_output(self, name: str) -> tuple[list[int], list[float]]:
        """Tokens and log-probs of the running request of this name; none of one that does not run."""
        found = next((request for request in self._requests() if request.rid == name), None)
        if found is None:
            return [], []
        log_probs = found.logprob.output_token_logprobs_val
        count = min(len(found.output_ids), len(log_probs))
        return list(found.output_ids[:count]), list(log_probs[:count])

    def _requests(self) -> Iterator[Any]:
        for batch in (self.scheduler.running_batch, self.scheduler.last_batch):
            yield from batch.reqs if batch is not None else ()
        yield from self.scheduler.waiting_queue  # preempted requests, too

    # -- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def begin_load(self) -> None:
        self._load, self._problem = WeightLoad(self.model, self.device, is_shared=self.ranks > 1, engine="SGLang"), None
        _clear_image_cache()

    @torch.no_grad()
    def load(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Hand a bucket to the model's own loader; returns what is wrong with it.

        Args:
            messages: one that all ranks share, or one for each rank.
        """
        message = messages[self.rank if len(messages) > 1 else 0]
        try:
            with open_bucket(message, self.device) as bucket:
                self._load.load(bucket)
        except WeightSyncError as error:
            self._problem = self._problem or str(error)
        return self._problem

    @torch.no_grad()
    def end_load(self) -> tuple[str | None, dict[str, int], int]:
        """Problem found, else checksums of this rank's memory by the names as sent; and bytes held."""
        load, self._load = self._load, None
        problem = self._problem
        if problem is None:
            try:
                load.check_all_written()
            except WeightSyncError as error:
                problem = str(error)
        # every rank joins every collective, whatever went wrong on it, and all of them fail together
        found = self._gather((problem, load.held_regions()))
        problem = next((problem for problem, _ in found if problem), None)
        if problem is None:
            problem = load.find_problem([regions for _, regions in found])
            problem = next((problem for problem in self._gather(problem) if problem), None)
        return (problem, {}, 0) if problem else (None, load.checksums(), load.num_bytes)

    def _gather(self, what: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, what, group=self.group)
        return found

    # -- memory on CPU, where SGLang accepts the calls and frees nothing -----------------------------------------------

    @torch.no_grad()
    def release(self, tags: Sequence[str]) -> None:
        """Free the memory of these parts: ``weights``, ``kv_cache``."""
        for tag in tags:
            self._memory[tag].release()

    @torch.no_grad()
    def restore(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these parts again: weights full of NaN, the cache of zeros."""
        if "weights" in tags:
            self._memory["weights"].restore_as_nan()
        if "kv_cache" in tags:
            self._memory["kv_cache"].restore(0)


def _clear_image_cache() -> None:
    """Clear the cached outputs of the vision tower: SGLang keys them by the images alone and does not flush them."""
    holder = sys.modules[mm_utils.init_mm_embedding_cache.__module__]
    if holder.embedding_cache is not None:
        holder.embedding_cache.clear()


def _cache_tensors(runner: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the KV cache."""
    for name, value in vars(runner.token_to_kv_pool).items():
        if name.endswith("_buffer"):
            yield from (part for part in (value if isinstance(value, list) else [value]) if torch.is_tensor(part))
