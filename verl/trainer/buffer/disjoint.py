"""Disjoint rollout: the driver's side of a rollout on devices of its own.

Before responses are generated the actor's newest weights are transferred, if they changed; the request names their
version, and the rollout refuses any other. A rollout that dies while it generates is started again and gets the same
weights and the same request, whose seeds make the responses the same. Knows two worker groups, no prompts and no
algorithm.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.background import BackgroundCall, run_concurrently
from verl.single_controller.errors import WorkerDied, WorkerError, WorkerGroupError
from verl.workers.rollout.server.messages import RolloutServerError

T = TypeVar("T")

Timing = dict[str, float]

_LOST = (
    "a process was lost while {}: the run ends. trainer.max_restarts=1 and trainer.save_freq "
    "start such a run again from its newest checkpoint."
)


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
    say: Callable[[str], None] = lambda message: None
    """Prints a message to the user."""

    def result(self) -> DataProto:
        """Wait for them; return the same batch at every call."""
        if self.finished is None:
            try:
                self.finished = self.future.get()
            except WorkerDied:
                self.say(_LOST.format("it generated ahead, with weights that the actor no longer has"))
                raise
        return self.finished


class DisjointRollout:
    """Generate with a rollout group under the newest weights of an actor group.

    Args:
        engine: the rollout group itself, or the agent loops that call its servers; None: the group.
        say: prints a message to the user; None: nothing is said.

    Attributes:
        version: of the weights that every rank of the rollout has confirmed; None before the first transfer.
        transfer: ``num_bytes`` and ``seconds`` of the last transfer.
        restart_seconds: taken by starts of the rollout after the first.
    """

    def __init__(
        self, actor_wg: Any, rollout_wg: Any, engine: Any = None, say: Callable[[str], None] | None = None
    ) -> None:
        self._say = say or (lambda message: None)
        self.actor_wg, self.rollout_wg, self.engine = actor_wg, rollout_wg, engine or rollout_wg
        self._pending: PendingRollout | None = None
        self.version: int | None = None
        self.transfer: dict[str, float] = {}
        self.restart_seconds = 0.0
        self.dtype = self._open_link()

    def _open_link(self) -> str:
        """Open the link between the groups, whose models are loaded; return the type of the weights on it."""
        actor_wg, rollout_wg = self.actor_wg, self.rollout_wg
        on_one_node = len({*actor_wg.node(), *rollout_wg.node()}) == 1
        address, port = actor_wg.open_link(on_one_node)[0]
        receivers = rollout_wg.world_size
        _, dtypes = self._on_both(
            lambda: actor_wg.join_link(receivers),
            lambda: rollout_wg.join_link(address, port, receivers),
        )
        return dtypes[0]

    def sync(self) -> Timing:
        """Transfer the newest weights, unless the rollout holds them already.

        Raises:
            WorkerGroupError: names the rank that died, hangs, or holds other weights than were sent.
        """
        version = self.actor_wg.weights_version()[0]
        if version == self.version:
            return {}
        self.version = None
        if is_serving := getattr(self.engine, "keeps_serving", False):
            self.engine.stop_serving()
        sent, held = self._on_both(lambda: self.actor_wg.send_weights(self.dtype), self.rollout_wg.receive_weights)
        assert set(held) == {version}, f"ranks of the rollout confirmed {held}, version {version} was sent"
        if canaries := [canary for canary in self.rollout_wg.take_canary() if canary is not None]:
            if not all(self.actor_wg.check_canaries(canaries)):
                self.actor_wg.check_canaries(canaries, self.rollout_wg.read_back())  # raises, with the tensors
        self.version, self.transfer = version, sent[0]
        if is_serving:
            self.engine.keep_serving()
        return {"sync_weights": sent[0]["seconds"]}

    def generate_sequences(self, request: DataProto) -> DataProto:
        """Return responses under the newest weights, as ``RolloutRole.generate_sequences`` does.

        A batch that was started is finished first, with the weights it started with.
        """

        def generate() -> DataProto:
            seconds = self._prepare(request)
            batch = self.engine.generate_sequences(request)
            batch.meta_info["timing"] = {**batch.meta_info.get("timing", {}), **seconds}
            return batch

        return self._again_if_lost(generate)

    def start(self, request: DataProto, steps_done: int) -> PendingRollout:
        """Start to generate under the newest weights, those after ``steps_done`` steps; do not wait."""
        seconds = self._prepare(request)
        if self.engine is self.rollout_wg:
            future = self.rollout_wg.start_generating(request)
        else:
            future = BackgroundCall(lambda: self.engine.generate_sequences(request))
        self._pending = PendingRollout(self.version, steps_done, future, seconds, say=self._say)
        return self._pending

    def keep_serving(self) -> Timing:
        """Serve under the newest weights until the next call, which interrupts what runs if they have changed."""
        self.rollout_wg.node()  # a death since the last call is found before the actor waits for the dead
        seconds = self.sync()
        if not self.engine.keeps_serving:
            self.engine.keep_serving()
        return seconds

    def serve_rows(self, prompts: DataProto, generate: Any, ended: Any = None) -> tuple[Any, Timing]:
        """Call `AgentLoopManager.serve_rows` under the newest weights."""

        def serve() -> tuple[Any, Timing]:
            seconds = self._prepare(prompts)
            result, timing = self.engine.serve_rows(prompts, generate, ended)
            return result, {**timing, **seconds}

        return self._again_if_lost(serve)

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

    def _again_if_lost(self, action: Callable[[], T]) -> T:
        """Run ``action``; where the rollout dies of it, start the rollout again and run ``action`` once more.

        The second death ends the run: it may be the request that kills.
        """
        try:
            return action()
        except (WorkerGroupError, RolloutServerError) as error:
            self.restart_after(error, "generates the same batch")
        return action()

    def restart_after(self, error: Exception, what: str) -> None:
        """Start the rollout again, which then does ``what``; raises ``error`` if it is not the death of its process."""
        died = self._death(error)
        if died is None:
            raise error
        start = time.monotonic()
        self._say(f"the rollout is started again, and {what}: {str(died).splitlines()[0]}")
        self._restart()
        self.restart_seconds += time.monotonic() - start

    def _death(self, error: Exception) -> WorkerDied | None:
        """The death of a rollout process behind ``error``, if the actor is well and holds the weights of the batch."""
        if isinstance(error, RolloutServerError):
            try:
                self.rollout_wg.node()
            except WorkerGroupError:
                pass  # kept as the group's failure
        failure = self.rollout_wg.failure
        # a death in a transfer takes the actor along, which waits for the dead
        return failure if isinstance(failure, WorkerDied) and self.actor_wg.is_running else None

    def _restart(self) -> None:
        self.version, self._pending = None, None
        self.rollout_wg.restart()
        self.rollout_wg.init_model()
        self._open_link()
        if self.engine is not self.rollout_wg:
            self.engine.reconnect()

    def _prepare(self, request: DataProto) -> Timing:
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        self.rollout_wg.node()  # a death since the last call is found before the actor waits for the dead
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
        except WorkerGroupError as error:
            self.actor_wg.stop()
            self.rollout_wg.stop()
            if isinstance(error, WorkerDied):
                self._say(_LOST.format("weights were transferred, and the other end waited for it"))
            raise
