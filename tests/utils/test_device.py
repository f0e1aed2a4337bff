"""Where a rank finds its device, decided without one: torch.cuda is made to answer as on a machine with GPUs."""

import subprocess
import sys

import pytest
import torch

from verl.utils import device as devices
from verl.utils.distributed import is_node_leader
from verl.utils.flops_counter import get_device_flops


@pytest.fixture
def gpus(monkeypatch):
    """Call it with a number of visible GPUs; returns the list of devices made current."""
    made_current: list[int] = []

    def see(count):
        monkeypatch.setattr(devices, "is_cuda_available", count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
        return made_current

    return see


@pytest.mark.parametrize("visible, local_rank, expected", [(8, 5, 5), (1, 0, 0), (1, 5, 0)])
def test_a_rank_takes_the_device_of_its_number_or_the_only_one(gpus, monkeypatch, visible, local_rank, expected):
    made_current = gpus(visible)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    assert devices.current_device("cuda") == torch.device("cuda", expected)
    assert made_current == [expected]


def test_more_ranks_than_devices_are_refused(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="torch sees 2 CUDA devices.*lower trainer.n_gpus_per_node"):
        devices.current_device("cuda")


def test_a_fork_of_a_process_that_used_cuda_is_told_so(gpus, monkeypatch):
    gpus(1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="forked from one that had started CUDA.*trainer.controller=ray"):
        devices.current_device("cuda")


def test_one_process_of_a_node_leads_where_each_sees_one_device(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_RANK", "1")
    assert not is_node_leader()
    monkeypatch.setenv("RAY_LOCAL_RANK", "0")
    assert is_node_leader()


def test_a_run_on_cpu_promises_no_gpu_speed(monkeypatch):
    monkeypatch.setattr(devices, "is_cuda_available", True)
    assert get_device_flops(device="cpu") == float("inf")


DRIVER = """
import verl, torch, traceback
from types import SimpleNamespace

def started(*args):
    raise SystemExit("CUDA was started:\\n" + "".join(traceback.format_stack()))

torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: 8
torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = started
import verl.trainer.ppo.job as job
import verl.workers.roles
from verl.utils.profiler import marked_timer

job.check_device(SimpleNamespace(device="cuda", nnodes=1, n_gpus_per_node=8, controller="local"))
torch.manual_seed(1)
with marked_timer("step", {}):
    pass
assert torch.cuda.is_available() and not torch.cuda.is_initialized()
"""


def test_the_driver_never_starts_cuda():
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
