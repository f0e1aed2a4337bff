"""What the ranks of a run saved becomes one Hugging Face folder that is the trained model."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from tests.support.losses import optim_section, ppo_loss, value_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model, make_tokenizer
from verl import cli
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.model_merger.__main__ import find_checkpoint, main
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import Want, build_engine

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RUNS = {
    "tied": ("qwen2", {}, "lm", None),
    "experts": ("qwen3_moe", MOE, "lm", None),
    "critic": ("qwen2", {}, "value", None),
    "adapter": ("qwen2", {}, "lm", LoRASpec(4, 8)),
}


def _train_and_save(folder, path, head, lora):
    spec = ModelSpec(folder, head, compute_dtype=None, lora=lora)
    engine = build_engine("fsdp2", spec, None, optim_section(lr=1e-2), total_steps=10, grad_clip=1.0)
    data = make_batch(4)
    for _ in range(2):
        engine.train_step(data, ppo_loss() if head == "lm" else value_loss())
        engine.step_schedule()
    contents = ["model", "optimizer", "hf_model"]
    CheckpointManager(engine, make_tokenizer(), contents).save(path)
    scored = engine.infer(data, Want.LOG_PROBS if head == "lm" else Want.VALUES)
    return scored.ragged("log_probs" if head == "lm" else "values").values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name of a run -> (its checkpoint, what its engine says of a batch)."""
    done = {}

    def get(name):
        if name not in done:
            family, config, head, lora = RUNS[name]
            root = tmp_path_factory.mktemp(name)
            folder = make_tiny_model(root / "model", family, **config)
            path = root / "global_step_2" / "actor"
            done[name] = path, run_ranks(2, _train_and_save, folder, path, head, lora)[0]
        return done[name]

    return get


def merge(path, target, *more):
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(path), "--target_dir", str(target), *more]) == 0
    return target


@pytest.mark.parametrize("name", RUNS)
def test_the_merged_folder_opens_as_the_trained_model(runs, tmp_path, name, capsys):
    path, scored = runs(name)
    target = merge(path, tmp_path / "merged")
    data = make_batch(4)
    tokens, responses = data.ragged("input_ids").rows(), data.ragged("responses").rows()
    opens = AutoModelForCausalLM if RUNS[name][2] == "lm" else AutoModelForTokenClassification
    model = opens.from_pretrained(target).eval()
    found = []
    for row, response in zip(tokens, responses, strict=True):
        with torch.no_grad():
            logits = model(row[None]).logits[0, -len(response) - 1 : -1]
        one = logits.log_softmax(-1).gather(1, response[:, None]) if RUNS[name][2] == "lm" else logits
        found.append(one[:, 0])
    torch.testing.assert_close(torch.cat(found), scored, rtol=1e-4, atol=1e-5)
    # all but the order of the same weights in the file is what the run itself exported
    exported = load_file(path / "huggingface" / "model.safetensors")
    merged = load_file(target / "model.safetensors")
    assert merged.keys() == exported.keys()
    assert all(torch.equal(merged[key], exported[key]) for key in merged)
    assert AutoTokenizer.from_pretrained(target).vocab_size == make_tokenizer().vocab_size
    assert f"{target}: {len(merged)} tensors written and read back" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["run", "step", "role"])
def test_verl_merge_takes_the_newest_step_of_a_run(runs, tmp_path, word, capsys):
    path, _ = runs("tied")
    root = tmp_path / "run"
    shutil.copytree(path.parent, root / "global_step_2")
    (root / "global_step_1" / "actor").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("2")
    given = {"run": root, "step": root / "global_step_2", "role": root / "global_step_2" / "actor"}[word]
    assert cli.main(["merge", str(given)]) == 0
    AutoModelForCausalLM.from_pretrained(root / "merged_step_2")
    assert f"merging {root / 'global_step_2' / 'actor'}" in capsys.readouterr().out
    assert cli.main(["merge", "test", str(root), "--test_hf_dir", str(root / "merged_step_2")]) == 0


def test_the_newest_complete_step_of_each_role_is_found(tmp_path):
    for name in ("global_step_9/actor", "global_step_10/actor", "global_step_10/critic", "global_step_11/actor"):
        (tmp_path / name).mkdir(parents=True)
    assert find_checkpoint(str(tmp_path))[0].endswith("global_step_11/actor")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")  # 11 is still being written
    assert find_checkpoint(str(tmp_path)) == (str(tmp_path / "global_step_10/actor"), str(tmp_path / "merged_step_10"))
    assert find_checkpoint(str(tmp_path), "critic")[1] == str(tmp_path / "merged_critic_step_10")
    assert find_checkpoint(str(tmp_path), step=9)[0].endswith("global_step_9/actor")
    with pytest.raises(ValueError, match="--step=3: .* Steps with one: 9, 10, 11"):
        find_checkpoint(str(tmp_path), step=3)
    with pytest.raises(ValueError, match="has no checkpoint of the critic"):
        find_checkpoint(str(tmp_path / "global_step_9"), "critic")
    with pytest.raises(ValueError, match="is no folder: give the folder of a run"):
        find_checkpoint(str(tmp_path / "nothing"))


def test_an_adapter_comes_along_and_peft_reads_it(runs, tmp_path):
    path, _ = runs("adapter")
    target = merge(path, tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(path.parents[1] / "model").eval()
    merged = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = torch.arange(4, 20).view(2, 8)
    with torch.no_grad():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, target / "lora_adapter").eval()(ids).logits
        torch.testing.assert_close(adapted, merged(ids).logits, rtol=1e-4, atol=1e-5)
    assert (plain - adapted).abs().max() > 1e-3


def test_a_base_model_that_has_moved_is_given(runs, tmp_path):
    path, _ = runs("adapter")
    shutil.copytree(path, tmp_path / "actor")
    config = tmp_path / "actor" / "lora_adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "/gone"}))
    with pytest.raises(ValueError, match="model.path='/gone' holds no model"):
        merge(tmp_path / "actor", tmp_path / "merged")
    target = merge(tmp_path / "actor", tmp_path / "merged", "--hf_model_path", str(path.parents[1] / "model"))
    exported = load_file(path / "huggingface" / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in load_file(target / "model.safetensors").items())


def test_the_precision_can_be_chosen_and_the_config_says_it(runs, tmp_path):
    path, _ = runs("tied")
    (tmp_path / "merged").mkdir()
    save_file({"old": torch.zeros(1)}, tmp_path / "merged" / "model-00001-of-00002.safetensors")  # of another merge
    target = merge(path, tmp_path / "merged", "--dtype", "bf16")
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert [file.name for file in target.glob("*.safetensors")] == ["model.safetensors"]
    assert not (tmp_path / "merged.partial").exists()


@pytest.mark.parametrize("name", ["experts", "adapter"])
def test_the_test_command_finds_the_same_model_and_a_changed_number(runs, tmp_path, name, capsys):
    path, _ = runs(name)
    command = ["test", "--backend", "fsdp", "--local_dir", str(path), "--test_hf_dir"]
    assert main([*command, str(path / "huggingface")]) == 0
    tensors = load_file(path / "huggingface" / "model.safetensors")
    changed = next(key for key, tensor in tensors.items() if tensor.dim() == 2)
    tensors[changed][0, 0] += 0.01
    dropped = max(tensors)
    del tensors[dropped]
    save_file(tensors, tmp_path / "model.safetensors")
    capsys.readouterr()
    assert main([*command, str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{changed}: numbers differ by up to 0.01" in said and f"{dropped}: not in {tmp_path}" in said
    assert "in 2 tensors" in said


def test_what_cannot_be_merged_is_said(runs, tmp_path):
    path, _ = runs("tied")

    def refused(match, local_dir, *more):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            main(["merge", "--local_dir", str(local_dir), "--target_dir", str(tmp_path / "merged"), *more])
        assert not (tmp_path / "merged").exists()

    refused("--backend=veomni is not read here: use one of fsdp", path, "--backend", "veomni")
    refused("holds the checkpoints of actor.*give .*/actor", path.parent)
    refused("nowhere does not exist", tmp_path / "nowhere")
    other = make_tiny_model(tmp_path / "other", hidden_size=128)
    refused("model.embed_tokens.weight has shape", path, "--hf_model_path", other)


def test_a_folder_that_does_not_read_back_is_not_put_in_place(runs, tmp_path, monkeypatch):
    from verl.model_merger import merge as module

    path, _ = runs("tied")

    def write_wrong(named, folder):
        save_file(
            {name: tensor + (name == "model.norm.weight") for name, tensor in named}, folder / "model.safetensors"
        )

    monkeypatch.setattr(module, "write_safetensors", write_wrong)
    with pytest.raises(RuntimeError, match="1 of .* tensors differ, first model.norm.weight"):
        merge(path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_result_is_uploaded_where_asked(runs, tmp_path, monkeypatch):
    calls = []

    class Hub:
        def create_repo(self, name, **options):
            calls.append((name, options))
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options):
            calls.append(options)

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    target = merge(runs("tied")[0], tmp_path / "merged", "--hf_upload_path", "mine", "--private")
    assert calls == [
        ("mine", {"private": True, "exist_ok": True}),
        {"folder_path": str(target), "repo_id": "me/mine"},
    ]
