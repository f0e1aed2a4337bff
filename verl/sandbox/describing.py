"""What a function is called and which arguments it takes, in a form that travels."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


class _Shown:
    """A default value of which only the text is known."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def describe(function: Callable) -> dict[str, Any]:
    """Name, place and parameters of a function; the latter null where it does not tell."""
    try:
        parameters = [
            [
                parameter.name,
                int(parameter.kind),
                None if parameter.default is parameter.empty else repr(parameter.default)[:100],
                None if parameter.annotation is parameter.empty else _annotation(parameter.annotation),
            ]
            for parameter in inspect.signature(function).parameters.values()
        ]
    except (TypeError, ValueError):  # builtins may not tell
        parameters = None
    return {
        "name": name_of(function),
        "parameters": parameters,
        "is_async": inspect.iscoroutinefunction(inspect.unwrap(function)),
    }


def signature_of(parameters: list | None) -> inspect.Signature | None:
    """The signature that `describe` wrote down."""
    if parameters is None:
        return None
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect._ParameterKind(kind),
                default=inspect.Parameter.empty if default is None else _Shown(default),
                annotation=inspect.Parameter.empty if annotation is None else _Shown(annotation),
            )
            for name, kind, default, annotation in parameters
        ]
    )


def name_of(function: Any) -> str:
    """``compute_score (path/to/file.py:3)`` for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "described_name"):
        return function.described_name
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
