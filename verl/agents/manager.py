"""Run agent loops: one task a row in an event loop, rollout servers in the workers, one batch at the end.

Takes the place of the worker group in ``mode=sync``: `generate_sequences` takes the same rows and adds the same
columns.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from verl.agents.base import TRAJECTORY_COLUMN, close_shared
from verl.agents.conversation import check_chat_template
from verl.agents.outputs import assemble_outputs, check_failures, response_to_score, spread
from verl.agents.rows import (  # noqa: F401  users import the servers of a row from here
    AgentLoopIdle,
    AsyncLLMServerManager,
    EventLoopPulse,
    RowOutput,
    RowRunner,
)
from verl.agents.workers import AgentLoopWorkers
from verl.envs.host import close_hosts
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerGroupError
from verl.single_controller.mailbox import sender
from verl.telemetry.run_record import say_early
from verl.utils.py_functional import derive_seed, is_loopback
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.base import SamplingParams, ended_message
from verl.workers.rollout.server.client import RolloutClient
from verl.workers.rollout.server.messages import RolloutServerError, write_servers_file

SERVERS_FILE = "rollout_servers.json"

Generate = Callable[[RolloutClient, int, Callable[[int, int, Any], Coroutine]], Coroutine]

Ended = Callable[[int, Mapping[str, Any], Sequence[int], int], None]
"""(seed, row, tokens, number of turns): gets each response that a reward function can score, as soon as it has ended.
In the thread of the agent loops."""

_CHECK_INTERVAL_S = 1.0  # between two checks of the workers while requests run
_GRACE_S = 10.0  # for coroutines that are abandoned to end

logger = logging.getLogger(__name__)


class AgentLoopManager:
    """Generate batches through agent loops.

    Args:
        config: the whole configuration.
        worker_group: of the role with the rollout; its models are loaded.
        tokenizer: the policy's; None: loaded.
        processor: the policy's, if it has one.
        trainer_config: configuration of agent loops, such as a script's tree; None: ``config``.
    """

    def __init__(
        self, config: Any, worker_group: Any, tokenizer: Any = None, processor: Any = None, trainer_config: Any = None
    ):
        self.config, self.worker_group = config, worker_group
        self.rollout = rollout = config.actor_rollout_ref.rollout
        model = config.actor_rollout_ref.model
        self.tokenizer = tokenizer or hf_tokenizer(
            config.data.tokenizer or model.path, chat_template=model.custom_chat_template
        )
        self._runner = RowRunner(config, self.tokenizer, processor, trainer_config)
        check_chat_template(self.tokenizer, processor, config)
        self._loop = asyncio.new_event_loop()
        self.workers: AgentLoopWorkers | None = None
        """Processes of the agent loops; None: they run in this one."""
        if rollout.agent.num_workers > 1:
            controller = getattr(worker_group, "controller", config.trainer.controller)
            # before there are servers and threads here, of which a fork would have copies
            self.workers = AgentLoopWorkers(
                config, self.tokenizer, processor, trainer_config, controller, self._loop, self._run
            )
        # a loop of its own: the driver's thread waits, and checks the workers meanwhile
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-agent-loops", daemon=True)
        self._thread.start()
        if self.workers is not None:
            self.workers.connect()
        self._start_servers()
        if not is_loopback(rollout.server_host):
            say_early(
                f"note: rollout servers listen on {rollout.server_host}: other machines can send requests, with the "
                f"api_key in {self.servers_file}"
            )
        self._unseeded_calls = self._batches = 0
        self.keeps_serving = False
        """Whether the servers serve between two batches, too."""
        self._known_causes: set[str] = set()
        """Causes of failed episodes that the user has read."""

    def _start_servers(self) -> None:
        token = secrets.token_urlsafe(24)  # other users of this machine reach its loopback
        started = self.worker_group.start_server(token)
        self.addresses = [answer["address"] for answer in started if answer is not None]
        self.servers_file = self._publish_addresses(token)
        most = self.rollout.max_running_requests
        if most is None and self.config.actor_rollout_ref.generates_continuously:
            most = self.rollout.max_num_seqs  # what a replica could not run waits here, for whichever has room first
        if self.workers is not None:
            self.client: RolloutClient = self.workers.use_servers(self.addresses, token, most)
        else:
            self.client = RolloutClient(self.addresses, token, most)

    def reconnect(self) -> None:
        """Serve with new processes of the worker group, in the place of those that died."""
        self.keeps_serving = False
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(timeout=10)
        self._start_servers()

    def _publish_addresses(self, token: str) -> Path:
        """Write the servers' addresses and key for agents in other processes; only this user can read the file."""
        path = Path(self.config.trainer.default_local_dir).expanduser().absolute() / SERVERS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        write_servers_file(path, self.addresses, token)
        return path

    def wake_up(self) -> None:
        """Do nothing: `generate_sequences` starts and stops serving itself."""

    sleep = wake_up

    # -- a batch -------------------------------------------------------------------------------------------------------

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One agent loop a row; adds the columns that ``RolloutRole.generate_sequences`` adds.

        Reads ``raw_prompt_ids`` (or the valid tokens of ``input_ids``), ``seeds`` (B,) int64 and ``agent_name``; every
        object column reaches the loops. The metadata ``validate`` and ``do_sample`` choose the sampling parameters.

        Raises:
            WorkerGroupError: a worker died, or its engine failed.
            RolloutServerError: a server does not answer.
            RuntimeError: an agent loop raised, with ``env.on_error=stop``; names the row.
            EpisodeError: more agent loops failed than ``env.max_error_share`` allows.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)
        if "seeds" in prompts.keys():
            seeds = prompts.column("seeds").tolist()
        else:
            self._unseeded_calls += 1
            step, count = prompts.meta_info.get("global_steps", 0), self._unseeded_calls
            seeds = [derive_seed(self.config.trainer.seed, "unseeded", step, count, i) for i in range(len(rows))]
        with sender(prompts.meta_info.get("completions_to")) as send:

            def ended(seed: int, row: Mapping[str, Any], ids: Sequence[int], turns: int) -> None:
                assert send is not None
                send(ended_message(seed, ids, turns))

            outputs, timing = self._serve(lambda: self._all_rows(rows, seeds, sampling, send and ended))
        return self.to_batch(prompts, outputs, timing)

    def serve_rows(
        self, prompts: DataProto, generate: Generate, ended: Ended | None = None
    ) -> tuple[Any, dict[str, float]]:
        """Serve while ``generate`` decides which rows are generated, and when they stop; return its result, seconds.

        Args:
            generate: (client, version of the weights, run) -> coroutine; ``run(row, seed, client)`` runs the agent loop
                of a row with a client of the caller's.

        Raises:
            as `generate_sequences`.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)

        async def work() -> Any:
            async def run(row: int, seed: int, client: Any) -> RowOutput:
                return await self._row(row, rows[row], seed, sampling, client, ended)

            states = await self.client.health()
            return await generate(self.client, states[0]["version"], run)

        return self._serve(work)

    def to_batch(self, prompts: DataProto, outputs: Sequence[RowOutput], timing: Mapping[str, float]) -> DataProto:
        """The columns of outputs, one or several a row of ``prompts``; ``timing`` and their own go to the metadata.

        Where a row has several, the metadata ``source_rows`` have the row of ``prompts`` of each row of the batch, and
        the column `TRAJECTORY_COLUMN` is the same for those of one.

        Raises:
            EpisodeError: more agent loops failed than ``env.max_error_share`` allows.
        """
        groups = [output if isinstance(output, list) else [output] for output in outputs]
        causes = check_failures([group[-1] for group in groups], self.config.env.max_error_share)
        for cause in sorted(set(causes) - self._known_causes):
            self._known_causes.add(cause)
            logger.warning("%d of %d episodes failed and are left out: %s", causes[cause], len(groups), cause)
        flat = [output for group in groups for output in group]
        source_rows = [row for row, group in enumerate(groups) for _ in group]
        has_several = len(flat) > len(groups)
        batch = assemble_outputs(
            prompts.select_idxs(source_rows) if has_several else prompts,
            flat,
            self.rollout.prompt_length,
            self.rollout.response_length,
            self.tokenizer.pad_token_id,
        )
        if has_several:
            batch.meta_info["source_rows"] = source_rows
            batch.non_tensor_batch[TRAJECTORY_COLUMN] = np.array(
                [f"{self._batches}.{row}" for row in source_rows], dtype=object
            )
        batch.meta_info["timing"] = {**timing, **spread([group[-1] for group in groups])}
        return batch

    # -- rows of no batch: generated while the driver does something else ----------------------------------------------

    def keep_serving(self) -> None:
        """Serve from now on, also between two batches."""
        self.worker_group.serve()
        self.keeps_serving = True

    def stop_serving(self) -> None:
        """Interrupt what runs, for `keep_serving` to go on with other weights: requests wait."""
        self.keeps_serving = False
        self.worker_group.stop_serving()

    def wait_for(self, coroutine: Coroutine) -> Any:
        """Return the result of a coroutine that runs in the thread of the agent loops; checks the workers meanwhile."""
        return self._run(coroutine)

    def abandon(self, coroutine: Coroutine) -> None:
        """Run a coroutine that ends others, also after a failure; wait for it for a short time."""
        if self._loop.is_closed():
            coroutine.close()
            return
        wait([asyncio.run_coroutine_threadsafe(coroutine, self._loop)], _GRACE_S)

    def row_runner(
        self, prompts: DataProto, ended: Ended | None = None
    ) -> Callable[[str, dict[str, Any], int, Any], Coroutine]:
        """Return ``run(name, row, seed, client)``, the agent loop of one row of a training batch, as a coroutine.

        Args:
            prompts: their metadata choose the sampling parameters.
        """
        sampling = self._sampling(prompts)

        def run(name: str, row: dict[str, Any], seed: int, client: Any) -> Coroutine:
            return self._row(name, row, seed, sampling, client, ended)

        return run

    def _serve(self, work: Callable[[], Coroutine]) -> tuple[Any, dict[str, float]]:
        """The result of ``work()``, run in the other thread while the servers serve, and the seconds it took."""
        self._batches += 1
        if self.keeps_serving:
            start = time.perf_counter()
            return self._run(work()), {"generate_sequences": time.perf_counter() - start}
        timings = self.worker_group.serve()
        start = time.perf_counter()
        result = self._run(work())
        seconds = time.perf_counter() - start
        # not in a finally: after a failure the workers may be gone, and `_run` knows which failures they survive
        self.worker_group.stop_serving()
        # the slowest rank's: requests begin when all ranks are ready
        return result, {"generate_sequences": seconds, "reshard": max(timing["reshard"] for timing in timings)}

    def _sampling(self, prompts: DataProto) -> SamplingParams:
        metadata = prompts.meta_info
        return self.worker_group.sampling_of(bool(metadata.get("validate")), metadata.get("do_sample", True))

    async def _all_rows(
        self,
        rows: Sequence[dict[str, Any]],
        seeds: Sequence[int],
        sampling: SamplingParams,
        ended: Ended | None = None,
    ) -> list[RowOutput]:
        """Outputs in the order of the rows; the first error that is raised ends the others."""
        tasks = [
            asyncio.ensure_future(self._row(i, row, seed, sampling, ended=ended))
            for i, (row, seed) in enumerate(zip(rows, seeds, strict=True))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            # also after a failure: no request may go on into the next batch
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _row(
        self,
        number: int | str,
        row: dict[str, Any],
        seed: int,
        sampling: SamplingParams,
        client: Any = None,
        ended: Ended | None = None,
    ) -> RowOutput:
        """What the agent loop of a row returns, run here or in another process; see `RowRunner.run`."""
        if self.workers is not None:
            output = await self.workers.run(number, row, seed, sampling, client, self._batches)
        else:
            output = await self._runner.run(number, row, seed, sampling, client or self.client, self._batches)
        if ended is not None and (found := response_to_score(output)) is not None:
            ended(seed, row, *found)
        return output

    # -- watching the workers ------------------------------------------------------------------------------------------

    def _run(self, coroutine: Any) -> Any:
        """Wait for a coroutine of the other thread, and check the workers meanwhile."""
        if self.workers is not None:
            self.workers.next_batch()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        pulse = EventLoopPulse(self._loop, self._thread, self.config.env.idle_timeout)
        try:
            while not wait([future], _CHECK_INTERVAL_S).done:
                self._check_workers()
                pulse.check()
            return future.result()
        except WorkerGroupError:
            raise
        except RolloutServerError:
            self._check_workers()  # a dead worker is the cause of a broken connection
            raise
        except Exception:
            wait([future], 5.0)
            with suppress(WorkerGroupError):  # if the workers can still be reached
                self.worker_group.stop_serving()
            raise
        finally:
            future.cancel()

    def _check_workers(self) -> None:
        """Raise if a worker is dead, its engine failed, or it has not finished a step for too long."""
        if self.workers is not None:
            self.workers.check()
        limit = self.worker_group.timeout
        for rank, state in enumerate(self.worker_group.server_state()):
            if limit is not None and state["running"] and state["idle_s"] > limit:
                raise RolloutServerError(
                    f"The rollout engine of rank {rank} has not finished a step for {state['idle_s']:.0f} s, longer "
                    f"than trainer.worker_timeout={limit}, with {state['running']} requests running. Look at its "
                    "stderr; raise the limit if a step is just slow."
                )

    def close(self) -> None:
        """Stop the servers and the event loop. May be called twice, and with dead workers."""
        if self._loop.is_closed():
            return
        self.servers_file.unlink(missing_ok=True)
        # in the loop that opened their connections, and so before that stops
        self._loop.call_soon_threadsafe(close_hosts, self._loop)
        try:
            for closing in (close_shared, self.client.close):
                asyncio.run_coroutine_threadsafe(closing(), self._loop).result(timeout=10)
        except FutureTimeout:
            # an agent loop blocks it: the thread is a daemon, and ends with the process
            logger.warning("the event loop of agent loops is blocked, and is left to the end of the process")
        if self.workers is not None:
            self.workers.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._loop.close()
        with suppress(WorkerGroupError):
            self.worker_group.stop_server()


def rows_of(prompts: DataProto) -> list[dict[str, Any]]:
    """The object columns of each row, with ``raw_prompt_ids``, and ``validate`` in rows of a validation."""
    columns: dict[str, Any] = dict(prompts.non_tensor_batch)
    if prompts.meta_info.get("validate"):
        columns["validate"] = [True] * len(prompts)
    if "raw_prompt_ids" not in columns:
        has_ids = "input_ids" in prompts.keys()  # the rows of environment groups have no prompt yet
        rows = (
            [row.tolist() for row in prompts.ragged("input_ids").rows()]
            if has_ids
            else [[] for _ in range(len(prompts))]
        )
        columns["raw_prompt_ids"] = rows
    return [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
