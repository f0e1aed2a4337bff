"""Traces of the samples of a run, one record a sample: ``rollout.trace.backend``.

A record is a mapping of JSON values: ``step``, ``uid``, ``prompt_ids``, ``response_ids``, ``score``, ...; of several
turns also ``turns``. Knows records and places, not where records come from. A backend's package is imported when the
backend is chosen and not before.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.distribution import install_command
from verl.utils.fs import write_atomic
from verl.utils.process import warn_once

Record = Mapping[str, Any]

_INPUTS = ("prompt_ids", "prompt")
_OUTPUTS = ("response_ids", "response", "turns", "rows")

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
        text = "".join(json.dumps(dict(record), ensure_ascii=False) + "\n" for record in records)
        write_atomic(path, lambda part: part.write_text(text, encoding="utf-8"))


class MlflowTrace(Trace):
    """One trace a sample in the experiment named like the project; where is MLFLOW_TRACKING_URI, or MLflow's default.

    Prompt and response are its inputs and outputs, all else its attributes; the tags ``run`` and ``step`` find it.
    """

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        import mlflow

        self.mlflow, self.run = mlflow, experiment_name
        mlflow.set_experiment(project_name)

    def log(self, step: int, records: Sequence[Record]) -> None:
        for record in records:
            inputs, outputs, rest = inputs_and_outputs(record)
            span = self.mlflow.start_span_no_context(
                name="rollout", inputs=inputs, attributes=rest, tags={"run": self.run, "step": str(step)}
            )
            span.end(outputs=outputs)

    def finish(self) -> None:
        self.mlflow.flush_trace_async_logging()


class WeaveTrace(Trace):
    """One call a sample in the project; needs the network and a key of Weights & Biases (WANDB_API_KEY).

    Prompt and response are its inputs and output, all else its attributes.
    """

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        import weave

        self.weave, self.run = weave, experiment_name
        self.client = weave.init(project_name)

    def log(self, step: int, records: Sequence[Record]) -> None:
        for record in records:
            inputs, outputs, rest = inputs_and_outputs(record)
            call = self.client.create_call("rollout", inputs, attributes={**rest, "run": self.run, "step": step})
            self.client.finish_call(call, output=outputs)

    def finish(self) -> None:
        self.weave.finish()


_BACKENDS: dict[str, type[Trace]] = {"file": FileTrace, "mlflow": MlflowTrace, "weave": WeaveTrace}


def open_trace(backend: str, project_name: str, experiment_name: str, folder: str | Path) -> Trace:
    """The trace named ``backend``.

    Raises:
        ValueError: unknown name.
        ImportError: its package is missing; names the option and the install line.
    """
    if backend not in _BACKENDS:
        raise ValueError(f"rollout.trace.backend={backend!r} is unknown. Use one of {', '.join(_BACKENDS)}, or null.")
    try:
        trace = _BACKENDS[backend](project_name, experiment_name, folder)
    except ImportError as error:
        raise ImportError(
            f"actor_rollout_ref.rollout.trace.backend={backend} needs the package {backend}, which cannot be imported "
            f"({error}). Install it with `{install_command(backend)}` (or `pip install {backend}`), or use "
            f"backend=file, which needs nothing."
        ) from error
    _IS_OPEN.append(True)
    return trace


def rollout_trace_op(func: Callable) -> Callable:
    """Decorator of verl's, for functions and methods of agent loops; calls go through as they are.

    ``rollout.trace.backend`` records whole samples (`open_trace`). Of a single call nothing is recorded; the
    first such call in a process that has a trace open says so.
    """

    def begin() -> None:
        if _IS_OPEN:
            warn_once(
                f"rollout_trace_op has no effect on {func.__qualname__}: rollout.trace.backend records samples, not "
                "calls. Return what you want to see in AgentLoopOutput.extra_fields."
            )

    @functools.wraps(func)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        begin()
        return await func(*args, **kwargs)

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin()
        return func(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(func) else call


def inputs_and_outputs(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Split a record into what went in, what came out, and the rest, as tracing services show them apart."""
    inputs = {name: record[name] for name in _INPUTS if name in record}
    outputs = {name: record[name] for name in _OUTPUTS if name in record}
    return inputs, outputs, {name: value for name, value in record.items() if name not in inputs | outputs}
