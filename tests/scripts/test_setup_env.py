"""setup_env.sh against a stand-in Python that only takes notes: what it installs, from where, and when not."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/bash
if [ "$1" = --version ]; then echo "Python $STUB_VERSION"; exit 0; fi
if [ "$1" = -c ]; then
    case $2 in
        *version_info*) case $STUB_VERSION in 3.10*|3.11*|3.12*) exit 0 ;; *) exit 1 ;; esac ;;
        *urlopen*) [ -n "$STUB_ONLINE" ]; exit ;;
        *torch.version*) [ -e .venv/torch ] && cat .venv/torch; exit ;;
    esac
fi
if [ "$2" = venv ]; then
    [ -z "$STUB_NO_VENV" ] || exit 1
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit
fi
if [ "$2" = pip ]; then
    shift 2; echo "$@" >> "$STUB_LOG"
    case "$*" in *torch==*|*requirements.txt*)
        # like pip: an installed build stays unless another is forced in
        if [ ! -e .venv/torch ] || [[ $* = *--force-reinstall* ]]; then echo "$STUB_BUILD" > .venv/torch; fi ;;
    esac
    [ -z "$STUB_PIP_FAILS" ]; exit
fi
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with what the script reads, and a PATH whose only Python is the stand-in."""
    files = ["requirements.txt", "requirements-cuda.txt", "requirements-test.txt", "setup.py", "scripts/setup_env.sh"]
    for name in (*files, "verl/version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "cat", "cksum", "cp", "dirname", "grep", "mkdir", "rm", "sed", "uname"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    stub = tmp_path / "bin" / "python3"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


def set_up(checkout, *arguments, **variables):
    """Runs the script; returns it and the pip calls it made."""
    log = checkout / "log"
    log.write_text("")
    env = {"PATH": str(checkout / "bin"), "STUB_LOG": str(log), "STUB_VERSION": "3.11.7", "STUB_BUILD": "cpu"}
    env |= variables
    command = [str(checkout / "bin" / "bash"), str(checkout / "scripts" / "setup_env.sh"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    return done, log.read_text().splitlines()


def test_a_second_call_does_nothing_until_a_requirement_changes(checkout):
    done, calls = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert len(calls) == 2 and "-r requirements.txt" in calls[0] and "-e ." in calls[1]
    assert set_up(checkout)[1] == []
    with open(checkout / "requirements.txt", "a") as file:
        file.write("more==1.0\n")
    assert len(set_up(checkout)[1]) == 2


def test_the_earlier_name_of_the_project_is_taken_out_before_the_project_is_installed(checkout):
    (checkout / ".venv/lib/python3.11/site-packages/verl-0.1.0.dist-info").mkdir(parents=True)
    done, calls = set_up(checkout)
    assert done.returncode == 0, done.stderr
    assert calls[1].startswith("uninstall") and calls[1].endswith("--yes verl") and calls[2].endswith("-e .")


def test_test_tools_are_added_on_request_and_serve_training_too(checkout):
    set_up(checkout)
    _, calls = set_up(checkout, "--test")
    assert "-r requirements-test.txt" in calls[0]
    assert set_up(checkout)[1] == set_up(checkout, "--test")[1] == []


def test_a_failed_installation_is_tried_again(checkout):
    done, _ = set_up(checkout, STUB_PIP_FAILS="1")
    assert done.returncode != 0
    assert len(set_up(checkout)[1]) == 2


def test_torch_comes_from_the_index_the_user_names(checkout):
    _, calls = set_up(checkout, VERL_TORCH_INDEX="https://index/cu130", STUB_ONLINE="1")
    assert calls[0].endswith(f"--no-deps --index-url https://index/cu130 {pinned_torch()}")
    assert "--force-reinstall" not in calls[0]
    assert "--extra-index-url https://index/cu130" in calls[1]
    assert len(set_up(checkout, VERL_TORCH_INDEX="https://index/cpu")[1]) == 3, "another index is another environment"


def pinned_torch():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return " ".join(line for name in ("torch", "torchvision") for line in lines if line.startswith(f"{name}=="))


def gpu_machine(checkout, cuda="13.0"):
    """From now on the machine has an NVIDIA GPU whose driver runs ``cuda``."""
    smi = checkout / "bin" / "nvidia-smi"
    smi.write_text(f"#!/bin/bash\necho '| NVIDIA-SMI 1.2.3   Driver Version: 1.2.3   CUDA Version: {cuda}  |'\n")
    smi.chmod(0o755)


def test_an_index_named_later_replaces_the_torch_that_is_there(checkout):
    # pip alone says: Requirement already satisfied: torch==2.13.0 (2.13.0+cpu)
    set_up(checkout)
    _, calls = set_up(checkout, VERL_TORCH_INDEX="https://index/cu130", STUB_BUILD="13.0")
    assert "--force-reinstall --no-deps" in calls[0] and calls[0].endswith(pinned_torch())
    assert (checkout / ".venv" / "torch").read_text() == "13.0\n"
    with open(checkout / "requirements.txt", "a") as file:
        file.write("more==1.0\n")
    assert "--force-reinstall" not in set_up(checkout, VERL_TORCH_INDEX="https://index/cu130")[1][0]


def test_an_environment_made_without_a_gpu_gets_torch_for_cuda_on_a_machine_with_one(checkout):
    set_up(checkout)
    gpu_machine(checkout)
    done, calls = set_up(checkout, STUB_BUILD="13.0")
    assert calls[0].endswith(f"--force-reinstall --no-deps {pinned_torch()}") and not done.stderr
    assert "holds the CPU build" in done.stdout and set_up(checkout)[1] == []


def test_kernels_for_gpus_are_added_to_torch_for_cuda_and_to_no_other(checkout):
    calls = set_up(checkout, VERL_TORCH_INDEX="https://index/cu130", STUB_BUILD="13.0")[1]
    assert not [call for call in calls if "requirements-cuda.txt" in call], "there is no GPU"
    gpu_machine(checkout)
    assert set_up(checkout, STUB_BUILD="13.0")[1][-1].endswith("--no-deps -r requirements-cuda.txt")
    shutil.rmtree(checkout / ".venv")
    calls = set_up(checkout, VERL_TORCH_INDEX="https://index/cpu")[1]
    assert calls and not [call for call in calls if "requirements-cuda.txt" in call], "the index has the CPU build"


def test_an_index_that_has_the_cpu_build_only_is_said_on_a_gpu_machine(checkout):
    gpu_machine(checkout)
    done, _ = set_up(checkout)
    assert done.returncode == 0 and "VERL_TORCH_INDEX=https://download.pytorch.org/whl/cu130" in done.stderr


def test_a_driver_too_old_for_the_pinned_torch_is_refused_before_anything_is_downloaded(checkout):
    gpu_machine(checkout, cuda="12.4")
    done, calls = set_up(checkout)
    assert done.returncode == 1 and not calls
    assert "driver runs CUDA 12" in done.stderr and "whl/cu126" in done.stderr
    assert set_up(checkout, VERL_TORCH_INDEX="https://index/cu126", STUB_BUILD="12.6")[0].returncode == 0


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl") or os.uname().sysname != "Linux", reason="Linux without a GPU")
def test_without_a_gpu_the_cpu_index_is_asked_if_it_answers(checkout):
    _, calls = set_up(checkout, STUB_ONLINE="1")
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in calls[0]
    shutil.rmtree(checkout / ".venv")
    assert "index" not in set_up(checkout)[1][0]


def test_an_unsupported_python_is_named_with_the_way_out(checkout):
    done, calls = set_up(checkout, STUB_VERSION="3.13.0")
    assert done.returncode == 1 and not calls and not (checkout / ".venv").exists()
    assert "No Python 3.10, 3.11 or 3.12 in PATH (python3 is: Python 3.13.0)" in done.stderr
    assert "VERL_PYTHON=" in done.stderr
    done, _ = set_up(checkout, STUB_VERSION="3.9.1", VERL_PYTHON=str(checkout / "bin" / "python3"))
    assert done.returncode == 1 and "is not a Python 3.10, 3.11 or 3.12" in done.stderr


def test_an_environment_of_an_unsupported_python_is_not_touched(checkout):
    set_up(checkout)
    with open(checkout / "requirements.txt", "a") as file:
        file.write("more==1.0\n")
    done, calls = set_up(checkout, STUB_VERSION="3.9.1")
    assert done.returncode == 1 and not calls
    assert ".venv holds Python 3.9.1" in done.stderr and "rm -r .venv" in done.stderr


def test_a_python_without_venv_leads_to_its_package(checkout):
    done, _ = set_up(checkout, STUB_NO_VENV="1")
    assert done.returncode == 1 and "apt install python3-venv" in done.stderr


def test_an_unknown_option_is_refused(checkout):
    done, _ = set_up(checkout, "--tset")
    assert done.returncode == 2 and "unknown option --tset" in done.stderr


@pytest.mark.parametrize("arguments", [["--tier", "fast"], ["--tier"]])
def test_the_test_script_knows_its_tiers(arguments):
    done = subprocess.run(["bash", "scripts/test.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "unit ranks ray learning" in done.stderr


@pytest.mark.parametrize("arguments", [["--isa", "AVX1024"], ["--isa"]])
def test_the_test_script_knows_the_instruction_sets_it_can_lower_to(arguments):
    done = subprocess.run(["bash", "scripts/test.sh", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "AVX512_CORE AVX2 COMPATIBLE" in done.stderr


def test_the_processor_and_its_instruction_set_are_shown(monkeypatch):
    describe = runpy.run_path(str(ROOT / "scripts" / "show_cpu.py"))["describe"]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert f"uses {torch.backends.cpu.get_cpu_capability()}" in describe() and "AMX" in describe()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert describe().startswith("CPU: ") and "ONEDNN_MAX_CPU_ISA=AVX2" in describe()


def test_each_file_of_tests_is_in_one_part():
    conftest = runpy.run_path(str(ROOT / "tests" / "conftest.py"))
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        asked = [SimpleNamespace(getoption={"part": part}.get) for part in ("1/2", "2/2")]
        assert sorted(str(conftest["pytest_ignore_collect"](path, config)) for config in asked) == ["None", "True"]


def run_tiers(folder, *arguments):
    """The pytest calls of scripts/test.sh, each with the level of oneDNN that it ran at; and the exit code."""
    (folder / "scripts").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts" / "test.sh").write_text((ROOT / "scripts" / "test.sh").read_text())
    log = folder / "log"
    stubs = {
        "scripts/setup_env.sh": "",
        "scripts/install_engines.sh": "",
        ".venv/bin/ruff": "",
        ".venv/bin/mypy": "",
        ".venv/bin/python": f'echo "${{ONEDNN_MAX_CPU_ISA:-all}} $*" >>{log}\n[[ "$*" != *"-m ray"* ]]\n',
    }
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}")
        (folder / name).chmod(0o755)
    done = subprocess.run(["bash", str(folder / "scripts/test.sh"), *arguments], capture_output=True, text=True)
    return [line for line in log.read_text().splitlines() if "pytest" in line], done


def test_ci_runs_every_tier_once_and_learning_with_the_lowest_instruction_set_too(tmp_path):
    calls, done = run_tiers(tmp_path)
    assert len(calls) == len(set(calls)) == 10
    [lowered] = [call for call in calls if call.startswith("AVX2 ")]
    assert "-m numerics" in lowered and all(call.startswith("all ") for call in calls if call != lowered)
    assert sum("--part" in call for call in calls) == 4
    assert done.returncode == 1 and done.stderr == "FAILED: ray\n"


def test_the_levels_asked_for_are_all_that_runs(tmp_path):
    calls, done = run_tiers(tmp_path, "--isa", "AVX512_CORE", "--isa", "COMPATIBLE")
    assert sorted(call.split()[0] for call in calls) == ["AVX512_CORE", "SSE41"] and done.returncode == 0
