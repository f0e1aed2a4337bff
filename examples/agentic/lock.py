"""An environment of one's own: a lock, which tells after each try how many digits are right.

verl env check examples/agentic/lock.py:Lock
verl env check examples/agentic/lock.py:Lock --agent keyboard --kwargs digits=3
"""

import re

import numpy as np


class Lock:
    """A lock of a few digits. A row may bring ``code``."""

    def __init__(self, digits: int = 2, tries: int = 10):
        self.digits, self.tries = digits, tries

    def reset(self, *, seed, code=None):
        self.code = code or "".join(map(str, np.random.default_rng(seed).integers(0, 10, self.digits)))
        self.tried = 0
        return f"Open a lock of {self.digits} digits in {self.tries} tries. Answer with a guess.", {}

    def step(self, action):
        guess = (re.findall(r"\d+", action) or [""])[-1]
        is_valid = len(guess) == self.digits
        right = sum(one == other for one, other in zip(guess, self.code, strict=True)) if is_valid else 0
        self.tried += 1
        is_open = right == self.digits
        observation = f"{guess}: {right} right." if is_valid else f"A guess has {self.digits} digits."
        info = {"success": is_open, "valid_action": is_valid}
        return observation, float(is_open), is_open, not is_open and self.tried == self.tries, info

    def random_action(self, generator):
        """For ``verl env check``: what an agent that knows nothing says."""
        return "".join(map(str, generator.integers(0, 10, self.digits)))

    def solve(self):
        """For ``verl env check --agent solve``: actions that win from here."""
        return [self.code]
