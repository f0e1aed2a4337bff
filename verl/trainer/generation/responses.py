"""The file of responses while it is made: a folder of parts next to it, which a later start continues.

Knows files and rows; no model. The parts hold responses alone and are joined with the columns of the data at the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoint.rank_files import full_disk_is_said
from verl.checkpoint.resume_changes import shown
from verl.config.base import ConfigError
from verl.utils.fs import write_atomic

IDENTITY = b"verl.responses"
"""Key in the metadata of a finished file: what its responses depend on, as JSON."""

COLUMNS = {
    "responses": pa.list_(pa.string()),
    "response_lengths": pa.list_(pa.int32()),
    "finish_reasons": pa.list_(pa.string()),
}
"""Columns that the file adds to those of the data, each a list with an entry a response."""

_PART = pa.schema([("row", pa.int64()), *COLUMNS.items()])
_MADE_OF = "identity.json"


class Responses(NamedTuple):
    """Responses to the prompt of one row."""

    row: int
    texts: list[str]
    lengths: list[int]
    """In tokens."""
    finish_reasons: list[str]


class ResponseFile:
    """Parquet file of responses, complete or under way.

    Args:
        path: of the file.
        identity: what the responses depend on (model, prompts, sampling), as JSON values by key.
        overwrite: replace what is there of another identity.

    Raises:
        ConfigError: there are responses of another identity, or another process is at them.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any], overwrite: bool = False) -> None:
        self.path = Path(path).expanduser()
        self.parts = self.path.with_name(f"{self.path.name}.parts")
        self.identity = json.loads(json.dumps(identity, sort_keys=True, default=str))
        self.is_complete = self.path.exists() and not overwrite
        self._locked: int | None = None
        if self.is_complete:
            self._refuse_others(self.path, identity_of(self.path))
            return
        self.parts.mkdir(parents=True, exist_ok=True)
        self._lock()
        try:
            self._begin(overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, overwrite: bool) -> None:
        made_of = self.parts / _MADE_OF
        if made_of.exists() and json.loads(made_of.read_text(encoding="utf-8")) != self.identity and overwrite:
            for part in self.parts.glob("*.parquet"):
                part.unlink()
            made_of.unlink()
        if made_of.exists():
            self._refuse_others(self.parts, json.loads(made_of.read_text(encoding="utf-8")))
        else:
            text = json.dumps(self.identity, indent=1)
            write_atomic(made_of, lambda path: path.write_text(text, encoding="utf-8"))

    def _lock(self) -> None:
        self._locked = os.open(self.parts / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ConfigError(
                [f"data.output_path={self.path}: another process is generating into it. Wait for it, or name another."]
            ) from error

    def close(self) -> None:
        """Let another process go on with the parts."""
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None

    def _refuse_others(self, place: Path, found: Mapping[str, Any] | None) -> None:
        if found == self.identity:
            return
        differences = [
            f"{key}: {shown(found.get(key))} -> {shown(self.identity.get(key))}"
            for key in sorted(found.keys() | self.identity.keys())
            if found.get(key) != self.identity.get(key)
        ] if found is not None else ["it was not written by verl generate"]  # fmt: skip
        raise ConfigError(
            [
                f"data.output_path={self.path}: {place} is there and holds something else ({'; '.join(differences)}). "
                "Name another file, give the options of that one again, or replace it with data.overwrite=true."
            ]
        )

    def rows_done(self) -> set[int]:
        """Rows whose responses are in the parts."""
        return {row for part in self._part_files() for row in pq.read_table(part, columns=["row"])["row"].to_pylist()}

    def add(self, found: Sequence[Responses]) -> None:
        """Write the responses to some prompts; they are not made again."""
        columns = zip(*found, strict=True)
        table = pa.table(dict(zip(_PART.names, map(list, columns), strict=True)), schema=_PART)
        path = self.parts / f"rows-{found[0].row:08d}-{found[-1].row:08d}.parquet"
        with full_disk_is_said(path, way_out="or name another data.output_path"):
            write_atomic(path, lambda path: pq.write_table(table, path))

    def finish(self, data: pa.Table) -> None:
        """Join the parts with the columns of ``data``, in its order, under the name of the file."""
        made = pa.concat_tables([pq.read_table(part, schema=_PART) for part in self._part_files()])
        made = made.sort_by("row").drop_columns(["row"])
        taken = [name for name in data.column_names if name in COLUMNS]  # of an earlier generation: these replace them
        data = data.drop_columns(taken)
        for name in COLUMNS:
            data = data.append_column(name, made[name])
        metadata = {**(data.schema.metadata or {}), IDENTITY: json.dumps(self.identity).encode()}
        data = data.replace_schema_metadata(metadata)
        with full_disk_is_said(self.path, way_out="or name another data.output_path"):
            write_atomic(self.path, lambda path: pq.write_table(data, path))
        shutil.rmtree(self.parts)
        self.close()

    def _part_files(self) -> list[Path]:
        return sorted(self.parts.glob("rows-*.parquet"))


def identity_of(path: Path) -> dict[str, Any] | None:
    """What the responses of a finished file depend on; None for a file that is no such file."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid:
        return None
    return json.loads(metadata[IDENTITY]) if IDENTITY in metadata else None
