"""The reference of a loss that compares whole distributions: its hidden states, micro-batch by micro-batch.

Distributions are too large to travel or to keep, so they are made where they are compared: from hidden states and the
weight of the last layer. Knows engines; no roles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from verl.models.token_outputs import ReferenceStates
from verl.workers.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from verl.workers.engine.engine import Engine


@dataclass(frozen=True)
class Reference:
    """An engine that holds the reference, in the same processes as the policy's and on the device."""

    engine: Engine
    weight: Tensor | None
    """(V, H) of its last layer, whole; None: the engine is the policy's own, below its adapter."""

    @classmethod
    def of(cls, engine: Engine, policy: Engine) -> Reference:
        """The model of another engine; its ranks call it together, which gathers the last layer.

        Raises:
            ValueError: distributions of the two cannot be compared.
        """
        ours, theirs = policy.topology, engine.topology
        if (ours.world_size, ours.sp_size) != (theirs.world_size, theirs.sp_size):
            raise ValueError(
                f"actor.kl_loss_type=full: the actor has {ours.world_size} ranks, {ours.sp_size} to a sequence, and "
                f"the reference {theirs.world_size}, {theirs.sp_size} to a sequence. They go through each micro-batch "
                "together: give both the same ranks and ulysses_sequence_parallel_size, or use low_var_kl."
            )
        check_linear_head(engine)
        check_linear_head(policy)
        weight, vocab = engine.head_weight(), policy.vocab_size
        if len(weight) != vocab:
            raise ValueError(
                f"actor.kl_loss_type=full: the actor has a vocabulary of {vocab} and the reference "
                f"({engine.spec.path}) one of {len(weight)}, and the KL compares them token by token. Use a reference "
                "with the same vocabulary, or low_var_kl."
            )
        return cls(engine, weight)

    @classmethod
    def of_base_model(cls, policy: Engine) -> Reference:
        """The policy without its adapter: no second model, and no second last layer."""
        check_linear_head(policy)
        return cls(policy, None)

    def states(self, micro: MicroBatch) -> ReferenceStates:
        """What the reference would predict each response token of ``micro`` from."""
        if self.weight is None:
            with self.engine.without_adapter():
                hidden = self.engine.states(micro)
        else:
            hidden = self.engine.states(micro)
        return ReferenceStates(hidden, self.weight, self.engine.head)


def check_linear_head(engine: Engine) -> None:
    """Refuse a model whose logits are more than its hidden states times a weight."""
    if engine.head.kind != "fused":
        raise ValueError(
            f"actor.kl_loss_type=full with {engine.spec.path}: its logits are not the product of hidden states and a "
            "weight, so they would have to be held whole for two models. Use low_var_kl."
        )
