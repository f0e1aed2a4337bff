"""The installed distribution: its name on an index, the command for its extras, and another that brings ``verl``.

The package to import is ``verl``; the index has a distribution of that name which is another project's, so this one is
called `NAME` there. Imported with the package itself: nothing but ``os``, ``sys`` and a few looks at the disk.
"""

import os
import sys
from collections.abc import Sequence

NAME = "verl-trainer"
"""Name of this project in setup.py and on an index."""
OTHER = "verl"
"""Name under which the other project is installed."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ALREADY_SAID = "VERL_SAID_TWO_DISTRIBUTIONS"


def install_command(extra: str) -> str:
    """The pip command that installs an optional part: ``pip install -e '.[vllm]'`` in a checkout."""
    root = os.path.dirname(_PACKAGE)
    if not os.path.exists(os.path.join(root, "setup.py")):
        return f"pip install '{NAME}[{extra}]'"
    place = "." if os.path.realpath(os.getcwd()) == os.path.realpath(root) else root
    return f"pip install -e '{place}[{extra}]'"


def other_distribution(search_path: Sequence[str] | None = None) -> str | None:
    """The folder on ``search_path`` where the other project's files of ``verl`` are installed, if there is one.

    An editable install, which puts no file of the package there, is none; neither is one that this checkout left under
    its earlier name.

    Args:
        search_path: folders; None: those Python imports from, and the one this package is in.
    """
    folders = [os.path.dirname(_PACKAGE), *sys.path] if search_path is None else search_path
    for folder in dict.fromkeys(folders):
        if not os.path.exists(os.path.join(folder, "verl", "__init__.py")):
            continue
        try:
            names = os.listdir(folder)
        except OSError:  # a folder one may enter and not list
            continue
        for name in names:
            if name.startswith(f"{OTHER}-") and name.endswith(".dist-info") and _lists_package(folder, name):
                return folder
    return None


def _lists_package(folder: str, name: str) -> bool:
    try:
        with open(os.path.join(folder, name, "RECORD"), encoding="utf-8") as record:
            return any(line.startswith("verl/") for line in record)
    except OSError:  # left over from a removal
        return False


def warn_of_other_distribution() -> None:
    """Say on stderr, once in a run and its workers, that two projects bring the package ``verl``."""
    if _ALREADY_SAID in os.environ or (folder := other_distribution()) is None:
        return
    os.environ[_ALREADY_SAID] = "1"
    here = f"both are in {folder}, so files of one may have replaced files of the other"
    if os.path.realpath(folder) != os.path.realpath(os.path.dirname(_PACKAGE)):
        here = f"this is {_PACKAGE}, the other is in {folder}, and which one is imported depends on the current folder"
    print(
        f"warning: the distribution {OTHER!r}, another project, is installed next to {NAME!r}, and both bring the "
        f"package verl: {here}. Run `pip uninstall {OTHER}` and install {NAME} again.",
        file=sys.stderr,
    )
