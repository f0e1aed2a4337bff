"""What a program can do to its limits, and what is left of it afterwards."""

import os
import subprocess
import sys

import pytest

from tests.support.waiting import wait_for
from verl.sandbox.outcomes import Outcome
from verl.sandbox.supervisor import Limits, can_cut_network, command, end, outcome_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the limits of Linux")
TIGHT = Limits(wall_s=20, cpu_s=15, memory_mb=256, output_mb=1, processes=6)
MARK = f"verl-limits-test-{os.getpid()}"  # of this process: other tests may run the same programs at the same time

IN_OWN_NAMESPACE = f"import os; assert os.readlink('/proc/self/ns/pid') != {os.readlink('/proc/self/ns/pid')!r}"
"""Before a signal to more than one process."""


FILLS_MEMORY = """import mmap, time
m = mmap.mmap(-1, 1 << 29)
for i in range(0, 1 << 29, 4096):
    m[i] = 1
time.sleep(15)"""  # of a program that ends sooner, nothing may have been measured


def start(code: str, limits: Limits = TIGHT, mark: str = MARK, bare: bool = False) -> subprocess.Popen:
    """``bare``: as on a kernel that grants no namespaces."""
    line = command(limits, [sys.executable, "-I", "-S", "-c", code, mark])
    if bare:
        line[4] = line[4].replace(
            "launch()", "supervisor.leave_namespaces = lambda *_: (False,) * 3; supervisor.launch()"
        )
        line[4] = line[4].replace("verl.sandbox.supervisor import launch", "verl.sandbox import supervisor")
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(code: str, limits: Limits = TIGHT, bare: bool = False) -> tuple[Outcome, str]:
    process = start(code, limits, bare=bare)
    output, _ = process.communicate(timeout=30)
    return outcome_of(process.returncode), output


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
    ("code", "outcome", "message"),
    [
        ("print(1)", Outcome.DONE, "1"),
        ("raise SystemExit(3)", Outcome.EXIT, ""),
        ("import ctypes; ctypes.string_at(0)", Outcome.CRASH, ""),
        ("import os; os.abort()", Outcome.CRASH, ""),
        ("import os; os.kill(os.getpid(), 9)", Outcome.CRASH, ""),
        (f"{IN_OWN_NAMESPACE}; os.killpg(0, 9)", Outcome.CRASH, ""),
        ("x = bytearray(1 << 30)", Outcome.EXIT, "MemoryError"),
        (FILLS_MEMORY, Outcome.MEMORY, ""),
        ("open('/tmp/verl-limits-test', 'wb').write(b'x' * (3 << 20))", Outcome.EXIT, "File too large"),
    ],
)
def test_a_program_has_the_outcome_of_what_it_does(code, outcome, message):
    try:
        how, output = run(code)
    finally:
        if os.path.exists("/tmp/verl-limits-test"):
            os.remove("/tmp/verl-limits-test")
    assert (how, message in output) == (outcome, True), output
    assert not running(MARK)


def test_time_is_up_by_the_clock_or_by_the_processor():
    assert run("import time; time.sleep(60)", Limits(wall_s=0.5))[0] is Outcome.TIMEOUT
    assert run("while True: pass", Limits(wall_s=25, cpu_s=1))[0] is Outcome.CPU


@pytest.mark.parametrize("bare", [False, True])
def test_what_was_started_ends_with_the_program_wherever_it_hides(bare):
    hide = "import os, time\nif not os.fork():\n os.setsid()\n if not os.fork(): time.sleep(60)\n os._exit(0)\n"
    outcome, output = run(hide + "os.wait()", bare=bare)
    assert outcome is Outcome.DONE
    assert ("not grant a process namespace" in output) >= bare
    assert not running(MARK)


@pytest.mark.parametrize("bare", [False, True])
def test_a_fork_bomb_is_put_out(bare):
    assert run("import os\nwhile True: os.fork()", bare=bare)[0] is Outcome.PROCESSES
    assert not running(MARK)


def test_end_kills_a_program_and_what_it_started():
    process = start("import os, time\nos.fork(); os.fork(); print('up', flush=True); time.sleep(60)", mark="verl-end")
    for _ in range(4):
        process.stdout.readline()
    assert len(running("verl-end")) >= 4
    assert end(process) == -9
    wait_for(lambda: not running("verl-end"), "the program to be gone")


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
        wait_for(lambda: any(line.startswith("sleep") for line in running(seconds)), "the program to start")
        starter.kill()
    wait_for(lambda: not running(seconds), "the program to be gone")


@pytest.mark.skipif(not can_cut_network(), reason="this kernel grants no network namespace")
def test_without_network_not_even_the_machine_itself_is_reached():
    code = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()\n" + (
        "c = socket.create_connection(s.getsockname(), 2); print('reached')"
    )
    assert run(code)[1] == "reached\n"
    outcome, output = run(code, Limits(wall_s=20, network=False))
    assert outcome is Outcome.EXIT and "unreachable" in output
