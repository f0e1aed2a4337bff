"""Settings of the rollout without effect, and those that make it sample from another policy."""

from collections.abc import Iterator

from verl.config.base import get_path
from verl.config.build import show
from verl.config.notices.base import IsGiven, given_below, notice, unread
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ROLLOUT
from verl.config.sampling_names import RESHAPE


@notice
def hf_has_no_engine_knobs(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "hf":
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
    yield from unread(config, [f"{ROLLOUT}.{knob}" for knob in knobs], is_given, f"{ROLLOUT}.name=hf has no such knob")


@notice
def engines_do_not_read_each_others_arguments(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.engine_kwargs"
    if rollout.name == "hf":
        return
    for engine, arguments in rollout.engine_kwargs.items():
        given = [f"{key}.{engine}.{name}={show(value)}" for name, value in (arguments or {}).items() if value]
        if engine != rollout.name and given and is_given(f"{key}.{engine}"):
            verb = "has" if len(given) == 1 else "have"
            yield f"{', '.join(given)} {verb} no effect: {ROLLOUT}.name={rollout.name} reads {key}.{rollout.name}"


@notice
def host_memory_is_not_a_gpus(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    key, rollout = f"{ROLLOUT}.gpu_memory_utilization", config.actor_rollout_ref.rollout
    if config.trainer.device == "cpu" and is_given(key):
        most = "" if rollout.name == "hf" else ", 1 GiB at most"
        yield (
            f"{key}={show(rollout.gpu_memory_utilization)} has no effect on any GPU with trainer.device=cpu: half of "
            f"that share of the machine's memory, divided among its workers{most}, bounds the key-value cache, and so "
            f"only how many responses are drawn at a time, as {ROLLOUT}.max_num_seqs does"
        )


@notice
def nothing_is_traced(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    backend = config.actor_rollout_ref.rollout.trace.backend
    keys = [] if backend == "file" else [f"{ROLLOUT}.trace.dir"]
    keys += [] if backend else [f"{ROLLOUT}.trace.token2text"]
    yield from unread(config, keys, is_given, f"{ROLLOUT}.trace.backend={show(backend)} does not read it")


@notice
def nothing_is_reused(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if not config.actor_rollout_ref.rollout.skip_rollout:
        yield from unread(config, [f"{ROLLOUT}.skip_dump_dir"], is_given, f"{ROLLOUT}.skip_rollout=false")


@notice
def always_woken_in_stages(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from unread(
        config, [f"{ROLLOUT}.multi_stage_wake_up"], is_given, "weights are always brought back first, the cache later"
    )


@notice
def one_call_has_no_agents(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.mode == "sync":
        keys = [f"{ROLLOUT}.server_host", f"{ROLLOUT}.max_running_requests"]
        keys += given_below(f"{ROLLOUT}.agent", config, is_given)
        yield from unread(config, keys, is_given, f"{ROLLOUT}.mode=sync samples a batch in one call, without servers")


@notice
def engines_on_cpu_are_eager(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("vllm", "sglang") and config.trainer.device == "cpu" and not rollout.enforce_eager:
        yield from unread(config, [f"{ROLLOUT}.enforce_eager"], is_given, "there are no CUDA graphs on a CPU")


@notice
def greedy_cuts_nothing(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    for key in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        sampling = get_path(config, key)
        if not sampling.do_sample:
            names = ["top_k", "top_p", "min_p"]
            names += ["temperature"] * (key != ROLLOUT)  # log-probs are divided by rollout's
            yield from unread(config, [f"{key}.{name}" for name in names], is_given, f"{key}.do_sample=false")
        elif sampling.temperature == 0:
            names = ("top_k", "top_p", "min_p", "do_sample")
            yield from unread(config, [f"{key}.{name}" for name in names], is_given, f"{key}.temperature=0 is greedy")


@notice
def greedy_answers_are_equal(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    sampling, key = config.actor_rollout_ref.rollout.val_kwargs, f"{ROLLOUT}.val_kwargs"
    greedy = [f"{key}.do_sample=false"] * (not sampling.do_sample) or [f"{key}.temperature=0"] * (
        sampling.temperature == 0
    )
    if sampling.n > 1 and greedy:
        yield (
            f"{key}.n={sampling.n} with {greedy[0]} gives {sampling.n} equal answers to each prompt. Set "
            f"{key}.do_sample=true and {key}.temperature=1.0, or {key}.n=1"
        )


@notice
def fire_needs_chance(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    fire = [f"{ROLLOUT}.fire_temperature", f"{ROLLOUT}.fire_top_k"]
    if not rollout.use_fire_sampling:
        yield from unread(config, fire, is_given, f"{ROLLOUT}.use_fire_sampling=false")
    elif not rollout.do_sample:
        yield from unread(config, [f"{ROLLOUT}.use_fire_sampling", *fire], is_given, f"{ROLLOUT}.do_sample=false")
    elif rollout.top_k > 0:
        why = f"{ROLLOUT}.top_k={rollout.top_k} holds for the first token too"
        yield from unread(config, fire[1:], is_given, why)


@notice
def nothing_ends_a_response(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.rollout.ignore_eos:
        keys = [f"{ROLLOUT}.stop_token_ids", f"{ROLLOUT}.val_kwargs.stop_token_ids"]
        yield from unread(config, keys, is_given, f"{ROLLOUT}.ignore_eos=true goes on after any token")


@notice
def sampled_from_another_policy(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    """Old log-probs are those of softmax(logits / temperature); tokens may be drawn from something else."""
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
    given = [f"{key}={show(get_path(config, key))}" for key in keys]
    if given:
        yield (
            f"{', '.join(given)} {'makes' if len(given) == 1 else 'make'} the policy that samples another one than the "
            f"policy that is trained: log-probs are computed under softmax(logits / {ROLLOUT}.temperature), so ratios "
            f"do not see the difference. {ROLLOUT}.calculate_log_probs=true measures it"
        )


@notice
def weights_go_tensor_by_tensor(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    yield from unread(
        config, [f"{ROLLOUT}.layered_summon"], is_given, "weights are always handed over tensor by tensor"
    )


@notice
def rollout_shares_devices(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    if config.actor_rollout_ref.hybrid_engine:
        keys = [key for key in (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node") if get_path(config, key)]
        yield from unread(config, keys, is_given, "with actor_rollout_ref.hybrid_engine=true the actor's are used")
    else:
        why = "with actor_rollout_ref.hybrid_engine=false the rollout shares its devices with nobody and stays awake"
        yield from unread(config, [f"{ROLLOUT}.free_cache_engine"], is_given, why)


@notice
def nothing_is_put_off(config: PPOConfig, is_given: IsGiven) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    names = [name for name in ("partial_rollout", "max_staleness", "max_postponements") if rollout[name]]
    if rollout.over_sample_rate == 0:
        why = f"with {ROLLOUT}.over_sample_rate=0 every response is drawn to its end in one step"
        yield from unread(config, [f"{ROLLOUT}.{name}" for name in names], is_given, why)
    elif not rollout.partial_rollout:
        why = f"{ROLLOUT}.partial_rollout=false keeps no tokens for a later step"
        yield from unread(config, [f"{ROLLOUT}.max_staleness"], is_given, why)
    elif rollout.max_postponements is not None and rollout.max_postponements > rollout.max_staleness:
        yield (
            f"{ROLLOUT}.max_postponements={rollout.max_postponements} is more than "
            f"{ROLLOUT}.max_staleness={rollout.max_staleness}: what a response drew before its last "
            f"{rollout.max_staleness} weight updates is thrown away and drawn anew"
        )
