"""``device_mapping``: Python that ROLL evaluates, read here as what it is, a list of numbers."""

import ast
from typing import Any

_MOST = 1 << 20


def parse_devices(value: Any) -> list[int] | None:
    """Device ids of a ``device_mapping``: ``list(range(0,16))``, ``range(8)``, ``[0, 1] + [4]``, a list; None for null.

    Raises:
        ValueError: for anything else; nothing is evaluated.
    """
    if value is None or value == "null" or value == "None":
        return None
    if isinstance(value, list) and value:
        return [_number(item, value) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    try:
        found = _numbers(ast.parse(str(value).strip(), mode="eval").body, value)
    except (SyntaxError, RecursionError):
        raise _refusal(value) from None
    if not found:
        raise ValueError(f"{value!r} names no device")
    if len(found) != len(set(found)):
        raise ValueError(f"{value!r} names a device twice")
    return found


def _numbers(node: ast.expr, value: Any) -> list[int]:
    if isinstance(node, ast.List | ast.Tuple):
        return [_number(getattr(item, "value", None), value) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _numbers(node.left, value) + _numbers(node.right, value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in ("list", "sorted", "tuple") and len(node.args) == 1:
            return _numbers(node.args[0], value)
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            numbers = range(*(_number(getattr(item, "value", None), value) for item in node.args))
            if len(numbers) > _MOST:
                raise ValueError(f"{value!r} names {len(numbers)} devices")
            return list(numbers)
    raise _refusal(value)


def _number(item: Any, value: Any) -> int:
    if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
        return item
    raise _refusal(value)


def _refusal(value: Any) -> ValueError:
    return ValueError(f"{value!r} is no list of device ids: write list(range(0,8)), [0,1,2,3] or null for CPU workers")
