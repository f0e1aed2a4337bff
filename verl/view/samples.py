"""Samples of a run, found by what is known of them without reading them again: an index over their files.

A line is one sample (`verl.telemetry.trajectories`). The index keeps a few numbers of each and the place of its line,
so that hundreds of thousands can be chosen among; text is read when a sample is opened. A file is written whole by the
trainer; one that changes afterwards (a resumed run trains a step again) makes the index begin again.
"""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from verl.telemetry.trajectories import Trajectory, parse
from verl.view.runs import Run, folders_below, sample_files

TRAINING, VALIDATION, TRACE = "training", "validation", "trace"

NUMBERS = ("step", "line", "tokens", "turns", "has_tokens")
FLOATS = ("score", "advantage")
WORDS = ("kind", "source", "status", "uid", "prompt")
COLUMNS = (*NUMBERS, *FLOATS, *WORDS)
"""What is known of each sample. ``prompt`` stands for the prompt's text: equal texts have equal numbers."""


class Samples:
    """Index of the samples of a run, or of files.

    Args:
        run: whose folder, and whose folders of samples elsewhere, are searched. None: only ``files``.
    """

    def __init__(self, run: Run | None, files: Sequence[Path] = ()) -> None:
        self.run, self.given = run, list(files)
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        self.problems: list[str] = []
        self.files: list[Path] = []
        self.columns: dict[str, array] = {name: array("l") for name in (*NUMBERS, *WORDS)}
        self.columns |= {name: array("d") for name in FLOATS}
        self.words: dict[str, dict[str, int]] = {name: {} for name in WORDS}
        self._file, self._offset, self._length = array("l"), array("q"), array("q")
        self._known: dict[Path, tuple[int, int]] = {}
        self.waiting: list[Path] = []
        self._reading: Iterator[None] | None = None
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._file)

    # -- reading
    def refresh(self, budget_s: float = math.inf) -> bool:
        """Read lines that are new, for about ``budget_s``; returns whether all are read."""
        end = time.monotonic() + budget_s
        if self._reading is None and not self.waiting and time.monotonic() - self._looked > 0.5:
            self._look()
        while self._reading is not None or self.waiting:
            if self._reading is None:
                self._reading = self._read(self.waiting.pop())
            for _ in self._reading:
                if time.monotonic() > end:
                    return False
            self._reading = None
        return True

    def _look(self) -> None:
        """Find files that are new."""
        self._looked = time.monotonic()
        found = {}
        for path in self._paths():
            try:
                stat = path.stat()
            except OSError:
                continue
            found[path] = (stat.st_ino, stat.st_size)
        if any(found.get(path, known) != known for path, known in self._known.items()):
            self._clear()
            self.generation += 1
        new = [path for path in found if path not in self._known]
        self._known |= {path: found[path] for path in new}
        # the newest are read first, from the end of the list; validation before training
        self.waiting = sorted(new, key=lambda p: (self.kind(p) == VALIDATION, int(p.stem) if p.stem.isdecimal() else 0))

    def _paths(self) -> list[Path]:
        folders = [] if self.run is None else list(folders_below(self.run.folder))
        for key in ("rollout_data_dir", "validation_data_dir"):
            place = self.run.config.get(f"trainer.{key}") if self.run else None
            if place and Path(str(place)).expanduser().is_dir():
                folders.append(Path(str(place)).expanduser().resolve())
        return list(dict.fromkeys([*self.given, *(path for folder in folders for path in sample_files(folder))]))

    def kind(self, path: Path) -> str:
        """Return what the samples of a file are of, by the name of its folder."""
        folder = path.parent.name
        if "trace" in folder:
            return TRACE
        configured = self.run.config.get("trainer.validation_data_dir") if self.run else None
        return VALIDATION if "val" in folder or configured and Path(configured).name == folder else TRAINING

    def _read(self, path: Path) -> Iterator[None]:
        number, kind, offset = len(self.files), self.kind(path), 0
        self.files.append(path)
        try:
            file = open(path, "rb")
        except OSError as error:
            self.problems.append(f"{path}: {error.strerror}")
            return
        with file:
            for place, line in enumerate(file, 1):
                if line.strip():
                    try:
                        self.add(parse(line, path, place), number, kind, offset, len(line))
                    except (ValueError, RecursionError) as error:
                        self.problems.append(f"{path}:{place}: {error}")
                offset += len(line)
                yield

    def add(self, t: Trajectory, file: int = 0, kind: str | None = None, offset: int = 0, length: int = 0) -> None:
        """Take a sample in, whose line is ``length`` bytes from ``offset`` on of a file."""
        prompt = blake2b((t.prompt or "").encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        values: dict[str, Any] = {
            "step": t.step,
            "line": t.index,
            "tokens": t.num_tokens or 0,
            "turns": t.num_turns,
            "has_tokens": int(bool(t.tokens)),
            "score": math.nan if t.reward is None else t.reward,
            "advantage": t.advantage,
            "kind": self.kind(t.file) if kind is None else kind,
            "source": str(t.metadata.get("data_source") or t.tag),
            "status": t.status,
            "uid": t.uid or "",
            "prompt": prompt,
        }
        for name in WORDS:
            values[name] = self.words[name].setdefault(values[name], len(self.words[name]))
        for name in COLUMNS:
            self.columns[name].append(values[name])
        self._file.append(file)
        self._offset.append(offset)
        self._length.append(length)

    # -- what is asked for
    def rows(self, first: int = 0, most: int | None = None) -> dict[str, Any]:
        """Return the columns of up to ``most`` samples from number ``first`` on, as JSON values; words by numbers."""
        last = len(self) if most is None else first + most
        columns = {name: self.columns[name][first:last].tolist() for name in COLUMNS}
        for name in FLOATS:
            columns[name] = [round(value, 6) if math.isfinite(value) else None for value in columns[name]]
        # of prompts only the numbers matter: texts are hashes
        words = {name: list(self.words[name]) for name in WORDS if name != "prompt"}
        return {
            "first": first,
            "count": len(self),
            "generation": self.generation,
            "columns": columns,
            "words": words,
            "problems": [*self.problems[:20], *([f"and {len(self.problems) - 20:,} more"] * (len(self.problems) > 20))],
        }

    def trajectory(self, number: int) -> Trajectory:
        """Read a sample.

        Raises:
            IndexError: there is none of this number.
            ValueError: its file has changed since.
        """
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} does not exist; there are {len(self)}")
        path = self.files[self._file[number]]
        with open(path, "rb") as file:
            file.seek(self._offset[number])
            line = file.read(self._length[number])
        return parse(line, path, self.columns["line"][number] + 1)

    def search(self, text: str, most: int = 200_000) -> list[int]:
        """Return the numbers of samples whose line has a text, in any case of letters."""
        wanted = json.dumps(text, ensure_ascii=False)[1:-1].lower()
        found: list[int] = []
        number, count = 0, len(self)
        while number < count and len(found) < most:
            file = self._file[number]
            try:
                with open(self.files[file], "rb") as lines:
                    while number < count and self._file[number] == file:
                        lines.seek(self._offset[number])
                        if wanted in lines.read(self._length[number]).decode("utf-8", "replace").lower():
                            found.append(number)
                        number += 1
            except OSError:  # deleted since: its samples cannot be found
                while number < count and self._file[number] == file:
                    number += 1
        return found

    def representative(self, most: int) -> list[int]:
        """Return up to ``most`` samples that tell the run: whole groups, spread over steps, of every kind and source.

        Of each step of the first, middle and last ones the groups come in their order; then all others fill up.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for number in range(len(self)):
            key = tuple(self.columns[name][number] for name in ("kind", "source", "step", "uid"))
            groups.setdefault(key, []).append(number)
        by_place: dict[tuple[int, int], dict[int, list[list[int]]]] = {}
        for (kind, source, step, _), numbers in groups.items():
            by_place.setdefault((kind, source), {}).setdefault(step, []).append(numbers)
        queues = [_spread([steps[step] for step in sorted(steps)]) for steps in by_place.values()]
        chosen: list[int] = []
        while queues and len(chosen) < most:
            for queue in list(queues):
                numbers = next(queue, None)
                if numbers is None:
                    queues.remove(queue)
                elif len(chosen) + len(numbers) <= most or not chosen:
                    chosen += numbers[:most]
                if len(chosen) >= most:
                    break
        return sorted(chosen)


def _spread(steps: list[list[list[int]]]) -> Iterator[list[int]]:
    """Yield the groups of steps: one of the last, one of the first, one of the middle and so on, then the next ones."""
    order, parts = [len(steps) - 1, 0], [(0, len(steps) - 1)]
    while parts:
        low, high = parts.pop(0)
        middle = (low + high) // 2
        if high - low > 1:
            order.append(middle)
            parts += [(low, middle), (middle, high)]
    order = list(dict.fromkeys(order))
    for place in range(max(map(len, steps))):
        for step in order:
            if place < len(steps[step]):
                yield steps[step][place]
