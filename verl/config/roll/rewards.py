"""``rewards``: which rows each worker gets, how they are scored, and their shares of a batch."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.base import did_you_mean
from verl.config.roll.result import Idle, Note, Outcome, Refuse, Set
from verl.config.roll.table import Row, idle, not_read, row_outcomes
from verl.config.tree import section_at

JUDGE = "reward_model.judge"
RULES = {
    "MathRuleRewardWorker": "math",
    "GSM8KMathRewardWorker": "openai/gsm8k",
    "Geo3kRewardWorker": "hiyouga/geometry3k",
    "GeneralValRuleRewardWorker": "math",
    "CrossThinkQARuleRewardWorker": "multiple_choice",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "GeneralRuleRewardWorker": "ifeval",
    "IfEvalRuleRewardWorker": "ifeval",
    "CodeSandboxRewardWorker": "code",
}
"""ROLL's worker -> the built-in rule that scores its rows."""

_IN_DOMAINS = "the worker's rows: `data.domains`"
_FILTER = "with `is_use_additional_prompts`: `algorithm.filter_groups`"
_OF_A_MODEL = "rules run in `reward_model.sandbox.workers` processes, a judge behind `reward_model.judge.url`"
REWARD: dict[str, Row] = {
    "worker_cls": Row(not_read, f"`reward_model.by_source`: {', '.join(f'{k} `{v}`' for k, v in RULES.items())}; "
                      "LLMJudgeRewardWorker `reward_model.judge`"),
    "tag_included": Row(not_read, _IN_DOMAINS),
    "code_url": Row(not_read, "`reward_model.sandbox_fusion.url`, of a service of that kind"),
    "use_local": Row(not_read, "true: programs run in child processes of this machine"),
    "judge_model_type": Row(not_read, "api: `judge_api_url`; inference: serve the model, `reward_model.judge.url`"),
    "judge_model_name": Row(not_read, "`reward_model.judge.model`"),
    "judge_api_url": Row(not_read, "`reward_model.judge.url`"),
    "judge_api_key": Row(not_read, "the environment variable VERL_JUDGE_API_KEY"),
    "judge_prompt": Row(idle, "the judge's prompt here is `reward_model.judge.prompt`"),
    "format_pattern": Row(None, "responses are held to a pattern by a reward function of yours",
                          instead=("{key}=null", "custom_reward_function.path")),
    "reward_type": Row(not_read, "soft with IFEval: the share of instructions followed; other rules have one scale"),
    "response_length_penalty_coef": Row(
        None, "a penalty of length is algorithm.reward_shaping.overlong_buffer.{enable,len,penalty_factor}",
        harmless=(None, 0, 0.0), instead=("{key}=0", "algorithm.reward_shaping.overlong_buffer.enable")),
    "query_filter_config.type": Row(not_read, f"{_FILTER}.{{enable,low,high,min_std}}"),
    "query_filter_config.filter_args": Row(not_read, f"{_FILTER}.{{low,high,min_std}}"),
    "response_filter_config.type": Row(None, "single responses are not filtered: algorithm.sample_mask takes some out "
                                       "of the loss", harmless=(None, "no_filter"), instead=("{key}=no_filter",)),
    "response_filter_config.filter_args": Row(idle, "belongs to the type"),
    "reward_manager_config": Row(None, "a reward manager is named with reward_model.reward_manager",
                                 harmless=(None, [], {}), instead=("{key}=[]", "reward_model.reward_manager")),
    **{name: Row(idle, _OF_A_MODEL) for name in (
        "name", "model_args", "training_args", "data_args", "generating_args", "strategy_args", "world_size",
        "device_mapping", "num_gpus_per_worker", "model_update_frequency", "infer_batch_size", "backend_timeout",
        "system_envs", "max_concurrency", "eval_steps")},
}  # fmt: skip
"""Keys of an entry of ``rewards``."""


def rewards(roll: Any) -> Iterator[Outcome]:
    """Outcomes of all of ``rewards``, and of ``domain_interleave_probs``."""
    sections = {name: section or {} for name, section in section_at(roll.tree, "rewards").items() if section != "null"}
    sections = {name: section for name, section in sections.items() if section} or sections
    shares = roll.get("actor_train.data_args.domain_interleave_probs") or {}
    if shares:
        for name in [name for name in sections if not shares.get(name)]:
            yield Note(f"rewards.{name} has no share in domain_interleave_probs: none of its rows are trained on")
    used = {name: section for name, section in sections.items() if not shares or shares.get(name)}
    by_source: dict[str, Any] = {}
    for domain, section in used.items():
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


def _domains(sections: Mapping[str, Mapping]) -> dict[str, list[str]]:
    """Domain -> tags. As in ROLL, tags that nobody lists are mathematics; a worker alone gets all rows."""
    domains: dict[str, list[str]] = {}
    for name, section in sections.items():
        tags = section.get("tag_included") or [name]
        domains[name] = [str(tag) for tag in (tags if isinstance(tags, list) else [tags])]
    fallback = "math_rule" if "math_rule" in domains or not domains else next(iter(domains))
    if fallback == "math_rule" or len(domains) == 1:
        domains.setdefault(fallback, []).append("*")
    return domains


def _mixture(shares: Mapping[str, float], sections: Mapping[str, Any]) -> Iterator[Outcome]:
    """Shares of the domains; as in ROLL the last takes what the others leave."""
    known = {name: share for name, share in shares.items() if name in sections} if sections else dict(shares)
    if unknown := [name for name in shares if name not in known]:
        yield Note(f"domain_interleave_probs names {', '.join(unknown)}, which is not below rewards: left out")
    if len(known) > 1 or len(sections) > 1:
        *first, last = known
        rest = round(1 - sum(known[name] for name in first), 6)
        if abs(rest - known[last]) > 1e-6:
            yield Note(f"domain_interleave_probs add up to {sum(shares.values()):g}: {last} gets {rest:g}, as in ROLL")
        of_all = {name: 0 for name in sections} | {name: known[name] for name in first} | {last: rest}
        yield Set("data.mixture", {f"{name}/*": share for name, share in of_all.items()})


def _worker(domain: str, section: Mapping, roll: Any, by_source: dict[str, Any]) -> Iterator[Outcome]:
    key, pattern = f"rewards.{domain}", f"{domain}/*"
    name = str(section.get("worker_cls") or "").rpartition(".")[2]
    yield from _keys(key, section, roll)
    if name in RULES:
        rule = RULES[name]
        is_soft = rule == "ifeval" and section.get("reward_type") == "soft"
        by_source[pattern] = {"function": f"builtin:{rule}", "continuous": True} if is_soft else f"builtin:{rule}"
        yield from _programs(key, section) if rule == "code" else ()
    elif name.endswith("LLMJudgeRewardWorker"):
        yield from _judge(key, name, pattern, section, roll, by_source)
    else:
        hint = did_you_mean(name, RULES).rstrip("?") if name else ""
        why = f"no reward of that name is built in{hint}; a function of yours scores its rows (docs/reward_function.md)"
        instead = (
            "custom_reward_function.path=my_reward.py",
            "reward_model.enable",
            "reward_model.reward_manager",
            f"{key}=null",
        )
        yield Refuse(f"{key}.worker_cls", name or None, why, instead)
    if (filtering := section.get("query_filter_config")) and roll.over_samples:
        yield from _query_filter(roll, f"{key}.query_filter_config", filtering)


def _keys(key: str, section: Mapping, roll: Any) -> Iterator[Outcome]:
    """The settings that no branch of `_worker` reads."""
    for name, value in section.items():
        if name.endswith("_filter_config") and isinstance(value, Mapping):
            for inner, item in value.items():
                yield from row_outcomes(REWARD.get(f"{name}.{inner}"), f"{key}.{name}.{inner}", item, roll, REWARD)
        else:
            yield from row_outcomes(REWARD.get(name), f"{key}.{name}", value, roll, REWARD)


def _programs(key: str, section: Mapping) -> Iterator[Outcome]:
    url = section.get("code_url")
    if section.get("use_local") is False or url:
        why = "the sandbox that is asked here speaks sandbox-fusion's protocol; without one, programs run in children"
        instead = (f"{key}.code_url=null {key}.use_local=true", "reward_model.sandbox_fusion.url")
        yield Refuse(f"{key}.code_url", url, why, instead)


def _judge(
    key: str, name: str, pattern: str, section: Mapping, roll: Any, by_source: dict[str, Any]
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
        yield Set(f"{JUDGE}.url", str(url).removesuffix("/chat/completions"))
    if section.get("judge_api_key"):
        yield Note(f"{key}.judge_api_key is not put on a command line: set VERL_JUDGE_API_KEY")
    by_source[pattern] = "builtin"
    yield Set(f"{JUDGE}.model", model)
    yield Set(f"{JUDGE}.data_sources", [pattern])
    temperature = (section.get("generating_args") or {}).get("temperature")
    yield from [] if temperature is None else [Set(f"{JUDGE}.temperature", temperature)]
    yield Note(f"{key}: {model or 'the model'} judges with verl's prompt, from 0 to 10; yours: {JUDGE}.prompt and "
               f"{JUDGE}.score_pattern")  # fmt: skip


def _query_filter(roll: Any, key: str, value: Mapping) -> Iterator[Outcome]:
    """Which groups are trained on: ``mean_filter`` those whose mean score lies between two bounds, ``std_filter`` those
    whose scores differ by more than one."""
    limits, place = value.get("filter_args") or {}, "algorithm.filter_groups"
    if value.get("type") not in ("mean_filter", "std_filter"):
        yield from [] if value.get("type") in (None, "no_filter") else [Idle(f"{key}.type")]
        return
    yield Set(f"{place}.enable", True)
    names = {"threshold_down": "low", "threshold_up": "high", "std_threshold": "min_std"}
    for theirs, ours in names.items():
        bound = limits.get(theirs)
        if bound is not None and (ours, bound) not in (("low", 0), ("high", 1), ("min_std", 0)):
            yield Set(f"{place}.{ours}", bound)
