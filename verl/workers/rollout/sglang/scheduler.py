"""verl's part of SGLang's scheduler processes: their sampler and stop texts, and calls of the worker inside them.

SGLang's own seeds exist for a few attention kernels only, and its random state depends on all that ran before. This
sampler replaces it: a token depends on its row's logits, parameters and seed, on nothing else, and its log-probability
is that under the distribution it was sampled from. Weights are loaded, read back, freed and allocated where the model
is, by `SchedulerExtension`. Imported in SGLang's processes only.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import pickle
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.layers.sampler import Sampler, apply_custom_logit_processor, register_sampler_backend
from sglang.srt.managers import mm_utils
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req
from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from verl.utils.distributed import open_store
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import WeightSyncError
from verl.workers.rollout.memory import NAN_BYTE, HostMemory
from verl.workers.rollout.sampling import Decode, StopText, cut_to_top_k, cut_to_top_p, pick
from verl.workers.rollout.sglang.process import open_bucket
from verl.workers.rollout.sglang.setup import STOP
from verl.workers.rollout.weights.load import NO_MAP, WeightLoad, WeightMap

# -- Token sampler inside SGLang: one random stream per response, the same one as in `hf` ----------------------------


NAME = "pytorch"
"""The ``sampling_backend`` that this sampler replaces: the one that SGLang settles on where there is no GPU."""


def install_sampler() -> None:
    """Register in this process's SGLang the sampler, the seeds of requests, and penalties for tokens of the prompt."""
    register_sampler_backend(NAME, StreamSampler)
    make_batch = SamplingBatchInfo.from_schedule_batch.__func__
    prepare = BatchedRepetitionPenalizer._prepare

    def with_seeds(cls: type, batch: Any, vocab_size: int) -> SamplingBatchInfo:
        # SGLang itself puts seeds into batches in its deterministic mode alone
        info = make_batch(cls, batch, vocab_size)
        if info.sampling_seed is None:
            seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
            info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
        return info

    def with_prompts(self: BatchedRepetitionPenalizer) -> None:
        # repetition_penalty counts the prompt, as in the other engines; SGLang's own starts at the response
        prepare(self)
        penalties = self.cumulated_repetition_penalties
        for row, request in enumerate(self.orchestrator.reqs()):
            seen = torch.tensor([*request.origin_input_ids, *request.output_ids], device=penalties.device)
            penalties[row, seen[seen < penalties.shape[1]]] = request.sampling_params.repetition_penalty

    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds)
    BatchedRepetitionPenalizer._prepare = with_prompts


def listen_where_the_address_says() -> None:
    """Let the store of this engine's process group listen at its address; torch's listens on all interfaces."""

    def create(hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, use_libuv: bool = True) -> Any:
        return open_store(hostname, port, world_size, rank == 0, timeout)

    # torch.distributed.rendezvous is a function, too
    vars(importlib.import_module("torch.distributed.rendezvous"))["_create_c10d_store"] = create


class StreamSampler(Sampler):
    """Inverse-CDF sampling with a counter-based stream per request; see `verl.workers.rollout.sampling`."""

    def forward(
        self,
        logits_output: Any,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
        **others: Any,
    ) -> Tensor:
        """The next token of every row, (n,); puts their log-probabilities into ``logits_output``.

        ``positions`` (n,) are those of each row's last token.
        """
        logits = logits_output.next_token_logits
        if sampling_info.has_custom_logit_processor:
            apply_custom_logit_processor(logits, sampling_info)
        tokens, log_probs = sample(logits, sampling_info, positions)
        if return_logprob:
            logits_output.next_token_logprobs = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens


def sample(logits: Tensor, info: SamplingBatchInfo, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (n,) and their log-probabilities (n,) float32 for logits (n, V); NaN where a row's are not finite.

    A request is greedy by ``top_k=1``, which is how SGLang notes ``temperature=0``.
    """
    logits = logits.float()
    greedy = info.top_ks[:, None] <= 1
    largest, likely = logits.max(-1, keepdim=True)
    finite = largest.isfinite()
    scaled = ((logits - largest) / info.temperatures).masked_fill_(~finite, 0.0)
    weights = scaled.exp()
    if not info.is_all_greedy:
        if info.need_min_p_sampling:
            weights.masked_fill_(weights < info.min_ps[:, None], 0.0)
        if info.need_top_k_sampling:
            top_k = info.top_ks[:, None].long()
            cut_to_top_k(weights, torch.where(greedy | (top_k >= weights.shape[1]), 0, top_k))
        if info.need_top_p_sampling:
            cut_to_top_p(weights, torch.where(greedy, 1.0, info.top_ps[:, None]))
    tokens, total = pick(weights, uniforms(info.sampling_seed, positions)[:, None])
    tokens = torch.where(greedy, likely, tokens)
    log_probs = (scaled.gather(-1, tokens) - total.log()).masked_fill_(~finite, torch.nan)
    return tokens[:, 0], log_probs[:, 0].float()


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Number ``counter`` of each key's stream: two (n,) int64 -> (n,) float64 in [0, 1), on any device.

    With the keys of `requests.stream_key` these are the numbers of `verl.workers.rollout.sampling.uniforms`.
    """
    mixed = _mix(keys + counters * _GOLDEN)
    return _shifted(mixed, 12).double() * 2.0**-52


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; int64 tensors shift arithmetically."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


# -- Stop texts inside SGLang's scheduler: checked as `hf` checks them, so that all engines keep the same tokens -------
def install_stop_texts(tokenizer_path: str, trust_remote_code: bool) -> None:
    """Make this process's SGLang end requests at the texts that `STOP` in their ``custom_params`` lists.

    The tokenizer is read when the first of them comes.
    """
    theirs = Req._check_str_based_finish

    @lru_cache
    def decode() -> Decode:
        tokenizer = hf_tokenizer(tokenizer_path, trust_remote_code=trust_remote_code)
        return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def watcher_of(request: Any, num_before: int, texts: list[str]) -> StopText:
        """The watcher of a request, which has read the last ``num_before`` tokens of its prompt as the response's."""
        prompt = list(request.origin_input_ids_unpadded)
        split = len(prompt) - num_before
        watcher = StopText(decode(), texts, prompt[:split], request.sampling_params.min_new_tokens + num_before)
        for token in prompt[split:]:
            watcher.ends_with(token)
        return watcher

    def ends(request: Any, *args: Any, **kwargs: Any) -> bool:
        stops = (request.sampling_params.custom_params or {}).get(STOP)
        if stops is None:
            return theirs(request, *args, **kwargs)
        num_before, *texts = stops
        if not hasattr(request, "verl_watcher"):
            request.verl_watcher = watcher_of(request, num_before, texts)
        watcher = request.verl_watcher
        for count in range(watcher.num_tokens - num_before, len(request.output_ids)):
            if watcher.ends_with(request.output_ids[count]):
                request.finished_reason = FINISH_MATCHED_STR(matched="")
                request.finished_len = count + 1
                return True
        return theirs(request, *args, **kwargs)

    Req._check_str_based_finish = ends


# -- The scheduler processes -----------------------------------------------------------------------------------------


def run_scheduler(server_args: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with our sampler, our stop texts and `SchedulerExtension`."""
    install_sampler()
    listen_where_the_address_says()
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
    # one file a rank; SGLang answers the call after all ranks
    Path(f"{reply}.{scheduler.verl_extension.rank:05d}").write_bytes(pickle.dumps(answer))


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
        self._map: WeightMap = NO_MAP
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
    def zero_head_bias(self) -> None:
        """Set the bias of a classifier's head to zero: SGLang gives one to heads that have none, with random values."""
        for name, parameter in self.model.named_parameters():
            if name == "score.bias":
                parameter.zero_()

    @torch.no_grad()
    def begin_load(self) -> None:
        known, self._map, self._problem = self._map, NO_MAP, None
        self._load = WeightLoad(self.model, self.device, is_shared=self.ranks > 1, engine="SGLang", known=known)
        # cached outputs of the vision tower: SGLang keys them by the images alone and does not flush them
        holder = sys.modules[mm_utils.init_mm_embedding_cache.__module__]
        if holder.embedding_cache is not None:
            holder.embedding_cache.clear()

    @torch.no_grad()
    def load(self, messages: Sequence[dict[str, Any]]) -> str | None:
        """Hand a bucket to the model's own loader; returns what is wrong with it.

        Args:
            messages: one that all ranks share, or one for each rank.
        """
        message = messages[self.rank if len(messages) > 1 else 0]
        try:
            with open_bucket(message, self.device) as bucket:
                assert self._load is not None, "begin_load() comes first"
                self._load.load(bucket)
        except WeightSyncError as error:
            self._problem = self._problem or str(error)
        return self._problem

    @torch.no_grad()
    def end_load(self) -> tuple[str | None, dict[str, int], int]:
        """Problem found, else checksums of this rank's memory by the names as sent; and bytes held."""
        load = self._load
        assert load is not None, "begin_load() comes first"
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
        if problem:
            return problem, {}, 0
        self._map = load.weight_map()
        return None, load.checksums(), load.num_bytes

    @torch.no_grad()
    def read_back(self) -> dict[str, int]:
        """Checksums of what this rank's memory holds now, by the names of the last load."""
        return {} if self._load is None else self._load.read_back()

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
    def resume(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these parts again: weights full of NaN, the cache of zeros."""
        if "weights" in tags:
            self._memory["weights"].restore(NAN_BYTE)
        if "kv_cache" in tags:
            self._memory["kv_cache"].restore(0)


def _cache_tensors(runner: Any) -> Iterator[torch.Tensor]:
    """Every tensor of the KV cache."""
    for name, value in vars(runner.token_to_kv_pool).items():
        if name.endswith("_buffer"):
            yield from (part for part in (value if isinstance(value, list) else [value]) if torch.is_tensor(part))
