"""Reward models on servers: a judge or classifier in rollout engines of their own; the client of a classifier.

A judge writes text: reward functions ask it through the router (`verl.rewards.router`). A classifier gives a number a
text: vLLM's and SGLang's servers have ``/classify`` for it, and so has ours. On devices of its own it scores responses
as they end; on those of the policy it is asleep but for the time in which it scores a batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from aiohttp import web
from torch import Tensor

from verl.config.reward import RewardModelConfig
from verl.models.loader import ModelSpec, load_config
from verl.protocol import DataProto
from verl.rewards.router import Router
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import get_rank
from verl.utils.exit_codes import ExitCode
from verl.utils.fs import copy_to_local
from verl.utils.import_utils import import_users_modules
from verl.utils.process import no_collection
from verl.utils.py_functional import derive_seed, excerpt
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.model_worker import EngineWorker
from verl.workers.reward_model import ChatRetokenizer, max_input_tokens, scores_at_last_token
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import Request, SamplingParams
from verl.workers.rollout.memory import RolloutOutOfMemory, memory_errors
from verl.workers.rollout.monitor import engine_phase
from verl.workers.rollout.server.engine_loop import EngineLoop, tensor_parallel_broadcast
from verl.workers.rollout.server.limits import json_body
from verl.workers.rollout.server.messages import token_ids
from verl.workers.rollout.server.server import RolloutServer

Answer = Future[tuple[int, bytes, str]]
"""Status, content and its type."""


class RewardServerWorker(EngineWorker):
    """One rank of a judge or classifier in a rollout engine, behind a server that is there for the whole run."""

    role = "rm"
    config: RewardModelConfig
    server: RolloutServer | EngineLoop | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the model; call once.

        Raises:
            ValueError: the engine cannot run it; says why.
        """
        model, options = self.config.model, self.config.engine_options()
        import_users_modules(model.external_lib)
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
            folder = copy_to_local(model.path, use_shm=model.use_shm)
            if self.config.enable and not options.max_model_len:
                options = replace(options, max_model_len=longest_text(self.config))
            engine = get_rollout_class(options.name, classifies=self.config.enable)
            with own_keys(), memory_errors(options, "start"), engine_phase(options.name, "start"):
                self.rollout = engine(folder, options, self.device, model.trust_remote_code)
        rank, size = get_rank(), self.rollout.tensor_parallel_size
        self._register_dispatch_collect_info("rm", dp_rank=rank // size, is_collect=rank % size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_server(self, token: str) -> str | None:
        """Serve from now on, or from `wake_engine` on; the address on the first rank of each engine.

        Args:
            token: what clients must send.
        """
        size, rank = self.rollout.tensor_parallel_size, get_rank()
        broadcast = tensor_parallel_broadcast(size)  # collective: before ranks part ways
        if rank % size:
            follower = self.server = EngineLoop(self.rollout, broadcast=broadcast, follows=True)
            follower.start()
            self._resume()
            return None
        classifies = self.config.enable
        server = self.server = (ClassifierServer if classifies else RolloutServer)(
            self.rollout,
            host=self.config.server_host,
            token=token,
            name="classifier" if classifies else "judge",
            tokenizer=None if classifies else self.tokenizer,
            seed=derive_seed(self.seed, "judge", rank),
            broadcast=broadcast,
        )
        address = server.start()
        self._resume()
        return address

    def _resume(self) -> None:
        if self.server is not None and not self.rollout.is_asleep:
            assert self.rollout.version is not None, "it has read its weights"
            self.server.resume(self.rollout.version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wake_engine(self) -> None:
        """Take the device's memory, and answer requests until `sleep_engine`."""
        with own_keys(), memory_errors(self.rollout.config, "wake"), self.ledger.phase("rm_wake"):
            self.rollout.wake()
        self._resume()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_engine(self) -> None:
        """Give the device's memory back; requests wait for the next `wake_engine`."""
        if self.server is not None:
            self.server.pause()
        with self.ledger.phase("rm_sleep"):
            self.rollout.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_server(self) -> None:
        """Close the server; requests under way are answered with an error."""
        if self.server is not None:
            self.server.stop()
            self.server = None


@contextmanager
def own_keys() -> Iterator[None]:
    """Name this section's keys in errors of engines, which name the policy's."""
    try:
        yield
    except (ValueError, RolloutOutOfMemory) as error:
        kind = RolloutOutOfMemory if isinstance(error, RolloutOutOfMemory) else ValueError
        raise kind(str(error).replace("actor_rollout_ref.rollout", "reward_model.rollout")) from error


class ClassifierServer(RolloutServer):
    """Serves a classifier: ``POST /classify``, as vLLM's server has it for token ids."""

    def application(self) -> web.Application:
        application = super().application()
        application.add_routes([web.post("/classify", self._classify), web.get("/v1/models", self._models)])
        return application

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.name, "object": "model"}]})

    async def _classify(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if not isinstance(body, dict) or body.get("use_activation") is not False:
            raise ValueError('The body must be {"input": [token ids], "use_activation": false}.')
        asked = Request(tuple(token_ids(body.get("input"), "input")), SamplingParams(1, do_sample=False))
        completion = await self.generate(asked)
        if completion.score is None:  # aborted: the server stops
            return self.error_response(503, "The server stops.")
        return web.json_response({"data": [{"index": 0, "probs": [completion.score], "num_classes": 1}]})


class RewardServerError(RuntimeError):
    """The servers of a reward model gave no score; names them and the response."""

    exit_class = ExitCode.WORKER


class ServedRewardModel:
    """A classifier with one output behind servers: those of ``reward_model.server_urls``, or the run's own.

    Args:
        config: the section ``reward_model``.
        policy: the policy's tokenizer.
        router: to the servers.
        engine: the group of the servers where they take turns on the devices of others; None: they are always awake.
        others: groups on the same devices.

    Attributes:
        begins_early: whether responses can be scored as they end; see `verl.rewards.managers.early`.
    """

    early_columns: tuple[Sequence[str], Sequence[str]] = ("raw_prompt",), ()

    def __init__(
        self, config: RewardModelConfig, policy: Any, router: Router, engine: Any = None, others: Sequence[Any] = ()
    ):
        self.config, self.router, self.engine, self.others = config, router, engine, others
        self.begins_early = engine is None and config.use_reward_loop
        judge = hf_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        # of a model on servers the folder may hold the tokenizer alone
        longest = longest_text(config) if config.runs_server else config.max_length
        self.retokenizer = ChatRetokenizer(policy, judge, longest)
        self._turn = threading.Lock()  # a tokenizer is for one thread at a time
        self._begun: list[dict[bytes, Answer]] = [{}]
        """Answers about texts, there or to come, by their token ids: of this batch, then of earlier ones."""

    def next_round(self, kept: int = 1) -> None:
        """Another batch begins: forget the scores of more than ``kept`` batches ago."""
        with self._turn:
            self._begun = [{}, *self._begun[:kept]]

    def begin_ids(self, ids: Sequence[np.ndarray], rows: Sequence[Mapping[str, Any]], turns: Sequence[Any]) -> None:
        """Begin to score responses by their token ids (int32).

        Args:
            rows: the columns of each, without the tensors.
            turns: not read.
        """
        with self._turn:
            texts, _ = self.retokenizer([row["raw_prompt"] for row in rows], [torch.tensor(one) for one in ids])
            self._begin(texts)

    def _begin(self, texts: Sequence[Tensor]) -> list[Answer]:
        """Ask about texts that are not asked about yet; the answers come."""
        newest = self._begun[0]
        answers = []
        for text in texts:
            key = text.numpy().tobytes()
            answer = next((batch[key] for batch in self._begun if key in batch), None)
            if answer is None or answer.cancelled():
                if self.config.server_urls and self.config.router.server == "sglang":
                    body: dict[str, Any] = {"input_ids": text.tolist()}
                else:  # the output itself, and no probability of it
                    body = {"input": text.tolist(), "use_activation": False}
                answer = newest[key] = self.router.post("classify", body)
            answers.append(answer)
        return answers

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """As `verl.workers.reward_model.RewardModelWorker.compute_rm_score`.

        Raises:
            RewardServerError: a response has no score.
        """
        responses = data.ragged("responses")
        with self._awake():
            with self._turn:
                rows, lengths = self.retokenizer(list(data.non_tensor_batch["raw_prompt"]), list(responses.rows()))
                answers = self._begin(rows)
            try:
                scores = torch.tensor([self._score(number, answer) for number, answer in enumerate(answers)])
            except BaseException:
                for answer in answers:
                    answer.cancel()
                raise
        scored = DataProto.from_ragged({"rm_scores": scores_at_last_token(scores, responses)})
        read = torch.tensor([len(row) for row in rows])
        scored.put("rm_tokens", read)
        scored.put("rm_tokens_cut", lengths - read)
        return scored

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Within the block an engine that takes turns has the devices' memory."""
        if not self.begins_early:
            self.next_round()
        if self.engine is None:
            yield
            return
        for group in self.others:
            if hasattr(group, "free_memory"):  # a user's may lack it
                group.free_memory()
        self.engine.wake_engine()
        try:
            yield
        finally:
            self.engine.sleep_engine()

    def _score(self, number: int, answer: Answer) -> float:
        """Wait for the score of a response of the batch."""
        status, content, _ = answer.result()
        text = content.decode(errors="replace")
        if status == 200:
            try:
                return score_of(json.loads(text))
            except (LookupError, TypeError, ValueError) as error:
                problem = f"{type(error).__name__}: {error}; the answer begins {excerpt(text, 200)}"
        else:
            problem = f"status {status}: {excerpt(text, 300)}"
        key, way_out = (
            f"reward_model.server_urls={', '.join(self.config.urls)}",
            (
                "Serve a model of one output with `vllm serve MODEL --runner pooling`, or SGLang's --is-embedding with "
                "reward_model.router.server=sglang."
            ),
        )
        if status in (401, 403):
            way_out = f"Put the servers' key into the environment variable {self.config.router.api_key_env}."
        if self.config.runs_server:
            key, way_out = f"reward_model.rollout.name={self.config.rollout['name']}", "See the engine's output above."
        raise RewardServerError(f"{key}: response {number} of the batch has no score ({problem}). {way_out}")


def longest_text(config: RewardModelConfig) -> int | None:
    """Tokens that a classifier of the run's own reads of a conversation; None: any number.

    Args:
        config: the section ``reward_model``.
    """
    model = config.model
    spec = ModelSpec(model.path, "reward", trust_remote_code=model.trust_remote_code, external_lib=model.external_lib)
    limits = (max_input_tokens(config.max_length, load_config(spec)), config.rollout.get("max_model_len"))
    return min((limit for limit in limits if limit), default=None)


def score_of(answer: Any) -> float:
    """The one output of a classifier in the answer of vLLM (``data[0].probs``) or SGLang (``embedding``).

    Raises:
        LookupError, TypeError, ValueError: there is none, or there are several.
    """
    if isinstance(answer, list):
        [answer] = answer
    [score] = answer["embedding"] if "embedding" in answer else answer["data"][0]["probs"]
    return float(score)
