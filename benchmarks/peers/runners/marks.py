"""Marks of a run that is measured: CPU seconds of its whole process tree so far, one JSON line each.

Imported by the scripts beside it in any environment, so it needs psutil alone. ``PEERS_MARKS`` names the file;
``PEERS_ROOT`` is the process whose descendants count, Ray's servers and workers included.
"""

import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time


def start():
    """Make this process the root of the tree. Called first thing in the command that is measured."""
    os.environ["PEERS_ROOT"] = str(os.getpid())


def tree_seconds():
    """User and system seconds of the root and its descendants, those included that ended and were waited for."""
    import psutil

    total = 0.0
    root = psutil.Process(int(os.environ["PEERS_ROOT"]))
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def mark(step, **facts):
    """Note the end of a step, with counts of the work it did."""
    line = {"step": step, "cpu_s": tree_seconds(), "wall": time.time(), **facts}
    with open(os.environ["PEERS_MARKS"], "a") as file:
        file.write(json.dumps(line) + "\n")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once it is imported, without importing it earlier than the run does."""

    def __init__(self, changes):
        self.changes = changes

    def find_spec(self, name, path, target=None):
        change = self.changes.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def changed(module):
            execute(module)
            change(module)

        spec.loader.exec_module = changed
        return spec


def after_import(changes):
    """``changes``: from names of modules to functions that are called with the module."""
    sys.meta_path.insert(0, AfterImport(changes))
