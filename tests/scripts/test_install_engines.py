"""install_engines.sh against a stand-in Python that only takes notes."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
STAND_IN = """#!/bin/bash
if [ "$1" = -c ]; then case $2 in *torch.version*) echo "${STUB_BUILD:-13.0}" ;; esac; exit; fi
if [ "$2" = pip ]; then
    shift 2; echo "$@" >> "$STUB_LOG"
    for word in "$@"; do [ -f "$word" ] && cat "$word" >> "$STUB_LOG.files"; done
    [ -z "$STUB_PIP_FAILS" ]; exit
fi
"""


@pytest.fixture
def checkout(tmp_path):
    for name in (
        "requirements.txt",
        *(f"requirements-{engine}-cpu.txt" for engine in ENGINES),
        "scripts/install_engines.sh",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "cat", "cksum", "dirname", "grep", "mktemp", "rm"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    return tmp_path


def install(checkout, *arguments, **variables):
    """Runs the script; returns it and the pip calls it made."""
    log = checkout / "log"
    log.write_text("")
    env = {"PATH": str(checkout / "bin"), "STUB_LOG": str(log), **variables}
    command = [str(checkout / "bin" / "bash"), str(checkout / "scripts" / "install_engines.sh"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done, log.read_text().splitlines()


@pytest.mark.parametrize("engine", ENGINES)
def test_the_cpu_build_comes_as_a_whole_set_and_once(engine, checkout):
    done, calls = install(checkout, engine, "--cpu")
    assert done.returncode == 0, done.stderr
    assert len(calls) == 1 and calls[0].endswith(f"--no-deps -r requirements-{engine}-cpu.txt")
    assert install(checkout, engine, "--cpu")[1] == []
    with open(checkout / f"requirements-{engine}-cpu.txt", "a") as file:
        file.write("more==1.0\n")
    assert len(install(checkout, engine, "--cpu")[1]) == 1


def test_on_a_cpu_both_engines_go_into_one_environment(checkout):
    assert len(install(checkout, "vllm", "--cpu")[1]) == 1
    done, calls = install(checkout, "vllm", "sglang", "--cpu")
    assert done.returncode == 0, done.stderr
    assert len(calls) == 1 and "requirements-sglang-cpu.txt" in calls[0]


def test_with_a_gpu_the_cuda_build_is_held_to_our_versions(checkout):
    (checkout / "bin" / "nvidia-smi").symlink_to(shutil.which("true"))
    _, calls = install(checkout, "vllm")
    assert "--constraint" in calls[0] and calls[0].endswith("vllm==0.32.*")
    pins = (checkout / "log.files").read_text().splitlines()
    assert set(pins) == {line for line in (ROOT / "requirements.txt").read_text().splitlines() if "==" in line}


def test_vllm_for_cuda_is_not_installed_with_a_cpu_torch(checkout):
    (checkout / "bin" / "nvidia-smi").symlink_to(shutil.which("true"))
    done, calls = install(checkout, "vllm", STUB_BUILD="cpu")
    assert done.returncode == 1 and not calls
    assert "CPU build of torch" in done.stderr and "bash scripts/setup_env.sh" in done.stderr


def test_with_a_gpu_sglang_brings_its_torch_and_does_not_join_vllm(checkout):
    (checkout / "bin" / "nvidia-smi").symlink_to(shutil.which("true"))
    done, calls = install(checkout, "sglang")
    assert calls[0].endswith("sglang==0.5.23")
    assert "pins torch 2.14.1" in done.stderr and "replaces torch==2.13.0" in done.stderr
    pins = (checkout / "log.files").read_text().splitlines()
    assert not any(pin.startswith("torch==") for pin in pins) and any(pin.startswith("transformers==") for pin in pins)
    done, calls = install(checkout, "vllm")
    assert done.returncode == 1 and "one .venv holds one" in done.stderr and not calls


def test_a_failed_installation_is_tried_again(checkout):
    assert install(checkout, "vllm", "--cpu", STUB_PIP_FAILS="1")[0].returncode != 0
    assert len(install(checkout, "vllm", "--cpu")[1]) == 1


def test_an_unknown_engine_is_refused(checkout):
    done, calls = install(checkout, "vlm")
    assert done.returncode == 2 and "vlm is no known engine" in done.stderr and not calls
    assert install(checkout)[0].returncode == 2
