"""Validators of prompts and of batch arithmetic, and that arithmetic in words."""

from collections.abc import Iterator
from typing import Any

from verl.batch import MicroBatching
from verl.config.base import Problem, get_path
from verl.config.checks.base import IsGiven, contradictions, problem, scoring_roles, trained_roles, unused, validator
from verl.config.ppo import ACTOR, MODEL, REF, RM, ROLLOUT, PPOConfig
from verl.config.tree import show

_SKIP, _PADDED = f"{ACTOR}.skip_old_log_probs", "padded rows do not share tokens, and each runs its own prompt. Set"

_CONTRADICTIONS = {
    f"{_SKIP} with algorithm.use_kl_in_reward": (
        "the reward then holds log pi_old - log pi_ref. Set one of them to false."
    ),
    f"{_SKIP} with {ACTOR}.calculate_sum_pi_squared": (
        "the sums come from the pass that is left out. Set one of them to false."
    ),
    f"{_SKIP} with algorithm.use_pf_ppo": (
        "the update then sees some responses only, and some twice. Set one of them to false."
    ),
    f"actor_rollout_ref.model.use_prefix_sharing with {ACTOR}.use_remove_padding=false": (
        f"{_PADDED} actor_rollout_ref.model.use_remove_padding=true too."
    ),
    "critic.model.use_prefix_sharing with critic.model.use_remove_padding=false if uses_critic": (
        f"{_PADDED} critic.model.use_remove_padding=true too."
    ),
}
contradictions(__name__, _CONTRADICTIONS)


@validator("error")
def messages_key_or_prompt_key(config: PPOConfig) -> Iterator[Problem]:
    data = config.data
    if data.messages_key is not None and data.prompt_key not in ("prompt", data.messages_key):
        text = f"and data.prompt_key={data.prompt_key} both name the column of prompts. Set one of them."
        yield problem(config, "data.messages_key", text, "data.prompt_key")


@validator("error")
def max_samples_is_not_zero(config: PPOConfig) -> Iterator[Problem]:
    for key in ("data.train_max_samples", "data.val_max_samples"):
        if get_path(config, key) == 0:
            yield problem(config, key, "leaves no prompts. Give the number to use, or -1 for all.")


@validator("error")
def mixture_ratios_sum_to_one(config: PPOConfig) -> Iterator[Problem]:
    mixture = config.data.mixture
    if not mixture:
        return
    odd = [name for name, share in mixture.items() if isinstance(share, bool) or not isinstance(share, int | float)]
    if odd or min(mixture.values()) < 0 or abs(sum(mixture.values()) - 1) > 0.01:
        what = f"{odd[0]}={show(mixture[odd[0]])} is no number" if odd else f"they add up to {sum(mixture.values()):g}"
        text = f"must give shares from 0 to 1 that add up to 1; {what}. Write {{source: 0.7, other: 0.3}}."
        yield problem(config, "data.mixture", text)


@validator("error")
def one_source_of_training_prompts(config: PPOConfig) -> Iterator[Problem]:
    others = [key for key in ("data.sampler.class_path", "data.datagen.path") if get_path(config, key)]
    if config.data.mixture and others:
        yield problem(
            config, "data.mixture", f"and {others[0]} both decide which prompts are sampled. Set one of them.", *others
        )
    if config.data.custom_cls.path and config.data.datagen.path:
        text = (
            "and data.custom_cls.path both name what the training prompts are. Set one of them; a class of yours may "
            "inherit from verl.data.dynamicgen_dataset.DynamicGenDataset."
        )
        yield problem(config, "data.datagen.path", text, "data.custom_cls.path")


# -- Validators of batch arithmetic: prompts, mini-batches, micro-batches and token budgets --------------------------


@validator("error")
def mini_batch_size_divides_train_batch_size(config: PPOConfig) -> Iterator[Problem]:
    prompts = config.prompts_per_update
    has_other = config.data.gen_batch_size and not config.algorithm.filter_groups.enable
    source = "data.gen_batch_size" if has_other else "data.train_batch_size"
    for key, role, _ in trained_roles(config):
        name, mini = f"{key}.ppo_mini_batch_size", role.ppo_mini_batch_size
        if mini > prompts:
            text = (
                f"is larger than {source}={prompts}: no mini-batch could be filled. Lower the first or raise the "
                "second."
            )
            yield problem(config, name, text, source)
        # every prompt of a step belongs to one mini-batch, and all of these have the same size
        elif prompts % mini:
            text = (
                f"does not divide {source}={prompts}: {prompts % mini} prompts would be left over at every step. "
                f"Choose a divisor of {prompts}."
            )
            yield problem(config, name, text, source)


@validator("error")
def micro_batch_size_within_mini_batch_of_a_rank(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, ranks = role.ppo_micro_batch_size_per_gpu, config.dp_size(role)
        # rounded up: the rank with the most rows decides
        rows = -(-role.ppo_mini_batch_size * n // ranks)
        if not role.use_dynamic_bsz and micro and micro > rows:
            yield problem(
                config,
                f"{key}.ppo_micro_batch_size_per_gpu",
                f"is larger than the {rows} responses of a rank's mini-batch ({key}.ppo_mini_batch_size="
                f"{role.ppo_mini_batch_size} x {ROLLOUT}.n={n} / {ranks} data-parallel ranks). Lower it to {rows}, or "
                "raise ppo_mini_batch_size.",
                f"{key}.ppo_mini_batch_size",
                f"{ROLLOUT}.n",
            )


@validator("error")
def micro_batch_size_given_once(config: PPOConfig) -> Iterator[Problem]:
    for name, budget, dynamic, ranks in scoring_roles(config):
        local = f"{name}_per_gpu"
        total, per_gpu = get_path(config, name), get_path(config, local)
        # a total given alone has become a size per rank by now
        if total is not None and per_gpu is not None:
            text = (
                f"{name}={total} and {local}={per_gpu} are both set: they say the same thing, for all {ranks} ranks "
                "and for one. Keep the second."
            )
            yield Problem(name, text, (local,))
        elif not dynamic and total is None and per_gpu is None:
            switch = f"{ROLLOUT}.log_prob_use_dynamic_bsz" if name.startswith(ROLLOUT) else _switch(name)
            yield Problem(
                local,
                f"{local}=null leaves open how many responses one forward holds. Give it a number, 1 if in "
                f"doubt, or set {switch}=true and split by tokens ({budget}).",
            )


def _switch(name: str) -> str:
    section = name.rpartition(".")[0]
    return f"{section}.log_prob_use_dynamic_bsz" if section == REF else f"{section}.use_dynamic_bsz"


@validator("error")
def token_budget_holds_longest_sequence(config: PPOConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.longest_sequence
    for name, budget, dynamic, _ in scoring_roles(config):
        section = name.rpartition(".")[0]
        # old log-probs are the actor's to compute
        sp = get_path(config, ACTOR if section == ROLLOUT else section).ulysses_sequence_parallel_size
        if dynamic and get_path(config, budget) * sp < longest:
            shared = f"x ulysses_sequence_parallel_size={sp} " if sp > 1 else ""
            text = (
                f"{shared}cannot hold one row of {rollout.prompt_length} prompt and {rollout.response_length} response "
                f"tokens = {longest}. Raise it to {-(-longest // sp)} or more, or shorten data.max_prompt_length or "
                "data.max_response_length."
            )
            yield problem(config, budget, text, "data.max_prompt_length", "data.max_response_length")


@validator("error")
def skip_old_log_probs_requires_one_optimizer_step(config: PPOConfig) -> Iterator[Problem]:
    actor, key = config.actor_rollout_ref.actor, f"{ACTOR}.skip_old_log_probs"
    if not actor.skip_old_log_probs:
        return
    # with one step the policy of the update is still the one that sampled
    steps = config.prompts_per_update // actor.ppo_mini_batch_size * actor.ppo_epochs
    if steps > 1:
        text = (
            f"with {steps} optimizer steps a batch ({ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size} of "
            f"{config.prompts_per_update} prompts, {ACTOR}.ppo_epochs={actor.ppo_epochs}): after the first of them the "
            "policy is no longer the one that sampled. Set it to false, or make one step of the batch."
        )
        yield problem(config, key, text, f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")


@validator("warning")
def micro_batch_size_or_token_budget_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    shared, critic = config.actor_rollout_ref, config.critic
    cuts = [
        (shared.actor.use_dynamic_bsz, f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
        *(
            (
                section.log_prob_use_dynamic_bsz,
                f"{key}.log_prob_micro_batch_size_per_gpu",
                f"{key}.log_prob_max_token_len_per_gpu",
            )
            for key, section in ((ROLLOUT, shared.rollout), *([(REF, shared.ref)] if config.scores_reference else []))
        ),
        *(
            (critic.use_dynamic_bsz, f"critic.{kind}_micro_batch_size_per_gpu", f"critic.{kind}_max_token_len_per_gpu")
            for kind in (("ppo", "forward") if config.uses_critic else ())
        ),
    ]
    rm = config.reward_model
    if rm.uses_engine:
        cuts.append((rm.use_dynamic_bsz, f"{RM}.micro_batch_size_per_gpu", f"{RM}.forward_max_token_len_per_gpu"))
    # of each pass one of the two options is read, as its switch says
    by_tokens = [size for dynamic, size, _ in cuts if dynamic]
    leader = f"{ACTOR}.ppo_max_token_len_per_gpu"  # others follow it: it is read if any of them is
    by_count = [budget for dynamic, _, budget in cuts if not dynamic and budget != leader]
    if not any(dynamic for dynamic, _, _ in cuts):
        by_count.append(leader)
    yield from unused(config, by_tokens, is_given, "micro-batches are split by tokens (use_dynamic_bsz)")
    yield from unused(config, by_count, is_given, "micro-batches are split by count (use_dynamic_bsz=false)")


@validator("warning")
def log_prob_batching_unused_with_bypass_mode(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.algorithm.rollout_correction.bypass_mode:
        names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
        why = "algorithm.rollout_correction.bypass_mode=true computes no old log-probs"
        keys = [key for key in (f"{ROLLOUT}.log_prob_{name}" for name in names) if get_path(config, key) is not None]
        yield from unused(config, keys, is_given, why)


@validator("warning")
def prefix_sharing_without_shared_prompts(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    """Of one response a prompt there is nothing to share, and in micro-batches of one row none meets another."""
    shared, critic = config.actor_rollout_ref, config.critic
    passes = {
        "actor_rollout_ref.model": [shared.actor.update_split, shared.rollout.log_prob_split],
        "critic.model": [critic.update_split, critic.forward_split] if config.uses_critic else [],
    }
    if config.scores_reference:
        passes["actor_rollout_ref.model"].append(shared.ref.log_prob_split)
    for model, splits in passes.items():
        key = [f"{model}.use_prefix_sharing"] if get_path(config, model).use_prefix_sharing else []
        if shared.rollout.n == 1:
            yield from unused(config, key, is_given, f"{ROLLOUT}.n=1 response a prompt has nothing to share with")
        elif splits and all(split.size == 1 for split in splits):
            yield from unused(config, key, is_given, "micro-batches of one row have nothing to share with")


@validator("warning")
def rows_are_packed_to_share_prompts(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    """The default on a CPU packs rows that the user asked to be padded."""
    key, shared = f"{MODEL}.use_remove_padding", config.actor_rollout_ref
    if config.shares_prompts_by_default and is_given(key) and not shared.model.use_remove_padding:
        text = (
            f"{key}=false: on a CPU rows of Llama, Mistral, Qwen2 and Qwen3 are packed all the same, to share the "
            f"tokens of prompts. {MODEL}.use_prefix_sharing=false keeps them padded"
        )
        yield Problem(key, text, (f"{MODEL}.use_prefix_sharing",))


@validator("warning")
def compiled_layers_share_no_prompts(config: PPOConfig) -> Iterator[Problem]:
    """The default on a CPU that ``compile_layers`` turns off."""
    key = f"{MODEL}.compile_layers"
    if get_path(config, key) and config.with_values({key: False}).shares_prompts_by_default:
        text = (
            f"{key}=true: the responses to one prompt do not share its tokens, as those of Llama, Mistral, Qwen2 and "
            f"Qwen3 do on a CPU by default. Long prompts may cost more than compiling saves; compare with {key}=false, "
            f"or set {MODEL}.use_prefix_sharing=true, {MODEL}.use_remove_padding=true for both"
        )
        yield Problem(key, text, (f"{MODEL}.use_prefix_sharing",))


@validator("warning")
def mini_batch_smaller_than_dp_size(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        rows, ranks = role.ppo_mini_batch_size * n, config.dp_size(role)
        if rows < ranks:
            text = (
                f"{key}.ppo_mini_batch_size={role.ppo_mini_batch_size} x {ROLLOUT}.n={n} = {rows} responses a "
                f"mini-batch on {ranks} data-parallel ranks: {ranks - rows} of them have nothing to do at each step"
            )
            yield Problem(f"{key}.ppo_mini_batch_size", text)


@validator("warning")
def max_response_length_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    length = config.actor_rollout_ref.rollout.response_length
    if length != config.data.max_response_length:
        yield from unused(config, ["data.max_response_length"], is_given, f"{ROLLOUT}.response_length={length} decides")


@validator("warning")
def launch_reward_fn_async_unused_with_filter_groups(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    if config.algorithm.filter_groups.enable and config.reward_model.launch_reward_fn_async:
        why = "algorithm.filter_groups chooses groups by their rewards before anything else is computed"
        yield from unused(config, [f"{RM}.launch_reward_fn_async"], is_given, why)


# -- Settings with which a run would work and which are probably not meant ------------------------------------------


@validator("advice")
def low_token_budget(config: PPOConfig) -> Iterator[Problem]:
    for key, role, n in trained_roles(config):
        micro, rows = role.ppo_micro_batch_size_per_gpu, role.ppo_mini_batch_size * n // config.dp_size(role)
        if not role.use_dynamic_bsz and micro and rows > micro and rows % micro:
            text = (
                f"does not divide the {rows} samples of a rank's mini-batch: the last forward of each has "
                f"{rows % micro}. Choose a divisor of {rows}, or {key}.use_dynamic_bsz=true."
            )
            yield problem(config, f"{key}.ppo_micro_batch_size_per_gpu", text, f"{key}.ppo_mini_batch_size")
    shared, longest = config.actor_rollout_ref, config.actor_rollout_ref.rollout.longest_sequence
    if shared.actor.use_dynamic_bsz:
        rows = -(-shared.actor.ppo_mini_batch_size * shared.rollout.n // config.dp_size(shared.actor))
        sp = shared.actor.ulysses_sequence_parallel_size
        is_low = shared.actor.ppo_max_token_len_per_gpu * sp < 2 * longest
        if rows > 1 and is_low and config.trainer.device == "cuda":
            text = (
                f"holds one sample of {longest} tokens at a time, if they are long. Raise it as far as memory goes: "
                "twice to four times the longest is common."
            )
            yield problem(config, f"{ACTOR}.ppo_max_token_len_per_gpu", text)


@validator("advice")
def fewer_samples_than_workers(config: PPOConfig) -> Iterator[Problem]:
    samples, workers = config.data.prompts_per_step * config.actor_rollout_ref.rollout.n, sum(config.rollout_processes)
    # prompts x responses, for a group may be spread over workers
    if samples < workers:
        text = (
            f"with {ROLLOUT}.n={config.actor_rollout_ref.rollout.n} gives {samples} samples a step to {workers} "
            f"workers: some have none. Raise it."
        )
        yield problem(config, "data.train_batch_size", text, f"{ROLLOUT}.n")


# -- The batch arithmetic of a run in words: prompts -> responses -> mini-batches -> micro-batches -> optimizer steps


def batch_plan(config: PPOConfig) -> str:
    """The stages of one training step, a line each. Assumes that no validator found an error."""
    shared, prompts = config.actor_rollout_ref, config.prompts_per_update
    rows = prompts * shared.rollout.n
    workers = config.trainer.world_size
    lines = [
        f"one training step: {prompts} prompts x {shared.rollout.n} responses = {rows} rows on "
        f"{counted(workers, 'worker')}, {_each(rows, workers)}; at most {shared.rollout.prompt_length} + "
        f"{shared.rollout.response_length} tokens each"
    ]
    filtering = config.algorithm.filter_groups
    if filtering.enable:
        bound = f"at most {filtering.max_num_gen_batches}" if filtering.max_num_gen_batches else "without bound"
        generated = f"{config.data.prompts_per_step} prompts x {shared.rollout.n} responses"
        lines.append(f"generated: batches of {generated}, {bound}, until {prompts} groups differ in {filtering.metric}")
    for key, role, n in trained_roles(config):
        ranks, split, mini = config.dp_size(role), role.update_split, role.ppo_mini_batch_size * n
        lines.append(
            f"{key.rpartition('.')[2]}: {counted(optimizer_steps(config, role), 'optimizer step')}, each over "
            f"{role.ppo_mini_batch_size} prompts x {n} = {mini} rows on {counted(ranks, 'rank')}"
            f"{_of_sp(role)}, {_each(mini, ranks, split)}, {_forwards(-(-mini // ranks), split)}"
        )
    scored = []
    if config.skips_old_log_probs:
        lines.append("old log-probs: those of the update's own forwards")
    elif config.algorithm.rollout_correction.bypass_mode:
        lines.append("old log-probs: those the responses were sampled with")
    else:
        scored.append(("old log-probs", shared.rollout.log_prob_split, config.dp_size(shared.actor)))
    if config.scores_reference:
        scored.append(("reference log-probs", shared.ref.log_prob_split, config.dp_size(shared.ref)))
    if config.uses_critic:
        scored.append(("values", config.critic.forward_split, config.dp_size(config.critic)))
    if config.reward_model.uses_engine:
        scored.append(("reward model", config.reward_model.forward_split, config.dp_size(config.reward_model)))
    lines += [
        f"{what}: {rows} rows on {counted(ranks, 'rank')}, {_each(rows, ranks, split)}, "
        f"{_forwards(-(-rows // ranks), split)}"
        for what, split, ranks in scored
    ]
    return "\n".join(lines)


def optimizer_steps(config: PPOConfig, role: Any) -> int:
    """Optimizer steps of the ``actor`` or ``critic`` section in one training step."""
    return config.prompts_per_update // role.ppo_mini_batch_size * role.ppo_epochs


def counted(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _each(rows: int, ranks: int, split: MicroBatching | None = None) -> str:
    """Number of rows of a rank. Forwards of so many tokens are balanced by cost, not by rows."""
    if ranks > 1 and split is not None and split.size is None:
        return f"about {rows / ranks:.3g} each"
    return f"{rows // ranks} each" if rows % ranks == 0 else f"{rows // ranks} or {rows // ranks + 1} each"


def _of_sp(role: Any) -> str:
    sp = role.ulysses_sequence_parallel_size
    return f" of {sp} workers" if sp > 1 else ""


def _forwards(rows: int, split: MicroBatching) -> str:
    if split.size is None:
        return f"in forwards of at most {split.max_tokens} tokens"
    return f"in {counted(-(-rows // split.size), 'forward')} of {min(split.size, rows)}"
