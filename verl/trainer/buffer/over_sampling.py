"""A batch out of more prompts than it needs: over-sampling, prompts put off, responses that go on in later steps.

The prompts of a step are drawn together, request by request. The batch is the first groups that are complete; the
prompts of the others are put off and come first in the next step. What their responses had drawn is thrown away or,
with ``partial_rollout``, kept and continued under the next weights. Described in docs/long_tails.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.batch.ragged import Ragged
from verl.checkpoint.rows_file import check_savable
from verl.protocol import DataProto
from verl.trainer.buffer.partial_rollouts import (
    GenerationClient,
    Journal,
    LengthHistory,
    SampleClient,
    prompt_key,
    stop_samples,
)
from verl.trainer.buffer.prompt_pool import PromptPool, load_pool, save_pool
from verl.utils.seeding import derive_seed
from verl.workers.rollout.server.load import occupancy

# -- Groups of samples that are drawn together, and when there are enough of them ------------------------------------


Group = Sequence[Callable[[], Coroutine[Any, Any, bool]]]
"""The samples of one prompt; each says at its end whether it is complete (True) or was stopped (False)."""


@dataclass
class Race:
    """Who came in, and when."""

    taken: list[int] = field(default_factory=list)
    """Numbers of the groups of the batch, in the order in which they were complete."""
    spare: list[int] = field(default_factory=list)
    """Complete too, but the batch was full."""

    def place(self, number: int, count: int, required: Collection[int]) -> None:
        """Put a complete group into the batch of ``count``, where room is kept for the required ones."""
        is_needed = number in required or not self.is_full_but_for(required, count)
        (self.taken if is_needed else self.spare).append(number)

    def is_full_but_for(self, required: Collection[int], count: int) -> bool:
        """Whether only required groups are still missing."""
        return sum(number not in required for number in self.taken) == count - len(required)


async def first_groups(
    groups: Sequence[Group],
    count: int,
    stop: Callable[[Sequence[int]], Awaitable[None]],
    *,
    required: Collection[int] = (),
    keep_going: bool = False,
) -> Race:
    """Run all groups at once until ``count`` are complete, the required ones among them, and stop the others.

    The batch is the required groups and those of the others that were complete first. Of groups that are complete at
    the same wake-up of the event loop the one of the lower number is first.

    Args:
        groups: the samples of each, started in this order.
        count: groups of the batch; at most as many are required.
        stop: told numbers of groups, makes their samples end soon.
        required: groups to wait for.
        keep_going: when only required groups are missing, let the others run on until those are complete.

    Raises:
        whatever a sample raises, once all others are cancelled.
    """
    required = frozenset(required)
    if not len(required) <= count <= len(groups):
        raise ValueError(
            f"first_groups: {count} of {len(groups)} groups are asked for and {len(required)} are required. "
            "Ask for as many as there are or fewer, and require no more than you ask for."
        )
    samples = [[asyncio.ensure_future(start()) for start in group] for group in groups]
    running = {asyncio.gather(*group): number for number, group in enumerate(samples)}
    race, stopped = Race(), frozenset()
    try:
        while len(race.taken) < count:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for future in sorted(done, key=running.__getitem__):
                number = running.pop(future)
                if all(future.result()):
                    race.place(number, count, required)
            if not keep_going and not stopped and race.is_full_but_for(required, count):
                stopped = frozenset(running.values()) - required
                await stop(sorted(stopped))
        await stop(sorted(set(running.values()) - stopped))
        late = [(number, all(await future)) for future, number in running.items()]
        race.spare.extend(number for number, is_complete in sorted(late) if is_complete)
        return race
    except BaseException:
        left = [sample for group in samples for sample in group]
        for sample in left:
            sample.cancel()
        await asyncio.gather(*left, *running, return_exceptions=True)
        raise


PLACE = "finish_place"
"""Column: a group's place in the order in which the groups of the batch were complete, from 0."""
RunSample = Callable[[int, int, SampleClient], Awaitable[Any]]
"""(row of the prompt, seed, client) -> what came of one sample; it draws through the client."""


@dataclass(eq=False)
class Sample:
    """One response of a step."""

    row: int
    """Its prompt's."""
    seed: int
    client: SampleClient
    tokens_before: int
    """Drawn in earlier steps."""
    outcome: Any = None
    is_complete: bool = False

    async def run(self, run: RunSample) -> bool:
        """Draw it to its end; False if it was stopped."""
        try:
            self.outcome = await run(self.row, self.seed, self.client)
        except asyncio.CancelledError:
            if not self.client.is_stopped:
                raise
            return False
        self.is_complete = self.journal.is_complete  # a loop may live on when an answer is cut off under it
        return self.is_complete

    @property
    def journal(self) -> Journal:
        return self.client.journal

    @property
    def tokens_drawn(self) -> int:
        """In this step, and kept."""
        return max(0, self.journal.num_tokens - self.tokens_before)


@dataclass
class Drawn:
    """The batch of a step."""

    rows: list[int]
    """Of the prompts given, those in the batch, ascending."""
    outcomes: list[Any]
    """Of their samples, n a prompt."""
    versions: list[list[int]]
    """Of each sample: the weights that drew each of its tokens."""
    places: list[int]
    """Of each prompt in the batch: its place in the order in which groups were complete, from 0."""
    metrics: dict[str, float] = field(default_factory=dict)


class GroupSampler:
    """Draws the batch of every training step, and remembers what was begun and not finished.

    Args:
        config: ``actor_rollout_ref.rollout``. Read: n, response_length, over_sample_rate, max_postponements,
            partial_rollout, max_staleness.
        pool: gives the prompts and takes back those put off.
        batch_size: prompts of a batch.
        seed: of the run.
    """

    def __init__(self, config: Any, pool: PromptPool, batch_size: int, seed: int) -> None:
        self.config = config
        self.pool = pool
        self.batch_size = batch_size
        self.seed = seed
        self.history = LengthHistory()
        self.journals: dict[str, Journal] = {}
        self.weights: list[int] = []
        """Versions the rollout drew with, the newest last."""
        self._is_savable = False

    @property
    def num_prompts(self) -> int:
        """Prompts a step starts."""
        return self.batch_size + math.ceil(round(self.batch_size * self.config.over_sample_rate, 6))

    def take(self, step: int) -> DataProto:
        """The prompts that this step starts."""
        prompts = self.pool.take(self.num_prompts, step)
        if not self._is_savable:
            try:
                check_savable(prompts)
            except ValueError as problem:
                raise ValueError(
                    "actor_rollout_ref.rollout.over_sample_rate puts prompts off, and a checkpoint could not hold "
                    f"these: {problem} Set over_sample_rate=0, or leave that column out of the data set."
                ) from None
            self._is_savable = True
        return prompts

    async def draw(self, prompts: DataProto, client: GenerationClient, version: int, run: RunSample) -> Drawn:
        """Sample n responses to each of ``prompts`` until a batch of groups is complete; puts the others off.

        Args:
            prompts: what the pool gave, `num_prompts` of them or fewer.
            version: of the weights the servers behind ``client`` hold.
        """
        self._note(version)
        uids, keys = prompts.non_tensor_batch["uid"], prompt_keys(prompts)
        discarded = self._discard_stale(uids)
        groups = [self._group(row, uid, keys[row], client, version) for row, uid in enumerate(uids)]
        order = sorted(range(len(groups)), key=lambda row: (-max(s.client.priority for s in groups[row]), row))
        required = self._required(uids)

        async def stop(numbers: Sequence[int]) -> None:
            await stop_samples([sample.client for number in numbers for sample in groups[order[number]]], client)

        race = await first_groups(
            [[lambda sample=sample: sample.run(run) for sample in groups[row]] for row in order],
            min(self.batch_size, len(groups)),
            stop,
            required=[order.index(row) for row in required],
            keep_going=self.config.partial_rollout,
        )
        drawn = self._collect(groups, order, race)
        self._put_off(prompts, groups, drawn)
        self._learn(groups, keys)
        drawn.metrics = self._metrics(groups, drawn, required, discarded)
        return drawn

    # -- before ------------------------------------------------------------------------------------------------------

    def _note(self, version: int) -> None:
        if not self.weights or self.weights[-1] != version:
            self.weights = [*self.weights[-self.config.max_staleness :], version]

    def staleness(self, version: int) -> int:
        """How many times the rollout's weights have changed since it held ``version``."""
        newer = self.weights[self.weights.index(version) :] if version in self.weights else [None, *self.weights]
        return len(newer) - 1

    def _discard_stale(self, uids: Sequence[str]) -> int:
        """Let samples begin anew that hold a token older than the bound; returns their tokens."""
        mine = [f"{uid}/{k}" for uid in uids for k in range(self.config.n)]
        journals = [self.journals[sample] for sample in mine if sample in self.journals]
        bound = self.config.max_staleness
        return sum(j.clear() for j in journals if any(self.staleness(v) > bound for v in set(j.versions)))

    def _group(self, row: int, uid: str, key: str, client: GenerationClient, version: int) -> list[Sample]:
        ticket, samples = self.pool.tickets[uid], []
        for k in range(self.config.n):
            journal = self.journals.pop(f"{uid}/{k}", None) or Journal()
            priority = max(0, int(self.history.expected(key)) - journal.num_tokens)
            if ticket.postponed:  # before all others
                priority += self.config.response_length
            seed = derive_seed(self.seed, "train", ticket.step, ticket.number, k)
            own = SampleClient(client, f"{uid}/{k}", journal, version, priority)
            samples.append(Sample(row, seed, own, journal.num_tokens))
        return samples

    def _required(self, uids: Sequence[str]) -> list[int]:
        """Rows to wait for: all that were put off, once one of them was put off as often as is allowed."""
        postponed = [self.pool.tickets[uid].postponed for uid in uids]
        if max(postponed, default=0) < most_postponements(self.config):
            return []
        oldest_first = sorted((row for row, times in enumerate(postponed) if times), key=lambda row: -postponed[row])
        return oldest_first[: self.batch_size]

    # -- after -------------------------------------------------------------------------------------------------------

    def _collect(self, groups: list[list[Sample]], order: list[int], race: Race) -> Drawn:
        place = {order[number]: place for place, number in enumerate(race.taken)}
        rows = sorted(place)
        samples = [sample for row in rows for sample in groups[row]]
        return Drawn(
            rows,
            [sample.outcome for sample in samples],
            [sample.journal.versions for sample in samples],
            [place[row] for row in rows],
        )

    def _put_off(self, prompts: DataProto, groups: list[list[Sample]], drawn: Drawn) -> None:
        rest = [row for row in range(len(groups)) if row not in set(drawn.rows)]
        if self.config.partial_rollout:
            for sample in (sample for row in rest for sample in groups[row]):
                if sample.journal.num_tokens:
                    self.journals[sample.client.sample_id] = sample.journal
        self.pool.finish(prompts.non_tensor_batch["uid"][drawn.rows])
        self.pool.put_back(prompts.select_idxs(rest))

    def _learn(self, groups: list[list[Sample]], keys: Sequence[str]) -> None:
        for key, group in zip(keys, groups, strict=True):
            drew = [sample for sample in group if sample.tokens_drawn]
            ended = [sample.journal.num_tokens for sample in drew if sample.is_complete]
            self.history.observe(key, ended, [s.journal.num_tokens for s in drew if not s.is_complete])

    def _metrics(
        self, groups: list[list[Sample]], drawn: Drawn, required: Sequence[int], discarded: int
    ) -> dict[str, float]:
        samples = [sample for group in groups for sample in group]
        rest = [sample for sample in samples if sample.row not in set(drawn.rows)]
        lengths = [sample.tokens_drawn for sample in samples]
        left = sum(sample.journal.num_tokens for sample in rest)
        kept = left if self.config.partial_rollout else 0
        metrics = {
            "rollout/prompts_started": len(groups),
            "rollout/prompts_put_off": len(groups) - len(drawn.rows),
            "rollout/prompts_waited_for": len(required),
            "rollout/samples_aborted": sum(not sample.is_complete for sample in samples),
            "rollout/tokens_drawn/min": min(lengths),
            "rollout/tokens_drawn/mean": sum(lengths) / len(lengths),
            "rollout/tokens_drawn/max": max(lengths),
            "rollout/tokens_kept": kept,
            "rollout/tokens_discarded": discarded + left - kept,
        }
        return metrics | (self._staleness_metrics(drawn) if self.config.partial_rollout else {})

    def _staleness_metrics(self, drawn: Drawn) -> dict[str, float]:
        ages = np.array([self.staleness(version) for versions in drawn.versions for version in versions] or [0])
        return {
            "rollout/staleness/mean": float(ages.mean()),
            "rollout/staleness/max": float(ages.max()),
            "rollout/stale_token_share": float((ages > 0).mean()),
        }

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write into a step's folder what a resumed run needs to go on with the same prompts and tokens."""
        journals = {sample: journal.state() for sample, journal in self.journals.items()}
        save_pool(folder, self.pool, history=self.history.state_dict(), journals=journals, weights=self.weights)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, if it is there."""
        state = load_pool(folder, self.pool)
        if "history" not in state:  # of a run that samples whole batches, or of none
            return
        self.history.load_state_dict(state["history"])
        self.journals = {sample: Journal.from_state(drafts) for sample, drafts in state["journals"].items()}
        self.weights = list(state["weights"])


def draw_batch(manager: Any, sampler: GroupSampler, prompts: DataProto) -> tuple[DataProto, DataProto, Drawn]:
    """Draw a step's batch with agent loops.

    Args:
        manager: AgentLoopManager.

    Returns:
        the prompts of the batch, in the order given; their responses, n a prompt, with the columns of a rollout,
        `PLACE`, and with ``partial_rollout`` ``rollout_versions`` (B, R) int64, the weights that drew each token, -1
        on those of others; and what was drawn, with its metrics.
    """
    manager.client.take_spans()
    drawn, timing = manager.serve_rows(prompts, partial(sampler.draw, prompts))
    drawn.metrics |= occupancy(manager.client.take_spans(), manager.client.num_servers)
    n = sampler.config.n
    taken = prompts.select_idxs(drawn.rows)
    batch = manager.to_batch(taken.repeat(n, interleave=True), drawn.outcomes, timing)
    batch.non_tensor_batch[PLACE] = np.repeat(drawn.places, n)
    if sampler.config.partial_rollout:
        batch.put("rollout_versions", versions_column(batch, drawn.versions))
    return taken, batch, drawn


def versions_column(batch: DataProto, versions: Sequence[Sequence[int]]) -> Ragged:
    """(B, R): the version of each token of ``response_mask`` in turn, -1 elsewhere."""
    mask = batch.ragged("response_mask")
    column = torch.full_like(mask.values, -1)
    for first, last, row in zip(mask.layout.offsets, mask.layout.offsets[1:], versions, strict=False):
        own = mask.values[first:last].nonzero()[:, 0]
        column[first:last][own] = torch.tensor(row[: len(own)], dtype=torch.int64)
    return mask.like(column)


def most_postponements(config: Any) -> int:
    """Steps that may put a prompt off before all that were put off are waited for."""
    if config.max_postponements is not None:
        return config.max_postponements
    return config.max_staleness if config.partial_rollout else 4


def prompt_keys(prompts: DataProto) -> list[str]:
    """The name of each prompt in the length history."""
    rows = prompts.non_tensor_batch.get("raw_prompt_ids")
    if rows is None:
        rows = [row.tolist() for row in prompts.ragged("input_ids").rows()]
    return [prompt_key(row) for row in rows]
