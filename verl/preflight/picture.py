"""A :class:`~verl.preflight.data.Preview` for people (rich) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from verl.preflight.data import Preview
from verl.preflight.prompts import Lengths
from verl.preflight.report import Report
from verl.rewards.functions.trial import Trial, mean


class _Console(Console):
    """A console whose reader may go away: that is for ``plain_ending`` to see."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


_SHOWN_BAD = 10
_STYLES = {"error": "red", "warning": "yellow", "note": "dim"}
_SHOWN_CHARACTERS = 1500


def to_json(found: Preview, report: Report) -> dict[str, Any]:
    """Plain values; numbers that are none (a mean of nothing) are null."""
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
    means = {"gold": mean(scores.known_good), "garbage": mean(scores.known_bad), "other": mean(scores.other)}
    return {
        "data_source": scores.data_source,
        "rows": scores.rows,
        "scored": scores.tried,
        "form": scores.form,
        **{name: None if math.isnan(value) else value for name, value in means.items()},
        "constant": scores.constant,
        "low_gold": scores.low_gold,
        "error": scores.error,
    }


def show(found: Preview, report: Report) -> None:
    """Print everything, what is to be done last."""
    console = _Console(highlight=False, soft_wrap=not sys.stdout.isatty())
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


def _files(found: Preview) -> Group:
    files = Table("file", "rows", box=None, header_style="bold", pad_edge=False)
    kinds: dict[str, dict[str, None]] = {}
    for file in found.rows.files:
        files.add_row(escape(file.path), str(file.rows))
        for name, kind in file.columns.items():
            kinds.setdefault(name, {})[_kind(kind)] = None
    columns = Table("column", "type", "", box=None, header_style="bold", pad_edge=False)
    for name in (*kinds, *(name for name, there in found.columns.items() if there == "none")):
        there = {"none": "not there", "some": "in some files only"}.get(found.columns.get(name, ""), "")
        columns.add_row(escape(name), escape(" or ".join(kinds.get(name, ()))), there)
    return Group(files, columns)


def _kind(kind: str) -> str:
    """Arrow's type in few words."""
    kind = re.sub(r"(element|item): ", "", kind)
    return kind if len(kind) <= 60 else f"{kind[:57]}..."


def _visible(text: str, special: tuple[str, ...]) -> Text:
    """The text with its special tokens standing out; a very long one without its middle."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    shown = Text(text)
    shown.highlight_words([token for token in special if len(token) > 1], style="bold reverse")
    return shown


def _lengths(lengths: Lengths) -> Group:
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


def _rewards(found: Preview) -> Group:
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
    return f"{mean(values):.3f}" if values else "-"
