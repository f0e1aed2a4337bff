import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model, make_tokenizer
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.checkpoint.hf_folder import write_safetensors
from verl.models.loader import ModelSpec
from verl.workers.engine import build_engine

ALL = ["model", "optimizer", "extra", "hf_model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_for(folder, strategy="local", head="lm"):
    optim = optim_section(warmup_style="cosine", lr_warmup_steps=1)
    spec = ModelSpec(folder, head, compute_dtype="bf16")
    return build_engine(strategy, spec, None, optim, total_steps=10, grad_clip=1.0)


def train(engine, steps):
    data = make_batch(4, seed=engine.topology.rank)
    metrics = []
    for _ in range(steps):
        metrics.append(engine.train_step(data, ppo_loss()))
        engine.step_schedule()
    return metrics


def test_training_goes_on_as_if_it_had_not_stopped(folder, tmp_path):
    engine = engine_for(folder)
    train(engine, 2)
    CheckpointManager(engine).save(tmp_path / "global_step_2" / "actor", 2)
    expected = torch.rand(2)
    fresh = engine_for(folder)
    CheckpointManager(fresh).load(tmp_path / "global_step_2" / "actor")
    assert torch.equal(torch.rand(2), expected)
    assert train(fresh, 2) == train(engine, 2)


def test_the_files_are_those_tools_look_for(folder, tmp_path):
    CheckpointManager(engine_for(folder), make_tokenizer()).save(tmp_path / "actor")
    names = {path.name for path in (tmp_path / "actor").iterdir()}
    assert names == {
        "model_world_size_1_rank_0.pt",
        "optim_world_size_1_rank_0.pt",
        "extra_state_world_size_1_rank_0.pt",
        "fsdp_config.json",
        "huggingface",
        "manifest.json",
    }
    assert json.loads((tmp_path / "actor" / "fsdp_config.json").read_text()) == {
        "FSDP_version": 2,
        "world_size": 1,
        "layout": "whole",
    }
    inside = {path.name for path in (tmp_path / "actor" / "huggingface").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= inside
    assert not any(name.endswith(".safetensors") for name in inside)
    extra = torch.load(tmp_path / "actor" / "extra_state_world_size_1_rank_0.pt", weights_only=True)
    assert {"lr_scheduler", "rng"} <= extra.keys() and {"cpu", "numpy", "random"} <= extra["rng"].keys()


def test_the_hugging_face_copy_opens_with_transformers(folder, tmp_path):
    engine = engine_for(folder)
    train(engine, 1)
    CheckpointManager(engine, make_tokenizer(), ALL).save(tmp_path / "actor")
    copy = tmp_path / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(copy)
    assert model.dtype is torch.float32 and model.config.architectures == ["Qwen2ForCausalLM"]
    for name, tensor in engine.weights():
        assert torch.equal(model.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained(copy).decode([30, 31]) == make_tokenizer().decode([30, 31])


def test_a_critic_is_saved_as_a_token_classifier(folder, tmp_path):
    engine = engine_for(folder, head="value")
    CheckpointManager(engine, None, ["hf_model"]).save(tmp_path / "critic")
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic" / "huggingface")
    assert torch.equal(model.score.weight, dict(engine.weights())["score.weight"])
    assert model.config.num_labels == 1


def _save_and_continue(folder, path):
    engine = engine_for(folder, "fsdp2")
    train(engine, 1)
    CheckpointManager(engine, make_tokenizer(), ALL).save(path)
    expected = train(engine, 2)
    fresh = engine_for(folder, "fsdp2")
    CheckpointManager(fresh).load(path, del_after=True)
    return expected, train(fresh, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharded_training_goes_on_as_if_it_had_not_stopped(folder, tmp_path, ranks):
    for expected, found in run_ranks(ranks, _save_and_continue, folder, tmp_path / "actor"):
        assert found == expected
    assert not (tmp_path / "actor").exists()


def _only_save(folder, path, contents):
    engine = engine_for(folder, "fsdp2")
    CheckpointManager(engine, None, contents).save(path)
    return {name: tensor.clone() for name, tensor in engine.weights()}


def test_two_ranks_write_one_hugging_face_copy(folder, tmp_path):
    [weights, _] = run_ranks(2, _only_save, folder, tmp_path / "actor", ["hf_model"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor" / "huggingface")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())


def _weights_of_the_copy(folder, path, parts):
    engine = engine_for(folder, "fsdp2")
    before = engine.version
    CheckpointManager(engine, load_contents=parts).load(path)
    return {name: tensor.clone() for name, tensor in engine.weights()}, engine.version > before


def test_the_hugging_face_copy_alone_brings_the_weights_back(folder, tmp_path):
    engine = engine_for(folder)
    train(engine, 2)
    CheckpointManager(engine, None, ["hf_model", "extra"]).save(tmp_path / "actor")
    expected = dict(engine.weights())
    for weights, is_newer in run_ranks(2, _weights_of_the_copy, folder, tmp_path / "actor", ["hf_model", "extra"]):
        assert all(torch.equal(weights[name], expected[name]) for name in expected) and is_newer
    with pytest.raises(FileNotFoundError, match="saved without 'model'"):
        CheckpointManager(engine, load_contents=["model", "hf_model"]).load(tmp_path / "actor")
    CheckpointManager(engine, None, ["model"]).save(tmp_path / "actor")
    with pytest.raises(FileNotFoundError, match="saved without 'hf_model'"):
        CheckpointManager(engine, load_contents=["hf_model"]).load(tmp_path / "actor")


def test_parts_that_were_not_saved_are_named(folder, tmp_path):
    CheckpointManager(engine_for(folder), save_contents=["model"]).save(tmp_path / "actor")
    fresh = engine_for(folder)
    CheckpointManager(fresh, load_contents=["model"]).load(tmp_path / "actor")
    with pytest.raises(FileNotFoundError, match="saved without 'optimizer'"):
        CheckpointManager(fresh, load_contents=["model", "optimizer"]).load(tmp_path / "actor")
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        CheckpointManager(fresh).load(tmp_path / "nothing")


def test_a_cut_off_file_is_said_to_be_damaged(folder, tmp_path):
    CheckpointManager(engine_for(folder)).save(tmp_path / "actor")
    path = tmp_path / "actor" / "model_world_size_1_rank_0.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="rank_0.pt has [0-9,]+ bytes and was written with .*No older checkpoint"):
        CheckpointManager(engine_for(folder)).load(tmp_path / "actor")
    (tmp_path / "actor" / "manifest.json").unlink()  # as another program leaves it
    for left in (path.read_bytes(), b""):
        path.write_bytes(left)
        with pytest.raises(ValueError, match="cannot be read: it is damaged.*No older checkpoint"):
            CheckpointManager(engine_for(folder)).load(tmp_path / "actor")


def test_only_the_newest_are_kept(folder, tmp_path):
    manager = CheckpointManager(engine_for(folder), save_contents=["extra"])
    for step in (1, 2, 3):
        manager.save(tmp_path / f"global_step_{step}" / "actor", step, max_to_keep=2)
    assert [step for step in (1, 2, 3) if (tmp_path / f"global_step_{step}" / "actor").exists()] == [2, 3]


def test_a_save_that_fails_leaves_no_folder_under_its_name(folder, tmp_path, monkeypatch):
    engine = engine_for(folder)
    manager = CheckpointManager(engine, save_contents=["model", "extra"])
    manager.save(tmp_path / "actor")
    before = (tmp_path / "actor" / "extra_state_world_size_1_rank_0.pt").read_bytes()
    monkeypatch.setattr(engine, "state", lambda parts: {"model": {}, "extra": lambda: None})
    with pytest.raises(Exception, match="[Pp]ickle"):
        manager.save(tmp_path / "actor")
    assert (tmp_path / "actor" / "extra_state_world_size_1_rank_0.pt").read_bytes() == before
    with pytest.raises(Exception, match="[Pp]ickle"):
        manager.save(tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_unknown_contents_are_refused(folder):
    with pytest.raises(ValueError, match="save_contents has 'weights'"):
        CheckpointManager(None, save_contents=["weights"])


def test_large_models_are_cut_into_shards_with_an_index(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.checkpoint.hf_folder.SHARD_BYTES", 100)
    tensors = {f"w{i}": torch.full((20,), float(i)) for i in range(3)}
    write_safetensors(iter(tensors.items()), tmp_path, is_writer=True)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 240
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all((tmp_path / name).exists() for name in index["weight_map"].values())


def test_a_checkpoint_is_read_to_host_memory_whatever_the_device(folder, tmp_path):
    engine = engine_for(folder)
    CheckpointManager(engine).save(tmp_path / "actor")
    expected = torch.rand(2)
    fresh = engine_for(folder)
    fresh.device = torch.device("meta")  # generator states that went there would be lost
    CheckpointManager(fresh).load(tmp_path / "actor")
    assert torch.equal(torch.rand(2), expected)


def test_state_is_loaded_while_the_weights_are_on_the_device(folder, tmp_path, monkeypatch):
    engine = engine_for(folder)
    train(engine, 1)
    CheckpointManager(engine).save(tmp_path / "actor")
    happened = []
    monkeypatch.setattr(engine, "move", lambda to_host, **parts: happened.append((to_host, parts)))
    monkeypatch.setattr(engine.optimizer, "load_state_dict", lambda state: happened.append("optimizer"))
    CheckpointManager(engine).load(tmp_path / "actor")
    both = {"model": True, "optimizer": True}
    assert happened == [(False, both), "optimizer", (True, both)]
