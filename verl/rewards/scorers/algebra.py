"""Equality by algebra, with math-verify. For a child process only (``equal.py``): it may take any time and memory."""

import logging

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.disable(logging.WARNING)  # math-verify says at every call that its own timeouts, which need signals, are off
_HOW = (LatexExtractionConfig(), ExprExtractionConfig())


def is_same(answer: str, gold: str) -> bool:
    """Whether math-verify finds the two LaTeX texts equal; a text it cannot read equals no other."""
    parsed = [parse(f"\\boxed{{{text}}}", extraction_config=_HOW, parsing_timeout=None) for text in (gold, answer)]
    # the gold answer first: `verify` does not treat both alike
    return bool(all(parsed) and verify(*parsed, timeout_seconds=None))


for _pair in (("(x+1)^2", "x^2+2x+1"), (r"\sqrt{12}", r"2\sqrt{3}"), ("[0,1)", "x<3")):
    is_same(*_pair)  # loads what sympy loads at first use, before the clock of a call runs
