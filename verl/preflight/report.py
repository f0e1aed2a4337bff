"""What the doctor found: findings, numbers with the keys they come from, tables of memory; as text and as JSON."""

import re
import textwrap
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Level = Literal["error", "warning", "note"]

_KEY = re.compile(r"(?<![\w.])[a-z_]\w*(?:\.\w+)+")
_WIDTH = 118


class Finding(NamedTuple):
    """One thing wrong (``error``: the run would not start, or would stop), doubtful (``warning``) or to be known."""

    level: Level
    text: str
    """Key, value, rule, way out."""
    keys: tuple[str, ...] = ()
    """The key to blame first."""

    @property
    def all_keys(self) -> list[str]:
        """Keys to blame, then those the sentence names."""
        return list(dict.fromkeys([*self.keys, *_KEY.findall(self.text)]))


class Number(NamedTuple):
    """One number of the derivation."""

    name: str
    value: Any
    text: str
    """In plain words."""
    keys: tuple[str, ...] = ()
    """Options it comes from."""


class PhaseMemory(NamedTuple):
    """Bytes on one device in one phase, by what they are for; and what would shrink the largest of them."""

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
    """Everything the doctor says about one command line."""

    findings: list[Finding] = field(default_factory=list)
    derivation: list[Number] = field(default_factory=list)
    memory: list[PhaseMemory] = field(default_factory=list)
    memory_notes: list[str] = field(default_factory=list)
    preview: list[str] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    """What was not looked at, or is as good as right."""
    config: Any = None
    """The tree it is about; None if there is none."""
    data: Any = None
    """What was seen of the data files (``verl.preflight.data.Preview``)."""

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
        """For ``--json``."""
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
        """For a person; what stops the run stands last."""
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


def shown_bytes(number: float) -> str:
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
    """Lines of a text behind ``start``, as wide as a terminal; they keep their own indentation."""
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
    """Phases side by side, parts one below another."""
    names = list(dict.fromkeys(name for row in rows for name, size in row.parts.items() if size))
    if not rows:
        return []
    lines = [["", *(row.phase for row in rows)]]
    lines += [[name, *(_cell(row.parts.get(name, 0)) for row in rows)] for name in names]
    lines += [["together", *(shown_bytes(row.total) for row in rows)], ["most of it", *(row.largest for row in rows)]]
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [
        "  "
        + "  ".join([line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], widths, strict=True))])
        for line in lines
    ]
    told = {row.largest: row.way_out for row in rows if row.way_out}
    return shown + [wrapped("  ", f"less {name}: {way_out}") for name, way_out in told.items()]


def _cell(size: int) -> str:
    return shown_bytes(size) if size else "-"
