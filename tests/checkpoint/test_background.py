"""Saving while training goes on: what is written is the moment of the save, and nothing goes wrong unseen."""

import threading
import time

import pytest
import torch

from tests.support.losses import optim_section, ppo_loss
from tests.support.ranks import run_ranks
from tests.support.tiny_models import make_batch, make_tiny_model
from verl.checkpoint import checkpoint_manager
from verl.checkpoint.checkpoint_manager import CheckpointManager
from verl.models.loader import ModelSpec
from verl.workers.engine import build_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def engine_for(model, strategy="local"):
    return build_engine(
        strategy, ModelSpec(model, compute_dtype=None), None, optim_section(), total_steps=10, grad_clip=1.0
    )


def step(engine):
    metrics = engine.train_step(make_batch(4), ppo_loss())
    return metrics["actor/pg_loss"], metrics["grad_norm"]


@pytest.fixture
def held(monkeypatch):
    """Files are written once this event is set."""
    event, write = threading.Event(), checkpoint_manager.write_file

    def wait_and_write(content, path):
        assert event.wait(60)
        return write(content, path)

    monkeypatch.setattr(checkpoint_manager, "write_file", wait_and_write)
    return event


def test_what_is_written_is_the_moment_of_the_save(model, tmp_path, held):
    engine = engine_for(model)
    step(engine)
    manager = CheckpointManager(engine, in_background=True)
    manager.save(tmp_path / "actor")
    expected = [step(engine), step(engine)]
    assert manager.is_saving() and not (tmp_path / "actor").exists()
    held.set()
    manager.finish_saving()
    assert not manager.is_saving()
    again = engine_for(model)
    CheckpointManager(again).load(tmp_path / "actor")
    assert [step(again), step(again)] == expected


def test_the_next_save_waits_for_the_one_before(model, tmp_path, held):
    manager = CheckpointManager(engine_for(model), save_contents=["extra"], in_background=True)
    manager.save(tmp_path / "one")
    threading.Timer(0.3, held.set).start()
    manager.save(tmp_path / "two")
    assert (tmp_path / "one").exists()
    manager.finish_saving()
    assert (tmp_path / "two").exists()


def _fail_on_rank_1(model, path):
    engine = engine_for(model, "fsdp2")
    manager = CheckpointManager(engine, in_background=True)
    write = checkpoint_manager.write_file

    def fail(content, to):
        if engine.topology.rank == 1:
            raise OSError(28, "the disk is full")
        return write(content, to)

    checkpoint_manager.write_file = fail
    try:
        manager.save(path)
        step(engine)  # its collectives and those of the save do not meet
        while manager.is_saving():
            time.sleep(0.01)
        with pytest.raises((OSError, RuntimeError), match="the disk is full") as raised:
            manager.finish_saving()
    finally:
        checkpoint_manager.write_file = write
    manager.save(path)
    manager.finish_saving()
    again = engine_for(model, "fsdp2")
    CheckpointManager(again).load(path)
    return str(raised.value), step(engine) == step(again)


def test_what_goes_wrong_on_one_rank_is_raised_on_all_and_a_later_save_works(model, tmp_path):
    (first, is_same), (second, _) = run_ranks(2, _fail_on_rank_1, model, tmp_path / "actor")
    assert first.startswith("rank 1 could not write its part") and second == "[Errno 28] the disk is full"
    assert is_same


def test_nothing_of_the_save_shares_memory_with_the_model(model, tmp_path, held):
    engine = engine_for(model)
    step(engine)
    manager = CheckpointManager(engine, in_background=True)
    manager.save(tmp_path / "actor")
    before = {name: tensor.clone() for name, tensor in engine.model_state().items()}
    with torch.no_grad():
        for tensor in (*engine.model_state().values(), engine.optimizer.state_dict()["state"][0]["exp_avg"]):
            tensor.zero_()
    held.set()
    manager.finish_saving()
    again = engine_for(model)
    CheckpointManager(again).load(tmp_path / "actor")
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.model_state().items())
    assert again.optimizer.state_dict()["state"][0]["exp_avg"].abs().sum() > 0
