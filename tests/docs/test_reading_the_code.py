"""README's "Reading the code": the files between the command and the gradient, compared with a traced step."""

import subprocess
import sys
from pathlib import Path

from benchmarks import step_trace

ROOT = Path(__file__).parents[2]


def test_a_traced_step_runs_through_the_files_of_the_readme():
    command = [sys.executable, "-m", "benchmarks.step_trace", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_table_is_read_back_as_it_was_written():
    path = {"protocol.py": ["pad", "chunk"], "compat.py": ["install"]}
    text = f"{step_trace.BEGIN}\n{step_trace.path_table(path)}\n{step_trace.END}"
    assert not step_trace.differences(path, text)
    assert step_trace.differences({"protocol.py": ["pad", "chunk"]}, text)
    assert step_trace.differences({**path, "compat.py": ["other"]}, text)
