"""Where a rank finds its device, decided without one: torch.cuda is made to answer as on a machine with GPUs."""

import subprocess
import sys

import pytest
import torch

from verl.telemetry.metric import get_device_flops
from verl.utils import device as devices
from verl.utils.distributed import is_node_leader


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


def test_a_fork_of_a_process_that_used_cuda_is_refused(gpus, monkeypatch):
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


@pytest.mark.parametrize(
    "built, driver, words",
    [
        (None, None, ["is a build without CUDA", "bash scripts/setup_env.sh", "trainer.device=cpu"]),
        ("13.0", (12, 4), ["driver runs CUDA 12.4", "is built for CUDA 13.0", "580 or newer", "whl/cu126"]),
        ("12.6", (11, 8), ["driver runs CUDA 11.8", "whl/cu118"]),
        ("13.0", (13, 2), ["finds no CUDA device"]),
        ("13.0", None, ["finds no CUDA device"]),
    ],
    ids=["a CPU build", "a driver too old", "a driver older still", "no device", "no NVML"],
)
def test_what_keeps_a_run_from_the_gpu_is_reported_before_it_starts(built, driver, words, monkeypatch):
    from types import SimpleNamespace

    from verl.trainer.ppo.job import check_device

    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(devices, "driver_cuda_version", lambda: driver)
    monkeypatch.setattr(devices, "count_cuda_devices", lambda: 0)
    with pytest.raises(ValueError, match="trainer.device=cuda: ") as refusal:
        check_device(SimpleNamespace(device="cuda", nnodes=1, n_gpus_per_node=1, controller="local"))
    assert all(word in str(refusal.value) for word in words)


def test_a_driver_of_the_same_major_version_is_good_enough(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(devices, "driver_cuda_version", lambda: (13, 0))
    monkeypatch.setattr(devices, "count_cuda_devices", lambda: 1)
    assert devices.cuda_problem() is None


class FakeNVML:
    def __init__(self, version):
        self._version = version

    def nvmlInit_v2(self):
        return 0

    def nvmlShutdown(self):
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, found):
        found._obj.value = self._version
        return 0


@pytest.mark.parametrize("number, expected", [(13000, (13, 0)), (12040, (12, 4)), (11080, (11, 8))])
def test_the_driver_is_asked_for_the_cuda_it_runs(number, expected, monkeypatch):
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: FakeNVML(number))
    assert devices.driver_cuda_version() == expected


COUNTING = """
import os, torch
torch.version.cuda = "13.0"
torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = lambda: -1  # as with MIG slices
parent = os.getpid()

def started():
    assert os.getpid() != parent, "CUDA was started in the driver"
    return 3

torch._C._cuda_getDeviceCount = started
torch.cuda.device_count = started
from verl.utils.device import count_cuda_devices
assert count_cuda_devices() == 3
"""


def test_devices_that_nvml_cannot_count_are_counted_by_a_child():
    done = subprocess.run([sys.executable, "-c", COUNTING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


DRIVER = """
import verl, torch, traceback
from types import SimpleNamespace

def started(*args):
    raise SystemExit("CUDA was started:\\n" + "".join(traceback.format_stack()))

torch.cuda._is_compiled = lambda: True
torch.version.cuda = "13.0"
torch.cuda._device_count_nvml = lambda: 8
torch._C._cuda_getDeviceCount = torch.cuda._lazy_init = started
import verl.trainer.ppo.job as job
import verl.workers.roles
from verl.telemetry.profiler import marked_timer

job.check_device(SimpleNamespace(device="cuda", nnodes=1, n_gpus_per_node=8, controller="local"))
torch.manual_seed(1)
with marked_timer("step", {}):
    pass
assert torch.cuda.is_available() and not torch.cuda.is_initialized()
"""


def test_the_driver_never_starts_cuda():
    done = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
