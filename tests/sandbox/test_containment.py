"""What a generated program cannot reach, however it is called; where that cannot be promised it is not run."""

import os
import socket
import subprocess
import sys

import pytest

from tests.sandbox.test_supervisor import IN_OWN_NAMESPACE
from verl.sandbox.code_runner import Tests, run_tests
from verl.sandbox.containment import PROMISES, Uncontained, containment, landlock_version

pytestmark = pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")

ATTACKS = {
    "kills everything": f"{IN_OWN_NAMESPACE}\nos.kill(-1, 9)",
    "reads the data": "open({secret!r}).read()",
    "lists a folder": "import os\nos.listdir(os.path.dirname({secret!r}))",
    "writes elsewhere": "open({secret!r} + '.new', 'w')",
    "removes a file": "import os\nos.remove({secret!r})",
    "takes rights away": "import os\nos.chmod({secret!r}, 0)",
    "truncates a file": "import os\nos.truncate({secret!r}, 0)",
    "calls a server": "import socket\nsocket.socket(socket.AF_UNIX).connect({server!r})",
    "calls a server without a file": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0verl-{pid}')",
    "calls the network": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)",
    "reads the environment of init": "print(open('/proc/1/environ', 'rb').read().index(b'PWD'))",
    "gets a namespace": "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise OSError",
    "starts another that reads": "import subprocess\nsubprocess.run(['cat', {secret!r}], check=True)",
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    secret, server = folder / "train.parquet", folder / "server"
    secret.write_text("the ground truth")
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other, socket.socket() as third:
        one.bind(str(server))
        other.bind(f"\0verl-{os.getpid()}")
        third.bind(("127.0.0.1", 0))
        for listener in (one, other, third):
            listener.listen()
        yield {"secret": str(secret), "server": str(server), "port": third.getsockname()[1], "pid": os.getpid()}
        assert secret.read_text() == "the ground truth" and secret.stat().st_mode & 0o777
        assert sorted(os.listdir(folder)) == ["server", "train.parquet"]


@pytest.mark.parametrize("name", ATTACKS)
def test_a_program_reaches_nothing_but_its_own(name, targets):
    code = ATTACKS[name].format(**targets) + "\nprint('reached')"
    [result] = run_tests(code, Tests(("",), ("reached",)))
    assert result.outcome.value == "crash", result


def test_a_program_has_a_folder_packages_processes_and_shared_memory_of_its_own():
    code = (
        "import os, subprocess, tempfile, threading, multiprocessing\n"
        "open('a', 'w').write('1'); tempfile.mkstemp(); multiprocessing.Lock()\n"
        "import numpy, decimal\n"
        "subprocess.run(['true'], check=True); threading.Thread(target=print).start()\n"
        "print(open('a').read(), sorted(os.listdir('/dev/shm')))"
    )
    [result] = run_tests(code, Tests(("",), ("\n1 []",)))
    assert result.outcome.value == "passed", result


PATCHED = """
import sys
from verl.sandbox import containment, program_runs, supervisor
from verl.sandbox.supervisor import Limits
from dataclasses import asdict
supervisor.leave_namespaces = lambda *_: (False, False, False)
if "without" in sys.argv:
    containment._restrict_files = lambda *_: 0
    containment._restrict_calls = lambda *_, **__: False
limits = asdict(Limits(wall_s=10, memory_mb=512, processes=16, network=False))
code = "import os\\ntry:\\n    os.kill(os.getppid(), 0)\\nexcept OSError:\\n    print('kept')"
checks = [{"source": "assert f() == 'kept'"}]
[found] = program_runs.run(code, [{"stdin": ""}], limits, 64, 10.0, "allowed" in sys.argv)
[judged] = program_runs.run("def f(): return 'kept'", checks, limits, 64, 10.0, "allowed" in sys.argv)
print(found["outcome"], judged["outcome"], found["output"].strip(), *found["missing"])
"""


@pytest.mark.parametrize(
    "options, words",
    [
        ((), "done done kept"),
        (("without",), "uncontained uncontained signals network sockets files"),
        (("without", "allowed"), "done done signals network sockets files"),
    ],
)
def test_without_namespaces_a_program_is_contained_all_the_same_and_without_anything_it_is_refused(options, words):
    line = [sys.executable, "-c", PATCHED, *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == words.split(), done.stderr


def test_a_refusal_says_what_is_missing_and_the_way_out():
    assert set(containment()) <= set(PROMISES)
    text = str(Uncontained(["files"]))
    assert "files (it cannot read or write files" in text and "allow_uncontained_code=true" in text
