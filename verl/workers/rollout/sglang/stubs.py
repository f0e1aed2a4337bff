"""Stubs of packages that SGLang imports on every machine and does not use on a CPU.

Triton's compiler takes 1 GB; of vLLM, SGLang imports a CUDA kernel, and importing it takes seconds. The stubs exist
in SGLang's own processes only.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch

IF_MISSING = ("triton", "IPython")
ALWAYS = ("vllm", "vllm._custom_ops")


def install_stubs(if_missing: Sequence[str] = IF_MISSING, always: Sequence[str] = ALWAYS) -> list[str]:
    """Make ``import`` of missing packages, and of everything below them, and of the modules ``always`` work.

    Returns the packages that were missing.
    """
    missing = [name for name in if_missing if name not in sys.modules and importlib.util.find_spec(name) is None]
    if "triton" in missing:
        # torch asks for Triton too, and must still find that there is none
        import torch._inductor.runtime.triton_compat  # noqa: F401
        import torch.utils._triton

        torch.utils._triton.has_triton_package()  # remembers its answer
    sys.meta_path.insert(0, _Finder(missing, always))
    return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Sequence[str], modules: Sequence[str]):
        self.packages = frozenset(packages)
        self.modules = frozenset(modules)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.packages and fullname not in self.modules:
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
        return _StubMeta(name, (_Stub,), {}) if name[0].isupper() else _Stub()


class _StubMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubMeta(name, (_Stub,), {})


class _Stub(metaclass=_StubMeta):
    """A class to inherit from, or a decorator that leaves what it decorates as it was; never a kernel."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            raise NotImplementedError("SGLang called a GPU kernel on a CPU: this model needs one. Use rollout.name=hf.")
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda decorated: decorated
