"""ROLL's agentic sections: environment managers, environments by tag, normalization of their rewards."""

import re
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

from verl.config.roll.batch import Roll
from verl.config.roll.table import Idle, Note, Outcome, Refuse, Set, listed, rows, section_outcomes

TYPES = {"sokoban": "Sokoban", "frozen_lake": "FrozenLake"}
"""``env_type`` of ROLL -> the environment here that plays the same game."""

_PLACEHOLDERS = {"observation": "{observation}", "turn_idx": "{turn}", "actions_left": "{turns_left}"}
_ANSWERS = {
    r"<answer>(.*?)</answer>": "tag",
    r"<think>(.*?)</think>\s*<answer>(.*?)</answer>": "tag",
    "^(.*)$": "plain",
}
"""``action_pattern`` of ROLL -> place of an action in the policy's text."""
_GROUPINGS = {
    **dict.fromkeys(("state", "traj_group_id", "group_ids"), "state"),
    **dict.fromkeys(("inductive", "tags"), "inductive"),
    "batch": "batch",
}


def environments(roll: Roll) -> Iterator[Outcome]:
    """Options of ``env``, and of what else the agentic sections say; nothing for files of RLVR."""
    if not roll.is_agentic:
        yield from (Idle(key) for key in ("reward_normalization", "render_save_dir") if roll.get(key))
        return
    if folder := roll.get("render_save_dir"):
        yield Set("env.render_save_dir", folder)
    yield from _normalization(roll.get("reward_normalization", {}))
    for name, place in (("train_env_manager", "env.train"), ("val_env_manager", "env.val")):
        section = roll.get(name, {})
        yield from section_outcomes(f"{name}.", section, rows("env_manager"), roll)
        yield from _manager(name, place, section, roll)
    tags = dict.fromkeys(tag for name in ("train_env_manager", "val_env_manager") for tag in _tags(roll.get(name, {})))
    entries, known = roll.get("custom_envs", {}), _examples()
    for tag in tags:
        if tag in entries or tag in known:
            yield from _environment(f"custom_envs.{tag}", tag, entries.get(tag) or known[tag], roll)
        elif tag not in TYPES.values():
            why = f"the tag is not in custom_envs, where there are {', '.join(entries) or 'none'}"
            yield Refuse("tags", tag, why, (f"env.registry.{tag}.type",))
    if unused := [tag for tag in entries if tag not in tags]:
        yield Note(f"custom_envs: no tag names {', '.join(unused)}")
    if roll.get("adv_estimator") == "grpo":
        theirs = "ROLL's agentic pipeline compares them as reward_normalization says, and not at all without it"
        yield Note(f"adv_estimator=grpo: scores are compared within groups, as the guide has it; {theirs}")


def _examples() -> dict[str, dict[str, Any]]:
    """Return the environments of ROLL's examples, without what they take from the file that names them."""
    entries = listed("presets")["envs"]["custom_env"]
    return {tag: {k: v for k, v in entry.items() if not str(v).startswith("${")} for tag, entry in entries.items()}


def _tags(section: Mapping[str, Any]) -> list[str]:
    return list(section.get("tags") or ["SimpleSokoban"])


def _first(section: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first of these names, a key's newest and its older one, that is there."""
    return next((section[name] for name in names if section.get(name) is not None), None)


def _manager(name: str, place: str, section: Mapping[str, Any], roll: Roll) -> Iterator[Outcome]:
    """Groups, their sizes and tags."""
    tags, size = _tags(section), int(section.get("group_size") or 1)
    groups = int(_first(section, "num_env_groups", "env_groups") or 128)
    parts = _first(section, "num_groups_partition", "n_groups")
    taken = roll.get("rollout_batch_size" if place == "env.train" else "val_batch_size", 128)
    wanted = max(1, taken // size) if isinstance(taken, int) and taken > 0 else groups
    yield Set(f"{place}.tags", tags)
    yield Set(f"{place}.group_size", size)
    episodes = 1
    if wanted < groups:
        # of more environments than a step takes ROLL trains on those that end first
        shares = [count * wanted / groups for count in parts or ()]
        if any(share != int(share) for share in shares):
            why = f"a step takes {wanted} groups of {groups}, which do not divide in these shares"
            yield Refuse(f"{name}.num_groups_partition", parts, why, (f"{place}.groups_per_tag", f"{place}.n_groups"))
        parts = [int(share) for share in shares] or None
        yield Note(f"{name}: {groups} groups of {size}, of which a step takes {wanted}: there are {wanted}")
        groups = wanted
    elif wanted % groups and place == "env.train":
        fitting = groups * size * max(1, wanted // groups)
        why = f"it is no multiple of the {groups * size} environments, which run as many episodes each"
        yield Refuse("rollout_batch_size", taken, why, (f"rollout_batch_size={fitting}",))
    else:
        episodes = ceil(wanted / groups)
    yield Set(f"{place}.n_groups", groups)
    if parts is not None and len(tags) > 1:
        yield Set(f"{place}.groups_per_tag", list(parts))
    most = section.get("max_traj_per_env")
    if isinstance(most, int) and most > 0 and most < episodes:
        why = f"a step takes {episodes} episodes of each environment"
        yield Refuse(f"{name}.max_traj_per_env", most, why, (f"{name}.max_traj_per_env=-1",))
    elif episodes > 1:
        yield Set(f"{place}.max_traj_per_env", episodes)
    if place == "env.train" and section.get("format_penalty"):
        yield Set("env.train.format_penalty", section["format_penalty"])
        yield Note(
            "train_env_manager.format_penalty is taken off each turn without a valid action; newer ROLL reads that of "
            "an environment's env_config alone, which goes before it here too"
        )


def _environment(key: str, tag: str, entry: Mapping[str, Any], roll: Roll) -> Iterator[Outcome]:
    """One entry of custom_envs."""
    place, kind = f"env.registry.{tag}", entry.get("env_type")
    if kind not in TYPES:
        why = f"the environments of ROLL that are here too are {', '.join(TYPES)}; register yours (docs/agents.md)"
        yield Refuse(f"{key}.env_type", kind, why, (f"{place}.type",))
        return
    yield Set(f"{place}.type", TYPES[kind])
    yield from section_outcomes(f"{key}.", {k: v for k, v in entry.items() if k != "env_config"}, rows("env"), roll)
    config = entry.get("env_config") or {}
    steps = _first(entry, "max_steps", "max_steps_per_traj", "max_actions_per_traj") or config.get("max_steps") or 10
    yield Set(f"{place}.max_steps", steps)
    tokens = _first(entry, "max_tokens_per_step", "max_tokens")
    tokens = tokens or roll.get("actor_infer.generating_args.max_new_tokens")
    if tokens:
        yield Set(f"{place}.max_tokens_per_step", tokens)
    if (text := entry.get("agent_system_template")) is not None:
        yield Set(f"{place}.system_prompt", text)
    if (text := entry.get("agent_template")) is not None:
        yield from _template(f"{key}.agent_template", f"{place}.turn_template", text, tokens)
    instruction = entry.get("env_instruction") or config.get("env_instruction")
    if instruction:
        yield Set(f"{place}.kwargs.instructions", instruction)
    yield from section_outcomes(f"{key}.env_config.", config, rows(f"env_{kind}"), roll)
    yield from _env_config(f"{key}.env_config", place, config)


def _template(key: str, option: str, text: str, tokens: Any) -> Iterator[Outcome]:
    known = {**_PLACEHOLDERS, "max_response_length": str(tokens or "")}
    names = re.findall(r"\{(\w+)\}", text)
    if other := [name for name in names if name not in known]:
        why = f"there is no {{{other[0]}}} here: a template reads {', '.join(f'{{{name}}}' for name in known)}"
        yield Refuse(key, text, why, (option, f"{key}=null"))
        return
    yield Set(option, re.sub(r"\{(\w+)\}", lambda match: known[match[1]], text))


def _env_config(key: str, place: str, config: Mapping[str, Any]) -> Iterator[Outcome]:
    if config.get("format_penalty") is not None:
        yield Set(f"{place}.format_penalty", config["format_penalty"])
    if (pattern := config.get("action_pattern")) is not None:
        if pattern in _ANSWERS:
            yield Set(f"{place}.kwargs.answer", _ANSWERS[pattern])
        else:
            why = f"an action is found by {', '.join(_ANSWERS)}"
            yield Refuse(f"{key}.action_pattern", pattern, why, (f"{place}.kwargs.answer",))
    if config.get("dim_x") or config.get("dim_y"):
        yield Set(f"{place}.kwargs.dim_room", [config.get("dim_x") or 6, config.get("dim_y") or 6])
    if (symbols := config.get("grid_lookup")) is not None:
        # of wall, floor, target, box on target, box, player, player on target; here a box comes before one on a target
        order = [symbols.get(number, symbols.get(str(number))) for number in (0, 1, 2, 4, 3, 5, 6)]
        if all(isinstance(symbol, str) and len(symbol) == 1 for symbol in order):
            yield Set(f"{place}.kwargs.symbols", "".join(order))
        else:
            yield Refuse(f"{key}.grid_lookup", symbols, "it has a character for each of 0 to 6", (f"{key}=null",))


def _normalization(section: Mapping[str, Any]) -> Iterator[Outcome]:
    grouping, method = section.get("grouping") or "state", section.get("method") or "identity"
    if section.get("norm_mean_type") or section.get("norm_std_type"):
        for name in ("mean", "std"):
            if kind := section.get(f"norm_{name}_type"):
                yield Set(f"algorithm.reward_shaping.norm.{name}", kind)
    elif grouping not in _GROUPINGS:
        why = f"episodes are compared by {', '.join(_GROUPINGS)}"
        yield Refuse("reward_normalization.grouping", grouping, why, ("reward_normalization.grouping=state",))
    elif method not in ("identity", "mean", "mean_std", "asym_clip"):
        why = "identity, mean, mean_std or asym_clip"
        yield Refuse("reward_normalization.method", method, why, ("reward_normalization.method=mean_std",))
    elif method != "identity":
        yield Set("env.reward_normalization.grouping", _GROUPINGS[grouping])
        yield Set("env.reward_normalization.method", method)
        if grouping in ("state", "inductive"):
            yield Note(
                f"reward_normalization.grouping={grouping} is that of RAGEN, whose word it is; ROLL's code stops"
            )
        if method == "asym_clip":
            yield Note("reward_normalization.method=asym_clip clips to [-1, 3]; newer ROLL clips nothing")
    for name, option in (("global_scale_factor", "scale"), ("global_shift_value", "shift")):
        if section.get(name) is not None:
            yield Set(f"algorithm.reward_shaping.{option}", section[name])


# -- Functions that rows of ``keys.yaml`` name -----------------------------------------------------------------------


def roll_class(key: str, value: Any, roll: Roll, *kept: str) -> Iterator[Outcome]:
    """A class of ROLL's: only those of ``kept`` do what is done here."""
    name = str(value).rpartition(".")[2]
    if not str(value).startswith("roll.") or kept and name not in kept:
        why = "a class of yours is written anew, as an environment or an agent loop (docs/agents.md)"
        if str(value).startswith("roll."):
            why = f"turns of a trajectory are one conversation here, as {' or '.join(kept)} has them"
        yield Refuse(key, value, why, (f"{key}=null",))


def proxy(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """Whoever answers for the policy: only the policy itself."""
    if value != "policy":
        yield Refuse(key, value, "the policy that is trained generates the turns", (f"{key}=policy",))


def concurrent_steps(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    yield Set("env.max_concurrent_steps", value)


def env_kwarg(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """An argument of the environment, of the same name."""
    yield Set(f"env.registry.{key.split('.')[1]}.kwargs.{key.rpartition('.')[2]}", value)


def of_gigpo(key: str, value: Any, roll: Roll, option: str) -> Iterator[Outcome]:
    if roll.get("adv_estimator") == "gigpo":
        yield Set(option, value)
    else:
        yield Idle(key)
