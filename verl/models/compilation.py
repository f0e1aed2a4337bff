"""torch.compile of a model's layers, one at a time: one compiled layer serves all of its kind.

Only a layer's ``forward`` is replaced, so names of weights, sharding hooks and gradient checkpointing stay as they are
around it. Lengths are symbolic: rows of other lengths run the same code. Attention is left out of the graphs, since
boundaries of packed rows are numbers that differ in every micro-batch.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

MOST_VARIANTS = 64
"""Graphs of one layer that are kept; beyond, torch runs it uncompiled. Each precision, train and inference mode, frozen
and trained weights, and a batch of one row have their own."""


def missing_for_compile(device: str) -> str | None:
    """What torch.compile lacks on this machine to make kernels for ``device``; None: nothing."""
    if device != "cpu":
        from importlib.util import find_spec

        if find_spec("triton") is None:
            return "the package triton, which comes with torch for CUDA"
        compilers = [os.environ.get("CC"), "gcc", "cc", "clang"]
    else:
        compilers = [os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")]
    names = [name for name in compilers if name]
    if not any(map(shutil.which, names)):
        return f"a {'C++' if device == 'cpu' else 'C'} compiler ({' or '.join(names)}; apt install g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the headers of Python (Python.h; apt install python3-dev)"
    return None


def check_compiler(option: str, device: str, instead: str) -> None:
    """Check that ``option`` can compile on this machine.

    Raises:
        RuntimeError: something it needs is not installed.
    """
    if missing := missing_for_compile(device):
        raise RuntimeError(
            f"{option} on a {device} device: torch.compile needs {missing}, and this machine has none. Install it, or "
            f"{instead}."
        )


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of ``model``, which may be sharded, at its first call.

    Raises:
        ValueError: the model does not say which of its modules are layers.
    """
    layers = list(_layers(model))
    if not layers:
        raise ValueError(
            f"model.compile_layers=true: {type(model).__name__} names no class of layers (_no_split_modules) that it "
            "has. Set model.compile_layers=false."
        )
    _keep_attention_out_of_graphs()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _layers(model: Any) -> Iterator[nn.Module]:
    """The layers that read tokens; those of a vision tower, whose inputs have no length in common, are left out."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    body = getattr(model.base_model, "language_model", model.base_model)
    for module in body.modules():
        # the class of a sharded layer is one of its own, below the model's
        if classes.intersection(base.__name__ for base in type(module).__mro__):
            yield module


@cache
def _keep_attention_out_of_graphs() -> None:
    """Have transformers call attention functions of this package that torch.compile does not look into."""
    from transformers import AttentionInterface

    from verl.models.attention import kernels, packed

    # the default of 8 would be used up by two models in one process
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
    for name, function in (
        (kernels.NAME, kernels.short_sequence_attention_forward),
        (packed.NAME, packed.packed_attention_forward),
    ):
        AttentionInterface.register(name, torch.compiler.disable(function))
