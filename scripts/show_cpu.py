"""Print the CPU that tests run on, and the kernels that torch and oneDNN choose for it: numbers depend on both."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import torch


def cpu_name() -> str:
    """The model as the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def describe() -> str:
    """One line: model, cores, instruction sets, and the variables that lower them."""
    has = {"AVX-512 bf16": torch.cpu._is_avx512_bf16_supported(), "AMX": torch.cpu._is_amx_tile_supported()}
    extras = ", ".join(f"{'' if found else 'no '}{name}" for name, found in has.items())
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
    lowered = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"CPU: {cpu_name()}, {os.cpu_count()} cores; torch {torch.__version__} uses {capability}; "
        f"{extras}; {lowered or 'no variable lowers the instruction set (ONEDNN_MAX_CPU_ISA would)'}"
    )


if __name__ == "__main__":
    print(describe())
    if levels := sys.argv[1:]:
        print(f"Kernels of lesser CPUs are tested too: {', '.join(levels)}")
