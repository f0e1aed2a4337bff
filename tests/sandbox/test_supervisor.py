"""What a program can do to its limits, and what is left of it afterwards."""

import os
import subprocess
import sys
import time

import pytest

from verl.sandbox.supervisor import Ending, Limits, can_cut_network, command, end, how_ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits of Linux")
TIGHT = Limits(wall_s=20, cpu_s=15, memory_mb=256, output_mb=1, processes=6)
MARK = f"verl-limits-test-{os.getpid()}"  # of this process: other tests may run the same programs at the same time


def start(code: str, limits: Limits = TIGHT, mark: str = MARK, bare: bool = False) -> subprocess.Popen:
    """``bare``: as on a kernel that grants no namespaces."""
    line = command(limits, [sys.executable, "-I", "-S", "-c", code, mark])
    if bare:
        line[4] = line[4].replace("launch()", "limits.leave_namespaces = lambda network: (False,) * 3; limits.launch()")
        line[4] = line[4].replace("verl.sandbox.supervisor import launch", "verl.sandbox import limits")
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(code: str, limits: Limits = TIGHT, bare: bool = False) -> tuple[Ending, str]:
    process = start(code, limits, bare=bare)
    output, _ = process.communicate(timeout=30)
    return how_ended(process.returncode), output


def running(mark: str) -> list[str]:
    """Command lines of living processes that carry a mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                line = file.read()
        except OSError:
            continue
        found += [line] * (f"\0{mark}\0" in line)
    return found


@pytest.mark.parametrize(
    ("code", "ending", "told"),
    [
        ("print(1)", Ending.DONE, "1"),
        ("raise SystemExit(3)", Ending.EXIT, ""),
        ("import ctypes; ctypes.string_at(0)", Ending.CRASH, ""),
        ("import os; os.abort()", Ending.CRASH, ""),
        ("import os; os.kill(os.getpid(), 9)", Ending.CRASH, ""),
        ("import os; os.killpg(0, 9)", Ending.CRASH, ""),
        ("x = bytearray(1 << 30)", Ending.EXIT, "MemoryError"),
        ("import mmap; m = mmap.mmap(-1, 1 << 29)\nfor i in range(0, 1 << 29, 4096): m[i] = 1", Ending.MEMORY, ""),
        ("open('/tmp/verl-limits-test', 'wb').write(b'x' * (3 << 20))", Ending.EXIT, "File too large"),
    ],
)
def test_a_program_ends_as_its_deed_says(code, ending, told):
    try:
        how, output = run(code)
    finally:
        if os.path.exists("/tmp/verl-limits-test"):
            os.remove("/tmp/verl-limits-test")
    assert (how, told in output) == (ending, True), output
    assert not running(MARK)


def test_time_is_up_by_the_clock_or_by_the_processor():
    assert run("import time; time.sleep(60)", Limits(wall_s=0.5))[0] is Ending.WALL
    assert run("while True: pass", Limits(wall_s=25, cpu_s=1))[0] is Ending.CPU


@pytest.mark.parametrize("bare", [False, True])
def test_what_was_started_ends_with_the_program_wherever_it_hides(bare):
    hide = "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(60)\n os._exit(0)\n"
    ending, output = run(hide + "os.wait()", bare=bare)
    assert ending is Ending.DONE
    assert ("not grant a process namespace" in output) >= bare
    assert not running(MARK)


@pytest.mark.parametrize("bare", [False, True])
def test_a_fork_bomb_is_put_out(bare):
    assert run("import os\nwhile True: os.fork()", bare=bare)[0] is Ending.PROCESSES
    assert not running(MARK)


def test_end_kills_a_program_and_what_it_started():
    process = start("import os, time\nos.fork(); os.fork(); print('up', flush=True); time.sleep(60)", mark="verl-end")
    for _ in range(4):
        process.stdout.readline()
    assert len(running("verl-end")) >= 4
    assert end(process) == -9
    deadline = time.monotonic() + 5
    while running("verl-end") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running("verl-end")


def test_a_program_dies_with_who_started_it():
    seconds = f"61.{os.getpid()}"
    middle = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen({command(TIGHT, ['sleep', seconds])!r})\n"
        "print('started', flush=True); sys.stdin.readline()"
    )
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", middle], **how) as starter:
        starter.stdout.readline()
        deadline = time.monotonic() + 20
        while not any(line.startswith("sleep") for line in running(seconds)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert running(seconds)
        starter.kill()
    deadline = time.monotonic() + 5
    while running(seconds) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not running(seconds)


@pytest.mark.skipif(not can_cut_network(), reason="this kernel grants no network namespace")
def test_without_network_not_even_the_machine_itself_is_reached():
    code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n" + (
        "c = socket.create_connection(s.getsockname(), 2); print('reached')"
    )
    assert run(code)[1] == "reached\n"
    ending, output = run(code, Limits(wall_s=20, network=False))
    assert ending is Ending.EXIT and "unreachable" in output
