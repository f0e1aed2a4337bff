"""Competition programs by the name under which users call them: all tests, or the share of the first ten."""

from typing import Any

from verl.rewards.scorers.code import FIRST
from verl.rewards.scorers.matching import code_block
from verl.rewards.scorers.sandbox_fusion import CODES
from verl.sandbox.code_runner import read_tests, run_tests
from verl.sandbox.outcomes import Outcome

__path__: list[str] = []  # of older releases' modules below this name: verl/compat.py


def run_test(in_outs: Any, test: str | None = None, debug: bool = False, timeout: float = 15) -> tuple[list, dict]:
    """Run a program against its tests, in processes of their own.

    Args:
        in_outs: ``{"inputs": [...], "outputs": [...], "fn_name": ...}``.
        test: the program.
        debug: print what became of each test.
        timeout: seconds of one test.

    Returns:
        for each test True, False, -2 (it failed while it ran), -3 (too slow) or -4 (it does not compile), and the
        error of the first test that was not passed.
    """
    if test is None:
        return [], {}
    results = run_tests(test, read_tests(in_outs), test_s=timeout)
    if debug:
        print(*results, sep="\n")
    failed = next((one for one in results if one.outcome is not Outcome.PASSED), None)
    codes = [CODES.get(one.outcome, -2) for one in results]
    return codes, {} if failed is None else {"error": failed.detail, "error_message": failed.outcome.value}


def compute_score(completion: str, test_cases: Any, continuous: bool = False) -> tuple[bool | float, list[dict]]:
    """Whether a program passes all tests; with ``continuous`` the share of the first ten.

    Returns:
        the score, and for each test ``{"outcome", "detail", "seconds"}``.
    """
    tests = read_tests(test_cases)
    results = run_tests(code_block(completion), tests.first(FIRST) if continuous else tests)
    passed = [result.outcome is Outcome.PASSED for result in results]
    details = [{"outcome": one.outcome.value, "detail": one.detail, "seconds": one.seconds} for one in results]
    return (sum(passed) / len(passed) if continuous else all(passed)), details
