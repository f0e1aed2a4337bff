"""Over-sampling: a step starts more prompts than it trains on, and takes the groups that are complete first.

Responses are generated request by request. The prompts of incomplete groups are deferred and come first in the next
step. The tokens of their responses are discarded or, with ``partial_rollout``, kept and continued under the next
weights. Described in docs/long_tails.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.batch.ragged import Ragged
from verl.checkpoint.rows_file import check_savable
from verl.config.rollout import RolloutConfig
from verl.protocol import DataProto
from verl.trainer.buffer.partial_rollouts import (
    GenerationClient,
    LengthHistory,
    ProgressLog,
    SampleClient,
    prompt_key,
    stop_samples,
)
from verl.trainer.buffer.prompt_pool import PromptPool, load_pool, save_pool
from verl.utils.py_functional import derive_seed
from verl.workers.rollout.monitor import occupancy

# -- first-complete scheduler: run groups until enough are complete ---------------------------------------------------


Group = Sequence[Callable[[], Coroutine[Any, Any, bool]]]
"""The samples of one prompt; each returns whether it is complete (True) or was stopped (False)."""


@dataclass
class CompletedGroups:
    """Numbers of the groups that are complete."""

    batch: list[int] = field(default_factory=list)
    """Groups of the batch, in the order in which they were complete."""
    surplus: list[int] = field(default_factory=list)
    """Complete too, but the batch was full."""

    def add(self, number: int, count: int, required: Collection[int]) -> None:
        """Add a complete group to the batch of ``count``, which keeps room for the required ones."""
        is_needed = number in required or not self.is_full_but_for(required, count)
        (self.batch if is_needed else self.surplus).append(number)

    def is_full_but_for(self, required: Collection[int], count: int) -> bool:
        """Whether only required groups are still missing."""
        return sum(number not in required for number in self.batch) == count - len(required)


async def first_complete_groups(
    groups: Sequence[Group],
    count: int,
    stop: Callable[[Sequence[int]], Awaitable[None]],
    *,
    required: Collection[int] = (),
    keep_going: bool = False,
) -> CompletedGroups:
    """Run all groups at once until ``count`` are complete, the required ones among them, and stop the others.

    The batch is the required groups and those of the others that were complete first. Of groups that are complete at
    the same wake-up of the event loop the one of the lower number is first.

    Args:
        groups: the samples of each, started in this order.
        count: groups of the batch; at most as many are required.
        stop: called with numbers of groups; makes their samples end soon.
        required: groups to wait for.
        keep_going: when only required groups are missing, let the others run on until those are complete.

    Raises:
        whatever a sample raises, once all others are cancelled.
    """
    required = frozenset(required)
    if not len(required) <= count <= len(groups):
        raise ValueError(
            f"first_complete_groups: {count} of {len(groups)} groups are requested and {len(required)} are required. "
            "Request no more than there are, and require no more than are requested."
        )
    samples = [[asyncio.ensure_future(start()) for start in group] for group in groups]
    running = {asyncio.gather(*group): number for number, group in enumerate(samples)}
    completed = CompletedGroups()
    stopped: frozenset[int] = frozenset()
    try:
        while len(completed.batch) < count:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=running.__getitem__):
                number = running.pop(future)
                if all(future.result()):
                    completed.add(number, count, required)
            if not keep_going and not stopped and completed.is_full_but_for(required, count):
                stopped = frozenset(running.values()) - required
                await stop(sorted(stopped))
        await stop(sorted(set(running.values()) - stopped))
        late = [(number, all(await future)) for future, number in running.items()]
        completed.surplus.extend(number for number, is_complete in sorted(late) if is_complete)
        return completed
    except BaseException:
        left = [sample for group in samples for sample in group]
        for sample in left:
            sample.cancel()
        await asyncio.gather(*left, *running, return_exceptions=True)
        raise


FINISH_PLACE = "finish_place"
"""Column: rank of a group in the order in which the groups of the batch were complete, from 0."""
RunSample = Callable[[int, int, SampleClient], Awaitable[Any]]
"""(row of the prompt, seed, client) -> output of one sample, generated through the client."""


@dataclass(eq=False)
class Sample:
    """One response that a step generates."""

    row: int
    """Row of its prompt."""
    seed: int
    client: SampleClient
    tokens_before: int
    """Of its tokens, those of earlier steps."""
    outcome: Any = None
    is_complete: bool = False

    async def run(self, run: RunSample) -> bool:
        """Generate it to its end; False if it was stopped."""
        try:
            self.outcome = await run(self.row, self.seed, self.client)
        except asyncio.CancelledError:
            if not self.client.is_stopped:
                raise
            return False
        # an agent loop may return although its scheduler aborted one of its requests; one that it gave up itself, at a
        # limit of time, is none of the sample's
        self.is_complete = self.log.is_complete or not self.client.is_stopped
        return self.is_complete

    @property
    def log(self) -> ProgressLog:
        return self.client.log

    @property
    def new_tokens(self) -> int:
        """Tokens that this step generated and kept."""
        return max(0, self.log.num_tokens - self.tokens_before)


@dataclass
class SampledGroups:
    """The batch of a step: complete groups of n responses to a prompt."""

    rows: list[int]
    """Rows of the prompts in the batch, ascending."""
    outcomes: list[Any]
    """Outputs of their samples, n a prompt."""
    versions: list[list[int]]
    """Of each sample, the version of the weights that generated each of its tokens."""
    finish_places: list[int]
    """Of each prompt in the batch, its rank in the order in which groups were complete, from 0."""
    metrics: dict[str, float] = field(default_factory=dict)


class GroupScheduler:
    """Generate the batch of every training step, and keep the partial rollouts of deferred prompts.

    Args:
        config: ``actor_rollout_ref.rollout``. Read: n, response_length, over_sample_rate, max_postponements,
            partial_rollout, staleness.
        pool: gives the prompts and takes back the deferred ones.
        batch_size: prompts of a batch.
        seed: of the run.
    """

    def __init__(self, config: RolloutConfig, pool: PromptPool, batch_size: int, seed: int) -> None:
        self.config = config
        self.pool = pool
        self.batch_size = batch_size
        self.seed = seed
        self.history = LengthHistory()
        self.logs: dict[str, ProgressLog] = {}
        self.weights: list[int] = []
        """Versions of the weights that the rollout has had, the newest last."""
        self._is_savable = False

    @property
    def num_prompts(self) -> int:
        """Number of prompts a step starts."""
        return self.batch_size + math.ceil(round(self.batch_size * self.config.over_sample_rate, 6))

    def take(self, step: int) -> DataProto:
        """Return the prompts that this step starts."""
        return self.take_prompts(self.num_prompts, step)

    def take_prompts(self, count: int, step: int) -> DataProto:
        """Return the next ``count`` prompts of the pool.

        Raises:
            ValueError: a checkpoint could not hold them.
        """
        prompts = self.pool.take(count, step)
        if not self._is_savable:
            try:
                check_savable(prompts)
            except ValueError as problem:
                name = "over_sample_rate" if self.config.over_sample_rate else "partial_rollout"
                raise ValueError(
                    f"actor_rollout_ref.rollout.{name} keeps prompts for later steps, and a checkpoint could not hold "
                    f"these: {problem} Leave {name} alone, or leave that column out of the data set."
                ) from None
            self._is_savable = True
        return prompts

    async def sample(self, prompts: DataProto, client: GenerationClient, version: int, run: RunSample) -> SampledGroups:
        """Sample n responses to each of ``prompts`` until a batch of groups is complete; defer the others.

        Args:
            prompts: of the pool, `num_prompts` of them or fewer.
            version: of the weights the servers behind ``client`` hold.
        """
        if not self.weights or self.weights[-1] != version:
            self.weights = [*self.weights[-max(1, self.config.staleness) :], version]
        uids, keys = prompts.non_tensor_batch["uid"].tolist(), prompt_keys(prompts)
        discarded = self._discard_stale(uids)
        groups = [self._group(row, uid, keys[row], client, version) for row, uid in enumerate(uids)]
        order = sorted(range(len(groups)), key=lambda row: (-max(s.client.priority for s in groups[row]), row))
        required = self._required(uids)

        async def stop(numbers: Sequence[int]) -> None:
            await stop_samples([sample.client for number in numbers for sample in groups[order[number]]], client)

        completed = await first_complete_groups(
            [[partial(sample.run, run) for sample in groups[row]] for row in order],
            min(self.batch_size, len(groups)),
            stop,
            required=[order.index(row) for row in required],
            keep_going=self.config.partial_rollout,
        )
        sampled = self._collect(groups, order, completed)
        rest = [row for row in range(len(groups)) if row not in set(sampled.rows)]
        for sample in (sample for row in rest for sample in groups[row]):
            if self.config.partial_rollout and sample.log.num_tokens:
                self.logs[sample.client.sample_id] = sample.log
            else:
                await sample.log.replies.close()
        self.pool.finish(prompts.non_tensor_batch["uid"][sampled.rows])
        self.pool.defer(prompts.select_idxs(rest))
        for key, group in zip(keys, groups, strict=True):
            running = [sample for sample in group if sample.new_tokens]
            complete = [sample.log.num_tokens for sample in running if sample.is_complete]
            self.history.observe(key, complete, [s.log.num_tokens for s in running if not s.is_complete])
        sampled.metrics = self._metrics(groups, sampled, required, discarded)
        return sampled

    # -- before ------------------------------------------------------------------------------------------------------

    def staleness(self, version: int) -> int:
        """Return how many times the rollout's weights have changed since it held ``version``."""
        if version not in self.weights:
            return len(self.weights)
        return len(self.weights) - 1 - self.weights.index(version)

    def _discard_stale(self, uids: Sequence[str]) -> int:
        """Restart samples that hold a token older than ``max_staleness``; return the number of their tokens."""
        ids = [f"{uid}/{k}" for uid in uids for k in range(self.config.n)]
        logs = [self.logs[sample] for sample in ids if sample in self.logs]
        bound = self.config.staleness
        return sum(j.clear() for j in logs if any(self.staleness(v) > bound for v in set(j.versions)))

    def _group(self, row: int, uid: str, key: str, client: GenerationClient, version: int) -> list[Sample]:
        entry, samples = self.pool.entries[uid], []
        for k in range(self.config.n):
            log = self.logs.pop(f"{uid}/{k}", None) or ProgressLog()
            priority = max(0, int(self.history.expected(key)) - log.num_tokens)
            if entry.deferrals:  # deferred prompts go before all others
                priority += self.config.response_length
            seed = derive_seed(self.seed, "train", entry.step, entry.number, k)
            sample_client = SampleClient(client, f"{uid}/{k}", log, version, priority)
            samples.append(Sample(row, seed, sample_client, log.num_tokens))
        return samples

    def _required(self, uids: Sequence[str]) -> list[int]:
        """Return the rows to wait for: all deferred ones, once one of them was deferred as often as is allowed."""
        deferrals = [self.pool.entries[uid].deferrals for uid in uids]
        if max(deferrals, default=0) < max_deferrals(self.config):
            return []
        oldest_first = sorted((row for row, times in enumerate(deferrals) if times), key=lambda row: -deferrals[row])
        return oldest_first[: self.batch_size]

    # -- after -------------------------------------------------------------------------------------------------------

    def _collect(self, groups: list[list[Sample]], order: list[int], completed: CompletedGroups) -> SampledGroups:
        place = {order[number]: place for place, number in enumerate(completed.batch)}
        rows = sorted(place)
        samples = [sample for row in rows for sample in groups[row]]
        return SampledGroups(
            rows,
            [sample.outcome for sample in samples],
            [sample.log.versions for sample in samples],
            [place[row] for row in rows],
        )

    def _metrics(
        self, groups: list[list[Sample]], sampled: SampledGroups, required: Sequence[int], discarded: int
    ) -> dict[str, float]:
        samples = [sample for group in groups for sample in group]
        rest = [sample for sample in samples if sample.row not in set(sampled.rows)]
        lengths = [sample.new_tokens for sample in samples]
        left = sum(sample.log.num_tokens for sample in rest)
        kept = left if self.config.partial_rollout else 0
        metrics = {
            "rollout/prompts_started": len(groups),
            "rollout/prompts_put_off": len(groups) - len(sampled.rows),
            "rollout/prompts_waited_for": len(required),
            "rollout/samples_aborted": sum(not sample.is_complete for sample in samples),
            "rollout/tokens_generated/min": min(lengths),
            "rollout/tokens_generated/mean": sum(lengths) / len(lengths),
            "rollout/tokens_generated/max": max(lengths),
            "rollout/tokens_kept": kept,
            "rollout/tokens_discarded": discarded + left - kept,
        }
        return metrics | (self.staleness_metrics(sampled.versions) if self.config.partial_rollout else {})

    def staleness_metrics(self, versions: Sequence[Sequence[int]]) -> dict[str, float]:
        """Return how old the tokens of a batch are, whose samples' versions are given."""
        ages_of = {version: self.staleness(version) for own in versions for version in set(own)}
        ages = np.array([ages_of[version] for own in versions for version in own] or [0])
        return {
            "rollout/staleness/mean": float(ages.mean()),
            "rollout/staleness/max": float(ages.max()),
            "rollout/stale_token_share": float((ages > 0).mean()),
        }

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write into a step's folder what a resumed run needs to continue with the same prompts and tokens."""
        logs = {sample: log.state() for sample, log in self.logs.items()}
        save_pool(folder, self.pool, history=self.history.state_dict(), journals=logs, weights=self.weights)

    def load(self, folder: Path) -> dict[str, Any]:
        """Read what `save` wrote, if it is there, and return it."""
        state = load_pool(folder, self.pool)
        if "history" not in state:  # saved by a run with mode=sync
            return {}
        self.history.load_state_dict(state["history"])
        self.logs = {sample: ProgressLog.from_state(turns) for sample, turns in state["journals"].items()}
        self.weights = list(state["weights"])
        return state


def sample_batch(
    manager: Any, scheduler: GroupScheduler, prompts: DataProto, ended: Callable[..., None] | None = None
) -> tuple[DataProto, DataProto, SampledGroups]:
    """Generate a step's batch with agent loops.

    Args:
        manager: AgentLoopManager.
        ended: gets each response as it ends, `verl.agents.manager.Ended`.

    Returns:
        the prompts of the batch, in their order; their responses, n a prompt, with the columns of a rollout,
        `FINISH_PLACE`, and with ``partial_rollout`` ``rollout_versions`` (B, R) int64, the version of the weights that
        generated each token, -1 on tokens of others; and the groups, with their metrics.
    """
    manager.client.take_spans()
    sampled, timing = manager.serve_rows(prompts, partial(scheduler.sample, prompts), ended)
    sampled.metrics |= occupancy(manager.client.take_spans(), manager.client.num_servers)
    chosen = prompts.select_idxs(sampled.rows)
    return chosen, batch_of(manager, scheduler.config, chosen, sampled, timing), sampled


def batch_of(
    manager: Any, config: RolloutConfig, prompts: DataProto, sampled: SampledGroups, timing: Mapping[str, float]
) -> DataProto:
    """Return the columns of a rollout for complete groups of ``prompts``, as `sample_batch` does."""
    n = config.n
    batch = manager.to_batch(prompts.repeat(n, interleave=True), sampled.outcomes, timing)
    source_rows = batch.meta_info.get("source_rows", range(len(batch)))
    batch.non_tensor_batch[FINISH_PLACE] = np.repeat(sampled.finish_places, n)[source_rows]
    if config.partial_rollout:
        batch.put("rollout_versions", versions_column(batch, sampled.versions, source_rows))
    return batch


def versions_column(
    batch: DataProto, versions: Sequence[Sequence[int]], source_rows: Sequence[int] | None = None
) -> Ragged:
    """Return (B, R) int64: the version of each token in ``response_mask``, -1 elsewhere.

    Args:
        versions: of the generated tokens of each sample, in order.
        source_rows: (B,) sample of each row; those of a trajectory of several rows follow one another. None: each row
            is a sample.
    """
    mask = batch.ragged("response_mask")
    column = torch.full_like(mask.values, -1)
    used: dict[int, int] = {}
    for first, last, source in zip(
        mask.layout.offsets, mask.layout.offsets[1:], source_rows or range(len(batch)), strict=False
    ):
        sampled = mask.values[first:last].nonzero()[:, 0]
        begin = used.get(source, 0)
        used[source] = begin + len(sampled)
        own = versions[source][begin : begin + len(sampled)]
        column[first:last][sampled[: len(own)]] = torch.tensor(own, dtype=torch.int64)
    return mask.like(column)


def max_deferrals(config: RolloutConfig) -> int:
    """Return how many steps may defer a prompt before all deferred ones are waited for."""
    if config.max_postponements is not None:
        return config.max_postponements
    return max(1, config.staleness) if config.partial_rollout else 4


def prompt_keys(prompts: DataProto) -> list[str]:
    """Return the key of each prompt in the length history."""
    if "raw_prompt_ids" in prompts.non_tensor_batch:
        return [prompt_key(row) for row in prompts.non_tensor_batch["raw_prompt_ids"]]
    if "env_tag" in prompts.non_tensor_batch:  # environments make their prompts themselves
        return [f"env/{tag}" for tag in prompts.non_tensor_batch["env_tag"]]
    return [prompt_key(row.tolist()) for row in prompts.ragged("input_ids").rows()]
