"""Functions that rows of ``keys.yaml`` name: keys of ROLL that become more, or other, than an option with their value.

Each gets ROLL's key, its value, the ``Roll`` they stand in, and the argument that the row has behind its name. Null
comes to a function only where the row says so.
"""

from collections.abc import Iterator
from typing import Any

from verl.config.roll.batch import Roll
from verl.config.roll.table import (
    ACTOR,
    MODEL,
    REF,
    ROLLOUT,
    Idle,
    Note,
    Outcome,
    Refuse,
    Secret,
    Set,
    listed,
    place_of,
)

SHAPING, CORRECTION = "algorithm.reward_shaping", "algorithm.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"


# -- The run ---------------------------------------------------------------------------------------------------------


def steps(key: str, value: Any, roll: Roll, option: str) -> Iterator[Outcome]:
    """A number of steps; 0 and less mean never."""
    yield Set(option, value if isinstance(value, int) and value > 0 else -1)


def output_dir(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if roll.get("checkpoint_config.output_dir") is None:
        yield Set("trainer.default_local_dir", value)
    else:
        yield Note(f"{key}={value}: checkpoint_config.output_dir says where checkpoints go")


def track_with(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    trackers = [] if value == "stdout" else [str(value)]
    yield Set("trainer.logger", ["console", *trackers, *(["file"] if roll.get("logging_dir") else [])])


def tracker_kwargs(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    tracker = roll.get("track_with") or "tensorboard"
    for name, item in value.items():
        if item is None:
            continue
        if name in ("api_key", "login_kwargs"):  # other users of the machine read command lines
            secret = item.get("api_key") if isinstance(item, dict) else item
            yield Secret(f"{key}.{name}", "SWANLAB_API_KEY" if tracker == "swanlab" else "WANDB_API_KEY", str(secret))
        elif name == "project":
            yield Set("trainer.project_name", item)
        elif name == "log_dir" and tracker == "wandb":
            yield Set("trainer.tracker_kwargs.wandb.dir", item)
        elif tracker == "stdout":
            yield Note(f"{key}.{name} has no effect: track_with=stdout takes nothing")
        else:
            yield Set(f"trainer.tracker_kwargs.{tracker}.{name}", item)


def resume(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if isinstance(value, bool):
        yield Set("trainer.resume_mode", "auto" if value else "disable")
    else:
        yield Set("trainer.resume_mode", "resume_path")
        yield Set("trainer.resume_from_path", value)


def checkpoint_config(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    for name, item in value.items():
        if name == "output_dir":
            yield Set("trainer.default_local_dir", item)
        elif name == "async_upload":
            yield Set(f"{ACTOR}.checkpoint.async_save", bool(item))
        elif name == "max_ckpt_to_keep":
            yield Set("trainer.max_actor_ckpt_to_keep", item)
        elif name == "type" and item != "file_system":
            why = "checkpoints are written to a folder, on a mounted disk if need be"
            yield Refuse(f"{key}.{name}", item, why, (f"{key}.{name}=file_system",))
        elif name != "type":
            yield Idle(f"{key}.{name}")


def system_envs(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    for name, item in value.items():
        if name != "USE_MODELSCOPE":
            yield Set(f"ray_init.env.{name}", str(item))
        elif str(item).lower() not in ("0", "", "false"):
            yield Note(
                f"{key}.{name}={item}: models come from a folder or the Hugging Face hub; one that is on "
                f"ModelScope alone is downloaded with modelscope, and its folder given as {MODEL}.path"
            )


def mock(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value:
        yield Set(f"{ROLLOUT}.skip_rollout", True)
        if folder := roll.get("rollout_mock.dump_dir"):
            yield Set(f"{ROLLOUT}.skip_dump_dir", folder)


# -- Batches, lengths and requests -----------------------------------------------------------------------------------


def rollout_batch_size(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    size = roll.group_size if roll.is_agentic else 1
    if value % size:
        yield Refuse(key, value, f"trajectories do not divide into groups of {size}", (f"{key}={size}",))
    else:
        yield Set("data.train_batch_size", value // size)


def val_batch_size(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not roll.is_agentic and isinstance(value, int) and value > 0:
        yield Set("data.val_batch_size", value)


def sequence_length(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    prompt, response = roll.get("prompt_length", 1024), roll.get("response_length")
    if response is None:
        yield Set("data.max_response_length", value - prompt)
    elif value < prompt + response:
        why = f"prompt_length + response_length is {prompt + response}: nothing of that length fits"
        yield Refuse(key, value, why, (f"{key}=null",))
    yield Set(f"{ROLLOUT}.max_model_len", value)


def max_running_requests(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """In-flight requests of one engine: the client's bound with servers, the engine's own without."""
    is_async = roll.get("generate_opt_level") or roll.puts_off
    yield Set(f"{ROLLOUT}.{'max_running_requests' if is_async else 'max_num_seqs'}", value)


def generate_opt_level(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if roll.is_agentic:
        return  # episodes are generated turn by turn whatever it says
    if value in (0, 1):
        yield Set(f"{ROLLOUT}.mode", "async" if value or roll.puts_off else "sync")
    else:
        yield Refuse(key, value, "0 (one call a batch) or 1 (request by request)", (f"{key}=1",))


def expand(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not value:
        yield Note(
            f"{key}=false: every response is a request of its own here, as with true; the responses are the same"
        )


def additional_prompts(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """Groups that are dropped are replaced by further prompts; with none to drop, the slowest prompts are put off."""
    if not value or key == "use_additional_prompts" and roll.get("is_use_additional_prompts"):
        return
    if roll.get("async_generation_ratio"):
        why = "batches are sampled ahead (async_generation_ratio), so the prompts of a step are known before it begins"
        yield Refuse(key, value, why, (f"{key}=false", "async_generation_ratio=0"))
    elif not roll.filters_groups:
        more, batch = roll.get("max_additional_running_prompts", 16), roll.get("rollout_batch_size", 128)
        yield Set(f"{ROLLOUT}.mode", "async")
        yield Set(f"{ROLLOUT}.over_sample_rate", round(more / batch, 6))


def max_additional(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not roll.puts_off:
        yield Idle(key)


def async_ratio(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not value:
        return
    own, sampling = roll.mapped["actor_train"], roll.mapped["actor_infer"]
    if own and sampling and set(own) & set(sampling):
        why = "sampling ahead needs devices of its own, and actor_infer shares some with actor_train"
        yield Refuse(key, value, why, (f"{key}=0", "actor_infer.device_mapping"))
        return
    if value > 1:
        yield Note(f"{key}={value}: batches are sampled one step ahead at most")
    yield Set(f"{ROLLOUT}.max_staleness", 1)


# -- Rewards and advantages ------------------------------------------------------------------------------------------


def reward_norm(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """``reward_shift`` keeps the subtraction alone, ``reward_scale`` the division alone. GRPO groups by itself."""
    shift, scale = roll.get("reward_shift"), roll.get("reward_scale")
    if shift and scale:
        why = "with reward_scale: only the mean, and only the std, of the same scores"
        yield Refuse("reward_shift", True, why, ("reward_shift=false", "reward_scale=false"))
    elif roll.get("adv_estimator") == "grpo" and value == "group" and not scale:  # GRPO's own norm, taken once
        yield from [Set("algorithm.norm_adv_by_std_in_grpo", False)] if shift else []
    else:
        yield from [] if scale else [Set(f"{SHAPING}.norm.mean", value)]
        yield from [] if shift else [Set(f"{SHAPING}.norm.std", value)]


def reward_part(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not value or roll.get("reward_norm") is not None:
        return
    if key == "reward_shift" and roll.get("adv_estimator") == "grpo":
        yield Set("algorithm.norm_adv_by_std_in_grpo", False)
    else:
        yield Note(f"{key}=true has no effect: reward_norm says over which scores, and is null")


def reward_scaling(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value:
        yield Set(f"{SHAPING}.norm.std", "running")
        yield from [Set(f"{SHAPING}.norm.mean", "running")] if roll.get("use_reward_norm") else []


def needs_scaling(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value and not roll.get("use_reward_scaling"):
        yield Note(f"{key}=true has no effect: it applies with use_reward_scaling only")


def difficulty(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value:
        low, high = roll.get("difficulty_low_threshold", 0.0), roll.get("difficulty_high_threshold", 1.0)
        yield Set("algorithm.sample_mask.difficulty", [low, high])


def long_errors(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value:
        yield Set("algorithm.sample_mask.error_max_len", roll.get("error_max_len_threshold", 9999999999))


# -- Losses ----------------------------------------------------------------------------------------------------------


def kl_penalty(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value != "full":
        yield Set("algorithm.kl_penalty", value)
    elif not roll.get("add_token_level_kl"):
        yield Set(f"{ACTOR}.kl_loss_type", "full")
    else:
        why = "a reward knows sampled tokens only; the KL of whole distributions is a loss: use_kl_loss=true"
        yield Refuse(key, value, why, ("algorithm.kl_penalty=kl",))


def clip_range(key: str, value: Any, roll: Roll, option: str) -> Iterator[Outcome]:
    if roll.get("use_pg_clip_range"):
        yield Set(option, value)


def dual_clip(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    # ROLL bounds the loss of bad responses at 1 + 2 pg_clip, rounded since 0.2 is not exact.
    yield Set(f"{ACTOR}.clip_ratio_c", round(1 + 2 * roll.get("pg_clip", 0.2), 6) if value else None)


def value_clip(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value is not None:
        yield Set("critic.cliprange_value", value)
    elif roll.has_critic:
        yield Set("critic.cliprange_value", 1e9)  # ROLL's null is no bound


def pg_variant(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    # ROLL's vanilla is the policy gradient without ratios, its ppo the clipped loss that is called vanilla here.
    yield Set(LOSS_MODE, {"vanilla": "reinforce", "ppo": "vanilla"}.get(value, value))


def topr_weight(key: str, value: Any, roll: Roll, option: str) -> Iterator[Outcome]:
    if roll.get("actor_train.pg_variant") == "topr" or roll.get("pg_variant") == "topr":
        yield Set(option, value)


def importance_sampling(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value == "seq":
        yield Set(LOSS_MODE, "gspo")
    elif value != "token":
        yield Refuse(key, value, "token or seq", (f"{key}=token",))


def policy_loss_type(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value == "PG":
        yield Set(LOSS_MODE, "reinforce")


def positive_loss(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """TOPR as ROLL's guide writes it: the RL loss off, weights of good and bad responses."""
    if not value:
        return
    if not isinstance(value, int | float):
        yield Refuse(key, value, "a weight is a number", (f"{key}=1.0",))
    elif roll.get("rl_loss_coef", 1.0):
        why = "a TOPR term with the RL loss is not built: it takes the loss's place with rl_loss_coef=0"
        yield Refuse(key, value, why, ("rl_loss_coef=0", f"{key}=0"))
    else:
        yield Set(LOSS_MODE, "topr")
        # ROLL's code misspells the first of them, its guide does not.
        positive = roll.get("postive_loss_coef") or roll.get("positive_loss_coef") or 0
        for side, weight in (("pos", positive), ("neg", roll.get("use_topr_neg_loss_coef") or 0)):
            if isinstance(weight, int | float):
                yield Set(f"{ACTOR}.policy_loss.topr_{side}_weight", weight)


def rl_loss_coef(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    is_topr = any(roll.get(name) for name in ("postive_loss_coef", "positive_loss_coef", "use_topr_neg_loss_coef"))
    yield Set(f"{ACTOR}.rl_loss_coef", 1.0 if is_topr and not value else value)


def iterations(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value != 1:
        why = "a mini-batch is stepped on once before the next; ppo_epochs repeats the whole batch"
        yield Refuse(key, value, why, (f"{key}=1 ppo_epochs={value}",))


_LEVELS = ("token", "sequence", "geometric")


def importance_weight(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    section = "train_infer_correction.is_weight"
    level = roll.get(f"{section}.weight_type", "token")
    if not value:
        return
    if level not in _LEVELS:
        why = "there are no segments in one turn"
        yield Refuse(f"{section}.weight_type", level, why, (f"{section}.weight_type=sequence",))
        return
    yield Set(f"{CORRECTION}.rollout_is", level)
    # 1.2 here, and 0.8 and 1.2 below, are ROLL's defaults.
    yield Set(f"{CORRECTION}.rollout_is_threshold", roll.get(f"{section}.upper_bound", 1.2))
    yield Set(f"{ROLLOUT}.calculate_log_probs", True)  # the ratio needs those of the engine


def filters(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    kinds, bounds, lowers = [], [], []
    for number, entry in enumerate(value or []):
        if not entry.get("enabled"):
            continue
        if entry.get("diff_enabled"):
            why = "tokens are rejected by the ratio of probabilities, not by their difference"
            yield Refuse(f"{key}.{number}.diff_enabled", True, why, (f"{key}=[]", f"{CORRECTION}.rollout_rs"))
        if entry.get("ratio_enabled", True):
            level = entry.get("agg_type", "token")
            kinds.append(level if level in _LEVELS else "sequence")
            bounds.append(entry.get("ratio_high", 1.2))
            lowers.append(entry.get("ratio_low", 0.8))
    if not kinds:
        return
    yield Set(f"{CORRECTION}.rollout_rs", ",".join(kinds))
    if len(kinds) == 1:
        yield Set(f"{CORRECTION}.rollout_rs_threshold", bounds[0])
        yield Set(f"{CORRECTION}.rollout_rs_threshold_lower", lowers[0])
    else:
        both = ",".join(f"{low}_{high}" for low, high in zip(lowers, bounds, strict=True))
        yield Set(f"{CORRECTION}.rollout_rs_threshold", both)
    yield Set(f"{ROLLOUT}.calculate_log_probs", True)


# -- Models, optimizers and weights ----------------------------------------------------------------------------------


def offload_states(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """Memory of the actor between its phases; ``key`` says whether of the optimizer alone."""
    place = roll.places("actor_train")["fsdp"]
    if value:
        yield Set(f"{place}.optimizer_offload", True)
        yield from [Set(f"{place}.param_offload", True)] if key == "is_offload_states" else []


def checkpointing(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if roll.is_megatron(key.partition(".")[0]):
        yield Idle(key)  # recompute_granularity decides
    elif model := place_of(key, "model"):
        yield Set(f"{model}.enable_gradient_checkpointing", not value)


def model_path(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if model := place_of(key, "model"):
        yield Set(f"{model}.path", value)
    elif key.startswith("reference.") and value != roll.get("pretrain"):
        yield Set(f"{REF}.model.path", value)


def lora(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    model, name = place_of(key, "model"), key.rpartition(".")[2]
    if model is None:
        return
    if name == "lora_target":
        name = "target_modules"
        if value in ("all", "all-linear"):
            value = "all-linear"
        elif isinstance(value, str) and "," in value and not set(value) & set("|()*\\"):  # no regular expression
            value = [part.strip() for part in value.split(",")]
    yield Set(f"{model}.{name}", value)


def kernel(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value != "auto":
        yield Idle(key)


def model_type(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if key.startswith(("actor", "reference")):
        yield Idle(key)


def config_kwargs(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if model := place_of(key, "model"):
        yield from (Set(f"{model}.override_config.{name}", item) for name, item in value.items())


def freeze(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not key.startswith("actor_train"):
        return
    if all("vision" in part or "visual" in part for part in str(value).split(",")):
        yield Set(f"{ACTOR}.freeze_vision_tower", True)
    else:
        yield Refuse(key, value, "the vision tower can be frozen, and nothing else", (f"{key}=null",))


def ulysses(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if (role := place_of(key, "role")) and value != 1:
        yield Set(f"{role}.ulysses_sequence_parallel_size", value)
        yield Set(f"{place_of(key, 'model') or MODEL}.use_remove_padding", True)


def betas(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if optim := place_of(key, "optim"):
        section = key.rpartition(".")[0]
        both = [roll.get(f"{section}.adam_beta1", 0.9), roll.get(f"{section}.adam_beta2", 0.999)]
        yield Set(f"{optim}.betas", both)


def warmup_steps(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """ROLL counts optimizer steps, the schedule here training steps."""
    if (optim := place_of(key, "optim")) and value:
        updates = roll.updates_per_step(key.partition(".")[0])
        yield Set(f"{optim}.lr_warmup_steps", -(-value // updates))  # rounded up: a short warm-up is not none
        if updates > 1:
            yield Note(f"{key}={value} counts optimizer steps: {updates} of them make one training step")


def schedule(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    optim, known = place_of(key, "optim"), listed("schedules")
    if value not in known:
        instead = (f"{key}=cosine", f"{optim}.warmup_style") if optim else (f"{key}=cosine",)
        yield Refuse(key, value, f"known are {', '.join(known)}", instead)
    elif optim:
        yield Set(f"{optim}.warmup_style", known[value])


def sync(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    yield Set("trainer.weight_sync_freq", value)
    if value > 1:  # until the next sync the engine has to keep the weights it got
        yield Set(f"{ROLLOUT}.free_cache_engine", False)


def dynamic(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """Micro-batches of a bound of tokens: in updates ``ppo_``, in forward passes alone ``log_prob_``."""
    if not value:
        return
    role, name = key.split(".")
    kind = "train" if "train" in name else "infer"
    tokens, place = roll.get(f"{role}.max_tokens_per_microbatch_in_{kind}"), place_of(key, "role")
    if kind == "train" and place in (ACTOR, "critic"):
        yield Set(f"{place}.use_dynamic_bsz", True)
        yield from [Set(f"{place}.ppo_max_token_len_per_gpu", tokens)] if tokens else []
    elif kind == "infer" and role in ("actor_train", "reference"):
        place = ROLLOUT if role == "actor_train" else REF
        yield Set(f"{place}.log_prob_use_dynamic_bsz", True)
        yield from [Set(f"{place}.log_prob_max_token_len_per_gpu", tokens)] if tokens else []


# -- Megatron's settings ---------------------------------------------------------------------------------------------


def megatron_size(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """A factor of the mesh. Roles share processes, so that reference and critic have the actor's."""
    if key.startswith("actor_train") or not roll.is_megatron("actor_train"):
        yield Set(f"{place_of(key, 'megatron')}.{key.rpartition('.')[2]}", value)


def megatron_entry(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    yield Set(f"{place_of(key, 'megatron')}.override_transformer_config.{key.rpartition('.')[2]}", value)


def ddp_entry(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    yield Set(f"{place_of(key, 'megatron')}.override_ddp_config.{key.rpartition('.')[2]}", value)


def megatron_entries(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if not isinstance(value, dict):
        yield Refuse(key, value, "entries are given in the file itself", (f"{key}={{}}",))
        return
    for name, item in value.items():
        yield from [] if item is None else megatron_entry(f"{key}.{name}", item, roll)


def overlap(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """Stages of a virtual pipeline send while they compute; megatron-core wants it said twice."""
    section = key.rpartition(".")[0]
    if (roll.get(f"{section}.virtual_pipeline_model_parallel_size") or 1) == 1:
        yield Idle(key)
        return
    yield from megatron_entry(key, value, roll)
    yield from megatron_entry(f"{section}.batch_p2p_comm", not value, roll)


def recompute(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    section = key.rpartition(".")[0]
    by_name = f"{section}.recompute_method"
    method = roll.get(by_name, "uniform")
    if value not in ("full", "selective"):
        yield Refuse(key, value, "full or selective", (f"{key}=full", f"{key}=null"))
        return
    if value == "full" and method not in ("uniform", "block"):
        yield Refuse(by_name, method, "uniform or block", (f"{by_name}=uniform",))
    yield from megatron_entry(key, value, roll)
    if value == "full":  # of every layer, as in ROLL, where nothing is said
        yield from megatron_entry(by_name, method, roll)
        layers = roll.get(f"{section}.recompute_num_layers", 1)
        yield from megatron_entry(f"{section}.recompute_num_layers", layers, roll)
    elif (modules := roll.get(f"{section}.recompute_modules")) or roll.get(f"{section}.moe_layer_recompute"):
        yield from megatron_entry(f"{section}.recompute_modules", _modules(modules, section, roll), roll)


def recompute_experts(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    section = key.rpartition(".")[0]
    granularity = roll.get(f"{section}.recompute_granularity")
    if value and granularity is None:
        yield from megatron_entry(f"{section}.recompute_granularity", "selective", roll)
        yield from megatron_entry(f"{section}.recompute_modules", ["moe"], roll)
    elif value and granularity == "full":
        yield Idle(key)


def _modules(given: Any, section: str, roll: Roll) -> list[str]:
    names = given if isinstance(given, list) else [part.strip() for part in str(given or "core_attn").split(",")]
    return [*names, "moe"] if roll.get(f"{section}.moe_layer_recompute") and "moe" not in names else names


def optimizer_entry(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    yield Set(f"{place_of(key, 'optim')}.override_optimizer_config.{key.rpartition('.')[2]}", value)


# -- Data ------------------------------------------------------------------------------------------------------------


def template(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """The template of the training prompts is everybody's: responses are sampled and scored as token ids."""
    own = roll.get("actor_train.data_args.template", roll.get("global_template", "native"))
    if key.startswith("actor_train"):
        yield from _template_outcomes(key, value)
    elif value == own:  # said already
        return
    elif key.startswith("validation"):
        yield Note(f"{key}={value}: prompts of validation go through the template of training, {own}")
    else:
        yield Idle(key)


def template_of_all(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if roll.get("actor_train.data_args.template") is None:
        yield from _template_outcomes(key, value)


def _template_outcomes(key: str, value: Any) -> Iterator[Outcome]:
    text, known = str(value), listed("templates")
    if text.endswith((".jinja", ".jinja2")) or "{%" in text:
        yield Set(f"{MODEL}.custom_chat_template", value)
    elif not text.startswith(tuple(known["of_tokenizer"])):
        why = "a template is the tokenizer's (native) or a Jinja file of yours"
        yield Refuse(key, value, why, (f"{key}=native", f"{MODEL}.custom_chat_template"))
    elif text in known["thinking"]:
        yield Set("data.apply_chat_template_kwargs.enable_thinking", known["thinking"][text])
    elif text != "native":
        yield Note(f"{key}={value}: the tokenizer's own template is used, {value}'s for models that have it")


def file_name(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    folder = roll.get(f"{key.rpartition('.')[0]}.dataset_dir")
    names = value if isinstance(value, list) else [value]
    # As in ROLL a name with a slash is a path of its own.
    paths = [f"{folder}/{name}" if folder and "/" not in str(name) else name for name in names]
    option = "data.val_files" if key.startswith("validation") else "data.train_files"
    yield Set(option, paths if isinstance(value, list) else paths[0])


def column(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    section, name = key.rpartition(".")[::2]
    if roll.get(f"{section}.prompt") and roll.get(f"{section}.messages"):
        why = f"{section} names a column of prompts and one of messages: keep one of them"
        yield Refuse(key, value, why, (f"{section}.prompt=null", f"{section}.messages=null"))
    else:
        yield Set(f"data.{name}_key", value)


# -- Generation ------------------------------------------------------------------------------------------------------


def temperature(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    """0 asks for the likeliest tokens; of training it leaves the temperature of the log-probs as it is."""
    sampling, validates = place_of(key, "sampling"), key.startswith("validation")
    yield from [Set(f"{sampling}.do_sample", value > 0)] if validates or value == 0 else []
    yield from [Set(f"{sampling}.temperature", value)] if validates or value > 0 else []


def samples(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if key.startswith("validation") or roll.get("num_return_sequences_in_group") in (None, value):
        yield Set(f"{place_of(key, 'sampling')}.n", value)
    else:
        yield Note(f"{key}={value} has no effect: num_return_sequences_in_group decides")


def max_new_tokens(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    length, validates = roll.response_length, key.startswith("validation")
    if roll.is_agentic or validates and value == length:
        return
    if validates:
        yield Note(f"{key}={value}: responses of validation may have as many tokens as those of training, {length}")
    elif length is None or value == length:
        yield Set("data.max_response_length", value)
    else:
        yield Set("data.max_response_length", min(value, length))
        yield Note(f"{key}={value} and response_length={length}: the smaller ends a response")


def do_sample(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if key.startswith("validation") or value is False:
        yield Set(f"{place_of(key, 'sampling')}.do_sample", bool(value))


def beams(key: str, value: Any, roll: Roll) -> Iterator[Outcome]:
    if value != 1:
        yield Refuse(key, value, "responses are sampled, not searched for", (f"{key}=1",))
