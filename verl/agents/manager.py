"""Run agent loops: one task a row in the driver's event loop, rollout servers in the workers, one batch at the end.

Takes the place of the worker group in ``mode=sync``: `generate_sequences` takes the same rows and adds the same
columns.
"""

import asyncio
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.agents.base import AgentLoopOutput, TrainerConfig, agent_loop, load_agent_loops
from verl.agents.conversation import check_chat_template
from verl.protocol import DataProto
from verl.single_controller.errors import WorkerGroupError
from verl.utils.py_functional import derive_seed
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion, Request, SamplingParams
from verl.workers.rollout.server.client import RolloutClient, RolloutServerError
from verl.workers.rollout.server.messages import is_loopback, sampling_from_json


def assemble_outputs(
    prompts: DataProto, outputs: Sequence[AgentLoopOutput], prompt_length: int, response_length: int, pad_token_id: int
) -> DataProto:
    """The columns of `verl.workers.rollout.assemble`, from conversations.

    ``response_mask`` is each output's own. Adds ``rm_scores`` (B, R) float32, a row's reward on the last token the
    policy sampled (where it sampled none, on the last response token), if the loops know rewards; and as object
    columns ``__num_turns__`` and the outputs' ``extra_fields``. An output without response tokens gets one, padding
    that is masked, for its reward to stand on.

    Raises:
        ValueError: only some of the outputs have log-probs, or rewards, or a further field.
    """
    has_log_probs = _all_or_none(outputs, "response_logprobs")
    log_probs = [0.0] if has_log_probs else None
    padding: dict[str, Any] = {"response_ids": [pad_token_id], "response_mask": [0], "response_logprobs": log_probs}
    outputs = [output if output.response_ids else replace(output, **padding) for output in outputs]
    completions = [
        Completion(list(o.response_ids), list(o.response_logprobs) if has_log_probs else None, "stop") for o in outputs
    ]
    batch = assemble(
        _with_prompts_of(prompts, outputs),
        completions,
        prompt_length=prompt_length,
        response_length=response_length,
        pad_token_id=pad_token_id,
    )
    responses = batch.ragged("responses")
    masks = [value for output in outputs for value in output.response_mask]
    batch.put("response_mask", responses.like(torch.tensor(masks, dtype=torch.int64)))
    if _all_or_none(outputs, "reward_score"):
        rewards: list[float] = []
        for output in outputs:
            row = [0.0] * len(output.response_ids)
            sampled = [place for place, is_own in enumerate(output.response_mask) if is_own]
            row[sampled[-1] if sampled else -1] = float(output.reward_score)
            rewards += row
        batch.put("rm_scores", responses.like(torch.tensor(rewards, dtype=torch.float32)))
    columns = {"__num_turns__": np.array([output.num_turns for output in outputs], dtype=np.int32)}
    for name in outputs[0].extra_fields if outputs else ():
        if any(name not in output.extra_fields for output in outputs):
            raise ValueError(f"AgentLoopOutput.extra_fields: {name!r} is missing in some rows; give it in all.")
        columns[name] = np.empty(len(outputs), dtype=object)  # numpy would make a matrix of lists of one length
        columns[name][:] = [output.extra_fields[name] for output in outputs]
    batch.non_tensor_batch = columns
    return batch


def check_images(output: AgentLoopOutput, row: Mapping[str, Any]) -> None:
    """Refuse images in an output other than those of its row, which are the only ones the update reads.

    Raises:
        NotImplementedError: it has.
    """
    in_output, in_row = (dict(data or {}) for data in (output.multi_modal_data, row.get("multi_modal_data")))
    for kind, items in in_output.items():
        known = len(in_row.get(kind) or ())
        if len(items or ()) > known:
            raise NotImplementedError(
                f"AgentLoopOutput.multi_modal_data has {len(items)} of kind {kind!r}, the row {known}: "
                "images that are added while a loop runs are not supported, the update would not read them. Use the "
                "row's own images only."
            )


def spread(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """Seconds by name over the rows: ``agent_loop/{name}/{min,max,mean}``."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for output in outputs for name in output.seconds):
        seconds = [float(output.seconds.get(name, 0.0)) for output in outputs]
        for kind, number in (("min", min(seconds)), ("max", max(seconds)), ("mean", sum(seconds) / len(seconds))):
            metrics[f"agent_loop/{name}/{kind}"] = number
    return metrics


def _all_or_none(outputs: Sequence[AgentLoopOutput], name: str) -> bool:
    present = [i for i, output in enumerate(outputs) if getattr(output, name) is not None]
    if present and len(present) < len(outputs):
        missing = next(i for i, output in enumerate(outputs) if getattr(output, name) is None)
        raise ValueError(
            f"AgentLoopOutput.{name} is given in row {present[0]} and missing in row {missing}: a batch has it for "
            "every row or for none. Let every agent loop of the data set it, or none."
        )
    return bool(present)


def _with_prompts_of(prompts: DataProto, outputs: Sequence[AgentLoopOutput]) -> DataProto:
    """Return the rows with the prompts of the outputs.

    A prompt that a loop did not change keeps the ids that the model reads: an image has one token in
    ``raw_prompt_ids``, and in ``input_ids`` as many as it has features.
    """
    prompt_ids = [list(output.prompt_ids) for output in outputs]
    if "input_ids" in prompts.keys():
        read = [row.tolist() for row in prompts.ragged("input_ids").rows()]
        raw_ids = prompts.non_tensor_batch.get("raw_prompt_ids", read)
        rows = zip(prompt_ids, raw_ids, read, strict=True)
        prompt_ids = [ids if own == list(raw) else own for own, raw, ids in rows]
        if prompt_ids == read:
            return prompts
    ids = np.empty(len(outputs), dtype=object)
    ids[:] = prompt_ids
    return DataProto(non_tensor_batch={"raw_prompt_ids": ids})


# -- The rollout servers as one row's agent loop sees them -----------------------------------------------------------
_OTHER_NAMES = {"logprobs": "want_log_probs", "max_new_tokens": "max_tokens"}


class AsyncLLMServerManager:
    """Generate tokens for one row. The seed of its k-th call comes from the row's seed and k, whatever else runs.

    Args:
        client: to all servers.
        seed: of the row; its first call takes it as it is.
        name: of the row, for the sessions it opens.
        priority: of the row's requests.
    """

    def __init__(self, client: RolloutClient, seed: int, name: str, priority: int = 0):
        self.seconds = 0.0
        """Time its calls took, waiting included."""
        self.last: Completion | None = None
        """Completion of its last call."""
        self._client, self._seed, self._name, self._priority = client, seed, name, priority
        self._calls = 0

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
    ) -> Completion:
        """Generate the continuation of ``prompt_ids``.

        Args:
            request_id: of the conversation: its later turns go to the server that has read its beginning.
            sampling_params: fields of `SamplingParams`; an unknown one is refused by name.
            image_data: images that stand for the placeholders among ``prompt_ids``, in order.
        """
        # the first call as in mode=sync: a single turn gives the same tokens there and here
        seed = self._seed if self._calls == 0 else derive_seed(self._seed, "turn", self._calls)
        self._calls += 1
        media = {"image": list(image_data)} if image_data else None
        sampling = sampling_from_json({_OTHER_NAMES.get(name, name): value for name, value in sampling_params.items()})
        request = Request(tuple(prompt_ids), sampling, seed, media)
        start = time.perf_counter()
        try:
            self.last = await self._client.generate(
                request, session=f"{self._name}/{request_id}" if request_id else None, priority=self._priority
            )
            return self.last
        finally:
            self.seconds += time.perf_counter() - start


SERVERS_FILE = "rollout_servers.json"

Generate = Callable[[RolloutClient, int, Callable[[int, int, Any], Coroutine]], Coroutine]

_CHECK_INTERVAL_S = 1.0  # between two checks of the workers while requests run


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
        self.trainer_config = TrainerConfig(config if trainer_config is None else trainer_config)
        self.config, self.worker_group, self.processor = config, worker_group, processor
        self.rollout = rollout = config.actor_rollout_ref.rollout
        model = config.actor_rollout_ref.model
        self.tokenizer = tokenizer or hf_tokenizer(
            config.data.tokenizer or model.path, chat_template=model.custom_chat_template
        )
        if rollout.agent.agent_loop_config_path:
            load_agent_loops(rollout.agent.agent_loop_config_path)
        agent_loop(rollout.agent.default_agent_loop)  # a wrong name fails before anything is generated
        check_chat_template(self.tokenizer, processor, config)
        # a secret where others can reach the servers
        token = None if is_loopback(rollout.server_host) else secrets.token_urlsafe(24)
        started = worker_group.start_server(token)
        self.addresses = [answer["address"] for answer in started if answer is not None]
        self.servers_file = self._publish_addresses(token)
        self.client = RolloutClient(self.addresses, token, rollout.max_running_requests)
        self._unseeded_calls = self._batches = 0
        self._loop = asyncio.new_event_loop()
        # a loop of its own: the driver's thread waits, and checks the workers meanwhile
        self._thread = threading.Thread(target=self._loop.run_forever, name="verl-agent-loops", daemon=True)
        self._thread.start()

    def _publish_addresses(self, token: str | None) -> Path:
        """Write the servers' addresses and key for agents in other processes; only this user can read the file."""
        path = Path(self.config.trainer.default_local_dir).expanduser().absolute() / SERVERS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        # the mode below counts only where the file is made: one left there may be readable to all
        part.unlink(missing_ok=True)
        content = {"base_urls": [f"{address}/v1" for address in self.addresses], "api_key": token, "model": "policy"}
        with os.fdopen(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(json.dumps(content) + "\n")
        os.replace(part, path)
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
            RuntimeError: an agent loop raised; names the row.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)
        if "seeds" in prompts.keys():
            seeds = prompts.column("seeds").tolist()
        else:
            self._unseeded_calls += 1
            step, count = prompts.meta_info.get("global_steps", 0), self._unseeded_calls
            seeds = [derive_seed(self.config.trainer.seed, "unseeded", step, count, i) for i in range(len(rows))]
        outputs, timing = self._serve(lambda: self._all_rows(rows, seeds, sampling))
        return self.to_batch(prompts, outputs, timing)

    def serve_rows(self, prompts: DataProto, generate: Generate) -> tuple[Any, dict[str, float]]:
        """Serve while ``generate`` decides which rows are generated, and when they stop; return its result, seconds.

        Args:
            generate: (client, version of the weights, run) -> coroutine; ``run(row, seed, client)`` runs the agent loop
                of a row with a client of the caller's.

        Raises:
            as `generate_sequences`.
        """
        rows, sampling = rows_of(prompts), self._sampling(prompts)

        async def work() -> Any:
            async def run(row: int, seed: int, client: Any) -> AgentLoopOutput:
                return await self._row(row, rows[row], seed, sampling, client)

            states = await self.client.health()
            return await generate(self.client, states[0]["version"], run)

        return self._serve(work)

    def to_batch(
        self, prompts: DataProto, outputs: Sequence[AgentLoopOutput], timing: Mapping[str, float]
    ) -> DataProto:
        """The columns of outputs, one a row of ``prompts``; ``timing`` and the outputs' own go to the metadata."""
        batch = assemble_outputs(
            prompts, outputs, self.rollout.prompt_length, self.rollout.response_length, self.tokenizer.pad_token_id
        )
        batch.meta_info["timing"] = {**timing, **spread(outputs)}
        return batch

    def _serve(self, work: Callable[[], Coroutine]) -> tuple[Any, dict[str, float]]:
        """The result of ``work()``, run in the other thread while the servers serve, and the seconds it took."""
        self._batches += 1
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
        self, rows: Sequence[dict[str, Any]], seeds: Sequence[int], sampling: SamplingParams
    ) -> list[AgentLoopOutput]:
        """Outputs in the order of the rows; the first failure ends the others."""
        tasks = [
            asyncio.ensure_future(self._row(i, row, seed, sampling))
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
        self, number: int, row: dict[str, Any], seed: int, sampling: SamplingParams, client: Any = None
    ) -> AgentLoopOutput:
        name = row.get("agent_name") or self.rollout.agent.default_agent_loop
        # the batch's number in the name: row 3 of the next batch is another conversation
        servers = AsyncLLMServerManager(client or self.client, seed, name=f"{self._batches}.{number}")
        try:
            loop = agent_loop(name)(
                trainer_config=self.trainer_config,
                server_manager=servers,
                tokenizer=self.tokenizer,
                processor=self.processor,
            )
            output = await loop.run(dict(vars(sampling)), **row)  # a dict of the row's own: loops change it
            check_images(output, row)
        except (RolloutServerError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"agent loop {name!r} failed on row {number}: {type(error).__name__}: {error}"
            ) from error
        measured = {
            "finish_reason": servers.last and servers.last.finish_reason,
            "rollout_version": servers.last and servers.last.version,
            "rollout_seconds": servers.seconds,
        }
        # a loop's own values win: it may call the servers in ways that are not measured here
        output.extra_fields = {**measured, **output.extra_fields}
        output.metrics = {"generate_sequences": servers.seconds, **output.seconds}
        return output

    # -- watching the workers ------------------------------------------------------------------------------------------

    def _run(self, coroutine: Any) -> Any:
        """Wait for a coroutine of the other thread, and check the workers meanwhile."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], _CHECK_INTERVAL_S).done:
                self._check_workers()
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
        # in the loop that opened its connections, and so before that stops
        asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(timeout=10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()
        with suppress(WorkerGroupError):
            self.worker_group.stop_server()


def rows_of(prompts: DataProto) -> list[dict[str, Any]]:
    """The object columns of each row, with ``raw_prompt_ids``."""
    columns: dict[str, Any] = dict(prompts.non_tensor_batch)
    if "raw_prompt_ids" not in columns:
        has_ids = "input_ids" in prompts.keys()  # the rows of environment groups have no prompt yet
        rows = prompts.ragged("input_ids").rows() if has_ids else [torch.empty(0)] * len(prompts)
        columns["raw_prompt_ids"] = [row.tolist() for row in rows]
    return [{name: values[i] for name, values in columns.items()} for i in range(len(prompts))]
