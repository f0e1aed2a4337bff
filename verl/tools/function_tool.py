"""Functions as tools: the schema of a function from its type hints and its docstring, and calls of it."""

import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.import_utils import load_module_from_file

_MARK = "__verl_tool__"

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}

_JSON_NAMES = {**{kind: name for kind, name in _PLAIN.items()}, type(None): "null"}


def function_tool(function: Callable | None = None, *, name: str | None = None, description: str | None = None) -> Any:
    """Decorator: the policy may call this function.

    Its parameters become those of the schema, with the types of their hints and the words of the docstring's ``Args:``;
    its docstring's first paragraph is the description. Keyword-only parameters (behind ``*``) are not shown to the
    policy: they come from the row's ``tools_kwargs[name]["execute_kwargs"]``. What it returns is shown as text,
    anything but text as JSON.

    Args:
        name: under which the policy calls it; None: the function's.
        description: in place of the docstring's.

    Raises:
        TypeError: a parameter has no type hint, or one that JSON has no type for.
    """

    def decorate(function: Callable) -> Callable:
        setattr(function, _MARK, schema_of(function, name, description))
        return function

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class FunctionTool:
    """A function that the policy may call."""

    tool_schema: OpenAIFunctionToolSchema
    function: Callable
    path: str
    """The file that it is in."""
    attribute: str
    """Its name there."""

    @property
    def name(self) -> str:
        return self.tool_schema.function.name

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def typed(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments, JSON values, as the types of the function's hints."""
        return typed_arguments(self.function, arguments)

    def row_parameters(self) -> tuple[set[str], set[str]]:
        """Return the names of the parameters that rows give, and of those among them that each row must give."""
        given = [p for p in inspect.signature(self.function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return {p.name for p in given}, {p.name for p in given if p.default is p.empty}


def functions_in(path: str) -> list[FunctionTool]:
    """Return the functions of a Python file that are marked with `function_tool`.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: it fails while it is loaded.
        ValueError: it has none, or two of one name.
    """
    module = load_module_from_file(path)
    found = [
        FunctionTool(getattr(value, _MARK), value, path, attribute)
        for attribute, value in vars(module).items()
        if callable(value) and isinstance(getattr(value, _MARK, None), OpenAIFunctionToolSchema)
    ]
    if not found:
        raise ValueError(
            f"multi_turn.function_tool_path={path}: no function in it is a tool. Mark one with "
            "@verl.tools.function_tool."
        )
    names = [tool.name for tool in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{path}: two tools are called {twice[0]!r}. Give one of them another: @function_tool(name=...)."
        )
    return found


# -- Schema of a function ---------------------------------------------------------------------------------------------


def schema_of(function: Callable, name: str | None = None, description: str | None = None) -> OpenAIFunctionToolSchema:
    """Return the schema of a function."""
    about, words = read_docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    where = f"tool {name or function.__name__!r}"
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"{where}: parameter {parameter} has no name of its own for the schema. Write it out.")
        if parameter.name not in hints:
            raise TypeError(
                f"{where}: parameter {parameter.name!r} has no type hint, from which the schema is made. Give it one, "
                f"such as {parameter.name}: str."
            )
        one = json_schema(hints[parameter.name], f"{where}, parameter {parameter.name!r}")
        if parameter.name in words:
            one.setdefault("description", words[parameter.name])
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif parameter.default is not None:
            default = parameter.default.value if isinstance(parameter.default, enum.Enum) else parameter.default
            if isinstance(default, (str, int, float, bool, list, dict)):
                one["default"] = default
        properties[parameter.name] = one
    return OpenAIFunctionToolSchema.model_validate(
        {
            "type": "function",
            "function": {
                "name": name or function.__name__,
                "description": about if description is None else description,
                "parameters": {"type": "object", "properties": properties, "required": required},
            },
        }
    )


def json_schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a type hint.

    Raises:
        TypeError: JSON has no such type.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text = next((one for one in args[1:] if isinstance(one, str)), None)
        return {**json_schema(args[0], where), **({} if text is None else {"description": text})}
    if hint in (Any, object):
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        return _choice(args)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choice([member.value for member in hint])
    if origin in (Union, types.UnionType):
        kinds = [one for one in args if one is not type(None)]
        of_kinds = [json_schema(one, where) for one in kinds]
        one = of_kinds[0] if len(of_kinds) == 1 else {"anyOf": of_kinds}
        return {**one, **({"nullable": True} if len(kinds) < len(args) else {})}
    if _is_kind(origin or hint, Mapping):
        values = json_schema(args[1], where) if len(args) == 2 else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if _is_kind(origin or hint, (Sequence, set, frozenset, Iterable)) and not _is_kind(hint, (str, bytes)):
        items = [one for one in args if one is not Ellipsis]
        return {"type": "array", **({"items": json_schema(items[0], where)} if items else {})}
    raise TypeError(
        f"{where}: JSON has no type for {hint!r}. Use str, int, float, bool, list, dict, Literal, an Enum, or Optional "
        "of these."
    )


def _is_kind(hint: Any, kinds: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, kinds)


def _choice(values: Sequence[Any]) -> dict[str, Any]:
    kinds = {_JSON_NAMES.get(type(value)) for value in values}
    kind = {"type": kinds.pop()} if len(kinds) == 1 else {}
    return {**kind, "enum": list(values)}


_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?)\s*:?\s*$")
_FIELD = re.compile(r"^:param\s+(?:[\w\[\], .|]+\s+)?(\w+)\s*:\s*(.*)$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description, which is all before the first section, and the words about each parameter.

    Reads ``Args:`` with indented entries ``name: words`` or ``name (type): words``, and ``:param name: words``.
    """
    about: list[str] = []
    words: dict[str, str] = {}
    section, indent, name = "", None, None
    for line in text.splitlines():
        if found := _SECTION.match(line):
            section, indent, name = found[1], None, None
        elif found := _FIELD.match(line.strip()):
            section, name = "field", found[1]
            words[name] = found[2].strip()
        elif line.strip().startswith((":return", ":raise", ":rtype", ":type")):
            section, name = "other", None
        elif not section:
            about.append(line.rstrip())
        elif section in ("Args", "Arguments", "Parameters", "field") and line.strip():
            depth = len(line) - len(line.lstrip())
            if section != "field" and indent is None:
                indent = depth
            entry = _ENTRY.match(line.strip()) if depth == indent else None
            if entry:
                name = entry[1]
                words[name] = entry[2].strip()
            elif name:
                words[name] = f"{words[name]} {line.strip()}".strip()
    return "\n".join(about).strip(), words


# -- Calls ------------------------------------------------------------------------------------------------------------


def typed_arguments(function: Callable, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, JSON values, as the types of the function's hints: enums, tuples and sets."""
    hints = get_type_hints(function, include_extras=False)
    return {name: _typed(value, hints.get(name, Any)) for name, value in arguments.items()}


def _typed(value: Any, hint: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [one for one in args if one is not type(None)]
        return _typed(value, kinds[0]) if value is not None and len(kinds) == 1 else value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if isinstance(value, list):
        item = next((one for one in args if one is not Ellipsis), Any)
        typed = [_typed(one, item) for one in value]
        return typing.cast(Any, origin)(typed) if origin in (tuple, set, frozenset) else typed
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return value
