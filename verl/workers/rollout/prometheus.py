"""A rollout engine's numbers as Prometheus reads them (text format 0.0.4). Renders only; serving is the server's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.workers.rollout.base import RolloutEngine

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "verl_rollout_"
_HELP = {
    "requests": "Requests that ended.",
    "generated_tokens": "Tokens drawn.",
    "prompt_tokens": "Tokens of prompts.",
    "steps": "Steps of the engine.",
    "seconds": "Seconds spent generating.",
    "running": "Requests submitted and not ended.",
    "version": "Version of the weights held; -1 while there is none.",
}


def prometheus_text(engine: RolloutEngine) -> str:
    """What ``GET /metrics`` of a server answers: verl's counters of the engine, then the engine's own metrics."""
    labels = {"engine": engine.watch.engine}
    version = -1 if engine.version is None else engine.version
    own = render(engine.watch.totals() | engine.totals(), "counter", labels)
    return own + render({"running": engine.num_running, "version": version}, "gauge", labels) + engine.prometheus()


def render(values: Mapping[str, float], kind: str, labels: Mapping[str, str]) -> str:
    """``values`` as metrics of one ``kind``, counter or gauge, under verl's prefix."""
    quoted = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for name, value in values.items():
        full = _PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name) + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {full} {_HELP.get(name, name)}", f"# TYPE {full} {kind}", f"{full}{{{quoted}}} {value:.17g}"]
    return "".join(f"{line}\n" for line in lines)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
