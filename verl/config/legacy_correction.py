"""How earlier releases of verl asked for what is now ``algorithm.rollout_correction``, in the unresolved tree."""

from typing import Any

from verl.config.base import Problem
from verl.config.build import show
from verl.config.tree import at_key, pop_key, put_key

_NEW = "algorithm.rollout_correction"
_CAP = "actor_rollout_ref.actor.tis_imp_ratio_cap"
_RATIOS = ("rollout_is_threshold", "rollout_is_threshold_lower", "rollout_is_level", "rollout_is_mode")
_OLD = ("rollout_is", *_RATIOS, "rollout_is_veto_threshold", "rollout_is_batch_normalize")
"""Keys of release 0.6.0, which stood below ``algorithm`` itself."""


CORRECTION_KEYS = (_CAP, *(f"algorithm.{name}" for name in _OLD), f"{_NEW}.use_policy_gradient")
"""The old keys that are understood here."""


def translate_correction(tree: dict, given: set[str], problems: list[Problem]) -> list[str]:
    """Rename what older releases called the correction, in place; mark the new names as given.

    A cap of importance ratios (2025-08), the keys below ``algorithm`` of 0.6.0, and ``use_policy_gradient`` of 0.6.1.

    Returns:
        One sentence per old name found. Clashes with a new name the user also gave go to ``problems``.
    """
    meant: dict[str, Any] = {}
    notices = []
    is_there, cap = pop_key(tree, _CAP)
    if is_there:
        given.discard(_CAP)
        if _is_positive(cap):
            meant |= {"rollout_is": "token", "rollout_is_threshold": cap}
            notices.append(f"{_CAP} is now {_NEW}.rollout_is=token with rollout_is_threshold={show(cap)}")
        else:
            notices.append(f"{_CAP}={show(cap)} is off, and no longer exists")
    old = {}
    for name in _OLD:
        is_there, value = pop_key(tree, f"algorithm.{name}")
        if is_there:
            given.discard(f"algorithm.{name}")
            old[name] = value
    if old:
        now = _of_release_060(old)
        meant |= now
        said = ", ".join(f"{name}={show(value)}" for name, value in now.items()) or "the defaults: nothing is corrected"
        notices.append(f"{', '.join(f'algorithm.{name}' for name in old)} became {_NEW}: {said}")
    is_there, value = pop_key(tree, f"{_NEW}.use_policy_gradient")
    if is_there:
        given.discard(f"{_NEW}.use_policy_gradient")
        meant["loss_type"] = "reinforce" if _is_true(value) else "ppo_clip"
        notices.append(f"{_NEW}.use_policy_gradient={show(value)} is now {_NEW}.loss_type={meant['loss_type']}")
    for name, value in meant.items():
        key = f"{_NEW}.{name}"
        if key in given and at_key(tree, key) != value:
            text = f"{key}={show(at_key(tree, key))} and older names of the same ({show(value)}) disagree. Keep one."
            problems.append(Problem(key, text))
            continue
        put_key(tree, key, value)
        given.add(key)
    return notices


def _of_release_060(old: dict[str, Any]) -> dict[str, Any]:
    """A threshold switched all on: ``rollout_is`` then weighed, ``mask`` and the veto rejected without it too."""
    if not _is_positive(old.get("rollout_is_threshold")):
        return {}
    level, mode = old.get("rollout_is_level", "token"), old.get("rollout_is_mode", "truncate")
    upper, lower = old["rollout_is_threshold"], old.get("rollout_is_threshold_lower")
    now: dict[str, Any] = {}
    if _is_true(old.get("rollout_is")):
        now |= {"rollout_is": level, "rollout_is_threshold": upper}
        if _is_true(old.get("rollout_is_batch_normalize")):
            now["rollout_is_batch_normalize"] = True
    if mode == "mask":
        now |= {"rollout_rs": level, "rollout_rs_threshold": upper}
        if lower is not None:
            now["rollout_rs_threshold_lower"] = lower
    if _is_positive(old.get("rollout_is_veto_threshold")):
        now["rollout_token_veto_threshold"] = old["rollout_is_veto_threshold"]
    return now


def _is_true(value: Any) -> bool:
    return value is True or str(value).lower() == "true"


def _is_positive(value: Any) -> bool:
    try:
        return value is not None and not isinstance(value, bool) and float(value) > 0
    except (TypeError, ValueError):
        return False
