"""Stand-ins for packages that SGLang imports everywhere and a CPU never calls: Triton's compiler, torchvision, IPython.

They let SGLang be imported without 1 GB of GPU compilers and without a CUDA build of torchvision, which would break
transformers beside a CPU torch. They exist in SGLang's own processes only, and only for what is not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

PACKAGES = ("triton", "torchvision", "IPython")


def stand_in_for_missing(packages: Sequence[str] = PACKAGES) -> list[str]:
    """Make ``import`` of these packages and of everything below them work where they are missing; returns which."""
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    if "triton" in missing:
        # torch asks for Triton too, and must go on knowing that there is none
        import torch._inductor.runtime.triton_compat  # noqa: F401
        import torch.utils._triton

        torch.utils._triton.has_triton_package()  # remembers its answer
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str]):
        self.packages = frozenset(packages)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    """A module of which every name can be imported: names in capitals as classes, others as decorators."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_StandIn,), {}) if name[0].isupper() else _StandIn()


class _Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_StandIn,), {})


class _StandIn(metaclass=_Anything):
    """A class to inherit from, or a decorator that leaves what it decorates as it was."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda decorated: decorated
