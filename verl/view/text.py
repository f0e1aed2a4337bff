"""Runs as text in a terminal: their states, curves as lines of blocks, time per phase, warnings and newest samples."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from verl.telemetry.trajectories import number_text, shortened, visible
from verl.view.page import View
from verl.view.runs import PHASES, Run
from verl.view.samples import Samples

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLORS = ("blue", "yellow", "green", "red", "cyan", "magenta", "bright_blue", "bright_yellow")
_EVERY_S, _READING_S = 2.0, 1.0
_MOST_SAMPLES = 8


def show(view: View, once: bool = False, console: Console | None = None) -> int:
    """Print runs; while one of them is under way on a terminal, again and again until Ctrl-C. Returns the exit code."""
    width = shutil.get_terminal_size((120, 40)).columns
    console = console or Console(highlight=False, width=width)
    if once or not console.is_terminal or not any(run.state.startswith("running") for run in view.runs):
        for samples in view.samples:
            samples.refresh()
        console.print(rendered(view, width))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                view.state()
                for samples in view.samples:
                    samples.refresh(_READING_S / len(view.samples))
                live.update(rendered(view, width), refresh=True)
                time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        console.print(rendered(view, width))
    return 0


def rendered(view: View, width: int) -> RenderableType:
    """Return all that is shown, for a terminal of ``width`` columns."""
    state = view.state()
    parts: list[RenderableType] = [_states(view.runs), _curves(view, state["charts"], width)]
    for run, samples in zip(view.runs, view.samples, strict=True):
        phases = _phases(run, width)
        warnings = [_warning(warning) for warning in run.warnings[-5:]]
        newest = _samples(samples)
        inner: list[Any] = [part for part in (phases, *warnings, newest) if part is not None]
        if inner:
            parts.append(Panel(Group(*inner), title=Text(visible(run.name)), title_align="left"))
    return Group(*parts)


def _states(runs: Sequence[Run]) -> Table:
    table = Table.grid(padding=(0, 2))
    for place, run in enumerate(runs):
        total = run.config.get("trainer.total_training_steps")
        steps = (
            f"step {run.steps[-1]}{f' of {total}' if isinstance(total, int) else ''}" if run.metrics else "no step yet"
        )
        name = Text(f"■ {visible(run.name)}", _COLORS[place % len(_COLORS)])
        kind = "red" if run.state.startswith("failed") else "green" if run.state.startswith("running") else "dim"
        count = len(run.warnings)
        note = f"{count} warning{'s' * (count != 1)}" if count else ""
        table.add_row(name, steps, Text(visible(run.state)[:100], kind), note)
    return table


def _warning(warning: dict) -> Text:
    text = Text("" if warning["step"] is None else f"step {warning['step']}: ", "bold")
    return text.append(visible(warning["text"]), "not bold")


def _curves(view: View, charts: Sequence[dict], width: int) -> Table:
    """A line a metric and run: first and last value, and all between as blocks of one scale."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("metric", "first", "last"):
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True, min_width=8)
    space = max(10, min(80, width - 70))
    table.add_column(no_wrap=True, min_width=space)
    names = [name for chart in charts if not chart["stacked"] for name in chart["names"]]
    for name in (name for name in names if not name.endswith(("/max", "/min"))):
        for place, run in enumerate(view.runs):
            values = [value for value in run.curve(name, space)[1] if value is not None]
            if values:
                line = Text(sparkline(values), _COLORS[place % len(_COLORS)])
                table.add_row(visible(name), f"{values[0]:.4g}", f"{values[-1]:.4g}", line)
    return table


def sparkline(values: Sequence[float]) -> str:
    """Return a block a value, its height by where it lies between the least and the greatest."""
    low, high = min(values), max(values)
    if high == low:
        return _BLOCKS[3] * len(values)
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / (high - low)))] for value in values)


def _phases(run: Run, width: int) -> Text | None:
    """Mean seconds of each phase over the steps, and a bar divided as they are."""
    means = {}
    for phase in PHASES:
        own = [value for value in run.curve(f"timing_s/{phase}")[1] if value is not None]
        if own:
            means[phase] = sum(own) / max(1, len(run.steps))
    total = sum(means.values())
    if not total:
        return None
    space, text = max(20, min(60, width - 20)), Text()
    for place, seconds in enumerate(means.values()):
        text.append("█" * round(space * seconds / total), _COLORS[place % len(_COLORS)])
    text.append(f"  {total:.2f} s a step\n")
    for phase, seconds in sorted(means.items(), key=lambda item: -item[1]):
        if seconds > 0.005 * total:
            text.append("■ ", _COLORS[list(means).index(phase) % len(_COLORS)])
            text.append(f"{phase} {seconds / total:.0%}   ")
    return text


def _samples(samples: Samples) -> Table | None:
    """Best and worst of the newest step, training and validation."""
    if not len(samples):
        return None
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for title in ("samples", "score", "source", "prompt", "response"):
        table.add_column(title, justify="right" if title == "score" else "left", no_wrap=True, overflow="ellipsis")
    for number in _best_and_worst(samples):
        t = samples.trajectory(number)
        kind = samples.kind(t.file)
        last = next((turn.text for turn in reversed(t.turns) if turn.generated and turn.text), "")
        cells = (f"{kind} {t.step}", number_text(t.reward), t.tag, shortened(t.prompt or "")[-40:], shortened(last, 60))
        table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _best_and_worst(samples: Samples) -> Iterator[int]:
    kinds, steps, scores = (samples.columns[name] for name in ("kind", "step", "score"))
    for kind in samples.words["kind"].values():
        newest = max((step for step, own in zip(steps, kinds, strict=True) if own == kind), default=None)
        own = [i for i in range(len(samples)) if kinds[i] == kind and steps[i] == newest and not math.isnan(scores[i])]
        own.sort(key=lambda i: -scores[i])
        half = _MOST_SAMPLES // 2
        yield from own if len(own) <= 2 * half else [*own[:half], *own[-half:]]
