"""Report of all checks: findings, batch arithmetic, memory tables, the data preview; as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from verl.utils.py_functional import excerpt

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig
    from verl.preflight.data import Preview
    from verl.rewards.functions.trial import Trial

Level = Literal["error", "warning", "note"]

_KEY = re.compile(r"(?<![\w.])[a-z_]\w*(?:\.\w+)+")
_WIDTH = 118


class Finding(NamedTuple):
    """One finding: ``error`` (the run would not start, or would stop), ``warning`` (probably a mistake) or ``note``."""

    level: Level
    text: str
    """Key, value, rule, and what to do."""
    keys: tuple[str, ...] = ()
    """Options that caused it, the main one first."""

    @property
    def all_keys(self) -> list[str]:
        """``keys``, then those that the text names."""
        return list(dict.fromkeys([*self.keys, *_KEY.findall(self.text)]))


class Number(NamedTuple):
    """One number of the batch arithmetic."""

    name: str
    value: Any
    text: str
    """In plain words."""
    keys: tuple[str, ...] = ()
    """Options it depends on."""


class PhaseMemory(NamedTuple):
    """Bytes on one device in one phase, by purpose; ``way_out`` names options that reduce the largest part."""

    phase: str
    parts: dict[str, int]
    way_out: str = ""

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])


@dataclass
class Report:
    """Result of all checks of one command line."""

    findings: list[Finding] = field(default_factory=list)
    derivation: list[Number] = field(default_factory=list)
    memory: list[PhaseMemory] = field(default_factory=list)
    memory_notes: list[str] = field(default_factory=list)
    preview: list[str] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    """Skipped checks, and harmless observations."""
    data_title: str = "data and reward"
    """Heading of the preview."""
    config: PPOConfig | None = None
    """The checked configuration; None if it could not be composed."""
    data: Preview | None = None
    """Preview of the data files."""

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "error"]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "warning"]

    def exit_code(self, strict: bool = False) -> int:
        """0: it can run; 1: with ``strict``, it can, and there are warnings; 2: it cannot."""
        return 2 if self.errors else 1 if strict and self.warnings else 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report for ``--json``."""
        return {
            "can_run": not self.errors,
            "errors": [{"keys": finding.all_keys, "text": finding.text} for finding in self.errors],
            "warnings": [{"keys": finding.all_keys, "text": finding.text} for finding in self.warnings],
            "derivation": [number._asdict() for number in self.derivation],
            "memory": [
                {
                    "phase": row.phase,
                    "bytes": row.total,
                    "parts": row.parts,
                    "largest": row.largest,
                    "way_out": row.way_out,
                }
                for row in self.memory
            ],
            "memory_notes": self.memory_notes,
            "notes": [finding.text for finding in self.notes],
            "preview": self.preview,
        }

    def to_text(self) -> str:
        """Return the report as text, errors last."""
        blocks = []
        if self.derivation:
            numbers = [
                wrapped(f"  {number.name:<15} ", number.text + (f"  [{', '.join(number.keys)}]" if number.keys else ""))
                for number in self.derivation
            ]
            blocks.append(["what one training step does", *numbers])
        if self.memory or self.memory_notes:
            blocks.append(["memory of one process, by phase", *_memory_table(self.memory), *self.memory_notes])
        if self.preview or self.notes:
            notes = [wrapped("  note    ", finding.text) for finding in self.notes]
            blocks.append([self.data_title, *self.preview, *notes])
        titles = {"warnings: it would run, but": self.warnings, "errors: the run would not start": self.errors}
        for title, findings in titles.items():
            if findings:
                lines = [wrapped(f"{number:>3}. ", finding.text) for number, finding in enumerate(findings, 1)]
                blocks.append([title, *lines])
        return "\n\n".join(["\n".join(block) for block in [*blocks, [self.totals]]])

    @property
    def totals(self) -> str:
        """``1 error, no warnings``."""
        counts = {"error": len(self.errors), "warning": len(self.warnings)}
        return ", ".join(f"{count or 'no'} {noun}{'' if count == 1 else 's'}" for noun, count in counts.items())


def format_bytes(number: float) -> str:
    """``3.1 GiB`` or ``310 MiB``."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def wrapped(start: str, text: str) -> str:
    """Wrap a text after ``start`` to the width of a terminal; lines keep their own indentation."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        own = " " * (len(line) - len(line.lstrip()))
        indent = " " * len(start) + own
        first = indent if number else start + own
        # keys and paths are not broken: they are to be copied
        fill = textwrap.TextWrapper(
            _WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        lines.append(fill.fill(line.strip()))
    return "\n".join(lines)


def _memory_table(rows: list[PhaseMemory]) -> list[str]:
    """Return the lines of a table with a column per phase and a row per part."""
    if not rows:
        return []
    lines = [["", *(row.phase for row in rows)]]
    for name in dict.fromkeys(name for row in rows for name, size in row.parts.items() if size):
        sizes = [row.parts.get(name, 0) for row in rows]
        lines.append([name, *(format_bytes(size) if size else "-" for size in sizes)])
    lines += [["total", *(format_bytes(row.total) for row in rows)], ["most of it", *(row.largest for row in rows)]]
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  " + "  ".join([line[0].ljust(first), *map(str.rjust, line[1:], widths)]) for line in lines]
    # one hint for each part, not for each phase
    hints = {row.largest: row.way_out for row in rows if row.way_out}
    return table + [wrapped("  ", f"less {name}: {way_out}") for name, way_out in hints.items()]


# -- the preview of the data, as lines, as JSON, and for a terminal; rich is imported only to print it ----------------

_BAR = 40
_SHOWN_BAD = 10
_SHOWN_CHARACTERS = 1500
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}


def preview_lines(found: Preview, limit: int) -> list[str]:
    """Return prompts, a histogram of their lengths, and rewards, as lines of text.

    Args:
        limit: ``data.max_prompt_length``.
    """
    lines = [f"  prompt  {excerpt(prompt.text, 160)}" for prompt in found.prompts]
    if lengths := found.lengths:
        tallest = max(count for *_, count in lengths.histogram)
        of = f" of {len(found.rows.good)}" if lengths.counted < len(found.rows.good) else ""
        lines.append(f"  {lengths.unit} of {lengths.counted}{of} prompts (data.max_prompt_length={limit})")
        for start, end, count in lengths.histogram:
            if count:
                lines.append(f"  {start:>6} to {end - 1:<6} {'#' * max(1, _BAR * count // tallest)} {count}")
    for trial in found.scores:
        known_bad = f"{_mean(trial.known_bad, math.nan):g} for known-bad answers" if not trial.error else ""
        if known_bad and trial.known_good:
            right = f"{_mean(trial.known_good):g} for known-good answers, written as {trial.form!r}"
            lines.append(f"  reward  {trial.data_source}: {right}; {known_bad}")
        elif known_bad:
            lines.append(f"  reward  {trial.data_source}: {known_bad}; the rows do not say what is right")
    return lines


def to_json(found: Preview, report: Report) -> dict[str, Any]:
    """Return the data preview as JSON values; the mean of no values is null."""
    rows = found.rows
    return {
        "ok": not report.errors,
        "findings": [finding._asdict() for finding in (*report.findings, *report.notes)],
        "files": [dataclasses.asdict(file) for file in rows.files],
        "unreadable": rows.unreadable,
        "columns": found.columns,
        "rows": found.num_rows,
        "bad_rows": {"count": rows.num_bad, "rows": [dataclasses.asdict(row) for row in rows.bad]},
        "duplicates": rows.num_duplicates,
        "data_sources": dict(rows.sources),
        "prompts": [dataclasses.asdict(prompt) for prompt in found.prompts],
        "lengths": None if found.lengths is None else dataclasses.asdict(found.lengths),
        "reward": found.reward,
        "scores": [
            {
                "data_source": trial.data_source,
                "rows": trial.rows,
                "scored": trial.tried,
                "form": trial.form,
                # keys of earlier releases
                "gold": _mean(trial.known_good),
                "garbage": _mean(trial.known_bad),
                "other": _mean(trial.other),
                "constant": trial.constant,
                "low_gold": trial.low_known_good,
                "error": trial.error,
            }
            for trial in found.scores
        ],
        "seconds": round(found.seconds, 3),
    }


def _mean(values: list[float], of_none: float | None = None) -> Any:
    return sum(values) / len(values) if values else of_none


def show(found: Preview, report: Report) -> None:
    """Print everything, errors last."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    class PipeConsole(Console):
        """A console that raises BrokenPipeError, for ``plain_ending`` to handle, when its reader has exited."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
        made = Table(*heads, box=None, header_style="bold", pad_edge=False)
        for line in lines:
            made.add_row(*map(escape, line))
        return made

    # into a file or pipe lines are not wrapped: other tools read them
    console = PipeConsole(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(table(("file", "rows"), [(file.path, str(file.rows)) for file in found.rows.files]))
    console.print(table(("column", "type", ""), _columns(found)))
    for prompt in found.prompts:
        tokens = "" if prompt.tokens is None else f", {prompt.tokens} tokens"
        # paths may hold brackets, which rich reads as markup
        console.rule(f"prompt of {escape(prompt.where)}{tokens}", style="dim", align="left")
        highlighted = Text(_shortened(prompt.text))
        highlighted.highlight_words([token for token in found.special_tokens if len(token) > 1], style="bold reverse")
        console.print(highlighted)
    if found.prompts:
        console.rule(style="dim")
    if lengths := found.lengths:
        most = max(count for *_, count in lengths.histogram)
        # a bin of one prompt is still seen
        bars = [(f"{a}-{b - 1}", str(n), "█" * math.ceil(_BAR * n / most)) for a, b, n in lengths.histogram]
        console.print(table((lengths.unit, "prompts", ""), bars))
        line = (
            f"lengths of {lengths.counted} prompts: {lengths.shortest} to {lengths.longest} {lengths.unit}, "
            f"median {lengths.median:g}, 95% up to {lengths.p95:.0f}"
        )
        if lengths.unit == "tokens":
            line += f"; {'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} too long"
        console.print(Text(line))
    if found.scores:
        console.print(Text(f"rewards ({found.reward})"))
        console.print(table(_REWARD_HEADS, map(_reward_line, found.scores)))
    for row in found.rows.bad[:_SHOWN_BAD]:
        console.print(Text(f"bad: {row}", style="red"))
    if found.rows.num_bad > _SHOWN_BAD:
        console.print(f"... and {found.rows.num_bad - _SHOWN_BAD} more bad rows (--json lists up to 1000)")
    for finding in (*report.notes, *report.warnings, *report.errors):
        console.print(Text(f"{finding.level}: {finding.text}", style=_STYLES[finding.level]))
    verdict = "problems found" if report.errors else "ready to train on"
    console.print(
        f"{found.num_rows} rows, {verdict}; {report.totals} ({found.seconds:.1f} s)",
        style="red" if report.errors else "green",
    )


def _shortened(text: str) -> str:
    """Return a very long text without its middle."""
    half = _SHOWN_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[... {left_out} characters ...]\n{text[-half:]}"


_REWARD_HEADS = (
    "data source", "rows", "scored", "known-good", "known-bad", "other rows'", "known-good answers written as"
)  # fmt: skip


def _reward_line(trial: Trial) -> tuple[str, ...]:
    means = [_mean(values) for values in (trial.known_good, trial.known_bad, trial.other)]
    shown = ["-" if value is None else f"{value:.3f}" for value in means]
    return (trial.data_source, str(trial.rows), str(trial.tried), *shown, trial.form or "-")


def _columns(found: Preview) -> Iterator[tuple[str, str, str]]:
    """Yield (column, its types in the files, remark), also of columns that no file has."""
    types: dict[str, dict[str, None]] = {}
    for file in found.rows.files:
        for name, kind in file.columns.items():
            kind = re.sub(r"(element|item): ", "", kind)  # Arrow's names of the items of a list
            types.setdefault(name, {})[kind if len(kind) <= 60 else f"{kind[:57]}..."] = None
    for name in (*types, *(name for name, files_with_it in found.columns.items() if files_with_it == "none")):
        remark = {"none": "missing", "some": "in some files only"}.get(found.columns.get(name, ""), "")
        yield name, " or ".join(types.get(name, ())), remark
