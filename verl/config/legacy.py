"""Names of other releases, v0.1 to v0.9: what they are called here, or why they are gone.

They are understood wherever they come from, YAML or command line, and reported in one warning. Names of v0.6 and later
stand in ``legacy_names.py``.
"""

from typing import Any

from verl.config.base import Problem
from verl.config.build import show
from verl.config.legacy_correction import CORRECTION_KEYS
from verl.config.legacy_names import LATER_GONE, LATER_MOVED, Gone, Moved
from verl.config.sampling_names import DECIDED, HANDED_ON
from verl.config.tree import at_key, flatten, overlay, pop_key, put_key

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
        Moved(f"{_A}.{role}.profiler.{name}", (f"{_A}.profiler.{name}",))
        for role in ("actor", "ref", "rollout")
        for name in ("discrete", "all_ranks", "ranks")
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

_AGENTS = "multi-turn rollout is not supported yet"
GONE: tuple[Gone, ...] = (
    *(
        Gone(
            f"{place}.grad_offload",
            "gradients are freed after each update and follow the parameters otherwise; "
            "set param_offload and optimizer_offload",
            (None, False, True),
        )
        for place in _FSDP
    ),
    *(
        Gone(f"{place}.use_orig_params", "parameters always keep their own shape", (None, False, True))
        for place in _FSDP
    ),
    *(
        Gone(
            f"{place}.optimizer_impl",
            "optim.optimizer=AdamW is torch's, and AdamW8bit torchao's",
            (None, "torch.optim", "torchao.optim"),
        )
        for place in (f"{_A}.actor.optim", "critic.optim")
    ),
    Gone("reward_model.overlong_buffer.log", "reward_shaping/* is always logged", (None, False, True)),
    Gone("data.chat_template_func", "set actor_rollout_ref.model.custom_chat_template, or use data.custom_cls"),
    Gone("data.filter_prompts", "set data.filter_overlong_prompts", (None, True)),
    Gone("data.need_tools_kwargs", _AGENTS),
    Gone(f"{_A}.rollout.multi_turn.completion_callback", f"agent loops take its place, and {_AGENTS}"),
    Gone(f"{_A}.rollout.chat_scheduler", f"agent loops take its place, and {_AGENTS}"),
    Gone(
        f"{_A}.actor.recompute_old_log_prob",
        f"old log-probs are recomputed, unless {_A}.actor.skip_old_log_probs=true",
        (None, True),
    ),
    *LATER_GONE,
    Gone("trainer.wandb_proxy", "set the environment variables HTTP_PROXY and HTTPS_PROXY"),
)

_BY_NAME: dict[str, Moved | Gone] = {entry.old: entry for entry in (*MOVED, *GONE)}


ALIASES = tuple(entry.old for entry in MOVED if entry.is_alias)
"""Second ways to write a key."""


def is_legacy(key: str) -> bool:
    """Is this the name of an option of another release, or of one in a section of such?"""
    return entry_of(key) is not None or key in CORRECTION_KEYS


def entry_of(key: str) -> Moved | Gone | None:
    """The row of an old name: its own, or that of the section it stands in."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((_BY_NAME[name] for name in names if name in _BY_NAME), None)


def replacement(key: str) -> str | None:
    """What to use in place of an old name, as a sentence; None for a name that is not old."""
    entry = entry_of(strip_prefix(key))
    if isinstance(entry, Moved):
        return f"{key} is now called {' and '.join(entry.new)}."
    return f"{key} no longer exists: {entry.why}." if entry else None


def strip_prefix(key: str) -> str:
    """``backend_config.data.x`` -> ``data.x``."""
    return key.removeprefix(f"{PREFIX}.")


def translate(tree: dict, given: set[str], problems: list[Problem]) -> list[str]:
    """Rename old options in the unresolved ``tree``, in place; mark the new names as given.

    Returns:
        One sentence per old name found. Clashes with a new name the user also gave go to ``problems``.
    """
    notices = []
    if isinstance(tree.get(PREFIX), dict):
        nested = tree.pop(PREFIX)
        overlay(tree, nested)
        given.update(key for key, _ in flatten(nested))
        notices.append(f"{PREFIX}.* is read as the tree itself: leave the prefix out")
    for old, entry in _BY_NAME.items():
        present, value = pop_key(tree, old)
        if not present:
            continue
        given -= {key for key in given if key == old or key.startswith(f"{old}.")}
        if isinstance(entry, Gone):
            asked = {key: item for key, item in _settings(old, value) if item not in entry.harmless}
            if not asked:
                notices.append(f"{old} no longer exists and is ignored: {entry.why}")
            else:
                problems += [
                    Problem(key, f"{key}={show(v)} no longer exists: {entry.why}.") for key, v in asked.items()
                ]
            continue
        if not entry.is_alias:
            notices.append(f"{old} is now called {' and '.join(entry.new)}")
        converted = entry.convert(value)
        for new in entry.new:
            if converted is None and not entry.is_alias:
                continue
            if new in given and at_key(tree, new) != converted:
                problems.append(
                    Problem(
                        new,
                        f"{old}={show(value)} and {new}={show(at_key(tree, new))} disagree: they "
                        f"are the same option. Keep the second.",
                    )
                )
                continue
            put_key(tree, new, converted)
            given.add(new)
    return notices


def _settings(old: str, value: Any) -> list[tuple[str, Any]]:
    """(key, value) of what stood below an old name."""
    return (
        list(flatten(value, f"{old}."))
        if isinstance(value, dict) and value
        else [(old, None if value == {} else value)]
    )


def translate_logger(tree: dict) -> list[str]:
    """``tracking``, the old name of the logger ``wandb``, in the unresolved ``tree``, in place."""
    logger = at_key(tree, "trainer.logger")
    names = [logger] if isinstance(logger, str) else list(logger or [])
    if "tracking" not in names:
        return []
    put_key(tree, "trainer.logger", list(dict.fromkeys("wandb" if name == "tracking" else name for name in names)))
    return ["trainer.logger: tracking is now called wandb"]


_SAME_ESTIMATOR = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def translate_estimator(tree: dict) -> list[str]:
    """Names of vectorised implementations, of which there is one each, in the unresolved ``tree``, in place."""
    name = at_key(tree, "algorithm.adv_estimator")
    if name not in _SAME_ESTIMATOR:
        return []
    put_key(tree, "algorithm.adv_estimator", _SAME_ESTIMATOR[name])
    return [f"algorithm.adv_estimator: {name} is {_SAME_ESTIMATOR[name]}, which is vectorised"]
