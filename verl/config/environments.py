"""Options that follow from ``env.train`` and ``env.val`` where environment groups are the rows of a run."""

from collections.abc import Callable
from typing import Any

from verl.config.env import RewardNormalizationConfig
from verl.config.tree import put_key

SHAPING = "algorithm.reward_shaping"
ROLLOUT = "actor_rollout_ref.rollout"


def follow_normalization(tree: dict, given: set[str], peek: Callable[[str], Any]) -> None:
    """Set the options of ``algorithm.reward_shaping`` that do what ``env.reward_normalization`` says.

    Args:
        tree, given, peek: as of `follow_environments`.
    """
    try:
        options = RewardNormalizationConfig(
            peek("env.reward_normalization.grouping"), peek("env.reward_normalization.method")
        ).shaping
    except KeyError:  # a grouping that does not exist is reported when the tree is typed
        return
    for name, value in options.items():
        if f"{SHAPING}.{name}" not in given:
            put_key(tree, f"{SHAPING}.{name}", value)


def follow_environments(tree: dict, given: set[str], peek: Callable[[str], Any]) -> None:
    """Set what environment groups decide: sampling by agent loops, responses a prompt, prompts a step, no data files.

    An option that the user gave stays; ``verl.config.checks.environments`` refuses one that contradicts.

    Args:
        tree: the composed tree; it is changed.
        given: dotted keys the user set.
        peek: value of a key, interpolations resolved; None if that fails.
    """
    if not peek("env.train.tags"):
        return

    def follow(key: str, value: Any) -> None:
        if key not in given:
            put_key(tree, key, value)

    for size, responses in (
        ("env.train.group_size", f"{ROLLOUT}.n"),
        ("env.val.group_size", f"{ROLLOUT}.val_kwargs.n"),
    ):
        # the one that is given decides
        if responses in given:
            follow(size, peek(responses))
        else:
            follow(responses, peek(size))
    follow(f"{ROLLOUT}.mode", "async")
    groups, episodes, more = (peek(f"env.train.{name}") for name in ("n_groups", "max_traj_per_env", "redundancy"))
    if isinstance(groups, int) and groups > 0:
        follow("data.train_batch_size", groups * max(1, episodes if isinstance(episodes, int) else 1))
        if isinstance(more, int) and more > 0:
            follow(f"{ROLLOUT}.over_sample_rate", more / groups)
    follow("data.train_files", [])
    follow("data.val_files", [])
    follow("data.shuffle", False)
    follow("data.dataloader_num_workers", 0)
