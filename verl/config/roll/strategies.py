"""``strategy_args``: which engine, and its settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.roll.result import Idle, Note, Outcome, Refuse, Set
from verl.config.roll.table import ACTOR, MODEL, REF, ROLLOUT, Row, idle, not_read

TRAINING = {
    "deepspeed_train": "deepspeed", "deepspeed_infer": "deepspeed", "fsdp2_train": "fsdp2", "fsdp2_infer": "fsdp2",
    "fsdp_train": "fsdp", "hf_infer": None, "megatron_train": "megatron", "megatron_infer": "megatron",
}  # fmt: skip
ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "hf"}
_ROLE = {"actor_train": ACTOR, "reference": REF, "critic": "critic"}

_SHARDED = "the engine in its place shards the model over all devices"
MEGATRON: dict[str, Row] = {
    "context_parallel_size": Row(not_read, "`ulysses_sequence_parallel_size`, and `model.use_remove_padding`"),
    "recompute_granularity": Row(not_read, "full: `model.enable_gradient_checkpointing`"),
    "optimizer_cpu_offload": Row(not_read, "`fsdp_config.optimizer_offload`"),
    "moe_layer_recompute": Row(idle, "`model.enable_gradient_checkpointing` recomputes whole layers"),
    **{name: Row(idle, _SHARDED) for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "sequence_parallel", "moe_token_dispatcher_type", "moe_grouped_gemm",
        "moe_shared_expert_overlap", "overlap_grad_reduce", "use_distributed_optimizer", "bf16")},
}  # fmt: skip
"""Keys of Megatron's strategy_config, read where another engine was asked for in its place; all others are idle."""

_IS_ONE = (None, 1)
STRATEGY: dict[str, Row] = {
    "strategy_args.strategy_name": Row(
        not_read,
        "`actor.strategy`, `ref.strategy`, `critic.strategy`, `rollout.name`; "
        "megatron_train: `actor_rollout_ref.actor.strategy=fsdp2` in its place",
    ),
    "strategy_args.strategy_config": Row(not_read, "the engine's settings, below"),
}
VLLM: dict[str, Row] = {
    "gpu_memory_utilization": Row(f"{ROLLOUT}.gpu_memory_utilization"),
    "max_model_len": Row(f"{ROLLOUT}.max_model_len"),
    "load_format": Row(f"{ROLLOUT}.load_format"),
    "tensor_parallel_size": Row(f"{ROLLOUT}.tensor_model_parallel_size"),
    "enforce_eager": Row(f"{ROLLOUT}.enforce_eager"),
    "max_num_seqs": Row(f"{ROLLOUT}.max_num_seqs"),
    "max_num_batched_tokens": Row(f"{ROLLOUT}.max_num_batched_tokens"),
    "sleep_level": Row(idle, "memory is released between steps with `rollout.free_cache_engine`"),
    "block_size": Row(f"{ROLLOUT}.engine_kwargs.vllm.block_size"),
}
SGLANG: dict[str, Row] = {
    "mem_fraction_static": Row(f"{ROLLOUT}.gpu_memory_utilization"),
    "load_format": Row(f"{ROLLOUT}.load_format"),
    "tp_size": Row(f"{ROLLOUT}.tensor_model_parallel_size"),
}
_ZERO = ("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size",
         "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters",
         "stage3_max_reuse_distance", "zero_hpz_partition_size")  # fmt: skip
_OVERWRITTEN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                "gradient_clipping", "steps_per_print", "zero_allow_untested_optimizer",
                "zero_force_ds_cpu_optimizer")  # fmt: skip
"""Entries of a DeepSpeed file that ROLL, and verl, decide."""


def strategy(key: str, value: Mapping, roll: Any) -> Iterator[Outcome]:
    """Outcomes of ``ROLE.strategy_args``."""
    role = key.partition(".")[0]
    unknown = sorted(set(value) - {"strategy_name", "strategy_config"})
    for name in unknown:
        why = "strategy_args has strategy_name and strategy_config"
        yield from [] if value[name] is None else [Refuse(f"{key}.{name}", value[name], why, (f"{key}.{name}=null",))]
    name, settings = value.get("strategy_name"), value.get("strategy_config") or {}
    if role == "actor_infer":
        yield from _rollout(key, name, settings, roll)
    elif name not in TRAINING:
        why = f"known are {', '.join(TRAINING)}"
        yield Refuse(
            f"{key}.strategy_name", name, why, (f"{key}.strategy_name=fsdp2_train {key}.strategy_config={{}}",)
        )
    else:
        yield from _training(key, role, name, settings, roll)


def _rollout(key: str, name: Any, settings: Mapping, roll: Any) -> Iterator[Outcome]:
    if name not in ROLLOUTS:
        yield Refuse(f"{key}.strategy_name", name, f"known are {', '.join(ROLLOUTS)}", (f"{ROLLOUT}.name=vllm",))
        return
    engine = ROLLOUTS[name]
    yield Set(f"{ROLLOUT}.name", engine)
    table = {"vllm": VLLM, "sglang": SGLANG}.get(engine, {})
    if roll.given.get(f"{ROLLOUT}.name", engine) != engine:
        if settings:
            yield Note(f"{key}.strategy_config: {', '.join(settings)} are {engine}'s and have no effect")
        return
    for option, item in settings.items():
        if option in table and table[option].to is idle:
            yield Idle(f"{key}.strategy_config.{option}")
        elif option in table:
            yield Set(str(table[option].to), item)
        elif option == "pipeline_parallel_size" and item in _IS_ONE:
            continue
        elif engine == "hf":
            yield Note(f"{key}.strategy_config.{option} has no effect: hf_infer has no such knob")
        else:
            yield Set(f"{ROLLOUT}.engine_kwargs.{engine}.{option}", item)


def _training(key: str, role: str, name: str, settings: Mapping, roll: Any) -> Iterator[Outcome]:
    engine, place = TRAINING[name], _ROLE[role]
    option, of_actor, config = f"{place}.strategy", f"{ACTOR}.strategy", f"{key}.strategy_config"
    chosen = roll.given.get(option)
    if engine == "megatron":
        chosen = chosen or roll.given.get(of_actor)
        if chosen in (None, "megatron"):
            follows = str(roll.get("actor_train.strategy_args.strategy_name")).startswith("megatron")
            word = f"{of_actor if follows else option}=fsdp2"
            why = "Megatron is not built; FSDP2 shards the same model over the same devices"
            yield Refuse(f"{key}.strategy_name", name, why, (word,))
        else:
            yield Set(option, chosen)
            yield from _in_place_of_megatron(role, place, settings, chosen)
    elif engine is None:
        yield Note(f"{key}.strategy_name={name}: the role scores with the engine of the actor")
    else:
        yield Set(option, engine)
        if chosen not in (None, engine, "fsdp" if engine == "fsdp2" else engine):
            yield Note(
                f"{config}: {', '.join(settings) or 'it'} is {engine}'s and has no effect with {option}={chosen}"
            )
        elif engine == "deepspeed":
            yield from _deepspeed(config, place, settings)
        elif any(setting in MEGATRON for setting in settings):  # the engine was changed, its settings were not
            yield from _in_place_of_megatron(role, place, settings, engine)
        else:
            yield from _fsdp(config, place, settings)


def _in_place_of_megatron(role: str, place: str, settings: Mapping, chosen: str) -> Iterator[Outcome]:
    """What FSDP2 or DeepSpeed have of Megatron's settings; the others are said in one sentence."""
    model = "critic.model" if place == "critic" else MODEL
    idle_names = []
    for name, value in settings.items():
        if name == "context_parallel_size" and value not in _IS_ONE and chosen.startswith("fsdp"):
            yield Set(f"{place}.ulysses_sequence_parallel_size", value)
            yield Set(f"{model}.use_remove_padding", True)
        elif name == "recompute_granularity" and value == "full":
            yield from [] if place == REF else [Set(f"{model}.enable_gradient_checkpointing", True)]
        elif name == "optimizer_cpu_offload" and value and place != REF:
            fsdp = "critic.model.fsdp_config" if place == "critic" else f"{place}.fsdp_config"
            yield Set(f"{fsdp}.optimizer_offload", True)
        elif value is not None and value is not False and not (type(value) is int and value == 1):
            idle_names.append(name)
    if idle_names:
        named = ", ".join(idle_names)
        yield Note(f"{role}: {chosen} shards the model over all devices in Megatron's place; no effect have {named}")


def _deepspeed(key: str, place: str, settings: Mapping) -> Iterator[Outcome]:
    section, rest = f"{place}.deepspeed", {}
    fsdp = "critic.model.fsdp_config" if place == "critic" else f"{place}.fsdp_config"
    for name, value in settings.items():
        if name in ("bf16", "fp16") and isinstance(value, Mapping):
            if value.get("enabled") is True:
                yield Set(f"{fsdp}.mixed_precision.param_dtype", name)
        elif name == "zero_optimization":
            for option, item in value.items():
                if option == "stage":
                    yield Set(f"{section}.zero_stage", item)
                elif option in ("offload_optimizer", "offload_param"):
                    yield Set(f"{section}.{option}", (item or {}).get("device", "none") != "none")
                elif option in _ZERO:
                    yield from [] if item == "auto" else [Set(f"{section}.{option}", _whole(item))]
                elif item != "auto":
                    rest.setdefault(name, {})[option] = item
        elif name not in _OVERWRITTEN and value != "auto":
            rest[name] = value
    for name, value in rest.items():
        yield Set(f"{section}.config.{name}", value)


def _whole(value: Any) -> Any:
    number = float(value) if isinstance(value, str) and value.replace(".", "").replace("e", "").isdigit() else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


_FSDP_NAMES = {"fsdp_size": "fsdp_size", "offload_policy": "offload_policy", "param_offload": "param_offload",
               "optimizer_offload": "optimizer_offload", "reshard_after_forward": "reshard_after_forward"}  # fmt: skip


def _fsdp(key: str, place: str, settings: Mapping) -> Iterator[Outcome]:
    fsdp = "critic.model.fsdp_config" if place == "critic" else f"{place}.fsdp_config"
    for name, value in settings.items():
        if name in _FSDP_NAMES:
            yield Set(f"{fsdp}.{_FSDP_NAMES[name]}", value)
        elif name == "param_dtype":
            yield Set(f"{fsdp}.mixed_precision.param_dtype", str(value).removeprefix("torch."))
        elif name == "reduce_dtype":
            yield Set(f"{fsdp}.mixed_precision.reduce_dtype", str(value).removeprefix("torch."))
        elif name == "wrap_policy" and isinstance(value, Mapping):
            yield from (Set(f"{fsdp}.wrap_policy.{option}", item) for option, item in value.items() if item is not None)
        elif value is not None:
            yield Refuse(f"{key}.{name}", value, f"{fsdp} has no such option", (f"{key}.{name}=null",))
