"""Actors that start before the run's own pools and worker groups exist: taken over where they fit, else ended."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.single_controller.roles import Counter
from tests.single_controller.test_driver_exit import ROOT, assert_nothing_left, shared_memory
from tests.support.runs import make_task, overrides

pytestmark = pytest.mark.ray


@pytest.fixture
def begin(ray_controller, monkeypatch):
    """Begin actors for pools; the controller of the session stays the one that ends Ray."""
    from verl.single_controller.ray.base import RayController

    monkeypatch.setattr(RayController, "_ahead", None)
    return lambda *pools: ray_controller.begin(pools, "cpu", ["tests.single_controller.roles"])


@pytest.mark.parametrize("colocated, taken", [(1, True), (2, False)])
def test_a_group_that_wants_such_actors_takes_them_and_others_end(ray_controller, begin, colocated, taken):
    from verl.single_controller.ray import pools

    begin(([1], ["rollout"]), ([2], ["actor", "critic"]))
    _, begun = pools._begun
    names = [name for name, _ in begun.actors]
    group = ray_controller.WorkerGroup(
        ray_controller.ResourcePool([2], max_colocate_count=colocated),
        ray_controller.ClassWithInitArgs(Counter, 5),
        device_name="cpu",
    )
    try:
        assert (group.worker_names == names) is taken and [one.pool.store for one in pools._begun] == [[1]]
        assert group.add(2) == [7, 7] and [place["rank"] for place in group.place()] == [0, 1]
        assert {psutil.Process(pid).nice() for pid in group.pids} == {psutil.Process().nice()}
    finally:
        group.stop()
        pools.end_begun()


def test_actors_of_another_pool_give_up_what_they_reserve(ray_controller, begin):
    from verl.single_controller.ray import pools

    others = ray_controller.ResourcePool([30])
    others.get_placement_groups(device_name="cpu")  # of 32
    begin(([1], ["actor"]))
    pool = ray_controller.ResourcePool([2], max_colocate_count=1)
    group = ray_controller.WorkerGroup(pool, ray_controller.ClassWithInitArgs(Counter), device_name="cpu")
    try:
        assert not pools._begun and group.add(1) == [1, 1]
    finally:
        group.stop()


def test_a_run_takes_its_actors_and_leaves_nothing_behind_when_it_is_ended_then(tmp_path):
    words = overrides(make_task(tmp_path / "task"), trainer__controller="ray", ray_init__num_cpus=2)
    program = """
import os, signal, sys
from tests.single_controller.test_driver_exit import descendants_of
from verl.single_controller.ray.pools import RayResourcePool
from verl.trainer.main_ppo import main
take = RayResourcePool.take_actors
def take_actors(self, options):
    taken = take(self, options)
    print("TAKEN", len(taken), *descendants_of(os.getpid()), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    return taken
RayResourcePool.take_actors = take_actors
main(sys.argv[1:])
"""
    before = shared_memory()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    run = subprocess.run([sys.executable, "-c", program, *words], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 128 + signal.SIGTERM, run.stderr
    (taken,) = [line.split() for line in run.stdout.splitlines() if line.startswith("TAKEN")]
    assert taken[1] == "1"
    assert_nothing_left({int(pid) for pid in taken[2:]}, before)
