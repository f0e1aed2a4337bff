"""A user's function in forks of the process that imported its file."""

import asyncio
import os
import signal

import pytest

from tests.support.waiting import wait_for
from verl.sandbox.forked_calls import ForkedCalls
from verl.sandbox.outcomes import Outcome, SandboxError
from verl.sandbox.supervisor import Limits

SOURCE = """
import os, subprocess, sys, time
IMPORTED_IN = os.getpid()

def where(value):
    return {"pid": os.getpid(), "imported_in": IMPORTED_IN, "value": value}

async def later(value):
    return value

def sleeps(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
    open(path, "w").close()
    time.sleep(100)

def fails(how):
    if how == "raise":
        raise KeyError("why")
    if how == "exit":
        os._exit(3)
    if how == "abort":
        os.abort()
    return bytearray(300 << 20) and None
"""


@pytest.fixture
def calls(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    opened = []

    def of(name, **limits):
        opened.append(ForkedCalls(str(tmp_path / "mine.py"), name, Limits(**limits)))
        return opened[-1]

    yield of
    for one in opened:
        one.close()


def test_calls_share_an_import_and_no_process(calls):
    where = calls("where")

    async def many():
        return await asyncio.gather(*(where.call({"n": n}) for n in range(8)))

    found = asyncio.run(many())
    assert [one["value"] for one in found] == [{"n": n} for n in range(8)]
    assert len({one["imported_in"] for one in found}) == 1 and found[0]["imported_in"] != os.getpid()
    assert asyncio.run(calls("later").call([1])) == [1]


@pytest.mark.parametrize(
    ("how", "outcome", "words"),
    [
        ("raise", Outcome.RAISED, "KeyError: 'why'"),
        ("exit", Outcome.EXIT, "its process has ended"),
        ("abort", Outcome.CRASH, "crash"),
        ("memory", Outcome.RAISED, "MemoryError"),
    ],
)
def test_a_call_that_fails_says_how_and_the_next_one_works(how, outcome, words, calls):
    fails = calls("fails", memory_mb=200)
    for _ in range(2):
        with pytest.raises(SandboxError, match=words) as caught:
            asyncio.run(fails.call(how))
        assert caught.value.failure.kind in (outcome, Outcome.MEMORY)


def processes_below(pid):
    from verl.sandbox.supervisor import descendants

    return list(descendants(pid))


def test_a_call_that_is_given_up_is_killed_with_what_it_started(calls, tmp_path):
    sleeps = calls("sleeps")
    started = tmp_path / "started"

    async def give_up():
        call = asyncio.ensure_future(sleeps.call(str(started)))
        while not started.exists():
            await asyncio.sleep(0.02)
        assert len(processes_below(sleeps._popen.pid)) >= 3
        call.cancel()
        await asyncio.wait({call})

    asyncio.run(give_up())
    wait_for(lambda: not processes_below(sleeps._popen.pid), "the call to be gone with what it started")


def test_a_killed_importer_is_started_again(calls):
    where = calls("where")
    first = asyncio.run(where.call(1))["imported_in"]
    os.kill(first, signal.SIGKILL)
    where._popen.wait()
    assert asyncio.run(where.call(2))["imported_in"] != first


def test_a_file_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(RuntimeError, match="broken.py.*ZeroDivisionError"):
        asyncio.run(ForkedCalls(str(tmp_path / "broken.py"), "f", Limits()).call())
