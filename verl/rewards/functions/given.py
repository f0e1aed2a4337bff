"""Reward functions given as Python objects, kept as files that a run loads as any other reward file.

A function becomes two files: ``NAME.py``, which ``custom_reward_function.path`` names, and its pickle. That is
cloudpickle's, so that functions of a notebook, lambdas and closures have one. What stands in the pickle is run when the
file is loaded, as a Python file is. ``NAME.py`` changes with the function's source: a resumed run compares it.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from verl.utils.fs import write_atomic

_FILE = '''"""{about}, given to verl.Trainer as a Python object. Its pickle is next to this file, and is run with it."""

from verl.rewards.functions.given import load

SOURCE = "{digest}"
compute_score = load(__file__)
'''

_here: dict[str, Callable] = {}
"""Path of a file -> the object it stands for; of this process."""


class GivenFunction(NamedTuple):
    """A reward function, and what other processes get of it."""

    function: Callable
    pickled: bytes | None
    """None: it is called in this process only, and could not be pickled."""

    @property
    def digest(self) -> str:
        """Of the function's source, or else of its name: the same in another process, as a pickle often is not."""
        try:
            text = inspect.getsource(inspect.unwrap(self.function))
        except (TypeError, OSError):  # an object that can be called; a source that was not kept
            text = f"{getattr(self.function, '__module__', '')}.{_name(self.function)}"
        return hashlib.sha256(text.encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write ``path``, a Python file with the function as ``compute_score``, and the pickle next to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".pkl").unlink(missing_ok=True)  # of an earlier run: it is not this function's
        if self.pickled is not None:
            write_atomic(path.with_suffix(".pkl"), lambda part: part.write_bytes(self.pickled), is_private=True)
        about = " ".join(_name(self.function).split())
        text = _FILE.format(about=about.replace('"', "'").replace("\\", "/"), digest=self.digest)
        write_atomic(path, lambda part: part.write_text(text, encoding="utf-8"), is_private=True)
        _here[str(path.resolve())] = self.function


def given_function(function: Any, argument: str, stays_here: bool = False) -> GivenFunction:
    """Pickle a reward function.

    Args:
        argument: what the user calls it, for messages.
        stays_here: it is called in this process (``reward_model.sandbox.enable=false``), and need not be pickled.

    Raises:
        TypeError: it is no function, or cannot be pickled; names the object that cannot.
    """
    if not callable(function):
        raise TypeError(
            f"{argument}={function!r} is a {type(function).__name__}: a reward is a function "
            "f(data_source, solution_str, ground_truth, extra_info), or the path of a Python file that has one."
        )
    import cloudpickle

    try:
        return GivenFunction(function, cloudpickle.dumps(function))
    except Exception as error:  # __reduce__ of any object may raise anything
        if stays_here:
            return GivenFunction(function, None)
        raise TypeError(
            f"{argument}={_name(function)} cannot be sent to the process that calls it: "
            f"{_culprit(function) or f'{type(error).__name__}: {error}'}. Let the function make what it needs when it "
            "is called, put it into a Python file and give the file's path, or have it called in this process, "
            "without limits of time and memory, by reward_model.sandbox.enable=false."
        ) from error


def load(file: str) -> Callable:
    """Return the function for which ``file`` stands: the object itself in the process it was given to.

    Raises:
        RuntimeError: it has no pickle.
    """
    path = Path(file).resolve()
    if str(path) in _here:
        return _here[str(path)]
    pickled = path.with_suffix(".pkl")
    if not pickled.exists():
        raise RuntimeError(
            f"{path} stands for a function that was given to verl.Trainer as a Python object, and could not be pickled "
            f"({pickled} is missing). Start the run from Python again, or name a Python file in "
            "custom_reward_function.path."
        )
    return pickle.loads(pickled.read_bytes())  # cloudpickle's are read by pickle


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _culprit(function: Callable) -> str | None:
    """The variable of a function that has no pickle, and its type; None: it is not among those it uses by name."""
    import cloudpickle

    try:
        used = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:  # an object that can be called, a partial
        variables: dict[str, Any] = dict(getattr(function, "__dict__", {}))
    else:
        variables = {**used.globals, **used.nonlocals}
    for name, value in variables.items():
        try:
            cloudpickle.dumps(value)
        except Exception:  # as above
            return f"it uses {name}, a {type(value).__module__}.{type(value).__qualname__}, which has no pickle"
    return None
