"""Validators of megatron-core's mesh and of what cannot be combined with it. What a model must divide by is in
``config/model_info.py``, which reads its folder."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from verl.config.base import Problem, get_path
from verl.config.checks.base import EngineRole, IsGiven, engine_roles, given_below, problem, unused, validator
from verl.config.ppo import ACTOR, MODEL, PPOConfig
from verl.config.tree import show

_SIZES = {
    "tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp",
}  # fmt: skip
"""Option of the section ``megatron`` -> its factor of the mesh."""

_BY_SECTION = "set megatron.{option}"
_BY_MODEL = "it is the model's config.json that says it, and model.override_config that changes it"
_BY_ENGINE = "leave it out"
DECIDED: dict[str, dict[str, str]] = {
    "override_transformer_config": {
        **{
            name: _BY_SECTION.format(option=name)
            for name in (*_SIZES, "virtual_pipeline_model_parallel_size", "sequence_parallel")
        },
        **dict.fromkeys(("bf16", "fp16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "set megatron.dtype"),
        **dict.fromkeys(
            (
                "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size",
                "kv_channels",
                "normalization", "layernorm_epsilon", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
                "add_bias_linear", "add_qkv_bias", "qk_layernorm", "gated_linear_unit", "activation_func",
            ),
            _BY_MODEL,
        ),
        **dict.fromkeys(
            (
                "calculate_per_token_loss", "variable_seq_lengths", "finalize_model_grads_func", "grad_scale_func",
                "no_sync_func", "grad_sync_func", "param_sync_func", "perform_initialization",
            ),
            _BY_ENGINE,
        ),
    },
    "override_ddp_config": {
        "use_distributed_optimizer": _BY_SECTION.format(option="use_distributed_optimizer"),
        "use_megatron_fsdp": "sharding by FSDP is strategy=fsdp2",
        **dict.fromkeys(("calculate_per_token_loss", "average_in_collective"), _BY_ENGINE),
    },
    "override_mcore_model_config": dict.fromkeys(
        ("pre_process", "post_process", "vp_stage", "pg_collection", "share_embeddings_and_output_weights",
         "transformer_layer_spec", "config"),
        _BY_ENGINE,
    ),
    "override_optimizer_config": {
        **{name: f"set optim.{option}" for name, option in (
            ("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("adam_beta1", "betas"),
            ("adam_beta2", "betas"), ("adam_eps", "eps"),
        )},
        "clip_grad": "set grad_clip",
        "optimizer": "AdamW is the optimizer of every engine",
        "use_distributed_optimizer": "set megatron.use_distributed_optimizer",
        **dict.fromkeys(("bf16", "fp16", "params_dtype"), "set megatron.dtype"),
        **dict.fromkeys(("loss_scale", "initial_loss_scale"), "fp16 training is not built"),
    },
}  # fmt: skip
"""Free-form option -> its entries that other options decide, with what to do instead."""

_NEED_TRANSFORMER_ENGINE = {
    "override_optimizer_config": (
        "optimizer_cpu_offload", "use_precision_aware_optimizer", "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d", "use_torch_optimizer_for_cpu_offload",
    ),
    "override_transformer_config": (
        "fp8", "fp8_recipe", "fp8_param", "fp4", "moe_grouped_gemm", "apply_rope_fusion", "masked_softmax_fusion",
        "gradient_accumulation_fusion", "cpu_offloading", "moe_permute_fusion", "tp_comm_overlap", "use_te_rng_tracker",
    ),
}  # fmt: skip
"""Entries that ask for something of Transformer Engine's where they are true."""


def megatron_roles(config: PPOConfig) -> list[EngineRole]:
    """The roles that run on megatron-core."""
    return [role for role in engine_roles(config) if role.engine.has_megatron]


@validator("error")
def megatron_mesh_divides_world_size(config: PPOConfig) -> Iterator[Problem]:
    trainer = config.trainer
    for role in megatron_roles(config):
        mesh = role.section.megatron.mesh(config.world_size_of(role.section))
        workers = (
            f"the {mesh.world} workers (trainer.nnodes={trainer.nnodes} x "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node})"
        )
        way_out = f"Make tp x pp x cp, and etp x ep x pp, divide {mesh.world}, or take a multiple of {mesh.divisor}."
        if mesh.world % mesh.model:
            key = f"{role.place}.tensor_model_parallel_size"
            text = f"{workers} are no multiple of tp {mesh.tp} x pp {mesh.pp} x cp {mesh.cp} = {mesh.model}. {way_out}"
        elif mesh.world % mesh.experts:
            key = f"{role.place}.expert_model_parallel_size"
            text = (
                f"{workers} are no multiple of the experts' etp {mesh.etp} x ep {mesh.ep} x pp {mesh.pp} = "
                f"{mesh.experts}. {way_out}"
            )
        else:
            continue
        yield problem(config, key, f"does not fit: {text}", "trainer.n_gpus_per_node")


@validator("error")
def megatron_roles_share_one_mesh(config: PPOConfig) -> Iterator[Problem]:
    # megatron-core's groups belong to the process, in which all roles are by default
    roles = megatron_roles(config)
    for role in roles[1:]:
        own, first = role.section.megatron, roles[0].section.megatron
        for name, factor in _SIZES.items():
            if getattr(own.mesh(1), factor) != getattr(first.mesh(1), factor):
                text = (
                    f"and {roles[0].place}.{name}={show(first[name])}: the roles are in the same processes, whose "
                    f"groups of ranks are made once. Give {factor} the same value for both, or leave the former out, "
                    "which follows."
                )
                yield problem(config, f"{role.place}.{name}", text, f"{roles[0].place}.{name}")
                break


@validator("warning")
def megatron_runs_on_cuda(config: PPOConfig) -> Iterator[Problem]:
    roles = megatron_roles(config)
    if roles and config.trainer.device == "cpu":
        text = f"with {roles[0].key}.strategy=megatron: megatron-core runs on CUDA devices, and the run ends where its "
        text += "first model is built. Use fsdp2 or deepspeed on a CPU."
        yield problem(config, "trainer.device", text, f"{roles[0].key}.strategy")


@validator("error")
def virtual_pipeline_requires_pipeline(config: PPOConfig) -> Iterator[Problem]:
    for role in megatron_roles(config):
        sizes = role.section.megatron
        if (sizes.virtual_pipeline_model_parallel_size or 1) > 1 and sizes.pipeline_model_parallel_size == 1:
            text = (
                f"with {role.place}.pipeline_model_parallel_size=1: there is no pipeline whose ranks could hold "
                "several pieces. Set it to null, or the pipeline to 2 or more."
            )
            yield problem(config, f"{role.place}.virtual_pipeline_model_parallel_size", text)


@validator("error")
def context_parallel_requires_padded_rows(config: PPOConfig) -> Iterator[Problem]:
    for role in megatron_roles(config):
        switch = f"{MODEL}.use_remove_padding" if role.key.startswith("actor_rollout_ref") else (
            f"{role.key}.model.use_remove_padding"
        )  # fmt: skip
        if role.section.megatron.context_parallel_size > 1 and get_path(config, switch):
            text = (
                f"with {switch}=true: packed rows are not split over context-parallel ranks. Set it to false, or "
                "cp to 1 and a larger tp with sequence_parallel=true."
            )
            yield problem(config, f"{role.place}.context_parallel_size", text, switch)


@validator("error")
def ulysses_is_not_megatrons(config: PPOConfig) -> Iterator[Problem]:
    for role in megatron_roles(config):
        if role.section.ulysses_sequence_parallel_size > 1:
            text = (
                f"with {role.key}.strategy=megatron: set {role.place}.context_parallel_size, which shares sequences "
                "there, and leave this at 1."
            )
            yield problem(config, f"{role.key}.ulysses_sequence_parallel_size", text, f"{role.key}.strategy")


@validator("error")
def not_built_on_megatron(config: PPOConfig) -> Iterator[Problem]:
    """Options of training that other engines have."""
    shared = config.actor_rollout_ref
    actor, model, keys = shared.actor, shared.model, {role.key for role in megatron_roles(config)}
    rows: list[tuple[str, bool, str]] = []
    if ACTOR in keys:
        rows += [
            (f"{MODEL}.lora_rank", model.lora_rank > 0, "adapters are not built there. Set it to 0"),
            (f"{MODEL}.lora_adapter_path", bool(model.lora_adapter_path), "adapters are not built there. Leave it out"),
            (f"{MODEL}.use_prefix_sharing", model.use_prefix_sharing, "rows do not share prompts there. Set it to "
             "false"),
            (f"{MODEL}.use_liger", model.use_liger, "its modules are megatron-core's own. Set it to false"),
            (f"{MODEL}.compile_layers", model.compile_layers, "its modules are megatron-core's own. Set it to false"),
            (f"{MODEL}.enable_activation_offload", model.enable_activation_offload, (
                f"set {ACTOR}.megatron.override_transformer_config.recompute_granularity=full with "
                "recompute_method=uniform and recompute_num_layers=1, and this to false")),
            (f"{ACTOR}.freeze_vision_tower", actor.freeze_vision_tower, "models of text only. Set it to false"),
            (f"{ACTOR}.calculate_sum_pi_squared", actor.calculate_sum_pi_squared, (
                "log-probabilities and entropy alone are computed there. Choose another estimator")),
            (f"{ACTOR}.kl_loss_type", config.compares_distributions, (
                "whole distributions are not compared there. Use low_var_kl")),
        ]  # fmt: skip
    if "critic" in keys:
        critic = config.critic.model
        rows += [
            ("critic.model.lora_rank", critic.lora_rank > 0, "adapters are not built there. Set it to 0"),
            ("critic.model.use_prefix_sharing", critic.use_prefix_sharing, "rows do not share prompts there. Set it to "
             "false"),
            ("critic.model.enable_activation_offload", critic.enable_activation_offload, "set recompute_granularity in "
             "critic.megatron.override_transformer_config, and this to false"),
        ]  # fmt: skip
    for key, section in ((ACTOR, actor), ("critic", config.critic)):
        if key in keys:
            rows.append(
                (
                    f"{key}.checkpoint.async_save",
                    section.checkpoint.async_save,
                    ("its checkpoints are written by all ranks together, while training waits. Set it to false"),
                )
            )
            other = section.optim.optimizer != "AdamW"
            rows.append((f"{key}.optim.optimizer", other, "its optimizer is AdamW. Use that"))
    for key, is_on, text in rows:
        if is_on:
            role = "critic" if key.startswith("critic") else ACTOR
            yield problem(config, key, f"with {role}.strategy=megatron: {text}.", f"{role}.strategy")


@validator("error")
def megatron_overrides_conflict(config: PPOConfig) -> Iterator[Problem]:
    roles = megatron_roles(config)
    for role in roles:
        for key, entries in _free_forms(role):
            if role is not roles[0] and entries == dict(_free_forms(roles[0])).get(key.replace(role.key, roles[0].key)):
                continue  # followed, and reported once
            name = key.rpartition(".")[2]
            for entry, value in entries.items():
                if entry in DECIDED[name]:
                    yield Problem(key, f"{key}.{entry}={show(value)} is decided by verl: {DECIDED[name][entry]}.")
                elif needs_transformer_engine(name, entry, value):
                    text = "needs Transformer Engine (transformer-engine), which is not installed. Leave it out."
                    yield Problem(key, f"{key}.{entry}={show(value)} {text}")


def _free_forms(role: EngineRole) -> Iterator[tuple[str, dict]]:
    section = role.section.megatron
    for name in ("override_transformer_config", "override_ddp_config", "override_mcore_model_config"):
        yield f"{role.place}.{name}", section[name]
    if role.is_trained:
        yield f"{role.key}.optim.override_optimizer_config", role.section.optim.override_optimizer_config or {}


def needs_transformer_engine(option: str, entry: str, value: Any) -> bool:
    """Whether an entry of a free-form option, ``override_transformer_config`` for example, asks for something of
    Transformer Engine's, which is not installed."""
    return bool(value) and entry in _NEED_TRANSFORMER_ENGINE.get(option, ()) and find_spec("transformer_engine") is None


@validator("error")
def dist_checkpoint_has_a_folder(config: PPOConfig) -> Iterator[Problem]:
    for role in megatron_roles(config):
        if role.section.megatron.use_dist_checkpointing and not role.section.megatron.dist_checkpointing_path:
            text = (
                f"with {role.place}.use_dist_checkpointing=true: it is the folder of a distributed "
                "checkpoint of megatron-core. Name it, or set use_dist_checkpointing=false, which loads the "
                "model's own folder."
            )
            yield problem(config, f"{role.place}.dist_checkpointing_path", text)


@validator("warning")
def megatron_options_unused(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for role in engine_roles(config):
        name = "fsdp_config" if role.key.startswith("actor_rollout_ref") else "model.fsdp_config"
        why = f"{role.key}.strategy={role.section.strategy}"
        if not role.engine.has_megatron:
            yield from unused(config, given_below(f"{role.key}.megatron", config, is_given), is_given, why)
            if role.is_trained and role.section.optim.override_optimizer_config:
                yield from unused(config, [f"{role.key}.optim.override_optimizer_config"], is_given, why)
            continue
        yield from unused(config, given_below(f"{role.key}.{name}", config, is_given), is_given, why)
        if not role.is_trained:
            keys = [f"{role.place}.{name}" for name in ("grad_offload", "use_distributed_optimizer")]
            yield from unused(config, keys, is_given, f"{role.key} is not trained")
        if not role.section.megatron.use_dist_checkpointing:
            keys = [f"{role.place}.dist_checkpointing_{name}" for name in ("path", "prefix")]
            yield from unused(config, keys, is_given, f"{role.place}.use_dist_checkpointing=false")


@validator("warning")
def recomputation_is_megatrons(config: PPOConfig, is_given: IsGiven) -> Iterator[Problem]:
    for role in megatron_roles(config):
        if role.is_trained:
            key = f"{MODEL if role.key == ACTOR else 'critic.model'}.enable_gradient_checkpointing"
            why = f"{role.place}.override_transformer_config.recompute_granularity decides"
            yield from unused(config, [key], is_given, why)


# -- What a run asks for that the tests of this repository do not run ------------------------------------------------

_EXERCISED_MESHES: tuple[set[str], ...] = (
    set(), {"tp"}, {"pp"}, {"pp", "vpp"}, {"cp"}, {"dp"}, {"dp", "ep"}, {"tp", "ep"},
)  # fmt: skip
"""Factors above 1 with which ``tests/workers/engine/test_megatron.py`` follows the local engine, on two ranks."""
_EXERCISED_ENTRIES = {
    "recompute_granularity", "recompute_method", "recompute_num_layers", "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage", "overlap_grad_reduce",
}  # fmt: skip
"""Entries of the free-form options with which it does."""


def not_exercised(config: PPOConfig) -> list[str]:
    """Words for what a run on Megatron asks for and no test of ours runs; docs/megatron.md has the table."""
    roles = megatron_roles(config)
    if not roles:
        return []
    mesh, found = roles[0].section.megatron.mesh(config.trainer.world_size), []
    if config.trainer.device != "cpu":
        found.append("CUDA devices" if mesh.world == 1 else "several CUDA devices")
    if find_spec("transformer_engine") is not None:
        found.append("Transformer Engine")
    if mesh.world > 2:
        found.append("more than two ranks")
    factors = {name for name in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(mesh, name) > 1}
    if factors not in _EXERCISED_MESHES:
        found.append(f"{', '.join(name for name in ('tp', 'pp', 'vpp', 'cp', 'ep', 'dp') if name in factors)} together")
    if config.actor_rollout_ref.rollout.name != "hf":
        found.append(f"weights for {config.actor_rollout_ref.rollout.name}")
    for role in roles:
        for key, entries in _free_forms(role):
            used = [name for name, value in entries.items() if value not in (None, False)]
            if entries.get("recompute_granularity") != "selective":
                used = [name for name in used if name != "recompute_modules"]
            found += [f"{key.rpartition('.')[2]}.{name}" for name in used if name not in _EXERCISED_ENTRIES]
    return list(dict.fromkeys(found))
