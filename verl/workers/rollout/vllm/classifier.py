"""A sequence classifier on vLLM, inside the worker process: its pooling runner, without the sigmoid of its default."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

from verl.utils.distributed import ensure_process_group
from verl.workers.rollout.classifier import Classifier
from verl.workers.rollout.vllm.requests import watch_steps
from verl.workers.rollout.vllm.rollout import VLLMRollout
from verl.workers.rollout.vllm.setup import (
    check_model,
    detach_group_finalizer,
    discard_stale_parallel_groups,
    engine_arguments,
    import_vllm,
    preserve_process_state,
    unlink_message_queue,
)
from verl.workers.rollout.vllm.weights import CPUMemory, DeviceMemory, worker_of


class VLLMClassifier(Classifier, VLLMRollout):
    """Scores texts with vLLM.

    Raises:
        ValueError: the installed vLLM lacks an argument, or has no such classifier.
    """

    def _start(self) -> None:
        import_vllm(self.device.type)
        check_model(self.model_config, self.device.type)
        ensure_process_group(self.device.type)
        derived = self._derived_arguments()
        pooling = {"runner": "pooling", "convert": "classify", "skip_tokenizer_init": True}
        arguments = engine_arguments(self.config, self.device.type, self.spec.folder, **derived, **pooling)
        discard_stale_parallel_groups(self.model_config)
        from vllm import PoolingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        with preserve_process_state(self.device.type):
            self.engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        # as the helpers of vLLM's engine want it
        reset = self.engine.reset_prefix_cache
        self.llm = SimpleNamespace(
            llm_engine=self.engine, sleep=self._sleep_engine, wake_up=self.engine.wake_up, reset_prefix_cache=reset
        )
        detach_group_finalizer(self.llm)
        unlink_message_queue()
        watch_steps(self.llm, self.monitor)
        tasks = self.engine.get_supported_tasks()
        if "classify" not in tasks:
            raise ValueError(
                f"actor_rollout_ref.rollout.name=vllm: vLLM has no classifier of {self.model_config.architectures}, "
                f"but {', '.join(tasks)}. Leave reward_model.rollout out: the training engine scores with it."
            )
        self._names = count()
        # the output itself: vLLM would give a sigmoid of it
        self._pooling = PoolingParams(task="classify", use_activation=False)
        self.tensor_parallel_size = arguments["tensor_parallel_size"] * arguments.get("pipeline_parallel_size", 1)
        model = worker_of(self.llm).model_runner.model
        self._memory = CPUMemory(self.llm, model, True) if self.device.type == "cpu" else DeviceMemory(self.llm)
        self._asleep: set[str] = set()
        self.version = 0
        if self.config.free_cache_engine:
            self.sleep()

    def _sleep_engine(self, level: int) -> None:
        self.engine.reset_prefix_cache()  # the cache is lost
        self.engine.sleep(level)

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        names = [str(next(self._names)) for _ in rows]
        for name, row in zip(names, rows, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": list(row)}, self._pooling.clone())
        found: dict[str, float] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                [found[output.request_id]] = output.outputs.data.tolist()
        return [found[name] for name in names]
