"""For tests alone: answers the CUDA calls of megatron-core on a machine without a GPU.

Its modules without Transformer Engine then run on CPU tensors and gloo. ``install()`` must come before anything imports
``megatron.core``, and stays for the life of the process. Three kinds of use are answered:

- functions of ``torch.cuda`` do nothing, and ``current_device()`` is the CPU, on which tensors are then made;
- ``.cuda()`` of tensors and modules returns them as they are;
- ``device="cuda"`` becomes the CPU, and the type names of tensors are those of CUDA. For all threads: a worker of the
  local controller runs its methods in another one than that which imported this.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")

_NOTHING = (
    "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "nvtx_range_push", "nvtx_range_pop",
    "ipc_collect", "_lazy_init",
)  # fmt: skip
_FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "arange", "rand", "randn", "randint", "eye", "as_tensor",
    "empty_strided", "linspace", "empty_like", "zeros_like", "ones_like", "full_like", "randperm",
)  # fmt: skip
_installed: list[bool] = []


def install() -> None:
    """Answer CUDA's functions in this process, once; nothing where there is a GPU."""
    if _installed or torch.cuda.is_available():
        return
    from torch._dynamo.trace_rules import get_torch_obj_rule_map

    get_torch_obj_rule_map()  # dynamo's table of torch's functions, which must be made of the real ones
    cuda: Any = torch.cuda
    for name in _NOTHING:
        setattr(cuda, name, _nothing)
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda._lazy_call = lambda function: function()
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_args, **_kwargs: _Stream()
    cuda.stream = cuda.device = lambda *_args, **_kwargs: contextlib.nullcontext()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *_args, **_kwargs: 0
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_args, **_kwargs: (0, 0)
    # one random state, the CPU's, which megatron-core forks by getting and setting it
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = _nothing  # torch.manual_seed calls it
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.default_generators = _Generators()
    cuda.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)
    # small functions are compiled at import, where dynamo trips over the functions above
    torch.compile = lambda function=None, *_args, **_kwargs: function if function is not None else lambda one: one
    torch.distributed.all_to_all_single = _with_lists(torch.distributed.all_to_all_single)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in ("to", "new_empty", "new_zeros", "new_full", "new_tensor"):
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.type = _with_cuda_names(torch.Tensor.type)
    _installed.append(True)


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _translated(kwargs: dict[str, Any]) -> dict[str, Any]:
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": CPU}
    return {**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if factory is _TO and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return factory(*args, **_translated(kwargs))

    return functools.wraps(factory)(wrapped)


_TO = torch.Tensor.to


def _with_cuda_names(name_of_type: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.type``, by which optimizers sort parameters."""

    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = name_of_type(tensor, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    return wrapped


def _with_lists(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """The exchange of experts' tokens, which gets lists of sizes from CUDA tensors alone."""

    def wrapped(out: Any, data: Any, output_sizes: Any = None, input_sizes: Any = None, **kwargs: Any) -> Any:
        names = ("output_split_sizes", "input_split_sizes")
        sizes = [kwargs.pop(name, size) for name, size in zip(names, (output_sizes, input_sizes), strict=True)]
        return exchange(out, data, *(one.tolist() if isinstance(one, torch.Tensor) else one for one in sizes), **kwargs)

    return wrapped


class _Stream:
    """A stream, an event and a context that do nothing."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., _Stream]:
        return lambda *_args, **_kwargs: self


class _Generators:
    """``torch.cuda.default_generators``: the CPU's, of any number."""

    def __getitem__(self, _index: int) -> torch.Generator:
        return torch.default_generator
