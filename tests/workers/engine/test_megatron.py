"""The Megatron engine on two ranks does what the local one does: losses, gradient norms, weights, scores."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

pytestmark = pytest.mark.skipif(find_spec("mbridge") is None, reason="needs megatron-core and mbridge")

TP, PP = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OPTIM = {"eps": 1e-4, "lr": 1e-3}
"""Adam divides by the size of a gradient: with 1e-8 rounding alone would move weights by a third of a step."""


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-critic": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-reward": ("qwen3", {"num_hidden_layers": 2}),
    "llama": ("llama", {"rope_parameters": ROPE}),
    "qwen3_moe": ("qwen3_moe", {**MOE, "num_hidden_layers": 2}),
    "qwen3_moe-raw": ("qwen3_moe", {**MOE, "norm_topk_prob": False, "num_hidden_layers": 2}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 32, "num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}),
}
"""Name -> family, and entries of its config.json."""
HEADS = {"qwen2-critic": "value", "qwen3-reward": "reward"}


class Case(NamedTuple):
    """One model on one mesh."""

    section: Mapping[str, Any]
    model: str = "qwen2"
    head: str = "lm"
    packed: bool = False
    dtype: str = "fp32"
    split: MicroBatching = MicroBatching(size=2)


CASES = {
    "tp2": Case({**TP, "sequence_parallel": False}),
    "tp2, sequence parallel, packed": Case(TP, "qwen3", packed=True),
    "tp2, critic": Case(TP, "qwen2-critic", "value"),
    "pp2": Case(PP, "llama"),
    "pp2, tied, packed": Case(PP, "qwen2-tied", packed=True, split=MicroBatching(max_tokens=60)),
    "pp2, critic": Case(PP, "qwen2-critic", "value", packed=True),
    "pp2, two pieces a stage": Case({**PP, "virtual_pipeline_model_parallel_size": 2}),
    "pp2, uneven, recomputed": Case({**PP, "override_transformer_config": {
        **FULL, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}}, "qwen3"),
    "dp2, overlap": Case({"override_ddp_config": {"overlap_grad_reduce": True, "overlap_param_gather": True}},
                         packed=True),
    "dp2, whole optimizer, overlap": Case({"use_distributed_optimizer": False, "override_ddp_config": {
        "overlap_grad_reduce": True}}),
    "tp2, offloaded": Case({**TP, "param_offload": True, "grad_offload": True, "optimizer_offload": True}),
    "tp2, bf16": Case(TP, packed=True, dtype="bf16"),
    "pp2, bf16, whole optimizer": Case({**PP, "use_distributed_optimizer": False}, "qwen3", dtype="bf16"),
    "cp2": Case({"context_parallel_size": 2}),
    "experts on both": Case({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "qwen3_moe"),
    "experts split": Case(TP, "qwen3_moe", packed=True),
    "experts on both, the rest split": Case({**TP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
                                            "qwen3_moe"),
}  # fmt: skip

REFUSED = {
    "another mesh": (TP, {}, "this process has groups of tp 1 .*Give the roles of one process the same sizes"),
    "entry": ({"override_transformer_config": {"foo": 1}}, {}, "override_transformer_config.foo is no entry"),
    "auxiliary loss": (
        {"override_transformer_config": {"moe_router_load_balancing_type": "aux_loss"}}, {}, "no auxiliary loss",
    ),
    "argument": ({"override_mcore_model_config": {"foo": 1}}, {}, "override_mcore_model_config.foo is no argument"),
    "gradients": ({"override_ddp_config": {"foo": 1}}, {}, "override_ddp_config.foo is no entry"),
    "family": ({}, {"override_config": {"model_type": "gemma2"}}, "of type gemma2 is not mapped .*Use strategy=fsdp2"),
    "rope": (
        {}, {"override_config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                                     "original_max_position_embeddings": 16}}}, "rope_type=yarn",
    ),
}  # fmt: skip
"""Section, changes of the model, and what the error says, after a model with two data-parallel ranks."""


def make_folder(name, folder):
    """A model whose norms and biases are neither one nor zero, with a vocabulary that two ranks cannot halve."""
    family, changes = MODELS[name]
    make_tiny_model(
        folder, family, num_key_value_heads=2, initializer_range=0.1, vocab_size=101,
        **{"num_hidden_layers": 4, "tie_word_embeddings": False, **changes},
    )  # fmt: skip
    weights, draw = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=draw)
    if name in HEADS:
        del weights["lm_head.weight"]
        weights["score.weight"] = torch.randn(1, 64, generator=draw)
    if name == "qwen2-critic":
        weights["score.bias"] = torch.tensor([0.3])
    if name == "qwen3-reward":
        config = json.loads((folder / "config.json").read_text())
        changes = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
        (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def steps_of(engine, head, split) -> dict[str, Any]:
    """Metrics and weights of three steps on this rank's rows, and scores before and after."""
    data, loss = make_batch(7, seed=5), value_loss() if head == "value" else ppo_loss()
    size, rank = engine.topology.dp_size, engine.topology.dp_rank
    data = data if size == 1 else data[[slice(0, 2), slice(2, 7)][rank]]
    want = Want.VALUES if head == "value" else Want.LOG_PROBS | Want.ENTROPY
    found: dict[str, Any] = {"rank": rank, "steps": [], "weights": []}
    with engine.on_device():
        found["before"] = engine.infer(data, want, split, 0.7)
    for _ in range(3):
        with engine.on_device(optimizer=True):
            found["steps"].append(engine.train_step(data, loss, split))
            engine.step_schedule()
        found["weights"].append({name: tensor.clone() for name, tensor in engine.weights()})
    with engine.on_device():
        found["after"] = engine.infer(data, want, split)
    kinds = engine.tensors_in_memory().items()
    found["idle"] = {kind: sum(tensor.untyped_storage().nbytes() for tensor in tensors) for kind, tensors in kinds}
    return found | {"version": engine.version, "is_output": engine.topology.is_output_rank}


def spec_of(case: Case, folders) -> ModelSpec:
    return ModelSpec(folders[case.model], case.head, compute_dtype=case.dtype, remove_padding=case.packed)


def run_cases(folders) -> dict[str, Any]:
    """What one of two ranks finds."""
    from verl.models.megatron.parallel import end_groups
    from verl.workers.engine import megatron

    results: dict[str, Any] = {}
    for name, (family, _) in MODELS.items():
        head = HEADS.get(name, "lm")
        engine = build_engine(
            "megatron", ModelSpec(folders[name], head, compute_dtype="fp32"), backend_config={"dtype": "float32", **TP}
        )
        want = Want.LOG_PROBS if head == "lm" else Want.VALUES
        scores = engine.infer(make_batch(4, seed=2), want)
        results[f"model {name}"] = scores, {key: tensor.clone() for key, tensor in engine.weights()}
        assert family == engine.model_config.model_type
    end_groups()
    for name, case in CASES.items():
        # memory of the host in place of a device's
        megatron.has_own_memory = lambda device: True
        results[name] = steps_of(build(case, folders), case.head, case.split)
        end_groups()
    engine = build(Case({}), folders)
    before, data = dict(engine.weights()), make_batch(4, seed=3)
    if engine.topology.rank == 1:
        advantages = data.ragged("advantages")
        data.put("advantages", advantages.like(torch.full_like(advantages.values, float("nan"))))
    before = {key: tensor.clone() for key, tensor in before.items()}
    metrics = engine.train_step(data, ppo_loss())
    unchanged = all(torch.equal(tensor, before[key]) for key, tensor in engine.weights())
    results["bad gradient"], results["refused"] = (metrics, engine.version, unchanged), {}
    for name, (section, changes, _) in REFUSED.items():
        try:
            spec = replace(spec_of(Case({}), folders), **changes)
            build_engine("megatron", spec, None, optim_section(**OPTIM), backend_config={"dtype": "float32", **section})
        except ValueError as error:
            results["refused"][name] = str(error)
    return results


def build(case, folders):
    return build_engine(
        "megatron", spec_of(case, folders), None, optim_section(**OPTIM), total_steps=10, grad_clip=1.0,
        backend_config={"dtype": case.dtype, **case.section},
    )  # fmt: skip


@pytest.fixture
def folders(megatron_ranks):
    return megatron_ranks[0]


@pytest.fixture
def results(megatron_ranks):
    return [result["engine"] for result in megatron_ranks[1]]


def test_what_is_offloaded_is_freed_while_the_model_is_idle(results):
    for found in results:
        kept, freed = found["tp2"]["idle"], found["tp2, offloaded"]["idle"]
        assert set(kept) == set(freed) == {"weights", "optimizer", "gradients"}
        assert all(kept.values()) and not any(freed.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_scores_as_in_transformers_and_its_weights_come_back_bit_for_bit(name, folders, results):
    head = HEADS.get(name, "lm")
    local = build_engine("local", ModelSpec(folders[name], head, compute_dtype="fp32"))
    expected = local.infer(make_batch(4, seed=2), Want.LOG_PROBS if head == "lm" else Want.VALUES)
    stored = load_file(f"{folders[name]}/model.safetensors")
    for found in results:
        scores, weights = found[f"model {name}"]
        for column in expected.keys():
            torch.testing.assert_close(scores.ragged(column).values, expected.ragged(column).values)
        assert weights.keys() == stored.keys()
        assert all(torch.equal(weights[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_follow_the_local_engine(name, folders, results):
    case = CASES[name]
    local = build_engine("local", spec_of(case, folders), None, optim_section(**OPTIM), total_steps=10, grad_clip=1.0)
    expected = steps_of(local, case.head, MicroBatching())
    parts = {found[name]["rank"]: found[name] for found in results if found[name]["is_output"]}
    assert sorted(parts) == list(range(len(parts)))
    # of bf16 three digits are left, and how sums are rounded differs
    step, weight, score = (1e-5, 1e-5, 3e-5) if case.dtype == "fp32" else (0.03, 1e-2, 0.04)
    for found in (result[name] for result in results):
        for own, theirs in zip(expected["steps"], found["steps"], strict=True):
            assert theirs == pytest.approx(own, rel=step, abs=step)
        for own, theirs in zip(expected["weights"], found["weights"], strict=True):
            assert own.keys() == theirs.keys()
            assert max((own[key] - theirs[key]).abs().max() for key in own) < weight
        assert found["version"] == expected["version"]
    for when in ("before", "after"):
        for column in expected[when].keys():
            theirs = torch.cat([parts[rank][when].ragged(column).values for rank in sorted(parts)])
            difference = (theirs - expected[when].ragged(column).values).abs()
            assert (difference.max() if case.dtype == "fp32" else difference.mean()) < score


def test_a_bad_gradient_on_one_rank_changes_nothing_on_any(results):
    for found in results:
        metrics, version, unchanged = found["bad gradient"]
        assert metrics["nonfinite_steps"] == 1.0 and version == 0 and unchanged


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name, results):
    assert re.search(REFUSED[name][2], results[0]["refused"][name]), results[0]["refused"][name]
