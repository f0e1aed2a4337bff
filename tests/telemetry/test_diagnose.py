"""``verl env``: what stands in it, and what never does."""

import getpass
import json
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.commands import ROOT
from verl.cli import main
from verl.telemetry import diagnose
from verl.version import __version__

PARTS = {"folder", "python", "system", "verl", "cpu", "memory_gib", "gpus", "variables", "packages", "limits", "disk"}


def test_the_report_has_versions_devices_and_limits(capsys):
    assert main(["env", "--json", "--quick"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= PARTS and found["verl"]["version"] == __version__ and "torch" in found["packages"]
    assert "open files" in found["limits"] and "/dev/shm" in found["disk"]
    assert main(["env", "--quick"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("```\n") and text.endswith("```\n") and f"  version: {__version__}\n" in text


def test_secrets_and_names_are_left_out(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrst")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("VERL_X", "https://jo:s3cretword@host/ /home/jo-smith/data:/data/jo-smith/x")
    monkeypatch.setenv("SLURM_JOB_USER", "jo-smith")
    monkeypatch.setenv("RAY_ADDRESS", "jos-laptop.example.org:6379")
    monkeypatch.setattr(getpass, "getuser", lambda: "jo-smith")
    monkeypatch.setattr(socket, "gethostname", lambda: "jos-laptop.example.org")
    monkeypatch.setattr(Path, "home", lambda: ROOT.parent)
    assert main(["env", "--quick"]) == 0
    text = capsys.readouterr().out
    for word in ("hf_abc", "0123456789abcdef", "s3cret", "jo-smith", "jos-laptop", str(ROOT)):
        assert word not in text, word
    assert f"~/{ROOT.name}" in text and "/data/USER/x" in text and "HOST:6379" in text


def test_a_package_that_crashes_does_so_in_a_process_of_its_own():
    assert "signal 6" in diagnose.probe("import os; os.abort()")["error"]
    assert "No module named 'nonsense'" in diagnose.probe("import nonsense")["error"]


def test_the_script_works_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "diagnose.py"), "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "packages:" in done.stdout, done.stderr
