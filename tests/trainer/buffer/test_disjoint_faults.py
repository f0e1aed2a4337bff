"""A rank that dies, hangs or holds something else while weights cross over ends the run with its name."""

import os
import re
import signal
import time

import pytest

from tests.support.runs import make_task, overrides, run_job
from tests.trainer.buffer.test_disjoint import AHEAD, APART, ROLLOUT, SHARDED
from verl.config.load import load_ppo_config
from verl.single_controller.background import run_concurrently
from verl.single_controller.errors import WorkerDied, WorkerError, WorkerTimeout
from verl.trainer.ppo import job as job_module
from verl.trainer.ppo.placement import Role
from verl.workers.disjoint import ActorWorker, RolloutWorker

pytestmark = pytest.mark.ranks

TENSOR = "model.layers.1.mlp.up_proj.weight"


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class FaultyReceiver(RolloutWorker):
    """On its last rank something happens after the first bucket of the second transfer."""

    def happens(self):
        raise NotImplementedError

    def init_rollout(self):
        super().init_rollout()
        update, transfers = self.rollout.update_weights, []

        def update_weights(version, buckets):
            transfers.append(version)
            return update(version, with_fault(buckets))

        def with_fault(buckets):
            for bucket in buckets:
                yield bucket
                if len(transfers) == 2 and self.rank == self.world_size - 1:
                    self.happens()

        self.rollout.update_weights = update_weights


class DyingReceiver(FaultyReceiver):
    def happens(self):
        kill()


class HangingReceiver(FaultyReceiver):
    def happens(self):
        time.sleep(1000)


class ChangingReceiver(FaultyReceiver):
    def happens(self):
        self.rollout._weights[TENSOR][5, 7] += 1


class StaleReceiver(RolloutWorker):
    """Its last rank computes with other weights than lay in its memory when it confirmed the second transfer."""

    def generate_canary(self, version):
        if version and self.rank == self.world_size - 1:
            self.rollout._weights["model.norm.weight"].mul_(0.5)
        super().generate_canary(version)


class DyingSampler(RolloutWorker):
    """Killed while it generates the third batch."""

    def init_rollout(self):
        super().init_rollout()
        generate, batches = self.rollout.generate, []

        def generate_or_die(requests, *arguments, **named):
            batches.append(len(requests))
            return kill() if len(batches) == 3 else generate(requests, *arguments, **named)

        self.rollout.generate = generate_or_die


class DyingSender(ActorWorker):
    """Its last rank is killed in the second transfer, when it has gathered a tensor."""

    def init_policy(self):
        super().init_policy()
        weights = self.actor.weights

        def dying_weights(dtype):
            for pair in weights(dtype):
                yield pair
                if self.actor.version and self.rank == self.world_size - 1:
                    kill()

        self.actor.weights = dying_weights


class FailingSender(ActorWorker):
    def init_policy(self):
        super().init_policy()
        weights = self.actor.weights

        def failing_weights(dtype):
            yield from weights(dtype)
            raise MemoryError("no room for the next tensor")

        self.actor.weights = failing_weights


def failing(tmp_path, monkeypatch, actor=ActorWorker, rollout=RolloutWorker, **settings):
    """The error that a run with these workers ends in."""
    monkeypatch.setattr(job_module, "default_roles", lambda config: {Role.Actor: actor, Role.Rollout: rollout})
    bucket = {f"{ROLLOUT}__update_weights_bucket_megabytes": 1, f"{ROLLOUT}__n_gpus_per_node": 2}
    settings = {**APART, **bucket, "trainer__total_training_steps": 6, **settings}
    arguments = overrides(make_task(tmp_path / "task"), **settings)
    # members of the link wait for 600 seconds, longer than a test may take: nobody's wait is what ends the run
    with pytest.raises((WorkerDied, WorkerError, WorkerTimeout)) as caught:
        run_job(arguments)
    return caught.value


def place(error):
    return error.role, error.method, error.rank


def test_a_receiver_killed_in_a_transfer_is_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=DyingReceiver, **SHARDED)
    assert isinstance(error, WorkerDied) and place(error) == ("rollout", "receive_weights", 1)


def test_a_sender_killed_in_a_transfer_is_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, actor=DyingSender, **SHARDED)
    assert isinstance(error, WorkerDied) and place(error) == ("actor", "send_weights", 1)


def test_a_rollout_killed_while_it_generates_ahead_is_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=DyingSampler, **AHEAD)
    assert isinstance(error, WorkerDied) and place(error) == ("rollout", "start_generating", 0)


class DyingServer(RolloutWorker):
    """Killed while its server generates with the third version of the weights."""

    def init_rollout(self):
        super().init_rollout()
        step, versions = self.rollout.step, set()

        def step_or_die():
            versions.add(self.rollout.version)
            return kill() if len(versions) == 3 else step()

        self.rollout.step = step_or_die


def test_a_server_killed_while_it_generates_ahead_is_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=DyingServer, **AHEAD, actor_rollout_ref__rollout__mode="async")
    assert isinstance(error, WorkerDied) and error.role == "rollout"


def test_a_receiver_that_hangs_ends_the_run_at_the_timeout(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=HangingReceiver, trainer__worker_timeout=5)
    assert isinstance(error, WorkerTimeout) and error.method in ("receive_weights", "send_weights")


def test_a_sender_that_fails_is_the_failure_and_not_what_the_receivers_see(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, actor=FailingSender)
    assert isinstance(error, WorkerError) and error.role == "actor" and "no room for the next tensor" in error.cause


def test_weights_that_are_not_what_was_sent_are_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=ChangingReceiver)
    assert place(error) == ("rollout", "receive_weights", 1)
    assert re.search(f"WeightSyncError.*version 1.*not what was sent: .*{TENSOR}", error.cause)


def test_a_rollout_that_computes_with_other_weights_than_it_confirmed_is_named(tmp_path, monkeypatch):
    error = failing(tmp_path, monkeypatch, rollout=StaleReceiver)
    assert place(error)[:2] == ("actor", "check_canaries")
    named = r"not the trainer's: model.norm.weight in the memory of rank 1 \(1 of \d+ tensors\)"
    assert re.search(f"(?s)rollout of rank 1 does not compute with the weights of version 1.*{named}", error.cause)


def test_generation_with_weights_that_are_not_held_is_refused(tmp_path, monkeypatch):
    settings = {**APART, "trainer__total_training_steps": 1}
    trainer = job_module.PPOJob(load_ppo_config(overrides(make_task(tmp_path / "task"), **settings))).build_trainer()
    trainer.controller.start({}, {})
    try:
        trainer.init_workers()
        trainer.buffer.engine.sync()
        trainer.buffer.engine.version += 1
        monkeypatch.setattr(trainer.buffer.engine, "sync", dict)
        _, prompts = next(trainer.prompt_batches())
        with pytest.raises(WorkerError, match="StaleWeightsError.*wants weights of version 1.*holds version 0"):
            trainer.generate(prompts, 1)
    finally:
        trainer.controller.stop()


def fails_with(error, after_s=0.0):
    def call():
        time.sleep(after_s)
        raise error

    return call


def test_of_calls_that_fail_together_the_cause_is_raised():
    died = WorkerDied("rollout", 0, 1, "receive_weights", 7, signal=9)
    own = WorkerError("actor", 0, 1, "send_weights", "MemoryError: x", "Traceback ...")
    echo = WorkerError("rollout", 0, 1, "receive_weights", "WeightLinkError: gone", "Traceback ...")

    def cause(*calls):
        with pytest.raises((WorkerDied, WorkerError)) as caught:
            run_concurrently(*calls, is_echo=lambda error: "WeightLinkError" in str(error))
        return caught.value

    assert cause(fails_with(own), fails_with(died, 0.1)) is died
    assert cause(fails_with(echo), fails_with(own, 0.1)) is own
    assert cause(fails_with(died), lambda: time.sleep(100)) is died
    assert run_concurrently(lambda: 1, lambda: time.sleep(0.1) or 2) == [1, 2]
