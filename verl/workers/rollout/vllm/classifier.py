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
        self.llm = SimpleNamespace(llm_engine=self.engine)  # as the helpers of vLLM's engine want it
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
        self.version = 0

    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        names = [str(next(self._names)) for _ in rows]
        for name, row in zip(names, rows, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": list(row)}, self._pooling.clone())
        found: dict[str, float] = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                [found[output.request_id]] = output.outputs.data.tolist()
        return [found[name] for name in names]
