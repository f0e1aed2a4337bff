"""The verbs of a rollout that is asked request by request: a server in the worker, and its turns with training.

In a hybrid the device serves or trains: `serve` hands the newest weights over and lets requests in, `stop_serving`
gives the device back. aiohttp is imported when a server is started.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import get_rank
from verl.utils.import_utils import load_extern_type
from verl.utils.py_functional import derive_seed
from verl.workers.rollout.base import RolloutEngine, SamplingParams

logger = logging.getLogger(__name__)


class ServingRole:
    """Needs ``rollout`` (RolloutEngine), ``rollout_mode``, ``actor``, ``tokenizer``, ``seed``, ``config.rollout``."""

    server: Any = None
    """RolloutServer on the first rank of an engine, EngineLoop on those that follow it."""
    turn: AbstractContextManager[RolloutEngine] | None = None
    """The rollout's turn on the device, while it serves."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_server(self, token: str | None = None) -> dict[str, Any] | None:
        """Listen for requests; they wait until `serve`. Returns the address on the first rank of each engine.

        Args:
            token: what clients must send; None: nothing, which only a loopback address allows.
        """
        from verl.workers.rollout.server.engine_loop import EngineLoop, make_tensor_parallel_broadcast

        size, rank = self.rollout.tensor_parallel_size, get_rank()
        broadcast = make_tensor_parallel_broadcast(size)
        if rank % size:
            self.server = EngineLoop(self.rollout, broadcast=broadcast, follows=True)
            self.server.start()
            return None
        config = self.config.rollout
        self.server = server_class(config.agent.custom_async_server)(
            self.rollout,
            host=config.server_host,
            token=token,
            tokenizer=self.tokenizer,
            seed=derive_seed(self.seed, "served", rank),
            broadcast=broadcast,
        )
        return {"address": self.server.start(), "rank": rank}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serve(self) -> dict[str, float]:
        """Take the device with the newest weights and answer requests until `stop_serving`; returns seconds."""
        timing: dict[str, float] = {}
        self.turn = self.rollout_mode(timing)
        self.turn.__enter__()
        self.server.resume(self.rollout.version)
        return timing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_serving(self) -> None:
        """End what still runs and give the device back; requests that come now wait for the next `serve`."""
        self.server.pause()
        self.server_state()
        turn, self.turn = self.turn, None
        if turn is not None:
            turn.__exit__(None, None, None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def server_state(self) -> dict[str, Any]:
        """How the engine of this rank is doing; raises what stopped it."""
        loop = getattr(self.server, "loop", self.server)
        if loop.error is not None:
            raise loop.error
        return loop.state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_server(self) -> None:
        """Close the server. Requests under way are answered with an error."""
        if self.server is not None:
            self.server.stop()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def sampling_of(self, validate: bool, do_sample: bool) -> SamplingParams:
        """The sampling of training or validation prompts, as `generate_sequences` would choose it."""
        return self.sampling(validate, do_sample)


def server_class(custom: Any) -> type:
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
