"""Names of verl's asynchronous trainers: sections ``async_training``, ``rollout`` and ``trainer.v1``.

There is one trainer here, with ``rollout.max_staleness``. What has the same meaning is translated; the rest stays in
the tree, and is refused by the name of its feature.
"""

from __future__ import annotations

import math
from typing import Any

from verl.config.base import Problem
from verl.config.features import feature_of_key, not_built
from verl.config.tree import at_key, flatten, is_interpolation, pop_key, put_key, show

_ASYNC, _V1 = "async_training", "trainer.v1"
_ROLLOUT, _SAMPLER = "actor_rollout_ref.rollout", f"{_V1}.sampler"
_MINI, _BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size", "data.train_batch_size"

_STEPS = 4
"""Default of ``async_training.trigger_parameter_sync_step``."""

_WITHOUT_EFFECT = {
    "checkpoint_engine.enable": "weights always cross over in buckets",
    "checkpoint_engine.overlap_broadcast_and_consume": "weights always cross over in buckets",
    "use_trainer_do_validate": "the rollout's engines generate for validation",
}
_KEYS = (
    *("staleness_threshold", "trigger_parameter_sync_step", "require_batches", "partial_rollout"),
    *("use_rollout_log_probs", "compute_prox_log_prob", "checkpoint_engine.device_buffer_size_M", *_WITHOUT_EFFECT),
)
_V1_KEYS = (
    *("trainer_mode", "separate_async.num_warmup_batches", "separate_async.parameter_sync_step"),
    *("colocate_async.num_warmup_batches", "sampler.max_off_policy_threshold", "sampler.max_off_policy_strategy"),
)
_MODES = ("sync", "colocate_async", "separate_async")
_SAMPLERS = ("custom_sampler", "sampler_kwargs", "sync_refill_failed_groups")
ASYNC_KEYS = (
    *(f"{_ASYNC}.{name}" for name in _KEYS),
    *("rollout.total_rollout_steps", "rollout.test_freq"),
    *(f"{_V1}.{name}" for name in _V1_KEYS),
)
"""Names that are understood here."""


class _Names:
    """Takes names out of a tree and puts in what they mean.

    Args:
        as `translate_async`.
    """

    def __init__(self, tree: dict, given: set[str], problems: list[Problem]) -> None:
        self.tree, self.given, self.problems = tree, given, problems
        self.messages: list[str] = []

    def take(self, key: str, *kinds: type) -> Any:
        """Remove a key with a value of these kinds and return it; None where there is none: what is left is refused."""
        value = at_key(self.tree, key)
        is_kind = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if not is_kind or is_interpolation(value):
            return None
        pop_key(self.tree, key)
        self.given.discard(key)
        return value

    def put(self, old: str, value: Any, new: str, result: Any) -> None:
        """Set ``new``, unless the user did; say so."""
        own = at_key(self.tree, new)
        if new in self.given and own != result and not is_interpolation(own):
            text = f"{old}={show(value)} means {new}={show(result)}, and {new}={show(own)} was given. Keep one of them."
            self.problems.append(Problem(new, text))
            return
        put_key(self.tree, new, result)
        self.given.add(new)
        self.messages.append(f"{old}={show(value)} is {new}={show(result)}")


def translate_async(tree: dict, given: set[str], problems: list[Problem]) -> list[str]:
    """Translate names of verl's fully asynchronous and V1 trainers, in place.

    Args:
        tree: the unresolved tree.
        given: dotted keys of what the user set; changed.
        problems: gets what contradicts another setting.

    Returns:
        One sentence per name found.
    """
    names = _Names(tree, given, problems)
    if isinstance(at_key(tree, _ASYNC), dict):
        _fully_async(names)
    if isinstance(at_key(tree, _V1), dict):
        _v1(names)
    if (freq := names.take("rollout.test_freq", int)) is not None:
        names.put("rollout.test_freq", freq, "trainer.test_freq", freq)
    return names.messages


def _apart(names: _Names, old: str, value: Any, staleness: int, is_partial: bool) -> None:
    """Engines on devices of their own, ``staleness`` steps ahead."""
    names.put(old, value, f"{_ROLLOUT}.max_staleness", staleness)
    names.put(old, value, "actor_rollout_ref.hybrid_engine", False)
    names.put(old, value, f"{_ROLLOUT}.mode", "async")
    if staleness:
        names.put(old, value, f"{_ROLLOUT}.calculate_log_probs", True)
        names.put(old, value, f"{_ROLLOUT}.partial_rollout", is_partial)


def _fully_async(names: _Names) -> None:
    old = f"{_ASYNC}.staleness_threshold"
    is_partial = names.take(f"{_ASYNC}.partial_rollout", bool)
    threshold = names.take(old, int, float)
    if threshold is not None or is_partial is not None:
        # groups, not shares of a batch, are counted: the bound that admits the share
        staleness = math.ceil(threshold) if threshold is not None else 1
        _apart(names, old, threshold, staleness, is_partial is not False)
    _batches(names)
    uses = names.take(f"{_ASYNC}.use_rollout_log_probs", bool)
    computes = names.take(f"{_ASYNC}.compute_prox_log_prob", bool)
    if uses is not None:
        new = "algorithm.rollout_correction.bypass_mode"
        names.put(f"{_ASYNC}.use_rollout_log_probs", uses, new, uses and not computes)
        if uses:
            names.put(f"{_ASYNC}.use_rollout_log_probs", uses, f"{_ROLLOUT}.calculate_log_probs", True)
    size = names.take(f"{_ASYNC}.checkpoint_engine.device_buffer_size_M", int)
    if size is not None:
        new = f"{_ROLLOUT}.update_weights_bucket_megabytes"
        names.put(f"{_ASYNC}.checkpoint_engine.device_buffer_size_M", size, new, size)
    for name, why in _WITHOUT_EFFECT.items():
        value = names.take(f"{_ASYNC}.{name}", bool)
        if value is not None:
            names.messages.append(f"{_ASYNC}.{name}={show(value)} has no effect: {why}")


def _batches(names: _Names) -> None:
    """A step here is all that is trained on between two syncs of the weights."""
    syncs, requires = f"{_ASYNC}.trigger_parameter_sync_step", f"{_ASYNC}.require_batches"
    steps, batches = names.take(syncs, int), names.take(requires, int)
    mini = at_key(names.tree, _MINI)
    is_open = at_key(names.tree, _BATCH) in (0, None)  # 0 says that these two decide
    if (is_open or steps is not None or batches is not None) and isinstance(mini, int):
        if is_open:
            names.given.discard(_BATCH)
        steps, batches = steps or _STEPS, batches or 1
        names.put(f"{syncs} x {requires} x {_MINI}", f"{steps} x {batches} x {mini}", _BATCH, steps * batches * mini)
        _one_by_one(names)
    total, size = names.take("rollout.total_rollout_steps", int), at_key(names.tree, _BATCH)
    if total is not None and isinstance(size, int) and size > 0:
        names.put("rollout.total_rollout_steps", total, "trainer.total_training_steps", max(1, total // size))


def _one_by_one(names: _Names) -> None:
    """Drop the batch of generation that trainers with engines of their own ask for."""
    if at_key(names.tree, "data.gen_batch_size") == 1:
        put_key(names.tree, "data.gen_batch_size", None)
        names.messages.append("data.gen_batch_size=1 has no effect: groups are generated one by one anyway")


def _v1(names: _Names) -> None:
    if at_key(names.tree, "trainer.use_v1") is False:
        return  # nothing reads the section, and a warning says so
    _refuse_samplers(names)
    old, strategy = f"{_V1}.trainer_mode", f"{_SAMPLER}.max_off_policy_strategy"
    mode = at_key(names.tree, old)
    if not mode or is_interpolation(mode):  # nothing is asked for
        return
    if mode not in _MODES:
        names.problems.append(_asks_for(old, mode, f" Its modes are {', '.join(_MODES)}."))
    names.take(old, str)
    names.take("trainer.use_v1", bool)
    if mode not in _MODES[1:]:
        return
    if (value := at_key(names.tree, strategy)) not in (None, "drop", "wait"):
        text = (
            f"{strategy}={show(value)}: a step waits for groups that would be too old for the next one, and samples "
            "with tokens beyond the bound are generated again. Set drop or wait, or leave it out."
        )
        names.problems.append(Problem(strategy, text))
    names.take(strategy, str)
    ahead = names.take(f"{_V1}.{mode}.num_warmup_batches", int)
    bound = names.take(f"{_SAMPLER}.max_off_policy_threshold", int)
    staleness = next((number for number in (bound, ahead) if number is not None), 1)
    if mode == "colocate_async":
        _in_turns(names, old, mode, 1 if ahead is None else ahead, staleness)
        return
    _apart(names, old, mode, staleness, True)
    _one_by_one(names)
    syncs, mini = f"{_V1}.separate_async.parameter_sync_step", at_key(names.tree, _MINI)
    if isinstance(mini, int) and (steps := names.take(syncs, int)) is not None:
        # a step here is all that is trained on between two syncs of the weights
        names.put(f"{syncs} x {_MINI}", f"{steps} x {mini}", _BATCH, steps * mini)


def _in_turns(names: _Names, old: str, value: str, ahead: int, staleness: int) -> None:
    """Shared devices, with ``ahead`` batches more than a step trains on; what is not complete goes on in the next."""
    is_partial = ahead > 0 and staleness > 0
    names.put(old, value, f"{_ROLLOUT}.mode", "async")
    names.put(old, value, f"{_ROLLOUT}.over_sample_rate", float(ahead))
    names.put(old, value, f"{_ROLLOUT}.partial_rollout", is_partial)
    if is_partial:
        names.put(old, value, f"{_ROLLOUT}.max_staleness", staleness)
        names.put(old, value, f"{_ROLLOUT}.calculate_log_probs", True)


def _refuse_samplers(names: _Names) -> None:
    """Refuse what changes which samples a step of V1 takes, whatever its mode, by the name of the feature."""
    for name in _SAMPLERS:
        place = f"{_SAMPLER}.{name}"
        section = at_key(names.tree, place)
        values = dict(flatten(section, f"{place}.")) if isinstance(section, dict) else {place: section}
        asked = [key for key, value in values.items() if value and not is_interpolation(value)]
        if asked:
            names.problems.append(_asks_for(asked[0], values[asked[0]]))
            pop_key(names.tree, place)
            names.given -= {key for key in names.given if key == place or key.startswith(f"{place}.")}


def _asks_for(key: str, value: Any, more: str = "") -> Problem:
    found = feature_of_key(key)
    assert found is not None, f"{key} has no row in features.yaml"
    return Problem(key, not_built(f"{key}={show(value)}", found.feature) + more)
