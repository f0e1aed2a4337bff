"""Deprecated ways of saying the same thing, rewritten in the unresolved tree so that others may follow the result."""

from typing import Any

from verl.config.base import Problem
from verl.config.tree import at_key, is_interpolation, section_at

_GLOBAL_SIZES = (
    # section, deprecated name (its successor adds _per_gpu), section whose ranks share it
    ("actor_rollout_ref.actor", "ppo_micro_batch_size", "actor_rollout_ref.actor"),
    ("actor_rollout_ref.rollout", "log_prob_micro_batch_size", "actor_rollout_ref.actor"),
    ("actor_rollout_ref.ref", "log_prob_micro_batch_size", "actor_rollout_ref.ref"),
    ("critic", "ppo_micro_batch_size", "critic"),
    ("critic", "forward_micro_batch_size", "critic"),
    ("reward_model", "micro_batch_size", "reward_model"),
)


def spread_global_sizes(tree: dict, composed: Any, problems: list[Problem]) -> list[str]:
    """Turn micro-batch sizes that count all ranks into sizes per rank, in place, before others follow them."""
    notices = []
    for place, name, ranks_of in _GLOBAL_SIZES:
        section = section_at(tree, place)
        total, local = section.get(name), section.get(f"{name}_per_gpu")
        if total is None or (is_interpolation(total) and name.startswith("forward")):
            continue  # not given, or following the critic's other size, which is treated on its own
        key = f"{place}.{name}"
        if local is not None and not is_interpolation(local):
            continue  # both given: a rule says so
        total = _peek(tree, composed, key)
        ranks = _ranks(tree, composed, ranks_of)
        if not isinstance(total, int) or ranks is None:
            continue  # the typed tree will complain
        if total % ranks:
            problems.append(
                Problem(
                    key,
                    f"{key}={total} does not spread evenly over {ranks} data-parallel ranks. Set "
                    f"{key}_per_gpu, the size on one rank, instead.",
                )
            )
            continue
        section[f"{name}_per_gpu"], section[name] = total // ranks, None
        notices.append(f"{key}={total} counts all {ranks} ranks and became {key}_per_gpu={total // ranks}")
    return notices


def spread_clip_ratio(tree: dict, given: set[str]) -> None:
    """Let ``clip_ratio`` set both sides unless the user gave a side its own value: else it would do nothing."""
    actor, place = section_at(tree, "actor_rollout_ref.actor"), "actor_rollout_ref.actor"
    if f"{place}.clip_ratio" not in given:
        return
    for side in ("clip_ratio_low", "clip_ratio_high"):
        if f"{place}.{side}" not in given:
            actor[side] = actor.get("clip_ratio")


def _peek(tree: dict, composed: Any, key: str) -> Any:
    """Resolved value of one key; None if it cannot be resolved."""
    raw = at_key(tree, key)
    if not is_interpolation(raw):
        return raw
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.select(composed, key)
    except OmegaConfBaseException:
        return None


def _ranks(tree: dict, composed: Any, place: str) -> int | None:
    numbers = [
        _peek(tree, composed, key)
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node", f"{place}.ulysses_sequence_parallel_size")
    ]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return None
    nodes, per_node, sequence = numbers
    return max(1, nodes * per_node // sequence)
