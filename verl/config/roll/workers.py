"""Keys of ROLL's worker sections, a row each: ``actor_train``, ``actor_infer``, ``reference``, ``critic``."""

from collections.abc import Iterator
from typing import Any

from verl.config.roll.result import Idle, Note, Outcome, Refuse, Set
from verl.config.roll.table import ACTOR, MODEL, REF, ROLLOUT, Row, idle, not_read
from verl.config.roll.table import pg_variant as _pg_variant
from verl.config.roll.table import topr_weight as _topr_weight

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
        names = value
        if name == "target_modules" and "," in str(value) and not set(str(value)) & set("|()*\\"):
            names = [part.strip() for part in value.split(",")]
        if name == "target_modules" and value in ("all", "all-linear"):
            names = "all-linear"
        yield Set(f"{model}.{name}", names)


def _kernel(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value not in (None, "auto"):
        yield Idle(key)


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
        optim = _place(key, "optim")
        instead = (f"{key}=cosine", f"{optim}.warmup_style") if optim else (f"{key}=cosine",)
        yield Refuse(key, value, f"known are {', '.join(_SCHEDULES)}", instead)
    elif optim := _place(key, "optim"):
        yield Set(f"{optim}.warmup_style", _SCHEDULES[value])


def _sync(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    yield Set("trainer.weight_sync_freq", value)
    if value > 1:
        yield Set(f"{ROLLOUT}.free_cache_engine", False)


def _loader_workers(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if key.startswith("actor_train"):
        yield Set("data.dataloader_num_workers", value)


def _adapter(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is not None and (model := _place(key, "model")):
        yield Set(f"{model}.lora_adapter_path", value)


def _model_type(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is not None and key.startswith(("actor", "reference")):
        yield Idle(key)


def _config_kwargs(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    for name, item in (value or {}).items():
        if model := _place(key, "model"):
            yield Set(f"{model}.override_config.{name}", item)


def _freeze(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value is None or not key.startswith("actor_train"):
        return
    if all(any(mark in part for mark in ("vision", "visual")) for part in str(value).split(",")):
        yield Set(f"{ACTOR}.freeze_vision_tower", True)
    else:
        yield Refuse(key, value, "the vision tower can be frozen, and nothing else", (f"{key}=null",))


def _betas(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    section = key.rpartition(".")[0]
    if (optim := _place(key, "optim")) and value is not None:
        betas = [roll.get(f"{section}.adam_beta1", 0.9), roll.get(f"{section}.adam_beta2", 0.999)]
        yield Set(f"{optim}.betas", betas)


def _save_hf(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value and (role := _place(key, "role")):
        yield Set(f"{role}.checkpoint.save_contents", ["model", "optimizer", "extra", "hf_model"])


def _dynamic(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    role, name = key.split(".")
    if not value:
        return
    tokens = roll.get(f"{role}.max_tokens_per_microbatch_in_{'train' if 'train' in name else 'infer'}")
    place = _place(key, "role")
    if "train" in name and place in (ACTOR, "critic"):
        yield Set(f"{place}.use_dynamic_bsz", True)
        yield from [Set(f"{place}.ppo_max_token_len_per_gpu", tokens)] if tokens else []
    elif "infer" in name and role in ("actor_train", "reference"):
        place = ROLLOUT if role == "actor_train" else REF
        yield Set(f"{place}.log_prob_use_dynamic_bsz", True)
        yield from [Set(f"{place}.log_prob_max_token_len_per_gpu", tokens)] if tokens else []


def _packing(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    if value and (model := _place(key, "model")):
        yield Set(f"{model}.use_remove_padding", True)


# ------------------------------------------------------------------------------------------------------------- data

_THINKING = {"qwen3": True, "qwen3_nothink": False, "native_nonthinking": False}
_TOKENIZERS = ("native", "qwen", "llama", "chatml", "deepseek", "glm", "mistral", "gemma", "default")
"""Beginnings of ROLL's names for templates that models bring themselves."""


def _template(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    """The template of the training prompts is everybody's: responses are sampled and scored as token ids."""
    own = roll.get("actor_train.data_args.template", roll.get("global_template", "native"))
    if value is None or key != "actor_train.data_args.template" and value == own:
        return
    if key.startswith("actor_train"):
        yield from template_outcomes(key, value)
    elif key.startswith("validation"):
        yield Note(f"{key}={value}: prompts of validation go through the template of training, {own}")
    else:
        yield Idle(key)


def template_outcomes(key: str, value: Any) -> Iterator[Outcome]:
    """Outcomes of a template's name or text."""
    if value is None:
        return
    if str(value).endswith((".jinja", ".jinja2")) or "{%" in str(value):
        yield Set(f"{MODEL}.custom_chat_template", value)
    elif str(value).startswith(_TOKENIZERS):
        if value in _THINKING:
            yield Set("data.apply_chat_template_kwargs.enable_thinking", _THINKING[value])
        elif value != "native":
            yield Note(f"{key}={value}: the tokenizer's own template is used, {value}'s for models that have it")
    else:
        yield Refuse(key, value, "a template is the tokenizer's (native) or a Jinja file of yours",
                     (f"{key}=native", f"{MODEL}.custom_chat_template"))  # fmt: skip


def _training_data(row: Row) -> Row:
    """A row of ``data_args`` that counts in ``actor_train`` and ``validation`` alone."""

    def translate(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
        if not key.startswith(("actor_train", "validation")):
            yield from [] if value is None else [Idle(key)]
        elif callable(row.to):
            yield from row.to(key, value, roll)
        elif value is not None and not key.startswith("validation"):
            yield Set(str(row.to), value)

    return row._replace(to=translate, note=row.note or f"`{row.to}`")


def _of_sampling(row: Row) -> Row:
    """A row of ``generating_args`` that counts in ``actor_infer`` and ``validation`` alone."""

    def translate(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
        if key.startswith(("actor_infer", "validation")):
            yield from row.to(key, value, roll)
        elif value is not None:
            yield Idle(key)

    return row._replace(to=translate)


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
        why = f"{section} names a column of prompts and one of messages: keep one of them"
        yield Refuse(key, value, why, (f"{section}.prompt=null", f"{section}.messages=null"))
    elif name == "messages" and roll.knows("data.messages_key"):
        yield Set("data.messages_key", value)
    else:
        yield Set("data.prompt_key", value)


# -------------------------------------------------------------------------------------------------------- generation

_SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty")


def _sampling(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    name, validates = key.rpartition(".")[2], key.startswith("validation")
    place = f"{ROLLOUT}.{'val_kwargs.' * validates}"
    if value is None:
        return
    if name == "temperature" and (validates or value == 0):
        yield Set(f"{place}do_sample", value > 0)
    if name != "temperature" or validates or value > 0:
        yield Set(f"{place}{name}", value)


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
        yield Note(f"{key}={value}: responses of validation may have as many tokens as those of training, {length}")
    elif key.startswith("validation"):
        return
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
        yield Refuse(key, value, "responses are sampled, not searched for", (f"{key}=1",))


def _do_sample(key: str, value: Any, roll: Any) -> Iterator[Outcome]:
    place = f"{ROLLOUT}.{'val_kwargs.' * key.startswith('validation')}"
    if key.startswith("validation") or value is False:
        yield Set(f"{place}do_sample", bool(value))


_TRAINERS = "ROLL's steps, formats and seeds are those of the run"
_GENERATION: dict[str, Row] = {
    "generating_args.max_new_tokens": Row(_max_new_tokens, "`data.max_response_length`"),
    **{f"generating_args.{name}": Row(_sampling, f"`rollout.{name}`") for name in _SAMPLING},
    "generating_args.num_return_sequences": Row(_samples, "`rollout.n`"),
    "generating_args.do_sample": Row(_do_sample, "`rollout.do_sample`"),
    "generating_args.stop_strings": Row(_stop, "`rollout.stop`"),
    "generating_args.num_beams": Row(_beams, "1"),
    "generating_args.include_stop_str_in_output": Row(idle, "the text stays in"),
    "generating_args.max_length": Row(idle, "`max_new_tokens` and `prompt_length` bound a response"),
    "generating_args.length_penalty": Row(idle, "belongs to a search with beams"),
    "generating_args.logprobs": Row(idle, "with `rollout.calculate_log_probs` those of the sampled tokens"),
}  # fmt: skip
GENERATION = {key: _of_sampling(row) if callable(row.to) else row for key, row in _GENERATION.items()}
"""Keys of ``actor_infer`` and ``validation``."""

_MEDIA = "images and videos are columns of the data, sized by the model's processor (docs/images.md)"
_DATA: dict[str, Row] = {
    "data_args.template": Row(_template, "native: the tokenizer's; `model.custom_chat_template`"),
    "data_args.file_name": Row(_file_name, "`data.train_files`, of `validation` `data.val_files`"),
    "data_args.eval_file_name": Row(lambda key, value, roll: iter([Set("data.val_files", value)] if value else []),
                                    "`data.val_files`"),
    "data_args.dataset_dir": Row(not_read, "put before `file_name`"),
    "data_args.dataset_type": Row(idle, "a file's extension says it"),
    "data_args.prompt": Row(_column, "`data.prompt_key`: a text is one user message, through the template"),
    "data_args.messages": Row(_column, "`data.messages_key`: messages or their JSON, excludes `prompt`"),
    "data_args.max_samples": Row("data.train_max_samples"),
    "data_args.tag": Row(not_read, "`data.reward_fn_key`"),
    "data_args.id": Row(idle, "`id` is kept in `extra_info`"),
    "data_args.response": Row(idle, "responses are sampled; goals are the column `ground_truth`"),
    "data_args.preprocessing_num_workers": Row("data.filter_overlong_prompts_workers"),
    "data_args.domain_interleave_probs": Row(not_read, "`data.mixture`, by the names below `rewards`"),
    "data_args.interleave_probs": Row(idle, "nothing reads it in ROLL: `domain_interleave_probs` does"),
    **{f"data_args.{name}": Row(idle, _MEDIA) for name in (
        "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_total_pixels",
        "video_fps", "video_max_frames", "video_resize_chunk_frames")},
    **{f"data_args.{name}": Row(None, "media are given in the rows, as bytes or paths (docs/images.md)")
       for name in ("image_folder", "video_folder", "audio_folder")},
    "data_args.custom_data_kwargs_func": Row(None, "a data set of yours is a class: data.custom_cls.path "
                                             "(docs/extend.md)", instead=("{key}=null", "data.custom_cls.path")),
}  # fmt: skip
DATA = {key: _training_data(row) if row.to not in (None, idle, not_read) and key != "data_args.template" else row
        for key, row in _DATA.items()}  # fmt: skip
"""Keys of ``actor_train`` and ``validation``."""

WORKER: dict[str, Row] = {
    "model_args.model_name_or_path": Row(_model_path, "`model.path`"),
    "model_args.dtype": Row(_dtype, "`fsdp_config.mixed_precision.param_dtype`; of `actor_infer` `rollout.dtype`"),
    "model_args.disable_gradient_checkpointing": Row(_checkpointing, "`model.enable_gradient_checkpointing`, reversed"),
    "model_args.gradient_checkpointing_use_reentrant": Row(idle, "always the one that is not reentrant"),
    "model_args.flash_attn": Row(_kernel, "the best kernel there is"),
    "model_args.attn_implementation": Row(_kernel, "the best kernel there is"),
    "model_args.lora_rank": Row(_lora, "`model.lora_rank`"),
    "model_args.lora_alpha": Row(_lora, "`model.lora_alpha`"),
    "model_args.lora_target": Row(_lora, "`model.target_modules`"),
    "model_args.lora_dropout": Row(idle, "sampling has no dropout, so training has none"),
    "model_args.additional_target": Row(None, "modules beside the adapter's matrices are not trained with LoRA"),
    "model_args.autocast_adapter_dtype": Row(idle, "adapters are kept in `fsdp_config.model_dtype`"),
    "model_args.adapter_name_or_path": Row(_adapter, "`model.lora_adapter_path`"),
    "model_args.moe_aux_loss_coef": Row(None, "there is no auxiliary loss of experts",
                                        harmless=(None, 0, 0.0), instead=("{key}=0",)),
    "model_args.device_map": Row(idle, "strategies place the model"),
    "model_args.model_type": Row(_model_type, "a language model, of `critic` with a value head"),
    "model_args.num_labels": Row(idle, "one value a token"),
    "model_args.model_config_kwargs": Row(_config_kwargs, "`model.override_config`"),
    "model_args.freeze_module_prefix": Row(_freeze, "the vision tower: `actor.freeze_vision_tower`"),
    "model_args.ulysses_size": Row(_ulysses, "`ulysses_sequence_parallel_size`"),
    "training_args.learning_rate": Row(_optim("lr"), "`optim.lr`", default=5e-5),
    "training_args.weight_decay": Row(_optim("weight_decay"), "`optim.weight_decay`", default=0),
    "training_args.adam_beta1": Row(_betas, "the first of `optim.betas`"),
    "training_args.adam_beta2": Row(_betas, "the second of `optim.betas`"),
    "training_args.warmup_steps": Row(_warmup_steps, "`optim.lr_warmup_steps`, in training steps"),
    "training_args.warmup_ratio": Row(_optim("lr_warmup_steps_ratio"), "`optim.lr_warmup_steps_ratio`"),
    "training_args.lr_scheduler_type": Row(_schedule, "`optim.warmup_style`", default="linear"),
    "training_args.per_device_train_batch_size": Row(not_read, "`ppo_micro_batch_size_per_gpu`", default=8),
    "training_args.gradient_accumulation_steps": Row(not_read, "in `ppo_mini_batch_size`", default=1),
    "training_args.dataloader_num_workers": Row(_loader_workers, "`data.dataloader_num_workers`"),
    "training_args.num_train_epochs": Row(idle, "`max_steps` decides"),
    "training_args.save_hf_model": Row(_save_hf, "`actor.checkpoint.save_contents` with hf_model"),
    **{f"training_args.{name}": Row(idle, _TRAINERS)
       for name in ("output_dir", "max_steps", "seed", "data_seed", "fp16", "bf16", "tf32")},
    "infer_batch_size": Row(not_read, "`rollout.`, `ref.log_prob_micro_batch_size_per_gpu`, "
                            "`critic.forward_micro_batch_size_per_gpu`; `actor_infer` with hf: `rollout.max_num_seqs`"),
    "world_size": Row(not_read, "of a CPU run `trainer.n_gpus_per_node`; else the devices say it"),
    "device_mapping": Row(not_read, "`trainer.nnodes`, `trainer.n_gpus_per_node`; read, never evaluated. Others than "
                          "the actor's for `actor_infer`: `hybrid_engine=false`"),
    "num_gpus_per_worker": Row(not_read, "`rollout.tensor_model_parallel_size`"),
    "model_update_frequency": Row(_sync, "`trainer.weight_sync_freq`; above 1 `rollout.free_cache_engine=false`"),
    "pg_variant": Row(_pg_variant, "`actor.policy_loss.loss_mode`"),
    "topr_positive_weight": Row(_topr_weight, "with topr: `actor.policy_loss.topr_pos_weight`"),
    "topr_negative_weight": Row(_topr_weight, "with topr: `actor.policy_loss.topr_neg_weight`"),
    "use_dynamic_batching_in_train": Row(_dynamic, "`use_dynamic_bsz`"),
    "max_tokens_per_microbatch_in_train": Row(not_read, "`ppo_max_token_len_per_gpu`"),
    "use_dynamic_batching_in_infer": Row(_dynamic, "`log_prob_use_dynamic_bsz`"),
    "max_tokens_per_microbatch_in_infer": Row(not_read, "`log_prob_max_token_len_per_gpu`"),
    "sequence_length_round_in_train": Row(idle, "micro-batches are packed without padding, or padded to their longest"),
    "sequence_length_round_in_infer": Row(idle, "micro-batches are packed without padding, or padded to their longest"),
    "use_sequence_packing": Row(_packing, "`model.use_remove_padding`"),
    "use_remove_padding": Row(_packing, "`model.use_remove_padding`"),
    **{f"sequence_packing_args.{name}": Row(idle, "a micro-batch is one packed sequence; `use_dynamic_bsz` fills it")
       for name in ("algorithm", "max_packed_sequence_length_forward", "max_packed_sequence_length_train",
                    "min_num_micro_batches_forward", "min_num_micro_batches_train")},
    "router_replay.mode": Row(None, "experts chosen while sampling are not kept for training",
                              harmless=(None, "disable"), instead=("{key}=disable",)),
    "mtp_training_mode": Row(None, "heads that predict several tokens are not trained",
                             harmless=(None, "disabled"), instead=("{key}=disabled",)),
    "opd_kl_coef": Row(None, "distillation from a teacher is not built"),
    "logits_in_fp32": Row(idle, "log-probs are computed in fp32"),
    "apply_loss_scale": Row(idle, "a loss is divided by what it is a mean of, over all ranks"),
    "worker_cls": Row(not_read, "ROLL's own; of yours: `data.custom_cls`, docs/extend.md"),
    "name": Row(idle, "a label"),
    "system_envs": Row(not_read, "`ray_init.env`"),
    "offload_nccl": Row(idle, "communicators stay"),
    "backend_timeout": Row(idle, "`rpc_timeout` bounds every call"),
    "max_concurrency": Row(idle, "calls of one worker follow each other"),
    "tag_included": Row(idle, "rows are divided among the entries of `rewards`"),
    "eval_steps": Row(idle, "the top level's `eval_steps` decides, as in ROLL"),
    **{name: Row(not_read, "a section: its keys are beside") for name in (
        "model_args", "training_args", "data_args", "generating_args", "strategy_args", "sequence_packing_args",
        "router_replay")},
}  # fmt: skip
"""Keys of every training and scoring worker; of ``reference`` and ``actor_infer`` those that make sense there."""
