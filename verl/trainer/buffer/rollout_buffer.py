"""Rollout buffer: the prompts and rollouts of a run's training steps, behind one object.

The trainer takes prompts and rollouts from here, and gives back which of them it trains on. Policies of the buffer:
group filtering (`group_filter`), over-sampling with partial rollouts (`over_sampling`), reuse of cached batches
(`rollout_skip`), and a rollout engine on devices of its own (`disjoint`), which may generate a batch ahead or, group by
group, all the time (`continuous`). Knows columns and worker groups; no rewards, and not how batches are trained on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint import run_state
from verl.config.ppo import PPOConfig
from verl.config.rollout import RolloutConfig, needs_agent_loops
from verl.data.loader import AbstractCurriculumSampler
from verl.data.table import distinct_values
from verl.protocol import DataProto
from verl.rewards.managers.early import EarlyScoring
from verl.single_controller.errors import WorkerGroupError
from verl.telemetry.metric import reduce_metrics
from verl.telemetry.profiler import marked_timer
from verl.trainer.buffer.continuous import ContinuousScheduler, RunRow
from verl.trainer.buffer.disjoint import DisjointRollout, PendingRollout
from verl.trainer.buffer.over_sampling import GroupScheduler, SampledGroups, batch_of, max_deferrals, sample_batch
from verl.trainer.buffer.prompt_pool import STATE_FILE, GroupFilter, PromptPool, load_pool, save_pool
from verl.trainer.buffer.rollout_skip import RolloutCache
from verl.utils.py_functional import derive_seed
from verl.workers.rollout.monitor import occupancy
from verl.workers.rollout.server.messages import RolloutServerError

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


@dataclass
class NextBatch:
    """A batch of a step that has not begun, whose responses are being generated."""

    step: int
    prompts: DataProto
    rows: DataProto
    """The prompts, n times each."""
    rollout: PendingRollout


@dataclass
class Rollouts:
    """Prompts of a step with their responses, and the measurements of generating them."""

    prompts: DataProto
    batch: DataProto
    """Rows of responses, n to each of ``prompts``."""
    metrics: dict[str, float] = field(default_factory=dict)
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds by name."""


class RolloutBuffer:
    """Prompts and rollouts of a run.

    Args:
        config: the whole tree.
        loader: of the training prompts.
        say: prints a message to the user.

    Attributes:
        group_filter: chooses the groups of a step; None where all are trained on.
        scheduler: generates batches request by request; None where one call generates a whole batch.
        engine: has ``generate_sequences``: the workers, agent loops, or one of the policies around them. None before
            `connect`.

    Raises:
        ValueError: prompts are read a step ahead, and a curriculum sampler chooses them.
    """

    def __init__(self, config: PPOConfig, loader: Any, say: Callable[[str], None]) -> None:
        self.config, self.loader, self.say = config, loader, say
        if self.generates_ahead and isinstance(loader.sampler, AbstractCurriculumSampler):
            raise ValueError(
                f"actor_rollout_ref.rollout.max_staleness={self.max_staleness} with the curriculum sampler "
                f"{type(loader.sampler).__name__}: prompts are read before the sampler is updated with the last batch. "
                "Set max_staleness=0, or leave data.sampler alone."
            )
        data, rollout, filtering = config.data, config.actor_rollout_ref.rollout, config.algorithm.filter_groups
        self.group_filter: GroupFilter | None = None
        self.scheduler: GroupScheduler | None = None
        self.pool: PromptPool | None = None
        is_continuous = config.actor_rollout_ref.generates_continuously
        is_scheduled = rollout.mode == "async" and not rollout.skip_rollout
        is_scheduled &= is_continuous or not self.generates_ahead
        if filtering.enable or is_scheduled:
            self.pool = PromptPool(loader)
        if filtering.enable:
            self.group_filter = GroupFilter(filtering, self.pool, data.train_batch_size, data.prompts_per_step, say)
        self.continuous: ContinuousScheduler | None = None
        """The scheduler, if engines generate all the time."""
        if is_continuous:
            self.continuous = self.scheduler = ContinuousScheduler(
                rollout, self.pool, data.prompts_per_step, config.trainer.seed
            )
        elif is_scheduled:
            self.scheduler = GroupScheduler(rollout, self.pool, data.prompts_per_step, config.trainer.seed)
        self.engine: Any = None
        self.early_scoring: EarlyScoring | None = None
        """Scores responses as they end; None: rewards are computed when a batch is whole."""
        self.agent_loops: Any = None
        """The manager of agent loops, with ``rollout.mode=async``."""
        self._next: NextBatch | None = None
        self._serves_since = self._collected = 0.0
        """When the newest weights were brought to the engines, and when a step had its batch."""
        self._position: dict[str, Any] | None = None
        """The loader's, before the prompts that were read ahead."""
        self._saved: tuple[DataProto, dict[str, int]] | None = None
        """Responses of a checkpoint that were generated ahead."""

    @property
    def generates_ahead(self) -> bool:
        """Whether the next batch is generated while one is trained on."""
        return self.config.actor_rollout_ref.generates_ahead

    @property
    def max_staleness(self) -> int:
        """Training steps by which a token may be older than the policy that is trained: 0 is synchronous."""
        return self.config.actor_rollout_ref.rollout.staleness

    # -- rollout engine ----------------------------------------------------------------------------------------------

    def connect(
        self,
        config: PPOConfig,
        actor_wg: Any,
        rollout_wg: Any = None,
        tokenizer: Any = None,
        processor: Any = None,
        trainer_config: Any = None,
    ) -> None:
        """Generate with these worker groups, whose models are loaded.

        Args:
            config: the whole tree, which a script may have changed.
            rollout_wg: of a rollout on devices of its own; None: ``actor_wg`` generates.
            trainer_config: the configuration that agent loops get.
        """
        self.config = config
        rollout, self.engine = config.actor_rollout_ref.rollout, rollout_wg or actor_wg
        if rollout.mode == "async":
            from verl.agents import AgentLoopManager

            self.engine = self.agent_loops = AgentLoopManager(
                config, self.engine, tokenizer, processor, trainer_config=trainer_config
            )
        if rollout_wg:
            self.engine = DisjointRollout(actor_wg, rollout_wg, self.engine, self.say)
        if rollout.skip_rollout:
            self.engine = RolloutCache(self.engine, config, self.say)

    @property
    def worker_groups(self) -> list[Any]:
        """Groups of processes besides those of the roles: of the agent loops."""
        workers = None if self.agent_loops is None else self.agent_loops.workers
        return [] if workers is None else list(workers.groups)

    def close(self) -> None:
        """Stop the rollout's servers, if it has any; also after a failure."""
        if self.continuous is not None and self.agent_loops is not None:
            self.agent_loops.abandon(self.continuous.cancel())
        if self.early_scoring is not None:
            self.early_scoring.close()
        if hasattr(self.engine, "close"):
            self.engine.close()

    # -- prompts -----------------------------------------------------------------------------------------------------

    def prompt_batches(self, step: int, total_steps: int) -> Iterator[tuple[int, DataProto]]:
        """Yield batches of prompts for the steps after ``step``; each prompt has a ``uid`` of its own.

        With ``rollout.over_sample_rate`` they are more than a batch; `rollouts` chooses among them. With
        ``rollout.max_staleness`` each batch was read, and its responses started, a step before.
        """
        self._coming = self._read_prompts(step, total_steps)
        if self.continuous is not None:
            self.continuous.total_steps = total_steps
        if not self.generates_ahead or self.continuous is not None:
            yield from self._coming
            return
        self._start_next(steps_done=step)
        while self._next is not None:
            yield self._next.step, self._next.prompts

    def _read_prompts(self, step: int, total_steps: int) -> Iterator[tuple[int, DataProto]]:
        while step < total_steps:
            for rows in self.loader if self.pool is None else [None]:
                step += 1
                if self.pool is not None:
                    prompts = self.more_prompts(step)
                else:
                    prompts = DataProto.from_single_dict(rows)
                    prompts.non_tensor_batch["uid"] = uids(f"step{step}", len(prompts))
                yield step, prompts
                if step >= total_steps:
                    return

    def more_prompts(self, step: int) -> DataProto:
        """Return the next prompts of the pool; a step may ask several times."""
        if self.scheduler is None:
            return self.group_filter.take(step)
        prompts = self.scheduler.take(step)
        return prompts if self.group_filter is None else self.group_filter.register(prompts)

    def batches_read(self, step: int) -> int:
        """Return how many batches of the loader ``step`` steps took."""
        return step if self.group_filter is None else self.pool.batches_read

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def rollouts(self, prompts: DataProto, n: int, step: int) -> Rollouts:
        """Return n responses to each prompt of the batch; with ``rollout.over_sample_rate`` not to all prompts."""
        if self._next is not None:
            return self._collect_next(step)
        if self.continuous is not None:
            return self._collect_continuous(prompts, step)
        if self.scheduler is None:
            return Rollouts(prompts, self.generate(prompts.repeat(n, interleave=True), n, step))
        prompts.meta_info.update(validate=False, global_steps=step)
        prompts, generated, groups = sample_batch(self.engine, self.scheduler, prompts, self._begin_scoring())
        return Rollouts(prompts, join_generated(prompts.repeat(n, interleave=True), generated), groups.metrics)

    def generate(
        self,
        prompts: DataProto,
        n: int,
        step: int,
        *,
        do_sample: bool | None = None,
        validate: bool = False,
        first: int = 0,
    ) -> DataProto:
        """Return responses to ``prompts``, whose n repeats follow one another; keeps every column of the prompts.

        The seed of each sample comes from (run seed, step, prompt, k) alone; the prompts count from ``first``. With
        ``algorithm.filter_groups`` step and prompt are those when the prompt was first handed out.
        """
        rollout, names = self.config.actor_rollout_ref.rollout, prompts.non_tensor_batch.get(AGENT_COLUMN)
        if names is not None and rollout.mode != "async" and (problem := agent_name_problem(rollout, names)):
            raise ValueError(problem)  # rows of a user's dataset, which no check at the start could read
        request = self._request(prompts, n, step, validate=validate, first=first)
        if do_sample is not None:
            request.meta_info["do_sample"] = do_sample
        elif not validate:
            self._expect(prompts, request)
        return join_generated(prompts, self.engine.generate_sequences(request))

    def _request(self, prompts: DataProto, n: int, step: int, *, validate: bool = False, first: int = 0) -> DataProto:
        """Return the columns a rollout reads of ``prompts`` (which keep all), with one seed a sample."""
        purpose = "validate" if validate else "train"
        origins = [(step, first + i // n) for i in range(len(prompts))]
        if self.group_filter is not None and not validate:
            entries = [self.group_filter.entries[uid] for uid in prompts.non_tensor_batch["uid"]]
            origins = [(entry.step, entry.number) for entry in entries]
        trainer = self.config.trainer
        seeds = [derive_seed(trainer.seed, purpose, *origin, i % n) for i, origin in enumerate(origins)]
        request = prompts.select(batch_keys=[name for name in PROMPT_COLUMNS if name in prompts.keys()])
        request.meta_info = {"validate": validate, "global_steps": step}
        prompts.meta_info.update(request.meta_info)
        if trainer.weight_sync_freq > 1:
            request.meta_info["weight_sync_freq"] = trainer.weight_sync_freq
        request.put("seeds", torch.tensor(seeds))
        return request

    def _expect(self, rows: DataProto, request: DataProto) -> None:
        """Have the responses of a request scored as they end."""
        if self.early_scoring is not None:
            address = self.early_scoring.open(rows, request.column("seeds").tolist())
            if address is not None:
                request.meta_info["completions_to"] = address

    def _begin_scoring(self) -> Callable[..., None] | None:
        """Return what begins to score each sample of the scheduler as it ends; None: rewards wait for the batch."""
        if self.early_scoring is None:
            return None
        rollout = self.config.actor_rollout_ref.rollout
        # a complete group may wait so many steps for the others of its batch
        self.early_scoring.next_round(max_deferrals(rollout) if rollout.partial_rollout else 1)
        return self.early_scoring.begin

    # -- one step ahead ----------------------------------------------------------------------------------------------
    # Step k trains on responses of the weights after step k - 2, from the weights after step k - 1; the first batch,
    # which nothing precedes, is generated with the newest. Noukhovitch et al. 2024 (arXiv:2410.18252).

    def _collect_next(self, step: int) -> Rollouts:
        """Wait for the responses started a step ago, and start those of the next step with the newest weights."""
        batch = self._next
        timing: dict[str, float] = {}
        with marked_timer("gen_wait", timing):
            generated = batch.rollout.result()
        metrics: dict[str, float] = {"rollout/staleness": step - 1 - batch.rollout.steps_done}
        if seconds := generated.meta_info.get("timing", {}).get("generate_sequences"):
            metrics["perf/rollout_overlap"] = max(0.0, 1 - timing["gen_wait"] / seconds)
        timing |= self._start_next(steps_done=step - 1)
        return Rollouts(batch.prompts, join_generated(batch.rows, generated), metrics, timing)

    def _start_next(self, steps_done: int) -> dict[str, float]:
        """Read the next prompts and start their responses, if a step is left; return the seconds that took."""
        self._position = self.loader.state_dict()
        step, prompts = next(self._coming, (None, None))
        if step is None:
            self._next = None
            return {}
        n = self.config.actor_rollout_ref.rollout.n
        rows = prompts.repeat(n, interleave=True)
        request = self._request(rows, n, step)
        self._expect(rows, request)
        rollout = self._restored(step, len(rows)) or self.engine.start(request, steps_done)
        self._next = NextBatch(step, prompts, rows, rollout)
        return rollout.timing

    def _restored(self, step: int, rows: int) -> PendingRollout | None:
        """Return the responses of the checkpoint, once, if they are those of ``step``."""
        saved, self._saved = self._saved, None
        if saved is None:
            return None
        responses, metadata = saved
        if metadata["step"] != step or len(responses) != rows:
            self.say(f"step {step} needs other responses than were saved: they are generated again.")
            return None
        return PendingRollout(metadata["version"], metadata["steps_done"], finished=responses)

    # -- continuous generation ---------------------------------------------------------------------------------------

    def _collect_continuous(self, prompts: DataProto, step: int) -> Rollouts:
        """Bring the newest weights to the engines, start ``prompts``, and wait for the groups of this step."""
        scheduler, loops, start = self.continuous, self.agent_loops, time.monotonic()
        assert scheduler is not None
        prompts.meta_info.update(validate=False, global_steps=step)
        begin_scoring = self._begin_scoring()

        async def collect(run: RunRow) -> tuple[tuple[int, int], tuple[DataProto, SampledGroups]]:
            await scheduler.start(prompts, step, loops.client, self.engine.version, run)
            restarted = await scheduler.restart_old(loops.client)
            return restarted, await scheduler.next_batch(step)

        def generate() -> tuple[tuple[int, int], tuple[DataProto, SampledGroups]]:
            loops.wait_for(scheduler.hold())
            timing.update(self.engine.keep_serving())
            since, self._serves_since = self._serves_since, time.monotonic()
            spans = loops.client.take_spans(since)
            idle.update(occupancy(spans, loops.client.num_servers, self._serves_since - since) if since else {})
            with marked_timer("gen_wait", timing):
                return loops.wait_for(collect(loops.row_runner(prompts, begin_scoring)))

        timing: dict[str, float] = {}
        idle: dict[str, float] = {}
        try:
            restarted, (prompts, sampled) = generate()
        except (WorkerGroupError, RolloutServerError) as error:
            self.engine.restart_after(error, "continues the responses from the tokens they had")
            restarted, (prompts, sampled) = generate()
        rollout = self.config.actor_rollout_ref.rollout
        batch = batch_of(loops, rollout, prompts, sampled, timing)
        ended, self._collected = self._collected, time.monotonic()
        metrics = sampled.metrics | idle
        metrics |= {"rollout/samples_restarted": restarted[0], "rollout/tokens_discarded": restarted[1]}
        if ended:
            metrics["perf/trainer_idle_share"] = (self._collected - start) / (self._collected - ended)
        return Rollouts(prompts, join_generated(prompts.repeat(rollout.n, interleave=True), batch), metrics, timing)

    # -- checkpoint --------------------------------------------------------------------------------------------------

    def position(self) -> dict[str, Any]:
        """Return the loader's position for a checkpoint: before prompts that were read ahead, which are read again."""
        return self._position if self.generates_ahead and self.continuous is None else self.loader.state_dict()

    def responses_ahead(self) -> tuple[DataProto, dict[str, int]] | None:
        """Return the responses for the next step, which it waits for, and their metadata; None if there are none.

        The weights that generated them are lost when a run resumes.
        """
        if self._next is None:
            return None
        rollout = self._next.rollout
        metadata = {"step": self._next.step, "version": rollout.version, "steps_done": rollout.steps_done}
        return rollout.result(), metadata

    def save(self, folder: Path) -> None:
        """Write the pool and the partial rollouts into a step's folder."""
        if self.continuous is not None:
            state = self.agent_loops.wait_for(self.continuous.interrupted_state(self.agent_loops.client))
            self.continuous.save_open(folder, state)
        elif self.scheduler is not None:
            self.scheduler.save(folder)
        elif self.pool is not None:
            save_pool(folder, self.pool)
        else:
            (folder / STATE_FILE).unlink(missing_ok=True)  # of an earlier run through this step

    def load(self, folder: Path, step: int) -> str:
        """Restore what `save` wrote, and responses generated ahead; return a remark for the user, mostly empty."""
        remark = ""
        if self.scheduler is not None:
            self.scheduler.load(folder)
        elif self.pool is not None:
            load_pool(folder, self.pool)
        elif (folder / STATE_FILE).exists():
            remark = "; prompts that rollout.mode=async or filter_groups had put back are left out"
        if self.group_filter is not None and not self.pool.batches_read:  # saved by a run without it
            self.pool.batches_read = step
        if self.generates_ahead and self.continuous is None:
            self._saved = run_state.load_ahead(folder)
        return remark


def uids(prefix: str, count: int, first: int = 0) -> np.ndarray:
    """Return names for the prompts of a batch, which count from ``first``."""
    return np.array([f"{prefix}-{first + i}" for i in range(count)], dtype=object)


def join_generated(prompts: DataProto, generated: DataProto) -> DataProto:
    """Return generated rows with the columns of their prompts; of two columns of one name the prompts' stays.

    Trajectories of several rows repeat the columns of their prompts.
    """
    prompts.pop(batch_keys=[name for name in PROMPT_COLUMNS if name in prompts.keys()])
    if (source_rows := generated.meta_info.pop("source_rows", None)) is not None:
        prompts = prompts.select_idxs(source_rows)
    known = prompts.non_tensor_batch
    generated.non_tensor_batch = {k: v for k, v in generated.non_tensor_batch.items() if k not in known}
    return prompts.union(generated)


def engine_metrics(group: Any) -> dict[str, float]:
    """Return what the rollout engines counted since the last call, as ``rollout/engine/*``, averaged over ranks."""
    if not hasattr(group, "rollout_metrics"):  # workers of a user's own
        return {}
    by_rank = [numbers for numbers in group.rollout_metrics() if numbers.get("requests")]
    names = dict.fromkeys(name for numbers in by_rank for name in numbers)
    lists = {f"rollout/engine/{name}": [n[name] for n in by_rank if name in n] for name in names}
    return reduce_metrics(lists)


# -- Names of agent loops in the rows --------------------------------------------------------------------------------


AGENT_COLUMN = "agent_name"


def shown_tools(rollout: RolloutConfig) -> Any:
    """Return what gives the schemas of a row's tools (`verl.tools.prompt_schemas`); None: no prompt shows tools."""
    if rollout.mode != "async":
        return None
    from verl.tools.prompt_schemas import prompt_schemas  # loads what tools need only where there are agent loops

    return prompt_schemas(rollout)


def check_agent_names(config: PPOConfig, datasets: Iterable[Any]) -> None:
    """Refuse rows whose ``agent_name`` no agent loop of this run has; datasets that are not rows of files are left out.

    Raises:
        ValueError: see `agent_name_problem`.
    """
    if problem := agent_name_problem(config.actor_rollout_ref.rollout, distinct_values(datasets, AGENT_COLUMN)):
        raise ValueError(problem)


def agent_name_problem(rollout: RolloutConfig, names: Iterable[Any]) -> str | None:
    """Return why rows with these values of ``agent_name`` cannot be trained on; None: they can.

    Args:
        rollout: the section ``actor_rollout_ref.rollout``. With ``mode=async`` the user's agent loops are imported.
        names: values of the column; empty ones are of ``rollout.agent.default_agent_loop``.
    """
    names = sorted({str(name) for name in names if name})
    if rollout.mode != "async":
        return needs_agent_loops(rollout.mode, names)
    from verl.agents.base import agent_loop, load_agent_loops

    if path := rollout.agent.agent_loop_config_path:
        load_agent_loops(path)
    loops = {*names, rollout.agent.default_agent_loop}
    for name in sorted(loops):
        try:
            agent_loop(name)
        except ValueError as error:
            return str(error)
    users = rollout.multi_turn.interaction_config_path
    if "interaction_agent" in loops and not users:
        return (
            "rows with agent_name=interaction_agent need actor_rollout_ref.rollout.multi_turn.interaction_config_path, "
            "which is null: no simulated user could answer. Name a YAML file of interactions."
        )
    if users:
        from verl.interactions.utils.interaction_registry import interactions_of

        interactions_of(users)  # what is wrong with the file is said before a model is loaded
    return None
