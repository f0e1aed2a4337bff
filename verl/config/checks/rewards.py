"""Validators of rewards and their shaping."""

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from verl.config.base import Problem, get_path
from verl.config.checks.base import (
    IsGiven,
    contradictions,
    given_below,
    problem,
    reward_shaping_keys,
    unused,
    validator,
)
from verl.config.checks.support import built_names
from verl.config.ppo import ACTOR, RM, ROLLOUT, SHAPING, PPOConfig

_CONTRADICTIONS = {
    f"data.return_raw_chat=false with {RM}.model.input_tokenizer if {RM}.enable": (
        "the reward model reads each conversation in its own chat template, and the messages are left out. Set "
        "data.return_raw_chat=true or, if the reward model has the policy's tokens and template, "
        f"{RM}.model.input_tokenizer=null."
    ),
    "algorithm.gdpo_reward_keys=null|[] with algorithm.adv_estimator=gdpo": (
        "it combines rewards it finds by name. List the names the reward function returns next to score, "
        "[accuracy,format] for example."
    ),
    f"algorithm.sample_mask.drop_truncated with {ROLLOUT}.ignore_eos": (
        " leaves nothing to learn from: every response runs into the length limit. Set one of them to false."
    ),
    f"{RM}.judge.model='' with {RM}.judge.url": "name the model as the server knows it.",
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def batch_reward_manager_requires_custom_function(config: PPOConfig) -> Iterator[Problem]:
    rm, path = config.reward_model, config.custom_reward_function.path
    if rm.reward_manager != "batch" or rm.enable:
        return
    # functions of single data sources may take lists, too
    places = rm.by_source or {}
    way_out = (
        f"the built-in rules take one response at a time. Name a function of lists in custom_reward_function.path, or "
        f"set {RM}.reward_manager=naive."
    )
    if not places and path is None:
        text = f"without custom_reward_function.path: {way_out}"
        yield problem(config, f"{RM}.reward_manager", text, "custom_reward_function.path")
    for pattern, place in places.items():
        name = place.get("function") if isinstance(place, Mapping) else place
        if str(name).partition(":")[0] == "builtin":
            text = f"sends {pattern} to the built-in rules, and with {RM}.reward_manager=batch {way_out}"
            yield problem(config, f"{RM}.by_source", text, f"{RM}.reward_manager")


@validator("error")
def reward_model_max_length_holds_sequence(config: PPOConfig) -> Iterator[Problem]:
    rm, rollout = config.reward_model, config.actor_rollout_ref.rollout
    longest = rollout.longest_sequence
    if not rm.enable or rm.max_length is None:
        return
    if not rm.model.input_tokenizer and rm.max_length < longest:
        text = (
            f"is shorter than prompt and response together ({rollout.prompt_length} + {rollout.response_length} = "
            f"{longest}), and token ids are passed on whole ({RM}.model.input_tokenizer=null). Leave it null, or "
            "shorten data.max_response_length."
        )
        yield problem(config, f"{RM}.max_length", text, "data.max_response_length")
    elif rm.model.input_tokenizer and rm.use_dynamic_bsz:
        budget = rm.forward_max_token_len_per_gpu * rm.ulysses_sequence_parallel_size
        if budget < rm.max_length:
            text = (
                f"cannot hold one conversation of {RM}.max_length={rm.max_length} tokens. Raise the first or lower the "
                "second."
            )
            yield problem(config, f"{RM}.forward_max_token_len_per_gpu", text, f"{RM}.max_length")


@validator("error")
def gdpo_weights_match_reward_keys(config: PPOConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    # null weights are equal ones, of any number of keys
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if keys and weights is not None and len(weights) != len(keys):
        text = (
            f"has {len(weights)} numbers for the {len(keys)} algorithm.gdpo_reward_keys. Give one weight a key, or "
            "null for equal ones."
        )
        yield problem(config, "algorithm.gdpo_reward_weights", text, "algorithm.gdpo_reward_keys")


@validator("error")
def remax_excludes_reward_shaping(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.adv_estimator == "remax":
        for key in reward_shaping_keys(config):
            text = (
                "changes the rewards of sampled responses, but not the score of the greedy one, with which "
                "algorithm.adv_estimator=remax compares them. Leave it out, or use rloo or reinforce."
            )
            yield problem(config, key, text, "algorithm.adv_estimator")


@validator("error")
def group_norm_requires_several_responses(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.n == 1:
        for name in ("mean", "std"):
            if config.algorithm.reward_shaping.norm[name] == "group":
                text = (
                    f"compares responses to the same prompt, and {ROLLOUT}.n=1 samples one. Raise n, or use batch or "
                    "running."
                )
                yield problem(config, f"{SHAPING}.norm.{name}", text, f"{ROLLOUT}.n")


@validator("error")
def overlong_buffer_within_response_length(config: PPOConfig) -> Iterator[Problem]:
    buffer, window = config.algorithm.reward_shaping.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and not 0 < buffer.len <= window:
        text = (
            f"must be 1 to {ROLLOUT}.response_length={window}: the penalty grows over that many last tokens. Choose "
            f"e.g. {max(1, window // 4)}, or set {SHAPING}.overlong_buffer.enable=false."
        )
        yield problem(config, f"{SHAPING}.overlong_buffer.len", text, f"{ROLLOUT}.response_length")


@validator("error")
def difficulty_range_ordered(config: PPOConfig) -> Iterator[Problem]:
    band = config.algorithm.sample_mask.difficulty
    if band is not None and (len(band) != 2 or not band[0] <= band[1]):
        text = "is no [low, high]: two numbers, the first at most the second. Give e.g. [0.1,0.9], or null for no mask."
        yield problem(config, "algorithm.sample_mask.difficulty", text)


@validator("error")
def clip_range_and_filter_range_ordered(config: PPOConfig) -> Iterator[Problem]:
    clip, filtering = config.algorithm.reward_shaping.clip_range, config.algorithm.filter_groups
    if clip is not None and (len(clip) != 2 or not clip[0] < clip[1]):
        text = "is no [low, high]: two numbers, the first below the second. Give e.g. [-1,3], or null for no bounds."
        yield problem(config, f"{SHAPING}.clip_range", text)
    if filtering.low is not None and filtering.high is not None and not filtering.low < filtering.high:
        text = (
            f"is not below algorithm.filter_groups.high={filtering.high}: no group lies between them. Lower the first "
            "or raise the second."
        )
        yield problem(config, "algorithm.filter_groups.low", text, "algorithm.filter_groups.high")


@validator("error")
def judge_scores_ordered(config: PPOConfig) -> Iterator[Problem]:
    judge, key = config.reward_model.judge, f"{RM}.judge"
    if judge.highest <= judge.lowest:
        text = f"is not above {key}.lowest={judge.lowest:g}: raise the first or lower the second."
        yield problem(config, f"{key}.highest", text, f"{key}.lowest")


@validator("error")
def reward_servers_are_asked_and_reached(config: PPOConfig) -> Iterator[Problem]:
    rm = config.reward_model
    for url in rm.urls:
        if urlsplit(str(url)).scheme not in ("http", "https") or not urlsplit(str(url)).hostname:
            yield problem(config, f"{RM}.server_urls", "is no list of URLs. Write http://HOST:PORT.")
    has_function = config.custom_reward_function.path is not None or bool(rm.by_source)
    if rm.asks_servers and not rm.enable:
        key = f"{RM}.server_urls" if rm.server_urls else f"{RM}.rollout"
        if not has_function:
            text = (
                "has a judge, and no reward function asks it. Name one with an argument reward_router_address in "
                f"custom_reward_function.path, or set {RM}.enable=true if it is a classifier on server_urls."
            )
            yield problem(config, key, text, "custom_reward_function.path")
        if not rm.sandbox.network:
            text = f"cuts the reward function off from the judge of {key}. Set it to true."
            yield problem(config, f"{RM}.sandbox.network", text, key)
    if rm.enable and rm.asks_servers and not rm.model.input_tokenizer:
        key = f"{RM}.server_urls" if rm.server_urls else f"{RM}.rollout"
        text = f"is null, and {key} gets the conversation in the classifier's own template. Leave it out."
        yield problem(config, f"{RM}.model.input_tokenizer", text, key)


_CLASSIFIERS = ("vllm", "sglang")
"""Rollout engines that run sequence classifiers."""


@validator("error")
def reward_engine_has_devices(config: PPOConfig) -> Iterator[Problem]:
    rm = config.reward_model
    name = rm.rollout.get("name")
    if rm.enable and rm.runs_server and name not in _CLASSIFIERS:
        text = (
            f"has name={name}, which runs no classifier ({RM}.enable=true). Choose {' or '.join(_CLASSIFIERS)}, or "
            f"leave rollout out: the training engine scores. For a judge that writes set {RM}.enable=false and a "
            "function that asks it (docs/reward_model.md)."
        )
        yield problem(config, f"{RM}.rollout", text, f"{RM}.enable")
    if rm.enable_resource_pool and rm.has_workers and not sum(rm.own_processes):
        text = (
            f"has {RM}.nnodes={rm.nnodes} x {RM}.n_gpus_per_node={rm.n_gpus_per_node} devices. Raise both to 1 or more."
        )
        yield problem(config, f"{RM}.enable_resource_pool", text, f"{RM}.nnodes")
    if rm.runs_server:
        problems: list[Problem] = []
        options, devices = rm.engine_options(problems), config.world_size_of(rm)
        yield from problems
        if devices % (size := options.tensor_model_parallel_size):
            text = f"has tensor_model_parallel_size={size}, which does not divide the {devices} devices of "
            yield problem(config, f"{RM}.rollout", f"{text}nnodes x n_gpus_per_node. Choose a divisor.")
        if options.load_format.startswith("dummy"):
            text = f"has load_format={options.load_format}, which reads no weights. Leave it out, or set it to auto."
            yield problem(config, f"{RM}.rollout", text)
        policy = config.actor_rollout_ref
        shares = options.gpu_memory_utilization + policy.rollout.gpu_memory_utilization
        if rm.shares_devices and not options.free_cache_engine:
            text = f"has free_cache_engine=false: the engine would not leave {ROLLOUT} the devices that they share. "
            text += f"Leave it out, or set {RM}.enable_resource_pool=true."
            yield problem(config, f"{RM}.rollout", text, f"{RM}.enable_resource_pool")
        elif rm.shares_devices and policy.hybrid_engine and not policy.rollout.free_cache_engine and shares > 1:
            text = f"while the engine of {RM}.rollout scores: their gpu_memory_utilization make {shares:.2g} together. "
            yield problem(config, f"{ROLLOUT}.free_cache_engine", f"{text}Set it to true.", f"{RM}.rollout")


# -- Settings of rewards and their shaping without effect ------------------------------------------------------------


_SUBTRACT_GROUP_MEAN = ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg")
"""Built-in estimators that see only how a score differs from those of its group."""


@validator("warning")
def reward_model_options_without_reward_model(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.reward_model.enable:
        return
    # these are read whether or not there is a reward model: functions score too
    of_functions = (
        "enable",
        "reward_manager",
        "reward_kwargs",
        "by_source",
        "sandbox",
        "self_test",
        "on_error",
        "max_errors",
        "launch_reward_fn_async",
        "sandbox_fusion",
        "judge",
        "server_urls",
        "use_reward_loop",
        "router",
        *(("model",) if config.reward_model.asks_servers else ()),
        *(("rollout", *_OWN_DEVICES) if config.reward_model.runs_judge else ()),
    )
    keys = [key for key in given_below(RM, config, is_given) if key.split(".")[1] not in of_functions]
    yield from unused(config, keys, is_given, "there is no reward model with reward_model.enable=false")


_OWN_DEVICES = ("enable_resource_pool", "nnodes", "n_gpus_per_node", "server_host")


@validator("warning")
def reward_server_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rm = config.reward_model
    if not rm.asks_servers:
        keys = list(given_below(f"{RM}.router", config, is_given))
        why = f"there are no servers without {RM}.server_urls"
        if not rm.enable:
            why += ", and what a reward function asks elsewhere does not pass the router"
        yield from unused(config, keys, is_given, why)
    if not rm.enable:
        return
    if not rm.asks_servers:
        yield from unused(config, [f"{RM}.server_host"], is_given, "it is of a judge in a rollout engine")
    elif rm.runs_server:
        keys = [f"{RM}.strategy", f"{RM}.micro_batch_size_per_gpu", f"{RM}.router.server"]
        yield from unused(config, keys, is_given, f"the reward model runs in the engine of {RM}.rollout")
        why = f"without {RM}.enable_resource_pool the engine sleeps while responses are generated"
        yield from unused(config, [f"{RM}.use_reward_loop"] * rm.shares_devices, is_given, why)
    else:
        keys = [f"{RM}.{name}" for name in (*_OWN_DEVICES, "strategy", "micro_batch_size_per_gpu")]
        yield from unused(config, keys, is_given, f"the reward model runs on {RM}.server_urls")


@validator("warning")
def reward_engine_options_unused(config: PPOConfig) -> Iterator[Problem]:
    rm, notes = config.reward_model, list[str]()
    if not rm.runs_server:
        return
    rm.engine_options(None, notes)
    if rm.rollout.get("free_cache_engine") and not rm.shares_devices:
        notes.append(f"{RM}.rollout.free_cache_engine=true has no effect: its devices are its own")
    yield from (Problem(f"{RM}.rollout", note) for note in notes)


@validator("warning")
def sandbox_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rm = config.reward_model
    if rm.sandbox.enable and rm.reward_manager in built_names(f"{RM}.reward_manager"):
        is_batch = rm.reward_manager == "batch"
        name, other = ("timeout_s", "batch_timeout_s") if is_batch else ("batch_timeout_s", "timeout_s")
        why = f"with {RM}.reward_manager={rm.reward_manager} {RM}.sandbox.{other} is the limit of a call"
        yield from unused(config, [f"{RM}.sandbox.{name}"], is_given, why)


@validator("warning")
def builtin_scorer_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    places, path = (f"{RM}.sandbox_fusion", f"{RM}.judge"), config.custom_reward_function.path
    given = [key for place in places for key in given_below(place, config, is_given)]
    if path is not None and not config.reward_model.get("by_source", None):
        why = f"custom_reward_function.path={path} scores in place of the built-in scorers"
        yield from unused(config, given, is_given, why)
    elif config.reward_model.judge.url is None:
        of_judge = [key for key in given if key.startswith(places[1])]
        yield from unused(config, of_judge, is_given, f"there is no judge without {RM}.judge.url")
    if config.reward_model.sandbox_fusion.url is None:
        key = f"{RM}.sandbox_fusion.max_concurrent"
        yield from unused(config, [key], is_given, f"programs run on this machine without {places[0]}.url")


@validator("warning")
def reward_model_input_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if not config.reward_model.enable:
        return
    if not config.reward_model.model.input_tokenizer:
        why = f"{RM}.model.input_tokenizer=null passes token ids on whole"
        yield from unused(config, [f"{RM}.max_length"], is_given, why)


@validator("warning")
def reward_function_unused_in_training(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rm = config.reward_model
    # a manager of the user's may read both, and combine them
    if not rm.enable or rm.reward_manager not in built_names(f"{RM}.reward_manager"):
        return
    if config.custom_reward_function.path is not None:
        text = (
            f"custom_reward_function.path={config.custom_reward_function.path} scores validation only, rows whose "
            f"reward_model.style is not model: with {RM}.enable=true the built-in manager {rm.reward_manager} gives "
            f"out the reward model's scores in training. Register a manager of your own to combine both"
        )
        yield Problem("custom_reward_function.path", text)
    scorers = [f"{RM}.{name}" for name in ("by_source", "judge.url", "sandbox_fusion.url")]
    given = [key for key in scorers if get_path(config, key)]
    if given:
        text = (
            f"{', '.join(given)} {'is' if len(given) == 1 else 'are'} used in validation only, of rows whose "
            f"reward_model.style is not model: with {RM}.enable=true the reward model scores the training"
        )
        yield Problem(given[0], text)
    if (rm.reward_kwargs.get("overlong_buffer_cfg") or {}).get("enable"):
        text = (
            f"{RM}.reward_kwargs.overlong_buffer_cfg has no effect in training: with {RM}.enable=true the built-in "
            f"manager {rm.reward_manager} gives out the reward model's scores as they are. {SHAPING}.overlong_buffer "
            "charges those"
        )
        yield Problem(f"{RM}.reward_kwargs", text)
    yield from unused(config, [f"{RM}.self_test"], is_given, "the reward model scores, and no function is tried")
    why = f"the built-in manager {rm.reward_manager} gives out the reward model's scores, which are there by then"
    yield from unused(config, [f"{RM}.launch_reward_fn_async"] * rm.launch_reward_fn_async, is_given, why)


@validator("warning")
def kl_in_reward_unused_with_gdpo(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.adv_estimator == "gdpo" and algorithm.use_kl_in_reward:
        why = f"gdpo reads algorithm.gdpo_reward_keys, not the reward with the KL in it; {ACTOR}.use_kl_loss works"
        yield from unused(config, ["algorithm.use_kl_in_reward"], is_given, why)


@validator("warning")
def reward_shaping_unused_with_gdpo(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.algorithm.adv_estimator == "gdpo":
        why = "gdpo reads algorithm.gdpo_reward_keys, and normalises each"
        yield from unused(config, reward_shaping_keys(config), is_given, why)


@validator("warning")
def reward_norm_cancelled_by_estimator(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    """A shift or factor common to a group, which the estimator takes out; a bound or a KL between them would show."""
    algorithm, shaping = config.algorithm, config.algorithm.reward_shaping
    # a bound or whitening between shift and group mean would make the shift visible
    compares = algorithm.adv_estimator in _SUBTRACT_GROUP_MEAN and config.actor_rollout_ref.rollout.n > 1
    if not compares or shaping.clip is not None or shaping.clip_range is not None or shaping.whiten:
        return
    keys = [key for key in reward_shaping_keys(config) if key in (f"{SHAPING}.norm.mean", f"{SHAPING}.shift")]
    yield from unused(config, keys, is_given, f"{algorithm.adv_estimator} compares with its group, shifted like it")
    divides = algorithm.adv_estimator in ("grpo", "grpo_passk") and algorithm.norm_adv_by_std_in_grpo
    if divides and not algorithm.use_kl_in_reward:
        keys = [key for key in reward_shaping_keys(config) if key in (f"{SHAPING}.norm.std", f"{SHAPING}.scale")]
        why = f"{algorithm.adv_estimator} divides by the std of the group (algorithm.norm_adv_by_std_in_grpo)"
        yield from unused(config, keys, is_given, why)


@validator("warning")
def overlong_penalty_twice(config: PPOConfig) -> Iterator[Problem]:
    buffer = config.reward_model.reward_kwargs.get("overlong_buffer_cfg") or {}
    if buffer.get("enable") and config.algorithm.reward_shaping.overlong_buffer.enable:
        text = (
            f"{RM}.reward_kwargs.overlong_buffer_cfg and {SHAPING}.overlong_buffer are both on: a long response is "
            "charged twice"
        )
        yield Problem(f"{SHAPING}.overlong_buffer", text)
