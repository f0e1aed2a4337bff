"""Where rewards come from and how they are shaped."""

from collections.abc import Iterator, Mapping

from verl.config.base import Problem
from verl.config.ppo import PPOConfig
from verl.config.rules.base import RM, ROLLOUT, SHAPING, problem, rule, shapes_scores


@rule
def reward_model_reads_conversations(config: PPOConfig) -> Iterator[Problem]:
    if config.rewrites_for_reward_model and not config.data.return_raw_chat:
        yield problem(
            config,
            "data.return_raw_chat",
            f"with {RM}.model.input_tokenizer={config.reward_model.model.input_tokenizer}: the reward model reads each "
            f"conversation in its own chat template, and the messages are left out. Set data.return_raw_chat=true or, "
            f"if the reward model has the policy's tokens and template, {RM}.model.input_tokenizer=null.",
            f"{RM}.model.input_tokenizer",
        )


@rule
def a_batch_is_scored_by_a_function_of_the_users(config: PPOConfig) -> Iterator[Problem]:
    rm, path = config.reward_model, config.custom_reward_function.path
    if rm.reward_manager != "batch" or rm.enable:
        return
    places = rm.by_source or {}
    way_out = (
        f"the built-in rules take one response at a time. Name a function of lists in custom_reward_function.path, or "
        f"set {RM}.reward_manager=naive."
    )
    if not places and path is None:
        yield problem(
            config,
            f"{RM}.reward_manager",
            f"without custom_reward_function.path: {way_out}",
            "custom_reward_function.path",
        )
    for pattern, place in places.items():
        name = place.get("function") if isinstance(place, Mapping) else place
        if str(name).partition(":")[0] == "builtin":
            yield problem(
                config,
                f"{RM}.by_source",
                f"sends {pattern} to the built-in rules, and with {RM}.reward_manager=batch {way_out}",
                f"{RM}.reward_manager",
            )


@rule
def reward_model_reads_whole_responses(config: PPOConfig) -> Iterator[Problem]:
    rm, rollout = config.reward_model, config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if not rm.enable or rm.max_length is None:
        return
    if not rm.model.input_tokenizer and rm.max_length < longest:
        yield problem(
            config,
            f"{RM}.max_length",
            f"is shorter than prompt and response together ({rollout.prompt_length} + {rollout.response_length} = "
            f"{longest}), and token ids are passed on whole ({RM}.model.input_tokenizer=null). Leave it null, or "
            f"shorten data.max_response_length.",
            "data.max_response_length",
        )
    elif rm.model.input_tokenizer and rm.use_dynamic_bsz:
        budget = rm.forward_max_token_len_per_gpu * rm.ulysses_sequence_parallel_size
        if budget < rm.max_length:
            yield problem(
                config,
                f"{RM}.forward_max_token_len_per_gpu",
                f"cannot hold one conversation of {RM}.max_length={rm.max_length} tokens. Raise the first or lower "
                f"the second.",
                f"{RM}.max_length",
            )


@rule
def gdpo_has_rewards_to_combine(config: PPOConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if not keys:
        yield problem(
            config,
            "algorithm.gdpo_reward_keys",
            "with algorithm.adv_estimator=gdpo: it combines rewards it finds by name. List the names the reward "
            "function returns beside score, [accuracy,format] for example.",
            "algorithm.adv_estimator",
        )
    elif weights is not None and len(weights) != len(keys):
        yield problem(
            config,
            "algorithm.gdpo_reward_weights",
            f"has {len(weights)} numbers for the {len(keys)} algorithm.gdpo_reward_keys. Give one weight a key, or "
            f"null for equal ones.",
            "algorithm.gdpo_reward_keys",
        )


@rule
def greedy_baseline_is_of_the_same_scale(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.adv_estimator == "remax":
        for key in shapes_scores(config):
            yield problem(
                config,
                key,
                "changes the rewards of sampled responses, but not the score of the greedy one, with which "
                "algorithm.adv_estimator=remax compares them. Leave it out, or use rloo or reinforce.",
                "algorithm.adv_estimator",
            )


@rule
def scores_of_a_group_are_several(config: PPOConfig) -> Iterator[Problem]:
    if config.actor_rollout_ref.rollout.n == 1:
        for name in ("mean", "std"):
            if config.algorithm.reward_shaping.norm[name] == "group":
                yield problem(
                    config,
                    f"{SHAPING}.norm.{name}",
                    f"compares responses to the same prompt, and {ROLLOUT}.n=1 draws one. Raise n, or choose batch or "
                    "running.",
                    f"{ROLLOUT}.n",
                )


@rule
def overlong_buffer_lies_in_the_response(config: PPOConfig) -> Iterator[Problem]:
    buffer, window = config.algorithm.reward_shaping.overlong_buffer, config.actor_rollout_ref.rollout.response_length
    if buffer.enable and not 0 < buffer.len <= window:
        yield problem(
            config,
            f"{SHAPING}.overlong_buffer.len",
            f"must be 1 to {ROLLOUT}.response_length={window}: the penalty grows over that many last tokens. Choose "
            f"e.g. {max(1, window // 4)}, or set {SHAPING}.overlong_buffer.enable=false.",
            f"{ROLLOUT}.response_length",
        )


@rule
def difficulty_is_a_band(config: PPOConfig) -> Iterator[Problem]:
    band = config.algorithm.sample_mask.difficulty
    if band is not None and (len(band) != 2 or not band[0] <= band[1]):
        yield problem(
            config,
            "algorithm.sample_mask.difficulty",
            "is no [low, high]: two numbers, the first at most the second. Give e.g. [0.1,0.9], or null for no mask.",
        )


@rule
def bands_have_two_ends(config: PPOConfig) -> Iterator[Problem]:
    clip, filtering = config.algorithm.reward_shaping.clip_range, config.algorithm.filter_groups
    if clip is not None and (len(clip) != 2 or not clip[0] < clip[1]):
        yield problem(
            config,
            f"{SHAPING}.clip_range",
            "is no [low, high]: two numbers, the first below the second. Give e.g. [-1,3], or null for no bounds.",
        )
    if filtering.low is not None and filtering.high is not None and not filtering.low < filtering.high:
        yield problem(
            config,
            "algorithm.filter_groups.low",
            f"is not below algorithm.filter_groups.high={filtering.high}: no group lies between them. Lower the first "
            "or raise the second.",
            "algorithm.filter_groups.high",
        )


@rule
def some_responses_are_whole(config: PPOConfig) -> Iterator[Problem]:
    if config.algorithm.sample_mask.drop_truncated and config.actor_rollout_ref.rollout.ignore_eos:
        yield problem(
            config,
            "algorithm.sample_mask.drop_truncated",
            f"with {ROLLOUT}.ignore_eos=true leaves nothing to learn from: every response runs into the length limit. "
            "Set one of them to false.",
            f"{ROLLOUT}.ignore_eos",
        )


@rule
def a_judge_has_a_name_and_a_scale(config: PPOConfig) -> Iterator[Problem]:
    judge, key = config.reward_model.judge, f"{RM}.judge"
    if judge.url and not judge.model:
        text = f"with {key}.url={judge.url}: name the model as the server knows it."
        yield problem(config, f"{key}.model", text, f"{key}.url")
    if judge.highest <= judge.lowest:
        text = f"is not above {key}.lowest={judge.lowest:g}: raise the first or lower the second."
        yield problem(config, f"{key}.highest", text, f"{key}.lowest")
