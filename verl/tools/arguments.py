"""Arguments of a tool call, checked against the tool's JSON schema."""

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "null": (type(None),),
}


def check_arguments(
    arguments: Mapping[str, Any], schema: Mapping[str, Any] | None, is_closed: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments, and in words what is wrong with them.

    Numbers that a policy wrote as text, and text that it wrote as a number or a boolean, are converted: most formats of
    tool calls cannot tell them apart. Keywords of JSON schema other than type, nullable, enum, const, properties,
    required, additionalProperties, items, anyOf and oneOf are not looked at.

    Args:
        schema: of the parameters.
        is_closed: whether arguments that it does not name are wrong, as of a function.
    """
    schema = dict(schema or {})
    if is_closed:
        schema["additionalProperties"] = False
    problems: list[str] = []
    # a tool without parameters may have a schema without a word about them
    value = _check(dict(arguments), {"type": "object", **schema}, "", problems)
    return value, problems


def _check(value: Any, schema: Any, place: str, problems: list[str]) -> Any:
    if not isinstance(schema, Mapping) or value is None and schema.get("nullable"):
        return value
    for name in ("anyOf", "oneOf"):
        if schema.get(name):
            return _check_any(value, schema[name], place, problems)
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else list(kinds or ())
    # a type of someone's own, such as "any", says nothing that can be checked
    if kinds and all(kind in _KINDS for kind in kinds):
        if not any(_is(value, kind) for kind in kinds):
            value = _converted(value, kinds)
        if not any(_is(value, kind) for kind in kinds):
            problems.append(f"{place or 'the arguments'} must be {' or '.join(kinds)}, not {_shown(value)}")
            return value
        if isinstance(value, float) and "integer" in kinds and "number" not in kinds:
            value = int(value)
    allowed = [schema["const"]] if "const" in schema else schema.get("enum")
    if allowed is not None and not any(value == one and type(value) is type(one) for one in allowed):
        problems.append(f"{place} must be one of {', '.join(map(_shown, allowed))}, not {_shown(value)}")
    if isinstance(value, dict):
        return _check_object(value, schema, place, problems)
    if isinstance(value, list) and "items" in schema:
        return [_check(item, schema["items"], f"{place}[{number}]", problems) for number, item in enumerate(value)]
    return value


def _check_object(value: dict, schema: Mapping[str, Any], place: str, problems: list[str]) -> dict:
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
    prefix = f"{place}." if place else ""
    for name in schema.get("required") or ():
        if name not in value:
            problems.append(f"{prefix}{name} is missing")
    checked = {}
    for name, item in value.items():
        if name not in properties and others is False:
            known = ", ".join(properties) or "none"
            problems.append(f"{prefix}{name} is not a parameter; parameters are: {known}")
        one = properties.get(name, others if isinstance(others, Mapping) else None)
        checked[name] = _check(item, one, f"{prefix}{name}", problems)
    return checked


def _check_any(value: Any, schemas: Sequence[Any], place: str, problems: list[str]) -> Any:
    first: list[str] = []
    for schema in schemas:
        found: list[str] = []
        checked = _check(value, schema, place, found)
        if not found:
            return checked
        first = first or found
    problems += first
    return value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _converted(value: Any, kinds: Sequence[str]) -> Any:
    """Return a value of one of these types that reads the same; the value itself if there is none."""
    if isinstance(value, str):
        text = value.strip()
        if "boolean" in kinds and text.lower() in ("true", "false"):
            return text.lower() == "true"
        for kind, convert in (("integer", int), ("number", float)):
            if kind in kinds:
                try:
                    return convert(text)
                except ValueError:
                    continue
    if "string" in kinds and isinstance(value, (int, float)):
        return str(value).lower() if isinstance(value, bool) else str(value)
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
