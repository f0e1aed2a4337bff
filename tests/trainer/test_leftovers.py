"""``verl clean``: what a killed run left is listed and removed, and nothing of any other."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from verl.cli import main as verl
from verl.telemetry.run_record import LOCK
from verl.trainer.leftovers import find, owner_of
from verl.trainer.run_folder import RUN_VARIABLE


@pytest.fixture
def sleeper():
    """``sleeper(folder, **options)``: a process of the run of ``folder``."""
    started = []

    def start(folder, **options):
        env = {**os.environ, RUN_VARIABLE: str(folder)}
        process = subprocess.Popen(["sleep", "1000"], env=env, **options)
        while b"sleep" not in open(f"/proc/{process.pid}/cmdline", "rb").read():  # until then it has our environment
            time.sleep(0.005)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def killed(tmp_path, monkeypatch):
    """The folder of a run that was killed: its driver had a number that no process can have."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    started = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time.time() - 60))
    owner = {"host": socket.gethostname(), "pid": 2**22 + 1, "started": started, "command": "verl ppo"}
    (folder / LOCK).write_text(json.dumps(owner))
    return folder


def test_what_is_left_is_listed_then_removed_and_nothing_of_others(killed, sleeper, tmp_path, capsys):
    names = ["verl-code-old", "verl-code-idle", "verl-code-busy", "verl-keep"]
    names += [f"ray/session_2026-01-01_00-00-00_000000_{2**22 + number}" for number in (1, 2)]
    places = [tmp_path / name for name in names]
    for place in places:
        place.mkdir(parents=True)
    os.utime(places[0], (1, 1))  # older than the run
    (killed / "rollout_servers.json").write_text("{}")
    own, other = sleeper(killed), sleeper(tmp_path / "run2", cwd=places[2])
    assert verl(["clean", str(killed), "--list"]) == 0
    text = capsys.readouterr().out
    found = [f"process {own.pid}: sleep 1000", f"folder {places[1]}: temporary", f"folder {places[4]}: session of Ray"]
    assert all(f"{line}\n" in text for line in found) and len(text.splitlines()) == 4, text
    assert own.poll() is None and all(place.exists() for place in places)
    assert verl(["clean", str(killed)]) == 0
    assert capsys.readouterr().out.endswith("4 removed\n")
    assert own.wait(5) == -signal.SIGTERM and other.poll() is None
    assert [place.exists() for place in places] == [True, False, True, True, False, True]
    assert verl(["clean", str(killed)]) == 0 and "nothing is left" in capsys.readouterr().out


HOLD = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); print(); sys.stdin.read()"


def test_a_run_that_is_alive_or_elsewhere_is_left_alone(killed, sleeper, capsys):
    own = sleeper(killed)
    command = [sys.executable, "-c", HOLD, str(killed / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert verl(["clean", str(killed)]) == 2
        assert f"{killed}: the run has not ended: process {2**22 + 1} on" in capsys.readouterr().err
    (killed / LOCK).write_text(json.dumps({"host": "far-away", "pid": 1, "started": "2026-01-01 00:00:00 +0000"}))
    assert verl(["clean", str(killed)]) == 2 and "was on far-away" in capsys.readouterr().err
    assert own.poll() is None


def test_shared_memory_is_removed_when_that_is_asked_for(killed, monkeypatch):
    segment = f"/dev/shm/psm_verltest{os.getpid()}"
    with open(segment, "wb") as file:
        file.write(b"0")
    try:
        asked = {one.path: one.stays for one in find(killed, with_segments=True)}
        assert asked[segment] == "" and {one.path: one.stays for one in find(killed)}[segment] != ""
    finally:
        os.unlink(segment)


def test_a_run_that_ended_by_itself_has_no_owner(tmp_path, capsys):
    assert owner_of(tmp_path) == {}
    (tmp_path / LOCK).write_text("")
    assert owner_of(tmp_path) == {} and verl(["clean", str(tmp_path / "nowhere")]) == 2
    assert "is no folder" in capsys.readouterr().err
