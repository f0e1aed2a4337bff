"""What lies on the device in which phase: decided by ``Engine.on_device``, and by nothing else."""

import pytest

from tests.support.losses import optim_section
from tests.support.runs import make_task, overrides, run_job
from tests.support.tiny_models import make_tiny_model
from verl.models.loader import ModelSpec
from verl.workers.engine import build_engine
from verl.workers.engine.local import LocalEngine
from verl.workers.rollout.hf.rollout import HFRollout


@pytest.fixture
def moves(monkeypatch):
    """Parts that engines load and offload, in order, from after they are built."""
    seen = []
    plain = LocalEngine.move

    def noted(self, to_host, *, model, optimizer):
        seen.append(("offload" if to_host else "load", model, optimizer))
        plain(self, to_host, model=model, optimizer=optimizer)

    monkeypatch.setattr(LocalEngine, "move", noted)
    return seen


def test_blocks_nest_and_the_outermost_takes_away(tmp_path, moves):
    engine = build_engine("local", ModelSpec(make_tiny_model(tmp_path)), None, optim_section())
    assert moves == [("offload", True, True)]
    moves.clear()
    with engine.on_device():
        with engine.on_device(optimizer=True):
            with engine.on_device():
                pass
        assert moves == [("load", True, False), ("load", False, True), ("offload", False, True)]
    assert moves[3:] == [("offload", True, False)]
    moves.clear()
    with pytest.raises(RuntimeError), engine.on_device(optimizer=True):
        raise RuntimeError
    assert moves == [("load", True, True), ("offload", True, True)]


class Device:
    """Notes what each engine uses, and whether it is there then."""

    def __init__(self, monkeypatch):
        self.there, self.uses = {}, []
        self.watch(monkeypatch, "infer", ("model",))
        self.watch(monkeypatch, "train_step", ("model", "optimizer"))
        self.watch(monkeypatch, "weights", ("model",))
        monkeypatch.setattr(LocalEngine, "move", self.mover(LocalEngine.move))
        generate = HFRollout.generate

        def noted(rollout, *args, **kwargs):
            self.uses.append(("generate", not any(any(parts.values()) for parts in self.there.values())))
            return generate(rollout, *args, **kwargs)

        monkeypatch.setattr(HFRollout, "generate", noted)

    def mover(self, plain):
        def move(engine, to_host, *, model, optimizer):
            parts = self.there.setdefault(id(engine), {"model": False, "optimizer": False})
            moved = [name for name, is_moved in (("model", model), ("optimizer", optimizer)) if is_moved]
            parts.update(dict.fromkeys(moved, not to_host))
            plain(engine, to_host, model=model, optimizer=optimizer)

        return move

    def watch(self, monkeypatch, name, needs):
        plain = getattr(LocalEngine, name)

        def used(engine, *args, **kwargs):
            mine = self.there[id(engine)]
            others = any(any(parts.values()) for key, parts in self.there.items() if key != id(engine))
            self.uses.append((name, all(mine[part] for part in needs) and not others))
            return plain(engine, *args, **kwargs)

        monkeypatch.setattr(LocalEngine, name, used)


def test_every_verb_finds_its_own_weights_there_and_no_others(tmp_path, monkeypatch):
    device = Device(monkeypatch)
    run_job(
        overrides(
            make_task(tmp_path / "task"),
            trainer__total_training_steps=2,
            trainer__default_local_dir=tmp_path / "run",
            trainer__save_freq=-1,
            algorithm__adv_estimator="gae",
            algorithm__use_kl_in_reward=True,
            actor_rollout_ref__actor__use_kl_loss=True,
            actor_rollout_ref__ref__strategy="local",
            actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=8,
            critic__strategy="local",
            critic__ppo_micro_batch_size_per_gpu=8,
        )
    )
    assert {name for name, _ in device.uses} == {"infer", "train_step", "weights", "generate"}
    assert all(is_right for _, is_right in device.uses), device.uses
    assert len(device.there) == 3 and not any(any(parts.values()) for parts in device.there.values())
