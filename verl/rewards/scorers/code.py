"""Programs: the share of tests that pass, run here or by a sandbox-fusion service."""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.matching import after_thinking, code_block
from verl.rewards.scorers.sandbox_fusion import run_remotely
from verl.sandbox.code_runner import MEMORY_MB, TEST_S, Tests, read_tests, run_tests
from verl.sandbox.outcomes import Outcome

FIRST = 10
"""Tests that count where the score is a share."""


def compute_score(
    solution_str: str,
    ground_truth: Any,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int | None = None,
    continuous: bool = True,
    timeout: float = TEST_S,
    allow_uncontained: bool | None = None,
) -> dict[str, float | bool | str]:
    """The share of the first ten tests that the response's program passes.

    Args:
        ground_truth: ``{"inputs": [...], "outputs": [...]}``, with ``fn_name`` for calls, as JSON or dict.
        sandbox_fusion_url: the service that runs it; None: child processes of this machine.
        concurrent_semaphore: entered around each request.
        memory_limit_mb: MiB of the program; None: 1024.
        max_concurrent: requests to the service at a time, of all processes on this machine; None: no limit.
        continuous: False: 1.0 if all tests pass, else 0.0.
        timeout: seconds of one test.
        allow_uncontained: run it here where this system cannot contain it; None: if the environment allows it.

    Returns:
        ``score``, ``acc`` (whether all tests pass) and ``outcome`` (of the first test that does not).

    Raises:
        ValueError: the ground truth has no tests.
        ServiceError: the service gave no usable answer.
    """
    tests = read_tests(ground_truth)
    # without the thoughts, whose blocks of code are drafts
    return _score(
        *(code_block(after_thinking(solution_str)), tests.first(FIRST) if continuous else tests, continuous, timeout),
        *(sandbox_fusion_url, concurrent_semaphore, memory_limit_mb or MEMORY_MB, max_concurrent),
        allow_uncontained=allow_uncontained,
    )


def compute_score_of_asserts(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int | None = None,
    continuous: bool = False,
    timeout: float = TEST_S,
    allow_uncontained: bool | None = None,
) -> dict[str, float | bool | str]:
    """1.0 if the response's program passes all assertions of its task (MBPP, HumanEval), else 0.0.

    Args:
        ground_truth: ``{"test_list": [...], "test_imports": [...]}`` or ``{"test": source, "entry_point": name}``, as
            JSON or dict; or tests of :func:`compute_score`, all of which must pass.
        extra_info: ``prompt``, if there, is the head that the response goes on from.
        continuous: the share of assertions that hold.

    The other arguments and the result are those of :func:`compute_score`.

    Raises:
        ValueError: the ground truth has no tests.
        ServiceError: the service gave no usable answer.
    """
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    code, prompt = code_block(after_thinking(solution_str)), (extra_info or {}).get("prompt")
    if "test" in gold:
        name = gold["entry_point"]
        given = helpers_of(prompt) if isinstance(prompt, str) else ""
        tests = Tests(checks=(f"{gold['test']}\ncheck({name})\n",), entry=name, given=given)
        if isinstance(prompt, str):
            code = continued(prompt, code, name)
    # len(), since parquet gives arrays, which have no truth value
    elif gold.get("test_list") is not None and len(gold["test_list"]):
        before = "\n".join([*gold.get("test_imports", ()), gold.get("test_setup_code") or ""])
        checks = tuple(f"{before}\n{check}" for check in gold["test_list"])
        # all or nothing: one process for all assertions instead of one each
        tests = Tests(checks=checks if continuous else ("\n".join(checks),))
    elif "test_list" not in gold and ("inputs" in gold or "assert_case" in gold):
        tests = read_tests(gold)
        tests = tests.first(FIRST) if continuous else tests
    else:
        raise ValueError(
            f"ground_truth={str(gold)[:200]} has no tests: write 'test_list', or 'test' and 'entry_point', or 'inputs' "
            "and 'outputs'."
        )
    return _score(
        *(code, tests, continuous, timeout),
        *(sandbox_fusion_url, concurrent_semaphore, memory_limit_mb or MEMORY_MB, max_concurrent),
        allow_uncontained=allow_uncontained,
    )


def helpers_of(prompt: str) -> str:
    """The head of a function as a program, whose imports and helpers tests may use; empty if it is none.

    With classes it is empty, too: objects of the task's are not those of the program, and tests compare them.
    """
    source = f"{prompt}\n    pass\n"
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return ""
    return "" if any(isinstance(node, ast.ClassDef) for node in nodes) else source


def continued(prompt: str, code: str, name: str) -> str:
    """A program from the head of a function and what a response makes of it: the whole function again, or its body."""
    if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b", code, re.MULTILINE):
        return f"{prompt}\n    pass\n\n{code}\n"  # imports and helpers of the prompt stay, its function is replaced
    return prompt + code


def _score(
    code: str,
    tests: Tests,
    continuous: bool,
    test_s: float,
    url: str | None,
    semaphore: Any,
    memory_mb: int,
    max_concurrent: int | None,
    allow_uncontained: bool | None,
) -> dict[str, float | bool | str]:
    if url:
        results = run_remotely(url, code, tests, test_s, memory_mb, semaphore, max_concurrent)
    else:
        results = run_tests(code, tests, test_s=test_s, memory_mb=memory_mb, allow_uncontained=allow_uncontained)
    passed = [result.outcome is Outcome.PASSED for result in results]
    first = next((result.outcome for result in results if result.outcome is not Outcome.PASSED), Outcome.PASSED)
    score = sum(passed) / len(passed) if continuous else float(all(passed))
    return {"score": score, "acc": all(passed), "outcome": first.value}
