"""Megatron's options: one tree, a mesh that fits or an error with its factors, and what cannot be combined."""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.composing import load_over
from verl.config.base import leaves
from verl.config.checks.megatron import DECIDED, not_exercised
from verl.config.legacy import release_keys
from verl.config.load import load
from verl.config.megatron import FAMILIES, REFUSED_FAMILIES, MegatronConfig
from verl.config.model_info import ModelShape, model_problems
from verl.preflight.engines import rank_memory

from .helpers import RUNNABLE, notes, problems

A, C, M, R = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.model", "actor_rollout_ref.ref"
ON = (f"{A}.strategy=megatron", f"{C}.strategy=megatron")


def test_the_megatron_trainer_is_the_trainer_with_another_engine():
    plain, words = (load([*RUNNABLE, *more]).config for more in ((), ("model_engine=megatron",)))
    loaded = load(list(RUNNABLE), config_name="ppo_megatron_trainer")
    trainer = loaded.config
    assert trainer == words and not any("strategy" in key for key in loaded.given)
    differ = {key for (key, value), (_, other) in zip(leaves(plain), leaves(trainer), strict=True) if value != other}
    assert differ == {f"{role}.strategy" for role in (A, C, R, "reward_model", "distillation.teacher")}


def test_groups_of_verls_yaml_choose_the_engine_of_their_role():
    config = load([*RUNNABLE, f"actor@{A}=megatron_actor"]).config
    assert config.actor_rollout_ref.ref.strategy == "megatron" and config.critic.strategy == "fsdp"


def test_a_value_of_the_megatron_trainer_that_a_release_has_is_the_default():
    config = MegatronConfig()
    for key, row in release_keys().items():
        name = key.removeprefix(f"{A}.megatron.")
        if name != key and name in MegatronConfig.__dataclass_fields__ and row[-1] is not None:
            assert config[name] == row[-1].value, key


def test_the_mesh_multiplies_to_the_workers():
    config = MegatronConfig(
        tensor_model_parallel_size=4, pipeline_model_parallel_size=2, expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    mesh = config.mesh(32)
    assert (mesh.dp, mesh.expert_dp, mesh.fits, mesh.divisor) == (4, 2, True, 16)
    assert str(mesh) == "tp 4 x pp 2 x cp 1 x dp 4; experts: etp 1 x ep 8 x pp 2 x dp 2"
    assert not config.mesh(24).fits and config.mesh(24).world % mesh.model == 0
    assert MegatronConfig(tensor_model_parallel_size=2).mesh(2).etp == 2


def test_rows_and_sizes_of_all_ranks_are_split_over_the_data_parallel_ranks():
    words = [*ON, "trainer.n_gpus_per_node=4", f"{A}.megatron.tensor_model_parallel_size=2"]
    words += [f"{A}.ppo_micro_batch_size_per_gpu=null", f"{A}.ppo_micro_batch_size=4"]
    config = load_over(RUNNABLE, words).config
    assert config.dp_size(config.actor_rollout_ref.actor) == 2
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2


REFUSED = {
    "does not fit: the 2 workers .* no multiple of tp 2 x pp 2 x cp 1 = 4": [
        f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.megatron.pipeline_model_parallel_size=2"],
    "no multiple of the experts' etp 1 x ep 4 x pp 1 = 4": [f"{A}.megatron.expert_model_parallel_size=4"],
    "critic.megatron.tensor_model_parallel_size=2 and .*=1: the roles are in the same processes": [
        f"{C}.megatron.tensor_model_parallel_size=2"],
    "expert_tensor_parallel_size=2 and .*=null: the roles": [f"{C}.megatron.expert_tensor_parallel_size=2"],
    "virtual_pipeline_model_parallel_size=2 with .*there is no pipeline": [
        f"{A}.megatron.virtual_pipeline_model_parallel_size=2"],
    "context_parallel_size=2 with .*use_remove_padding=true: packed rows": [
        f"{A}.megatron.context_parallel_size=2", f"{M}.use_remove_padding=true"],
    "ulysses_sequence_parallel_size=2 with .*set .*context_parallel_size": [f"{A}.ulysses_sequence_parallel_size=2"],
    "lora_rank=8 with .*strategy=megatron: adapters are not built there": [f"{M}.lora_rank=8"],
    "use_prefix_sharing=true with .*=megatron": [f"{M}.use_prefix_sharing=true", f"{M}.use_remove_padding=true"],
    "enable_activation_offload=true with .*recompute_granularity=full": [f"{M}.enable_activation_offload=true"],
    "kl_loss_type=full with .*Use low_var_kl": [f"{A}.use_kl_loss=true", f"{A}.kl_loss_type=full"],
    "optimizer=AdamW8bit with .*Use that": [f"{A}.optim.optimizer=AdamW8bit"],
    "l2_coef=0.1 needs fsdp2 or local": [f"{A}.l2_coef=0.1"],
    "megatron.dtype=fp16 loses small gradients": [f"{A}.megatron.dtype=fp16"],
    "override_transformer_config.num_layers=3 is decided by verl": [
        f"+{A}.megatron.override_transformer_config.num_layers=3"],
    "override_optimizer_config.lr=1.0 is decided by verl: set optim.lr": [
        f"{A}.optim.override_optimizer_config={{lr:1.0}}"],
    "optimizer_cpu_offload=true needs Transformer Engine": [
        f"{A}.optim.override_optimizer_config={{optimizer_cpu_offload:true}}"],
    "dist_checkpointing_path=null with .*distributed checkpoint": [f"{A}.megatron.use_dist_checkpointing=true"],
    "min_lr=0.1 is more than": [f"{A}.optim.min_lr=0.1", f"{A}.optim.lr_decay_style=cosine"],
    "Megatron's sharding of weights by FSDP: that is not built": [f"+{A}.megatron.use_megatron_fsdp=true"],
    "MindSpeed.* is not built": [f"{A}.strategy=mindspeed"],
    "quantization-aware training": [f"+{A}.megatron.qat.enable=true"],
    "replay of expert routing": [f"+{A}.megatron.router_replay.mode=R2"],
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_cannot_be_combined_is_refused_by_name(sentence):
    assert re.search(sentence, problems(*ON, *REFUSED[sentence]))


def test_what_megatron_overrides_decide_is_an_option_or_the_engines():
    fields = set(MegatronConfig.__dataclass_fields__)
    for entries in DECIDED.values():
        for entry, instead in entries.items():
            if instead.startswith("set megatron."):
                assert instead.removeprefix("set megatron.") in fields, entry


def test_settings_of_the_engine_that_does_not_run_are_said_to_have_no_effect():
    said = notes(f"{A}.megatron.tensor_model_parallel_size=2", f"{A}.optim.override_optimizer_config={{a:1}}")
    assert f"{A}.megatron.tensor_model_parallel_size=2 has no effect: {A}.strategy=fsdp" in said
    assert "override_optimizer_config={'a': 1} has no effect" in said


def test_a_cpu_is_warned_of_before_workers_start():
    said = "trainer.device=cpu with actor_rollout_ref.actor.strategy=megatron: megatron-core runs on CUDA devices"
    assert said in notes(*ON, "trainer.device=cpu") and said not in notes(*ON, "trainer.device=cuda")


def test_other_roles_follow_the_actors_free_entries_where_they_have_none_of_their_own():
    entry = "megatron.override_transformer_config"
    words = [f"+{A}.{entry}.num_layers_in_first_pipeline_stage=3", f"{A}.{entry}.recompute_granularity=full"]
    config = load_over(RUNNABLE, [*ON, *words, f"{C}.{entry}.recompute_granularity=selective"]).config
    actor, critic, ref = (
        section.megatron.transformer_overrides
        for section in (config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref)
    )
    assert actor == ref == {"num_layers_in_first_pipeline_stage": 3, "recompute_granularity": "full"}
    assert critic == {**actor, "recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


BEYOND = {
    "fp32 on two ranks of a CPU": ([f"{A}.megatron.tensor_model_parallel_size=2"], []),
    "defaults on a GPU": (["trainer.device=cuda", "trainer.n_gpus_per_node=1", f"{A}.megatron.dtype=bf16"],
                          ["CUDA devices"]),
    "three factors": (
        ["trainer.n_gpus_per_node=8", f"{A}.megatron.tensor_model_parallel_size=2",
         f"{A}.megatron.pipeline_model_parallel_size=2"],
        ["more than two ranks", "tp, pp, dp together"],
    ),
    "recomputation": ([f"{A}.megatron.override_transformer_config.recompute_granularity=full"], []),
    "an entry": ([f"+{A}.megatron.override_transformer_config.moe_router_dtype=fp32"],
                 ["override_transformer_config.moe_router_dtype"]),
    "another sampler": (["trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm"],
                        ["several CUDA devices", "weights for vllm"]),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_no_test_of_ours_runs_is_named(name):
    words, expected = BEYOND[name]
    on_two = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{A}.megatron.dtype=float32"]
    config = load_over(RUNNABLE, [*ON, *on_two, "critic.enable=false", *words]).config
    assert [word for word in not_exercised(config) if word != "Transformer Engine"] == expected
    assert not not_exercised(config.with_values({f"{role}.strategy": "fsdp2" for role in (A, C, R)}))


# ------------------------------------------------------------------------------------------------- the model

QWEN = {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 16,
        "num_key_value_heads": 4, "vocab_size": 160, "num_experts": 8, "moe_intermediate_size": 32,
        "intermediate_size": 96, "max_position_embeddings": 4096}  # fmt: skip

UNFIT = {
    "tensor_model_parallel_size=3 does not divide the 8 attention heads": (3, {}, {}),
    "tensor_model_parallel_size=8 does not divide the 4 key-value heads": (8, {}, {}),
    "pipeline_model_parallel_size=4 does not divide the 6 layers.*num_layers_in_first": (
        1, {}, {"pipeline_model_parallel_size": 4}),
    "pipeline_model_parallel_size=2 x virtual_pipeline_model_parallel_size=2 does not divide the 6 layers": (
        1, {}, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "expert_model_parallel_size=3 does not divide the 8 experts": (1, {}, {"expert_model_parallel_size": 3}),
    "expert_model_parallel_size=2 spreads experts, and the model .* has none": (
        1, {"model_type": "qwen3", "num_experts": 0}, {"expert_model_parallel_size": 2}),
    "sequence_parallel=false with tp 2 and the experts": (2, {}, {"sequence_parallel": False}),
    "expert_tensor_parallel_size=1 with tp 2, ep 1": (2, {}, {"expert_tensor_parallel_size": 1}),
    "dist_checkpointing_path=/nowhere holds no distributed checkpoint .*converter_hf_to_mcore": (
        1, {}, {"use_dist_checkpointing": True, "dist_checkpointing_path": "/nowhere"}),
    "a model of type gpt2 is not mapped to it. Admitted are llama, qwen2": (1, {"model_type": "gpt2"}, {}),
    "a model of type deepseek_v3 is in mbridge, but": (1, {"model_type": "deepseek_v3"}, {}),
}  # fmt: skip


@pytest.mark.parametrize("sentence", UNFIT)
def test_a_model_that_the_mesh_does_not_divide_is_refused_unopened(sentence, tmp_path):
    tp, changes, options = UNFIT[sentence]
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, **changes}))
    options = {"tensor_model_parallel_size": tp, **options}
    config = load_over(RUNNABLE, [f"{A}.strategy=megatron"]).config.with_values(
        {f"{M}.path": str(tmp_path), "critic.enable": False, f"{A}.megatron": MegatronConfig(**options)}
    )
    assert re.search(sentence, "\n".join(problem.text for problem in model_problems(config)))


def test_an_uneven_pipeline_may_be_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    split = MegatronConfig(
        pipeline_model_parallel_size=4,
        override_transformer_config={
            "num_layers_in_first_pipeline_stage": 2,
            "num_layers_in_last_pipeline_stage": 2,
        },
    )
    config = load_over(RUNNABLE, [f"{A}.strategy=megatron"]).config
    config = config.with_values({f"{M}.path": str(tmp_path), "critic.enable": False, f"{A}.megatron": split})
    assert not model_problems(config)


def test_every_family_of_mbridge_is_admitted_or_refused_by_name():
    pytest.importorskip("mbridge")
    sources = Path(find_spec("mbridge").origin).parent.glob("models/**/*.py")
    known = {name for source in sources for name in re.findall(r'@register_model\("(\w+)"\)', source.read_text())}
    assert len(known) >= 14 and known == set(FAMILIES) | set(REFUSED_FAMILIES)
    assert not set(FAMILIES) & set(REFUSED_FAMILIES)


# ------------------------------------------------------------------------------------------------- memory


def test_memory_of_a_rank_is_its_share_of_layers_experts_and_state(tmp_path):
    # 2 layers of 1,000 dense and 4 experts of 3 x 10 x 5 numbers, two embeddings of 100 x 10
    shape = ModelShape(tmp_path, "qwen3_moe", 2, 10, 5, 2, 2, 5, 100, None, False, 4, 2, 5200, True, "", False)
    whole = rank_memory(MegatronConfig(use_distributed_optimizer=False), shape, True, 1)
    assert whole == (5200 * 2, 5200 * 4, 5200 * 12)
    spread = MegatronConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )  # fmt: skip
    dense, experts = (2000 // 2 + 1000) // 2, 1200 // 4
    assert rank_memory(spread, shape, True, 8) == (
        (dense + experts) * 2, (dense + experts) * 4, 12 * (dense // 2 + experts // 2),
    )  # fmt: skip
    assert rank_memory(spread, shape, False, 8) == ((dense + experts) * 2, 0, 0)
