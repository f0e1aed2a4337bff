"""Progress bar of a run with its most important metrics, and a closing summary.

Knows metric names and how to print them; the trainer does not import this module. On a terminal rich draws the bar,
elsewhere (a log file, CI) every step is one plain line.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO, TypeVar

from verl.telemetry.run_record import log_only, print_through, program_of, shell_word, terminal

# label, the metrics that it may show (the first one present), format
NUMBERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("critic/score/mean", "critic/rewards/mean"), "{:.3f}"),
    ("loss", ("train/loss",), "{:.4f}"),
    ("accuracy", ("train/preference_accuracy",), "{:.2f}"),
    ("length", ("response_length/mean",), "{:.1f}"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:.4f}"),
    ("entropy", ("actor/entropy",), "{:.2f}"),
    ("grad", ("actor/grad_norm", "critic/grad_norm", "train/grad_norm"), "{:.2f}"),
    ("tok/s", ("perf/throughput",), "{:.0f}"),
    ("s/step", ("perf/time_per_step",), "{:.1f}"),
)
CORE_METRIC = re.compile(
    r"^val-core/(?P<source>.+)/(?P<variable>[^/]+)/(?P<kind>mean@\d+|(?:maj|best|worst)@\d+/mean)$"
)
SUCCESS = re.compile(r"^(?P<split>val-)?(?:env|agent)/(?P<source>.+)/success$")
"""Share of the episodes of an environment, or of an agent loop, that solved their task."""
STEPS_FOR_ETA = 10
Item = TypeVar("Item")
PHASES = {
    "gen": "generating",
    "gen_max": "generating greedily",
    "reward": "scoring",
    "old_log_prob": "log-probs of the policy",
    "ref": "log-probs of the reference",
    "teacher": "log-probs of the teacher",
    "values": "values of the critic",
    "update_critic": "updating the critic",
    "update_actor": "updating the actor",
    "update_model": "updating the model",
    "testing": "validating",
    "save_checkpoint": "saving a checkpoint",
}
"""Part of a step, as ``timing_s`` names it -> what is shown of it while it lasts."""
PHASE_S = 60.0
"""Seconds of one part of a step between two lines about it where there is no terminal."""
DISPENSABLE = ("tok/s", "grad", "s/step", "length", "entropy", "kl", "success")
"""Labels that go first where a terminal is narrow, in this order."""
BAR_WIDTHS = {130: 20, 60: 8}
"""Least columns of a terminal -> columns of its bar."""


def format_duration(seconds: float) -> str:
    """``42 s``, ``3 min 07 s`` or ``2 h 05 min``."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def format_numbers(metrics: Mapping[str, Any], width: int | None = None, unit: str = "step") -> str:
    """The numbers that matter, of those present: ``reward 0.312  length 6.2  kl 0.0001 ...``.

    Args:
        width: characters there are; the dispensable numbers that do not fit are left out. None: no limit.
    """
    parts = {}
    for label, names, form in NUMBERS:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            parts[label] = f"{label.replace('step', unit)} {form.format(float(metrics[name]))}"
        if label == "reward" and (shares := _successes(metrics)):
            parts["success"] = f"success {sum(shares) / len(shares):.3f}"  # environments count alike
    for label in DISPENSABLE:
        if width is not None and len("  ".join(parts.values())) > width:
            parts.pop(label, None)
    return "  ".join(parts.values())


def _successes(metrics: Mapping[str, Any]) -> list[float]:
    matches = ((SUCCESS.match(name), value) for name, value in metrics.items() if name.endswith("/success"))
    return [float(value) for match, value in matches if match and not match["split"]]


def core_metrics(metrics: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """The ``val-core`` metrics as (data source, name) -> value; a name is e.g. ``reward mean@1``.

    Of episodes also (environment, ``success``), of training on examples (``val``, ``loss``), and on preference pairs
    (``val``, ``accuracy``).
    """
    found = {}
    for name, value in metrics.items():
        match = CORE_METRIC.match(name)
        if name in ("val/loss", "val/preference_accuracy"):
            found["val", name.rpartition("/")[2].removeprefix("preference_")] = float(value)
        if (solved := SUCCESS.match(name)) and solved["split"]:
            found[solved["source"], "success"] = float(value)
        if match:
            found[match["source"], f"{match['variable']} {match['kind'].removesuffix('/mean')}"] = float(value)
    return found


class Progress:
    """Shows how far a run is.

    Args:
        total: steps of the whole run.
        enabled: False shows nothing (``say`` still prints).
        stream: where to; default standard output.
        is_terminal: draw a bar; default: whether ``stream`` is a terminal.
        unit: what is counted.
    """

    def __init__(
        self,
        total: int,
        enabled: bool = True,
        stream: TextIO | None = None,
        is_terminal: bool | None = None,
        unit: str = "step",
    ) -> None:
        self.total, self.unit = total, unit
        self.enabled = enabled
        self.stream = stream
        self.bar: Any = None
        self.last_time = time.monotonic()
        self.step_times: deque[float] = deque(maxlen=STEPS_FOR_ETA)
        self._phases: list[tuple[str, float]] = []
        self._finished = threading.Event()
        if is_terminal is None:
            is_terminal = (stream or sys.stdout).isatty()
        if enabled and is_terminal:
            self.bar, self.task, self.taken, self._restore_printing = _make_bar(total, stream, unit, self.phase_text)
        elif enabled:
            threading.Thread(target=self._say_phases, name="progress", daemon=True).start()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Step ``step`` is done and has these metrics."""
        now = time.monotonic()
        self.step_times.append(float(metrics.get("perf/time_per_step", now - self.last_time)))
        self.last_time = now
        if not self.enabled:
            return
        left = self.seconds_left(step)
        if self.bar is not None:
            eta = f"  eta {format_duration(left)}"
            width = self.bar.console.width - self.taken - len(eta)
            numbers = format_numbers(metrics, width, self.unit)
            self.bar.update(self.task, completed=step, numbers=numbers + eta)
        width, numbers = len(str(self.total)), format_numbers(metrics, unit=self.unit)
        line = f"{self.unit} {step:>{width}}/{self.total}  {numbers}  eta {format_duration(left)}"
        if self.bar is None:
            self.say(line)
        else:
            log_only(f"{line}\n")  # the bar is drawn on the terminal alone

    def seconds_left(self, step: int) -> float:
        """Steps left times the mean of the latest step times."""
        mean = sum(self.step_times) / len(self.step_times) if self.step_times else 0.0
        return mean * max(0, self.total - step)

    def validated(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a validation's core metrics."""
        if not self.step_times:  # what came before the first step does not count for the estimate
            self.last_time = time.monotonic()
        if self.enabled:
            for (source, name), value in core_metrics(metrics).items():
                self.say(f"validation at step {step}: {source} {name} {value:.3f}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show, while the block lasts and once that is long, which part of a step it is."""
        phase = (PHASES.get(name, ""), time.monotonic())
        if phase[0]:
            self._phases.append(phase)
        try:
            yield
        finally:
            if phase[0]:
                self._phases.remove(phase)

    def phase_text(self) -> str:
        """The part of a step that has lasted two seconds or longer, and how long; empty if there is none."""
        what, start = next(iter(self._phases[-1:]), ("", 0.0))
        seconds = time.monotonic() - start
        return f"{what} {format_duration(seconds)}" if what and seconds >= SILENT_S else ""

    def _say_phases(self) -> None:
        said: dict[tuple[str, float], float] = {}
        while not self._finished.wait(1.0):
            for what, start in self._phases[-1:]:
                seconds = time.monotonic() - start
                if seconds - said.get((what, start), 0.0) >= PHASE_S:
                    said = {(what, start): seconds}
                    self.say(f"{what} for {format_duration(seconds)}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
            log_only(f"{text}\n")
        else:
            print(text, file=self.stream or sys.stdout, flush=True)

    def finish(self) -> None:
        """Take the bar down, leaving its last state on the screen; calling it again does nothing."""
        self._finished.set()
        if self.bar is not None:
            self.bar.stop()
            self._restore_printing()
            self.bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finish()


def _make_bar(
    total: int, stream: TextIO | None, unit: str, phase_text: Callable[[], str]
) -> tuple[Any, Any, int, Callable[[], None]]:
    """A started bar, its task, the columns that are not for numbers, and what to call when it is taken down.

    Very narrow terminals get the numbers alone. What is printed meanwhile stands above the bar, and in the run's log.
    """
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.text import Text

    class Phase(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(phase_text(), style="dim", no_wrap=True, overflow="ellipsis")

    below = terminal() if stream is None else None
    console = Console(file=stream, force_terminal=True) if stream is not None else Console(file=below)
    bar_width = next((bar for least, bar in BAR_WIDTHS.items() if console.width >= least), 0)
    bar_column = [BarColumn(bar_width=bar_width)] if bar_width else []
    numbers = TextColumn("{task.fields[numbers]}")
    bar = RichProgress(
        *(TextColumn(unit), MofNCompleteColumn(), *bar_column, numbers, Phase()),
        console=console,
        redirect_stdout=below is None,
        redirect_stderr=below is None,
    )
    task = bar.add_task("train", total=total, numbers="starting")
    bar.start()
    restore = print_through(lambda stream: FileProxy(console, stream))
    return bar, task, len(f"{unit} {total}/{total} ") + (bar_width + 1) * len(bar_column), restore


SILENT_S, LINE_S = 2.0, 15.0
"""Seconds of work of which nothing is said, and between two lines where there is no terminal."""


def watched(
    items: Iterable[Item],
    what: str,
    total: int | None = None,
    count: Callable[[Item], int] = lambda item: 1,
    stream: TextIO | None = None,
) -> Iterator[Item]:
    """Yield ``items``, and say how many of them are done once that takes longer than two seconds.

    On a terminal one line is written over; elsewhere there is a line now and then. A last one says how long it took.

    Args:
        what: noun in the plural, ``prompts read``.
        total: how many there are, if that is known.
        count: how many an item stands for.
        stream: where to; default standard error.
    """
    stream = stream or sys.stderr
    start = last = time.monotonic()
    done, is_shown, over = 0, False, stream.isatty()
    of = "" if total is None else f"/{total:,}"
    try:
        for item in items:
            yield item
            done, now = done + count(item), time.monotonic()
            if now - start > SILENT_S and (not is_shown or now - last > (0.2 if over else LINE_S)):
                left = "" if not total else f", {format_duration((now - start) * (total - done) / done)} left"
                line = f"{what} {done:,}{of}{left}"
                print(f"\r\x1b[K{line}" if over else line, end="" if over else "\n", file=stream, flush=True)
                is_shown, last = True, now
    finally:
        if is_shown:
            end = f"{what} {done:,}{of} in {format_duration(time.monotonic() - start)}"
            print(f"\r\x1b[K{end}" if over else end, file=stream, flush=True)


# -- the closing summary ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSummary:
    """Numbers and paths of a finished run."""

    steps: int
    """Steps done, counted from the very first run."""
    seconds: float
    """Wall time of this run."""
    validations: Sequence[tuple[int, Mapping[str, Any]]] = ()
    """(step, metrics) of every validation, oldest first."""
    places: Mapping[str, str | Path | None] = field(default_factory=dict)
    """Paths by what they hold, e.g. ``{"checkpoint": "runs/add1/global_step_25"}``; None is left out."""
    overrides: Sequence[str] = ()
    """The command line after the program, from which the commands to go on are made."""
    device: str = "cpu"
    """``trainer.device`` of this run."""
    can_resume: bool = True
    """Whether a checkpoint was saved."""
    again: Path | None = None
    """The script that starts this run again, if there is one."""
    gpu_options: Sequence[str] = ()
    """Arguments to add to the command for the same run on a GPU; empty if it cannot be."""
    gpu_refusal: str = ""
    """Why it cannot be."""


def set_overrides(overrides: Sequence[str], new: Mapping[str, Any]) -> list[str]:
    """``overrides`` with the keys of ``new`` set, in place where they are given, else at the end.

    Of several settings of one key only the last, which is the one that holds, is kept.
    """
    result: dict[str, str] = {}
    for override in overrides:
        result[override.partition("=")[0].lstrip("+")] = override
    result.update((name, f"{name}={value}") for name, value in new.items())
    return list(result.values())


def command_line(overrides: Sequence[str], width: int = 100) -> str:
    """A training command as it can be pasted into a shell, broken into lines of about ``width`` characters.

    Secrets among the options are taken from variables of the shell.
    """
    module, words = program_of(overrides)
    return _wrapped([f"{_this_python()} -m {module}", *map(shell_word, words)], width)


def _wrapped(words: Sequence[str], width: int = 100) -> str:
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + 1 + len(word) > width:
            lines.append("    " + word)
        else:
            lines[-1] += " " + word
    return " \\\n".join(lines)


def _this_python() -> str:
    """The running Python as one would type it here."""
    try:
        path = Path(sys.executable).relative_to(Path.cwd())
    except ValueError:
        return shlex.quote(sys.executable or "python")
    return shlex.quote(str(path))


def format_summary(summary: RunSummary, script: Path | None = None) -> str:
    """The closing text: validation before -> after, what lies where, and how to go on.

    Args:
        script: the file ``write_resume_script`` made; its short call stands for the whole command then.
    """
    lines = ["", f"Done: {summary.steps} steps in {format_duration(summary.seconds)}."]
    lines += _validation_lines(summary.validations)
    places = {label: path for label, path in summary.places.items() if path is not None}
    if places:
        width = max(map(len, places))
        lines += ["", *(f"{label:<{width}}  {_shown(path)}" for label, path in places.items())]
    if command := _trajectories_command(summary):
        lines += ["", "To see what the policy did:", f"  {command}"]
    if (log := summary.places.get("log")) is not None:
        folder = shlex.quote(_shown(Path(log).parent))
        lines += ["", "To see curves and samples in a browser:", f"  {_this_python()} -m verl view {folder}"]
    if summary.can_resume and summary.overrides:
        command = command_line(resume_overrides(summary)) if script is None else f"bash {shlex.quote(_shown(script))}"
        lines += ["", f"To train on from the checkpoint, up to step {2 * summary.steps}:", f"  {command}"]
    if summary.gpu_options:
        if summary.again is None:
            command = command_line([*summary.overrides, *summary.gpu_options])
        else:
            command = _wrapped(["bash", shlex.quote(_shown(summary.again)), *map(shlex.quote, summary.gpu_options)])
        lines += ["", "The same on a GPU, from the start and in a folder of its own:", f"  {command}"]
    elif summary.gpu_refusal:
        lines += ["", f"On a GPU this configuration would be refused: {summary.gpu_refusal}"]
    return "\n".join(lines)


def print_summary(summary: RunSummary, stream: TextIO | None = None) -> None:
    """Print the closing text, and leave the command to go on as ``resume.sh`` next to the checkpoint."""
    checkpoint = summary.places.get("checkpoint")
    script = None
    if summary.can_resume and checkpoint is not None:
        script = write_resume_script(Path(checkpoint).parent, resume_overrides(summary))
    print(format_summary(summary, script), file=stream or sys.stdout, flush=True)


def resume_overrides(summary: RunSummary) -> list[str]:
    """The run's command line, changed so that it goes on from the newest checkpoint for as many steps again."""
    return _resuming(summary.overrides, {"trainer.total_training_steps": 2 * summary.steps})


def _resuming(overrides: Sequence[str], new: Mapping[str, Any]) -> list[str]:
    """``overrides`` with ``new``, made to go on from the newest checkpoint."""
    # a file named by --config-name may say it, too
    if any(override.lstrip("+").startswith(("trainer.resume_mode=", "--config")) for override in overrides):
        new = {**new, "trainer.resume_mode": "auto"}
    return set_overrides(overrides, new)


def stop_notice(
    step: int, total: int, checkpoint: Path | None, overrides: Sequence[str], why: str | None = None
) -> str:
    """Return the closing text of a run that ends early: its last step, and the command to resume it.

    Leaves ``resume.sh`` as a finished one does.

    Args:
        step: the one it was in.
        checkpoint: the newest complete one, if any.
        overrides: the run's command line; empty if it was not started from one.
        why: reason to end when the step was complete. None: it was not.
    """
    stopped = f"Stopped after step {step} of {total}: {why}." if why else f"Stopped in step {step} of {total}."
    if checkpoint is None:
        return f"{stopped} No checkpoint is there to go on from; trainer.save_freq=N saves one every N steps."
    if not overrides:
        return f"{stopped} The newest checkpoint is {_shown(checkpoint)}."
    resuming = _resuming(overrides, {})
    try:
        command = f"bash {shlex.quote(_shown(write_resume_script(checkpoint.parent, resuming)))}"
    except OSError:  # a full disk may be what stopped the run
        command = command_line(resuming)
    return f"{stopped} To go on from {_shown(checkpoint)}:\n  {command}"


def write_resume_script(folder: Path, overrides: Sequence[str]) -> Path:
    """Write ``folder/resume.sh``: the command, run from this folder; its arguments are further options."""
    path = folder / "resume.sh"
    path.write_text(
        "#!/usr/bin/env bash\n"
        "# Trains on from the newest checkpoint in this folder. Further options may follow: trainer.device=cuda\n"
        f'cd {shlex.quote(os.getcwd())} && exec {command_line(overrides)} "$@"\n',
        encoding="utf-8",
    )
    return path


def _validation_lines(validations: Sequence[tuple[int, Mapping[str, Any]]]) -> list[str]:
    scored = [(step, core_metrics(metrics)) for step, metrics in validations]
    scored = [(step, metrics) for step, metrics in scored if metrics]
    if not scored:
        return []
    (first, before), (last, after) = scored[0], scored[-1]
    lines = ["", f"Validation, step {first} -> step {last}" if first != last else f"Validation at step {first}"]
    width = max(len(f"{source} {name}") for source, name in after)
    for (source, name), value in after.items():
        label = f"{source} {name}"
        start = f"{before[source, name]:.3f} -> " if first != last and (source, name) in before else ""
        lines.append(f"  {label:<{width}}  {start}{value:.3f}")
    return lines


def _trajectories_command(summary: RunSummary) -> str | None:
    """Return the command that shows samples of the run, those of validation before and after; None: there are none."""
    steps = [step for step, _ in summary.validations]
    command = f"{_this_python()} -m verl trajectories"
    if (folder := summary.places.get("validation samples")) is not None and len(set(steps)) > 1:
        return f"{command} {shlex.quote(_shown(folder))} --diff {steps[0]} {steps[-1]} --best 1"
    folder = summary.places.get("samples") or folder
    return None if folder is None else f"{command} {shlex.quote(_shown(folder))}"


def _shown(path: str | Path) -> str:
    """A path relative to here if that is shorter."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
