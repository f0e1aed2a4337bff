"""The folder of a run as numbers, options, warnings and a state, read again as it grows.

Reads what `verl.telemetry.run_record`, the logger ``file`` and the log leave; knows no trainer and imports no torch. A
file that is missing is left out, and a line that cannot be read is counted.
"""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil

from verl.config.tree import flatten
from verl.telemetry.run_record import COMMAND, CONFIG, ENVIRONMENT, LOCK, LOG, METRICS, mask

_MARKS = (METRICS, CONFIG, LOG)
_PRUNED = re.compile(r"global_step_\d+|tensorboard|wandb|mlruns|huggingface|\..*")
_DEPTH = 3
"""Folders below a folder in which runs, and below a run in which samples are looked for."""

_HEALTH = re.compile(r"step (\d+): (.+)")
_WARNING = re.compile(r"(?:.{0,80}?\b)?(?:warning|WARNING)\b[:\]]?\s*(.+)")
_PAIR = re.compile(r"([A-Za-z_][\w./@-]*):(-?(?:\d[\d.e+-]*|inf|nan))(?= - |$)")
_MOST_WARNINGS = 200


@dataclass(frozen=True)
class Chart:
    """Metrics that are plotted together."""

    title: str
    patterns: tuple[str, ...]
    """Names, with ``*`` for anything."""
    stacked: bool = False
    unit: str = ""

    def names(self, known: Iterable[str]) -> list[str]:
        """Return those of ``known`` that belong here, in the order of the patterns."""
        known = list(known)
        return list(dict.fromkeys(n for p in self.patterns for n in known if fnmatchcase(n, p)))


PHASES = (
    "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "testing",
    "save_checkpoint", "dump_rollout_generations", "trace",
)  # fmt: skip
"""Parts of a step that follow one another; what other ``timing_s`` measure lies inside of these."""

CHARTS = (
    Chart("Reward", ("critic/score/mean", "critic/rewards/mean", "critic/score/max", "critic/score/min")),
    Chart("Validation", ("val-core/*", "val-env/*/success")),
    Chart("Loss", ("train/loss", "val/loss", "actor/pg_loss", "critic/vf_loss")),
    Chart("Preference accuracy", ("train/preference_accuracy", "val/preference_accuracy"), unit="share"),
    Chart("Rewards of pairs", ("train/chosen_reward", "train/rejected_reward", "val/preference_margin")),
    Chart("KL", ("actor/ppo_kl", "actor/kl_loss", "actor/reward_kl_penalty"), unit="nats"),
    Chart("Entropy", ("actor/entropy", "actor/entropy_loss"), unit="nats"),
    Chart("Response length", ("response_length/mean", "response_length/max", "response_length/min"), unit="tokens"),
    Chart("Cut at the length limit", ("response_length/clip_ratio", "batch/truncated_ratio"), unit="share"),
    Chart("Clip share", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "critic/vf_clipfrac"), unit="share"),
    Chart("Gradient norm", ("actor/grad_norm", "critic/grad_norm", "train/grad_norm")),
    Chart("Rollout-trainer mismatch", ("training/rollout_probs_diff_*", "rollout_corr/kl", "rollout_corr/k3_kl")),
    Chart("Groups without signal", ("critic/groups_without_signal", "batch/identical_responses"), unit="share"),
    Chart("Turns", ("num_turns/mean", "num_turns/max", "env/*/success")),
    Chart("Learning rate", ("actor/lr", "critic/lr", "train/lr*")),
    Chart("Throughput", ("perf/throughput", "rollout/engine/generated_tokens_per_s"), unit="tokens/s"),
    Chart("Memory", ("perf/memory_processes_gb", "perf/memory_driver_gb", "perf/max_memory_*_gb"), unit="GiB"),
    Chart("Time per phase", tuple(f"timing_s/{name}" for name in PHASES), stacked=True, unit="s"),
)


# -- finding -----------------------------------------------------------------------------------------------------------
def folders_below(folder: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield a folder and those below it, without checkpoints and stores of trackers."""
    yield folder
    if depth > 0:
        for child in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
            if not _PRUNED.fullmatch(child.name):
                yield from folders_below(child, depth - 1)


def sample_files(folder: Path) -> list[Path]:
    """Return the files ``<step>.jsonl`` of a folder itself."""
    return [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]


def find_runs(paths: Sequence[str | Path]) -> list[Path]:
    """Return the folders of runs among and below ``paths``; a folder of samples alone counts as one.

    Raises:
        FileNotFoundError: a path is no folder, or there is no run in it.
    """
    found: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        if not path.is_dir():
            what = "is a file" if path.exists() else "does not exist"
            raise FileNotFoundError(f"{path} {what}. Give the folder of a run (trainer.default_local_dir).")
        own = _runs_in(path)
        if not own:
            raise FileNotFoundError(
                f"{path} has no run: no {', '.join(_MARKS)} and no <step>.jsonl of samples. Give the folder of a run "
                "(trainer.default_local_dir), or one with runs in it."
            )
        found += own
    return list(dict.fromkeys(path.resolve() for path in found))


def _runs_in(path: Path) -> list[Path]:
    if any((path / name).exists() for name in _MARKS):
        return [path]
    below = [p for p in folders_below(path) if any((p / name).exists() for name in _MARKS)]
    return below or ([path] if any(sample_files(p) for p in folders_below(path)) else [])


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a short name for each: its last part, with as many parts before it as tell it from the others."""
    names = []
    for folder in folders:
        count = 1
        while count < len(folder.parts) and sum(f.parts[-count:] == folder.parts[-count:] for f in folders) > 1:
            count += 1
        names.append("/".join(folder.parts[-count:]))
    return names


# -- one run -----------------------------------------------------------------------------------------------------------
class Tail:
    """Whole lines of a file that grows, each of them once."""

    def __init__(self, path: Path):
        self.path, self.offset, self.inode = path, 0, 0

    def new_lines(self) -> tuple[list[bytes], bool]:
        """Return the lines that came since the last call, and whether the file has begun again."""
        try:
            stat = self.path.stat()
        except OSError:
            return [], False
        restarted = stat.st_size < self.offset or bool(self.inode) and stat.st_ino != self.inode
        self.offset, self.inode = 0 if restarted else self.offset, stat.st_ino
        if stat.st_size == self.offset:
            return [], restarted
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            text = file.read()
        whole = text.rfind(b"\n") + 1
        self.offset += whole
        return text[:whole].splitlines(), restarted


@dataclass
class Run:
    """One run, as far as it has come."""

    folder: Path
    name: str
    metrics: dict[int, dict[str, float | None]] = field(default_factory=dict)
    """Step -> its numbers. None: not a finite one."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """``{step, text, count}``, each text once."""
    unread: int = 0
    """Lines of metrics that could not be read."""
    config: dict[str, Any] = field(default_factory=dict)
    """Dotted key -> value."""
    ending: str = ""
    """What ended it, from the log."""

    def __post_init__(self) -> None:
        self.refreshed = 0.0
        self.version = 0
        self._config_time = 0.0
        self._log_step: int | None = None
        self._log, self._metrics = Tail(self.folder / LOG), Tail(self.folder / METRICS)
        self.refresh()

    def refresh(self, interval_s: float = 0.5) -> None:
        """Read what is new, unless that was done less than ``interval_s`` ago."""
        if time.monotonic() - self.refreshed < interval_s and self.refreshed:
            return
        self._read_config()
        self._read_metrics()
        self._read_log()
        self.refreshed = time.monotonic()

    # -- files
    def _read_config(self) -> None:
        path = self.folder / CONFIG
        if not path.exists() or path.stat().st_mtime == self._config_time:
            return
        import yaml

        self._config_time = path.stat().st_mtime
        try:
            tree = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            self._warn(None, f"{path.name} cannot be read: {str(error).splitlines()[0]}")
            return
        self.config = dict(flatten(mask(tree))) if isinstance(tree, dict) else {}
        place = self.config.get("trainer.log_dir")
        if place and not self._metrics.path.exists() and (Path(str(place)).expanduser() / METRICS).exists():
            self._metrics = Tail(Path(str(place)).expanduser() / METRICS)

    def _read_metrics(self) -> None:
        lines, restarted = self._metrics.new_lines()
        if restarted:
            self.metrics.clear()
        for line in lines:
            try:
                row = json.loads(line)
                step, data = row["step"], row["data"]
                self._add(int(step), data.items())
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                self.unread += bool(line.strip())

    def _add(self, step: int, pairs: Iterable[tuple[str, Any]]) -> None:
        self.version += 1
        own = self.metrics.setdefault(step, {})
        for name, value in pairs:
            if isinstance(value, bool):
                own[name] = float(value)
            elif isinstance(value, int | float):
                own[name] = float(value) if math.isfinite(value) else None
            elif value in ("NaN", "Infinity", "-Infinity"):
                own[name] = None
                self._warn(step, f"{name} was {value}", key=f"{name} {value}")

    def _read_log(self) -> None:
        lines, restarted = self._log.new_lines()
        if restarted:
            self.warnings.clear()
        for line in lines:
            text = line.decode("utf-8", "replace")
            if text.startswith("== "):
                self.ending = ""
            elif text.startswith("error: "):
                self.ending = f"failed: {text[7:]}"
            elif text.startswith("Done: "):
                self.ending = f"finished: {text[6:]}"
            elif text.startswith(("Stopped after step ", "Stopped in step ")):
                self.ending = f"stopped: {text.partition('. ')[0][8:]}"
            elif found := _HEALTH.match(text):
                self._warn(int(found[1]), found[2])
            elif found := _WARNING.match(text):
                self._warn(None, found[1])
            if not self._metrics.path.exists():
                self._read_console(text)

    def _read_console(self, text: str) -> None:
        """Take the numbers that the logger ``console`` printed, where ``file`` left none."""
        if text.startswith("step:"):
            self._log_step = int(digits) if (digits := text[5:].partition(" ")[0]).isdecimal() else None
            text = text.partition(" - ")[2]
        elif not text.startswith("  "):
            self._log_step = None
        if self._log_step is not None and (pairs := _PAIR.findall(text)):
            self._add(self._log_step, [(name, float(value)) for name, value in pairs])

    def _warn(self, step: int | None, text: str, key: str = "") -> None:
        for known in self.warnings:
            if known["key"] == (key or text):
                known["count"] += 1
                return
        if len(self.warnings) < _MOST_WARNINGS:
            self.warnings.append({"step": step, "text": text, "count": 1, "key": key or text})

    # -- what is shown
    @property
    def state(self) -> str:
        """``running``, ``finished: ...``, ``stopped: ...``, ``failed: ...`` or what else the folder tells."""
        owner = _json_file(self.folder / LOCK)
        if owner.get("host") == socket.gethostname() and isinstance(owner.get("pid"), int):
            if self.ending.startswith("failed"):
                return self.ending
            if psutil.pid_exists(owner["pid"]):
                return "running"
        elif owner and not self.ending and time.time() - self.last_written < 600:
            return f"running on {owner.get('host')}"
        return self.ending or "ended without a word" * bool(owner)

    @property
    def last_written(self) -> float:
        """Unix time."""
        times = [p.stat().st_mtime for name in (METRICS, LOG) if (p := self.folder / name).exists()]
        return max(times, default=0.0)

    @property
    def steps(self) -> list[int]:
        return sorted(self.metrics)

    def names(self) -> list[str]:
        """Names of the metrics."""
        return sorted({name for row in self.metrics.values() for name in row})

    def curve(self, name: str, most: int = 2000) -> tuple[list[int], list[float | None]]:
        """Return steps and values of a metric; of more than ``most`` points, means of neighbours."""
        points = [(step, self.metrics[step][name]) for step in self.steps if name in self.metrics[step]]
        width = -(-len(points) // most) if points else 1
        steps, values = [], []
        for first in range(0, len(points), width):
            part = points[first : first + width]
            own = [value for _, value in part if value is not None]
            steps.append(part[-1][0])
            values.append(sum(own) / len(own) if own else None)
        return steps, values

    def summary(self) -> dict[str, Any]:
        """Return JSON values: state, progress, warnings, model, machine."""
        environment = _json_file(self.folder / ENVIRONMENT)
        installed = environment.get("verl") if isinstance(environment.get("verl"), dict) else {}
        total = self.config.get("trainer.total_training_steps")
        return {
            "name": self.name,
            "folder": str(self.folder),
            "state": self.state,
            "last_step": self.steps[-1] if self.metrics else None,
            "total_steps": total if isinstance(total, int) else None,
            "updated": self.last_written,
            "version": self.version,
            "unread": self.unread,
            "warnings": [{key: w[key] for key in ("step", "text", "count")} for w in self.warnings],
            "about": {
                "model": self.config.get("actor_rollout_ref.model.path") or self.config.get("model.path"),
                "advantage": self.config.get("algorithm.adv_estimator"),
                "loss": self.config.get("actor_rollout_ref.actor.policy_loss.loss_mode"),
                "rollout": self.config.get("actor_rollout_ref.rollout.name"),
                "started": environment.get("time"),
                "host": environment.get("host"),
                "commit": str(installed.get("commit") or installed.get("version") or ""),
                "python": environment.get("python"),
            },
            "command": _text_file(self.folder / COMMAND),
            "files": self.traces(),
        }

    def traces(self) -> list[str]:
        """Return traces and profiles below the run's folder, to open with a tool of their own; links are left out."""
        endings = (".json.gz", ".nsys-rep", ".pickle", ".pt.trace.json", ".html", "timeline.json")
        found = []
        for folder in folders_below(self.folder, 2):
            files = (p for p in sorted(folder.iterdir()) if p.name.endswith(endings))
            found += [str(p.relative_to(self.folder)) for p in files if p.is_file() and not p.is_symlink()]
        return found[:100]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Return the options in which runs with a configuration differ: key, and the value of each (None: no such key).

    Of folders and names, which differ in any two runs, nothing is returned.
    """
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = [(key, [run.config.get(key) for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if any(v != values[0] for v in values[1:]) and not _is_place(key)]


def _is_place(key: str) -> bool:
    return key.rpartition(".")[2] in ("default_local_dir", "rollout_data_dir", "validation_data_dir", "log_dir", "dir")


def _json_file(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8") or "{}")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _text_file(path: Path, most: int = 20_000) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:most]
    except OSError:
        return ""
