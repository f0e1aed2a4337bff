"""Checkpoints of the Megatron engine: the step after a resume, on the same mesh and on others, is that of the run that
was not stopped."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch
from tests.workers.engine.test_megatron import OPTIM, PP, TP
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.model_merger.__main__ import main
from verl.models.loader import ModelSpec
from verl.utils.import_utils import load_extern_type
from verl.workers.engine import build_engine

pytestmark = pytest.mark.skipif(find_spec("mbridge") is None, reason="needs megatron-core and mbridge")

MODELS_HERE = ("qwen2-tied", "qwen3_moe", "qwen2-critic")
CONVERTER = Path(__file__).parents[3] / "scripts" / "converter_hf_to_mcore.py"
EP = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
VPP = {**PP, "virtual_pipeline_model_parallel_size": 2}
WHOLE = {"use_distributed_optimizer": False}
RESUMED = {
    "tp2 as tp2": ("qwen2-tied", TP, TP),
    "tp2 as pp2, two pieces a stage": ("qwen2-tied", TP, VPP),
    "tp2 as dp2, offloaded": ("qwen2-tied", TP, {"param_offload": True, "optimizer_offload": True}),
    "pp2 as tp2": ("qwen2-tied", PP, TP),
    "experts on both, as split": ("qwen3_moe", EP, TP),
    "experts split, as on both": ("qwen3_moe", TP, EP),
    "whole optimizer, tp2 as pp2": ("qwen2-tied", {**TP, **WHOLE}, {**PP, **WHOLE}),
}
"""Model, mesh that saves, mesh that resumes."""


def step_and_weights(engine, seed) -> tuple[dict, dict]:
    data = make_batch(4, seed=seed)
    size, rank = engine.topology.dp_size, engine.topology.dp_rank
    with engine.on_device(optimizer=True):
        metrics = engine.train_step(data[slice(rank * 4 // size, (rank + 1) * 4 // size)], ppo_loss())
    engine.step_schedule()
    return metrics, {name: tensor.clone() for name, tensor in engine.weights()}


def save_and_resume(folders, root) -> dict[str, Any]:
    """What one of two ranks finds."""
    from verl.models.megatron.parallel import end_groups

    def build(model, section, head="lm"):
        end_groups()
        options = optim_section(**OPTIM, warmup_style="linear")
        return build_engine(
            "megatron", ModelSpec(folders[model], head, compute_dtype="fp32"), None, options, total_steps=10,
            grad_clip=1.0, backend_config={"dtype": "float32", **section},
        )  # fmt: skip

    results: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    for name, (model, mesh, other) in RESUMED.items():
        key = f"{model} {sorted(mesh.items())}"
        if key not in saved:
            engine, folder = build(model, mesh), Path(root) / str(len(saved))
            for seed in (1, 2):
                step_and_weights(engine, seed)
            CheckpointManager(engine, save_contents=["model", "optimizer", "extra", "hf_model"]).save(folder, 2)
            saved[key] = folder, {n: t.clone() for n, t in engine.weights()}, step_and_weights(engine, 3)
        folder, weights, following = saved[key]
        engine = build(model, other)
        remark = CheckpointManager(engine).load(folder)
        back = {n: t.clone() for n, t in engine.weights()}
        results[name] = folder, remark, weights, back, following, step_and_weights(engine, 3), engine.version
    engine = build("qwen2-tied", TP)
    folder, _, weights, *_ = results["tp2 as tp2"]
    CheckpointManager(engine, load_contents=["hf_model"]).load(folder)
    results["exported"] = weights, {n: t.clone() for n, t in engine.weights()}
    section = {**PP, "use_dist_checkpointing": True, "dist_checkpointing_path": str(folder / "dist_ckpt")}
    results["first weights"] = weights, {n: t.clone() for n, t in build("qwen2-tied", section).weights()}
    critic = {n: t.clone() for n, t in build("qwen2-tied", section, "value").weights()}
    head = {n: critic.pop(n) for n in ("score.weight", "score.bias")}
    assert head["score.weight"].abs().max() > 0 and not head["score.bias"].any()
    results["first weights of a critic"] = {n: weights[n] for n in critic}, critic
    end_groups()
    folder, main = Path(root) / "converted", load_extern_type(str(CONVERTER), "main")
    words = [f"--hf_model_path={folders['qwen3_moe']}", f"--output_path={folder}", "--ep_size=2", "--test"]
    assert main(words) == 0
    with pytest.raises(ValueError, match="holds files: name a folder that is empty"):
        main(words)
    section = {**TP, "use_dist_checkpointing": True, "dist_checkpointing_path": str(folder)}
    stored = load_file(f"{folders['qwen3_moe']}/model.safetensors")
    results["converted"] = stored, {n: t.clone() for n, t in build("qwen3_moe", section).weights()}
    engine, folder = build("qwen2-critic", PP, head="value"), Path(root) / "critic"
    CheckpointManager(engine, save_contents=["model"]).save(folder, 2)
    results["saved"] = {f: w for f, w, *_ in saved.values()} | {folder: {n: t.clone() for n, t in engine.weights()}}
    return results


@pytest.fixture
def results(megatron_ranks):
    return [result["checkpoint"] for result in megatron_ranks[1]]


@pytest.mark.parametrize("name", RESUMED)
def test_the_step_after_a_resume_is_that_of_the_run_that_went_on(name, results):
    for found in results:
        folder, remark, weights, back, (metrics, following), (own_metrics, own), version = found[name]
        assert not [key for key in weights if not torch.equal(back[key], weights[key])]
        # Adam's step counts in it, which weights alone do not tell
        assert own_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        assert max((own[key] - following[key]).abs().max() for key in own) < 1e-6
        assert version == 3
        assert bool(remark) == (RESUMED[name][1] != RESUMED[name][2])
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"dist_ckpt/metadata.json", "dist_ckpt/common.pt", "huggingface/model.safetensors"} <= files.keys()
    assert json.loads((folder / "huggingface/config.json").read_text())["architectures"][0].endswith("ForCausalLM")


@pytest.mark.parametrize("source", ["exported", "first weights", "first weights of a critic", "converted"])
def test_weights_come_from_an_exported_folder_or_a_distributed_checkpoint(source, results):
    for weights, back in (found[source] for found in results):
        assert all(torch.equal(back[key], weights[key]) for key in weights)


def merge_all(folders, root) -> list[dict[str, torch.Tensor]]:
    """As the command does it: in one process, without CUDA or anything that answers in its place."""
    merged = []
    for number, folder in enumerate(folders):
        target = f"{root}/{number}"
        place = ["--backend=megatron", f"--local_dir={folder}"]
        assert main(["merge", *place, f"--target_dir={target}"]) == 0
        assert main(["test", *place, f"--test_hf_dir={target}"]) == 0
        merged.append(load_file(f"{target}/model.safetensors"))
    with pytest.raises(ValueError, match="is of another model|differ from this model"):
        main(["merge", *place, f"--hf_model_path={folders[0]}/huggingface", f"--target_dir={root}/other"])
    return merged


def test_a_merged_folder_holds_the_weights_of_the_model_that_was_saved(results, tmp_path):
    saved = results[0]["saved"]
    (merged,) = run_ranks(1, merge_all, list(saved), str(tmp_path))
    for weights, found in zip(saved.values(), merged, strict=True):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
