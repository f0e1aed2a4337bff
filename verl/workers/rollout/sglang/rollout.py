"""The SGLang rollout engine, in processes of its own: token ids in and out, weights read back there.

One engine per replica of ``tensor_model_parallel_size`` ranks: the first of them owns it, with SGLang's own processes
for tensor parallelism; the others make every call together with it and get the same results. Runs on CUDA and on CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle
from typing import Any, Literal

import torch
import torch.distributed as dist

from verl.models.multimodal import image_token, is_vision_language
from verl.workers.rollout.base import (
    Bucket,
    Completion,
    ModelRollout,
    Receipt,
    Request,
    SamplingParams,
    WeightSyncError,
    cached_bytes_per_token,
    check_prompt,
    weights_asleep_error,
)
from verl.workers.rollout.memory import host_cache_bytes
from verl.workers.rollout.sglang.process import CudaIpcBuffer, EngineProcess, SharedMemoryBuffer
from verl.workers.rollout.sglang.setup import (
    CONTEXT_KEPT,
    EngineRequest,
    check_model,
    completion,
    engine_arguments,
    engine_request,
    environment,
    given_arguments,
    model_overrides,
    needs_tokenizer,
)
from verl.workers.rollout.vision import ImageReader

_TAGS = ("weights", "kv_cache")
_OF_ONE_REQUEST = ("sampling_seed", "max_new_tokens")  # which no request is refused for
_MOST_KNOWN = 4096
_CHECK_S = 5.0  # between two checks whether SGLang still generates
_STEP_S = 0.02  # longest wait of a step, so that new requests need not wait for the running ones


class SGLangRollout(ModelRollout):
    """Generates with SGLang; its options of ``config`` all reach the engine.

    Raises:
        ValueError: the installed SGLang lacks an argument, or cannot hold this model's weights plainly.
        EngineDiedError: the engine did not come up.
    """

    _process: EngineProcess | None = None
    _loading: int | None = None
    """The call that loads a bucket, on the rank that owns the engine."""

    @property
    def kind(self) -> Mapping[str, Any]:
        """Arguments of SGLang that say what kind of model it is."""
        return {}

    def _start(self) -> None:
        config, model_config, device = self.config, self.model_config, self.device.type
        check_model(model_config)
        derived = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": self.max_model_len + CONTEXT_KEPT,
            "trust_remote_code": self.trust_remote_code,
            "tokenizer_path": self.tokenizer_path,
            "json_model_override_args": model_overrides(self.spec.override_config),
            **self.kind,
        }
        if device == "cpu":
            room = host_cache_bytes(config, model_config, self.dtype, self.max_model_len)
            derived["max_total_tokens"] = room // cached_bytes_per_token(model_config, self.dtype)
        arguments = engine_arguments(config, device, self.spec.folder, **derived)
        self.has_tokenizer = not arguments["skip_tokenizer_init"]
        self._reader = ImageReader(self.spec.folder, model_config, config.limit_images, self.trust_remote_code)
        self._image_token = image_token(model_config) if is_vision_language(model_config) else None
        self.never_generated = self._reader.never_generated
        self.tensor_parallel_size = config.tensor_model_parallel_size
        self._group, self._leader = _replica(self.tensor_parallel_size)
        self.monitor.reports_steps = self.is_leader
        self._last_progress: tuple[int, int] | None = None
        self._next_check = 0.0
        variables = environment(device, self.tensor_parallel_size, self._visible_devices())

        def start() -> list[str]:
            self._process = EngineProcess(arguments, list(given_arguments(config)), variables)
            return self._process.info["sampling"]

        self._fields: list[str] = self._on_leader(start)
        self._requests: dict[int, Request] = {}
        self._taken: set[str] = set()  # sampling parameters that SGLang has taken before
        self._asleep: set[str] = set()
        if self.reads_weights:
            self.version = 0
        elif config.free_cache_engine:
            self.sleep(level=2)

    def _visible_devices(self) -> str | None:
        """CUDA devices of the replica's workers, in their order; None where they are visible to each of them."""
        if self.device.type != "cuda":
            return None
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        index = torch.cuda.current_device()
        mine = visible.split(",")[index] if visible else str(index)
        return ",".join(self._gather(mine))

    # -- the replica's ranks -------------------------------------------------------------------------------------------

    @property
    def engine(self) -> EngineProcess:
        """The engine's processes, on the rank that owns them."""
        assert self._process is not None, "this rank does not own the engine"
        return self._process

    @property
    def is_leader(self) -> bool:
        """Whether this rank owns the engine."""
        return self._group is None or dist.get_rank() == self._leader

    def _on_leader(self, act: Callable[[], Any]) -> Any:
        """Let the leader act; every rank of the replica gets its result, or its error. Collective."""
        outcome: list[Any] = [None, None]
        if self.is_leader:
            try:
                outcome[0] = act()
            except Exception as error:
                outcome[1] = error
        if self._group is not None:
            dist.broadcast_object_list(outcome, src=self._leader, group=self._group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _gather(self, what: Any) -> list[Any]:
        """One object from each rank of the replica. Collective."""
        if self._group is None:
            return [what]
        found: list[Any] = [None] * self.tensor_parallel_size
        dist.all_gather_object(found, what, group=self._group)
        return found

    def call_schedulers(self, function: str, **arguments: Any) -> list[Any]:
        """Call a method of `scheduler.SchedulerExtension`, or ``module:function`` with it, in every scheduler
        process.

        Returns one result a process. Only where `is_leader`.
        """
        return self.engine.call("call_schedulers", function, arguments)

    @property
    def pids(self) -> list[int]:
        """The engine's processes, which hold its memory."""
        return self._on_leader(lambda: self.engine.pids)

    def engine_arguments(self) -> dict[str, Any]:
        """SGLang's resolved arguments."""
        return self._on_leader(lambda: self.engine.call("arguments"))

    def close(self) -> None:
        """End the engine's processes; they also end with this process."""
        if self._process is not None:
            self._process.close()

    # -- weights -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def update_weights(self, version: int, buckets: Iterable[Bucket]) -> Receipt:
        """Load the buckets with SGLang's own loader, inside its processes, and sum up what their memory holds.

        A bucket is made and copied into shared memory while the one before it is loaded: extra memory is two.
        """
        self.check_nothing_runs("update_weights()")
        self.invalidate()
        if "weights" in self._asleep:
            raise weights_asleep_error(version)
        buffer_class = SharedMemoryBuffer if self.device.type == "cpu" else CudaIpcBuffer
        shared = buffer_class(), buffer_class()
        try:
            self._on_leader(self._begin_load)
            problem = self._send(shared, iter(buckets))
        except BaseException:
            if self.is_leader:
                self._end_session()
            raise
        finally:
            for buffer in shared:
                buffer.close()
        results = self._on_leader(self._end_load)
        problem = problem or results[0][0]
        if problem:
            raise WeightSyncError(f"The sync of version {version} failed: {problem}")
        self.version = version
        _, checksums, num_bytes = results[dist.get_rank(self._group) if self._group is not None else 0]
        return Receipt(version, checksums, num_bytes)

    def read_back(self) -> dict[str, int]:
        results = self._on_leader(lambda: self.call_schedulers("read_back"))
        return results[dist.get_rank(self._group) if self._group is not None else 0]

    def _begin_load(self) -> None:
        self.engine.call("manage", "begin_weight_update")
        self.call_schedulers("begin_load")

    def _end_load(self) -> list[tuple[str | None, dict[str, int], int]]:
        try:
            return self.call_schedulers("end_load")
        finally:
            self._end_session()

    def _end_session(self) -> None:
        self.engine.call("manage", "end_weight_update")
        self.engine.call("flush_cache")  # computed with older weights

    def _send(self, shared: Sequence[SharedMemoryBuffer | CudaIpcBuffer], buckets: Iterable[Bucket]) -> str | None:
        """Hand all buckets over; returns the first problem, after which the rest is only consumed.

        The two buffers take turns, and one is packed while the schedulers load from the other.
        """
        problem, self._loading, turns = None, None, cycle(shared)
        for bucket in buckets:
            if problem is not None:
                continue
            everyone = self.device.type == "cuda"  # each rank's buffer is on the device of one scheduler
            message = next(turns).pack(bucket) if everyone or self.is_leader else None
            messages = self._gather(message) if everyone else [message]
            del bucket  # free it before the next one is made
            problem = self._on_leader(partial(self._load_next, messages))
        return problem or self._on_leader(self._loaded)

    def _load_next(self, messages: list[Any]) -> str | None:
        """Wait until the bucket before is loaded, and have the schedulers load the next, unless there is a problem."""
        problem = self._loaded()
        if problem is None:
            self._loading = self.engine.start_call("call_schedulers", "load", {"messages": messages})
        return problem

    def _loaded(self) -> str | None:
        """Wait for the bucket that is being loaded; returns the first problem: its buffer may be packed again."""
        number, self._loading = self._loading, None
        problems = [] if number is None else self.engine.result(number)
        return next((problem for problem in problems if problem), None)

    # -- sleep ---------------------------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free weights and KV cache; both levels forget the weights."""
        self.check_nothing_runs("sleep()")
        self.invalidate()
        if awake := [tag for tag in _TAGS if tag not in self._asleep]:
            self._on_leader(lambda: self.engine.call("flush_cache"))
            self._change_memory("release", awake)
        self._asleep = set(_TAGS)

    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        if asleep := [tag for tag in _TAGS if tag in tags and tag in self._asleep]:
            self._change_memory("resume", asleep)
            self._asleep -= set(asleep)

    def _change_memory(self, action: Literal["release", "resume"], tags: list[str]) -> None:
        """Release or resume memory: on CUDA by SGLang's own means, which on a CPU do nothing."""
        if self.device.type == "cpu":
            self._on_leader(lambda: self.call_schedulers(action, tags=tags))
        else:
            self._on_leader(lambda: self.engine.call("manage", f"{action}_memory_occupation", tags))

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    # -- generation ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, expect_version: int) -> int:
        self.check_version(expect_version)
        return self._submit([request])[0]

    def step(self) -> dict[int, Completion]:
        ended = self._on_leader(lambda: self._wait(_STEP_S))
        if not self.is_leader:
            self.monitor.tick()  # the leader has answered; its own monitor watches the engine
        return self._finished(ended)

    def abort(self, request_ids: Sequence[int]) -> dict[int, Completion]:
        running = {request_id for request_id in request_ids if request_id in self._requests}

        def abort_and_wait() -> dict[int, Any]:
            self.engine.abort(sorted(running))
            return self._wait_for(running)

        return self._finished(self._on_leader(abort_and_wait))

    def partial(self, request_id: int) -> Completion | None:
        if request_id not in self._requests or not self.is_leader:
            return None
        return completion(self._requests[request_id], (*self.engine.partial_output(request_id), "abort"))

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def _submit(self, requests: list[Request]) -> list[int]:
        requests = self._reader.read(requests)
        for request in requests:
            check_prompt(len(request.prompt_ids), self.max_model_len)
            self.check_sampling(request.sampling)
        request_ids = [next(self._request_ids) for _ in requests]
        submitted = [
            (request_id, engine_request(request, self.max_model_len, self.stop_token_ids, self._image_token))
            for request_id, request in zip(request_ids, requests, strict=True)
        ]
        self._on_leader(lambda: self._hand_over(submitted))
        self._requests |= zip(request_ids, requests, strict=True)
        return request_ids

    def _hand_over(self, submitted: Sequence[tuple[int, EngineRequest]]) -> None:
        """Hand requests to the engine; on the leader.

        Raises:
            ValueError: the installed SGLang refuses how one is sampled. Later, its refusal would end the engine.
        """
        for params in chain.from_iterable(request.phases for _, request in submitted):
            shared = {name: value for name, value in params.items() if name not in _OF_ONE_REQUEST}
            key = json.dumps(shared, sort_keys=True, default=str)
            if key in self._taken:
                continue
            if problem := self.engine.call("sampling_problem", params):
                raise ValueError(f"SGLang refuses this sampling: {problem}")
            if len(self._taken) == _MOST_KNOWN:
                self._taken.clear()
            self._taken.add(key)
        self.engine.submit(submitted)

    def check_sampling(self, sampling: SamplingParams) -> None:
        if not self.has_tokenizer and (name := needs_tokenizer(sampling)):
            raise ValueError(
                f"rollout.sampling_kwargs.{name}={sampling.extra[name]!r} needs SGLang's tokenizer. "
                "Set rollout.engine_kwargs.sglang.skip_tokenizer_init=false, or leave it out."
            )
        if unknown := [f"{name}={value!r}" for name, value in sampling.extra.items() if name not in self._fields]:
            raise ValueError(
                f"rollout.sampling_kwargs: the installed SGLang's SamplingParams has no {', '.join(unknown)}. "
                f"It has {', '.join(sorted(self._fields))}."
            )

    def _finished(self, ended: Mapping[int, Any]) -> dict[int, Completion]:
        if not self.config.disable_log_stats and self.is_leader:
            sys.stderr.write(self.engine.new_output())
        requests = {request_id: self._requests.pop(request_id) for request_id in ended}
        return {request_id: completion(requests[request_id], output) for request_id, output in ended.items()}

    def _generate(self, requests: list[Request]) -> list[Completion]:
        request_ids = self._submit(requests)
        place = {request_id: number for number, request_id in enumerate(request_ids)}
        ended = self._on_leader(lambda: self._wait_for(set(request_ids), place))
        completions = self._finished(ended)
        return [completions[request_id] for request_id in request_ids]

    def _wait(self, seconds: float) -> dict[int, Any]:
        """Requests that ended within ``seconds``. Requests that end or grow count as steps for the monitor."""
        ended, now = self.engine.ended(seconds), time.monotonic()
        if ended:
            self.monitor.tick()
        elif self.engine.running and now > self._next_check:
            request_id = next(iter(self.engine.running))
            # a scheduler that hangs does not answer
            progress = (request_id, len(self.engine.partial_output(request_id)[0]))
            if progress != self._last_progress:
                self.monitor.tick()
            self._last_progress, self._next_check = progress, now + _CHECK_S
        return ended

    def _wait_for(self, request_ids: set[int], place: Mapping[int, int] | None = None) -> dict[int, Any]:
        """Wait for these requests; others that end meanwhile are kept for `step`.

        Args:
            place: of each request, to report those that end to ``on_ended``; None: nothing is reported.
        """
        ended: dict[int, Any] = {}
        while request_ids - ended.keys():
            new = self._wait(_CHECK_S)
            ended |= new
            if place is not None and self.on_ended is not None:
                for request_id in new.keys() & place.keys():
                    self.on_ended(place[request_id], completion(self._requests[request_id], new[request_id]))
        self.engine.keep({request_id: ended.pop(request_id) for request_id in ended.keys() - request_ids})
        return ended


def _replica(size: int) -> tuple[dist.ProcessGroup | None, int]:
    """The group of this rank's replica, and the rank in the world that leads it. Collective over all ranks."""
    if size == 1:
        return None, 0
    if not dist.is_initialized() or dist.get_world_size() % size:
        world = dist.get_world_size() if dist.is_initialized() else 1
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the {world} workers. "
            "Choose a divisor."
        )
    mine = None
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)), backend="gloo")
        if first <= dist.get_rank() < first + size:
            mine = group
    return mine, dist.get_rank() // size * size
