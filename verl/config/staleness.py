"""Options that ``rollout.max_staleness`` decides, set before others follow them."""

from collections.abc import Callable
from typing import Any

from verl.config.tree import put_key, show

ROLLOUT, HYBRID = "actor_rollout_ref.rollout", "actor_rollout_ref.hybrid_engine"
BOUND, PARTIAL = f"{ROLLOUT}.max_staleness", f"{ROLLOUT}.partial_rollout"
LOSS, WEIGHTS = "actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.rollout_correction.rollout_is"

Peek = Callable[[str], Any]


def follow_staleness(tree: dict, given: set[str], peek: Peek) -> list[str]:
    """Let old weights bring what they need: engines that generate all the time, and importance weights of their tokens.

    An option that the user gave stays; ``verl.config.checks`` refuses one that contradicts.

    Args:
        tree: the composed tree; it is changed.
        given: dotted keys the user set.
        peek: value of a key, interpolations resolved; None if that fails.

    Returns:
        One sentence for each of the two that is done.
    """
    return [*_generate_all_the_time(tree, given, peek), *_weigh_old_tokens(tree, given, peek)]


def _generate_all_the_time(tree: dict, given: set[str], peek: Peek) -> list[str]:
    """Set what more than one step ahead needs."""
    bound = peek(BOUND)
    is_ahead = isinstance(bound, int | float) and bound > 1
    # deferred prompts of shared devices have a bound of their own
    if not is_ahead or peek(f"{ROLLOUT}.over_sample_rate") or (HYBRID in given and peek(HYBRID)):
        return []
    needs: dict[str, Any] = {HYBRID: False, f"{ROLLOUT}.mode": "async"}
    if f"{ROLLOUT}.mode" not in given or peek(f"{ROLLOUT}.mode") == "async":
        needs |= {PARTIAL: True, f"{ROLLOUT}.calculate_log_probs": True}
    missing = {key: value for key, value in needs.items() if key not in given and peek(key) != value}
    for key, value in missing.items():
        put_key(tree, key, value)
    if not missing:
        return []
    *others, last = [f"{key}={show(value)}" for key, value in missing.items()]
    said = f"{', '.join(others)} and {last} are used" if others else f"{last} is used"
    if HYBRID in missing:
        said += f". The rollout has {ROLLOUT}.nnodes x n_gpus_per_node devices of its own (null: as many as trainer's)"
    return [f"{BOUND}={bound} has engines generate all the time: {said}"]


def _weigh_old_tokens(tree: dict, given: set[str], peek: Peek) -> list[str]:
    """Switch truncated importance sampling on where responses have tokens of several versions of the weights."""
    staleness = 1 if peek(BOUND) is None else peek(BOUND)
    has_versions = peek(PARTIAL) is True and (peek(HYBRID) is False or peek(f"{ROLLOUT}.over_sample_rate"))
    correction = WEIGHTS.rpartition(".")[0]
    if not staleness or not has_versions or peek(WEIGHTS) or given & {WEIGHTS, correction}:
        return []
    corrected = peek(f"{correction}.bypass_mode") or peek(f"{correction}.rollout_rs") or peek(LOSS) == "tis"
    cannot = not peek(f"{ROLLOUT}.calculate_log_probs") or peek("actor_rollout_ref.actor.skip_old_log_probs") is True
    if corrected or cannot or not peek("actor_rollout_ref.actor.rl_loss_coef"):
        return []
    # imported here: it reads the files of all losses
    from verl.config.checks.support import options_read

    # a loss of the user's need not take weights
    if peek(LOSS) not in options_read("losses"):
        return []
    put_key(tree, WEIGHTS, "token")
    return [
        f"{WEIGHTS}=token is used: {PARTIAL}=true trains on tokens of earlier weights ({BOUND}={staleness}), whose "
        f"loss is multiplied by min(pi_old / pi_rollout, rollout_is_threshold={peek(f'{WEIGHTS}_threshold')}). Set "
        "rollout_is=false to leave that out"
    ]
