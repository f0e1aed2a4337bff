"""``verl trajectories``: trajectories of a run in the terminal, as one HTML page or as JSON."""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import shutil
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.telemetry.trajectories import (
    Style,
    Trajectory,
    columns,
    find_files,
    in_full,
    number_text,
    read,
    shortened,
    table,
    visible,
)

_ROWS, _PAGE = 40, 500  # trajectories of a table and of a page, unless --limit says otherwise

_SORT: dict[str, Callable[[Trajectory], float]] = {
    "reward": lambda t: -math.inf if t.reward is None or math.isnan(t.reward) else t.reward,
    "turns": lambda t: t.num_turns,
    "seconds": lambda t: -1.0 if t.seconds is None else t.seconds,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl trajectories",
        description="Show the trajectories of a run: without options, the numbers of each step and the trajectories "
        "of the last. Of one trajectory or of the best and worst, the whole text.",
    )
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="folder or file of samples: trainer.rollout_data_dir, a trace, a run")
    add("--step", action="append", metavar="N", help="only of this step; may be repeated; last: the newest")
    add("--index", type=int, help="the one of this place in its file, from 0: whole text")
    add("--uid", help="those of this prompt: whole text")
    add("--sort", choices=[*_SORT], help="largest first")
    add("--status", help="only those that ended so, e.g. error, completed, max_tokens")
    add("--tag", help="only of this environment, agent loop or data source")
    add("--best", type=_count, metavar="K", help="the K of highest reward: whole text")
    add("--worst", type=_count, metavar="K", help="the K of lowest reward: whole text")
    add("--diff", nargs=2, type=int, metavar="STEP", help="compare two steps, prompt by prompt")
    add("--limit", type=_count, metavar="N", help=f"rows of the table ({_ROWS}), trajectories of the page ({_PAGE})")
    add("--html", nargs="?", const="", metavar="FILE", help="write one page; FILE is trajectories.html by default")
    add("--json", action="store_true", help="print one JSON object a trajectory")
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise ValueError("must be 1 or more")
    return count


def main(words: Sequence[str] | None = None) -> int:
    """Run ``verl trajectories``; returns the exit code: 1 where nothing was found."""
    parser = _parser()
    options = parser.parse_args(words)
    if options.html and not options.html.endswith((".html", ".htm")):
        options.paths.append(options.html)  # --html PATH: the page's own name is the default
        options.html = ""
    if options.best and options.worst:
        parser.error("--best and --worst: give one of them")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    style = Style(sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    problems: list[str] = []
    try:
        files = find_files(options.paths)
        steps = _steps(parser, options, files)
        found = _show(options, files, read(files, problems, steps), style)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for problem in problems[:20]:
        print(f"skipped {visible(problem)}", file=sys.stderr)
    if len(problems) > 20:
        print(f"skipped {len(problems) - 20:,} more lines", file=sys.stderr)
    if not found:
        print("no trajectory is as asked for", file=sys.stderr)
    return 0 if found else 1


def _steps(parser: argparse.ArgumentParser, options: argparse.Namespace, files: Sequence[Path]) -> list[int]:
    steps = list(options.diff or ())
    for text in options.step or ():
        if text == "last":
            steps += [max((int(file.stem) for file in files if file.stem.isdecimal()), default=0)]
        elif text.isdecimal():
            steps.append(int(text))
        else:
            parser.error(f"--step {text!r}: give a number, or last")
    return steps


def _show(options: argparse.Namespace, files: Sequence[Path], trajectories: Iterator[Trajectory], style: Style) -> bool:
    """Print or write what is asked for; returns whether there was anything."""
    width = shutil.get_terminal_size((120, 40)).columns if sys.stdout.isatty() else 200
    stream = (t for t in trajectories if _is_selected(t, options))
    if options.diff:
        return _show_difference(options, list(stream), style, width)
    is_whole = options.index is not None or options.uid is not None
    if options.best or options.worst:
        pick, is_whole = heapq.nlargest if options.best else heapq.nsmallest, True
        rewarded = (t for t in stream if t.reward is not None and not math.isnan(t.reward))
        chosen = pick(options.best or options.worst, rewarded, key=_SORT["reward"])
    elif options.html is not None and not options.sort:
        chosen = list(deque(stream, maxlen=options.limit or _PAGE))
    elif not is_whole and not options.json:
        return _show_overview(options, stream, style, width)
    else:
        chosen = list(stream)
    if options.sort:
        chosen.sort(key=_SORT[options.sort], reverse=True)
    if options.html is not None:
        return _write_page(options, chosen)
    for t in chosen:
        print(json.dumps(t.to_json(), ensure_ascii=False) if options.json else in_full(t, style) + "\n")
    return bool(chosen)


def _is_selected(trajectory: Trajectory, options: argparse.Namespace) -> bool:
    asked = (
        (options.index, trajectory.index),
        (options.uid, trajectory.uid),
        (options.status, trajectory.status),
        (options.tag, trajectory.tag),
    )
    return all(value is None or value == own for value, own in asked)


def _write_page(options: argparse.Namespace, chosen: Sequence[Trajectory]) -> bool:
    from verl.view.page import of_trajectories

    chosen = chosen[: options.limit or _PAGE]
    if not chosen:
        return False
    first = Path(options.paths[0]).expanduser()
    path = Path(options.html) if options.html else (first if first.is_dir() else first.parent) / "trajectories.html"
    path.write_text(of_trajectories(chosen, " ".join(map(str, options.paths))), encoding="utf-8")
    print(f"{path}: {len(chosen):,} trajectories")
    return True


@dataclass
class _StepNumbers:
    """Sums over the trajectories of a step."""

    count: int = 0
    rewards: list[float] = field(default_factory=list)
    successes: list[float] = field(default_factory=list)
    turns: int = 0
    statuses: Counter = field(default_factory=Counter)

    def add(self, t: Trajectory) -> None:
        self.count += 1
        self.statuses[t.status or "-"] += 1
        if t.status != "error":  # a failed episode has no reward and no turns
            self.turns += t.num_turns
            self.rewards += [] if t.reward is None else [t.reward]
            self.successes += [] if t.success is None else [t.success]

    def columns(self) -> tuple[str, ...]:
        done = self.count - self.statuses["error"]
        shares = ", ".join(f"{status} {count / self.count:.0%}" for status, count in self.statuses.most_common())
        turns = number_text(self.turns / done if done else None, 1)
        return (str(self.count), number_text(_mean(self.rewards)), number_text(_mean(self.successes)), turns, shares)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _show_overview(options: argparse.Namespace, stream: Iterator[Trajectory], style: Style, width: int) -> bool:
    """Print the numbers of every step, by folder, and the trajectories of the newest step."""
    numbers: dict[tuple[Path, int], _StepNumbers] = {}
    newest: list[Trajectory] = []
    for t in stream:
        numbers.setdefault((t.file.parent, t.step), _StepNumbers()).add(t)
        if newest and (newest[0].file.parent, newest[0].step) != (t.file.parent, t.step):
            newest = [] if t.step >= newest[0].step or newest[0].file.parent != t.file.parent else newest
        if not newest or newest[0].step == t.step:
            newest.append(t)
    if not newest:
        return False
    names = ("step", "trajectories", "reward", "success", "turns", "status")
    for folder in dict.fromkeys(folder for folder, _ in numbers):
        rows = [(str(step), *found.columns()) for (own, step), found in sorted(numbers.items()) if own == folder]
        print(style("head", visible(str(folder))))
        print(columns([names, *rows], style, width, left=(5,)) + "\n")
    if options.sort:
        newest.sort(key=_SORT[options.sort], reverse=True)
    limit = options.limit or _ROWS
    print(table(newest[:limit], style, width))
    if len(newest) > limit:
        print(style("note", f"and {len(newest) - limit:,} more of step {newest[0].step}: --limit N"))
    print(style("note", f"One in full: --step {newest[0].step} --index {newest[0].index}. As a page: --html."))
    return True


def _show_difference(options: argparse.Namespace, found: list[Trajectory], style: Style, width: int) -> bool:
    """Print how the trajectories of each prompt changed from one step to another; the whole text of the best or worst.

    Prompts are paired by uid, and where the steps share none (training prompts are new in every step), by their text.
    """
    first, last = options.diff
    steps = {step: [t for t in found if t.step == step] for step in (first, last)}
    missing = [str(step) for step, own in steps.items() if not own]
    if missing:
        print(f"no trajectories of step {' and '.join(missing)}", file=sys.stderr)
        return False
    names = ("step", "trajectories", "reward", "success", "turns", "status")
    totals = []
    for step, own in steps.items():
        numbers = _StepNumbers()
        for t in own:
            numbers.add(t)
        totals.append((str(step), *numbers.columns()))
    print(columns([names, *totals], style, width, left=(5,)) + "\n")
    pairs = _pairs(steps[first], steps[last])
    if not pairs:
        print("the steps share no prompt, neither its uid nor its text", file=sys.stderr)
        return True
    pairs.sort(key=_gain, reverse=not options.worst)
    limit = options.limit or _ROWS
    rows: list[tuple[str, ...]] = [
        ("prompt", f"reward {first}", f"reward {last}", f"turns {first}", f"turns {last}", "status")
    ]
    for before, after in pairs[:limit]:
        rewards = (number_text(_mean_reward(before)), number_text(_mean_reward(after)))
        turns = [number_text(sum(t.num_turns for t in side) / len(side), 1) for side in (before, after)]
        statuses = f"{before[0].status} -> {after[0].status}"
        rows.append((shortened(before[0].uid or before[0].prompt or "", 60), *rewards, *turns, statuses))
    print(columns(rows, style, width, left=(0, 5)))
    if len(pairs) > limit:
        print(style("note", f"and {len(pairs) - limit:,} more: --limit N"))
    is_one = options.uid is not None or options.index is not None
    for before, after in pairs[: options.best or options.worst or (len(pairs) if is_one else 0)]:
        print("\n" + in_full(before[0], style) + "\n\n" + in_full(after[0], style))
    return True


Pair = tuple[list[Trajectory], list[Trajectory]]
"""Trajectories of one prompt at two steps."""


def _pairs(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> list[Pair]:
    for key in (lambda t: t.uid, lambda t: t.prompt):
        sides: list[dict[str, list[Trajectory]]] = [{}, {}]
        for side, trajectories in zip(sides, (before, after), strict=True):
            for t in trajectories:
                if key(t) is not None:
                    side.setdefault(key(t), []).append(t)
        if common := [name for name in sides[0] if name in sides[1]]:
            return [(sides[0][name], sides[1][name]) for name in common]
    return []


def _mean_reward(trajectories: Sequence[Trajectory]) -> float | None:
    return _mean([t.reward for t in trajectories if t.reward is not None])


def _gain(pair: Pair) -> float:
    before, after = (_mean_reward(side) for side in pair)
    gain = math.nan if before is None or after is None else after - before
    return 0.0 if math.isnan(gain) else gain
