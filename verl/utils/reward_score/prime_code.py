"""Competition programs by the name under which users call them: all tests, or the share of the first ten."""

from typing import Any

from verl.utils.reward_score.code import FIRST
from verl.utils.reward_score.code_runner import Outcome, read_tests, run_tests
from verl.utils.reward_score.extract import code_block


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[bool | float, list[dict]]:
    """Whether a program passes all tests; with ``continuous`` the share of the first ten.

    Returns:
        the score, and for each test ``{"outcome", "detail", "seconds"}``.
    """
    tests = read_tests(test_cases)
    results = run_tests(code_block(completion), tests.first(FIRST) if continuous else tests)
    passed = [result.outcome is Outcome.PASSED for result in results]
    facts = [{"outcome": one.outcome.value, "detail": one.detail, "seconds": one.seconds} for one in results]
    return (sum(passed) / len(passed) if continuous else all(passed)), facts
