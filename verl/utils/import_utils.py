"""Load what a user names in the config: a file with a function or class, a dotted class, a module with side effects."""

import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.utils.py_functional import nearest_name

_PACKAGE_PREFIX = "verl_user_files"

# a file that one thread is running must not be seen half-run by another
_LOADING = threading.RLock()


def is_package_available(name: str) -> bool:
    """True if ``import name`` would find a module; nothing is imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def import_external_libs(external_libs: str | Sequence[str] | None) -> None:
    """Import modules for their side effects (registrations); ``None`` imports nothing.

    Raises:
        ModuleNotFoundError: names the module and what to do.
    """
    for name in [external_libs] if isinstance(external_libs, str) else external_libs or []:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # a package that the module itself imports may be missing: then its own error is clearer
            if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
                raise
            raise ModuleNotFoundError(
                f"external_lib={name!r} cannot be imported: no module {error.name!r}. Install it or add its folder "
                "to PYTHONPATH."
            ) from error


def import_users_modules(external_lib: str | None = None) -> None:
    """Import what the user named in ``model.external_lib`` and in VERL_USE_EXTERNAL_MODULES, separated by commas."""
    for names in filter(None, (external_lib, os.environ.get("VERL_USE_EXTERNAL_MODULES"))):
        import_external_libs([name.strip() for name in names.split(",") if name.strip()])


def load_class_from_fqn(fqn: str, description: str = "class") -> Any:
    """The object at a dotted name such as ``package.module.ClassName``."""
    module_name, _, name = fqn.rpartition(".")
    if not module_name:
        raise ValueError(f"{description}={fqn!r} is not a dotted name: write it as package.module.{fqn}.")
    return _attribute(importlib.import_module(module_name), name, f"module {module_name}")


def split_file_name(name: str) -> tuple[str, str] | None:
    """``path/to/file.py:function`` or ``pkg://package.module:function`` as its two parts; None: it is neither."""
    place, colon, function = name.rpartition(":")
    if colon and function.isidentifier() and (place.endswith(".py") or place.startswith("pkg://")):
        return place, function
    return None


def load_extern_type(file_path: str | None, type_name: str | None) -> Any:
    """A function or class from a Python file (or from an importable module, written ``pkg://package.module``).

    Returns ``None`` when no file is given. See :func:`load_module_from_file` for how the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the file fails while it runs; the cause is chained.
        AttributeError: the file has no such name; lists the names it has.
    """
    if not file_path:
        return None
    if file_path.startswith("pkg://"):
        module = importlib.import_module(file_path.removeprefix("pkg://"))
    else:
        module = load_module_from_file(file_path)
    return _attribute(module, type_name, file_path)


def load_module_from_file(file_path: str, alias: str | None = None) -> ModuleType:
    """Run a Python file as a module, which can import the files next to it.

    ``from .helper import x`` works, also up through folders with an ``__init__.py`` (which is not run), and so does
    ``import helper``: the folder goes to the end of ``sys.path``, where it hides nothing installed. A file is run
    once per process unless it changes on disk. ``alias`` is a second name for the module in ``sys.modules``.
    """
    path = Path(file_path).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"No Python file at {file_path!r} (looked for {path}).")
    with _LOADING:
        now = path.stat()
        stamp = (path, now.st_mtime_ns, now.st_size)
        name = f"{_package_for(path.parent)}.{path.stem.replace('.', '_').replace('-', '_')}"
        module = sys.modules.get(name)
        if module is None or vars(module)["__verl_stamp__"] != stamp:
            module = _run_file(path, name)
            vars(module)["__verl_stamp__"] = stamp
        if alias:
            sys.modules[alias] = module
    return module


def _run_file(path: Path, name: str) -> ModuleType:
    # at the end: a user's ``math.py`` must not hide Python's
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up while it is being defined
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f" in line {lines[-1]}" if lines else ""  # a syntax error says its line itself
        raise RuntimeError(f"{path} failed while it was loaded{where}: {type(error).__name__}: {error}") from error
    return module


def _package_for(folder: Path) -> str:
    """Make ``folder`` importable as a package of a name of its own, nested as deep as its ``__init__.py`` files go."""
    chain = [folder]
    while (chain[-1] / "__init__.py").exists() and chain[-1].parent != chain[-1]:
        chain.append(chain[-1].parent)
    name = f"{_PACKAGE_PREFIX}_{hashlib.sha1(str(chain[-1]).encode()).hexdigest()[:8]}"
    for position, place in enumerate(reversed(chain)):
        if position:
            name = f"{name}.{place.name}"
        if name not in sys.modules:
            package = ModuleType(name)
            package.__path__ = [str(place)]
            sys.modules[name] = package
    return name


def _attribute(module: ModuleType, name: str | None, place: str) -> Any:
    if name and hasattr(module, name):
        return getattr(module, name)
    own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise AttributeError(
        f"{place} has no function or class {name!r}; it has {', '.join(own) or 'none'}.{nearest_name(name or '', own)}"
    )
