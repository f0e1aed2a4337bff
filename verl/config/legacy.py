"""Names of other releases, v0.1 to v0.9: what they are called here, why they are gone, what is not built.

They are understood wherever they come from, YAML or command line, and reported in one warning. Names of v0.6 and later
stand in ``legacy_names.py``, features that are not built in ``features.py``.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from verl.config.base import Problem
from verl.config.features import Feature, FeatureKey, feature_of_backend, feature_of_key, not_built
from verl.config.rollout import DECIDED, HANDED_ON
from verl.config.tree import at_key, flatten, is_interpolation, overlay, pop_key, put_key, section_at, show

# -- What an old name may have become, and the other names that verl's releases from v0.6 on have for options --------


class Moved(NamedTuple):
    """An option that has another name now. ``convert`` gives the new value; None means: leave the new key alone."""

    old: str
    new: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    is_alias: bool = False
    """Not old: a second way to write the key, of which nothing is said."""


class RemovedOption(NamedTuple):
    """An option without successor. Values that ask for nothing are dropped with a warning, any other is an error."""

    old: str
    why: str
    harmless: tuple = ()
    """Values beside null, false and the releases' defaults that ask for what is done anyway."""

    is_alias = False

    def is_harmless(self, value: Any) -> bool:
        """Does this value ask for nothing? ``true`` is not 1."""
        from verl.config.releases import asks_for_nothing, is_release_default, same

        is_listed = any(same(value, item) for item in self.harmless)
        return is_listed or asks_for_nothing(value) or is_release_default(self.old, value)


def _if_true(value: Any) -> bool | None:
    return True if value in (True, "true", "True") else None


def _if_positive(value: Any) -> Any:
    return value if isinstance(value, int | float) and value > 0 else None


_ACTOR, _O, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_R = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"

_OF_ENGINES = tuple(
    move
    for role, fsdp in (
        (_ACTOR, f"{_ACTOR}.fsdp_config"),
        (_R, f"{_R}.fsdp_config"),
        ("critic", "critic.model.fsdp_config"),
    )
    for move in (
        Moved(f"{fsdp}.dtype", (f"{fsdp}.mixed_precision.param_dtype",)),
        Moved(f"{fsdp}.ulysses_sequence_parallel_size", (f"{role}.ulysses_sequence_parallel_size",)),
        Moved(f"{fsdp}.strategy", (f"{role}.strategy",)),
    )
)

SECTIONS = {
    "critic.fsdp": "critic.model.fsdp_config",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.custom_reward_function": "custom_reward_function",
}
"""Sections that have another place now, with all below them."""

_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def _layers(value: Any) -> Any:
    """Megatron's names of layers as those of Hugging Face; an empty list as null; all of them as ``all-linear``."""
    if not isinstance(value, list):
        return value
    if set(value) == set(_MEGATRON_LAYERS):
        return "all-linear"
    return [name for layer in value for name in _MEGATRON_LAYERS.get(layer, (layer,))] or None


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _unless(*defaults: Any) -> Callable[[Any], Any]:
    """Conversion that leaves the new key alone for an engine's own default."""
    return lambda value: None if value in defaults else value


LATER_MOVED: tuple[Moved, ...] = (
    # v0.6: Ray and profilers
    Moved("ray_kwargs.timeline_json_file", ("ray_init.timeline_json_file",)),
    *(
        Moved(f"ray_kwargs.ray_init.{name}", (f"ray_init.{name}",))
        for name in ("num_cpus", "runtime_env", "include_dashboard")
    ),
    Moved(f"{_ACTOR}.use_rollout_log_probs", (f"{_CORRECTION}.bypass_mode",), _if_true),
    # v0.6 and later: one engine of training, one of rollout
    *_OF_ENGINES,
    *(Moved(f"{place}.optim.clip_grad", (f"{place}.grad_clip",)) for place in (_ACTOR, "critic")),
    *(Moved(f"{place}.optim.lr_decay_style", (f"{place}.optim.warmup_style",), _lower) for place in (_ACTOR, "critic")),
    *(
        Moved(f"{place}.optim.lr_decay_steps", (f"{place}.optim.total_training_steps",), _if_positive)
        for place in (_ACTOR, "critic")
    ),
    *(
        Moved(f"{role}.fsdp_config.{name}", (f"{role}.{name}",))
        for role in (_ACTOR, _R)
        for name in ("use_torch_compile", "entropy_checkpointing", "entropy_from_logits_with_chunking")
    ),
    *(Moved(f"{_ACTOR}.policy_loss.{name}", (f"{_ACTOR}.{name}",)) for name in ("tau_pos", "tau_neg")),
    *(Moved(f"{role}.rollout_n", (f"{_O}.n",)) for role in (_ACTOR, _R)),
    Moved(f"{_O}.scheduling_policy", (f"{_O}.engine_kwargs.vllm.scheduling_policy",), _unless("fcfs")),
    Moved(f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu", (f"{_O}.log_prob_micro_batch_size_per_gpu",), _if_positive),
    Moved(f"{_ACTOR}.ppo_infer_max_token_len_per_gpu", (f"{_O}.log_prob_max_token_len_per_gpu",), _if_positive),
    Moved(f"{_ACTOR}.use_prefix_grouper", (f"{_M}.use_prefix_sharing",), _if_true),
    Moved(f"{_O}.cudagraph_capture_sizes", (f"{_O}.engine_kwargs.vllm.cudagraph_capture_sizes",)),
    Moved(f"{_O}.enable_prefix_caching", (f"{_O}.engine_kwargs.vllm.enable_prefix_caching",)),
    *(Moved(f"{place}.enable", (f"{_O}.skip_rollout",)) for place in (f"{_O}.skip", "skip.rollout")),
    *(Moved(f"{place}.dump_dir", (f"{_O}.skip_dump_dir",)) for place in (f"{_O}.skip", "skip.rollout")),
    Moved(f"{_O}.checkpoint_engine.update_weights_bucket_megabytes", (f"{_O}.update_weights_bucket_megabytes",)),
    *(
        Moved(f"{model}.lora.{name}", (f"{model}.lora_{name}",))
        for model in (_M, "critic.model")
        for name in ("rank", "alpha", "adapter_path")
    ),
    *(
        Moved(f"{model}.lora.{name}", (f"{model}.{name}",), _layers)
        for model in (_M, "critic.model")
        for name in ("target_modules", "exclude_modules")
    ),
    Moved(f"{_M}.tokenizer_path", ("data.tokenizer",)),
    *(Moved(f"{role}.nccl_timeout", ("actor_rollout_ref.nccl_timeout",)) for role in ("critic", "reward_model")),
    # v0.7: one section of rewards
    *(Moved(f"{name}.name", ("reward_model.reward_manager",)) for name in ("reward.reward_manager", "reward_manager")),
    Moved("reward.reward_kwargs", ("reward_model.reward_kwargs",)),
    Moved("reward.reward_model.enable", ("reward_model.enable",)),
    Moved("reward.reward_model.model_path", ("reward_model.model.path",)),
    # guides of other trainers
    Moved("trainer.rpc_timeout", ("trainer.worker_timeout",), is_alias=True),
    Moved("trainer.logger_kwargs", ("trainer.tracker_kwargs",), is_alias=True),
)

# -- How earlier releases of verl asked for what is now ``algorithm.rollout_correction``, in the unresolved tree -----


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
    messages = []
    is_there, cap = pop_key(tree, _CAP)
    if is_there:
        given.discard(_CAP)
        if _is_positive(cap):
            meant |= {"rollout_is": "token", "rollout_is_threshold": cap}
            messages.append(f"{_CAP} is now {_NEW}.rollout_is=token with rollout_is_threshold={show(cap)}")
        else:
            messages.append(f"{_CAP}={show(cap)} is off, and no longer exists")
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
        messages.append(f"{', '.join(f'algorithm.{name}' for name in old)} became {_NEW}: {said}")
    is_there, value = pop_key(tree, f"{_NEW}.use_policy_gradient")
    if is_there:
        given.discard(f"{_NEW}.use_policy_gradient")
        meant["loss_type"] = "reinforce" if _is_true(value) else "ppo_clip"
        messages.append(f"{_NEW}.use_policy_gradient={show(value)} is now {_NEW}.loss_type={meant['loss_type']}")
    for name, value in meant.items():
        key = f"{_NEW}.{name}"
        if key in given and at_key(tree, key) != value:
            text = f"{key}={show(at_key(tree, key))} and older names of the same ({show(value)}) disagree. Keep one."
            problems.append(Problem(key, text))
            continue
        put_key(tree, key, value)
        given.add(key)
    return messages


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


PREFIX = "backend_config"
"""Launchers nest the whole tree under this name; it is stripped."""


def _one_if_true(value: Any) -> int | None:
    return 1 if value in (True, "true", "True") else None


def _strict_or_off(value: Any) -> str:
    return "strict" if value in (True, "true", "True") else "disable"


_A = "actor_rollout_ref"
_FSDP = (f"{_A}.actor.fsdp_config", f"{_A}.ref.fsdp_config", "critic.model.fsdp_config")

MOVED: tuple[Moved, ...] = (
    Moved(f"{_A}.actor.checkpoint.contents", (f"{_A}.actor.checkpoint.save_contents",)),
    Moved("critic.checkpoint.contents", ("critic.checkpoint.save_contents",)),
    Moved("trainer.val_generations_to_log_to_wandb", ("trainer.log_val_generations",)),
    Moved(
        "trainer.remove_previous_ckpt_in_save",
        ("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"),
        _one_if_true,
    ),
    Moved(f"{_A}.rollout.seed", ("trainer.seed",)),
    Moved(f"{_A}.rollout.multi_turn.max_turns", (f"{_A}.rollout.multi_turn.max_assistant_turns",)),
    Moved(
        f"{_A}.rollout.multi_turn.enable_tokenization_sanity_check",
        (f"{_A}.rollout.multi_turn.tokenization_sanity_check_mode",),
        _strict_or_off,
    ),
    *(
        Moved(f"{place}.min_num_params", (f"{place}.wrap_policy.min_num_params",))
        for place in (*_FSDP, "reward_model.model.fsdp_config")
    ),
    *(
        Moved(f"{place}.lr_scheduler_type", (f"{place}.warmup_style",), is_alias=True)
        for place in (f"{_A}.actor.optim", "critic.optim")
    ),
    Moved("rollout.nnodes", (f"{_A}.rollout.nnodes",)),
    Moved("rollout.n_gpus_per_node", (f"{_A}.rollout.n_gpus_per_node",)),
    Moved("async_generation_ratio", (f"{_A}.rollout.async_ratio",)),
    *(
        Moved(f"{place}.{name}", (f"{place}.sampling_kwargs.{name}",), is_alias=True)
        for place in (f"{_A}.rollout", f"{_A}.rollout.val_kwargs")
        for name in (*HANDED_ON, *DECIDED)
        if f"{place}.{name}" != f"{_A}.rollout.seed"
    ),
    *(
        Moved(f"algorithm.{name}", (f"algorithm.{key}",), is_alias=True)
        for name, key in (
            ("reward_norm.mean", "reward_shaping.norm.mean"),
            ("reward_norm.std", "reward_shaping.norm.std"),
            ("reward_clip", "reward_shaping.clip"),
            ("whiten_rewards", "reward_shaping.whiten"),
            ("whiten_advantages", "advantage.whiten"),
            ("advantage_clip", "advantage.clip"),
        )
    ),
    *(
        Moved(f"reward_model.{old}", (f"algorithm.reward_shaping.overlong_buffer.{new}",), is_alias=old[:3] == "len")
        for old, new in (
            ("len_reward.enable", "enable"),
            ("len_reward.buffer", "len"),
            ("len_reward.coef", "penalty_factor"),
            ("overlong_buffer.enable", "enable"),
            ("overlong_buffer.len", "len"),
            ("overlong_buffer.penalty_factor", "penalty_factor"),
        )
    ),
    *LATER_MOVED,
    Moved("af_output_dir", ("trainer.default_local_dir",)),
    Moved(
        "engine_kwargs.vllm.disable_mm_preprocessor_cache",
        (f"{_A}.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache",),
    ),
)

REMOVED: tuple[RemovedOption, ...] = (
    *(
        RemovedOption(
            f"{place}.grad_offload",
            "gradients are freed after each update and follow the parameters otherwise; "
            "set param_offload and optimizer_offload",
            (True,),
        )
        for place in _FSDP
    ),
    *(RemovedOption(f"{place}.use_orig_params", "parameters always keep their own shape", (True,)) for place in _FSDP),
    RemovedOption("reward_model.overlong_buffer.log", "reward_shaping/* is always logged", (True,)),
    RemovedOption(
        "data.chat_template_func", "set actor_rollout_ref.model.custom_chat_template, or use data.custom_cls"
    ),
    RemovedOption("data.filter_prompts", "set data.filter_overlong_prompts", (True,)),
    RemovedOption(
        f"{_A}.actor.recompute_old_log_prob",
        f"old log-probs are recomputed, unless {_A}.actor.skip_old_log_probs=true",
        (True,),
    ),
    RemovedOption("trainer.wandb_proxy", "set the environment variables HTTP_PROXY and HTTPS_PROXY"),
)

_BY_NAME: dict[str, Moved | RemovedOption] = {entry.old: entry for entry in (*MOVED, *REMOVED)}


ALIASES = tuple(entry.old for entry in MOVED if entry.is_alias)
"""Second ways to write a key."""


def is_legacy(key: str) -> bool:
    """Is this a name that a release of verl has for an option, or for something that is not built?"""
    return entry_of(key) is not None or key in CORRECTION_KEYS or feature_of_key(today(key)) is not None


def today(key: str) -> str:
    """``key`` with the present name of its section: ``critic.fsdp.x`` -> ``critic.model.fsdp_config.x``."""
    for old, new in SECTIONS.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def entry_of(key: str) -> Moved | RemovedOption | None:
    """The row of an old name: its own, or that of the section it stands in."""
    key = today(key)
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def replacement(key: str) -> str | None:
    """What to use in place of a name of another release, as a sentence; None for a name that is none."""
    key = strip_prefix(key)
    entry = entry_of(key)
    if isinstance(entry, Moved):
        return f"{key} is now called {' and '.join(entry.new)}."
    if entry:
        return f"{key} no longer exists: {entry.why}."
    if today(key) != key:
        return f"{key} is now called {today(key)}."
    found = feature_of_key(key)
    return not_built(key, found.feature) if found else None


def strip_prefix(key: str) -> str:
    """``backend_config.data.x`` -> ``data.x``."""
    return key.removeprefix(f"{PREFIX}.")


def translate(
    tree: dict, given: set[str], problems: list[Problem], resolved: Callable[[str], Any] = lambda key: None
) -> list[str]:
    """Rename old options in the unresolved ``tree``, in place; mark the new names as given.

    Args:
        resolved: the value behind the interpolation at an old key, None if it leads nowhere.

    Returns:
        One sentence per old name found. Clashes with a new name the user also gave go to ``problems``.
    """
    messages = []
    if isinstance(tree.get(PREFIX), dict):
        nested = tree.pop(PREFIX)
        overlay(tree, nested)
        given.update(key for key, _ in flatten(nested))
        messages.append(f"{PREFIX}.* is read as the tree itself: leave the prefix out")
    for old, new in SECTIONS.items():
        present, values = pop_key(tree, old)
        if not present:
            continue
        messages.append(f"{old} is now called {new}")
        leaves = flatten(values, f"{old}.") if isinstance(values, dict) else ()
        given -= {key for key in given if key == old or key.startswith(f"{old}.")}
        for key, value in leaves:
            if is_interpolation(value) and not feature_of_key(today(key)):
                value = resolved(key)
            if value not in (None, {}):
                _rename(tree, given, problems, key, value, today(key))
    for old, entry in _BY_NAME.items():
        present, value = pop_key(tree, old)
        if not present:
            continue
        value = (resolved(old) if is_interpolation(value) else value) if not entry.is_alias else value
        given -= {key for key in given if key == old or key.startswith(f"{old}.")}
        if isinstance(entry, RemovedOption):
            if entry.is_harmless(value):
                messages.append(f"{old} no longer exists and is ignored: {entry.why}")
            else:
                problems.append(Problem(old, f"{old}={show(value)} no longer exists: {entry.why}."))
            continue
        if not entry.is_alias:
            messages.append(f"{old} is now called {' and '.join(entry.new)}")
        converted = None if value == {} else entry.convert(value)
        for new in entry.new:
            if converted is not None or entry.is_alias:
                _rename(tree, given, problems, old, converted, new, value)
    return messages


def _rename(
    tree: dict, given: set[str], problems: list[Problem], old: str, value: Any, new: str, shown: Any = None
) -> None:
    """Put the value of an old key at its new one; the user's value of the new one goes before a mere default."""
    from verl.config.releases import is_release_default, same

    if new in given and not same(at_key(tree, new), value):
        shown = value if shown is None else shown
        if not is_release_default(old, shown):
            problems.append(
                Problem(
                    new,
                    f"{old}={show(shown)} and {new}={show(at_key(tree, new))} disagree: they are the same option. "
                    f"Keep the second.",
                )
            )
        return
    put_key(tree, new, value)
    given.add(new)


# ----------------------------------------------------------------------------------------------- what is not built
def set_features_aside(
    tree: dict, given: set[str], problems: list[Problem], is_known: Callable[[str], bool]
) -> list[str]:
    """Take out of the unresolved ``tree``, in place, what belongs to features that are not built.

    A value that asks for nothing, or for what a release does anyway, is left out; any other goes to ``problems``,
    unless the feature is switched off, or changes no number.

    Args:
        is_known: is this dotted key an option or free-form?

    Returns:
        One sentence about values that ask for nothing, and one for each other that has no effect.
    """
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model"):
        name = section_at(tree, role).get("strategy")
        feature = feature_of_backend(name) if isinstance(name, str) else None
        if feature:
            problems.append(Problem(f"{role}.strategy", not_built(f"{role}.strategy={name}", feature)))
            del section_at(tree, role)["strategy"]
    quiet: dict[str, list[str]] = {}
    messages = []
    before = dict(flatten(tree))
    for key, value in before.items():
        found = None if is_known(key) else feature_of_key(key)
        if found is None:
            continue
        pop_key(tree, key)
        given -= {name for name in given if name == key or key.startswith(f"{name}.")}
        if key.endswith("._target_") or _asks_for_nothing(key, value, found.feature):
            quiet.setdefault(found.feature.name, []).append(key)
        elif found.feature.is_free or _is_off(found, key, before):
            off = "off, and not built" if found.feature.switches else "not built"
            messages.append(
                f"{key}={show(value)} has no effect: it is for {found.feature.name} ({off}). "
                f"{found.feature.instead.rstrip('.')}"
            )
        else:
            problems.append(Problem(key, not_built(f"{key}={show(value)}", found.feature)))
    if quiet:
        messages.insert(0, "not built, and not asked for: " + "; ".join(_counted(quiet)))
    return messages


def _counted(quiet: dict[str, list[str]]) -> Iterator[str]:
    for name, keys in quiet.items():
        more = f" and {len(keys) - 2} more" if len(keys) > 2 else ""
        yield f"{name} ({', '.join(keys[:2])}{more})"


def _asks_for_nothing(key: str, value: Any, feature: Feature) -> bool:
    from verl.config.releases import asks_for_nothing, is_release_default, same, unquoted

    said, value = value, unquoted(value)
    if is_interpolation(value):  # what it follows is judged itself
        return True
    if asks_for_nothing(value):
        return not any(same(value, item) for item in feature.asks)
    names = [key, *(old + key[len(new) :] for old, new in SECTIONS.items() if key.startswith(f"{new}."))]
    if value == 0 and any(is_release_default(name, False) for name in names):
        return True  # 0 at a switch
    if any(same(value, item) for item in feature.takes):
        return True
    return any(is_release_default(name, item) for name in names for item in (said, value))


def _is_off(found: FeatureKey, key: str, values: dict[str, Any]) -> bool:
    """Has the feature switches, all of them off, of which ``key`` is none?"""
    parent = key.rpartition(".")[0]
    places = [parent if key == found.section else found.section]
    while parent.startswith(f"{found.section}."):
        places.append(parent)
        parent = parent.rpartition(".")[0]
    switches = [
        name
        for switch in found.feature.switches
        for name in ([f"{place}{switch}" for place in places] if switch.startswith(".") else [switch])
    ]
    if not switches or key in switches:
        return False
    return all(_asks_for_nothing(name, values.get(name), found.feature) for name in switches)


def translate_logger(tree: dict) -> list[str]:
    """``tracking``, the old name of the logger ``wandb``, in the unresolved ``tree``, in place."""
    logger = at_key(tree, "trainer.logger")
    names = [logger] if isinstance(logger, str) else list(logger or [])
    if "tracking" not in names:
        return []
    put_key(tree, "trainer.logger", list(dict.fromkeys("wandb" if name == "tracking" else name for name in names)))
    return ["trainer.logger: tracking is now called wandb"]


_SAME = {
    "algorithm.adv_estimator": {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"},
    "actor_rollout_ref.actor.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
    "critic.optim.optimizer": {"adam": "AdamW", "adamw": "AdamW"},
}
"""Option -> other names of its values: estimators that are vectorised here, Megatron's Adam with decoupled decay."""


def translate_values(tree: dict) -> list[str]:
    """Other names of what a value chooses, in the unresolved ``tree``, in place."""
    messages = []
    for key, names in _SAME.items():
        value = at_key(tree, key)
        if isinstance(value, str) and value in names:
            put_key(tree, key, names[value])
            messages.append(f"{key}: {value} is called {names[value]}")
    return messages
