"""ROLL's top-level keys, a row each: what they become here.

A row names an option of ours, or a function that yields outcomes, or why there is none. Where the sentence of ROLL's
guide and ROLL's code part, the sentence is followed, and ``note`` says so. The page docs/roll.md holds these rows.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from verl.config.base import did_you_mean
from verl.config.roll.result import Idle, Note, Outcome, Refuse, Secret, Set

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
SHAPING = "algorithm.reward_shaping"

Translate = Callable[[str, Any, Any], Iterator[Outcome]]
"""(ROLL key, its value, the ``Roll`` it stands in) -> outcomes."""


class Row(NamedTuple):
    """One key of ROLL."""

    to: str | tuple[str, ...] | Translate | None
    """Our option or options that take the value as it is; a function; None: there is none."""
    note: str = ""
    """What to know: for the page of the documentation, and why there is no option."""
    harmless: tuple = (None, False)
    """With ``to=None``: values that ask for nothing."""
    default: Any = None
    """ROLL's own default where ours differs: it is filled in for a key the file leaves out."""
    instead: tuple[str, ...] = ("{key}=null",)
    """With ``to=None``: words that settle it; ``{key}`` stands for ROLL's key."""

    reads_null: bool = False
    """With a function: null asks for something of its own."""

    @property
    def kind(self) -> str:
        """``translated``, ``no effect`` or ``not built``."""
        return "not built" if self.to is None else "no effect" if self.to is idle else "translated"


def idle(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """Of a key that nothing here, or nothing in ROLL, asks for."""
    yield Idle(key)


def not_read(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """Of a key that is read together with others."""
    return iter(())


_ASKS_FOR_NOTHING = (None, False, "None", "null", {}, [])


def row_outcomes(row: Row | None, key: str, value: Any, roll: Any, known: Iterable[str]) -> Iterator[Outcome]:
    """What a key and its value come to.

    A key that is in no release of ROLL is refused if a known one is near: it may be a typing error, which ROLL would
    drop without a word. Any other has no effect there or here.
    """
    roll.at = key
    value = None if value in ("None", "null") else value
    if row is None:
        near = did_you_mean(key.rpartition(".")[2], known).rstrip("?")
        if near and not any(value is item or value == item and value != 0 for item in _ASKS_FOR_NOTHING):
            yield Refuse(key, value, f"is no key of ROLL{near}", (f"{key}=null",))
        else:
            yield Idle(key)
    elif row.to is None:
        if not any(value is item or value == item and type(value) is type(item) for item in row.harmless):
            yield Refuse(key, value, row.note, tuple(text.format(key=key) for text in row.instead))
    elif row.to is idle:
        yield from [] if value in (None, {}, []) else [Idle(key)]
    elif callable(row.to):
        yield from row.to(key, value, roll) if value is not None or row.reads_null else ()
    elif value is not None:
        yield from (Set(option, value) for option in ([row.to] if isinstance(row.to, str) else row.to))


def _every(option: str) -> Translate:
    """A number of steps; 0 and less mean never."""

    def translate(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
        yield Set(option, value if isinstance(value, int) and value > 0 else -1)

    return translate


def _output_dir(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.get("checkpoint_config.output_dir") is None:
        yield Set("trainer.default_local_dir", value)
    else:
        yield Note(f"{key}={value}: checkpoint_config.output_dir says where checkpoints go")


def _logging_dir(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("trainer.log_dir", value)


_TRACKERS = {"stdout": [], "tensorboard": ["tensorboard"], "wandb": ["wandb"]}


def _track_with(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    files = ["file"] if roll.get("logging_dir") else []
    yield Set("trainer.logger", ["console", *_TRACKERS.get(str(value), [str(value)]), *files])


def _tracker_kwargs(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    tracker = roll.get("track_with") or "tensorboard"
    for name, item in (value or {}).items():
        if item is None:
            continue
        if name in ("api_key", "login_kwargs"):
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


def _resume(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if isinstance(value, bool) or value is None:
        yield Set("trainer.resume_mode", "auto" if value else "disable")
    else:
        yield Set("trainer.resume_mode", "resume_path")
        yield Set("trainer.resume_from_path", value)


def _checkpoint_config(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    for name, item in (value or {}).items():
        if name == "output_dir":
            yield Set("trainer.default_local_dir", item)
        elif name == "async_upload":
            yield Set(f"{ACTOR}.checkpoint.async_save", bool(item))
        elif name == "max_ckpt_to_keep":
            yield Set("trainer.max_actor_ckpt_to_keep", item)
        elif name == "type" and item != "file_system":
            yield Refuse(f"{key}.{name}", item, "checkpoints are written to a folder, on a mounted disk if need be",
                         (f"{key}.{name}=file_system",))  # fmt: skip
        elif name != "type":
            yield Idle(f"{key}.{name}")


def _system_envs(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    for name, item in (value or {}).items():
        if name == "USE_MODELSCOPE":
            if str(item).lower() not in ("0", "", "false"):
                yield Note(
                    f"{key}.{name}={item}: models come from a folder or the Hugging Face hub; one that is on "
                    f"ModelScope alone is downloaded with modelscope, and its folder given as {MODEL}.path"
                )
        else:
            yield Set(f"ray_init.env.{name}", str(item))


def _prompt_length(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("data.max_prompt_length", value)
    yield Set("data.truncation", "left")


def _rollout_batch_size(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    size = roll.group_size if roll.is_agentic else 1
    if value % size:
        yield Refuse(key, value, f"trajectories do not divide into groups of {size}", (f"{key}={size}",))
    else:
        yield Set("data.train_batch_size", value // size)


def _val_batch_size(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.is_agentic:
        yield Set("env.val.n_trajectories", value)
    elif isinstance(value, int) and value > 0:
        yield Set("data.val_batch_size", value)


def _max_running_requests(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """In-flight requests of one engine: the client's bound with servers, the engine's own without."""
    is_async = roll.get("generate_opt_level") or roll.over_samples and not roll.filters_groups
    yield Set(f"{ROLLOUT}.{'max_running_requests' if is_async else 'max_num_seqs'}", value)


def _generate_opt_level(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value in (0, 1):
        yield Set(f"{ROLLOUT}.mode", "async" if value or roll.over_samples and not roll.filters_groups else "sync")
    else:
        yield Refuse(key, value, "0 (one call a batch) or 1 (request by request)", (f"{key}=1",))


def _expand(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not value:
        yield Note(f"{key}=false: every response is a request of its own here, as with true; what is drawn is the same")


def _additional_prompts(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
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


def _max_additional(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not roll.over_samples or roll.filters_groups:
        yield Idle(key)


def _target_kl(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is not None:
        yield Set("algorithm.kl_ctrl.type", "adaptive")
        yield Set("algorithm.kl_ctrl.target_kl", value)


def _kl_penalty(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value != "full":
        yield Set("algorithm.kl_penalty", value)
    elif not roll.get("add_token_level_kl"):
        yield Set(f"{ACTOR}.kl_loss_type", "full")
    else:
        yield Refuse(key, value, "a reward knows sampled tokens only; the KL of whole distributions is a loss: "
                     "use_kl_loss=true", ("algorithm.kl_penalty=kl",))  # fmt: skip


def _pg_clip(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    side = {"pg_clip_low": "clip_ratio_low", "pg_clip_high": "clip_ratio_high"}
    if key == "pg_clip":
        yield Set(f"{ACTOR}.clip_ratio", value)
    elif roll.get("use_pg_clip_range"):
        yield Set(f"{ACTOR}.{side[key]}", value)


def _dual_clip(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    clip = roll.get("pg_clip", 0.2)
    yield Set(f"{ACTOR}.clip_ratio_c", round(1 + 2 * clip, 6) if value else None)


def _value_clip(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is not None:
        yield Set("critic.cliprange_value", value)
    elif roll.get("adv_estimator", "gae") == "gae":
        yield Set("critic.cliprange_value", 1e9)  # ROLL's null is no bound


def _topr(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set(f"{ACTOR}.policy_loss.loss_mode", "topr")


_VARIANTS = {
    "vanilla": "reinforce",
    "ppo": "vanilla",
    "tis": "tis",
    "topr": "topr",
    "cispo": "cispo",
    "kimi15": "kimi15",
}


def pg_variant(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set(f"{ACTOR}.policy_loss.loss_mode", _VARIANTS.get(value, value))


def _importance_sampling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value == "seq":
        yield Set(f"{ACTOR}.policy_loss.loss_mode", "gspo")
    elif value != "token":
        yield Refuse(key, value, "token or seq", (f"{key}=token",))


def _reward_norm(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """``reward_shift`` keeps the subtraction alone, ``reward_scale`` the division alone. GRPO groups by itself."""
    if value is None:
        return
    shift, scale = roll.get("reward_shift"), roll.get("reward_scale")
    if shift and scale:
        why = "with reward_scale: only the mean, and only the std, of the same scores"
        yield Refuse("reward_shift", True, why, ("reward_shift=false", "reward_scale=false"))
        return
    if roll.get("adv_estimator") == "grpo" and value == "group" and not scale:
        if shift:
            yield Set("algorithm.norm_adv_by_std_in_grpo", False)
        return
    yield from [] if scale else [Set(f"{SHAPING}.norm.mean", value)]
    yield from [] if shift else [Set(f"{SHAPING}.norm.std", value)]


def _reward_part(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not value or roll.get("reward_norm") is not None:
        return
    if key == "reward_shift" and roll.get("adv_estimator") == "grpo":
        yield Set("algorithm.norm_adv_by_std_in_grpo", False)
    else:
        yield Note(f"{key}=true has no effect: reward_norm says over which scores, and is null")


def _norm_type(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set(f"{SHAPING}.norm.{'mean' if 'mean' in key else 'std'}", value)


def _reward_scaling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set(f"{SHAPING}.norm.std", "running")
        yield from [Set(f"{SHAPING}.norm.mean", "running")] if roll.get("use_reward_norm") else []


def _needs_scaling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value and not roll.get("use_reward_scaling"):
        yield Note(f"{key}=true has no effect: it applies with use_reward_scaling only")


def _max_new_tokens(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("data.max_response_length", value)


def _sequence_length(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    prompt, response = roll.get("prompt_length", 1024), roll.get("response_length")
    if response is None:
        yield Set("data.max_response_length", value - prompt)
    elif value < prompt + response:
        yield Refuse(key, value, f"prompt_length + response_length is {prompt + response}: nothing of that length fits",
                     (f"{key}=null",))  # fmt: skip
    yield Set(f"{ROLLOUT}.max_model_len", value)


def _difficulty(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        low, high = roll.get("difficulty_low_threshold", 0.0), roll.get("difficulty_high_threshold", 1.0)
        yield Set("algorithm.sample_mask.difficulty", [low, high])


def _long_errors(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set("algorithm.sample_mask.error_max_len", roll.get("error_max_len_threshold", 9999999999))


def _positive_loss(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """TOPR as ROLL's guide writes it: the RL loss off, weights of good and bad responses."""
    weights = {"pos": roll.get("postive_loss_coef") or roll.get("positive_loss_coef") or 0,
               "neg": roll.get("use_topr_neg_loss_coef") or 0}  # fmt: skip
    if not value:
        return
    if not isinstance(value, int | float):
        yield Refuse(key, value, "a weight is a number", (f"{key}=1.0",))
    elif roll.get("rl_loss_coef", 1.0):
        why = "a TOPR term beside the RL loss is not built: it takes the loss's place with rl_loss_coef=0"
        yield Refuse(key, value, why, ("rl_loss_coef=0", f"{key}=0"))
    else:
        yield Set(f"{ACTOR}.policy_loss.loss_mode", "topr")
        for side, weight in weights.items():
            if isinstance(weight, int | float):
                yield Set(f"{ACTOR}.policy_loss.topr_{side}_weight", weight)


def _rl_loss_coef(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    is_topr = any(roll.get(name) for name in ("postive_loss_coef", "positive_loss_coef", "use_topr_neg_loss_coef"))
    yield Set(f"{ACTOR}.rl_loss_coef", 1.0 if is_topr and not value else value)


def _policy_loss_type(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value == "PG":
        yield Set(f"{ACTOR}.policy_loss.loss_mode", "reinforce")


def topr_weight(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.get("actor_train.pg_variant") == "topr" or roll.get("pg_variant") == "topr":
        yield Set(f"{ACTOR}.policy_loss.topr_{'pos' if 'positive' in key else 'neg'}_weight", value)


def _iterations(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value not in (None, 1):
        yield Refuse(key, value, "a mini-batch is stepped on once before the next; the batch is gone over again by "
                     "ppo_epochs", (f"{key}=1 ppo_epochs={value}",))  # fmt: skip


def _async_ratio(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not value:
        return
    own, sampling = roll.mapped["actor_train"], roll.mapped["actor_infer"]
    if own and sampling and set(own) & set(sampling):
        why = "sampling ahead needs devices of its own, and actor_infer shares some with actor_train"
        yield Refuse(key, value, why, (f"{key}=0", "actor_infer.device_mapping"))
        return
    if value > 1:
        yield Note(f"{key}={value}: batches are sampled one step ahead at most")
    yield Set(f"{ROLLOUT}.async_ratio", 1)


def _val_greedy(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set(f"{ROLLOUT}.val_kwargs.do_sample", False)
        yield Set(f"{ROLLOUT}.val_kwargs.temperature", 0)


def _offload(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set(f"{ACTOR}.fsdp_config.optimizer_offload", True)
        if key == "is_offload_states":
            yield Set(f"{ACTOR}.fsdp_config.param_offload", True)


def _no_old_log_probs(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set(f"{ACTOR}.skip_old_log_probs", True)


def _keep_checkpoints(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set("trainer.max_actor_ckpt_to_keep", value)


def _num_samples(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value:
        yield Set("data.train_max_samples", value)


def _mock(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.get("rollout_mock.enable") and key.endswith("enable"):
        yield Set(f"{ROLLOUT}.skip_rollout", True)
        if folder := roll.get("rollout_mock.dump_dir"):
            yield Set(f"{ROLLOUT}.skip_dump_dir", folder)


CORRECTION = "algorithm.rollout_correction"
_LEVELS = {"token": "token", "sequence": "sequence", "geometric": "geometric"}


def _importance_weight(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not roll.get("train_infer_correction.is_weight.enabled"):
        return
    level = roll.get("train_infer_correction.is_weight.weight_type", "token")
    if level not in _LEVELS:
        yield Refuse("train_infer_correction.is_weight.weight_type", level, "there are no segments in one turn",
                     ("train_infer_correction.is_weight.weight_type=sequence",))  # fmt: skip
        return
    yield Set(f"{CORRECTION}.rollout_is", level)
    yield Set(f"{CORRECTION}.rollout_is_threshold", roll.get("train_infer_correction.is_weight.upper_bound", 1.2))
    yield Set(f"{ROLLOUT}.calculate_log_probs", True)


def _filters(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    kinds, bounds, lowers = [], [], []
    for number, entry in enumerate(value or []):
        if not entry.get("enabled"):
            continue
        if entry.get("diff_enabled"):
            why = "tokens are rejected by the ratio of probabilities, not by their difference"
            yield Refuse(f"{key}.{number}.diff_enabled", True, why, (f"{key}=[]", f"{CORRECTION}.rollout_rs"))
        if entry.get("ratio_enabled", True):
            kinds.append(_LEVELS.get(entry.get("agg_type", "token"), "sequence"))
            bounds.append(entry.get("ratio_high", 1.2))
            lowers.append(entry.get("ratio_low", 0.8))
    if len(kinds) == 1:
        yield Set(f"{CORRECTION}.rollout_rs", kinds[0])
        yield Set(f"{CORRECTION}.rollout_rs_threshold", bounds[0])
        yield Set(f"{CORRECTION}.rollout_rs_threshold_lower", lowers[0])
    elif kinds:
        yield Set(f"{CORRECTION}.rollout_rs", ",".join(kinds))
        yield Set(f"{CORRECTION}.rollout_rs_threshold",
                  ",".join(f"{low}_{high}" for low, high in zip(lowers, bounds, strict=True)))  # fmt: skip
    if kinds:
        yield Set(f"{ROLLOUT}.calculate_log_probs", True)


def _template_of_all(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    from verl.config.roll.workers import template_outcomes

    if roll.get("actor_train.data_args.template") is None:
        yield from template_outcomes(key, value)


_RLVR_ONLY = "there is no environment to show or to reward by turns"
_OPD = "distillation from a teacher is not built; use_kl_loss=true with the teacher as actor_rollout_ref.ref.model.path"
TOP: dict[str, Row] = {
    # the run
    "exp_name": Row("trainer.experiment_name"),
    "seed": Row("trainer.seed", "of weights, data order and every sample", default=42),
    "rpc_timeout": Row("trainer.worker_timeout", "a call that takes longer names its worker and method"),
    "output_dir": Row(_output_dir, "`trainer.default_local_dir`; `checkpoint_config.output_dir` goes before it"),
    "logging_dir": Row(_logging_dir, "`trainer.log_dir`, and the logger `file`"),
    "track_with": Row(_track_with, "`trainer.logger`, beside `console`", default="tensorboard"),
    "tracker_kwargs": Row(_tracker_kwargs, "`trainer.tracker_kwargs.<tracker>`; `project`: `trainer.project_name`"),
    "max_steps": Row("trainer.total_training_steps", default=500),
    "save_steps": Row(_every("trainer.save_freq"), "`trainer.save_freq`, counted from 1; the last step is saved too",
                      default=50),
    "logging_steps": Row("trainer.log_freq", "ROLL logs every step whatever it says"),
    "eval_steps": Row(_every("trainer.test_freq"), "`trainer.test_freq`, and before the first step, as ROLL does",
                      default=10),
    "resume_from_checkpoint": Row(_resume, "`trainer.resume_mode`; true: the newest in the output folder",
                                  default=False),
    "checkpoint_config": Row(_checkpoint_config, "`trainer.default_local_dir`, `actor.checkpoint.async_save`"),
    "render_save_dir": Row(idle, _RLVR_ONLY),
    "system_envs": Row(_system_envs, "`ray_init.env`, of a worker too"),
    "num_nodes": Row(not_read, "`trainer.nnodes`; the devices of `actor_train` go before it"),
    "num_gpus_per_node": Row(not_read, "`trainer.n_gpus_per_node`; the devices of `actor_train` go before it"),
    "local_rank": Row(idle, "each worker finds its rank itself; nothing reads it in ROLL"),
    "pretrain": Row(f"{MODEL}.path"),
    "reward_pretrain": Row("critic.model.path", "the critic starts from it"),
    # batches and lengths
    "rollout_batch_size": Row(_rollout_batch_size, "`data.train_batch_size`; agentic: over `group_size`", default=128),
    "val_batch_size": Row(_val_batch_size, "`data.val_batch_size`; agentic: not yet"),
    "prompt_length": Row(_prompt_length, "`data.max_prompt_length`, longer prompts cut at the left, as the guide has "
                         "it (ROLL drops them)", default=1024),
    "response_length": Row("data.max_response_length"),
    "sequence_length": Row(_sequence_length, "`rollout.max_model_len`; without `response_length` also that"),
    "num_return_sequences_in_group": Row(f"{ROLLOUT}.n"),
    # requests
    "generate_opt_level": Row(_generate_opt_level, "`rollout.mode`: 0 sync, 1 async"),
    "is_num_return_sequences_expand": Row(_expand, "always so"),
    "max_running_requests": Row(_max_running_requests, "`rollout.max_running_requests`; with `rollout.mode=sync` "
                                "`rollout.max_num_seqs`"),
    "is_use_additional_prompts": Row(_additional_prompts, "`rollout.over_sample_rate`, over `rollout_batch_size`"),
    "max_additional_running_prompts": Row(_max_additional, "the numerator of `rollout.over_sample_rate`"),
    # PPO
    "ppo_epochs": Row(f"{ACTOR}.ppo_epochs", "the critic follows"),
    "max_grad_norm": Row((f"{ACTOR}.grad_clip", "critic.grad_clip")),
    "l2": Row(f"{ACTOR}.l2_coef", "nothing reads it in ROLL"),
    "lambd": Row("algorithm.lam", default=0.95),
    "gamma": Row("algorithm.gamma"),
    "pg_clip": Row(_pg_clip, "`actor.clip_ratio`"),
    "use_pg_clip_range": Row(not_read, "whether the two below count"),
    "pg_clip_low": Row(_pg_clip, "`actor.clip_ratio_low`"),
    "pg_clip_high": Row(_pg_clip, "`actor.clip_ratio_high`"),
    "value_clip": Row(_value_clip, "`critic.cliprange_value`", reads_null=True),
    "kl_penalty": Row(_kl_penalty, "`algorithm.kl_penalty`; full: `actor.kl_loss_type`, since only a loss sees whole "
                      "distributions"),
    "init_kl_coef": Row("algorithm.kl_ctrl.kl_coef", default=0.2),
    "target_kl": Row(_target_kl, "`algorithm.kl_ctrl.target_kl`, and `type=adaptive`"),
    "kl_horizon": Row("algorithm.kl_ctrl.horizon"),
    # rewards and advantages
    "use_reward_scaling": Row(_reward_scaling, "`algorithm.reward_shaping.norm.std=running`"),
    "use_reward_norm": Row(_needs_scaling, "`algorithm.reward_shaping.norm.mean=running`"),
    "add_len_reward": Row(
        None, "the key has no amount, and nothing reads it in ROLL: a penalty of length is set with "
        f"{SHAPING}.overlong_buffer.{{enable,len,penalty_factor}}", 
        instead=(f"{SHAPING}.overlong_buffer.enable", "{key}=false")),
    "reward_clip": Row(f"{SHAPING}.clip"),
    "difficulty_loss_weight": Row(f"{ACTOR}.difficulty_loss_weight", "over its mean in the mini-batch; ROLL's: in the "
                                  "micro-batch"),
    "length_loss_weight": Row(f"{ACTOR}.length_loss_weight", "over its mean in the mini-batch; ROLL's: in the "
                              "micro-batch"),
    "whiten_rewards": Row(f"{SHAPING}.whiten"),
    "whiten_advantages": Row("algorithm.advantage.whiten"),
    "advantage_clip": Row("algorithm.advantage.clip"),
    "adv_estimator": Row("algorithm.adv_estimator", "grpo: Group Relative Policy Optimization"),
    "reward_norm": Row(_reward_norm, "`algorithm.reward_shaping.norm.{mean,std}`; grpo has `group` by itself"),
    "reward_shift": Row(_reward_part, "no `norm.std`; grpo: `algorithm.norm_adv_by_std_in_grpo=false`"),
    "reward_scale": Row(_reward_part, "no `norm.mean`"),
    "norm_mean_type": Row(_norm_type, "`algorithm.reward_shaping.norm.mean`"),
    "norm_std_type": Row(_norm_type, "`algorithm.reward_shaping.norm.std`"),
    # losses
    "add_token_level_kl": Row("algorithm.use_kl_in_reward"),
    "critic_warmup": Row("trainer.critic_warmup", "as many steps"),
    "use_kl_loss": Row(f"{ACTOR}.use_kl_loss"),
    "kl_loss_coef": Row(f"{ACTOR}.kl_loss_coef"),
    "entropy_loss_coef": Row(f"{ACTOR}.entropy_coeff"),
    "sft_loss_coef": Row(f"{ACTOR}.sft_loss_coef", "the likelihood of a token; ROLL's factor underflows"),
    "use_topr_loss": Row(_topr, "`actor.policy_loss.loss_mode=topr`: Tapered Off-Policy REINFORCE"),
    "rl_loss_coef": Row(_rl_loss_coef, "`actor.rl_loss_coef`; 0 with a TOPR weight: TOPR alone"),
    "dual_clip_loss": Row(_dual_clip, "`actor.clip_ratio_c` = 1 + 2 pg_clip; false: null", default=False),
    "loss_agg_mode": Row(f"{ACTOR}.loss_agg_mode"),
    "importance_sampling": Row(_importance_sampling, "seq: `actor.policy_loss.loss_mode=gspo`"),
    "pg_variant": Row(pg_variant, "`actor.policy_loss.loss_mode`"),
    "postive_loss_coef": Row(_positive_loss, "with `rl_loss_coef: 0`: `actor.policy_loss.loss_mode=topr`, "
                             "`topr_pos_weight`"),
    "positive_loss_coef": Row(_positive_loss, "the same, as ROLL's guide spells it"),
    "use_topr_neg_loss_coef": Row(_positive_loss, "with `rl_loss_coef: 0`: `actor.policy_loss.loss_mode=topr`, "
                                  "`topr_neg_weight`"),
    "use_policy_loss_type": Row(_policy_loss_type, "PPO; PG: `actor.policy_loss.loss_mode=reinforce`"),
    "enable_reference": Row(idle, "the reference takes part with `use_kl_loss` or `add_token_level_kl`"),
    "enable_old_logprobs_recompute": Row(idle, "always so; with one update a rollout all ratios are 1 either way"),
    "force_disable_old_logprobs_recompute": Row(_no_old_log_probs, "`actor.skip_old_log_probs`"),
    # which responses count
    "max_len_mask": Row("algorithm.sample_mask.drop_truncated"),
    "difficulty_mask": Row(_difficulty, "`algorithm.sample_mask.difficulty`"),
    "difficulty_low_threshold": Row(not_read, "the first of `algorithm.sample_mask.difficulty`"),
    "difficulty_high_threshold": Row(not_read, "the second of `algorithm.sample_mask.difficulty`"),
    "error_max_len_clip": Row(_long_errors, "`algorithm.sample_mask.error_max_len`"),
    "error_max_len_threshold": Row(not_read, "the value of `algorithm.sample_mask.error_max_len`"),
    "mask_type": Row(idle, "a masked response leaves the loss and counts among its siblings, ROLL's loss"),
    "minibatch_data_iter_num": Row(_iterations, "1; more: `ppo_epochs`"),
    "balance_length": Row("trainer.balance_batch"),
    "train_infer_correction.is_weight.enabled": Row(_importance_weight, "`algorithm.rollout_correction.rollout_is`"),
    "train_infer_correction.is_weight.weight_type": Row(not_read, "`algorithm.rollout_correction.rollout_is`"),
    "train_infer_correction.is_weight.upper_bound": Row(
        not_read, "`algorithm.rollout_correction.rollout_is_threshold`"),
    "train_infer_correction.is_weight.detach": Row(idle, "weights have no gradient"),
    "train_infer_correction.filters": Row(_filters, "`algorithm.rollout_correction.rollout_rs`, and its thresholds"),
    # data
    "global_template": Row(_template_of_all, "as `actor_train.data_args.template`, which goes before it"),
    "tag_to_template": Row(None, "all prompts go through one template, `model.custom_chat_template`, which may look at "
                           "what the messages say", harmless=(None, {}), instead=("{key}={{}}",)),
    "dataset_filter.source": Row(None, "rows are filtered before: write the file anew with those of the source",
                                 instead=("{key}=null", "data.train_files")),
    "dataset_filter.min_difficulty": Row(None, "rows are filtered before: write the file anew with those that count",
                                         instead=("{key}=null", "data.train_files")),
    "dataset_filter.max_difficulty": Row(None, "rows are filtered before: write the file anew with those that count",
                                         instead=("{key}=null", "data.train_files")),
    "dataset_filter.num_samples": Row(_num_samples, "`data.train_max_samples`"),
    "val_prompt_length": Row(idle, "prompts of validation are as long as `prompt_length`"),
    "val_sequence_length": Row(idle, "validation is as long as `sequence_length`"),
    "val_greedy": Row(_val_greedy, "`rollout.val_kwargs.do_sample=false`"),
    "val_n_sample": Row(f"{ROLLOUT}.val_kwargs.n"),
    # sampling
    "async_generation_ratio": Row(_async_ratio, "`rollout.async_ratio`: above 0 one step ahead, on devices of its own"),
    "use_additional_prompts": Row(_additional_prompts, "`rollout.over_sample_rate`, over `rollout_batch_size`"),
    "user_defined_rollout_loop_cls": Row(idle, "a loop of yours is an agent loop: docs/async.md"),
    "router_args.router_name": Row(idle, "requests go to the replica with the fewest, those of a group to one"),
    "router_args.router_config": Row(idle, "requests go to the replica with the fewest, those of a group to one"),
    "router_args.max_running_requests": Row(_max_running_requests, "`rollout.max_running_requests`"),
    "model_update_buffer_size_mb": Row(f"{ROLLOUT}.update_weights_bucket_megabytes"),
    "rollout_mock.enable": Row(_mock, "`rollout.skip_rollout`"),
    "rollout_mock.mode": Row(idle, "a batch that is kept is taken, another is sampled and kept"),
    "rollout_mock.dump_dir": Row(not_read, "`rollout.skip_dump_dir`"),
    # the run, rarely
    "base_dir": Row(idle, "`output_dir` and `logging_dir` are taken as they are"),
    "rollout_dump_dir": Row("trainer.rollout_data_dir"),
    "max_ckpt_to_keep": Row(_keep_checkpoints, "`trainer.max_actor_ckpt_to_keep`; 0: all"),
    "is_offload_states": Row(_offload, "`actor.fsdp_config.{param,optimizer}_offload`"),
    "is_offload_optimizer_states_in_train_step": Row(_offload, "`actor.fsdp_config.optimizer_offload`"),
    "model_download_type": Row(idle, "models come from a folder or the Hugging Face hub"),
    "alive_check_interval": Row(idle, "a worker that is gone is noticed at once"),
    "report_length_and_rewards": Row(idle, "lengths and rewards are metrics of every step"),
    "save_logging_board_dir": Row(idle, "nothing reads it in ROLL"),
    "length_profiler_dir": Row(idle, "lengths are metrics of every step"),
    "profiler_timeline": Row(None, "a trace is made of the steps in trainer.profile_steps (docs/observe.md)",
                             instead=("trainer.profile_steps=[2]", "{key}=false")),
    "profiler_memory": Row(None, "memory is reported with trainer.memory_ledger (docs/observe.md)",
                           instead=("trainer.memory_ledger=true", "{key}=false")),
    "profiler_output_dir": Row(idle, "traces are written below the run's folder"),
    "otlp_output_dir": Row(idle, "there is no OpenTelemetry; steps are timed in the metrics"),
    "transfer_backend.backend_name": Row(idle, "batches travel by Ray or in one process"),
    "transfer_backend.backend_config": Row(idle, "batches travel by Ray or in one process"),
    # sections, and what only other pipelines have
    **{name: Row(not_read, f"the section of {what}: its keys are below") for name, what in {
        "actor_train": "the policy", "actor_infer": "sampling", "reference": "the reference", "critic": "the critic",
        "validation": "validation", "rewards": "reward workers", "dataset_filter": "the rows that count",
        "train_infer_correction": "off-policy correction", "router_args": "the router", "rollout_mock": "kept batches",
        "transfer_backend": "transport"}.items()},
    "reward": Row(idle, "reward workers are below `rewards`"),
    "reward_model": Row(idle, "a judge is asked behind `reward_model.judge.url`"),
    "reward_normalization.grouping": Row(idle, _RLVR_ONLY),
    "reward_normalization.method": Row(idle, _RLVR_ONLY),
    **{name: Row(idle, _OPD) for name in ("teacher", "student_train", "student_infer", "pure_opd_pipeline_type")},
    **{name: Row(None, _OPD, instead=("{key}=false",)) for name in ("is_pure_opd", "use_opd")},
}  # fmt: skip
