"""What an old name may have become, and the other names that verl's releases from v0.6 on have for options.

Tables only; ``legacy.py`` applies them. What has no counterpart stands in ``features.py``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Moved(NamedTuple):
    """An option that has another name now. ``convert`` gives the new value; None means: leave the new key alone."""

    old: str
    new: tuple[str, ...]
    convert: Callable[[Any], Any] = lambda value: value
    is_alias: bool = False
    """Not old: a second way to write the key, of which nothing is said."""


class Gone(NamedTuple):
    """An option without successor. Values that ask for nothing are dropped with a warning, any other is an error."""

    old: str
    why: str
    harmless: tuple = ()
    """Values beside null, false and the releases' defaults that ask for what is done anyway."""

    is_alias = False

    def is_harmless(self, value: Any) -> bool:
        """Does this value ask for nothing? ``true`` is not 1."""
        from verl.config.releases import asks_for_nothing, is_release_default, same

        is_listed = any(same(value, item) for item in self.harmless)
        return is_listed or asks_for_nothing(value) or is_release_default(self.old, value)


def _if_true(value: Any) -> bool | None:
    return True if value in (True, "true", "True") else None


def _if_positive(value: Any) -> Any:
    return value if isinstance(value, int | float) and value > 0 else None


_ACTOR, _O, _M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_R = "actor_rollout_ref.ref"
_CORRECTION = "algorithm.rollout_correction"

_OF_ENGINES = tuple(
    move
    for role, fsdp in ((_ACTOR, f"{_ACTOR}.fsdp_config"), (_R, f"{_R}.fsdp_config"), ("critic", "critic.model.fsdp_config"))
    for move in (
        Moved(f"{fsdp}.dtype", (f"{fsdp}.mixed_precision.param_dtype",)),
        Moved(f"{fsdp}.ulysses_sequence_parallel_size", (f"{role}.ulysses_sequence_parallel_size",)),
        Moved(f"{fsdp}.strategy", (f"{role}.strategy",)),
    )
)

SECTIONS = {
    "critic.fsdp": "critic.model.fsdp_config",
    "sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward.custom_reward_function": "custom_reward_function",
}
"""Sections that have another place now, with all below them."""

_MEGATRON_LAYERS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def _layers(value: Any) -> Any:
    """Megatron's names of layers as those of Hugging Face; an empty list as null; all of them as ``all-linear``."""
    if not isinstance(value, list):
        return value
    if set(value) == set(_MEGATRON_LAYERS):
        return "all-linear"
    return [name for layer in value for name in _MEGATRON_LAYERS.get(layer, (layer,))] or None


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _unless(*defaults: Any) -> Callable[[Any], Any]:
    """Conversion that leaves the new key alone for an engine's own default."""
    return lambda value: None if value in defaults else value


LATER_MOVED: tuple[Moved, ...] = (
    # v0.6: Ray and profilers
    Moved("ray_kwargs.timeline_json_file", ("ray_init.timeline_json_file",)),
    *(
        Moved(f"ray_kwargs.ray_init.{name}", (f"ray_init.{name}",))
        for name in ("num_cpus", "runtime_env", "include_dashboard")
    ),
    Moved(f"{_ACTOR}.use_rollout_log_probs", (f"{_CORRECTION}.bypass_mode",), _if_true),
    # v0.6 and later: one engine of training, one of rollout
    *_OF_ENGINES,
    *(Moved(f"{place}.optim.clip_grad", (f"{place}.grad_clip",)) for place in (_ACTOR, "critic")),
    *(Moved(f"{place}.optim.lr_decay_style", (f"{place}.optim.warmup_style",), _lower) for place in (_ACTOR, "critic")),
    *(
        Moved(f"{place}.optim.lr_decay_steps", (f"{place}.optim.total_training_steps",), _if_positive)
        for place in (_ACTOR, "critic")
    ),
    *(
        Moved(f"{role}.fsdp_config.{name}", (f"{role}.{name}",))
        for role in (_ACTOR, _R)
        for name in ("use_torch_compile", "entropy_checkpointing", "entropy_from_logits_with_chunking")
    ),
    *(Moved(f"{_ACTOR}.policy_loss.{name}", (f"{_ACTOR}.{name}",)) for name in ("tau_pos", "tau_neg")),
    *(Moved(f"{role}.rollout_n", (f"{_O}.n",)) for role in (_ACTOR, _R)),
    Moved(f"{_O}.scheduling_policy", (f"{_O}.engine_kwargs.vllm.scheduling_policy",), _unless("fcfs")),
    Moved(f"{_ACTOR}.ppo_infer_micro_batch_size_per_gpu", (f"{_O}.log_prob_micro_batch_size_per_gpu",), _if_positive),
    Moved(f"{_ACTOR}.ppo_infer_max_token_len_per_gpu", (f"{_O}.log_prob_max_token_len_per_gpu",), _if_positive),
    Moved(f"{_ACTOR}.use_prefix_grouper", (f"{_M}.use_prefix_sharing",), _if_true),
    Moved(f"{_O}.cudagraph_capture_sizes", (f"{_O}.engine_kwargs.vllm.cudagraph_capture_sizes",)),
    Moved(f"{_O}.enable_prefix_caching", (f"{_O}.engine_kwargs.vllm.enable_prefix_caching",)),
    *(Moved(f"{place}.enable", (f"{_O}.skip_rollout",)) for place in (f"{_O}.skip", "skip.rollout")),
    *(Moved(f"{place}.dump_dir", (f"{_O}.skip_dump_dir",)) for place in (f"{_O}.skip", "skip.rollout")),
    Moved(f"{_O}.checkpoint_engine.update_weights_bucket_megabytes", (f"{_O}.update_weights_bucket_megabytes",)),
    *(
        Moved(f"{model}.lora.{name}", (f"{model}.lora_{name}",))
        for model in (_M, "critic.model")
        for name in ("rank", "alpha", "adapter_path")
    ),
    *(
        Moved(f"{model}.lora.{name}", (f"{model}.{name}",), _layers)
        for model in (_M, "critic.model")
        for name in ("target_modules", "exclude_modules")
    ),
    Moved(f"{_M}.tokenizer_path", ("data.tokenizer",)),
    *(Moved(f"{role}.nccl_timeout", ("actor_rollout_ref.nccl_timeout",)) for role in ("critic", "reward_model")),
    # v0.7: one section of rewards
    *(Moved(f"{name}.name", ("reward_model.reward_manager",)) for name in ("reward.reward_manager", "reward_manager")),
    Moved("reward.reward_kwargs", ("reward_model.reward_kwargs",)),
    Moved("reward.reward_model.enable", ("reward_model.enable",)),
    Moved("reward.reward_model.model_path", ("reward_model.model.path",)),
    # guides of other trainers
    Moved("trainer.rpc_timeout", ("trainer.worker_timeout",), is_alias=True),
    Moved("trainer.logger_kwargs", ("trainer.tracker_kwargs",), is_alias=True),
)
