"""Numbers of the kernel, as it gives them."""

import json
import mmap
import os
import subprocess
from types import SimpleNamespace

import psutil

from verl.telemetry.flight_recorder import anonymous_file
from verl.telemetry.memory import (
    RunMemory,
    free_memory,
    host_memory,
    oom_kills,
    process_state,
    processes_below,
    rss_bytes,
    shared_memory_bytes,
    shown_GiB,
)


def test_resident_memory_is_what_psutil_says():
    assert abs(rss_bytes() - psutil.Process().memory_info().rss) < 8 << 20
    assert rss_bytes(os.getpid()) > 0 and rss_bytes(2**30) == 0


def test_a_machine_has_memory_and_a_count_of_kills():
    assert 1 << 28 < host_memory() <= psutil.virtual_memory().total
    assert oom_kills() >= 0 and shown_GiB(3 * 2**29) == "1.5 GiB"


def test_a_process_has_a_state_while_it_is_there():
    assert process_state(os.getpid()) == "R" and process_state(2**30) is None


def test_a_run_is_this_process_and_all_that_it_started_with_their_shared_memory(tmp_path):
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        fd = anonymous_file()
        try:
            found = []
            while not {"driver", "actor 0", "sleep"} <= {process.name.split(" (")[0] for process in found}:
                found = processes_below(os.getpid(), {shell.pid: "actor 0"})
            assert found[0].pid == os.getpid() and found[0].name == f"driver (pid {os.getpid()})"
            here = psutil.Process().memory_info()
            assert abs(found[0].own - (here.rss - here.shared)) < 8 << 20
            before = shared_memory_bytes([os.getpid()])
            os.ftruncate(fd, 16 << 20)
            with mmap.mmap(fd, 16 << 20) as shared:
                shared.write(b"x" * (16 << 20))
                assert shared_memory_bytes([os.getpid(), os.getpid()]) - before == 16 << 20
            memory = RunMemory(tmp_path / "run" / "memory.jsonl")
            group = SimpleNamespace(pids=[os.getpid(), shell.pid])
            metrics = memory.note(3, {"actor": group, "critic": group, "ref": object()})
            assert (
                f"driver (pid {os.getpid()})" in memory.own_MiB
                and f"actor+critic 1 (pid {shell.pid})" in memory.own_MiB
            )
            assert 0 < metrics["perf/memory_driver_gb"] <= metrics["perf/memory_processes_gb"]
            assert metrics["perf/memory_shared_gb"] > 0
            assert len(memory.own_MiB) >= 3 and memory.free_MiB > 0 and free_memory() < psutil.virtual_memory().total
            [row] = [json.loads(line) for line in memory.path.read_text().splitlines()]
            assert row["step"] == 3 and [p["name"] for p in row["processes"]] == list(memory.own_MiB)
        finally:
            os.close(fd)
            for child in psutil.Process(shell.pid).children():
                child.kill()
            shell.kill()
