"""Samples as calls in Weights & Biases Weave. The only module that imports weave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import weave

from verl.telemetry.rollout_trace import Record, Trace, inputs_and_outputs


class WeaveTrace(Trace):
    """One call a sample in the project; needs the network and a key of Weights & Biases (WANDB_API_KEY).

    Prompt and response are its inputs and output, all else its attributes.
    """

    def __init__(self, project_name: str, experiment_name: str, folder: str | Path) -> None:
        self.run = experiment_name
        self.client = weave.init(project_name)

    def log(self, step: int, records: Sequence[Record]) -> None:
        for record in records:
            inputs, outputs, rest = inputs_and_outputs(record)
            call = self.client.create_call("rollout", inputs, attributes={**rest, "run": self.run, "step": step})
            self.client.finish_call(call, output=outputs)

    def finish(self) -> None:
        weave.finish()
