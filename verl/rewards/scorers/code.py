"""Programs: the share of tests that pass, run here or by a sandbox-fusion service."""

import json
import re
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.matching import after_thinking, code_block
from verl.rewards.scorers.sandbox_fusion import run_remotely
from verl.sandbox.code_runner import MEMORY_MB, TEST_S, Result, Tests, read_tests, run_tests
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

    Returns:
        ``score``, ``acc`` (whether all tests pass) and ``outcome`` (of the first test that does not).
    """
    code, tests = code_block(after_thinking(solution_str)), read_tests(ground_truth)
    tests = tests.first(FIRST) if continuous else tests
    results = _run(code, tests, sandbox_fusion_url, concurrent_semaphore, memory_limit_mb, max_concurrent, timeout)
    return _score(results, continuous)


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
) -> dict[str, float | bool | str]:
    """1.0 if the response's program passes all assertions of its task (MBPP, HumanEval), else 0.0.

    Args:
        ground_truth: ``{"test_list": [...], "test_imports": [...]}`` or ``{"test": source, "entry_point": name}``, as
            JSON or dict.
        extra_info: ``prompt``, if there, is the head that the response goes on from.
        continuous: the share of assertions that hold.

    The other arguments and the result are those of :func:`compute_score`.
    """
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else dict(ground_truth)
    code, prompt = code_block(after_thinking(solution_str)), (extra_info or {}).get("prompt")
    if "test" in gold:
        name = gold["entry_point"]
        checks: tuple[str, ...] = (f"{gold['test']}\ncheck({name})\n",)
        if isinstance(prompt, str):
            code = continued(prompt, code, name)
    elif gold.get("test_list") is not None and len(gold["test_list"]):
        before = "\n".join([*gold.get("test_imports", ()), gold.get("test_setup_code") or ""])
        checks = tuple(f"{before}\n{check}" for check in gold["test_list"])
        checks = checks if continuous else ("\n".join(checks),)
    else:
        raise ValueError(
            f"ground_truth={str(gold)[:200]} has no tests: write 'test_list', or 'test' and 'entry_point'."
        )
    tests = Tests(checks=checks)
    results = _run(code, tests, sandbox_fusion_url, concurrent_semaphore, memory_limit_mb, max_concurrent, timeout)
    return _score(results, continuous)


def compute_score_of_tests(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    max_concurrent: int | None = None,
    continuous: bool = False,
    timeout: float = TEST_S,
) -> dict[str, float | bool | str]:
    """:func:`compute_score` or :func:`compute_score_of_asserts`, by what the ground truth holds. All must pass."""
    gold = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    service = (sandbox_fusion_url, concurrent_semaphore, memory_limit_mb, max_concurrent)
    if isinstance(gold, Mapping) and ("test_list" in gold or "test" in gold):
        return compute_score_of_asserts(solution_str, gold, extra_info, *service, continuous, timeout)
    return compute_score(solution_str, ground_truth, *service, continuous, timeout)


def continued(prompt: str, code: str, name: str) -> str:
    """A program from the head of a function and what a response makes of it: the whole function again, or its body."""
    if re.search(rf"^\s*(?:async\s+)?def\s+{re.escape(name)}\b", code, re.MULTILINE):
        return f"{prompt}\n    pass\n\n{code}\n"  # imports and helpers of the prompt stay, its function is replaced
    return prompt + code


def _run(
    code: str,
    tests: Tests,
    url: str | None,
    semaphore: Any,
    memory_mb: int | None,
    max_concurrent: int | None,
    timeout: float,
) -> list[Result]:
    memory_mb = memory_mb or MEMORY_MB
    if url:
        return run_remotely(url, code, tests, timeout, memory_mb, semaphore, max_concurrent)
    return run_tests(code, tests, test_s=timeout, memory_mb=memory_mb)


def _score(results: list[Result], continuous: bool) -> dict[str, float | bool | str]:
    passed = [result.outcome is Outcome.PASSED for result in results]
    first = next((result.outcome for result in results if result.outcome is not Outcome.PASSED), Outcome.PASSED)
    score = sum(passed) / len(passed) if continuous else float(all(passed))
    return {"score": score, "acc": all(passed), "outcome": first.value}
