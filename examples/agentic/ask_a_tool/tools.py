"""A tool: it tells the secret of the row."""

from verl.tools import function_tool


@function_tool
def ask(*, secret: str) -> str:
    """Tell the secret."""
    # many times: with random weights attention is an average over all tokens
    return secret * 24
