"""The rollout engine on transformers alone, CPU or one GPU: the reference for the other engines.

Holds its own copy of the model in ``rollout.dtype``. A prompt shared by several responses is read once; responses are
decoded together and leave the batch when they end.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from verl.models.loader import fix_rotary_frequencies, load_model
from verl.utils.device import empty_cache
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import (
    Bucket,
    Completion,
    ModelRollout,
    PromptLogProbs,
    Receipt,
    Request,
    SamplingParams,
    WeightSyncError,
    cached_bytes_per_token,
    check_prompt,
    longest_response,
    weights_asleep_error,
)
from verl.workers.rollout.hf.model import (
    CHECK_OWNER,
    CHECK_PROMPTS,
    CHECK_STEPS,
    TokenCache,
    add_unscaled_adapter,
    cache_check_rows,
    can_join,
    choose_attention,
    decode_cache,
    decode_difference,
    logit_tolerance,
    split_weight_map,
    uninitialized_model,
    weight_map,
)
from verl.workers.rollout.hf.prepacked import PrepackedWeights
from verl.workers.rollout.hf.running_batch import RowGroup, RunningBatch, check_extra
from verl.workers.rollout.memory import cache_share, own_storages, return_free_memory
from verl.workers.rollout.vision import ImageReader, Prompt, batch_vision_inputs, prompt_of
from verl.workers.rollout.weights.sync import finish, listed, pending_checksum

logger = logging.getLogger(__name__)

_FIRST_ROOM = 64  # columns reserved for responses at first


class HFRollout(ModelRollout):
    """Generates with a transformers causal LM, with or without images.

    Of ``config`` it reads dtype, load_format, max_num_seqs, max_num_batched_tokens, max_model_len, prompt_length,
    response_length, gpu_memory_utilization and limit_images.
    """

    model: PreTrainedModel

    @classmethod
    def adapter_unsupported_reason(cls, model_config: Any) -> str | None:
        return None

    def _start(self) -> None:
        self.monitor.reports_steps = True
        self._running: list[RunningBatch] = []
        self._scored: dict[int, Request] = {}
        if self.reads_weights:
            spec = replace(self.spec, max_sequence_length=self.max_model_len)
            self.model = load_model(spec, dtype=self.dtype).to(self.device)
            own_storages(self.model)
        else:
            self.model = uninitialized_model(self.model_config, self.dtype, self.device, self.trust_remote_code)
            fix_rotary_frequencies(self.model, self.max_model_len)
        if self.lora is not None:
            add_unscaled_adapter(self.model, self.lora, self.dtype)
        self.model.eval().requires_grad_(False)
        choose_attention(self.model, self.spec.override_config.get("attn_implementation"))
        # the head gets one column of many: a strided slice, which CPU matrix products would take row by row
        self.model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
        self._forward_args = inspect.signature(self.model.forward).parameters.keys()
        self._is_cache_checked = self._without_cache = False
        self._reader = ImageReader(
            self.spec.folder,
            self.model.config,
            self.config.limit_images,
            self.trust_remote_code,
            self.model,
            kinds=("image", "video"),
        )
        self.never_generated = self._reader.never_generated
        self._weights, self._adapter = split_weight_map(weight_map(self.model), has_adapter=self.lora is not None)
        everything = self._weights | self._adapter
        self._identity = {name: (view.data_ptr(), view.shape) for name, view in everything.items()}
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in everything.values()}
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        self._prepacked = PrepackedWeights(self.model)
        self._has_memory = True
        self._received: set[str] = set()
        if self.reads_weights:
            self.version = 0
        else:
            self.sleep()

    # -- weights -------------------------------------------------------------------------------------------------------

    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        self.check_nothing_runs("update_weights()")
        self.holds_base = False
        return self._receive_weights(version, buckets, self._weights)

    def update_adapter(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        self.check_nothing_runs("update_adapter()")
        return self._receive_weights(version, buckets, self._adapter)

    def memory_of_weights(self) -> Mapping[str, Tensor]:
        return self._weights if self._has_memory else {}

    @torch.no_grad()
    def _receive_weights(self, version: int, buckets: Iterable[Bucket], views: dict[str, Tensor]) -> Receipt:
        """Write the buckets to ``views``, all of them; returns checksums of the views afterwards."""
        self.invalidate()
        self._prepacked.drop()
        if not self._has_memory:
            raise weights_asleep_error(version)
        received: set[str] = set()
        for bucket in buckets:
            self._load(bucket, received, views)
            del bucket  # free it before the next one is made
        covered = {self._identity[name] for name in received}  # a tied tensor may come under any of its names
        if missing := [name for name in views if self._identity[name] not in covered]:
            raise WeightSyncError(f"The sync of version {version} ended without {listed(missing)}.")
        sums = finish({name: pending_checksum(views[name]) for name in received})
        self._received = self._received - views.keys() | received
        self.version = version
        return Receipt(version, sums, sum(views[name].nbytes for name in received))

    def _load(self, bucket: Bucket, received: set[str], views: dict[str, Tensor]) -> None:
        for name, tensor in bucket:
            if name in received:
                raise WeightSyncError(f"{name} was sent twice in one sync.")
            view = views.get(name)
            if view is None:
                raise WeightSyncError(
                    f"{name} was sent, but the rollout's {type(self.model).__name__} has no such tensor. "
                    f"It has {listed(views)}."
                )
            if tensor.shape != view.shape:
                raise WeightSyncError(
                    f"{name} was sent with shape {tuple(tensor.shape)}, the rollout's has {tuple(view.shape)}. "
                    "Are model.path and model.override_config the same on both sides?"
                )
            view.copy_(tensor)
            received.add(name)

    @torch.no_grad()
    def read_back(self) -> dict[str, int]:
        views = self._weights | self._adapter
        synced = {storage.data_ptr() for storage, _ in self._storages}
        # a head that is tied no longer, for one
        unsynced = {n: p for n, p in self.model.named_parameters() if p.untyped_storage().data_ptr() not in synced}
        held = {n: views[n] for n in self._received} | unsynced
        return finish({name: pending_checksum(tensor) for name, tensor in held.items()})

    def sleep(self, level: int = 1) -> None:
        """Free the weights; both levels forget them, but level 1 keeps what is below an adapter and frees nothing.

        A KV cache lives no longer than the requests that fill it.
        """
        self.check_nothing_runs("sleep()")
        self.invalidate()
        if level == 1 and self.holds_base:
            return
        self.holds_base = False
        self._prepacked.drop()
        for storage, _ in self._storages:
            storage.resize_(0)
        self._has_memory = False
        empty_cache(self.device)
        return_free_memory()

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if "weights" in tags and not self._has_memory:
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)
            self._has_memory = True

    @property
    def is_asleep(self) -> bool:
        return not self._has_memory

    def memory_parts(self) -> dict[str, int]:
        plain = sum(storage.nbytes() for storage, _ in self._storages)
        return {"rollout weights": plain + self._prepacked.num_bytes}

    # -- generation ----------------------------------------------------------------------------------------------------

    def check_sampling(self, sampling: SamplingParams) -> None:
        check_extra(sampling)

    @cached_property
    def decode_text(self) -> Callable[[list[int]], str]:
        """Token ids to text, special tokens included."""
        tokenizer = hf_tokenizer(self.tokenizer_path, trust_remote_code=self.trust_remote_code)
        return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @torch.inference_mode()
    def _generate(self, requests: list[Request]) -> list[Completion]:
        self._prepacked.prepack()
        self._check_cache()
        requests = self._reader.read(requests)
        for request in requests:
            check_prompt(len(request.prompt_ids), self.max_model_len)
        completions: dict[int, Completion] = {}
        for indices in self._batches(requests):
            batch = self._prefilled_batch([requests[i] for i in indices], indices)
            while batch.num_live:
                ended = batch.advance(self._forward)
                completions |= ended
                if self.on_ended is not None:
                    for index, completion in ended.items():
                        self.on_ended(index, completion)
        return [self._with_prompt_log_probs(request, completions[i]) for i, request in enumerate(requests)]

    def _with_prompt_log_probs(self, request: Request, completion: Completion) -> Completion:
        """The completion with the log-probs of its prompt, if the request asks for them: one more forward pass."""
        k = request.sampling.prompt_log_probs
        if k is None:
            return completion
        if request.media:
            raise ValueError("prompt_log_probs: rollout.name=hf gives those of prompts without images only.")
        ids = torch.tensor([request.prompt_ids], device=self.device)
        log_p = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        values, top = log_p.topk(k)
        own = log_p.gather(1, ids[0, 1:, None])[:, 0]
        return replace(completion, prompt_log_probs=PromptLogProbs(own.tolist(), top.tolist(), values.tolist()))

    def _batches(self, requests: list[Request]) -> Iterator[list[int]]:
        """Batches of rows to decode: sorted by prompt, so that equal prompts are adjacent and lengths similar."""
        order = sorted(range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids))
        room = self._cache_room() // cached_bytes_per_token(self.model.config, self.dtype)
        batch: list[int] = []
        longest = 0
        for index in order:
            length = len(requests[index].prompt_ids) + longest_response(requests[index], self.max_model_len)
            longest = max(longest, length)
            if batch and (len(batch) >= self.config.max_num_seqs or (len(batch) + 1) * longest > room):
                yield batch
                batch, longest = [], length
            batch.append(index)
        yield batch

    def _prefilled_batch(self, requests: list[Request], request_ids: Sequence[int]) -> RunningBatch:
        """Read the prompts of requests that are sorted by their length."""
        prompts = list(dict.fromkeys(map(prompt_of, requests)))
        number = {prompt: index for index, prompt in enumerate(prompts)}
        owner = torch.tensor([number[prompt_of(request)] for request in requests], device=self.device)
        width, limits = len(prompts[-1].ids), [longest_response(request, self.max_model_len) for request in requests]
        logits, cache = self._read(prompts, owner, width + min(max(limits), _FIRST_ROOM))
        decode = self.decode_text if any(request.sampling.stop for request in requests) else None
        rows = RowGroup(requests, request_ids, limits, self.stop_token_ids, self.device, decode)
        return RunningBatch(cache, rows, logits[owner], width)

    def _read(self, prompts: list[Prompt], owner: Tensor, capacity: int) -> tuple[Tensor, Cache | TokenCache]:
        """Read each prompt once. Returns the logits after it, (prompts, V), and a cache for the rows of ``owner``."""
        if self._without_cache:
            if any(prompt.media for prompt in prompts):
                raise ValueError(
                    f"rollout.name=hf: {type(self.model).__name__} generates without a cache here, and prompts with "
                    "images need one. Use rollout.name=vllm."
                )
            every = torch.arange(len(prompts), device=self.device)
            rows = [prompt.ids for prompt in prompts]
            return self._forward_whole_rows(TokenCache(rows, every)), TokenCache(rows, owner)
        logits, caches = [], []
        for chunk in self._chunks(prompts):
            width = len(chunk[-1].ids)  # prompts are sorted by length; padding on the left ends all in one column
            ids = torch.tensor([(0,) * (width - len(p.ids)) + tuple(p.ids) for p in chunk], device=self.device)
            starts = torch.tensor([width - len(prompt.ids) for prompt in chunk], device=self.device)
            mask = torch.arange(width, device=self.device) >= starts[:, None]
            cache = DynamicCache(config=self.model.config)
            images, positions = batch_vision_inputs(chunk, width)
            positions = (mask.cumsum(-1) - 1).clamp_(min=0) if positions is None else positions.to(self.device)
            logits.append(self._forward(ids, mask, positions, cache, images))
            caches.append(cache)
        return torch.cat(logits), decode_cache(caches, owner, len(prompts[-1].ids), capacity)

    def _chunks(self, prompts: list[Prompt]) -> Iterator[list[Prompt]]:
        """Runs of prompts of at most ``max_num_batched_tokens`` padded tokens; one run if caches cannot be joined."""
        limit = self.config.max_num_batched_tokens if can_join(DynamicCache(config=self.model.config)) else float("inf")
        start = 0
        for index in range(1, len(prompts) + 1):
            if index == len(prompts) or (index + 1 - start) * len(prompts[index].ids) > limit:
                yield prompts[start:index]
                start = index

    def _forward(
        self,
        ids: Tensor,
        mask: Tensor,
        positions: Tensor,
        cache: Cache | TokenCache,
        images: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """The logits after the last column, (B, V)."""
        self.monitor.tick()
        if ids.shape[1] == 1:
            self.monitor.gauge(running=len(ids))
        if isinstance(cache, TokenCache):
            cache.append(ids[:, 0])
            return self._forward_whole_rows(cache)
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
        if "cache_params" in self._forward_args and "past_key_values" not in self._forward_args:
            # Mamba: all of a row is in its state, and the mask is for padding on the prompt's left
            inputs |= {"cache_params": cache, "attention_mask": mask if ids.shape[1] > 1 else None}
        else:
            inputs |= {"past_key_values": cache, "position_ids": positions}
        if "logits_to_keep" in self._forward_args:
            inputs["logits_to_keep"] = 1
        inputs |= {name: tensor.to(self.device) for name, tensor in (images or {}).items()}
        return self.model(**inputs).logits[:, -1]

    def _forward_whole_rows(self, cache: TokenCache) -> Tensor:
        """The logits after the last token of each row, (B, V), from a forward pass over whole rows, as in training."""
        last, column = (cache.lengths - 1).unique(return_inverse=True)
        inputs: dict[str, Any] = {"input_ids": cache.ids[:, : int(cache.lengths.max())], "use_cache": False}
        if "logits_to_keep" in self._forward_args:
            logits = self.model(**inputs, logits_to_keep=last).logits
        else:
            logits = self.model(**inputs).logits[:, last]
        return logits[torch.arange(len(column), device=column.device), column]

    # -- cache check before the first request --------------------------------------------------------------------------

    def _check_cache(self) -> None:
        """Once, with weights: compare a few tokens generated with the model's cache with forwards over whole rows.

        Where they differ, rows are generated without a cache from then on.

        Raises:
            ValueError: they differ without a cache too, or the model does not run at all.
        """
        if self._is_cache_checked:
            return
        kind, name = self.model.config.model_type, type(self.model).__name__
        try:
            rows, expected = cache_check_rows(self.model, self.never_generated)
        except Exception as error:
            raise ValueError(
                f"rollout.name=hf: model_type={kind!r} cannot generate here: a forward pass of {name} over a short row "
                f"raised {type(error).__name__}: {_first_line(error)}. Check model.override_config and the packages "
                "this model needs, or use rollout.name=vllm."
            ) from error
        if not all(bool(part.isfinite().all()) for part in expected):
            return  # NaN weights cannot test the cache; sampling refuses them with its own error
        mismatch = self._cache_mismatch(rows, expected)
        if mismatch is not None:
            self._without_cache = True
            still = self._cache_mismatch(rows, expected)
            if still is not None:
                raise ValueError(
                    f"rollout.name=hf: model_type={kind!r} cannot generate here: {name} {mismatch} with its cache, and "
                    f"{still} without. Use rollout.name=vllm or sglang, or a model of another family."
                )
            logger.warning(
                "rollout.name=hf: %s (model_type=%r) %s with its cache, so every token reads its whole row once more: "
                "long responses are slow. rollout.name=vllm has a cache of its own.",
                name,
                kind,
                mismatch,
            )
        self._is_cache_checked = True

    def _cache_mismatch(self, rows: list[Tensor], expected: list[Tensor]) -> str | None:
        """The difference of rows generated token by token from ``expected``, in words; None where they agree."""
        prompts = [
            Prompt(tuple(rows[CHECK_OWNER.index(number)][:length].tolist()), None)
            for number, length in enumerate(CHECK_PROMPTS)
        ]
        owner = torch.tensor(CHECK_OWNER, device=self.device)
        try:
            with self.monitor.uncounted():
                logits, cache = self._read(prompts, owner, max(CHECK_PROMPTS) + CHECK_STEPS)
                difference = decode_difference(rows, expected, logits[owner], cache, self._forward)
        except Exception as error:  # from the model's code, which may not support this cache
            return f"raises {type(error).__name__} ({_first_line(error)})"
        if difference <= logit_tolerance(self.dtype):
            return None
        return f"gives other logits than over whole rows (by {difference:.2g} of their spread)"

    # -- requests that come and go one by one --------------------------------------------------------------------------

    def submit(self, request: Request, expect_version: int) -> int:
        self.check_sampling(request.sampling)
        (request,) = self._reader.read([request])
        check_prompt(len(request.prompt_ids), self.max_model_len)
        request_id = super().submit(request, expect_version)
        if request.sampling.prompt_log_probs is not None:
            self._scored[request_id] = request
        return request_id

    @torch.inference_mode()
    def step(self) -> dict[int, Completion]:
        """One token for every running request; waiting ones are prefilled first, as far as the cache has room."""
        self._prepacked.prepack()
        self._check_cache()
        self._admit()
        ended: dict[int, Completion] = {}
        for batch in self._running:
            ended |= batch.advance(self._forward)
        self._running = [batch for batch in self._running if batch.num_live]
        for request_id in ended.keys() & self._scored.keys():
            ended[request_id] = self._with_prompt_log_probs(self._scored.pop(request_id), ended[request_id])
        return ended

    @torch.inference_mode()
    def abort(self, request_ids: Sequence[int]) -> dict[int, Completion]:
        for request_id in request_ids:
            self._scored.pop(request_id, None)
        running = {request_id: batch.abort(request_id) for batch in self._running for request_id in request_ids}
        self._running = [batch for batch in self._running if batch.num_live]
        return super().abort(request_ids) | {
            request_id: found for request_id, found in running.items() if found is not None
        }

    def partial(self, request_id: int) -> Completion | None:
        return next((found for batch in self._running if (found := batch.partial(request_id)) is not None), None)

    @property
    def num_running(self) -> int:
        return len(self._waiting) + sum(batch.num_live for batch in self._running)

    def _admit(self) -> None:
        """Prefill waiting requests in the order of arrival, as far as the cache has room.

        They join a running batch if its cache can be joined.
        """
        room = self._cache_room() // cached_bytes_per_token(self.model.config, self.dtype)
        rows = sum(batch.num_rows for batch in self._running)
        longest = max((batch.longest for batch in self._running), default=0)
        admitted: list[int] = []
        for request_id, request in self._waiting.items():
            longest = max(longest, len(request.prompt_ids) + longest_response(request, self.max_model_len))
            rows += 1
            if rows > 1 and (rows > self.config.max_num_seqs or rows * longest > room):
                break
            admitted.append(request_id)
        if not admitted:
            return
        admitted.sort(key=lambda t: (len(self._waiting[t].prompt_ids), self._waiting[t].prompt_ids))
        new = self._prefilled_batch([self._waiting.pop(request_id) for request_id in admitted], admitted)
        if not any(batch.join(new) for batch in self._running):
            self._running.append(new)

    # -- limits --------------------------------------------------------------------------------------------------------

    def _cache_room(self) -> int:
        """Bytes a KV cache may take. Depends on the machine, not on what is free now: batches are reproducible."""
        share = self.config.gpu_memory_utilization
        if self.device.type != "cpu":
            _, total = getattr(torch, self.device.type).mem_get_info(self.device)
            return int(total * share)
        return cache_share(share)


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
