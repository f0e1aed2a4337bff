"""Keys of ROLL's worker sections, a row each: ``actor_train``, ``actor_infer``, ``reference``, ``critic``."""

from collections.abc import Iterator
from typing import Any

from verl.config.roll.result import Note, Outcome, Refuse, Set
from verl.config.roll.table import ACTOR, MODEL, REF, ROLLOUT, Row

ROLES = ("actor_train", "actor_infer", "reference", "critic")
_OF_ROLE = {
    "actor_train": {"model": MODEL, "fsdp": f"{ACTOR}.fsdp_config", "optim": f"{ACTOR}.optim", "role": ACTOR},
    "reference": {"fsdp": f"{REF}.fsdp_config", "role": REF},
    "critic": {"model": "critic.model", "fsdp": "critic.model.fsdp_config", "optim": "critic.optim", "role": "critic"},
}


def _place(key: str, kind: str) -> str | None:
    return _OF_ROLE.get(key.partition(".")[0], {}).get(kind)


def _dtype(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is None:
        return
    fsdp = _place(key, "fsdp")
    yield Set(f"{fsdp}.mixed_precision.param_dtype" if fsdp else f"{ROLLOUT}.dtype", value)


def _checkpointing(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if model := _place(key, "model"):
        yield Set(f"{model}.enable_gradient_checkpointing", not value)


def _model_path(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    role = key.partition(".")[0]
    if role == "reference" and value != roll.get("pretrain"):
        yield Set(f"{REF}.model.path", value)
    elif role in ("actor_train", "critic"):
        yield Set(f"{_place(key, 'model')}.path", value)


def _lora(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    name = {"lora_target": "target_modules"}.get(key.rpartition(".")[2], key.rpartition(".")[2])
    if (model := _place(key, "model")) and value is not None:
        names = [part.strip() for part in value.split(",")] if name == "target_modules" and "," in str(value) else value
        yield Set(f"{model}.{name}", names)


def _kernel(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value not in (None, "auto"):
        yield Note(f"{key}={value}: the attention kernel is the best that is installed")


def _ulysses(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if (role := _place(key, "role")) and value not in (None, 1):
        yield Set(f"{role}.ulysses_sequence_parallel_size", value)
        yield Set(f"{_place(key, 'model') or MODEL}.use_remove_padding", True)


def _optim(name: str) -> Any:
    def translate(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
        if optim := _place(key, "optim"):
            yield Set(f"{optim}.{name}", value)

    return translate


def _warmup_steps(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """ROLL counts optimizer steps, the schedule here training steps."""
    if (optim := _place(key, "optim")) and value:
        updates = roll.updates_per_step(key.partition(".")[0])
        yield Set(f"{optim}.lr_warmup_steps", -(-value // updates))
        if updates > 1:
            yield Note(f"{key}={value} counts optimizer steps: {updates} of them make one training step")


_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def _schedule(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value not in _SCHEDULES:
        yield Refuse(key, value, f"known are {', '.join(_SCHEDULES)}", tuple(filter(None, [_place(key, "optim")])))
    elif optim := _place(key, "optim"):
        yield Set(f"{optim}.warmup_style", _SCHEDULES[value])


def _sync(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("trainer.weight_sync_freq", value)
    if value > 1:
        yield Set(f"{ROLLOUT}.free_cache_engine", False)


def _in_batch(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    return iter(())  # with the rest of the batch arithmetic, in batch.py


def _loader_workers(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if key.startswith("actor_train"):
        yield Set("data.dataloader_num_workers", value)


# ------------------------------------------------------------------------------------------------------------- data

_TEMPLATES = {
    "native": {}, "qwen2_5": {}, "llama3": {}, "chatml": {}, "qwen3": {"enable_thinking": True},
    "qwen3_nothink": {"enable_thinking": False},
}  # fmt: skip


def _template(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value in _TEMPLATES:
        for name, item in _TEMPLATES[value].items():
            yield Set(f"data.apply_chat_template_kwargs.{name}", item)
        if value not in ("native", "qwen3", "qwen3_nothink"):
            yield Note(
                f"{key}={value}: the tokenizer's own template is used, which is {value}'s for models that have it"
            )
    elif str(value).endswith((".jinja", ".jinja2")) or "{%" in str(value):
        yield Set(f"{MODEL}.custom_chat_template", value)
    else:
        yield Refuse(key, value, "a template is the tokenizer's (native) or a Jinja file of yours",
                     (f"{MODEL}.custom_chat_template", "data.chat_template"))  # fmt: skip


def _file_name(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    folder = roll.get(f"{key.rpartition('.')[0]}.dataset_dir")
    names = value if isinstance(value, list) else [value]
    paths = [f"{folder}/{name}" if folder and "/" not in str(name) else name for name in names]
    option = "data.val_files" if key.startswith("validation") else "data.train_files"
    yield Set(option, paths if isinstance(value, list) else paths[0])


def _column(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is None:
        return
    section, name = key.rpartition(".")[::2]
    if roll.get(f"{section}.prompt") and roll.get(f"{section}.messages"):
        yield Refuse(key, value, f"{section} names a column of prompts and one of messages: keep one of them")
    elif name == "messages" and roll.knows("data.messages_key"):
        yield Set("data.messages_key", value)
    else:
        yield Set("data.prompt_key", value)


def _mixture(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    for source, share in (value or {}).items():
        yield Set(f"data.mixture.{source}", share)


# -------------------------------------------------------------------------------------------------------- generation

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def _sampling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    name, validates = key.rpartition(".")[2], key.startswith("validation")
    yield Set(f"{ROLLOUT}.{'val_kwargs.' * validates}{name}", value)
    if validates and name == "temperature":
        yield Set(f"{ROLLOUT}.val_kwargs.do_sample", value > 0)


def _samples(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if key.startswith("validation"):
        yield Set(f"{ROLLOUT}.val_kwargs.n", value)
    elif roll.get("num_return_sequences_in_group") in (None, value):
        yield Set(f"{ROLLOUT}.n", value)
    else:
        yield Note(f"{key}={value} has no effect: num_return_sequences_in_group decides")


def _max_new_tokens(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if roll.is_agentic:
        yield Set("env.train.max_tokens_per_step", value)
        return
    length = roll.response_length
    if key.startswith("validation") and value != length:
        yield Refuse(key, value, f"validation responses may have as many tokens as those of training, {length}",
                     ("data.max_response_length",))  # fmt: skip
    elif length is not None and value != length:
        yield Set("data.max_response_length", min(value, length))
        yield Note(f"{key}={value} and response_length={length}: the smaller ends a response")
    else:
        yield Set("data.max_response_length", value)


def _stop(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    place = f"{ROLLOUT}.{'val_kwargs.' * key.startswith('validation')}"
    yield Set(f"{place}stop", value)


def _beams(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value not in (None, 1):
        yield Refuse(key, value, "responses are sampled, not searched for")


GENERATION: dict[str, Row] = {
    "generating_args.max_new_tokens": Row(_max_new_tokens, "`data.max_response_length`"),
    **{f"generating_args.{name}": Row(_sampling, f"`rollout.{name}`") for name in _SAMPLING},
    "generating_args.num_return_sequences": Row(_samples, "`rollout.n`"),
    "generating_args.stop_strings": Row(_stop, "`rollout.stop`"),
    "generating_args.num_beams": Row(_beams, "1"),
    "generating_args.include_stop_str_in_output": Row(None, "the text stays in", harmless=(None, True)),
}
"""Keys of ``actor_infer`` and ``validation``."""

DATA: dict[str, Row] = {
    "data_args.template": Row(_template, "native: the tokenizer's; `model.custom_chat_template`"),
    "data_args.file_name": Row(_file_name, "`data.train_files`, of `validation` `data.val_files`"),
    "data_args.dataset_dir": Row(_in_batch, "put before `file_name`"),
    "data_args.prompt": Row(_column, "`data.prompt_key`: a text is one user message, through the template"),
    "data_args.messages": Row(_column, "the column of messages, excludes `prompt`"),
    "data_args.preprocessing_num_workers": Row("data.filter_overlong_prompts_workers"),
    "data_args.domain_interleave_probs": Row(_mixture, "shares of the sources in a batch"),
}

WORKER: dict[str, Row] = {
    "model_args.model_name_or_path": Row(_model_path, "`model.path`"),
    "model_args.dtype": Row(_dtype, "`fsdp_config.mixed_precision.param_dtype`; of `actor_infer` `rollout.dtype`"),
    "model_args.disable_gradient_checkpointing": Row(_checkpointing, "`model.enable_gradient_checkpointing`, reversed"),
    "model_args.flash_attn": Row(_kernel, "the best kernel there is"),
    "model_args.attn_implementation": Row(_kernel, "the best kernel there is"),
    "model_args.lora_rank": Row(_lora, "`model.lora_rank`"),
    "model_args.lora_alpha": Row(_lora, "`model.lora_alpha`"),
    "model_args.lora_target": Row(_lora, "`model.target_modules`"),
    "model_args.ulysses_size": Row(_ulysses, "`ulysses_sequence_parallel_size`"),
    "training_args.learning_rate": Row(_optim("lr"), "`optim.lr`", default=5e-5),
    "training_args.weight_decay": Row(_optim("weight_decay"), "`optim.weight_decay`", default=0),
    "training_args.warmup_steps": Row(_warmup_steps, "`optim.lr_warmup_steps`, in training steps"),
    "training_args.warmup_ratio": Row(_optim("lr_warmup_steps_ratio"), "`optim.lr_warmup_steps_ratio`"),
    "training_args.lr_scheduler_type": Row(_schedule, "`optim.warmup_style`", default="linear"),
    "training_args.per_device_train_batch_size": Row(_in_batch, "`ppo_micro_batch_size_per_gpu`", default=8),
    "training_args.gradient_accumulation_steps": Row(_in_batch, "in `ppo_mini_batch_size`", default=1),
    "training_args.dataloader_num_workers": Row(_loader_workers, "`data.dataloader_num_workers`"),
    "training_args.num_train_epochs": Row(_in_batch, "max_steps decides"),
    "infer_batch_size": Row(_in_batch, "`rollout.`, `ref.log_prob_micro_batch_size_per_gpu`, "
                            "`critic.forward_micro_batch_size_per_gpu`; `actor_infer` with hf: `rollout.max_num_seqs`"),
    "world_size": Row(_in_batch, "of a CPU run `trainer.n_gpus_per_node`; else the devices say it"),
    "device_mapping": Row(_in_batch, "`trainer.nnodes`, `trainer.n_gpus_per_node`; read, never evaluated. Others than "
                          "the actor's for `actor_infer`: `hybrid_engine=false`"),
    "num_gpus_per_worker": Row(_in_batch, "`rollout.tensor_model_parallel_size`"),
    "model_update_frequency": Row(_sync, "`trainer.weight_sync_freq`; above 1 `rollout.free_cache_engine=false`"),
    "worker_cls": Row(_in_batch, "ROLL's own; of yours: `data.custom_cls`, docs/extend.md"),
    "name": Row(_in_batch, "a label"),
    "system_envs": Row(_in_batch, "`ray_init.env`"),
    "offload_nccl": Row(None, "communicators stay", harmless=(None, False, True)),
}  # fmt: skip
"""Keys of every training and scoring worker; of ``reference`` and ``actor_infer`` those that make sense there."""
