"""The page that shows runs and samples: one shell, styles and scripts, served or written as one file.

A served page asks the server for its data (`verl.view.server`); a written one has them inside and needs neither network
nor another file. All that comes from a run was written by a model or a user: it is data for the scripts, which only
ever set it as text, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.telemetry.trajectories import Trajectory, visible
from verl.view.runs import CHARTS, Run, differences
from verl.view.samples import Samples

STATIC = Path(__file__).parent / "static"
STYLE = "page.css"
SCRIPTS = ("elements.js", "charts.js", "samples.js", "page.js")
"""In the order in which they run."""

_READING_S = 0.4
"""Seconds of a request that go into reading samples; a page asks again until all are read."""

_MOST_ROWS = 50_000
"""Samples of one answer."""

NO_CHARTS = "Charts need plotly: pip install 'verl-trainer[view]', or pip install plotly."


class View:
    """What is shown: runs and their samples, read by one thread."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.samples = [Samples(run) for run in runs]

    def state(self) -> dict[str, Any]:
        for run in self.runs:
            run.refresh()
        names = sorted({name for run in self.runs for name in run.names()})
        charts = [
            {"title": chart.title, "unit": chart.unit, "stacked": chart.stacked, "names": own}
            for chart in CHARTS
            if (own := chart.names(names))
        ]
        notes = [] if plotly_script() else [NO_CHARTS]
        return {
            "title": "verl view",
            "runs": [run.summary() for run in self.runs],
            "charts": charts,
            "names": names,
            "notes": notes,
        }

    def curves(self, names: Sequence[str], most: int = 2000) -> list[dict[str, Any]]:
        """Of each run: name -> [steps, values]."""
        found = []
        for run in self.runs:
            known = set(run.names())
            found.append({name: run.curve(name, most) for name in names if name in known})
        return found

    def config(self) -> dict[str, Any]:
        return {"differences": differences(self.runs), "options": [run.config for run in self.runs]}

    def rows(self, run: int, first: int) -> dict[str, Any]:
        samples = self.samples[run]
        complete = samples.refresh(_READING_S)
        return {**samples.rows(first, _MOST_ROWS), "complete": complete and first + _MOST_ROWS >= len(samples)}

    def sample(self, run: int, number: int) -> dict[str, Any]:
        return self.samples[run].trajectory(number).to_json()


def plotly_script() -> Path | None:
    """Return the JavaScript inside the package plotly; None where that is not installed. Imports nothing."""
    spec = find_spec("plotly")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (path := Path(place) / "package_data" / "plotly.min.js").is_file():
            return path
    return None


def shell(title: str, styles: str, scripts: str, policy: str | None = None) -> str:
    """Return the page's HTML around ``styles`` and ``scripts``, which are markup."""
    meta = "" if policy is None else f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
{meta}<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(visible(title), quote=True)}</title>
{styles}</head>
<body><div id="page"></div><noscript>This page needs JavaScript.</noscript>
{scripts}
</body></html>
"""


def served() -> str:
    """Return the page that asks its server for all data."""
    names = [*(["plotly.js"] if plotly_script() else []), *SCRIPTS]
    scripts = "\n".join(f'<script src="/static/{name}"></script>' for name in names)
    return shell("verl view", f'<link rel="stylesheet" href="/static/{STYLE}">', scripts)


def written(title: str, data: Mapping[str, Any], with_charts: bool = True) -> str:
    """Return the page as one file.

    Args:
        data: what the server would answer: ``state``, ``curves``, ``samples``, ``config``.
        with_charts: take plotly's script along, compressed, where it is installed.
    """
    own = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    runs = [own]
    charts = plotly_script() if with_charts else None
    blocks = [_block("data", _json(data))]
    if charts is not None:
        import gzip

        code = charts.read_bytes()
        blocks.append(_block("plotly", json.dumps(b64encode(gzip.compress(code, 9)).decode())))
        runs.append(code.decode("utf-8"))
    hashes = " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in runs)
    policy = f"default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; script-src {hashes}"
    style = f"<style>{(STATIC / STYLE).read_text(encoding='utf-8')}</style>\n"
    return shell(title, style, "\n".join([*blocks, f"<script>{own}</script>"]), policy)


def of_trajectories(trajectories: Sequence[Trajectory], title: str) -> str:
    """Return the page of some trajectories alone, as one file."""
    samples = Samples(None)
    for t in trajectories:
        samples.add(t)
    data = {"state": {"title": title, "runs": [], "charts": [], "names": []}, "curves": [], "config": []}
    rows = {**samples.rows(), "whole": [t.to_json() for t in trajectories]}
    return written(title, {**data, "samples": [rows]}, with_charts=False)


def of_view(view: View, most_samples: int, most_points: int = 500) -> str:
    """Return the page of runs as one file: all curves, and up to ``most_samples`` samples of each run."""
    state = view.state()
    curves, answers = view.curves(state["names"], most_points), []
    for samples in view.samples:
        samples.refresh()
        numbers = samples.representative(most_samples)
        whole = [samples.trajectory(number) for number in numbers]
        kept = Samples(samples.run)
        for t in whole:
            kept.add(t)
        answers.append({**kept.rows(), "whole": [t.to_json() for t in whole]})
    data = {"state": state, "curves": curves, "config": view.config(), "samples": answers}
    return written(", ".join(run.name for run in view.runs), data)


def finite(value: Any) -> Any:
    """Return JSON values with the names of numbers that JSON has not: ``NaN``, ``Infinity``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _block(name: str, text: str) -> str:
    return f'<script type="application/json" id="{name}">{text}</script>'


def _json(value: Any) -> str:
    """JSON that can stand in a script element: what could end it is escaped, and surrogates, which UTF-8 has not."""
    text = json.dumps(finite(value), ensure_ascii=True, default=str, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
