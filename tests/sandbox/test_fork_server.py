"""Calls that can be killed: what a call does to itself has a name, and the next call works."""

import os
import sys
import threading

import pytest

from verl.sandbox.fork_server import ForkServer
from verl.sandbox.outcomes import SandboxError

BAD = """
import os, sys, time
STARTED = time.time()

def act(what):
    if what == "hang":
        while True:
            pass
    if what == "sleep":
        time.sleep(60)
    if what == "nap":
        time.sleep(1.5)
    if what == "memory":
        return len(bytearray(4 << 30))
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(3)
    if what == "raise":
        raise ValueError("no")
    if what == "print":
        print("not a reply", flush=True)
        os.write(1, b"nor this")
    if what == "keys":
        return sorted(os.environ)
    if what == "network":
        import socket
        socket.create_connection(("127.0.0.1", 9), 1)
    return [what, STARTED]
"""


@pytest.fixture(scope="module")
def act(tmp_path_factory):
    folder = tmp_path_factory.mktemp("module")
    (folder / "helpers.py").write_text(BAD)
    sys.path.insert(0, str(folder))
    os.environ["A_SECRET"] = "key"
    served = ForkServer("helpers:act", timeout_s=1.0, memory_mb=512)
    yield served
    served.close()
    sys.path.remove(str(folder))
    del os.environ["A_SECRET"]


@pytest.mark.parametrize(
    "what, outcome",
    [
        ("hang", "timeout"),
        ("sleep", "timeout"),
        ("memory", "memory"),
        ("exit", "crash"),
        ("sys.exit", "raised"),
        ("raise", "raised"),
        ("network", "raised"),
    ],
)
def test_an_outcome_has_a_name_and_the_next_call_works_without_a_new_import(act, what, outcome):
    started = act("ok")[1]
    with pytest.raises(SandboxError) as error:
        act(what)
    assert error.value.failure.kind == outcome
    assert act("ok") == ["ok", started]


def test_what_a_function_prints_is_no_reply(act):
    assert act("print")[0] == "print"


def test_a_child_sees_no_secrets(act):
    assert "A_SECRET" not in act("keys")


def test_a_killed_child_is_replaced(act):
    act("ok")
    act._popen.kill()
    act._popen.wait()
    assert act("ok")[0] == "ok"


def test_a_call_may_have_a_limit_of_its_own(act):
    with pytest.raises(SandboxError) as error:
        act("nap")
    assert error.value.failure.kind == "timeout"
    assert act("nap", timeout_s=60.0)[0] == "nap"


def test_threads_come_and_go_and_share_a_child(act):
    started = act("ok")[1]
    found = []
    for _ in range(3):
        threads = [threading.Thread(target=lambda: found.append(act("ok"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [["ok", started]] * 12


def test_a_module_that_cannot_be_imported_is_an_error():
    with pytest.raises(RuntimeError, match="no_such_module"):
        ForkServer("no_such_module:act", 1.0)(1)
