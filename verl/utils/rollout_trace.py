"""Where the samples of a run are recorded one by one: ``rollout.trace.backend``.

A record is a mapping of JSON values: ``step``, ``uid``, ``prompt_ids``, ``response_ids``, ``score``, ... Knows records
and places, not where records come from. A backend's package is imported when the backend is chosen and not before.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.distribution import install_command

Record = Mapping[str, Any]

_BACKENDS = {"file": "verl.utils.rollout_trace", "mlflow": "verl.utils.trace_mlflow", "weave": "verl.utils.trace_weave"}
_INPUTS = ("prompt_ids", "prompt")
_OUTPUTS = ("response_ids", "response")


class Trace:
    """One place records go. A subclass says ``log``."""

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        """Open it. ``folder`` is for backends that write files of our own."""

    def log(self, step: int, records: Sequence[Record]) -> None:
        """Record the samples of a step."""
        raise NotImplementedError(f"{type(self).__name__} must define log(step, records)")

    def finish(self) -> None:
        """Close it; called once."""


class FileTrace(Trace):
    """``{folder}/{step}.jsonl``: one object a sample. Each file is there whole or not at all."""

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def log(self, step: int, records: Sequence[Record]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{step}.jsonl"
        part = path.with_suffix(".part")
        with open(part, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(dict(record), ensure_ascii=False) + "\n" for record in records)
        os.replace(part, path)


def open_trace(backend: str, project_name: str, experiment_name: str, folder: str | Path) -> Trace:
    """The trace named ``backend``.

    Raises:
        ValueError: unknown name.
        ImportError: its package is missing; names the option and the install line.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"rollout.trace.backend={backend!r} is unknown. Use one of {', '.join(_BACKENDS)}, or null.")
    try:
        module = importlib.import_module(_BACKENDS[backend])
    except ImportError as error:
        raise ImportError(
            f"actor_rollout_ref.rollout.trace.backend={backend} needs the package {backend}, which cannot be imported "
            f"({error}). Install it with `{install_command(backend)}` (or `pip install {backend}`), or use "
            f"backend=file, which needs nothing."
        ) from error
    return getattr(module, f"{backend.capitalize()}Trace")(project_name, experiment_name, folder)


def inputs_and_outputs(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a record into what went in, what came out, and the rest, as tracing services show them apart."""
    inputs = {name: record[name] for name in _INPUTS if name in record}
    outputs = {name: record[name] for name in _OUTPUTS if name in record}
    return inputs, outputs, {name: value for name, value in record.items() if name not in inputs | outputs}
