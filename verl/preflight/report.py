"""Report of all checks: findings, batch arithmetic, memory tables, the data preview; as text and as JSON."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from verl.config.ppo import PPOConfig
    from verl.preflight.data import Preview
    from verl.preflight.rows import Lengths
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
    """What was not checked, and harmless observations."""
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
            blocks.append("what one training step does\n" + "\n".join(map(_number, self.derivation)))
        if self.memory or self.memory_notes:
            blocks.append(
                "\n".join(["memory of one process, by phase", *_memory_table(self.memory), *self.memory_notes])
            )
        if self.preview or self.notes:
            notes = [wrapped("  note    ", finding.text) for finding in self.notes]
            blocks.append("\n".join(["data and reward", *self.preview, *notes]))
        blocks.append(_findings("warnings: it would run, but", self.warnings))
        blocks.append(_findings("errors: the run would not start", self.errors))
        return "\n\n".join([*filter(None, blocks), self.totals])

    @property
    def totals(self) -> str:
        """``1 error, no warnings``."""
        return f"{_counted(len(self.errors), 'error')}, {_counted(len(self.warnings), 'warning')}"


def format_bytes(number: float) -> str:
    """``3.1 GiB`` or ``310 MiB``."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _findings(title: str, findings: list[Finding]) -> str:
    lines = [wrapped(f"{number:>3}. ", finding.text) for number, finding in enumerate(findings, 1)]
    return "\n".join([title, *lines]) if lines else ""


def _number(number: Number) -> str:
    keys = f"  [{', '.join(number.keys)}]" if number.keys else ""
    return wrapped(f"  {number.name:<15} ", f"{number.text}{keys}")


def wrapped(start: str, text: str) -> str:
    """Wrap a text after ``start`` to the width of a terminal; lines keep their own indentation."""
    lines = []
    for number, line in enumerate(text.splitlines()):
        own = " " * (len(line) - len(line.lstrip()))
        indent = " " * len(start) + own
        lines.append(
            textwrap.fill(
                line.strip(),
                _WIDTH,
                initial_indent=indent if number else start + own,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines)


def _memory_table(rows: list[PhaseMemory]) -> list[str]:
    """Return the lines of a table with a column per phase and a row per part."""
    names = list(dict.fromkeys(name for row in rows for name, size in row.parts.items() if size))
    if not rows:
        return []
    lines = [["", *(row.phase for row in rows)]]
    lines += [[name, *(_cell(row.parts.get(name, 0)) for row in rows)] for name in names]
    lines += [["total", *(format_bytes(row.total) for row in rows)], ["most of it", *(row.largest for row in rows)]]
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  "
        + "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], widths, strict=True))])
        for line in lines
    ]
    hints = {row.largest: row.way_out for row in rows if row.way_out}
    return table + [wrapped("  ", f"less {name}: {way_out}") for name, way_out in hints.items()]


def _cell(size: int) -> str:
    return format_bytes(size) if size else "-"


# -- the data preview of ``verl check``, as JSON and for a terminal; rich is imported only to print it ----------------

_SHOWN_BAD = 10
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_SHOWN_CHARACTERS = 1500


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
        "scores": [_scores_json(scores) for scores in found.scores],
        "seconds": round(found.seconds, 3),
    }


def _scores_json(scores: Trial) -> dict[str, Any]:
    from verl.rewards.functions.trial import mean

    means = {"gold": mean(scores.known_good), "garbage": mean(scores.known_bad), "other": mean(scores.other)}
    return {
        "data_source": scores.data_source,
        "rows": scores.rows,
        "scored": scores.tried,
        "form": scores.form,
        **{name: None if math.isnan(value) else value for name, value in means.items()},
        "constant": scores.constant,
        "low_gold": scores.low_known_good,
        "error": scores.error,
    }


def show(found: Preview, report: Report) -> None:
    """Print everything, errors last."""
    from rich.console import Console
    from rich.markup import escape
    from rich.text import Text

    class PipeConsole(Console):
        """A console that raises BrokenPipeError, for ``plain_ending`` to handle, when its reader is gone."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = PipeConsole(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print(_files(found))
    for prompt in found.prompts:
        tokens = "" if prompt.tokens is None else f", {prompt.tokens} tokens"
        console.rule(f"prompt of {escape(prompt.where)}{tokens}", style="dim", align="left")
        console.print(_visible(prompt.text, found.special_tokens))
    if found.prompts:
        console.rule(style="dim")
    if found.lengths is not None:
        console.print(_lengths(found.lengths))
    if found.scores:
        console.print(_rewards(found))
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


def _files(found: Preview) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    files = Table("file", "rows", box=None, header_style="bold", pad_edge=False)
    kinds: dict[str, dict[str, None]] = {}
    for file in found.rows.files:
        files.add_row(escape(file.path), str(file.rows))
        for name, kind in file.columns.items():
            kinds.setdefault(name, {})[_kind(kind)] = None
    columns = Table("column", "type", "", box=None, header_style="bold", pad_edge=False)
    for name in (*kinds, *(name for name, files_with_it in found.columns.items() if files_with_it == "none")):
        remark = {"none": "missing", "some": "in some files only"}.get(found.columns.get(name, ""), "")
        columns.add_row(escape(name), escape(" or ".join(kinds.get(name, ()))), remark)
    return Group(files, columns)


def _kind(kind: str) -> str:
    """Return a short form of an Arrow type."""
    kind = re.sub(r"(element|item): ", "", kind)
    return kind if len(kind) <= 60 else f"{kind[:57]}..."


def _visible(text: str, special: tuple[str, ...]) -> Any:
    """Return a text with its special tokens highlighted; a very long one is shortened in the middle."""
    from rich.text import Text

    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    highlighted = Text(text)
    highlighted.highlight_words([token for token in special if len(token) > 1], style="bold reverse")
    return highlighted


def _lengths(lengths: Lengths) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    most = max(count for *_, count in lengths.histogram)
    table = Table(lengths.unit, "prompts", "", box=None, header_style="bold", pad_edge=False)
    for start, end, count in lengths.histogram:
        table.add_row(f"{start}-{end - 1}", str(count), "█" * math.ceil(40 * count / most))
    line = (
        f"lengths of {lengths.counted} prompts: {lengths.shortest} to {lengths.longest} {lengths.unit}, "
        f"median {lengths.median:g}, 95% up to {lengths.p95:.0f}"
    )
    if lengths.unit == "tokens":
        line += f"; {'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} too long"
    return Group(table, Text(line))


def _rewards(found: Preview) -> Any:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    heads = (
        "data source",
        "rows",
        "scored",
        "known-good",
        "known-bad",
        "other rows'",
        "known-good answers written as",
    )
    table = Table(*heads, box=None, header_style="bold", pad_edge=False)
    for scores in found.scores:
        means = [_mean_text(part) for part in (scores.known_good, scores.known_bad, scores.other)]
        counts = (str(scores.rows), str(scores.tried))
        table.add_row(escape(scores.data_source), *counts, *means, escape(scores.form or "-"))
    return Group(Text(f"rewards ({found.reward})"), table)


def _mean_text(values: list[float]) -> str:
    from verl.rewards.functions.trial import mean

    return f"{mean(values):.3f}" if values else "-"
