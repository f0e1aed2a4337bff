"""Other ways of saying the same thing, rewritten in the unresolved tree so that others may follow the result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.config.base import Config, Problem
from verl.config.build import fits, is_text, show
from verl.config.releases import asks_for_nothing
from verl.config.tree import at_key, flatten, is_interpolation, pop_key, put_key, section_at

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


def drop_empty_requests(tree: dict, given: set[str], root: type[Config], defaults: Callable[[], dict]) -> list[str]:
    """Let null, false, {} and [] ask for nothing, in place, at options that cannot hold them.

    False becomes ``off``, null or 0, the first that the option can hold. What is left keeps its default.

    Args:
        defaults: the tree without anything of the user's.
    """
    kept = []
    for key, value in list(flatten(tree)):
        if not asks_for_nothing(value) or value == "":
            continue
        if fits(root, key, value) is not False and not (value is False and is_text(root, key)):
            continue
        choices = ("off", None, 0) if value is False and not is_text(root, key) else (None,)
        meant = [choice for choice in choices if fits(root, key, choice)]
        if meant:
            put_key(tree, key, meant[0])
            continue
        default = at_key(defaults(), key)
        pop_key(tree, key)
        given.discard(key)
        if default is not None:
            put_key(tree, key, default)
        kept.append(f"{key}={show(value)} ({show(default)})")
    return [f"a value that asks for nothing keeps the default: {', '.join(kept)}"] if kept else []


def adopt_adapter(tree: dict, given: set[str], composed: Any) -> list[str]:
    """Let ``lora_adapter_path`` bring rank, scale and layers of its adapter, in place, where the user gave none."""
    notices = []
    for place in ("actor_rollout_ref.model", "critic.model"):
        section = section_at(tree, place)
        path = _peek(tree, composed, f"{place}.lora_adapter_path")
        if not isinstance(path, str) or section.get("lora_rank") or f"{place}.lora_rank" in given:
            continue
        try:
            adapter = json.loads((Path(path).expanduser() / "adapter_config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # whether the folder holds an adapter is looked at with the other files
        found = {"lora_rank": adapter.get("r"), "lora_alpha": adapter.get("lora_alpha")}
        found["target_modules"] = adapter.get("target_modules")
        brought = {name: value for name, value in found.items() if value and f"{place}.{name}" not in given}
        section.update(brought)
        notices.append(
            f"{place}.lora_adapter_path={path} brings "
            + ", ".join(f"{name}={show(value)}" for name, value in brought.items())
        )
    return notices


def open_servers(tree: dict, given: set[str], composed: Any) -> None:
    """Let servers that other nodes must reach listen on all addresses, unless the user named one."""
    rollout, key = section_at(tree, "actor_rollout_ref.rollout"), "actor_rollout_ref.rollout.server_host"
    together = _peek(tree, composed, "actor_rollout_ref.hybrid_engine")
    nodes = _peek(tree, composed, f"{'trainer' if together else 'actor_rollout_ref.rollout'}.nnodes")
    if key not in given and rollout.get("mode") == "async" and isinstance(nodes, int) and nodes > 1:
        rollout["server_host"] = "0.0.0.0"


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
