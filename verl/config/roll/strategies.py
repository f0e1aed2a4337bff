"""``strategy_args``: which engine, and its settings."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.roll.result import Note, Outcome, Refuse, Set
from verl.config.roll.table import ACTOR, MODEL, REF, ROLLOUT, Row

TRAINING = {
    "deepspeed_train": "deepspeed", "deepspeed_infer": "deepspeed", "fsdp2_train": "fsdp2", "fsdp2_infer": "fsdp2",
    "fsdp_train": "fsdp", "hf_infer": None, "megatron_train": "megatron", "megatron_infer": "megatron",
}  # fmt: skip
ROLLOUTS = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "hf"}
_ROLE = {"actor_train": ACTOR, "reference": REF, "critic": "critic"}

_IS_ONE = (None, 1)
_NOT_BUILT = "Megatron's, which is not built"
MEGATRON: dict[str, Row] = {
    **{
        f"{name}_parallel_size": Row(None, _NOT_BUILT, harmless=_IS_ONE)
        for name in ("tensor_model", "pipeline_model", "expert_model", "virtual_pipeline_model")
    },
    "context_parallel_size": Row(None, "sequences are divided among ranks by `ulysses_sequence_parallel_size`",
                                 harmless=_IS_ONE),
    "sequence_parallel": Row(None, "tensor parallelism's, which is not built", harmless=(None, False, True)),
    "recompute_granularity": Row(None, "full: `model.enable_gradient_checkpointing`; selective: Megatron's",
                                 harmless=(None, "full")),
    "moe_layer_recompute": Row(None, "`model.enable_gradient_checkpointing` recomputes whole layers",
                               harmless=(None, False, True)),
    "moe_token_dispatcher_type": Row(None, _NOT_BUILT),
    "moe_grouped_gemm": Row(None, _NOT_BUILT),
    "moe_shared_expert_overlap": Row(None, _NOT_BUILT),
    "overlap_grad_reduce": Row(None, "FSDP always does", harmless=(None, False, True)),
    "use_distributed_optimizer": Row(None, "FSDP always shards the optimizer", harmless=(None, False, True)),
    "bf16": Row(None, "`mixed_precision.param_dtype`", harmless=(None, True)),
}  # fmt: skip
"""Keys of Megatron's strategy_config, read where another engine was asked for in its place."""

VLLM: dict[str, Row] = {
    "gpu_memory_utilization": Row(f"{ROLLOUT}.gpu_memory_utilization"),
    "max_model_len": Row(f"{ROLLOUT}.max_model_len"),
    "load_format": Row(f"{ROLLOUT}.load_format"),
    "tensor_parallel_size": Row(f"{ROLLOUT}.tensor_model_parallel_size"),
    "enforce_eager": Row(f"{ROLLOUT}.enforce_eager"),
    "max_num_seqs": Row(f"{ROLLOUT}.max_num_seqs"),
    "max_num_batched_tokens": Row(f"{ROLLOUT}.max_num_batched_tokens"),
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
        yield Refuse(f"{key}.{name}", value[name], "strategy_args has strategy_name and strategy_config")
    name, settings = value.get("strategy_name"), value.get("strategy_config") or {}
    if role == "actor_infer":
        yield from _rollout(key, name, settings, roll)
    elif name not in TRAINING:
        yield Refuse(f"{key}.strategy_name", name, f"known are {', '.join(TRAINING)}")
    else:
        yield from _training(key, role, name, settings, roll)


def _rollout(key: str, name: Any, settings: Mapping, roll: Any) -> Iterator[Outcome]:
    if name not in ROLLOUTS:
        yield Refuse(f"{key}.strategy_name", name, f"known are {', '.join(ROLLOUTS)}", (f"{ROLLOUT}.name",))
        return
    engine = ROLLOUTS[name]
    yield Set(f"{ROLLOUT}.name", engine)
    table = {"vllm": VLLM, "sglang": SGLANG}.get(engine, {})
    for option, item in settings.items():
        if option in table:
            yield Set(str(table[option].to), item)
        elif option == "pipeline_parallel_size" and item in _IS_ONE:
            continue
        elif engine == "hf":
            yield Note(f"{key}.strategy_config.{option} has no effect: hf_infer has no such knob")
        else:
            yield Set(f"{ROLLOUT}.engine_kwargs.{engine}.{option}", item)


def _training(key: str, role: str, name: str, settings: Mapping, roll: Any) -> Iterator[Outcome]:
    engine, place = TRAINING[name], _ROLE[role]
    option = f"{place}.strategy"
    settled = (option, f"{ACTOR}.strategy") if role == "reference" else (option,)
    config = f"{key}.strategy_config"
    if engine == "megatron":
        yield Refuse(f"{key}.strategy_name", name, f"Megatron is not built. {option}=fsdp2 shards the same model over "
                     "the same devices", settled)  # fmt: skip
        yield from _megatron(config, place, settings, roll)
    elif engine is None:
        yield Note(f"{key}.strategy_name={name}: the role scores with the engine of the actor")
    else:
        yield Set(option, engine)
        yield from (_deepspeed if engine == "deepspeed" else _fsdp)(config, place, settings)


def _megatron(key: str, place: str, settings: Mapping, roll: Any) -> Iterator[Outcome]:
    for name, value in settings.items():
        row = MEGATRON.get(name)
        if row is None:
            yield Refuse(f"{key}.{name}", value, _NOT_BUILT)
        elif name == "context_parallel_size" and value not in _IS_ONE:
            yield Set(f"{place}.ulysses_sequence_parallel_size", value)
            yield Set("critic.model.use_remove_padding" if place == "critic" else f"{MODEL}.use_remove_padding", True)
        elif value not in row.harmless:
            yield Refuse(f"{key}.{name}", value, row.note)
        elif name == "recompute_granularity" and value == "full" and place != REF:
            model = "critic.model" if place == "critic" else MODEL
            yield Set(f"{model}.enable_gradient_checkpointing", True)


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
        else:
            yield Refuse(f"{key}.{name}", value, f"{fsdp} has no such option")
