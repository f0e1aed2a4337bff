"""Reward models on servers: a judge in rollout engines on devices of its own, and the client of a classifier.

A judge writes text: reward functions ask it through the router (`verl.rewards.router`). A classifier gives a number a
text: vLLM's and SGLang's servers have ``/classify`` for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import torch

from verl.config.reward import RewardModelConfig
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
from verl.workers.reward_model import ChatRetokenizer, scores_at_last_token
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.monitor import engine_phase
from verl.workers.rollout.server.engine_loop import EngineLoop, tensor_parallel_broadcast
from verl.workers.rollout.server.server import RolloutServer


class JudgeWorker(EngineWorker):
    """One rank of a judge that a rollout engine runs, behind a server that is there for the whole run."""

    role = "rm"
    config: RewardModelConfig
    server: RolloutServer | EngineLoop | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the judge; call once."""
        model, options = self.config.model, self.config.engine_options()
        import_users_modules(model.external_lib)
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
            with engine_phase(options.name, "start"):
                self.rollout = get_rollout_class(options.name)(
                    copy_to_local(model.path, use_shm=model.use_shm), options, self.device, model.trust_remote_code
                )
        rank, size = get_rank(), self.rollout.tensor_parallel_size
        self._register_dispatch_collect_info("rm", dp_rank=rank // size, is_collect=rank % size == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_server(self, token: str) -> str | None:
        """Serve from now on; the address on the first rank of each engine.

        Args:
            token: what clients must send.
        """
        size, rank = self.rollout.tensor_parallel_size, get_rank()
        broadcast = tensor_parallel_broadcast(size)  # collective: before ranks part ways
        if rank % size:
            follower = self.server = EngineLoop(self.rollout, broadcast=broadcast, follows=True)
            follower.start()
            follower.resume(self.rollout.version)
            return None
        server = self.server = RolloutServer(
            self.rollout,
            host=self.config.server_host,
            token=token,
            name="judge",
            tokenizer=self.tokenizer,
            seed=derive_seed(self.seed, "judge", rank),
            broadcast=broadcast,
        )
        address = server.start()
        assert self.rollout.version is not None, "it has read its weights"
        server.resume(self.rollout.version)
        return address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_server(self) -> None:
        """Close the server; requests under way are answered with an error."""
        if self.server is not None:
            self.server.stop()
            self.server = None


class RewardServerError(RuntimeError):
    """The servers of a reward model gave no score; names them and the response."""

    exit_class = ExitCode.WORKER


class ServedRewardModel:
    """A classifier with one output behind the servers of ``reward_model.server_urls``.

    Args:
        config: the section ``reward_model``.
        policy: the policy's tokenizer.
        router: to the servers.
    """

    def __init__(self, config: RewardModelConfig, policy: Any, router: Router):
        self.config, self.router = config, router
        judge = hf_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        self.retokenizer = ChatRetokenizer(policy, judge, config.max_length)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """As `verl.workers.reward_model.RewardModelWorker.compute_rm_score`.

        Raises:
            RewardServerError: a response has no score.
        """
        responses = data.ragged("responses")
        rows, lengths = self.retokenizer(list(data.non_tensor_batch["raw_prompt"]), list(responses.rows()))
        with ThreadPoolExecutor(1, "verl-reward-model") as thread:  # the caller may have an event loop
            scores = thread.submit(asyncio.run, self._scores([row.tolist() for row in rows])).result()
        scored = DataProto.from_ragged({"rm_scores": scores_at_last_token(torch.tensor(scores), responses)})
        read = torch.tensor([len(row) for row in rows])
        scored.put("rm_tokens", read)
        scored.put("rm_tokens_cut", lengths - read)
        return scored

    async def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        # the router has the limits of time
        no_limit = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=no_limit) as session:
            tasks = [asyncio.ensure_future(self._score(session, number, row)) for number, row in enumerate(rows)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _score(self, session: aiohttp.ClientSession, number: int, ids: Sequence[int]) -> float:
        if self.config.router.server == "sglang":
            body: dict[str, Any] = {"input_ids": list(ids)}
        else:  # the output itself, and no probability of it
            body = {"input": list(ids), "use_activation": False}
        async with session.post(f"http://{self.router.address}/classify", json=body) as answer:
            content = await answer.read()
            if answer.status == 200:
                try:
                    return score_of(await answer.json(content_type=None))
                except (LookupError, TypeError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}; the answer begins {excerpt(content.decode(), 200)}"
            else:
                problem = f"status {answer.status}: {excerpt(content.decode(errors='replace'), 300)}"
        raise RewardServerError(
            f"reward_model.server_urls={', '.join(self.config.urls)}: response {number} of the batch has no score "
            f"({problem}). Serve a model of one output with `vllm serve MODEL --runner pooling`, or SGLang's "
            "--is-embedding with reward_model.router.server=sglang."
        )


def score_of(answer: Any) -> float:
    """The one output of a classifier in the answer of vLLM (``data[0].probs``) or SGLang (``embedding``).

    Raises:
        LookupError, TypeError, ValueError: there is none, or there are several.
    """
    if isinstance(answer, list):
        [answer] = answer
    [score] = answer["embedding"] if "embedding" in answer else answer["data"][0]["probs"]
    return float(score)
