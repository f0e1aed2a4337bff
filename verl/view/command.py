"""``verl view`` and ``verl report``: runs as a page of a server on this machine, as one file, or as text."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.utils.py_functional import is_loopback
from verl.view.page import NO_CHARTS, View, of_view, plotly_script
from verl.view.runs import Run, find_runs, names_of

_PORT, _PORTS = 7860, 20
_PLACES = ("runs", "checkpoints", "outputs")
_DEFAULT = ", ".join(_PLACES)


def main(words: Sequence[str] | None = None) -> int:
    """Run ``verl view``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="verl view",
        description="Show runs in a browser: curves, options, warnings and samples, while they train or afterwards. "
        "The page needs no network and is served on this machine's loopback only.",
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help=f"folder of a run, or one with runs in it; default: {_DEFAULT}")
    add("--port", type=int, default=None, help=f"port of the page; default: the first free one from {_PORT} on")
    add("--host", default="127.0.0.1", help="a loopback address; from elsewhere, come through ssh -L")
    add("--open", action="store_true", help="open the browser")
    add("--text", action="store_true", help="show it in the terminal instead, without a server")
    add("--once", action="store_true", help="with --text: print once, although a run is under way")
    options = parser.parse_args(words)
    if not is_loopback(options.host):
        parser.error(
            f"--host {options.host}: samples and options of runs are shown on loopback only. "
            f"Use ssh -L PORT:127.0.0.1:PORT to see them from another machine."
        )
    runs = _runs(options.runs)
    if runs is None:
        return 1
    if options.text:
        from verl.view.text import show

        return show(View(runs), once=options.once)
    from verl.view.server import serve

    if plotly_script() is None:
        print(NO_CHARTS, file=sys.stderr)
    ports = [options.port] if options.port is not None else list(range(_PORT, _PORT + _PORTS))
    try:
        asyncio.run(serve(View(runs), options.host, ports, secrets.token_urlsafe(24), options.open))
    except KeyboardInterrupt:
        print()
    except OSError as error:
        print(f"error: --port {ports[-1]}: {error.strerror or error}. Name another one.", file=sys.stderr)
        return 1
    return 0


def report(words: Sequence[str] | None = None) -> int:
    """Run ``verl report``; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="verl report",
        description="Write runs as one HTML file that needs no network and no other file: curves, options, warnings "
        "and a choice of samples.",
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, or one with runs in it")
    add("-o", "--output", type=Path, help="the file; default: report.html in the folder of the first run")
    add("--samples", type=int, default=200, help="samples of each run, whole groups spread over its steps; default 200")
    options = parser.parse_args(words)
    if options.samples < 0:
        parser.error(f"--samples {options.samples}: give 0 or more")
    runs = _runs(options.runs)
    if runs is None:
        return 1
    path = options.output or runs[0].folder / "report.html"
    if plotly_script() is None:
        print(NO_CHARTS, file=sys.stderr)
    text = of_view(View(runs), options.samples)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        print(f"error: {path}: {error.strerror}. Name another file with --output.", file=sys.stderr)
        return 1
    print(f"{path}: {len(runs)} run{'s' * (len(runs) != 1)}, {len(text) / 2**20:.1f} MiB")
    return 0


def _runs(paths: Sequence[str]) -> list[Run] | None:
    places = paths or [place for place in _PLACES if Path(place).is_dir()]
    if not places:
        print(f"error: no RUN is given, and there is no folder {_DEFAULT} here.", file=sys.stderr)
        return None
    try:
        folders = find_runs(places)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    return [Run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)]
