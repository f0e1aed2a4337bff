"""The Megatron engine on two ranks does what the local one does: losses, gradient norms, weights, scores."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import cuda_shim
from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.models.loader import ModelSpec
from verl.workers.engine import MicroBatching, Want, build_engine

pytest.importorskip("megatron.core")
pytest.importorskip("mbridge")

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
    "llama": ("llama", {"rope_parameters": ROPE}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "qwen3_moe-raw": ("qwen3_moe", {**MOE, "norm_topk_prob": False, "num_hidden_layers": 2}),
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 32, "num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}),
}
"""Name -> family, and entries of its config.json."""


class Case(NamedTuple):
    """One model on one mesh."""

    section: Mapping[str, Any]
    model: str = "qwen2"
    head: str = "lm"
    packed: bool = False
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
    "dp2": Case({}, packed=True),
    "dp2, whole optimizer, overlap": Case({"use_distributed_optimizer": False, "override_ddp_config": {
        "overlap_grad_reduce": True}}),
    "tp2, offloaded": Case({**TP, "param_offload": True, "grad_offload": True, "optimizer_offload": True}),
    "cp2": Case({"context_parallel_size": 2}),
    "experts on both": Case({"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "qwen3_moe"),
    "experts split": Case(TP, "qwen3_moe", packed=True),
    "experts on both, the rest split": Case({**TP, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
                                            "qwen3_moe"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: make_folder(name, tmp_path_factory.mktemp(name)) for name in MODELS}


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
    if name.endswith("critic"):
        del weights["lm_head.weight"]
        weights |= {"score.weight": torch.randn(1, 64, generator=draw), "score.bias": torch.tensor([0.3])}
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
    return ModelSpec(folders[case.model], case.head, compute_dtype="fp32", remove_padding=case.packed)


def run_cases(cases, folders) -> dict[str, Any]:
    cuda_shim.install()
    from verl.models.megatron.parallel import end_groups
    from verl.workers.engine import megatron

    results: dict[str, Any] = {}
    for name, (family, _) in MODELS.items():
        head = "value" if name.endswith("critic") else "lm"
        engine = build_engine(
            "megatron", ModelSpec(folders[name], head, compute_dtype="fp32"), backend_config={"dtype": "float32", **TP}
        )
        want = Want.VALUES if head == "value" else Want.LOG_PROBS
        scores = engine.infer(make_batch(4, seed=2), want)
        results[f"model {name}"] = scores, {key: tensor.clone() for key, tensor in engine.weights()}
        assert family == engine.model_config.model_type
    end_groups()
    for name, case in cases.items():
        # memory of the host in place of a device's
        megatron.has_own_memory = lambda device: True
        engine = build_engine(
            "megatron", spec_of(case, folders), None, optim_section(**OPTIM), total_steps=10, grad_clip=1.0,
            backend_config={"dtype": "float32", **case.section},
        )  # fmt: skip
        results[name] = steps_of(engine, case.head, case.split)
        end_groups()
    return results


@pytest.fixture(scope="module")
def results(folders):
    only = os.environ.get("MEGATRON_CASES")
    cases = {name: case for name, case in CASES.items() if not only or name in only.split("|")}
    return run_ranks(2, run_cases, cases, folders, timeout_s=240)


def test_what_is_offloaded_is_freed_while_the_model_is_idle(results):
    for found in results:
        kept, freed = found["tp2"]["idle"], found["tp2, offloaded"]["idle"]
        assert set(kept) == set(freed) == {"weights", "optimizer", "gradients"}
        assert all(kept.values()) and not any(freed.values())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_scores_as_in_transformers_and_its_weights_come_back_bit_for_bit(name, folders, results):
    head = "value" if name.endswith("critic") else "lm"
    local = build_engine("local", ModelSpec(folders[name], head, compute_dtype="fp32"))
    expected = local.infer(make_batch(4, seed=2), Want.VALUES if head == "value" else Want.LOG_PROBS)
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
    for found in (result[name] for result in results):
        for own, theirs in zip(expected["steps"], found["steps"], strict=True):
            assert theirs == pytest.approx(own, rel=1e-5, abs=1e-5)
        for own, theirs in zip(expected["weights"], found["weights"], strict=True):
            assert own.keys() == theirs.keys()
            assert max((own[key] - theirs[key]).abs().max() for key in own) < 1e-5
        assert found["version"] == expected["version"]
    for when in ("before", "after"):
        for column in expected[when].keys():
            theirs = torch.cat([parts[rank][when].ragged(column).values for rank in sorted(parts)])
            torch.testing.assert_close(theirs, expected[when].ragged(column).values, rtol=1e-4, atol=1e-5)
