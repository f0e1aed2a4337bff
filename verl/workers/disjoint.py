"""Actor and rollout on devices of their own (``hybrid_engine=false``): the verbs by which weights cross over.

The actor's ranks gather each tensor and rank 0 broadcasts it over a `WeightLink` to the rollout's ranks, which know no
actor: they hold the version they received and confirmed, and generate with no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import TCPStore

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import current_device
from verl.utils.distributed import get_rank
from verl.utils.process import no_collection
from verl.workers.generation import PROMPT_COLUMNS, RolloutRole
from verl.workers.model_worker import HybridWorker
from verl.workers.roles import PolicyRole
from verl.workers.rollout import get_rollout_class
from verl.workers.rollout.base import RolloutEngine, WeightSyncError
from verl.workers.rollout.weights.canary import Canary, CanaryError, explanation
from verl.workers.rollout.weights.link import WeightLink, find_store, node_id, open_store
from verl.workers.rollout.weights.sync import compare_memory


class LinkEndRole(HybridWorker):
    """Both ends of a `WeightLink`."""

    link: WeightLink | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def node(self) -> str:
        """Equal for ranks that reach one another over loopback."""
        return node_id()


class WeightSourceRole(LinkEndRole):
    """Verbs of an actor whose weights generate elsewhere; rank 0 holds the link."""

    link_store: TCPStore

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_link(self, on_one_node: bool) -> tuple[str, int] | None:
        """Serve the store by which the ends of the link meet; rank 0 returns its address and port."""
        if get_rank() != 0:
            return None
        # loopback where it reaches: the store has no authentication
        address = "127.0.0.1" if on_one_node else os.environ["MASTER_ADDR"]
        self.link_store = open_store(address, self.timeout_s)
        return address, self.link_store.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_link(self, receivers: int) -> None:
        """Become its sending end; waits for the receivers."""
        if get_rank() == 0:
            device = current_device(self.device)
            self.link = WeightLink(self.link_store, 0, 1 + receivers, device, self.timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_version(self) -> int:
        """Version of the weights as they are now."""
        return self.actor.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def check_canaries(self, canaries: list[Canary], held: list[dict[str, int]] | None = None) -> bool:
        """Score what the rollout's ranks generated with the weights that this actor, which still has them, sent.

        Args:
            held: what was read back of each rank's memory, as checksums, once they did not agree.

        Returns:
            Whether they agree.

        Raises:
            WeightSyncError: a rollout computes with other weights, and ``held`` was given: names the tensors.
        """
        with self.actor.on_device():
            try:
                self.compare_canaries(canaries)
            except CanaryError as error:
                if held is None:
                    return False
                dtype = canaries[0].dtype
                changed = compare_memory(self.actor.weights(dtype), held, dtype)
                meaning = explanation(changed, any(held), "", self.canary_tolerance(canaries))
                raise WeightSyncError(f"{error} {meaning}") from None
        return True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, dtype: str) -> dict[str, float] | None:
        """Broadcast the newest weights as ``dtype``; rank 0 returns their ``version``, ``num_bytes``, ``seconds``."""
        bucket_bytes = self.config.rollout.update_weights_bucket_megabytes << 20
        # all ranks take part in gathering each tensor; only rank 0 has a link to send it over
        with self.actor.on_device():
            weights = self.actor.weights(getattr(torch, dtype))
            if self.link is not None:
                return self.link.send(weights, self.actor.version, bucket_bytes, getattr(torch, dtype))._asdict()
            for _ in weights:
                pass  # gathered by all ranks together
        return None


class ReceivingRolloutRole(LinkEndRole, RolloutRole):
    """Verbs of generation with weights from elsewhere."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_link(self, address: str, port: int, receivers: int) -> str:
        """Become a receiving end of the link opened at this address; returns the type the weights are held in."""
        store, device = find_store(address, port, self.timeout_s), current_device(self.device)
        self.link = WeightLink(store, 1 + get_rank(), 1 + receivers, device, self.timeout_s)
        return str(self.rollout.weights_dtype).removeprefix("torch.")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self) -> int:
        """Take the weights that the actor sends and check that they are held; returns their version."""
        assert self.link is not None, "join_link() comes first"
        with self.rollout_phase("sync"):
            self.rollout.wake(("weights",))
            version = self.link.receive(self.rollout).version
            self.rollout.wake(("kv_cache",))
        self.generate_canary(version)
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read_back(self) -> dict[str, int]:
        """Checksums of what this rank's engine holds now."""
        return self.rollout.read_back()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_canary(self) -> Canary | None:
        """The tokens generated after the last sync, for the actor's `check_canaries`; None: there are none."""
        canary, self.canary = self.canary, None
        return canary

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="rollout", reads=PROMPT_COLUMNS, blocking=False)
    def start_generating(self, prompts: DataProto) -> DataProto:
        """`generate_sequences`, not waited for."""
        return self.generate_sequences(prompts)

    @contextmanager
    def rollout_mode(self, timing: dict[str, float]) -> Iterator[RolloutEngine]:
        """The engine as it is: it has its device alone, and `receive_weights` brings its weights."""
        timing["reshard"] = 0.0
        yield self.rollout

    def newest_version(self, meta: Mapping[str, Any]) -> int:
        """The version that the driver asked for, ``weights_version``."""
        return meta["weights_version"]


class ActorWorker(WeightSourceRole, PolicyRole):
    """The policy, whose weights generate elsewhere; without its LoRA adapter, if it has one, the reference."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the policy; call once."""
        with no_collection():
            self.start_process()
            self.init_policy()
            if self.base_model_is_reference:
                self.use_base_model_as_reference()


class RolloutWorker(ReceivingRolloutRole):
    """A rollout engine and nothing else."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Start the engine; call once."""
        get_rollout_class(self.config.rollout.name)  # a missing package is reported before anything loads
        with no_collection():
            self.start_process()
            self.init_rollout()
