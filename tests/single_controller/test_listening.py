"""What a run listens on: loopback alone, where it has one machine; and Ray takes no calls without the run's token."""

import os
import socket
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import free_port
from verl.utils.distributed import ensure_process_group
from verl.utils.py_functional import is_loopback


class Member(Worker):
    """One rank of a process group."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self):
        """The sum over the ranks, and the addresses this process listens on."""
        ensure_process_group("cpu", timeout_s=60)
        total = torch.ones(1)
        dist.all_reduce(total)
        return int(total), sorted(listening(psutil.Process()))


def listening(process):
    """Addresses on which a process accepts TCP connections."""
    found = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return [address.removeprefix("::ffff:") for address in found]


def test_the_store_and_the_connections_of_a_process_group_listen_on_loopback(start):
    answers = start(Member, 2).meet()
    assert [total for total, _ in answers] == [2, 2]
    addresses = [address for _, found in answers for address in found]
    assert len(addresses) >= 3, "a store, and each rank's connections"
    assert not [address for address in addresses if not is_loopback(address)]


@pytest.mark.ray
def test_all_processes_of_ray_listen_on_loopback(ray_controller):
    me = psutil.Process()
    found = {(p.name(), address) for p in [me, *me.children(recursive=True)] for address in listening(p)}
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}
    assert not [entry for entry in found if not is_loopback(entry[1])]


@pytest.mark.ray
def test_rays_dashboard_is_asked_for_on_loopback(monkeypatch):
    from verl.single_controller.ray import cluster

    asked = {}
    monkeypatch.setattr(cluster, "init_ray", asked.update)
    monkeypatch.setattr(cluster, "_close_to_others", lambda: None)
    cluster.start_own_cluster({"include_dashboard": True}, {})
    assert asked["include_dashboard"] is True and asked["dashboard_host"] == "127.0.0.1"


@pytest.mark.ray
def test_ray_refuses_who_does_not_have_the_token_of_the_run(ray_controller):
    import ray

    address = ray.get_runtime_context().gcs_address
    assert address.startswith("127.0.0.1:") and len(os.environ["RAY_AUTH_TOKEN"]) >= 32
    program = f"from ray._raylet import GcsClient\nprint('inside', GcsClient(address={address!r}).cluster_id and 'yes')"
    for token, is_inside in (("0" * 64, False), (os.environ["RAY_AUTH_TOKEN"], True)):
        env = {**os.environ, "RAY_AUTH_TOKEN": token, "RAY_NUM_REDIS_GET_RETRIES": "1"}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
        assert ("inside yes" in done.stdout) == is_inside, done.stderr
        assert ("InvalidAuthToken" in done.stderr) != is_inside, done.stderr


def test_a_free_port_stays_free_until_its_server_comes():
    port = free_port()
    with pytest.raises(OSError, match="in use"), socket.socket() as other:
        other.bind(("127.0.0.1", port))  # as a process that does not know of it
    with socket.create_server(("127.0.0.1", port)) as server:
        assert server.getsockname()[1] == port
