"""No byte of a checkpoint changes unseen, and no weights that are not finite are saved."""

import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model, make_tokenizer
from verl.checkpoint import hf_folder
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.checkpoint.manifest import MANIFEST, TRACKER, DamagedCheckpoint, read_manifest
from verl.checkpoint.rank_files import NonFiniteWeights
from verl.checkpoint.run_state import (
    RunCheckpoints,
    folder_to_resume,
    mark_complete,
    save_driver_state,
    write_step_manifest,
)
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import build_engine

FLIPS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_for(model, strategy="local", lora=None):
    spec = ModelSpec(model, compute_dtype=None, lora=lora)
    return build_engine(strategy, spec, None, optim_section(), total_steps=10, grad_clip=1.0)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run with two complete steps; (its folder, its engine's manager)."""
    root = tmp_path_factory.mktemp("run")
    manager = CheckpointManager(engine_for(model), make_tokenizer(), ["model", "optimizer", "extra", "hf_model"])
    for step in (1, 2):
        manager.engine.train_step(make_batch(2, seed=step), ppo_loss())
        folder = root / f"global_step_{step}"
        manager.save(folder / "actor", step)
        save_driver_state(folder, {"rows": [step]}, {"kl": 0.5})
        write_step_manifest(folder, {"step": step})
        mark_complete(root, step)
    return root, manager


def checkpoints(root, mode="auto"):
    said = []
    trainer = {"default_local_dir": str(root), "resume_mode": mode}
    config = SimpleNamespace(trainer=SimpleNamespace(**trainer))
    return RunCheckpoints(config, said.append, timed=None), said


def groups(manager):
    """The worker group of an actor with one rank."""
    return {"actor": SimpleNamespace(verify_checkpoint=lambda folder: [manager.verify(folder)])}


def damage(manager, folder):
    read, beside = manager.verify(folder)
    return read | beside


def test_a_whole_checkpoint_is_whole(run):
    root, manager = run
    chosen, said = checkpoints(root)
    assert chosen.good_one(root / "global_step_2", groups(manager)) == root / "global_step_2" and not said
    about = read_manifest(root / "global_step_2" / "actor").about
    assert about["step"] == 2 and about["world_size"] == 1 and about["versions"]["torch"] == torch.__version__


def test_any_flipped_byte_any_cut_and_any_missing_file_is_noticed(run):
    root, manager = run
    folder, place = root / "global_step_2", random.Random(0)
    chosen, _ = checkpoints(root, "resume_path")

    def is_noticed():
        if damage(manager, folder / "actor"):
            return True
        try:
            chosen.good_one(folder, groups(manager))
        except DamagedCheckpoint:
            return True
        return False

    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert len(files) > 10
    for path in files:
        content = path.read_bytes()
        try:
            for at in {0, len(content) - 1, *(place.randrange(len(content)) for _ in range(FLIPS))}:
                flipped = bytes([content[at] ^ (1 << place.randrange(8))])
                path.write_bytes(content[:at] + flipped + content[at + 1 :])
                assert is_noticed(), (path, at)
            for left in (b"", content[:-1], content[: len(content) // 2], content + b"\0"):
                path.write_bytes(left)
                assert is_noticed(), (path, len(left))
            path.unlink()
            assert is_noticed(), path
        finally:
            path.write_bytes(content)
    assert not is_noticed()


def test_a_file_of_another_step_is_noticed_and_the_older_step_taken(run, tmp_path):
    root, manager = run
    shutil.copytree(root, tmp_path / "run")
    root = tmp_path / "run"
    name = "optim_world_size_1_rank_0.pt"
    shutil.copy(root / "global_step_1" / "actor" / name, root / "global_step_2" / "actor" / name)
    chosen, said = checkpoints(root)
    assert chosen.good_one(root / "global_step_2", groups(manager)) == root / "global_step_1"
    assert f"{name} does not hold what was written: it is damaged, or of another save: global_step_2" in said[0]
    assert said[1] == f"resuming from {root}/global_step_1, the newest checkpoint that is whole"
    # one that was named is not replaced by another
    chosen, said = checkpoints(root, "resume_path")
    with pytest.raises(DamagedCheckpoint, match=f"{name} does not hold.*resume_from_path={root}/global_step_1$"):
        chosen.good_one(root / "global_step_2", groups(manager))
    (root / "global_step_1" / "data.pt").unlink()
    with pytest.raises(
        DamagedCheckpoint, match="optim_world.*; .*global_step_1/data.pt is missing. Nothing was loaded"
    ):
        checkpoints(root)[0].good_one(root / "global_step_2", groups(manager))
    # and a manager without a driver refuses before it has loaded anything
    before = next(manager.engine.module.parameters()).clone()
    with pytest.raises(DamagedCheckpoint, match="Nothing of it was loaded. Resume from an older step"):
        manager.load(root / "global_step_2" / "actor")
    assert torch.equal(before, next(manager.engine.module.parameters()))


def test_what_a_resume_does_not_read_is_said_and_does_not_stop_it(run, tmp_path):
    root, manager = run
    shutil.copytree(root, tmp_path / "run")
    config = tmp_path / "run" / "global_step_2" / "actor" / "huggingface" / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": 7}))
    chosen, said = checkpoints(tmp_path / "run")
    assert chosen.good_one(tmp_path / "run" / "global_step_2", groups(manager)).name == "global_step_2"
    assert len(said) == 1 and "generation_config.json has" in said[0] and said[0].endswith("needed to go on.")


def test_a_step_whose_save_was_cut_off_before_its_manifest_is_not_taken(run, tmp_path):
    root, manager = run
    shutil.copytree(root, tmp_path / "run")
    (tmp_path / "run" / "global_step_2" / MANIFEST).unlink()
    chosen, said = checkpoints(tmp_path / "run")
    assert chosen.good_one(tmp_path / "run" / "global_step_2", groups(manager)).name == "global_step_1"
    assert "manifest.json is missing: the save was cut off" in said[0]


def test_a_checkpoint_of_another_program_is_taken_as_it_is(run, tmp_path):
    root, manager = run
    shutil.copytree(root, tmp_path / "run")
    for path in (tmp_path / "run").rglob(MANIFEST):
        path.unlink()
    chosen, said = checkpoints(tmp_path / "run")
    assert chosen.good_one(tmp_path / "run" / "global_step_2", groups(manager)).name == "global_step_2" and not said


def test_weights_of_another_program_that_are_not_finite_are_not_loaded(run, tmp_path):
    root, manager = run
    folder = tmp_path / "actor"
    shutil.copytree(root / "global_step_2" / "actor", folder)
    (folder / MANIFEST).unlink()
    (path,) = folder.glob("model_world_size_1_rank_0.pt")
    weights = torch.load(path, weights_only=False)
    next(iter(weights.values())).view(-1)[0] = float("nan")
    torch.save(weights, path)
    before = next(manager.engine.module.parameters()).clone()
    with pytest.raises(DamagedCheckpoint, match="is of a model that diverged.* has 1 NaN and 0 infinite"):
        manager.load(folder)
    assert torch.equal(before, next(manager.engine.module.parameters()))


def _damage_on_one_rank(model, path):
    engine = engine_for(model, "fsdp2")
    manager = CheckpointManager(engine)
    manager.save(path)
    whole = manager.verify(path)
    torch.distributed.barrier()
    if engine.topology.rank == 0:
        file = path / "model_world_size_2_rank_1.pt"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    torch.distributed.barrier()
    with pytest.raises(Exception, match="rank_1.pt does not hold what was written") as raised:
        CheckpointManager(engine).load(path)
    with torch.no_grad():
        if engine.topology.rank == 1:
            next(engine.module.parameters()).to_local().fill_(float("nan"))
    with pytest.raises((NonFiniteWeights, RuntimeError), match="model.embed_tokens.weight has 3,[0-9]+ NaN and 0"):
        manager.save(path.with_name("nan"))
    return whole, type(raised.value).__name__, path.with_name("nan").exists()


def test_damage_and_nan_on_one_rank_are_raised_on_all(model, tmp_path):
    first, second = run_ranks(2, _damage_on_one_rank, model, tmp_path / "actor")
    assert first == (({}, {}), "RuntimeError", False) and second == (({}, {}), "DamagedCheckpoint", False)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_not_saved(model, tmp_path, value):
    engine = engine_for(model, lora=LoRASpec(rank=2, alpha=2, target_modules="all-linear"))
    manager = CheckpointManager(engine)
    manager.save(tmp_path / "global_step_1" / "actor")
    name, weight = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad][-1]
    with torch.no_grad():
        weight.view(-1)[3] = value
    with pytest.raises(
        NonFiniteWeights, match=r"lora_B.* has \d NaN and \d infinite of [0-9,]+ numbers. It is not saved"
    ):
        manager.save(tmp_path / "global_step_2" / "actor")
    assert [path.name for path in tmp_path.rglob("actor*")] == ["actor"]


def test_an_export_that_is_not_what_was_written_is_not_published(tmp_path, monkeypatch):
    write = hf_folder.save_file

    def altered(tensors, path, **options):
        write({name: tensor + (name == "b") for name, tensor in tensors.items()}, path, **options)

    tensors = [("a", torch.full((3,), float("nan"))), ("b", torch.ones(())), ("c", torch.ones(2, dtype=torch.bfloat16))]
    hf_folder.write_safetensors(tensors, tmp_path)
    monkeypatch.setattr(hf_folder, "save_file", altered)
    with pytest.raises(OSError, match="does not hold the same when it is read again: b and 0 more"):
        hf_folder.write_safetensors(tensors, tmp_path)


def test_a_tracker_that_is_lost_or_names_an_older_step_hides_no_checkpoint(run, tmp_path, capsys):
    root, manager = run
    shutil.copytree(root, tmp_path / "run")
    trainer = SimpleNamespace(default_local_dir=str(tmp_path / "run"), resume_mode="auto", default_hdfs_dir=None)
    trainer.resume_from_path = None
    (tmp_path / "run" / TRACKER).write_text("1")
    chosen, said = checkpoints(tmp_path / "run")
    assert chosen.good_one(folder_to_resume(trainer), groups(manager)).name == "global_step_1"
    assert said == [f"{tmp_path}/run/{TRACKER} names step 1: later ones are not read, [2]"]
    (tmp_path / "run" / TRACKER).write_text("7")
    assert folder_to_resume(trainer).name == "global_step_2"
    (tmp_path / "run" / TRACKER).unlink()
    assert folder_to_resume(trainer).name == "global_step_2"
    assert capsys.readouterr().out.count("names no checkpoint that is there: going on from") == 2
