"""Continuous generation: groups that are generated on devices of their own while steps are trained on.

The engines always have the groups of ``max_staleness`` batches before them. A step takes the first groups that are
complete and starts as many others. New weights interrupt the requests that run; each continues from its tokens as a
partial rollout, with the version of the weights behind every token. Described in docs/disjoint.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.buffer.over_sampling import GroupScheduler, Sample, SampledGroups, max_deferrals, prompt_keys
from verl.trainer.buffer.partial_rollouts import (
    GenerationClient,
    ProgressLog,
    RemoteSamplesClient,
    SampleClient,
    abort_running,
    stop_samples,
)
from verl.trainer.buffer.prompt_pool import save_pool
from verl.utils.py_functional import derive_seed

RunRow = Callable[[str, dict[str, Any], int, SampleClient], Awaitable[Any]]
"""(name of the sample, row of its prompt, seed, client) -> output of one sample, generated through the client."""


@dataclass(eq=False)
class OpenGroup:
    """The samples of a prompt that is not trained on yet."""

    uid: str
    prompt: DataProto
    """One row."""
    key: str
    """Of the prompt in the length history."""
    step: int
    """Training step that started it."""
    samples: list[Sample]
    run: Callable[[int, int, SampleClient], Awaitable[Any]]
    missing: int = 0
    """Samples that are not complete."""
    finished: int = -1
    """Number of groups that were complete before; -1: it is not complete."""


class ContinuousScheduler(GroupScheduler):
    """Generate groups while steps are trained on, and choose those of each step.

    A group that step s starts is trained on by step s + ``max_postponements`` at the latest, which is
    s + ``max_staleness`` unless it is given: a step waits for as many of the oldest groups as that takes. Samples with
    a token older than ``max_staleness`` start again.

    Everything but `take`, `save`, and `load` runs in the event loop of the agent loops.

    Args:
        as `GroupScheduler`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open: dict[str, OpenGroup] = {}
        """Groups by uid, in the order in which they were started."""
        self.total_steps = 0
        """Training steps of the run."""
        self.gate = asyncio.Event()
        """Set while requests may be sent."""
        self._tasks: dict[Sample, asyncio.Task] = {}
        self._too_old: set[Sample] = set()
        """Running samples that start again when they end."""
        self._changed = asyncio.Event()
        self._error: BaseException | None = None
        self._client: GenerationClient | None = None
        self._num_finished = 0
        self._started: dict[str, int] = {}
        """Uid -> step that started it, of groups of a checkpoint."""

    def num_prompts_of(self, step: int) -> int:
        """Return the number of prompts that ``step`` starts: those of ``staleness`` batches are left when it trains."""
        batches = min(1 + self.config.staleness, self.total_steps - step + 1)
        return max(0, batches * self.batch_size - len(self.open))

    def take(self, step: int) -> DataProto:
        """Return the prompts that this step starts; none in the last steps, whose groups are open already."""
        count = self.num_prompts_of(step)
        return self.take_prompts(count, step) if count else DataProto()

    async def start(self, prompts: DataProto, step: int, client: GenerationClient, version: int, run: RunRow) -> None:
        """Begin to generate n samples to each of ``prompts`` with the weights of ``version``, which are the newest.

        Prompts that are open are left out. Samples that were lost with other servers continue from their tokens.

        Args:
            client: of the rollout servers.
        """
        if self._client not in (None, client):
            await self._reconnect(client)
        self._client = client
        if not self.weights or self.weights[-1] != version:
            self.weights = [*self.weights[-max_deferrals(self.config) - self.config.staleness :], version]
        for sample in self.samples:
            sample.client.version = version
        keys = prompt_keys(prompts) if len(prompts) else []
        for row, key in enumerate(keys):
            prompt = prompts.select_idxs([row])
            uid = prompt.non_tensor_batch["uid"][0]
            if uid in self.open:
                continue
            values = {name: column[0] for name, column in prompt.non_tensor_batch.items()}
            if "raw_prompt_ids" not in values:
                values["raw_prompt_ids"] = prompt.ragged("input_ids").rows()[0].tolist() if prompt.keys() else []
            started = self._started.pop(uid, step)
            own = [self._sample(uid, key, k, started, client, version) for k in range(self.config.n)]
            group = OpenGroup(uid, prompt, key, started, own, partial(_run_row, run, values))
            self.open[uid] = group
            for sample in own:
                self._begin(group, sample)

    async def hold(self) -> None:
        """Send no request until `release`: what new weights interrupt waits here, not at the servers."""
        self.gate.clear()
        if isinstance(self._client, RemoteSamplesClient):
            await self._client.hold()

    async def release(self) -> None:
        """Let requests be sent, under the newest weights."""
        if isinstance(self._client, RemoteSamplesClient):
            await self._client.release(self.weights[-1])
        self.gate.set()

    async def _fetch_logs(self, interrupts: bool = False) -> None:
        """Bring the logs of samples that run in other processes to their newest state; may end their requests."""
        if isinstance(self._client, RemoteSamplesClient):
            await self._client.fetch_logs({one.client.sample_id: one.client for one in self.samples}, interrupts)

    async def restart_old(self, client: GenerationClient) -> tuple[int, int]:
        """Start samples again that hold a token older than ``max_staleness``; return their number, and tokens."""
        await self._fetch_logs()
        bound, samples, tokens = self.config.staleness, 0, 0
        for group in self.open.values():
            old = [s for s in group.samples if any(self.staleness(v) > bound for v in set(s.log.versions))]
            samples, tokens = samples + len(old), tokens + sum(sample.log.num_tokens for sample in old)
            running = [sample for sample in old if not self._tasks[sample].done()]
            self._too_old.update(running)
            await stop_samples([sample.client for sample in running], client)
            for sample in set(old) - set(running):
                _reset(sample)
                self._begin(group, sample)
        return samples, tokens

    async def next_batch(self, step: int) -> tuple[DataProto, SampledGroups]:
        """Let requests be sent, and wait for the groups of ``step``; return prompts, the oldest first, and samples.

        Raises:
            whatever a sample raised.
        """
        count = min(self.batch_size, len(self.open))
        await self.release()
        waited_for = 0
        while True:
            if self._error is not None:
                raise self._error
            complete = [group for group in self.open.values() if group.finished >= 0]
            if len(complete) >= count:
                if not (lacking := self.lacking(step, count)):
                    break
                waited_for = max(waited_for, lacking)
            self._changed.clear()
            await self._changed.wait()
        names = {group.uid for group in sorted(complete, key=lambda group: group.step)[:count]}
        chosen = [self.open.pop(uid) for uid in list(self.open) if uid in names]
        self.pool.finish(names)
        for group in chosen:
            for sample in group.samples:
                del self._tasks[sample]
            self.history.observe(group.key, [sample.log.num_tokens for sample in group.samples])
        ranks = np.argsort(np.argsort([group.finished for group in chosen])).tolist()
        samples = [sample for group in chosen for sample in group.samples]
        versions = [sample.log.versions for sample in samples]
        sampled = SampledGroups(list(range(count)), [sample.outcome for sample in samples], versions, ranks)
        sampled.metrics = self.staleness_metrics(versions) | {
            "rollout/groups_open": len(self.open),
            "rollout/groups_ready": sum(group.finished >= 0 for group in self.open.values()),
            "rollout/prompts_waited_for": waited_for,
            "rollout/interrupted_share": sum(len(set(own)) > 1 for own in versions) / max(1, len(versions)),
        }
        return DataProto.concat([group.prompt for group in chosen]), sampled

    def lacking(self, step: int, count: int) -> int:
        """Return how many old groups must be complete, besides those that are, for all to be trained on in their time.

        Of the groups whose last step is not after step d, at least n - (d - step) x ``batch_size`` are trained on now.
        """
        groups = sorted(self.open.values(), key=lambda group: group.step)
        lacking = complete = 0
        for number, (group, after) in enumerate(zip(groups, [*groups[1:], None], strict=True), 1):
            complete += group.finished >= 0
            if after is None or after.step > group.step:
                batches_left = max(0, group.step + max_deferrals(self.config) - step)
                lacking = max(lacking, min(count, number - batches_left * self.batch_size) - complete)
        return lacking

    async def cancel(self) -> None:
        """End all samples."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sample in self.samples:
            await sample.log.replies.close()
        self.open, self._tasks = {}, {}

    @property
    def samples(self) -> list[Sample]:
        """Samples of the open groups."""
        return [sample for group in self.open.values() for sample in group.samples]

    # -- samples -----------------------------------------------------------------------------------------------------

    def _sample(self, uid: str, key: str, k: int, step: int, client: GenerationClient, version: int) -> Sample:
        entry, log = self.pool.entries[uid], self.logs.pop(f"{uid}/{k}", None) or ProgressLog()
        expected = max(0, min(int(self.history.expected(key)), self.config.response_length) - log.num_tokens)
        # groups of earlier steps before those of later ones; among those of one step the longest first
        priority = expected - step * (self.config.response_length + 1)
        seed = derive_seed(self.seed, "train", entry.step, entry.number, k)
        own = SampleClient(client, f"{uid}/{k}", log, version, priority, self.gate)
        return Sample(0, seed, own, log.num_tokens)

    def _begin(self, group: OpenGroup, sample: Sample) -> None:
        group.missing, group.finished = group.missing + 1, -1
        self._tasks[sample] = task = asyncio.ensure_future(self._complete(group, sample))
        task.add_done_callback(partial(self._ended, group))

    async def _complete(self, group: OpenGroup, sample: Sample) -> None:
        """Run a sample to its end, from its start whenever its tokens became too old."""
        while not await sample.run(group.run) or sample in self._too_old:
            self._too_old.discard(sample)
            _reset(sample)

    async def _reconnect(self, client: GenerationClient) -> None:
        """Run the samples that are not complete again, with the tokens of their logs."""
        lost = {group: [s for s in group.samples if not s.is_complete] for group in self.open.values()}
        tasks = [self._tasks[sample] for samples in lost.values() for sample in samples]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._error = None
        self._too_old.clear()
        for group, samples in lost.items():
            group.missing = 0
            for sample in samples:
                sample.client.reconnect(client)
                self._begin(group, sample)
            for sample in set(group.samples) - set(samples):
                sample.client.reconnect(client)

    def _ended(self, group: OpenGroup, task: asyncio.Task) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._error = self._error or error
        group.missing -= 1
        if not group.missing:
            group.finished, self._num_finished = self._num_finished, self._num_finished + 1
        self._changed.set()

    # -- checkpoint --------------------------------------------------------------------------------------------------

    async def interrupted_state(self, client: GenerationClient) -> dict[str, Any]:
        """Return the tokens of the open groups as JSON values; interrupts the requests that run for the moment."""
        self.gate.clear()
        try:
            await self._fetch_logs(interrupts=True)
            if not isinstance(client, RemoteSamplesClient):
                await abort_running([sample.client for sample in self.samples], client)
            logs = {sample.client.sample_id: sample.log.state() for sample in self.samples if sample.log.turns}
            return {"journals": logs, "started": {group.uid: group.step for group in self.open.values()}}
        finally:
            await self.release()

    def save_open(self, folder: Path, state: dict[str, Any]) -> None:
        """Write the open groups, whose `interrupted_state` is given, into a step's folder."""
        prompts = [group.prompt for group in self.open.values()]
        in_flight = DataProto.concat(prompts) if prompts else DataProto()
        history = self.history.state_dict()
        save_pool(folder, self.pool, in_flight, history=history, weights=self.weights, **state)

    def load(self, folder: Path) -> dict[str, Any]:
        """Read what `save_open` wrote, if it is there: the groups are started again, from the tokens they had."""
        state = super().load(folder)
        self._started = state.get("started", {})
        return state


def _reset(sample: Sample) -> None:
    """Have a sample begin again, with nothing generated."""
    sample.client.restart()
    sample.client.is_stopped, sample.is_complete = False, False


async def _run_row(run: RunRow, values: dict[str, Any], row: int, seed: int, client: SampleClient) -> Any:
    return await run(client.sample_id, values, seed, client)
