"""Several Ray nodes, on this machine: `verl cluster check` looks at them, and a run uses them."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support.runs import make_task, overrides, read_metrics, run_job
from verl.cluster import _Check, _parser, clock_finding
from verl.utils.exit_codes import ExitCode

ADDRESSES = ["127.0.0.2", "127.0.0.3"]
"""Of the nodes beside the head; all of 127.0.0.0/8 is this machine."""

_CLONE_NEWNS, _CLONE_FS, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x20000, 0x200, 0x1000, 0x4000, 1 << 18


def with_disk(disk, place, call):
    """Result of ``call`` in a thread that finds the folder ``disk`` at ``place``, as all processes it starts do."""
    libc = ctypes.CDLL(None, use_errno=True)

    def done(result):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def run():
        done(libc.unshare(_CLONE_NEWNS | _CLONE_FS))
        done(libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))
        done(libc.mount(bytes(disk), bytes(place), None, _MS_BIND, None))
        return call()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


class Disks:
    """A folder for each node, all under one name; without the right to mount, that name is one folder for all."""

    def __init__(self, folder):
        self.folder, self.place = folder, folder / "place"
        self.place.mkdir()
        try:
            with_disk(self.place, self.place, lambda: None)
            self.are_apart = True
        except OSError:
            self.are_apart = False

    def of(self, address):
        disk = self.folder / address
        disk.mkdir(exist_ok=True)
        return disk

    def call(self, address, call):
        return with_disk(self.of(address), self.place, call) if self.are_apart else call()


@pytest.fixture(scope="module")
def disks(tmp_path_factory):
    return Disks(tmp_path_factory.mktemp("disks"))


@pytest.fixture(scope="module")
def nodes(disks):
    """A cluster of two nodes, on one of which the driver is; each has a disk of its own at ``disks.place``."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_AUTH_MODE"] = "disabled"
    head = {"num_cpus": 1, "include_dashboard": False}
    # handlers of signals are for the main thread alone
    options = {"initialize_head": True, "head_node_args": head, "shutdown_at_exit": False}
    nodes = disks.call("head", lambda: Cluster(**options))
    try:
        disks.call(ADDRESSES[0], lambda: nodes.add_node(num_cpus=1, node_ip_address=ADDRESSES[0]))
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
    command += ["--gpus-per-node", "1", "--folder", str(tmp_path), "--shared", "--disk-MiB", "8"]
    done = subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1 and done.stdout.startswith("["), done.stderr[-2000:]
    found = {one["what"]: one for one in json.loads(done.stdout)}
    assert {what for what, one in found.items() if one["verdict"] == "FAIL"} == {"nodes", "GPUs"}
    assert "2 alive, --nodes=3 asked for" in found["nodes"]["text"]
    assert "has 0, --gpus-per-node=1" in found["GPUs"]["text"]
    assert "torch 2." in found["versions"]["text"]
    assert "one folder for all nodes" in found["folder"]["text"] and not list(tmp_path.iterdir())
    assert found["rollout hf"]["text"].startswith("on every node: ") and "synced" in found["rollout hf"]["text"]
    assert re.search(r"8 MiB with fsync: \S+ \d+ MB/s, \S+ \d+ MB/s", found["write"]["text"])
    assert "...   all-reduce over 2 nodes by gloo" in done.stderr
    assert re.search(r"gloo, 4 MiB over 2 nodes: [\d.]+ GB/s a node, exact", found["all-reduce"]["text"])


@pytest.mark.ray
def test_a_node_that_dies_while_it_is_looked_at_is_named_and_the_others_go_on(nodes, disks, cluster, tmp_path):
    lost = add_third(nodes, disks)
    command = [sys.executable, "-m", "verl", "cluster", "check", "--MiB", "1", "--disk-MiB", "0", "--engine", "none"]
    command += ["--folder", str(tmp_path), "--timeout", "15"]
    with (tmp_path / "errors").open("w") as errors:
        check = subprocess.Popen(command, env=cluster, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            for line in check.stdout:
                if "/dev/shm" in line:  # a line is there as soon as it is known: clocks and all that follows are not
                    break
            nodes.remove_node(lost, allow_graceful=False)
            said = check.communicate(timeout=200)[0]
        finally:
            check.kill()
    assert check.returncode == 1 and "Traceback" not in (tmp_path / "errors").read_text()
    failed = [line for line in said.splitlines() if line.startswith("FAIL")]
    assert any(ADDRESSES[1] in line for line in failed), said


def add_third(nodes, disks):
    return disks.call(ADDRESSES[1], lambda: nodes.add_node(num_cpus=1, node_ip_address=ADDRESSES[1]))


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


# as the command, with little patience
IMPATIENT = """
from verl.single_controller.ray import pools
from verl.trainer.main_ppo import main
pools._PLACEMENT_PATIENCE_S = 3
main()
"""


@pytest.fixture(scope="module")
def trained(nodes, disks, tmp_path_factory):
    """Folder of a run of two steps over three nodes, of which one came late and has left the cluster since."""
    folder = tmp_path_factory.mktemp("over_three")
    spread = {"trainer__nnodes": 3, "trainer__logger": "[file]", "trainer__save_freq": 2}
    restarts = {"trainer__max_restarts": 6, "trainer__restart_wait": 1}
    words = overrides(make_task(folder), **SHARED, **spread, **restarts, trainer__total_training_steps=2)
    env = {**os.environ, "RAY_ADDRESS": nodes.address, "RAY_USAGE_STATS_ENABLED": "0"}
    log, third = folder / "log", None
    with log.open("w") as output:
        run = subprocess.Popen([sys.executable, "-c", IMPATIENT, *words], env=env, stdout=output, stderr=output)
        try:
            while "; restart 1 of 6" not in log.read_text():
                assert run.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
            third = add_third(nodes, disks)
            code = run.wait(timeout=300)
        finally:
            run.kill()
            if third is not None:
                nodes.remove_node(third)
    assert code == 0, log.read_text()[-3000:]
    return folder


@pytest.mark.ray
def test_a_run_says_for_which_nodes_it_waits_and_is_started_again_until_they_are_there(trained, nodes):
    said = (trained / "log").read_text()
    present = ", ".join(sorted([nodes.head_node.node_ip_address, ADDRESSES[0]]))
    assert "waiting for nodes: resource pool [1, 1, 1] (processes by node) needs CPU: 3; the cluster has CPU: 2" in said
    assert f" on 2 nodes ({present}), and" in said and "and 2 of 3 processes have a place there" in said
    assert f"exit code {int(ExitCode.WORKER)}: " in said and "Start Ray on the nodes that are missing" in said
    assert "for lack of nodes; restart 1 of 6 from where it began" in said


@pytest.mark.ray
def test_a_run_over_three_nodes_gives_the_numbers_of_one(trained, tmp_path):
    local = {**SHARED, "trainer__controller": "local", "trainer__n_gpus_per_node": 3}
    together = run_job(overrides(make_task(tmp_path / "one"), **local, trainer__total_training_steps=2))
    (file,) = trained.rglob("metrics.jsonl")
    last = read_metrics(file)[-1]["data"]
    for name in ("actor/grad_norm", "actor/pg_loss", "response_length/mean"):
        # two nodes hold replicas, one node slices: gradients are summed in another order
        assert last[name] == pytest.approx(together.metrics[name], rel=1e-5, abs=1e-7), name


def node_that_listens(port):
    """Address of the node, by its raylet, below which a process listens at ``port``."""
    listening = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    words = [word for one in listening for parent in psutil.Process(one.pid).parents() for word in parent.cmdline()]
    return next((word.partition("=")[2] for word in words if word.startswith("--node_ip_address=")), None)


@pytest.mark.ray
def test_a_run_goes_on_over_two_nodes_each_with_a_disk_and_a_server_and_again_when_one_that_died_is_back(
    trained, nodes, disks, cluster, tmp_path
):
    run, log, address = disks.place / "run", tmp_path / "log", ADDRESSES[0]
    saved = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": trained / "run/global_step_2"}
    over = {"trainer__nnodes": 2, "trainer__save_freq": 2, "trainer__total_training_steps": 1000, **saved}
    over |= {"actor_rollout_ref__rollout__mode": "async", "trainer__default_local_dir": run}
    over |= {"trainer__max_restarts": 1, "trainer__restart_wait": 0.5}
    words = overrides(make_task(tmp_path / "task"), **SHARED, **over)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]

    def wait_for(pattern):
        while not (found := re.search(pattern, log.read_text())):
            assert driver.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        return found

    with log.open("w") as output:
        driver = disks.call("head", partial(subprocess.Popen, command, env=cluster, stdout=output, stderr=output))
        try:
            wait_for("step:5 ")
            folder = disks.of("head") if disks.are_apart else disks.place
            servers = json.loads(next(folder.glob("run/rollout_servers.json")).read_text())["base_urls"]
            served = {urlsplit(url).hostname: node_that_listens(urlsplit(url).port) for url in servers}
            assert served == {node.node_ip_address: node.node_ip_address for node in nodes.list_all_nodes()}, servers
            if disks.are_apart:
                places = {address: address, nodes.head_node.node_ip_address: "head"}
                for rank, (_, place) in enumerate(sorted(places.items())):  # ranks by the addresses of their nodes
                    files = [path.name for path in (disks.of(place) / "run/global_step_4").rglob("*rank_*.pt")]
                    assert len(files) == 3 and all(name.endswith(f"_2_rank_{rank}.pt") for name in files), files
            nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
            wait_for("restart 1 of 1 from its newest checkpoint")
            disks.call(address, lambda: nodes.add_node(num_cpus=1, node_ip_address=address))
            step = int(wait_for(rf"resumed from {run}/global_step_(\d+): ")[1])
            wait_for(f"step:{step + 1} ")
            driver.send_signal(signal.SIGTERM)
            assert driver.wait(timeout=120) == ExitCode.STOPPED_EARLY
        finally:
            driver.kill()
    said = log.read_text()
    assert "2 of 1000 steps are done; actor: saved by 3 ranks, read by 2" in said
    assert re.search(rf"its node was lost, {address} \(.*raylet", said) or "Ray gave up its node" in said, said[-3000:]
    assert f"the run ended with exit code {int(ExitCode.WORKER)} in step" in said


def check_of(monkeypatch, nodes, *words):
    """The check of a cluster whose nodes have so many CPUs and GPUs, by address."""
    import ray

    alive = [
        {"Alive": True, "NodeID": address, "NodeManagerAddress": address, "Resources": {"CPU": cpus, "GPU": gpus}}
        for address, (cpus, gpus) in nodes.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    return _Check(_parser().parse_args(["check", *words]), lambda text: None)


@pytest.mark.ray
def test_a_head_that_has_the_driver_alone_is_no_node_of_a_run(monkeypatch):
    nodes = {"head": (0.0, 0.0), "a": (64.0, 8.0), "b": (64.0, 8.0)}
    words = ("--device", "cuda", "--nodes", "2", "--gpus-per-node", "8")
    check = check_of(monkeypatch, nodes, *words)
    counted, left_out = check._count()
    assert list(check.nodes) == ["a", "b"] and (counted.verdict, left_out.verdict) == ("ok", "note")
    assert left_out.text.startswith("head: not counted")
    nodes["b"] = (64.0, 0.0)  # its GPUs are not there
    found = list(check_of(monkeypatch, nodes, *words)._count())
    assert [one.what for one in found if one.verdict == "FAIL"] == ["nodes", "GPUs"]
    assert "b has 0, --gpus-per-node=8" in found[-1].text and "head has" not in found[-1].text
    [none, _] = check_of(monkeypatch, {"head": (0.0, 0.0)}, "--device", "cpu")._count()
    assert none.verdict == "FAIL" and "0 alive, one at least asked for" in none.text


@pytest.mark.ray
def test_what_no_node_answers_is_not_called_equal(monkeypatch, tmp_path):
    check = check_of(monkeypatch, {"a": (1.0, 0.0), "b": (1.0, 0.0)}, "--device", "cpu", "--folder", str(tmp_path))
    monkeypatch.setattr(check, "ask", lambda *arguments: ({}, {"a": "no answer", "b": "no answer"}))
    assert [finding.verdict for finding in check._look()] == ["FAIL", "FAIL"]
    check.probes = {"b": None}
    [left] = check._reduce()
    assert left.text == "not tried: of 2 nodes one is left"


@pytest.mark.ray
def test_a_pool_waits_whole_seconds_for_its_place(monkeypatch):
    from verl.single_controller.ray import pools

    waits, clock = [], [0.0]

    class Group:
        bundle_count = 1

        def wait(self, seconds):
            waits.append(int(seconds))  # as Ray
            clock[0] += waits[-1] or 0.125

    for name, value in {"cluster_resources": dict, "nodes": list, "is_initialized": bool}.items():
        monkeypatch.setattr(pools.ray, name, value)
    monkeypatch.setattr(pools, "placement_group_table", lambda group: {"state": "PENDING"})
    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pools, "_OWN_CLUSTER_PATIENCE_S", 2.5)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="needs CPU: 1"):
        pools._wait_for_placement(pools.RayResourcePool([1]), [Group()], "cpu")
    assert waits[1:] == [1, 1, 1]


def test_a_clock_that_is_off_is_named():
    assert clock_finding({"a": 0.001, "b": -0.002, "c": 0.0}).verdict == "ok"
    found = clock_finding({"a": 0.0, "b": 3.0, "c": 0.1})
    assert found.verdict == "FAIL" and "b +2.9 s" in found.text and "a" not in found.text.split("from")[0]
