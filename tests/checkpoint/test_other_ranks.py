"""A run goes on at another number of ranks, or in another engine, as if it had not been stopped."""

import re
import shutil

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.loader import LoRASpec, ModelSpec
from verl.workers.engine import build_engine

ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_for(folder, strategy, fsdp_size=-1, head="lm", lora=None):
    optim = optim_section(warmup_style="cosine", lr_warmup_steps=1)
    spec = ModelSpec(folder, head, compute_dtype=None, lora=lora)
    return build_engine(strategy, spec, {"fsdp_size": fsdp_size}, optim, total_steps=10, grad_clip=1.0)


def train(engine, steps):
    """Steps on the same rows, however many ranks share them."""
    place, data, metrics = engine.topology, make_batch(ROWS), []
    share = ROWS // place.dp_size
    rows = data.select_idxs(list(range(place.dp_rank * share, (place.dp_rank + 1) * share)))
    for _ in range(steps):
        metrics.append(engine.train_step(rows, ppo_loss()))
        engine.step_schedule()
    return [(step["actor/pg_loss"], step["grad_norm"]) for step in metrics]


def save(folder, path, strategy, options):
    engine = engine_for(folder, strategy, **options)
    train(engine, 2)
    CheckpointManager(engine).save(path)
    return train(engine, 2), engine.version


def resume(folder, path, strategy, options):
    engine = engine_for(folder, strategy, **options)
    remark = CheckpointManager(engine).load(path)
    rate, numbers = engine.learning_rate(), torch.rand(1).item()
    return train(engine, 2), engine.version, remark, rate, numbers


def on(ranks, fn, *args):
    """The results of ``fn`` on each rank; one rank of strategy local needs no group."""
    return [fn(*args)] if ranks == 1 and args[2] == "local" else run_ranks(ranks, fn, *args)


FROM = {
    "fsdp2 on 2": (2, "fsdp2", {}),
    "fsdp2 on 4": (4, "fsdp2", {}),
    "fsdp2 on 1": (1, "fsdp2", {}),
    "replicas on 4": (4, "fsdp2", {"fsdp_size": 2}),
    "local": (1, "local", {}),
}
PAIRS = {
    ("fsdp2 on 2", "fsdp2 on 4"): "saved by 2 ranks, read by 4, of which those after the first 2 begin new",
    ("fsdp2 on 2", "local"): "saved by 2 ranks, read by 1$",
    ("fsdp2 on 4", "fsdp2 on 2"): "saved by 4 ranks, read by 2$",
    ("replicas on 4", "local"): "saved by 4 ranks, read by 1$",
    ("local", "fsdp2 on 2"): "saved by 1 rank, read by 2, of which",
    ("fsdp2 on 1", "local"): "saved as fsdp2 1, read as whole",
}


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    """Name of an engine -> (its checkpoint after two steps, its next two steps)."""
    done = {}

    def get(name):
        if name not in done:
            ranks, strategy, options = FROM[name]
            path = tmp_path_factory.mktemp("saved") / "actor"
            done[name] = path, on(ranks, save, folder, path, strategy, options)[0]
        return done[name]

    return get


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[" to ".join(pair) for pair in PAIRS])
def test_the_next_steps_are_those_of_the_run_that_was_not_stopped(folder, saved, source, target):
    path, (expected, _) = saved(source)
    ranks, strategy, options = FROM[target]
    for found, version, remark, rate, _ in on(ranks, resume, folder, path, strategy, options):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
        assert version == 4 and 0 < rate < 1e-3
        assert re.match(PAIRS[source, target], remark)


def test_every_rank_has_random_numbers_of_its_own_and_the_same_after_every_resume(folder, saved):
    path, _ = saved("local")
    first, second = (run_ranks(2, resume, folder, path, "fsdp2", {}) for _ in range(2))
    numbers = [result[-1] for result in first]
    assert numbers == [result[-1] for result in second] and len(set(numbers)) == 2


def _weights_after(folder, path, head, lora, loads):
    engine = engine_for(folder, "fsdp2", head=head, lora=lora)
    manager = CheckpointManager(engine)
    if loads:
        manager.load(path)
    else:
        with torch.no_grad():  # a value head and an adapter that are not those of a fresh engine
            for number, parameter in enumerate(engine.module.parameters()):
                parameter.add_(0.01 * (number % 7 + 1))
        manager.save(path)
    # frozen weights below an adapter are model.path's, which this has moved and a checkpoint does not hold
    named = engine.weights() if lora is None else engine.adapter_weights()
    return {name: tensor.clone() for name, tensor in named}


@pytest.mark.parametrize("head", ["lm", "value"])
def test_an_adapter_and_a_value_head_move_to_another_number_of_ranks(folder, tmp_path, head):
    lora = LoRASpec(4) if head == "lm" else None
    saved = run_ranks(2, _weights_after, folder, tmp_path / "actor", head, lora, False)[0]
    for loaded in run_ranks(3, _weights_after, folder, tmp_path / "actor", head, lora, True):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_folder_that_is_no_whole_save_is_refused_with_the_way_out(folder, saved, tmp_path):
    path, _ = saved("fsdp2 on 2")
    older, newest = tmp_path / "global_step_7" / "actor", tmp_path / "global_step_8" / "actor"
    for copy in (older, newest):
        shutil.copytree(path, copy)
        (copy / "manifest.json").unlink()  # as another program leaves it
    manager = CheckpointManager(engine_for(folder, "local"))
    (newest / "model_world_size_2_rank_1.pt").unlink()
    way_back = f"trainer.resume_from_path={older.parent}$"
    with pytest.raises(FileNotFoundError, match=f"lacks 1 of the 2 files of 'model', first .*rank_1.pt.*{way_back}"):
        manager.load(newest)
    (newest / "model_world_size_2_rank_1.pt").write_bytes(b"cut off")
    with pytest.raises(ValueError, match=r"rank_1.pt cannot be read.*Resume from an older step"):
        manager.load(newest)
    shutil.copy(older / "optim_world_size_2_rank_0.pt", older / "optim_world_size_4_rank_0.pt")
    with pytest.raises(ValueError, match="optimizer files of 2 and of 4 ranks"):
        manager.load(older)


def test_another_model_is_refused(saved, tmp_path):
    path, _ = saved("fsdp2 on 2")
    wide = make_tiny_model(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ValueError, match=r"has shape \(100, 64\) in the checkpoint and \(100, 128\) in this model"):
        CheckpointManager(engine_for(wide, "local")).load(path)
    deep = make_tiny_model(tmp_path / "deep", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"differ from this model in \d+ names: 'model.layers.2.*in the model only"):
        CheckpointManager(engine_for(deep, "local")).load(path)
