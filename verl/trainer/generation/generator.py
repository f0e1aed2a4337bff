"""Generation without training: worker groups that hold a rollout engine alone, and the rows of data files.

The seed of every response comes from (``trainer.seed``, row, number of the response): neither the batch size, nor the
number of ranks, nor a restart changes a response. Sampled as a validation, they are those of a run's validation at step
0.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.checkpoint.resume_changes import data_identity, model_identity
from verl.config.base import plain
from verl.config.ppo import PPOConfig
from verl.data.loader import build_dataset
from verl.data.rl_dataset import collate_fn
from verl.protocol import DataProto
from verl.rewards.managers.scoring import failed_episodes
from verl.single_controller import get_controller
from verl.telemetry.progress import Progress
from verl.trainer.buffer.rollout_buffer import RolloutBuffer, check_agent_names, shown_tools, uids
from verl.trainer.generation.responses import ResponseFile, Responses
from verl.trainer.launch import check_device, start_controller, stopped_at_end
from verl.trainer.ppo.job import load_tokenizer
from verl.trainer.ppo.placement import Role, default_pools, start_worker_groups
from verl.trainer.ppo.run_log import texts
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules
from verl.utils.process import no_collection
from verl.workers.rollout.server.messages import write_servers_file

FAILED = "error"
"""Finish reason of a response whose agent loop failed."""


class Generator:
    """A model that answers prompts. Used as a context: its processes end with it.

    Args:
        config: the whole tree; ``data.val_files`` are its prompts.
        validates: sample by ``rollout.val_kwargs``, as the validation of a run does.
        say: prints a message to the user.

    Attributes:
        dataset: the prompts.
    """

    def __init__(self, config: PPOConfig, validates: bool = False, say: Callable[[str], None] = print) -> None:
        if config.trainer.device == "cuda":  # until its weights are in the engine, the model waits in host memory
            config = config.with_values({"actor_rollout_ref.actor.fsdp_config.param_offload": True})  # type: ignore[assignment]
        self.config, self.validates, self.say = config, validates, say
        rollout = config.actor_rollout_ref.rollout
        self.n = rollout.val_kwargs.n if validates else rollout.n
        check_device(config.trainer)
        import_users_modules(config.actor_rollout_ref.model.external_lib)
        self.tokenizer, self.processor = load_tokenizer(config)
        self.dataset: Any = None
        if config.data.has_validation:
            files, tools = config.data.val_files, shown_tools(rollout)
            self.dataset = build_dataset(
                config.data, files, self.tokenizer, self.processor, is_train=False, tool_schemas=tools
            )
            check_agent_names(config, [self.dataset])
        self.controller = get_controller(config.trainer.controller)
        self.buffer: RolloutBuffer | None = None
        self._running = ExitStack()

    @contextmanager
    def workers(self) -> Iterator[Any]:
        """Start the worker group, with the model's weights in its engines; its processes end with the block."""
        from verl.workers.roles import GenerationWorker

        config = self.config
        with stopped_at_end(self.controller):
            with no_collection():
                start_controller(self.controller, config.ray_init)
                roles: dict[Role, type] = {Role.ActorRollout: GenerationWorker}
                pools = default_pools(config, roles)
                groups = start_worker_groups(config, roles, pools, self.controller, 0, config.trainer.device)
                groups[Role.ActorRollout].init_model()
            yield groups[Role.ActorRollout]

    def __enter__(self) -> Generator:
        with ExitStack() as stack:
            group = stack.enter_context(self.workers())
            self.buffer = RolloutBuffer(self.config, None, self.say)
            stack.callback(self.buffer.close)
            self.buffer.connect(self.config, group, None, self.tokenizer, self.processor, self.config)
            self._running = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.close()

    def generate(self, rows: range) -> DataProto:
        """Return n responses to the prompts of neighbouring rows, those of one prompt behind one another."""
        assert self.buffer is not None, "enter the context first"
        prompts = DataProto.from_single_dict(collate_fn([self.dataset[row] for row in rows]))
        prompts.non_tensor_batch["uid"] = uids("val", len(prompts), rows.start)
        repeated = prompts.repeat(self.n, interleave=True)
        batch = self.buffer.generate(repeated, self.n, 0, validate=self.validates, first=rows.start)
        if len(batch) != len(rows) * self.n:
            raise ValueError(
                f"{len(rows)} prompts with {self.n} responses each came back as {len(batch)} rows: agent loops that "
                "make several rows of a conversation cannot be written as responses. Use trainer.val_only=true of "
                "main_ppo, which dumps their trajectories."
            )
        return batch

    def responses(self, rows: range) -> list[Responses]:
        """Return the responses to the prompts of neighbouring rows, as text without special tokens."""
        batch, n = self.generate(rows), self.n
        answers = texts(batch, self.tokenizer)[1]
        response = batch.ragged("responses").layout
        lengths = response.lengths.tolist()
        reasons = batch.non_tensor_batch.get("finish_reason", np.full(len(batch), None)).tolist()
        failed = failed_episodes(batch)
        for i, length in enumerate(lengths):
            reasons[i] = FAILED if failed[i] else reasons[i] or ("length" if length >= response.width else "stop")
        return [
            Responses(row, answers[i : i + n], lengths[i : i + n], reasons[i : i + n])
            for row, i in zip(rows, range(0, len(batch), n), strict=True)
        ]

    def identity(self) -> dict[str, Any]:
        """What the responses depend on, as JSON values."""
        config = self.config
        data, model, rollout = config.data, config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        sampling = {name: plain(value) for name, value in (rollout.val_kwargs if self.validates else rollout).items()}
        names = [*rollout.val_kwargs, "ignore_eos"]
        followed = {name: plain(rollout[name]) for name in names if sampling.get(name) is None}
        return {
            "model.path": [model.path, model_identity(copy_to_local(model.path))],
            "model": [model.custom_chat_template, dict(model.override_config), model.lora_adapter_path],
            "data.path": data_identity(self.dataset) or [str(path) for path in data.files["data.val_files"]],
            "data": [data.prompt_key, data.messages_key, data.truncation, plain(data.apply_chat_template_kwargs)],
            "rollout.name": [rollout.name, rollout.mode, rollout.dtype],
            "rollout.prompt_length": rollout.prompt_length,
            "rollout.response_length": rollout.response_length,
            "rollout.multi_turn": plain(rollout.multi_turn) if rollout.mode == "async" else None,
            "trainer.seed": config.trainer.seed,
            "purpose": "validate" if self.validates else "generate",
            **{f"rollout.{name}": {**sampling, **followed}.get(name) for name in names},
        }


def generate_file(config: PPOConfig, path: str, overwrite: bool, validates: bool = False) -> ResponseFile:
    """Generate responses to every prompt of ``data.val_files`` into a file; those it has already are kept.

    Raises:
        ConfigError: the file has responses of another model, to other prompts, or sampled otherwise.
    """
    generator = Generator(config, validates)
    dataset = generator.dataset
    if not hasattr(getattr(dataset, "dataframe", None), "to_arrow"):
        raise TypeError(
            f"{type(dataset).__name__} of data.custom_cls has no rows of files, and the responses could not be put "
            "next to them. Let the class inherit from verl.data.rl_dataset.RLHFDataset."
        )
    file = ResponseFile(path, generator.identity(), overwrite)
    if file.is_complete:
        print(f"{file.path} has all responses already", flush=True)
        return file
    try:
        _fill(file, generator)
    finally:
        file.close()
    return file


def _fill(file: ResponseFile, generator: Generator) -> None:
    """Generate the responses that a file lacks, and finish it."""
    config, dataset, done = generator.config, generator.dataset, file.rows_done()
    missing = [row for row in range(len(dataset)) if row not in done]
    if done:
        print(f"{len(done)} of {len(dataset)} prompts have their responses already", flush=True)
    print(f"{file.path}: {generator.n} responses to each of {len(dataset)} prompts", flush=True)
    if missing:
        print(f"loading {config.actor_rollout_ref.model.path}", flush=True)
        with generator, Progress(len(dataset), config.trainer.progress_bar, unit="prompt") as progress:
            for rows in runs_of(missing, config.data.val_batch_size or len(dataset)):
                start = time.perf_counter()
                found = generator.responses(rows)
                file.add(found)
                done |= set(rows)
                seconds, tokens = time.perf_counter() - start, sum(sum(one.lengths) for one in found)
                mean = tokens / (len(found) * generator.n)
                speed = {"response_length/mean": mean, "perf/throughput": tokens / seconds}
                progress.update(len(done), {**speed, "perf/time_per_step": seconds / len(rows)})
    file.finish(dataset.dataframe.to_arrow())


class Served(NamedTuple):
    """Servers of a model, each with OpenAI's routes below ``/v1`` (`verl.workers.rollout.server.openai_api`)."""

    addresses: list[str]
    token: str
    """What clients must send as ``Authorization: Bearer TOKEN``."""
    check: Callable[[], Any]
    """Raises what stopped a server."""

    def publish(self, path: Path) -> None:
        """Write addresses and token for clients of the same user, who alone can read the file."""
        write_servers_file(path, self.addresses, self.token)


@contextmanager
def served(config: PPOConfig) -> Iterator[Served]:
    """A model behind rollout servers while the block runs, with no data."""
    with Generator(config).workers() as group:
        token = secrets.token_urlsafe(24)  # other users of this machine reach its loopback
        addresses = [started["address"] for started in group.start_server(token) if started]
        group.serve()
        try:
            yield Served(addresses, token, group.server_state)
        finally:
            group.stop_serving()
            group.stop_server()


def runs_of(rows: Sequence[int], most: int) -> Iterator[range]:
    """Split ascending row numbers into ranges of neighbours, each of at most ``most``."""
    for _, group in groupby(enumerate(rows), lambda pair: pair[1] - pair[0]):
        run = [row for _, row in group]
        for start in range(run[0], run[-1] + 1, most):
            yield range(start, min(start + most, run[-1] + 1))
