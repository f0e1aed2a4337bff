"""Validators of generation: groups, lengths, engines' parameters, devices of the rollout."""

from collections.abc import Iterator

from verl.config.base import Problem, get_path
from verl.config.checks.base import TOKEN_BASELINES, IsGiven, contradictions, problem, unused, validator
from verl.config.ppo import ROLLOUT, PPOConfig
from verl.config.rollout import DECIDED, OF_WHOLE_RESPONSES, OWN, RESHAPE
from verl.config.tree import show

_GROUP_ESTIMATORS = ("grpo", "rloo", "grpo_passk", "opo", "gpg", "gdpo", "gigpo", *TOKEN_BASELINES)
_HYBRID = "actor_rollout_ref.hybrid_engine"
_BY_SPEED = (
    "what such a batch holds depends on how fast responses came, so none can be found again. Set one of them only."
)
_ONE_CALL = f"there, one call samples a whole batch, and no request can be ended early. Set {ROLLOUT}.mode=async."

_CONTRADICTIONS = {
    f"{ROLLOUT}.n>1 with {ROLLOUT}.do_sample=false": (
        f"all responses of a prompt would be the same. Sample at random, or set {ROLLOUT}.n=1."
    ),
    f"{ROLLOUT}.n>1 with {ROLLOUT}.temperature=0|0.0 if {ROLLOUT}.do_sample": (
        f"all responses of a prompt would be the same. Sample at random, or set {ROLLOUT}.n=1."
    ),
    f"{ROLLOUT}.nnodes=0 with {_HYBRID}=false": (
        "nothing would sample. Give the rollout at least one machine, or leave hybrid_engine true."
    ),
    f"{ROLLOUT}.max_staleness with {_HYBRID} if {ROLLOUT}.partial_rollout=false": (
        "sampling and training take turns on the same devices, so nothing can be generated ahead. Set "
        f"hybrid_engine=false and give the rollout devices ({ROLLOUT}.nnodes, {ROLLOUT}.n_gpus_per_node), keep tokens "
        "for later steps with partial_rollout=true, or set max_staleness=0."
    ),
    f"{ROLLOUT}.max_staleness with algorithm.adv_estimator=remax if {_HYBRID}=false": (
        "its greedy baseline would come from newer weights than the responses. Set max_staleness=0, or take another "
        "estimator without critic, rloo for example."
    ),
    f"{ROLLOUT}.over_sample_rate with {ROLLOUT}.max_staleness if {ROLLOUT}.partial_rollout=false": (
        "which prompts a step trains on is known before it begins. Set over_sample_rate=0, max_staleness=0, or "
        "partial_rollout=true."
    ),
    f"{ROLLOUT}.partial_rollout with {ROLLOUT}.max_staleness=0": (
        "a token of an earlier step is older than the weights it would train. Set one of them only."
    ),
    f"{ROLLOUT}.over_sample_rate with {ROLLOUT}.mode!=async": _ONE_CALL,
    f"{ROLLOUT}.partial_rollout with {ROLLOUT}.mode!=async": _ONE_CALL,
    f"{ROLLOUT}.partial_rollout with {ROLLOUT}.calculate_log_probs=false": (
        "a response of several versions of the weights can only be corrected by the log-probs it was sampled with. Set "
        "calculate_log_probs=true."
    ),
    f"{ROLLOUT}.skip_rollout with {ROLLOUT}.over_sample_rate": _BY_SPEED,
    f"{ROLLOUT}.skip_rollout with {ROLLOUT}.partial_rollout": _BY_SPEED,
    f"{ROLLOUT}.skip_rollout with {ROLLOUT}.max_staleness": (
        "such a batch is begun a step early, where none is kept or looked for. Set one of them only."
    ),
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def group_estimator_requires_several_responses(config: PPOConfig) -> Iterator[Problem]:
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    # alone in its group a response is its own mean: every advantage would be 0
    if estimator in _GROUP_ESTIMATORS and rollout.n < 2:
        text = (
            f"with algorithm.adv_estimator={estimator}: a response is compared with others of its group, and there are "
            "none. Sample at least 2 responses per prompt, or choose another estimator."
        )
        yield problem(config, f"{ROLLOUT}.n", text, "algorithm.adv_estimator")


@validator("error")
def generating_ahead_is_bounded(config: PPOConfig) -> Iterator[Problem]:
    shared = config.actor_rollout_ref
    if shared.generates_ahead and shared.rollout.staleness > 1 and not shared.rollout.partial_rollout:
        text = (
            f"with {ROLLOUT}.partial_rollout=false: a batch is generated with one version of the weights, and while it "
            f"is, the next version cannot reach the engines. Set {ROLLOUT}.mode=async and partial_rollout=true, with "
            "which they interrupt it, or max_staleness=1."
        )
        yield problem(config, f"{ROLLOUT}.max_staleness", text, f"{ROLLOUT}.partial_rollout")


@validator("error")
def sampling_kwargs_allowed(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    known = rollout.traits.sampling_kwargs
    for place in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        for name, value in get_path(config, place).sampling_kwargs.items():
            key = f"{place}.sampling_kwargs.{name}"
            if name in OWN:
                way_out = f"set {ROLLOUT if name == 'ignore_eos' else place}.{name}, the key it has of its own"
            # private fields of an engine's parameter class are nobody's to set
            elif name in DECIDED or name.startswith("_"):
                way_out = DECIDED.get(name, "leave it out")
            elif known is not None and name not in known:
                way_out = f"{ROLLOUT}.name={rollout.name} knows {', '.join(known)}; use another engine for others"
            else:
                continue
            text = f"{key}={show(value)} cannot be handed to the engine: {way_out}."
            yield Problem(key, text, (f"{place}.sampling_kwargs", f"{ROLLOUT}.name"))


@validator("error")
def stop_strings_not_empty(config: PPOConfig) -> Iterator[Problem]:
    for place in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        stop = get_path(config, place).stop
        # an empty text ends every response before its first token
        if "" in ([stop] if isinstance(stop, str) else stop or []):
            yield problem(config, f"{place}.stop", "holds an empty text, which would end every response. Leave it out.")


@validator("error")
def prompt_length_equals_max_prompt_length(config: PPOConfig) -> Iterator[Problem]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.prompt_length != data.max_prompt_length:
        text = (
            f"differs from data.max_prompt_length={data.max_prompt_length}, the length prompts are padded to. Set only "
            "the latter."
        )
        yield problem(config, f"{ROLLOUT}.prompt_length", text, "data.max_prompt_length")


@validator("error")
def max_model_len_holds_prompt_and_response(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.longest_sequence
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        text = (
            f"is shorter than prompt and response together ({rollout.prompt_length} + {rollout.response_length} = "
            f"{longest}). Raise it, leave it null, or shorten data.max_response_length."
        )
        yield problem(config, f"{ROLLOUT}.max_model_len", text, "data.max_response_length")


@validator("error")
def chunked_prefill_vs_max_batched_tokens(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    # the engine plans for max_model_len, also where prompt and response are shorter
    longest = rollout.max_model_len or rollout.longest_sequence
    if rollout.traits.has_pipeline and not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < longest:
        text = (
            f"with {ROLLOUT}.enable_chunked_prefill=false: vLLM then reads a sequence in one forward, and it may have "
            f"{longest} tokens. Raise it to {longest}, or set enable_chunked_prefill=true."
        )
        yield problem(config, f"{ROLLOUT}.max_num_batched_tokens", text, f"{ROLLOUT}.enable_chunked_prefill")


@validator("error")
def tensor_parallel_size_divides_workers(config: PPOConfig) -> Iterator[Problem]:
    rollout, workers = config.actor_rollout_ref.rollout, sum(config.rollout_processes)
    place = "trainer" if config.actor_rollout_ref.hybrid_engine else ROLLOUT
    stages = rollout.pipeline_stages
    if rollout.traits.is_external and workers % (rollout.tensor_model_parallel_size * stages):
        times = f"times engine_kwargs.{rollout.name}.pipeline_parallel_size={stages} " if stages != 1 else ""
        what = f"the {workers} workers ({place}.nnodes x {place}.n_gpus_per_node)"
        text, also = f"{times}does not divide {what}. Choose a divisor of {workers}.", f"{place}.n_gpus_per_node"
        yield problem(config, f"{ROLLOUT}.tensor_model_parallel_size", text, also, f"{ROLLOUT}.engine_kwargs")


@validator("error")
def partial_rollout_sampling_kwargs(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if not (rollout.partial_rollout and rollout.over_sample_rate):
        return
    for name in sorted(set(OF_WHOLE_RESPONSES).intersection(rollout.sampling_kwargs)):
        key, value = f"{ROLLOUT}.sampling_kwargs.{name}", rollout.sampling_kwargs[name]
        if value:
            text = (
                f"{key}={show(value)} with {ROLLOUT}.partial_rollout=true: it looks at the response from its start, "
                "and an engine that continues one takes the tokens generated before for prompt. Leave it out, or set "
                "partial_rollout=false."
            )
            yield Problem(key, text, (f"{ROLLOUT}.sampling_kwargs", f"{ROLLOUT}.partial_rollout"))


@validator("error")
def weight_sync_freq_requirements(config: PPOConfig) -> Iterator[Problem]:
    key, shared = "trainer.weight_sync_freq", config.actor_rollout_ref
    # every step is what all engines and modes do
    if config.trainer.weight_sync_freq == 1:
        return
    if not shared.hybrid_engine:
        why = "a rollout on devices of its own is sent weights as it goes"
        way_out = "actor_rollout_ref.hybrid_engine=true"
    elif shared.rollout.mode == "async":
        why, way_out = "servers are handed the newest weights at every step", f"{ROLLOUT}.mode=sync"
    elif shared.rollout.free_cache_engine:
        why, way_out = "the engine gives its weights back between steps", f"{ROLLOUT}.free_cache_engine=false"
    else:
        return
    yield problem(config, key, f"does not work: {why}. Set {way_out}, or leave it 1.", way_out.partition("=")[0])


# -- Settings of the rollout without effect, and those that make it sample from another policy -----------------------


@validator("warning")
def engine_options_unused_with_hf(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.traits.is_external:
        return
    knobs = [
        "enforce_eager",
        "disable_log_stats",
        "enable_chunked_prefill",
        "load_format",
        "max_model_len",
        "engine_kwargs",
    ]
    if rollout.tensor_model_parallel_size != 1:
        knobs.append("tensor_model_parallel_size")
    why = f"{ROLLOUT}.name={rollout.name} has no such knob"
    yield from unused(config, [f"{ROLLOUT}.{knob}" for knob in knobs], is_given, why)


@validator("warning")
def engine_kwargs_of_other_engine(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.engine_kwargs"
    if not rollout.traits.is_external:
        return
    for engine, arguments in rollout.engine_kwargs.items():
        given = [f"{key}.{engine}.{name}={show(value)}" for name, value in (arguments or {}).items() if value]
        # the defaults of verl's YAML name both engines: only what the user set is remarked
        if engine != rollout.name and given and is_given(f"{key}.{engine}"):
            verb = "has" if len(given) == 1 else "have"
            text = f"{', '.join(given)} {verb} no effect: {ROLLOUT}.name={rollout.name} reads {key}.{rollout.name}"
            yield Problem(f"{key}.{engine}", text)


@validator("warning")
def gpu_memory_utilization_on_cpu(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    key, rollout = f"{ROLLOUT}.gpu_memory_utilization", config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu" and is_given(key):
        most = ", 1 GiB at most" if rollout.traits.is_external else ""
        text = (
            f"{key}={show(rollout.gpu_memory_utilization)} has no effect on any GPU with trainer.device=cpu: half of "
            f"that share of the machine's memory, divided among its workers{most}, bounds the key-value cache, and so "
            f"only how many responses are generated at a time, as {ROLLOUT}.max_num_seqs does"
        )
        yield Problem(key, text)


@validator("warning")
def enforce_eager_on_cpu(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.traits.has_cuda_graphs and config.trainer.device == "cpu" and not rollout.enforce_eager:
        yield from unused(config, [f"{ROLLOUT}.enforce_eager"], is_given, "there are no CUDA graphs on a CPU")


@validator("warning")
def sampling_options_unused_when_greedy(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for key in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        sampling = get_path(config, key)
        if not sampling.do_sample:
            names = ["top_k", "top_p", "min_p"]
            names += ["temperature"] * (key != ROLLOUT)  # log-probs are divided by rollout's
            yield from unused(config, [f"{key}.{name}" for name in names], is_given, f"{key}.do_sample=false")
        elif sampling.temperature == 0:
            names = ["top_k", "top_p", "min_p", "do_sample"]
            yield from unused(config, [f"{key}.{name}" for name in names], is_given, f"{key}.temperature=0 is greedy")


@validator("warning")
def greedy_validation_with_several_responses(config: PPOConfig) -> Iterator[Problem]:
    sampling, key = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    greedy = [f"{key}.do_sample=false"] * (not sampling.do_sample) or [f"{key}.temperature=0"] * (
        sampling.temperature == 0
    )
    if sampling.n > 1 and greedy:
        text = (
            f"{key}.n={sampling.n} with {greedy[0]} gives {sampling.n} equal answers to each prompt. Set "
            f"{key}.do_sample=true and {key}.temperature=1.0, or {key}.n=1"
        )
        yield Problem(f"{key}.n", text)


@validator("warning")
def fire_sampling_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    fire = [f"{ROLLOUT}.fire_temperature", f"{ROLLOUT}.fire_top_k"]
    if not rollout.use_fire_sampling:
        yield from unused(config, fire, is_given, f"{ROLLOUT}.use_fire_sampling=false")
    elif not rollout.do_sample:
        yield from unused(config, [f"{ROLLOUT}.use_fire_sampling", *fire], is_given, f"{ROLLOUT}.do_sample=false")
    elif rollout.top_k > 0:
        why = f"{ROLLOUT}.top_k={rollout.top_k} holds for the first token too"
        yield from unused(config, fire[1:], is_given, why)


@validator("warning")
def sampling_differs_from_trained_policy(config: PPOConfig) -> Iterator[Problem]:
    """Old log-probs are those of softmax(logits / temperature); tokens may be sampled from another distribution."""
    if config.trainer.val_only:
        return
    rollout = config.actor_rollout_ref.rollout
    shapes = {
        "do_sample": not rollout.do_sample,
        "top_p": rollout.do_sample and rollout.top_p < 1,
        "top_k": rollout.do_sample and rollout.top_k > 0,
        "min_p": rollout.do_sample and rollout.min_p > 0,
        "repetition_penalty": rollout.repetition_penalty != 1,
        "use_fire_sampling": rollout.do_sample and rollout.use_fire_sampling,
        **{f"sampling_kwargs.{name}": name in RESHAPE for name, v in rollout.sampling_kwargs.items() if v is not None},
    }
    keys = [f"{ROLLOUT}.{name}" for name, holds in shapes.items() if holds]
    # one sentence for all of them, for there is one remedy
    given = [f"{key}={show(get_path(config, key))}" for key in keys]
    if given:
        text = (
            f"{', '.join(given)} {'makes' if len(given) == 1 else 'make'} the policy that samples another one than the "
            f"policy that is trained: log-probs are computed under softmax(logits / {ROLLOUT}.temperature), so ratios "
            f"do not see the difference. {ROLLOUT}.calculate_log_probs=true measures it"
        )
        yield Problem(keys[0], text)


@validator("warning")
def rollout_device_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.actor_rollout_ref.hybrid_engine:
        keys = [key for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node") if get_path(config, key)]
        yield from unused(config, keys, is_given, "with actor_rollout_ref.hybrid_engine=true the actor's are used")
    else:
        why = "with actor_rollout_ref.hybrid_engine=false the rollout shares its devices with nobody and stays awake"
        yield from unused(config, [f"{ROLLOUT}.free_cache_engine"], is_given, why)


@validator("warning")
def partial_rollout_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    shared, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    if not rollout.over_sample_rate and not shared.generates_continuously:
        names = ["max_postponements"] + ["partial_rollout", "max_staleness"] * (not shared.generates_ahead)
        why = f"with {ROLLOUT}.over_sample_rate=0 every response is generated to its end in one step"
        yield from unused(config, [f"{ROLLOUT}.{name}" for name in names if rollout[name]], is_given, why)
    elif rollout.partial_rollout and (rollout.max_postponements or 0) > rollout.staleness:
        text = (
            f"{ROLLOUT}.max_postponements={rollout.max_postponements} is more than "
            f"{ROLLOUT}.max_staleness={rollout.staleness}: what a response drew before its last "
            f"{rollout.staleness} weight updates is discarded and generated again"
        )
        yield Problem(f"{ROLLOUT}.max_postponements", text)


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


@validator("advice")
def high_gpu_memory_utilization(config: PPOConfig) -> Iterator[Problem]:
    rollout, is_shared = config.actor_rollout_ref.rollout, config.actor_rollout_ref.hybrid_engine
    key = f"{ROLLOUT}.gpu_memory_utilization"
    # on a CPU the share bounds the key-value cache only
    if config.trainer.device != "cuda":
        return
    if rollout.gpu_memory_utilization > 0.9 and is_shared:
        text = (
            f"leaves little of each GPU to the {config.algorithm.adv_estimator} update on the same devices. Common "
            f"are 0.4 to 0.8."
        )
        yield problem(config, key, text)
    if not rollout.free_cache_engine and is_shared and rollout.traits.is_external:
        text = (
            f"with {key}={rollout.gpu_memory_utilization}: the engine holds that share of each GPU while the actor "
            f"trains. Set it to true."
        )
        yield problem(config, f"{ROLLOUT}.free_cache_engine", text, key)
