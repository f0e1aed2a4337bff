"""DisjointRollout: the driver's side of a rollout on devices of its own.

Before responses are drawn the actor's newest weights are carried over, if they changed; which version was drawn with is
said to the rollout, which draws with no other. Knows two worker groups, no prompts and no algorithm.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.background import BackgroundCall, run_concurrently
from verl.single_controller.errors import WorkerError, WorkerGroupError

Timing = dict[str, float]


@dataclass
class Drawing:
    """Responses that are being drawn, or were."""

    version: int
    """Version of the weights they are drawn with."""
    steps_done: int
    """Training steps that these weights had taken."""
    future: DataProtoFuture | BackgroundCall | None = None
    timing: Timing = field(default_factory=dict)
    """Seconds it took to begin."""
    finished: DataProto | None = None

    def result(self) -> DataProto:
        """Wait for them; the same batch at every call."""
        if self.finished is None:
            self.finished = self.future.get()
        return self.finished


class DisjointRollout:
    """Draws under the actor group's newest weights with a rollout group.

    Args:
        sampler: what draws: the rollout group itself, or agent loops that ask its servers.

    Attributes:
        version: of the weights that every rank of the rollout has confirmed; None before the first transfer.
        transfer: ``num_bytes`` and ``seconds`` of the last transfer.
    """

    def __init__(self, actor_wg: Any, rollout_wg: Any, sampler: Any = None) -> None:
        self.actor_wg, self.rollout_wg, self.sampler = actor_wg, rollout_wg, sampler or rollout_wg
        self._begun: Drawing | None = None
        self.version: int | None = None
        self.transfer: dict[str, float] = {}
        self._connect()

    def _connect(self) -> None:
        """Build the link between the groups; their models are loaded."""
        on_one_node = len({*self.actor_wg.node(), *self.rollout_wg.node()}) == 1
        address, port = self.actor_wg.open_link(on_one_node)[0]
        receivers = self.rollout_wg.world_size
        _, dtypes = self._on_both(
            lambda: self.actor_wg.join_link(receivers),
            lambda: self.rollout_wg.join_link(address, port, receivers),
        )
        self.dtype = dtypes[0]

    def sync(self) -> Timing:
        """Carry the newest weights over, unless the rollout holds them already.

        Raises:
            WorkerGroupError: names the rank that died, hangs, or holds something else than what was sent.
        """
        version = self.actor_wg.weights_version()[0]
        if version == self.version:
            return {}
        self.version = None
        sent, held = self._on_both(lambda: self.actor_wg.send_weights(self.dtype), self.rollout_wg.receive_weights)
        assert set(held) == {version}, f"ranks of the rollout confirmed {held}, version {version} was sent"
        self.version, self.transfer = version, sent[0]
        return {"sync_weights": sent[0]["seconds"]}

    def generate_sequences(self, request: DataProto) -> DataProto:
        """Responses under the newest weights, as ``RolloutRole.generate_sequences`` gives them.

        A batch that was begun is drawn to its end first, with the weights it began with.
        """
        seconds = self._prepare(request)
        batch = self.sampler.generate_sequences(request)
        batch.meta_info["timing"] = {**batch.meta_info.get("timing", {}), **seconds}
        return batch

    def start(self, request: DataProto, steps_done: int) -> Drawing:
        """Have responses drawn under the newest weights, those after ``steps_done`` steps, and do not wait for them."""
        seconds = self._prepare(request)
        if self.sampler is self.rollout_wg:
            future = self.rollout_wg.start_generating(request)
        else:
            future = BackgroundCall(lambda: self.sampler.generate_sequences(request))
        self._begun = Drawing(self.version, steps_done, future, seconds)
        return self._begun

    def serve_rows(self, prompts: DataProto, draw: Any) -> tuple[Any, Timing]:
        """As `AgentLoopManager.serve_rows`, under the newest weights."""
        seconds = self._prepare(prompts)
        drawn, timing = self.sampler.serve_rows(prompts, draw)
        return drawn, {**timing, **seconds}

    @property
    def client(self) -> Any:
        """Of the rollout's servers."""
        return self.sampler.client

    def to_batch(self, *args: Any) -> DataProto:
        """As `AgentLoopManager.to_batch`."""
        return self.sampler.to_batch(*args)

    def close(self) -> None:
        """Stop the rollout's servers, if it has any."""
        if hasattr(self.sampler, "close"):
            self.sampler.close()

    def _prepare(self, request: DataProto) -> Timing:
        if self._begun is not None:
            self._begun.result()
            self._begun = None
        seconds = self.sync()
        request.meta_info["weights_version"] = self.version
        return seconds

    def _on_both(self, on_actor: Any, on_rollout: Any) -> list:
        """Run a call on each group at the same time; whatever fails ends both, since each may wait for the other."""
        try:
            return run_concurrently(on_actor, on_rollout, is_echo=_is_echo)
        except WorkerGroupError:
            self.actor_wg.stop()
            self.rollout_wg.stop()
            raise


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, WorkerError) and "WeightLinkError" in error.cause
