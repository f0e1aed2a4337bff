"""Samples as MLflow traces. The only module that imports mlflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlflow

from verl.telemetry.rollout_trace import Record, Trace, inputs_and_outputs


class MlflowTrace(Trace):
    """One trace a sample in the experiment named like the project; where is MLFLOW_TRACKING_URI, or MLflow's default.

    Prompt and response are its inputs and outputs, all else its attributes; the tags ``run`` and ``step`` find it.
    """

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        self.run = experiment_name
        mlflow.set_experiment(project_name)

    def log(self, step: int, records: Sequence[Record]) -> None:
        for record in records:
            inputs, outputs, rest = inputs_and_outputs(record)
            span = mlflow.start_span_no_context(
                name="rollout", inputs=inputs, attributes=rest, tags={"run": self.run, "step": str(step)}
            )
            span.end(outputs=outputs)

    def finish(self) -> None:
        mlflow.flush_trace_async_logging()
