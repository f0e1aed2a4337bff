"""Sections that are read as a whole: ``strategy_args``, which engine and its settings; ``rewards``, who scores what."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.base import did_you_mean
from verl.config.checks.megatron import needs_transformer_engine
from verl.config.roll.batch import Roll
from verl.config.roll.table import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Idle,
    Note,
    Outcome,
    Refuse,
    Set,
    listed,
    row_outcomes,
    rows,
    section_outcomes,
)
from verl.config.tree import section_at

Section = Mapping[str, Any]

# -- ``strategy_args`` -----------------------------------------------------------------------------------------------

_IS_ONE = (None, 1)


def strategy(key: str, value: Section, roll: Roll) -> Iterator[Outcome]:
    """Outcomes of ``ROLE.strategy_args``."""
    role = key.partition(".")[0]
    for name in sorted(set(value) - {"strategy_name", "strategy_config"}):
        why = "strategy_args has strategy_name and strategy_config"
        yield from [] if value[name] is None else [Refuse(f"{key}.{name}", value[name], why, (f"{key}.{name}=null",))]
    name, settings = value.get("strategy_name"), value.get("strategy_config") or {}
    if role == "actor_infer":
        yield from _rollout(key, name, settings, roll)
    elif name not in (known := listed("engines")["training"]):
        instead = f"{key}.strategy_name=fsdp2_train {key}.strategy_config={{}}"
        yield Refuse(f"{key}.strategy_name", name, f"known are {', '.join(known)}", (instead,))
    else:
        yield from _training(key, role, name, settings, roll)


def _rollout(key: str, name: Any, settings: Section, roll: Roll) -> Iterator[Outcome]:
    engines = listed("engines")["rollout"]
    if name not in engines:
        yield Refuse(f"{key}.strategy_name", name, f"known are {', '.join(engines)}", (f"{ROLLOUT}.name=vllm",))
        return
    engine = engines[name]
    yield Set(f"{ROLLOUT}.name", engine)
    if roll.given.get(f"{ROLLOUT}.name", engine) != engine:
        if settings:
            yield Note(f"{key}.strategy_config: {', '.join(settings)} are {engine}'s and have no effect")
        return
    known = {} if engine == "hf" else rows(engine)
    for option, item in settings.items():
        if option in known and known[option].no_effect is not None:
            yield Idle(f"{key}.strategy_config.{option}")
        elif option in known:
            yield from (Set(ours, item) for ours in known[option].to)
        elif option == "pipeline_parallel_size" and item in _IS_ONE:
            continue
        elif engine == "hf":
            yield Note(f"{key}.strategy_config.{option} has no effect: hf_infer has no such knob")
        else:
            yield Set(f"{ROLLOUT}.engine_kwargs.{engine}.{option}", item)


def _training(key: str, role: str, name: str, settings: Section, roll: Roll) -> Iterator[Outcome]:
    engine, place = listed("engines")["training"][name], listed("places")[role]["role"]
    option, of_actor, config = f"{place}.strategy", f"{ACTOR}.strategy", f"{key}.strategy_config"
    chosen = roll.given.get(option)
    if engine == "megatron" and roll.is_megatron(role):
        yield Set(option, "megatron")
        yield from _megatron(config, role, settings, roll)
    elif engine == "megatron":
        chosen = chosen or roll.given.get(of_actor, "")
        yield Set(option, chosen)
        yield from _in_place_of_megatron(role, settings, chosen)
    elif engine is None:
        yield Note(f"{key}.strategy_name={name}: the role scores with the engine of the actor")
    else:
        yield Set(option, engine)
        # Settings of FSDP2 are those of FSDP, so that a change from one to the other keeps them.
        if chosen not in (None, engine, "fsdp" if engine == "fsdp2" else engine):
            what = ", ".join(settings) or "it"
            yield Note(f"{config}: {what} is {engine}'s and has no effect with {option}={chosen}")
        elif engine == "deepspeed":
            yield from _deepspeed(role, settings)
        elif rows("megatron", "megatron_training").keys() & settings:  # the engine was changed, its settings were not
            yield from _in_place_of_megatron(role, settings, engine)
        else:
            yield from _fsdp(config, listed("places")[role]["fsdp"], settings)


def _megatron(key: str, role: str, settings: Section, roll: Roll) -> Iterator[Outcome]:
    """Outcomes of Megatron's settings, among them those that only Transformer Engine has."""
    known = rows("megatron", "megatron_training")
    for name, value in settings.items():
        for outcome in row_outcomes(known.get(name), f"{key}.{name}", value, roll, known):
            place, _, entry = outcome.key.rpartition(".") if isinstance(outcome, Set) else ("", "", "")
            if isinstance(outcome, Set) and needs_transformer_engine(place.rpartition(".")[2], entry, outcome.value):
                deep = f"{key}.{name}" if name == entry else f"{key}.{name}.{entry}"
                instead = f"{deep}=null"
                if name == "optimizer_cpu_offload":
                    instead += f" {listed('places')[role]['megatron']}.optimizer_offload=true"
                yield Refuse(deep, outcome.value, "it needs Transformer Engine, which is not installed", (instead,))
            else:
                yield outcome
    first = section_at(roll.tree, "actor_train.strategy_args.strategy_config")
    sizes = [name for name, row in known.items() if row.by[:1] == ("megatron_size",)]
    if role != "actor_train" and roll.is_megatron("actor_train"):
        if other := [name for name in sizes if (settings.get(name) or 1) != (first.get(name) or 1)]:
            yield Note(f"{role}: its ranks are those of actor_train; no effect have {', '.join(other)} of its own")


def _in_place_of_megatron(role: str, settings: Section, chosen: str) -> Iterator[Outcome]:
    """Translate Megatron's settings that FSDP2 or DeepSpeed have; report the others in one sentence."""
    places = listed("places")[role]
    idle = []
    for name, value in settings.items():
        if name == "context_parallel_size" and value not in _IS_ONE and chosen.startswith("fsdp"):
            yield Set(f"{places['role']}.ulysses_sequence_parallel_size", value)
            yield Set(f"{places.get('model', MODEL)}.use_remove_padding", True)
        elif name == "recompute_granularity" and value == "full":
            # The reference has no backward pass.
            yield from [] if role == "reference" else [Set(f"{places['model']}.enable_gradient_checkpointing", True)]
        elif name == "optimizer_cpu_offload" and value and role != "reference":
            yield Set(f"{places['fsdp']}.optimizer_offload", True)
        elif value is not None and value is not False and not (type(value) is int and value == 1):
            idle.append(name)
    if idle:
        named = ", ".join(idle)
        yield Note(f"{role}: {chosen} shards the model over all devices in Megatron's place; no effect have {named}")


def _deepspeed(role: str, settings: Section) -> Iterator[Outcome]:
    places, known = listed("places")[role], listed("settings")
    section = f"{places['role']}.deepspeed"
    rest: dict[str, Any] = {}
    for name, value in settings.items():
        if name in ("bf16", "fp16") and isinstance(value, Mapping):
            if value.get("enabled") is True:
                yield Set(places["dtype"], name)
        elif name == "zero_optimization":
            for option, item in value.items():
                if option == "stage":
                    yield Set(f"{section}.zero_stage", item)
                elif option in ("offload_optimizer", "offload_param"):
                    yield Set(f"{section}.{option}", (item or {}).get("device", "none") != "none")
                elif option in known["zero"]:
                    # "auto" leaves the value to Hugging Face's trainer, which is not used here.
                    yield from [] if item == "auto" else [Set(f"{section}.{option}", _whole(item))]
                elif item != "auto":
                    rest.setdefault(name, {})[option] = item
        elif name not in known["decided"] and value != "auto":
            rest[name] = value
    yield from (Set(f"{section}.config.{name}", value) for name, value in rest.items())


def _whole(value: Any) -> Any:
    """A number of DeepSpeed's files, ``5e8`` as text for example, as a whole one where it is."""
    number = float(value) if isinstance(value, str) and value.replace(".", "").replace("e", "").isdigit() else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _fsdp(key: str, place: str, settings: Section) -> Iterator[Outcome]:
    for name, value in settings.items():
        if name in listed("settings")["fsdp"]:
            yield Set(f"{place}.{name}", value)
        elif name in ("param_dtype", "reduce_dtype"):
            yield Set(f"{place}.mixed_precision.{name}", str(value).removeprefix("torch."))
        elif name == "wrap_policy" and isinstance(value, Mapping):
            yield from (Set(f"{place}.{name}.{option}", item) for option, item in value.items() if item is not None)
        elif value is not None:
            yield Refuse(f"{key}.{name}", value, f"{place} has no such option", (f"{key}.{name}=null",))


# -- ``rewards`` -----------------------------------------------------------------------------------------------------

JUDGE = "reward_model.judge"


def rewards(roll: Roll) -> Iterator[Outcome]:
    """Outcomes of all of ``rewards``, and of ``domain_interleave_probs``."""
    sections = {name: section or {} for name, section in section_at(roll.tree, "rewards").items() if section != "null"}
    # Entries that the command line emptied are removed, unless all are.
    sections = {name: section for name, section in sections.items() if section} or sections
    shares = roll.get("actor_train.data_args.domain_interleave_probs") or {}
    by_source: dict[str, Any] = {}
    for domain in sections:
        if shares and not shares.get(domain):
            yield Note(f"rewards.{domain} has no share in domain_interleave_probs: none of its rows are trained on")
    for domain, section in sections.items():
        if not shares or shares.get(domain):
            yield from _worker(domain, section, roll, by_source)
    if not sections and "custom_reward_function.path" not in roll.given:
        by_source["math_rule/*"] = "builtin:math"
        yield Note("there is no rewards section: rows are scored by the rule of ROLL's domain math_rule")
    yield Set("data.domains", _domains(sections))
    yield Set("data.reward_fn_key", roll.get("actor_train.data_args.tag") or "tag")
    if by_source:
        yield Set("reward_model.by_source", by_source)
    if shares:
        yield from _mixture(shares, sections)


def _domains(sections: Mapping[str, Section]) -> dict[str, list[str]]:
    """Domain -> tags. As in ROLL, tags that nobody lists are mathematics; a worker alone gets all rows."""
    domains: dict[str, list[str]] = {}
    for name, section in sections.items():
        tags = section.get("tag_included") or [name]
        domains[name] = [str(tag) for tag in (tags if isinstance(tags, list) else [tags])]
    fallback = "math_rule" if "math_rule" in domains or not domains else next(iter(domains))
    if fallback == "math_rule" or len(domains) == 1:
        domains.setdefault(fallback, []).append("*")
    return domains


def _mixture(shares: Mapping[str, float], sections: Section) -> Iterator[Outcome]:
    """Shares of the domains; as in ROLL the last takes what the others leave."""
    known = {name: share for name, share in shares.items() if name in sections} if sections else dict(shares)
    if unknown := [name for name in shares if name not in known]:
        yield Note(f"domain_interleave_probs names {', '.join(unknown)}, which is not below rewards: left out")
    if len(known) > 1 or len(sections) > 1:
        *first, last = known
        # Rounded, since shares like 0.4 + 0.3 + 0.1 + 0.1 are not exact in binary.
        rest = round(1 - sum(known[name] for name in first), 6)
        if abs(rest - known[last]) > 1e-6:
            yield Note(f"domain_interleave_probs add up to {sum(shares.values()):g}: {last} gets {rest:g}, as in ROLL")
        of_all = {name: 0 for name in sections} | {name: known[name] for name in first} | {last: rest}
        yield Set("data.mixture", {f"{name}/*": share for name, share in of_all.items()})


def _worker(domain: str, section: Section, roll: Roll, by_source: dict[str, Any]) -> Iterator[Outcome]:
    key, pattern, rules = f"rewards.{domain}", f"{domain}/*", listed("rules")
    name = str(section.get("worker_cls") or "").rpartition(".")[2]
    yield from section_outcomes(f"{key}.", section, rows("reward"), roll)
    if name in rules:
        rule = rules[name]
        is_soft = rule == "ifeval" and section.get("reward_type") == "soft"
        by_source[pattern] = {"function": f"builtin:{rule}", "continuous": True} if is_soft else f"builtin:{rule}"
        url = section.get("code_url")
        if rule == "code" and (section.get("use_local") is False or url):
            why = (
                "the sandbox that is asked here speaks sandbox-fusion's protocol; without one, programs run in children"
            )
            instead = (f"{key}.code_url=null {key}.use_local=true", "reward_model.sandbox_fusion.url")
            yield Refuse(f"{key}.code_url", url, why, instead)
    elif name.endswith("LLMJudgeRewardWorker"):
        yield from _judge(key, name, pattern, section, roll, by_source)
    else:
        hint = did_you_mean(name, rules).rstrip("?") if name else ""
        why = f"no reward of that name is built in{hint}; a function of yours scores its rows (docs/reward_function.md)"
        ours = ("custom_reward_function.path=my_reward.py", "reward_model.enable", "reward_model.reward_manager")
        yield Refuse(f"{key}.worker_cls", name or None, why, (*ours, f"{key}=null"))
    if (filtering := section.get("query_filter_config")) and roll.over_samples:
        yield from _query_filter(f"{key}.query_filter_config", filtering)


def _judge(
    key: str, name: str, pattern: str, section: Section, roll: Roll, by_source: dict[str, Any]
) -> Iterator[Outcome]:
    """A language model behind an address; the user may serve the one that ROLL would load itself."""
    model = section.get("judge_model_name") or (section.get("model_args") or {}).get("model_name_or_path") or ""
    url = section.get("judge_api_url") if section.get("judge_model_type") == "api" else None
    if f"{JUDGE}.url" not in roll.given and not url:
        if "custom_reward_function.path" not in roll.given:
            why = f"a judging model is asked over HTTP: serve it (vllm serve {model or 'MODEL'} --port 8001), not here"
            instead = (f"{JUDGE}.url=http://localhost:8001/v1", "custom_reward_function.path", f"{key}=null")
            yield Refuse(f"{key}.worker_cls", name, why, instead)
        return
    if url:
        # The address of the service: the path of a request is added to it.
        yield Set(f"{JUDGE}.url", str(url).removesuffix("/chat/completions"))
    if section.get("judge_api_key"):
        yield Note(f"{key}.judge_api_key is not put on a command line: set VERL_JUDGE_API_KEY")
    by_source[pattern] = "builtin"
    yield Set(f"{JUDGE}.model", model)
    yield Set(f"{JUDGE}.data_sources", [pattern])
    temperature = (section.get("generating_args") or {}).get("temperature")
    yield from [] if temperature is None else [Set(f"{JUDGE}.temperature", temperature)]
    yours = f"{JUDGE}.prompt and {JUDGE}.score_pattern"
    yield Note(f"{key}: {model or 'the model'} judges with verl's prompt, from 0 to 10; yours: {yours}")


def _query_filter(key: str, value: Section) -> Iterator[Outcome]:
    """Choice of the groups that are trained on: ``mean_filter`` those whose mean score lies between two bounds,
    ``std_filter`` those whose scores differ by more than one."""
    if value.get("type") not in ("mean_filter", "std_filter"):
        yield from [] if value.get("type") in (None, "no_filter") else [Idle(f"{key}.type")]
        return
    place, limits = "algorithm.filter_groups", value.get("filter_args") or {}
    yield Set(f"{place}.enable", True)
    for theirs, ours, free in (
        ("threshold_down", "low", 0),
        ("threshold_up", "high", 1),
        ("std_threshold", "min_std", 0),
    ):
        bound = limits.get(theirs)
        if bound is not None and bound != free:
            yield Set(f"{place}.{ours}", bound)
