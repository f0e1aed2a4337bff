"""Expressions with an operator that no model knows, a @ b = 3a - 2b, and the tool that computes it."""

from langchain_core.tools import tool

from recipe.langgraph_agent.react_agent_loop import ReactAgentLoop


@tool(parse_docstring=True)
def calculate(a: int, b: int, operand: str) -> int:
    """Compute a binary operation on two integers.

    Args:
        a: The first integer.
        b: The second integer.
        operand: One of +, -, * and @; a @ b is 3 * a - 2 * b.
    """
    results = {"+": a + b, "-": a - b, "*": a * b, "@": 3 * a - 2 * b}
    if operand not in results:
        raise ValueError(f"operand={operand!r} must be one of {', '.join(results)}")
    return results[operand]


class MathExpressionReactAgentLoop(ReactAgentLoop):
    """The agent loop of rows whose ``agent_name`` is ``math_expression``."""

    tools = (calculate,)
