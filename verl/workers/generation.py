"""The verbs of generation: a batch at once, or request by request through a server in the worker.

In a hybrid job the device serves or trains: `rollout_mode` and `serve` hand the newest weights over, and give the
device back afterwards. aiohttp is imported when a server is started.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from verl.config.ppo import ActorRolloutRefConfig
from verl.config.rollout import AsyncServerConfig
from verl.models.loader import ModelSpec, load_config
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.mailbox import sender
from verl.utils.device import empty_cache
from verl.utils.distributed import all_gather_objects, get_rank
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import load_extern_type
from verl.utils.py_functional import derive_seed
from verl.workers.model_worker import HybridWorker, lora_spec
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.assemble import assemble, sampling_params
from verl.workers.rollout.base import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
    WeightSyncError,
    ended_message,
)
from verl.workers.rollout.memory import memory_errors
from verl.workers.rollout.monitor import engine_phase
from verl.workers.rollout.weights.canary import CanaryError, canary_prompts, explanation, generate_canary
from verl.workers.rollout.weights.sync import compare_memory, listed, sync_adapter, sync_weights

if TYPE_CHECKING:
    from verl.workers.rollout.server.engine_loop import EngineLoop
    from verl.workers.rollout.server.server import RolloutServer

logger = logging.getLogger(__name__)

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids", "raw_prompt_ids", "seeds", "uid", "multi_modal_data")
"""Columns generation reads, those of them that there are."""


class RolloutRole(HybridWorker):
    """Verbs of generation, with the weights of ``self.actor``."""

    server: RolloutServer | EngineLoop | None = None
    """RolloutServer on the first rank of an engine, EngineLoop on those that follow it."""
    engine_loop: EngineLoop | None = None
    """The server's own, or ``server`` itself."""
    serving: AbstractContextManager[RolloutEngine] | None = None
    """`rollout_mode`, entered, while the rollout serves."""
    sharded: frozenset[str] | None = None
    """Weights that the last sync left sharded; None before the engine's layout is known."""

    def init_rollout(self) -> None:
        """Build the rollout engine; its weights arrive from the policy at the first generation."""
        model, config = self.config.model, self.config.rollout
        self.sends_adapter = sends_adapter(self.config, self.device)
        empty_cache(torch.device(self.device))  # what loading the actor left cached
        with memory_errors(config, "start"), engine_phase(config.name, "start"):
            self.rollout = get_rollout_class(config.name)(
                copy_to_local(model.path, use_shm=model.use_shm),
                config,
                device=self.device,
                trust_remote_code=model.trust_remote_code,
                override_config=dict(model.override_config),
                tokenizer_path=self.tokenizer_path or model.path,
                lora=lora_spec(model, self.config.actor.freeze_vision_tower) if self.sends_adapter else None,
            )
        self.rollout.monitor.engine, self.rollout.monitor.stall_timeout_s = config.name, config.stall_timeout_s
        for validate in (False, True):
            self.rollout.check_sampling(self.sampling(validate, do_sample=True))
        self.canary_prompts = canary_prompts(
            partial(self.tokenizer.encode, add_special_tokens=False),
            config.canary_prompts,
            config.prompt_length,
            self.rollout.never_generated,
        )
        self.unseeded_calls = 0
        self.keeps_weights = False
        rank, ranks = get_rank(), self.rollout.tensor_parallel_size
        self._register_dispatch_collect_info("rollout", dp_rank=rank // ranks, is_collect=rank % ranks == 0)

    # -- the engine's turns on the device ------------------------------------------------------------------------------

    @contextmanager
    def rollout_phase(self, phase: str) -> Iterator[None]:
        """Note the phase of the engine: for the memory ledger, and for the report on a worker that died."""
        if phase == "wake":
            # memory that the last update left cached is free to this process alone, and SGLang wakes in another
            empty_cache(torch.device(self.device))
        with self.ledger.phase(f"rollout_{phase}"), self.rollout.monitor.phase(phase):
            with memory_errors(self.config.rollout, phase):
                yield

    @contextmanager
    def rollout_mode(self, timing: dict[str, float]) -> Iterator[RolloutEngine]:
        """Hand the newest weights to the rollout engine, and the device's memory with them."""
        start = time.perf_counter()
        with self.actor.on_device():
            with self.rollout_phase("wake"):
                self.rollout.wake(("weights",))
            if is_new := self.rollout.version != self.newest_version({}):
                with self.rollout_phase("sync"):
                    self.sync_rollout()
        # after the actor's weights have left the device: the cache takes their place
        with self.rollout_phase("wake_cache"):
            self.rollout.wake(("kv_cache",))
        timing["reshard"] = time.perf_counter() - start
        if is_new:
            self.generate_canary(self.actor.version)
            timing["canary"] = time.perf_counter() - start - timing["reshard"]
        try:
            yield self.rollout
        finally:
            if self.config.rollout.free_cache_engine:
                # every wake is followed by a sync, so nothing need be kept but what the sync leaves out
                with self.rollout_phase("sleep"):
                    self.rollout.sleep(level=1 if self.sends_adapter else 2)

    def sync_rollout(self) -> None:
        """Bring the rollout, which is awake, to the actor's weights."""
        dtype, version = self.rollout.weights_dtype, self.actor.version
        bucket_bytes = self.config.rollout.update_weights_bucket_megabytes << 20
        if self.sends_adapter:
            adapter = self.actor.adapter_weights(dtype)
            sync_adapter(adapter, lambda: self.actor.base_weights(dtype), self.rollout, version, bucket_bytes)
        else:
            self.sharded = self.sharded_names()
            sharded = self.sharded or frozenset()
            weights = self.actor.weights_to_sync(dtype, sharded)
            sync_weights(weights, self.rollout, version, bucket_bytes, sharded=sharded)

    def sharded_names(self) -> frozenset[str] | None:
        """Weights that need no gathering: every rank's engine holds just the rows that its actor keeps.

        None: not known, which is so before the first sync. All ranks call it together.
        """
        if self.rollout.tensor_parallel_size == 1 or not (own := self.actor.own_rows):
            return None
        held = self.rollout.rows_held()
        same = frozenset(name for name, rows in own.items() if held.get(name) == rows)
        names = frozenset.intersection(*all_gather_objects(same))
        if not held:
            return None
        if names != self.sharded and get_rank() == 0:
            logger.log(
                logging.INFO if names else logging.WARNING,
                "weight sync: %d weights go from every rank's actor (%s) to its own engine without a gather. Gathered "
                "are those of which engines hold other rows (rollout.tensor_model_parallel_size=%d): %s",
                len(names),
                self.actor.layout,
                self.rollout.tensor_parallel_size,
                listed(own.keys() - names),
            )
        return names

    def generate_canary(self, version: int) -> None:
        """Generate the tokens that `HybridWorker.compare_canaries` compares with the actor's log-probabilities."""
        if self.canary_prompts:
            with self.rollout_phase("canary"):
                self.canary = generate_canary(self.rollout, self.canary_prompts, version)

    def check_own_canaries(self) -> None:
        """Compare the canaries of the rollouts in the actor's processes, if the actor still has the weights they had.

        All ranks call it together, with the actor on the device.

        Raises:
            WeightSyncError: a rollout computes with other weights than were synced to it; names the tensors.
        """
        if "rollout" not in self.role or not self.config.rollout.canary_prompts or not self.config.hybrid_engine:
            return
        own, self.canary = self.canary, None
        canaries = [canary for canary in all_gather_objects(own) if canary is not None]
        if not canaries or any(canary.version != self.actor.version for canary in canaries):
            return
        try:
            self.compare_canaries(canaries)
        except CanaryError as error:
            self.explain_canaries(error, self.canary_tolerance(canaries))

    def explain_canaries(self, struck: CanaryError, tolerance: float) -> NoReturn:
        """Raise ``struck`` with the tensors that differ, read back; after a second sync where memory was given back."""
        dtype, retry = self.rollout.weights_dtype, ""
        try:
            if self.rollout.is_asleep:
                self.rollout.wake(("weights",))
                self.sync_rollout()
                self.rollout.wake(("kv_cache",))
                self.generate_canary(self.actor.version)
                again = [canary for canary in all_gather_objects(self.canary) if canary is not None]
                try:
                    self.compare_canaries(again)
                    retry = "equal"
                except CanaryError as error:
                    retry = str(error)
            held = all_gather_objects(self.rollout.read_back())
            actor, is_apart = self.actor, self.sends_adapter
            sent = actor.weights(dtype, self.sharded or ())
            parts = [actor.base_weights(dtype), actor.adapter_weights(dtype)] if is_apart else [sent]
            changed = compare_memory(chain.from_iterable(parts), held, dtype, all_gather_objects)
            meaning = explanation(changed, any(held), retry, tolerance)
        except Exception as error:
            first_line = str(error).split("\n", 1)[0]
            meaning = f"Its memory could not be compared ({type(error).__name__}: {first_line})."
            raise WeightSyncError(f"{struck} {meaning}") from error
        finally:
            self.rollout.invalidate()
        raise WeightSyncError(f"{struck} {meaning}") from None

    def newest_version(self, meta: Mapping[str, Any]) -> int:
        """Version of the weights to generate with; ``meta``: the prompts' meta_info."""
        if self.keeps_weights:
            assert self.rollout.version is not None
            return self.rollout.version
        return self.actor.version

    # -- a batch at once -----------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="rollout", reads=PROMPT_COLUMNS)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate one response a row: adds row 1 of the data flow (responses, masks, whole sequences).

        Reads ``raw_prompt_ids`` (or the valid tokens of ``input_ids``), ``multi_modal_data`` where prompts have images
        and ``seeds`` (B,) int64; a caller that gives no seeds gets others at every call and rank. In ``meta_info``,
        ``validate`` (validation prompts) and ``do_sample`` (False: greedy) choose the sampling parameters.
        """
        meta, columns = prompts.meta_info, prompts.non_tensor_batch
        timing: dict[str, float] = {}
        step = int(meta.get("global_steps", 0))
        sampling = self.sampling(bool(meta.get("validate")), meta.get("do_sample", True))
        if "raw_prompt_ids" in columns:
            rows = list(columns["raw_prompt_ids"])
        else:
            rows = [row.tolist() for row in prompts.ragged("input_ids").rows()]
        if "seeds" in prompts.keys():
            seeds = prompts.column("seeds").tolist()
        else:
            seeds = self.fresh_seeds(step, len(prompts))
        media = columns.get("multi_modal_data", [None] * len(rows))
        requests = [Request(tuple(i), sampling, s, m or None) for i, s, m in zip(rows, seeds, media, strict=True)]
        # trainer.weight_sync_freq lets training batches between two syncs run with the weights the engine holds
        is_sync_step = (step - 1) % meta.get("weight_sync_freq", 1) == 0
        self.keeps_weights = self.rollout.version is not None and not meta.get("validate") and not is_sync_step
        with self.rollout_mode(timing) as engine:
            start = time.perf_counter()
            engine.monitor.names = list(columns.get("uid", ()))
            with self.rollout_phase("generate"):
                with self.reporting(meta, seeds) as on_ended:
                    completions = engine.generate(requests, self.newest_version(meta), on_ended)
            version = engine.version
            timing["generate_sequences"] = time.perf_counter() - start
        batch = assemble(
            prompts,
            completions,
            prompt_length=self.config.rollout.prompt_length,
            response_length=self.config.rollout.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            version=version,
        )
        batch.meta_info["timing"] = timing
        return batch

    @contextmanager
    def reporting(
        self, meta: Mapping[str, Any], seeds: Sequence[int]
    ) -> Iterator[Callable[[int, Completion], None] | None]:
        """What tells the driver of a response that has ended, if it asks (``completions_to`` of the metadata)."""
        leads = get_rank() % self.rollout.tensor_parallel_size == 0
        with sender(meta.get("completions_to") if leads else None) as send:
            if send is None:
                yield None
                return
            yield lambda place, one: send(ended_message(seeds[place], one.token_ids))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_metrics(self) -> dict[str, float]:
        """The engine's numbers since the last call, by their names below ``rollout/engine``."""
        metrics = self.rollout.monitor.take_metrics(self.rollout.totals())
        return metrics if self.canary_difference is None else metrics | {"canary_difference": self.canary_difference}

    def fresh_seeds(self, step: int, count: int) -> list[int]:
        """Seeds this rank never used before."""
        self.unseeded_calls += 1
        # ranks of one engine share its dp rank, and must generate with the same seeds
        origin = (self.seed, "unseeded", self._query_dispatch_info("rollout"), step, self.unseeded_calls)
        return [derive_seed(*origin, i) for i in range(count)]

    def sampling(self, validate: bool, do_sample: bool) -> SamplingParams:
        """The sampling of training or validation prompts; ``do_sample=False`` makes it greedy."""
        return sampling_params(self.config.rollout, self.tokenizer.eos_token_id, validate, do_sample)

    # -- request by request --------------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_server(self, token: str | None = None) -> dict[str, Any] | None:
        """Listen for requests; they wait until `serve`. Returns the address on the first rank of each engine.

        Args:
            token: what clients must send; None: nothing, which only a loopback address allows.
        """
        from verl.agents.tool_parser import get_tool_parser
        from verl.workers.rollout.server.engine_loop import EngineLoop, tensor_parallel_broadcast

        config, size, rank = self.config.rollout, self.rollout.tensor_parallel_size, get_rank()
        broadcast = tensor_parallel_broadcast(size)  # collective: before ranks part ways
        if rank % size:
            self.server = self.engine_loop = EngineLoop(self.rollout, broadcast=broadcast, follows=True)
            self.engine_loop.start()
            return None
        self.server = server = server_class(config.agent.custom_async_server)(
            self.rollout,
            host=config.server_host,
            token=token,
            tokenizer=self.tokenizer,
            seed=derive_seed(self.seed, "served", rank),
            broadcast=broadcast,
            parse_tool_calls=get_tool_parser(config.multi_turn.format, self.tokenizer).parse,
        )
        self.engine_loop = server.loop
        return {"address": server.start(), "rank": rank}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serve(self) -> dict[str, float]:
        """Take the device with the newest weights and answer requests until `stop_serving`; returns seconds."""
        timing: dict[str, float] = {}
        self.serving = self.rollout_mode(timing)
        self.serving.__enter__()
        assert self.server is not None and self.rollout.version is not None, "start_server() comes first"
        self.server.resume(self.rollout.version)
        return timing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_serving(self) -> None:
        """End what still runs and give the device back; requests that come now wait for the next `serve`."""
        assert self.server is not None, "start_server() comes first"
        self.server.pause()
        self.server_state()
        serving, self.serving = self.serving, None
        if serving is not None:
            serving.__exit__(None, None, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def server_state(self) -> dict[str, Any]:
        """Return the state of this rank's engine; raise what stopped it."""
        assert self.engine_loop is not None, "start_server() comes first"
        if self.engine_loop.error is not None:
            raise self.engine_loop.error
        return self.engine_loop.state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_server(self) -> None:
        """Close the server. Requests under way are answered with an error."""
        if self.server is not None:
            self.server.stop()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sampling_of(self, validate: bool, do_sample: bool) -> SamplingParams:
        """The sampling of training or validation prompts, as `generate_sequences` would choose it."""
        return self.sampling(validate, do_sample)


def server_class(custom: AsyncServerConfig) -> type[RolloutServer]:
    """``RolloutServer``, or the user's subclass that ``rollout.agent.custom_async_server`` names.

    Raises:
        TypeError: the class is no RolloutServer.
    """
    from verl.workers.rollout.server.server import RolloutServer

    if not custom.path:
        return RolloutServer
    found = load_extern_type(custom.path, custom.name)
    if not (isinstance(found, type) and issubclass(found, RolloutServer)):
        raise TypeError(
            f"actor_rollout_ref.rollout.agent.custom_async_server.name={custom.name}: {found!r} of {custom.path} is no "
            "subclass of verl.workers.rollout.server.server.RolloutServer. Derive it from that class."
        )
    return found


def sends_adapter(config: ActorRolloutRefConfig, device: str) -> bool:
    """Whether a sync brings the adapter alone: as ``rollout.lora_sync`` says, or where it is the faster way.

    Raises:
        ValueError: it was asked for, of an engine that holds no adapter apart from the weights of this model.
    """
    model, rollout = config.model, config.rollout
    # weights that travel between groups travel merged
    if not model.lora_rank or rollout.lora_sync == "merge" or not config.hybrid_engine:
        return False
    if rollout.lora_sync == "auto" and (rollout.name != "vllm" or device != "cuda"):
        return False
    spec = ModelSpec(
        model.path,
        override_config=dict(model.override_config),
        trust_remote_code=model.trust_remote_code,
        external_lib=model.external_lib,
    )
    reason = get_rollout_class(rollout.name).adapter_unsupported_reason(load_config(spec))
    if reason and rollout.lora_sync == "adapter":
        raise ValueError(
            f"actor_rollout_ref.rollout.lora_sync=adapter: rollout.name={rollout.name} {reason}. "
            "Use lora_sync=merge, which every engine takes."
        )
    return not reason
