"""The words after ``python -m verl.doctor``."""

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from verl.config.base import ConfigError
from verl.config.command_line import parse
from verl.preflight.checks import Hardware, examine, examine_config, gpu_memory_here
from verl.preflight.report import Report

HELP = """\
usage: python -m verl.doctor [flags] key=value [key=value ...]

Say what a run would do and what would go wrong, in seconds. No model is opened; the reward function is tried
in a sandbox. The words are those of python -m verl.trainer.main_ppo; there, trainer.dry_run=true does the same.

flags:
  --gpu-mem 80GB     memory of one GPU to hold the estimate against; of this machine's, where it has one
  --gpus 8           as trainer.n_gpus_per_node=8
  --json             the report as JSON
  --strict           exit code 1 if there are warnings
  --config-path, --config-name, --config-dir    as the main job takes them

exit codes: 0 it can run, 1 it can and --strict has warnings, 2 it cannot.
"""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None, *, config_name: str = "ppo_trainer", config_path: str | None = None) -> int:
    """Examine a command line, print the report, and return the exit code.

    Args:
        argv: words and flags. None: this process's.
        config_name, config_path: used unless the words name others.
    """
    try:
        own, rest = _own_flags(sys.argv[1:] if argv is None else list(argv))
        flags, words = parse(rest)
        if flags.get("help"):
            print(HELP, end="")
            return 0
        gpu_bytes = _bytes(own["--gpu-mem"]) if "--gpu-mem" in own else gpu_memory_here()
        hardware = Hardware(gpu_bytes, int(own["--gpus"]) if "--gpus" in own else None)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report = examine(
        words,
        flags.get("config_path", config_path),
        flags.get("config_name", config_name),
        flags.get("config_dir"),
        hardware,
    )
    return _print(report, "--json" in own, "--strict" in own)


def tell(config: Any) -> int:
    """Examine a checked tree, print the report, and return the exit code."""
    return _print(examine_config(config, Hardware(gpu_memory_here())), False, False)


def _print(report: Report, as_json: bool, strict: bool) -> int:
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())
    return report.exit_code(strict)


def _own_flags(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """The doctor's flags with their values, and everything else."""
    own: dict[str, str] = {}
    rest: list[str] = []
    waiting = iter(arguments)
    for word in waiting:
        name, has_value, value = word.partition("=")
        if word in ("--json", "--strict"):
            own[word] = "true"
        elif name in ("--gpu-mem", "--gpus"):
            own[name] = value if has_value else next(waiting, "")
        elif word != "--check":  # of the main job, and what happens here anyway
            rest.append(word)
    if "--gpus" in own and not own["--gpus"].isdigit():
        raise ValueError(f"--gpus {own['--gpus']} is no number of GPUs. Say --gpus 8.")
    return own, rest


def _bytes(text: str) -> int:
    """``80GB``, ``80G``, ``81559MiB`` or a number of bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"--gpu-mem {text} is no size. Say --gpu-mem 80GB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])
