"""Arithmetic: numbers, ``+ - * / // % **``, parentheses, and a few functions. Nothing is run as Python."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.blocking import schema
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

_LONGEST = 1000
"""Characters of an expression."""

_BITS = 4096
"""Bits of a whole number on the way: larger ones take time."""

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}

_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(math, name) for name in "sqrt exp log log2 log10 sin cos tan floor ceil".split()},
    **{"abs": abs, "round": round, "min": min, "max": max, "gcd": math.gcd},
}

_CONSTANTS = {"pi": math.pi, "e": math.e}


class CalculatorTool(BaseTool):
    """Answers with the value of an arithmetic expression."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        expression = {"type": "string", "description": "Such as (2 + 3) * sqrt(16)."}
        return self.tool_schema or schema(
            "calculator", "Compute an arithmetic expression.", ["expression"], expression=expression
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        return ToolResponse(text=str(calculate(str(parameters.get("expression", ""))))), None, {}


def calculate(expression: str) -> int | float:
    """Return the value of an arithmetic expression.

    Raises:
        ValueError: it is none, or its value is too large.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; {_LONGEST} are the most")
    try:
        # people write 2^3, 3 × 4 and 1,000
        text = expression.replace("^", "**").replace("×", "*").replace("÷", "/").strip()
        tree = ast.parse(text, mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression[:100]!r} is no arithmetic expression") from None
    except (ZeroDivisionError, OverflowError, TypeError) as error:
        raise ValueError(f"{expression[:100]!r} has no value: {error}") from None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _small(_power(left, right))
        if type(node.op) in _OPERATORS:
            return _small(_OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id in _FUNCTIONS:
            return _FUNCTIONS[node.func.id](*map(_value, node.args))
        raise ValueError(f"{node.func.id} is no function here; functions are {', '.join(_FUNCTIONS)}")
    raise ValueError(f"{ast.unparse(node)[:100]!r} is no arithmetic")


def _power(base: Any, exponent: Any) -> Any:
    # before it is computed: 9**9**9 would never end
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _BITS:
        raise ValueError("the value is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError("the value is no real number")
    return value


def _small(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise ValueError("the value is too large")
    return value
