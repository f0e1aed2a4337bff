"""Disjoint rollout: the driver's side of a rollout on devices of its own.

Before responses are generated the actor's newest weights are transferred, if they changed; the request names their
version, and the rollout refuses any other. Knows two worker groups, no prompts and no algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.background import BackgroundCall, run_concurrently
from verl.single_controller.errors import WorkerError, WorkerGroupError

Timing = dict[str, float]


@dataclass
class PendingRollout:
    """Responses that are being generated, or were."""

    version: int
    """Version of the weights that generate them."""
    steps_done: int
    """Training steps that these weights have taken."""
    future: DataProtoFuture | BackgroundCall | None = None
    timing: Timing = field(default_factory=dict)
    """Seconds it took to start."""
    finished: DataProto | None = None

    def result(self) -> DataProto:
        """Wait for them; return the same batch at every call."""
        if self.finished is None:
            self.finished = self.future.get()
        return self.finished


class DisjointRollout:
    """Generate with a rollout group under the newest weights of an actor group.

    Args:
        engine: the rollout group itself, or the agent loops that call its servers; None: the group.

    Attributes:
        version: of the weights that every rank of the rollout has confirmed; None before the first transfer.
        transfer: ``num_bytes`` and ``seconds`` of the last transfer.
    """

    def __init__(self, actor_wg: Any, rollout_wg: Any, engine: Any = None) -> None:
        self.actor_wg, self.rollout_wg, self.engine = actor_wg, rollout_wg, engine or rollout_wg
        self._pending: PendingRollout | None = None
        self.version: int | None = None
        self.transfer: dict[str, float] = {}
        # open the link between the groups, whose models are loaded
        on_one_node = len({*actor_wg.node(), *rollout_wg.node()}) == 1
        address, port = actor_wg.open_link(on_one_node)[0]
        receivers = rollout_wg.world_size
        _, dtypes = self._on_both(
            lambda: actor_wg.join_link(receivers),
            lambda: rollout_wg.join_link(address, port, receivers),
        )
        self.dtype = dtypes[0]

    def sync(self) -> Timing:
        """Transfer the newest weights, unless the rollout holds them already.

        Raises:
            WorkerGroupError: names the rank that died, hangs, or holds other weights than were sent.
        """
        version = self.actor_wg.weights_version()[0]
        if version == self.version:
            return {}
        self.version = None
        sent, held = self._on_both(lambda: self.actor_wg.send_weights(self.dtype), self.rollout_wg.receive_weights)
        assert set(held) == {version}, f"ranks of the rollout confirmed {held}, version {version} was sent"
        if canaries := [canary for canary in self.rollout_wg.take_canary() if canary is not None]:
            self.actor_wg.check_canaries(canaries)
        self.version, self.transfer = version, sent[0]
        return {"sync_weights": sent[0]["seconds"]}

    def generate_sequences(self, request: DataProto) -> DataProto:
        """Return responses under the newest weights, as ``RolloutRole.generate_sequences`` does.

        A batch that was started is finished first, with the weights it started with.
        """
        seconds = self._prepare(request)
        batch = self.engine.generate_sequences(request)
        batch.meta_info["timing"] = {**batch.meta_info.get("timing", {}), **seconds}
        return batch

    def start(self, request: DataProto, steps_done: int) -> PendingRollout:
        """Start to generate under the newest weights, those after ``steps_done`` steps; do not wait."""
        seconds = self._prepare(request)
        if self.engine is self.rollout_wg:
            future = self.rollout_wg.start_generating(request)
        else:
            future = BackgroundCall(lambda: self.engine.generate_sequences(request))
        self._pending = PendingRollout(self.version, steps_done, future, seconds)
        return self._pending

    def serve_rows(self, prompts: DataProto, generate: Any) -> tuple[Any, Timing]:
        """Call `AgentLoopManager.serve_rows` under the newest weights."""
        seconds = self._prepare(prompts)
        result, timing = self.engine.serve_rows(prompts, generate)
        return result, {**timing, **seconds}

    @property
    def client(self) -> Any:
        """Client of the rollout's servers."""
        return self.engine.client

    def to_batch(self, *args: Any) -> DataProto:
        """Call `AgentLoopManager.to_batch`."""
        return self.engine.to_batch(*args)

    def close(self) -> None:
        """Stop the rollout's servers, if it has any."""
        if hasattr(self.engine, "close"):
            self.engine.close()

    def _prepare(self, request: DataProto) -> Timing:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        seconds = self.sync()
        request.meta_info["weights_version"] = self.version
        return seconds

    def _on_both(self, on_actor: Any, on_rollout: Any) -> list:
        """Call both groups concurrently; a failure of one ends both, since each may wait for the other."""
        try:
            return run_concurrently(
                on_actor,
                on_rollout,
                is_echo=lambda error: isinstance(error, WorkerError) and "WeightLinkError" in error.cause,
            )
        except WorkerGroupError:
            self.actor_wg.stop()
            self.rollout_wg.stop()
            raise
