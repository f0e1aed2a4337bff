"""The name on an index, and two projects that bring one package."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import distribution

ROOT = Path(__file__).parents[2]


def install(folder: Path, name: str, *, editable: bool = False) -> Path:
    """What pip leaves of a distribution that brings the package ``verl``."""
    metadata = folder / f"{name}-0.9.1.dist-info"
    metadata.mkdir(parents=True)
    files = [f"__editable__.{name}-0.9.1.pth"] if editable else ["verl/__init__.py", "verl/protocol.py"]
    (metadata / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    if not editable:
        (folder / "verl").mkdir(exist_ok=True)
        (folder / "verl" / "__init__.py").write_text("")
    return folder


def test_setup_names_the_distribution_that_messages_name():
    name = re.search(r'^    name="([^"]+)"', (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    assert name == distribution.NAME != "verl"


def test_an_extra_is_installed_from_the_checkout_or_by_our_own_name(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert distribution.install_command("vllm") == "pip install -e '.[vllm]'"
    monkeypatch.chdir(tmp_path)
    assert distribution.install_command("vllm") == f"pip install -e '{ROOT}[vllm]'"
    monkeypatch.setattr(distribution, "_PACKAGE", str(tmp_path / "site-packages" / "verl"))
    assert distribution.install_command("vllm") == "pip install 'verl-trainer[vllm]'"


def test_no_text_sends_a_user_to_the_other_project():
    folders = [ROOT / name for name in ("verl", "docs", "scripts", "examples", "recipe")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".sh")]
    wrong = re.compile(r"pip install '?verl(\[|'|`|\s|$)")
    assert not [str(path) for path in files if wrong.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("ours", ["verl_trainer", None])
def test_the_other_project_is_found_next_to_ours_and_elsewhere_on_the_path(tmp_path, ours):
    folder = install(tmp_path / "site-packages", "verl")
    if ours:
        install(folder, ours)
    assert distribution.other_distribution([str(tmp_path), str(folder)]) == str(folder)


def test_our_own_installs_are_not_taken_for_the_other_project(tmp_path):
    stale = install(tmp_path / "stale", "verl", editable=True)  # of this checkout, under its earlier name
    ours = install(tmp_path / "ours", "verl_trainer")
    assert distribution.other_distribution([str(stale), str(ours), str(tmp_path / "missing")]) is None


def test_two_distributions_are_reported_at_import_once_for_a_run_and_its_workers(tmp_path):
    install(tmp_path, "verl")
    child = "import subprocess, sys, verl; subprocess.run([sys.executable, '-c', 'import verl'], check=True)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    environment.pop(distribution._ALREADY_SAID, None)
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0 and done.stderr.count("another project") == 1, done.stderr
    assert f"the other is in {tmp_path}" in done.stderr and "pip uninstall verl" in done.stderr
