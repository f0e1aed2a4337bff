"""Trajectories of a run, read from its dumps and traces, and shown as text.

Reads the lines of ``trainer.rollout_data_dir``, ``trainer.validation_data_dir`` and ``rollout.trace.backend=file``, of
single turns too. Their text was written by a model: it is escaped wherever it is shown. Knows no tensor and no batch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_SHOWN = (
    "status",
    "agent_name",
    "env_tag",
    "trajectory_id",
    "finish_reason",
    "error",
    "gts",
    "advantage",
    "version",
)
"""Keys of a line that are shown with a trajectory, besides those that `Trajectory` has."""

_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass
class Turn:
    """What one side said: the policy (``generated``), or whatever answered it."""

    role: str
    text: str | None
    """None: the line has token ids only."""
    generated: bool
    span: tuple[int, int] | None = None
    """First and last + 1 of its response tokens."""
    reward: float | None = None
    seconds: float | None = None
    state: Any = None
    log_prob: float | None = None
    """Mean over its tokens."""
    row: int = 0
    """The training row that ``span`` counts in, among those of its trajectory."""


@dataclass
class Trajectory:
    """One line of a dump or a trace."""

    file: Path
    line: int
    """From 1."""
    step: int
    index: int
    """Place in its file, from 0."""
    uid: str | None
    """Of its prompt: samples of one prompt have the same."""
    reward: float | None
    """Its score, before shaping."""
    prompt: str | None
    turns: list[Turn]
    seconds: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    """Status, tag, ground truth, what the reward function returned, ..."""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[dict[str, list]] = field(default_factory=list)
    """Of each training row the columns of its response tokens, of `TOKEN_COLUMNS`; empty where they were not kept."""

    @property
    def advantage(self) -> float:
        """Mean over its tokens; NaN where it is not known."""
        value = self.metadata.get("advantage")
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the response, as far as the line says."""
        length = self.metadata.get("response_length")
        if isinstance(length, int):
            return length
        ends = [turn.span[1] for turn in self.turns if turn.span is not None]
        return max(ends, default=None)

    @property
    def tag(self) -> str:
        """Environment; without one, agent loop or data source."""
        return str(
            next((self.metadata[key] for key in ("env_tag", "agent_name", "data_source") if key in self.metadata), "")
        )

    @property
    def status(self) -> str:
        """How it ended: the episode's status, of single turns the reason of the engine."""
        return str(self.metadata.get("status") or self.metadata.get("finish_reason") or "")

    @property
    def num_turns(self) -> int:
        """Turns of the policy."""
        return sum(turn.generated for turn in self.turns)

    def shown_turns(self) -> Iterator[tuple[int, Turn]]:
        """Yield the turns, with the number so far of those of the policy; without the blanks between them."""
        number = 0
        for turn in self.turns:
            number += turn.generated
            if turn.generated or turn.text is None or turn.text.strip():
                yield number, turn

    @property
    def success(self) -> float | None:
        """Whether the task was solved, where the environment or the reward function says so."""
        info = self.metadata.get("info")
        found = (info if isinstance(info, Mapping) else {}).get("success", self.metadata.get("success"))
        return float(found) if isinstance(found, bool | int | float) else None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values: one form for lines of all kinds."""
        return {**asdict(self), "file": str(self.file)}


# -- reading -----------------------------------------------------------------------------------------------------------
def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return the files of samples below folders (``<step>.jsonl``), by folder and step, and files as they are given.

    Raises:
        FileNotFoundError: a path does not exist, or a folder has none.
    """
    files: list[Path] = []
    for path in (Path(path).expanduser() for path in paths):
        if path.is_file():
            files.append(path)
            continue
        found = [file for file in path.rglob("*.jsonl") if file.stem.isdecimal()]
        if not found:
            what = "has no files <step>.jsonl" if path.is_dir() else "does not exist"
            raise FileNotFoundError(
                f"{path} {what}. Give a file or folder of samples, which a run with trainer.rollout_data_dir, "
                "trainer.validation_data_dir or actor_rollout_ref.rollout.trace.backend=file leaves."
            )
        files += sorted(found, key=lambda file: (file.parent, int(file.stem)))
    return list(dict.fromkeys(files))


def read(files: Iterable[Path], problems: list[str], steps: Sequence[int] = ()) -> Iterator[Trajectory]:
    """Yield the trajectories of files, one after the other.

    Args:
        problems: gets a message for each line that is none.
        steps: those to read; files named by other steps are not opened. Empty: all.
    """
    for file in files:
        if steps and file.stem.isdecimal() and int(file.stem) not in steps:
            continue
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    trajectory = parse(line, file, number)
                except (ValueError, RecursionError) as error:
                    problems.append(f"{file}:{number}: {error}")
                    continue
                if not steps or trajectory.step in steps:
                    yield trajectory


def parse(line: bytes | str, file: Path, number: int) -> Trajectory:
    """Return the trajectory of a line.

    Raises:
        ValueError: it is none; says why.
    """
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"no UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error.msg} at character {error.pos + 1})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} where an object is expected")
    step = _checked(row, "step", int)
    if step is None:
        raise ValueError("no key 'step': not a line of samples")
    if not {"output", "response_ids", "rows", "turns"} & row.keys():
        raise ValueError("none of the keys output, response_ids and turns: not a line of samples")
    turns = _turns(row)
    shown = {"step", "uid", "score", "input", "output", "prompt", "response", "turns", "seconds", "tool_calls", "rows"}
    shown |= {"prompt_ids", "response_ids", "response_mask", "response_logprobs", "versions", "tokens"}
    metadata = {key: row[key] for key in _SHOWN if row.get(key) not in (None, "")}
    metadata |= {key: value for key, value in row.items() if key not in shown and value not in (None, "")}
    calls = _checked(row, "tool_calls", list) or []
    if not all(isinstance(call, dict) for call in calls):
        raise ValueError("tool_calls has entries that are no objects")
    uid = row.get("uid")
    return Trajectory(
        file=file,
        line=number,
        step=step,
        index=number - 1,
        uid=None if uid is None else str(uid),
        reward=_number(row, "score"),
        prompt=_prompt(row),
        turns=turns,
        seconds=_number(row, "seconds"),
        metadata=metadata,
        tool_calls=calls,
        tokens=_tokens(row),
    )


TOKEN_COLUMNS = ("text", "ids", "log_probs", "rollout_log_probs", "advantages", "mask")
"""Columns of the tokens of a response: text or ids, the trainer's and the rollout engine's log-probs, advantages, and
1 for what the policy sampled. A line has those that its run knew."""

_OF_TRACES = {"response_ids": "ids", "response_logprobs": "rollout_log_probs", "response_mask": "mask"}


def _tokens(row: Mapping[str, Any]) -> list[dict[str, list]]:
    """Return the token columns of each training row of a line, those of a trace too; columns of one length only."""
    found = []
    for part in _checked(row, "rows", list) or [row]:
        own = part.get("tokens") if isinstance(part, dict) else None
        if own is None and isinstance(part, dict):
            own = {name: part[key] for key, name in _OF_TRACES.items() if key in part}
        if not isinstance(own, dict):
            raise ValueError(f"tokens is {type(own).__name__}, not dict")
        columns = {name: own[name] for name in TOKEN_COLUMNS if isinstance(own.get(name), list)}
        if not columns.keys() & {"text", "ids"}:
            columns = {}
        length = len(next(iter(columns.values()), ()))
        if any(len(values) != length for values in columns.values()):
            raise ValueError(f"tokens has columns of different lengths: {[len(values) for values in columns.values()]}")
        found.append(columns)
    return found if any(found) else []


def _prompt(row: Mapping[str, Any]) -> str | None:
    first = (_checked(row, "rows", list) or [row])[0]
    whole = row if isinstance(row.get("input"), str) or not isinstance(first, dict) else first
    return _checked(whole, "input", str) or _checked(whole, "prompt", str)


def _turns(row: Mapping[str, Any]) -> list[Turn]:
    """Turns of a line; of one that has none, its response as a single turn."""
    entries = _checked(row, "turns", list)
    if entries is None:
        text = _checked(row, "output", str)
        text = _checked(row, "response", str) if text is None else text
        ids = _checked(row, "response_ids", list)
        length = len(ids) if ids is not None else _checked(row, "response_length", int)
        return [Turn("assistant", text, True, None if length is None else (0, length))]
    turns = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("role"), str):
            raise ValueError(f"turns[{number}] is no object with a role")
        span = _checked(entry, "span", list)
        if span is not None and not (len(span) == 2 and all(isinstance(place, int) for place in span)):
            raise ValueError(f"turns[{number}].span={span!r} is no pair of whole numbers")
        turn = Turn(
            role=entry["role"],
            text=_checked(entry, "text", str),
            generated=bool(entry.get("generated", entry["role"] == "assistant")),
            span=None if span is None else (span[0], span[1]),
            reward=_number(entry, "reward"),
            seconds=_number(entry, "seconds"),
            state=entry.get("state"),
        )
        turn.row = entry["row"] if isinstance(entry.get("row"), int) else 0
        turn.log_prob = _mean_log_prob(row, entry, turn)
        turns.append(turn)
    return turns


def _mean_log_prob(row: Mapping[str, Any], entry: Mapping[str, Any], turn: Turn) -> float | None:
    rows, number = row.get("rows"), entry.get("row", 0)
    if isinstance(rows, list) and isinstance(number, int) and number < len(rows) and isinstance(rows[number], dict):
        row = rows[number]
    values = row.get("response_logprobs")
    if not turn.generated or turn.span is None or not isinstance(values, list):
        return None
    own = [value for value in values[slice(*turn.span)] if isinstance(value, int | float)]
    return sum(own) / len(own) if own else None


def _checked(row: Mapping[str, Any], key: str, kind: type) -> Any:
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise ValueError(f"{key} is {type(value).__name__}, not {kind.__name__}")
    return value


def _number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(f"{key} is {type(value).__name__}, not a number")
    return None if value is None else float(value)


# -- text of the terminal ----------------------------------------------------------------------------------------------
def visible(text: str) -> str:
    """Return text as it can be printed: control characters, and those that turn the direction of writing, escaped."""
    return _INVISIBLE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def number_text(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if math.isfinite(value) else str(value)


_IN_HEADLINE = {
    *("status", "env_tag", "agent_name", "finish_reason", "data_source", "num_turns"),
    *("prompt_length", "response_length"),  # the lengths of turns say more
}


class Style:
    """ANSI styles by what they mean; none on anything but a terminal."""

    _CODES = {"generated": "32", "read": "2", "head": "1", "good": "32", "bad": "31", "note": "2"}

    def __init__(self, enabled: bool):
        self.enabled = enabled

    def __call__(self, kind: str, text: str) -> str:
        # line by line: a pager shows lines one at a time
        if not self.enabled or not text:
            return text
        return "\n".join(f"\x1b[{self._CODES[kind]}m{line}\x1b[0m" if line else line for line in text.split("\n"))


def headline(trajectory: Trajectory, style: Style) -> str:
    """Return a line with the trajectory's numbers."""
    t = trajectory
    parts = [f"step {t.step}", f"#{t.index}", *([f"uid {visible(t.uid)}"] if t.uid else []), visible(t.tag)]
    parts += [f"reward {number_text(t.reward)}", f"{t.num_turns} turn{'s' * (t.num_turns != 1)}"]
    parts += [f"{t.seconds:.2f} s"] if t.seconds is not None else []
    return style("head", "  ".join(part for part in [*parts, visible(t.status)] if part))


def in_full(trajectory: Trajectory, style: Style) -> str:
    """Return a trajectory as text: prompt, turns with their rewards, tool calls."""
    t, lines = trajectory, [headline(trajectory, style)]
    for key, value in t.metadata.items():
        if key not in _IN_HEADLINE:
            lines.append(style("note", f"  {visible(key)}: {visible(shortened(value))}"))
    lines += [style("note", "-- prompt"), style("read", _body(t.prompt))]
    for number, turn in t.shown_turns():
        notes = [f"turn {number}" if turn.generated else "", visible(turn.role), *turn_notes(turn)]
        lines.append(style("note", f"-- {'  '.join(note for note in notes if note)}"))
        lines.append(style("generated" if turn.generated else "read", _body(turn.text)))
    for call in t.tool_calls:
        name, outcome = visible(str(call.get("name"))), visible(str(call.get("outcome", "")))
        seconds = call.get("seconds")
        took = f"  {seconds:.2f} s" if isinstance(seconds, int | float) else ""
        lines.append(style("note", f"-- tool call  {name}  {outcome}{took}"))
    return "\n".join(lines)


def turn_notes(turn: Turn) -> list[str]:
    """Return the numbers of a turn as text."""
    notes = [] if turn.reward is None else [f"reward {number_text(turn.reward)}"]
    notes += [] if turn.seconds is None else [f"{turn.seconds:.2f} s"]
    notes += [] if turn.log_prob is None else [f"log-prob {turn.log_prob:.3f}"]
    if turn.span is not None:
        notes.append(f"{turn.span[1] - turn.span[0]} tokens")
    elif not turn.generated:
        notes.append("not among the response's tokens")
    return notes


def shortened(value: Any, length: int = 200) -> str:
    """Return a value as one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def _body(text: str | None) -> str:
    if text is None:
        return "   (token ids only: actor_rollout_ref.rollout.trace.token2text=true writes text)"
    return "\n".join(f"   {line}" for line in visible(text).split("\n"))


def table(trajectories: Sequence[Trajectory], style: Style, width: int) -> str:
    """Return one line a trajectory: its numbers, and the beginning of the policy's last turn."""
    rows = [("step", "#", "uid", "tag", "reward", "turns", "seconds", "status", "last turn")]
    for t in trajectories:
        last = next((turn.text for turn in reversed(t.turns) if turn.generated and turn.text), "")
        seconds = number_text(t.seconds, 2)
        row = (str(t.step), str(t.index), t.uid or "-", t.tag or "-", number_text(t.reward), str(t.num_turns), seconds)
        rows.append((*row, t.status or "-", shortened(last, 400)))
    return columns(rows, style, width, left=(2, 3, 7, 8))


def columns(rows: Sequence[Sequence[str]], style: Style, width: int, left: Sequence[int] = ()) -> str:
    """Return rows as aligned columns; the first row is their names, and the last column is cut at ``width``."""
    safe = [[visible(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in safe) for place in range(len(safe[0]))]
    lines = []
    for row in safe:
        columns = [
            cell.ljust(w) if k in left else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(columns)[:width].rstrip())
    return "\n".join([style("head", lines[0]), *lines[1:]])
