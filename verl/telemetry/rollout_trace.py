"""Traces of the samples of a run, one record a sample: ``rollout.trace.backend``.

A record is a mapping of JSON values: ``step``, ``uid``, ``prompt_ids``, ``response_ids``, ``score``, ... Knows records
and places, not where records come from. A backend's package is imported when the backend is chosen and not before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.distribution import install_command
from verl.utils.process import warn_once

Record = Mapping[str, Any]

_BACKENDS = {
    "file": "verl.telemetry.rollout_trace",
    "mlflow": "verl.telemetry.trace_mlflow",
    "weave": "verl.telemetry.trace_weave",
}
_INPUTS = ("prompt_ids", "prompt")
_OUTPUTS = ("response_ids", "response")


_IS_OPEN: list[bool] = []  # not empty once this process has opened a trace


class Trace:
    """One backend of records. A subclass defines ``log``."""

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
    _IS_OPEN.append(True)
    return getattr(module, f"{backend.capitalize()}Trace")(project_name, experiment_name, folder)


def rollout_trace_op(func: Callable) -> Callable:
    """Decorator of verl's, for functions and methods of agent loops; calls go through as they are.

    ``rollout.trace.backend`` records whole samples (`open_trace`). Of a single call nothing is recorded; the
    first such call in a process that has a trace open says so.
    """

    def note() -> None:
        if _IS_OPEN:
            warn_once(
                f"rollout_trace_op has no effect on {func.__qualname__}: rollout.trace.backend records samples, not "
                "calls. Return what you want to see in AgentLoopOutput.extra_fields."
            )

    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            note()
            return await func(*args, **kwargs)

        return call_async

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return func(*args, **kwargs)

    return call


def inputs_and_outputs(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a record into what went in, what came out, and the rest, as tracing services show them apart."""
    inputs = {name: record[name] for name in _INPUTS if name in record}
    outputs = {name: record[name] for name in _OUTPUTS if name in record}
    return inputs, outputs, {name: value for name, value in record.items() if name not in inputs | outputs}
