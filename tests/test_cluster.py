"""Several Ray nodes, on this machine: `verl cluster check` looks at them, and a run uses them."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.cluster import clock_finding
from verl.utils.exit_codes import ExitCode

NODES = 2


@pytest.fixture(scope="module")
def nodes():
    """A cluster of two nodes."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            nodes.add_node(num_cpus=1)
        yield nodes
    finally:
        nodes.shutdown()


@pytest.fixture
def cluster(nodes):
    """Environment of commands that join it."""
    return {**os.environ, "RAY_ADDRESS": nodes.address, "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.ray
def test_nodes_are_looked_at_and_what_is_missing_is_said(cluster, tmp_path):
    command = [sys.executable, "-m", "verl", "cluster", "check", "--MiB", "4", "--json", "--nodes", "3"]
    command += ["--gpus-per-node", "1", "--folder", str(tmp_path), "--shared"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and done.stdout.startswith("["), done.stderr[-2000:]
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert {what for what, one in found.items() if one["verdict"] == "FAIL"} == {"nodes", "GPUs"}
    assert "2 alive, --nodes=3 asked for" in found["nodes"]["text"]
    assert "has 0, --gpus-per-node=1" in found["GPUs"]["text"]
    assert "torch 2." in found["versions"]["text"]
    assert "one folder for all nodes" in found["folder"]["text"] and not list(tmp_path.iterdir())
    assert re.search(r"gloo, 4 MiB over 2 nodes: [\d.]+ GB/s a node, exact", found["all-reduce"]["text"])


@pytest.mark.ray
def test_the_object_store_has_room_for_two_batches_unless_its_size_is_given():
    from verl.single_controller.ray.cluster import object_store_size

    GiB = 1 << 30
    assert object_store_size(None, 10 << 20, 64 * GiB) == (256 << 20, "")
    assert object_store_size(None, 300 << 20, 64 * GiB) == (600 << 20, "")
    size, note = object_store_size(None, 3 * GiB, 64 * GiB)
    assert size == 6 * GiB and "6144 MiB" in note
    size, note = object_store_size(None, 3 * GiB, 4 * GiB)
    assert size == 2 * GiB and "two batches of this run take up to 6144 MiB" in note and "--shm-size" in note
    assert object_store_size(100, 3 * GiB, 4 * GiB) == (100 << 20, "")


OWN = """
import ray
from verl.single_controller.ray.cluster import start_own_cluster
start_own_cluster({"num_cpus": 1, "object_store_memory_mb": 80}, {})
print("nodes:", len(ray.nodes()))
"""


@pytest.mark.ray
def test_without_its_address_a_cluster_on_this_machine_is_left_alone(cluster):
    env = {name: value for name, value in cluster.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
    done = subprocess.run([sys.executable, "-c", OWN], env=env, capture_output=True, text=True, timeout=100)
    assert "nodes: 1" in done.stdout, done.stderr[-2000:]


SHARED = {"actor_rollout_ref__actor__strategy": "fsdp2", "data__train_batch_size": 6}
SHARED |= {"actor_rollout_ref__actor__ppo_mini_batch_size": 6, "trainer__controller": "ray"}


@pytest.fixture(scope="module")
def trained(nodes, tmp_path_factory):
    """Folder of a run of two steps over three nodes, of which one has left the cluster since."""
    folder = tmp_path_factory.mktemp("over_three")
    spread = {"trainer__nnodes": 3, "trainer__logger": "[file]", "trainer__save_freq": 2}
    words = overrides(make_task(folder), **SHARED, **spread, trainer__total_training_steps=2)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    env = {**os.environ, "RAY_ADDRESS": nodes.address, "RAY_USAGE_STATS_ENABLED": "0"}
    third = nodes.add_node(num_cpus=1)
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    finally:
        nodes.remove_node(third)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


@pytest.mark.ray
def test_a_run_over_three_nodes_gives_the_numbers_of_one(trained, tmp_path):
    local = {**SHARED, "trainer__controller": "local", "trainer__n_gpus_per_node": 3}
    together = run_job(overrides(make_task(tmp_path / "one"), **local, trainer__total_training_steps=2))
    (file,) = trained.rglob("metrics.jsonl")
    last = read_metrics(file)[-1]["data"]
    for name in ("actor/grad_norm", "actor/pg_loss", "response_length/mean"):
        # two nodes hold replicas, one node slices: gradients are summed in another order
        assert last[name] == pytest.approx(together.metrics[name], rel=1e-5, abs=1e-7), name


@pytest.mark.ray
def test_a_run_of_three_nodes_goes_on_over_two_with_servers_and_names_the_node_that_dies(
    trained, nodes, cluster, tmp_path
):
    saved = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": trained / "run/global_step_2"}
    over = {"trainer__nnodes": 2, "trainer__save_freq": 2, "trainer__total_training_steps": 1000, **saved}
    over |= {"actor_rollout_ref__rollout__mode": "async", "trainer__default_local_dir": tmp_path / "over"}
    words = overrides(make_task(tmp_path / "task"), **SHARED, **over)
    log = tmp_path / "log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
        run = subprocess.Popen(command, env=cluster, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "step:4 " not in log.read_text():
                assert run.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
            address = nodes.list_all_nodes()[-1].node_ip_address
            nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
            assert run.wait(timeout=120) == ExitCode.WORKER
        finally:
            run.kill()
    said = log.read_text()
    assert "2 of 1000 steps are done; actor: saved by 3 ranks, read by 2" in said
    assert re.search(rf"its node was lost, {address} \(.*raylet", said) or "Ray gave up its node" in said, said[-3000:]


def test_a_clock_that_is_off_is_named():
    assert clock_finding({"a": 0.001, "b": -0.002, "c": 0.0}).verdict == "ok"
    found = clock_finding({"a": 0.0, "b": 3.0, "c": 0.1})
    assert found.verdict == "FAIL" and "b +2.9 s" in found.text and "a" not in found.text.split("from")[0]
