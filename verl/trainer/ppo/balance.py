"""Plan of the data-parallel partition of a batch, made once on the driver: row cost, optimizer steps, balance metrics.

The partition itself is in ``verl.batch.partition``.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from verl.batch.balancing import log_seqlen_unbalance
from verl.batch.partition import CallPlan, MiniBatches, PartitionPlan, RowCost, row_lengths
from verl.config.actor import ActorConfig
from verl.config.critic import CriticConfig
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.telemetry.flops_counter import FlopsCounter
from verl.utils.py_functional import derive_seed

_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def row_cost(model_path: str) -> RowCost:
    """Return the cost of a row for the model in this folder, by its ``config.json``; a default where that lacks it."""
    file = Path(model_path).expanduser() / "config.json"
    shape = json.loads(file.read_text()) if file.is_file() else {}
    shape = shape.get("text_config") or shape
    if not all(shape.get(name) for name in _SHAPE):
        return RowCost()
    return RowCost(FlopsCounter(SimpleNamespace(**shape)).break_even())


def partition_plan(config: PPOConfig, cost: RowCost, step: int) -> PartitionPlan:
    """Return the plan by which the calls of training step ``step`` divide their rows among ranks.

    Args:
        config: the whole tree.
    """
    shared, critic = config.actor_rollout_ref, config.critic
    seed = derive_seed(config.trainer.seed, "shuffle", step)

    def update(role: ActorConfig | CriticConfig, n: int) -> CallPlan:
        return CallPlan(role.use_dynamic_bsz, MiniBatches.of(role, n, seed))

    calls = {
        "compute_log_prob": CallPlan(shared.rollout.log_prob_use_dynamic_bsz),
        "compute_ref_log_prob": CallPlan(shared.ref.log_prob_use_dynamic_bsz),
        "compute_values": CallPlan(critic.use_dynamic_bsz),
        "update_actor": update(shared.actor, shared.rollout.n),
        "update_critic": update(critic, critic.rollout_n),
    }
    together = shared.model.use_prefix_sharing or critic.model.use_prefix_sharing
    return PartitionPlan(calls, cost if config.trainer.balance_batch else None, together)


def balance_metrics(batch: DataProto, plan: PartitionPlan, cost: RowCost, ranks: int, prefix: str) -> dict[str, float]:
    """Return how tokens and cost spread over ``ranks`` in the policy's update, before and after balancing.

    Tokens as ``{prefix}/{min,max,minmax_diff,balanced_min,balanced_max,mean}``. Cost as the sum over optimizer steps of
    the slowest rank's, over that of the mean: ``{prefix}/balanced_cost_max_over_mean`` and, with the rows dealt in
    their order, ``{prefix}/cost_max_over_mean``; 1 is best.
    """
    rows = row_lengths(batch, plan.groups_together)
    parts, after = plan.loads("update_actor", rows, ranks, cost)
    _, before = plan._replace(cost=None).loads("update_actor", rows, ranks, cost)
    return {
        **log_seqlen_unbalance(rows.lengths, parts, prefix),
        f"{prefix}/cost_max_over_mean": _max_over_mean(before),
        f"{prefix}/balanced_cost_max_over_mean": _max_over_mean(after),
    }


def _max_over_mean(costs: np.ndarray) -> float:
    """``costs`` (steps, ranks): ranks wait for the slowest at every step."""
    return float(costs.max(axis=1).sum() / costs.mean(axis=1).sum())
