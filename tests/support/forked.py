"""Run a Python file in a fork of this process: as in one of its own, but torch need not be imported again (2 s)."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path


def run_file(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as a main program in ``folder``; what it registers and imports stays in the child."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _child(script, folder, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([str(script)], code, *printed)


def _child(script: Path, folder: Path, out: int, err: int) -> None:
    """Body of the fork; never returns, so that pytest does not run on in it."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(folder)
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
