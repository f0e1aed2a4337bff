"""The cells of every notebook run, one after the other and inside an event loop, as in Jupyter."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.forked import run_file

NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))


def cells_of(notebook: Path) -> list[str]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    assert content["nbformat"] == 4 and all(not cell.get("outputs") for cell in content["cells"]), (
        "kept without outputs"
    )
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


_RUNNER = """
import asyncio, json, os, sys

async def run():  # the last expression of a cell is displayed
    for cell in json.load(open("cells.json")):
        exec(compile(cell, "cell", "exec"), globals())

asyncio.run(run())
import psutil
left = psutil.Process().children(recursive=True)
assert not left, left
"""


@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, marks=pytest.mark.ray if path.parent.name == "ray" else pytest.mark.learning, id=path.name)
        for path in NOTEBOOKS
    ],
)
def test_the_cells_run_one_after_the_other_and_leave_no_process(notebook, tmp_path):
    cells = []
    for cell in cells_of(notebook):
        tree = ast.parse(cell)
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            tree.body[-1] = ast.parse(f"print({ast.unparse(tree.body[-1])})").body[0]
        cells.append(ast.unparse(tree))
    (tmp_path / "cells.json").write_text(json.dumps(cells))
    (tmp_path / "notebook.py").write_text(_RUNNER)
    if notebook.parent.name == "ray":  # which does not start in a fork of a process with threads
        command = [sys.executable, "notebook.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
    else:
        done = run_file(tmp_path / "notebook.py", tmp_path)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
