"""A role with a real engine that can be made to fail while it generates; importable by name in any process."""

import ctypes
import resource
import sys
import time

from tests.workers.rollout.conftest import rollout_config
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.hf.rollout import HFRollout
from verl.workers.rollout.memory import memory_errors


class GeneratingWorker(Worker):
    """Generates with transformers."""

    def __init__(self, folder, stall_timeout_s=0):
        super().__init__()
        self.config = rollout_config(
            name="hf", load_format="auto", response_length=100000, max_model_len=100000, gpu_memory_utilization=0.9
        )
        self.engine = HFRollout(folder, self.config, override_config={"max_position_embeddings": 100000})
        self.engine.monitor.engine, self.engine.monitor.stall_timeout_s = "hf", stall_timeout_s

    def _generate(self, count, tokens, length=5):
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        requests = [Request((7,) * (length + i), sampling, seed=i) for i in range(count)]
        self.engine.monitor.names = [f"step1-{i}" for i in range(count)]
        with memory_errors(self.config, "generate"):
            return [len(c.token_ids) for c in self.engine.generate(requests, 0)]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self, count, tokens):
        print("generating now", file=sys.stderr, flush=True)
        return self._generate(count, tokens)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_and_hang(self, rank, at_forward, keep_lock=False):
        """One rank never returns from a forward of the model; with ``keep_lock`` no Python thread of it runs on."""
        calls = []

        def hang(*_):
            calls.append(1)
            if len(calls) == at_forward and self.rank == rank:
                ctypes.PyDLL(None).sleep(1000) if keep_lock else time.sleep(1000)

        self.engine.model.register_forward_pre_hook(hang)
        return self._generate(6, 50)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate_with_little_memory(self, spare_bytes):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, resource.RLIM_INFINITY))
        try:
            return self._generate(256, 4096)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
