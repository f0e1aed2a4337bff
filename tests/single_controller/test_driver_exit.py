"""However the driver ends, no process and no shared memory stay behind; what workers print is seen."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_for

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]

DRIVER = r"""
import os, sys, time
from tests.single_controller.fragile import Fragile
from verl.single_controller import get_controller
controller = get_controller(sys.argv[1])
controller.start({"num_cpus": 2, "object_store_memory_mb": 80}, {"OMP_NUM_THREADS": "1"})
group = controller.WorkerGroup(controller.ResourcePool([2]), controller.ClassWithInitArgs(Fragile))
group.take(b"x" * 1_000_000)
group.execute_func_rank_zero(print, "a worker speaks")
group.execute_func_rank_zero(os.system, "echo a worker complains >&2")
# One write that begins a line: Ray prints what its workers say from another thread.
sys.stdout.write("\nREADY " + " ".join(map(str, group.pids)) + "\n")
sys.stdout.flush()
input()
"""

ENDINGS = {
    "normally": ("", 0),
    "by_exception": ("raise RuntimeError('the driver gives up')", 1),
    "by_worker_death": ("group.die(1, 9)", 1),
    "by_worker_exception": ("group.raise_on(1)", 1),
    "in_a_call": ("group.sleep_on(0, 1000)", None),
}


def start_driver(controller: str, ending: str) -> tuple[subprocess.Popen, set[int], set[int]]:
    """Run the driver until its workers are up; returns it, all processes under it, and the ids of its workers."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env.pop("RAY_ADDRESS", None)
    program = DRIVER + ENDINGS[ending][0]
    driver = subprocess.Popen(
        [sys.executable, "-c", program, controller],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    driver.output = []
    for line in driver.stdout:
        driver.output.append(line)
        if line.startswith("READY"):
            started = descendants_of(driver.pid), {int(pid) for pid in line.split()[1:]}
            driver.stdin.write("end\n")
            driver.stdin.flush()
            return driver, *started
    raise AssertionError("".join(driver.output))


def descendants_of(pid: int) -> set[int]:
    """All processes that stem from ``pid``."""
    parents = {}
    for entry in os.scandir("/proc"):
        try:
            stat = Path(entry.path, "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        if stat:
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found, new = set(), {pid}
    while new:
        found |= new
        new = {child for child, parent in parents.items() if parent in new}
    return found - {pid}


def assert_nothing_left(processes: set[int], memory_before: set[str]) -> None:
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in processes), f"the end of all of {processes}")
    wait_for(lambda: shared_memory() <= memory_before, "its shared memory to be gone")


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def end_of(driver: subprocess.Popen) -> str:
    text, _ = driver.communicate(timeout=60)
    return "".join(driver.output) + text


@pytest.mark.parametrize("ending", ["normally", "by_exception", "by_worker_exception", "by_worker_death"])
def test_local_driver_leaves_nothing_behind(ending):
    before = shared_memory()
    driver, processes, _ = start_driver("local", ending)
    text = end_of(driver)
    assert driver.returncode == ENDINGS[ending][1], text
    assert_nothing_left(processes, before)
    assert "a worker speaks" in text and "a worker complains" in text
    if ending == "by_worker_death":
        assert "WorkerDied: Rank 1 of 2 died while running Fragile.die" in text and "SIGKILL" in text
    if ending == "by_worker_exception":
        assert "Fragile.raise_on failed on rank 1 of 2: ValueError: rank 1 found no rows" in text


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_local_driver_that_is_killed_takes_its_workers_along(sent):
    before = shared_memory()
    driver, processes, _ = start_driver("local", "in_a_call")
    driver.send_signal(sent)
    end_of(driver)
    assert driver.returncode != 0
    assert_nothing_left(processes, before)


@pytest.mark.ray
def test_ray_driver_leaves_nothing_behind_after_a_death():
    before = shared_memory()
    driver, processes, _ = start_driver("ray", "by_worker_death")
    text = end_of(driver)
    assert driver.returncode == 1
    assert_nothing_left(processes, before)
    assert "a worker speaks" in text and "a worker complains" in text
    assert "WorkerDied: Rank 1 of 2 died while running Fragile.die" in text and "SIGKILL" in text


@pytest.mark.ray
def test_a_ray_driver_that_is_killed_takes_its_workers_along():
    before = shared_memory()
    driver, processes, _ = start_driver("ray", "in_a_call")
    driver.send_signal(signal.SIGKILL)
    end_of(driver)
    assert driver.returncode != 0
    assert_nothing_left(processes, before)
