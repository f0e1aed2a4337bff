"""ROLL's top-level keys, a row each: what they become here.

A row names an option of ours, or a function that yields outcomes, or why there is none. Where the sentence of ROLL's
guide and ROLL's code part, the sentence is followed, and ``note`` says so. The page docs/roll.md holds these rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from verl.config.roll.result import Note, Outcome, Refuse, Set

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
    instead: tuple[str, ...] = ()
    """With ``to=None``: options of ours that settle it."""


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
            yield Refuse(f"{key}.{name}", "...", "a key in a command line is read by everybody: set WANDB_API_KEY")
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
        elif (name, item) != ("type", "file_system"):
            yield Refuse(f"{key}.{name}", item, "checkpoints are written to a folder, on a mounted disk if need be")


def _system_envs(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    for name, item in (value or {}).items():
        if name == "USE_MODELSCOPE" and str(item) in ("0", ""):
            continue
        if name == "USE_MODELSCOPE":
            yield Refuse(f"{key}.{name}", item, "models come from a folder or the Hugging Face hub: give the folder",
                         (f"{MODEL}.path",))  # fmt: skip
        else:
            yield Set(f"ray_init.env.{name}", str(item))


def _prompt_length(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("data.max_prompt_length", value)
    yield Set("data.truncation", "left")


def _rollout_batch_size(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    size = roll.group_size if roll.is_agentic else 1
    if value % size:
        yield Refuse(key, value, f"trajectories do not divide into groups of {size}")
    else:
        yield Set("data.train_batch_size", value // size)


def _val_batch_size(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.is_agentic:
        yield Set("env.val.n_trajectories", value)
    elif isinstance(value, int) and value > 0:
        yield Set("data.val_batch_size", value)


def _max_running_requests(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """In-flight requests of one engine: the client's bound with servers, the engine's own without."""
    is_async = roll.get("generate_opt_level") or roll.get("is_use_additional_prompts")
    yield Set(f"{ROLLOUT}.{'max_running_requests' if is_async else 'max_num_seqs'}", value)


def _generate_opt_level(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value in (0, 1):
        yield Set(f"{ROLLOUT}.mode", "async" if value else "sync")
    else:
        yield Refuse(key, value, "0 (one call a batch) or 1 (request by request)")


def _expand(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not value:
        yield Note(f"{key}=false: every response is a request of its own here, as with true; what is drawn is the same")


def _additional_prompts(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not value:
        return
    more, batch = roll.get("max_additional_running_prompts", 16), roll.get("rollout_batch_size", 128)
    yield Set(f"{ROLLOUT}.mode", "async")
    yield Set(f"{ROLLOUT}.over_sample_rate", round(more / batch, 6))


def _max_additional(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if not roll.get("is_use_additional_prompts"):
        yield Note(f"{key}={value} has no effect: is_use_additional_prompts is off")


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
                     "use_kl_loss=true", ("algorithm.kl_penalty",))  # fmt: skip


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


def _pg_variant(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set(f"{ACTOR}.policy_loss.loss_mode", _VARIANTS.get(value, value))


def _importance_sampling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value == "seq":
        yield Set(f"{ACTOR}.policy_loss.loss_mode", "gspo")
    elif value != "token":
        yield Refuse(key, value, "token or seq")


def _reward_norm(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """``reward_shift`` keeps the subtraction alone, ``reward_scale`` the division alone. GRPO groups by itself."""
    if value is None:
        return
    shift, scale = roll.get("reward_shift"), roll.get("reward_scale")
    if shift and scale:
        yield Refuse("reward_shift", True, "with reward_scale: only the mean, and only the std, of the same scores")
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
        yield Refuse(key, value, f"prompt_length + response_length is {prompt + response}: nothing of that length fits")
    yield Set(f"{ROLLOUT}.max_model_len", value)


def _nodes(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    return iter(())  # with the devices, in batch.py


_LEN_REWARD = "says no amount"
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
    "save_steps": Row("trainer.save_freq", "counted from 1, the last step is saved too", default=50),
    "logging_steps": Row("trainer.log_freq", "ROLL logs every step whatever it says"),
    "eval_steps": Row("trainer.test_freq", "and before the first step, as ROLL does", default=10),
    "resume_from_checkpoint": Row(_resume, "`trainer.resume_mode`; true: the newest in the output folder",
                                  default=False),
    "checkpoint_config": Row(_checkpoint_config, "`trainer.default_local_dir`, `actor.checkpoint.async_save`"),
    "render_save_dir": Row("env.render_save_dir"),
    "system_envs": Row(_system_envs, "`ray_init.env`, of a worker too"),
    "num_nodes": Row(_nodes, "`trainer.nnodes`; the devices of `actor_train` go before it"),
    "num_gpus_per_node": Row(_nodes, "`trainer.n_gpus_per_node`; the devices of `actor_train` go before it"),
    "local_rank": Row(None, "each worker finds its rank itself; nothing reads it in ROLL", harmless=(None, -1)),
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
    "use_pg_clip_range": Row(lambda key, value, roll: iter(()), "whether the two below count"),
    "pg_clip_low": Row(_pg_clip, "`actor.clip_ratio_low`"),
    "pg_clip_high": Row(_pg_clip, "`actor.clip_ratio_high`"),
    "value_clip": Row(_value_clip, "`critic.cliprange_value`"),
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
        f"{SHAPING}.overlong_buffer.{{enable,len,penalty_factor}}", instead=(f"{SHAPING}.overlong_buffer.enable",)),
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
    "rl_loss_coef": Row(f"{ACTOR}.rl_loss_coef"),
    "dual_clip_loss": Row(_dual_clip, "`actor.clip_ratio_c` = 1 + 2 pg_clip; false: null", default=False),
    "loss_agg_mode": Row(f"{ACTOR}.loss_agg_mode"),
    "importance_sampling": Row(_importance_sampling, "seq: `actor.policy_loss.loss_mode=gspo`"),
    "pg_variant": Row(_pg_variant, "`actor.policy_loss.loss_mode`"),
    # environments
    "reward_normalization.grouping": Row("env.reward_normalization.grouping"),
    "reward_normalization.method": Row("env.reward_normalization.method"),
}  # fmt: skip
