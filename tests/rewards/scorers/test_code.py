"""Programs against tests: what each does to itself has a name, and costs nobody else anything."""

import os

import pytest

from verl.rewards.scorers import default_compute_score, prime_code
from verl.rewards.scorers.matching import code_block
from verl.sandbox.code_runner import PROGRAM_OUTCOMES, Tests, read_tests, run_tests, same_output, same_value

SUM = "a, b = map(int, input().split())\nprint(a + b)"
IO = Tests(("1 2\n", "3 4\n"), ("3\n", "7\n"))


def outcomes(code, tests=IO, **limits):
    limits = {"test_s": 2.0, "memory_mb": 256, "output_kb": 64, **limits}
    return [result.outcome.value for result in run_tests(code, tests, **limits)]


@pytest.mark.parametrize(
    "code, first",
    [
        (SUM, "passed"),
        ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())))", "passed"),
        ("import sys\nsys.stdout.write(str(sum(map(int, sys.stdin.buffer.read().split()))))", "passed"),
        ("if __name__ == '__main__':\n    print(sum(map(int, input().split())))\n    exit()", "passed"),
        ("print(int(input().split()[0]) * 3)\nimport sys\nsys.exit(0)", "passed"),
        ("print(12)", "wrong"),
        ("", "wrong"),
        ("import os\nos._exit(0)", "wrong"),
        ("while True: pass", "timeout"),
        ("import time\ntime.sleep(60)", "timeout"),
        ("x = bytearray(3 << 30)", "memory"),
        ("x = []\nwhile True: x.append('y' * 100000)", "memory"),
        ("while True: print('x' * 10000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "output"),
        ("import os\nwhile True: os.fork()", "processes"),
        ("raise ValueError('no')", "crash"),
        ("import sys\nsys.exit(3)", "crash"),
        ("import ctypes\nctypes.string_at(0)", "crash"),
        ("def f(n): return f(n + 1)\nf(0)", "crash"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "crash"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 9), 2)\nprint(3)", "crash"),
        ("def f(:", "compile"),
        ("(" * 5000 + ")" * 5000, "compile"),
        ("x = '\0'", "compile"),
        ("not a program at all", "compile"),
    ],
)
def test_what_a_program_does_has_a_name(code, first):
    assert outcomes(code, IO.first(1)) == [first]


def test_a_bad_end_in_one_test_leaves_the_others_alone():
    code = "n = int(input())\nif n == 1:\n    import os\n    os.abort()\nwhile n == 2: pass\nprint(n)"
    assert outcomes(code, Tests(("0", "1", "2", "3"), ("0", "1", "2", "3")), test_s=1.0) == [
        "passed",
        "crash",
        "timeout",
        "passed",
    ]


def test_tests_that_find_no_time_left_are_over_time():
    code = "word = input()\nwhile word == 'spin': pass"
    tests = Tests(("spin", *("end",) * 20), ("",) * 21)
    assert outcomes(code, tests, test_s=1.0, total_s=60.0) == ["timeout", *["passed"] * 20]
    assert outcomes(code, tests, test_s=1.0, total_s=1.0) == ["timeout"] * 21


def test_a_program_sees_neither_keys_nor_expected_outputs_nor_files_of_the_last(monkeypatch):
    monkeypatch.setenv("A_SECRET", "key")
    code = "import os\nopen('left', 'x').close()\n"
    code += "print('A_SECRET' in os.environ, b'A_SECRET' in open('/proc/self/environ', 'rb').read())"
    assert outcomes(code, Tests(("", ""), ("False False",) * 2)) == ["passed"] * 2
    assert not os.path.exists("left")


CALLS = Tests(([1, 2], "3\n4", '"a"\n"b"'), (3, [7], "ab"), "add")


@pytest.mark.parametrize(
    "code, results",
    [
        ("def add(a, b): return a + b", ["passed"] * 3),
        ("class Solution:\n    def add(self, a, b): return a + b", ["passed"] * 3),
        ("def add(a, b):\n    print('noise')\n    return a + b", ["passed"] * 3),
        ("def add(a, b): return str(a + b)", ["wrong", "wrong", "passed"]),
        ("def add(a, b): return a", ["wrong"] * 3),
        ("def sub(a, b): return a", ["crash"] * 3),
        ("import os\nos._exit(0)", ["crash"] * 3),
    ],
)
def test_functions_are_called_with_their_arguments(code, results):
    assert outcomes(code, CALLS) == results


@pytest.mark.parametrize(
    "found, expected, same",
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [[1, 2]], True),
        (True, 1, False),
        (1.0, 1, True),
        (0.30000000000000004, 0.3, True),
        ("1", 1, False),
        ({"1": 2}, {1: 2}, True),
        (None, None, True),
        (3, "3", True),
        ("abc", '"abc"', True),
        ("abc", "abc", True),
        ([], [[]], True),
        ([[]], [], False),
    ],
)
def test_values_are_compared_as_data_sets_write_them(found, expected, same):
    assert same_value(found, expected) is same


@pytest.mark.parametrize(
    "found, expected, same",
    [
        ("1 2\n3", "1 2\n3\n", True),
        ("1  2 \n3\n\n", "1 2\n3", True),
        ("1 2 3", "1 2\n3", False),
        ("0.3333333", "0.33333333333", True),
        ("0.34", "0.33", False),
        ("10", "10.0", True),
        ("10.0", "10", False),
        ("yes", "YES", False),
        ("", "0", False),
        ("nan", "0.5", False),
        ("a 0.5000001", "a 0.5", True),
        ("b 0.5", "a 0.5", False),
    ],
)
def test_outputs_are_compared_line_by_line(found, expected, same):
    assert same_output(found, expected) is same


@pytest.mark.parametrize(
    "text, code",
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("a\n```py\nx = 1\n```\nb\n```python\ny = 2\n```", "y = 2"),
        ("```python\nx = 1\n```\noutput:\n```\n1\n```", "x = 1"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("x = 1", "x = 1"),
        ("```cpp\nint x;\n```", "int x;"),
        ("", ""),
        ("```python title=a.py\nx = 1\n  ```", "x = 1"),
    ],
)
def test_the_last_block_of_code_is_taken(text, code):
    assert code_block(text) == code


HALF = "```python\nprint(3)\n```"
CASES = '{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}'


def test_the_score_is_the_share_of_tests_or_all():
    assert default_compute_score("taco", HALF, CASES) == {"score": 0.5, "acc": False, "outcome": "wrong"}
    assert default_compute_score("taco", HALF, CASES, continuous=False)["score"] == 0.0
    assert default_compute_score("apps", f"<think>{HALF}</think>\n{SUM}", CASES)["acc"]
    assert prime_code.compute_score(HALF, CASES)[0] is False
    share, details = prime_code.compute_score(HALF, CASES, continuous=True)
    assert share == 0.5 and [detail["outcome"] for detail in details] == ["passed", "wrong"]


def test_ten_tests_count_for_a_share():
    cases = {"inputs": ["1"] * 12, "outputs": ["1"] * 10 + ["2"] * 2}
    assert default_compute_score("codeforces", "print(input())", cases)["score"] == 1.0
    assert default_compute_score("codeforces", "print(input())", cases, continuous=False)["score"] == 0.0


HEAD = 'from math import sqrt\n\n\ndef root(x: int) -> float:\n    """The root."""\n'
CHECK = {"test": "def check(f):\n    assert f(4) == 2\n    assert f(9) == 3\n", "entry_point": "root"}


@pytest.mark.parametrize(
    "source, text, gold, info, outcome",
    [
        ("humaneval", "```python\ndef root(x):\n    return sqrt(x)\n```", CHECK, {"prompt": HEAD}, "passed"),
        ("humaneval", "```python\n    return sqrt(x)\n```", CHECK, {"prompt": HEAD}, "passed"),
        ("humaneval", "```python\n    return x / 2\n```", CHECK, {"prompt": HEAD}, "wrong"),
        ("humaneval", "import os\nos._exit(0)", CHECK, {}, "crash"),
        ("humaneval", "import sys\nsys.exit(0)", CHECK, {}, "crash"),
        ("mbpp", "def f(x): return x + 1", {"test_list": ["assert f(1) == 2"], "test_imports": []}, {}, "passed"),
        ("mbpp", "def f(x): return 2", {"test_list": ["assert f(1) == 2", "assert f(2) == 3"]}, {}, "wrong"),
        ("mbpp", "f = 1", {"test_list": ["assert f(1) == 2"]}, {}, "crash"),
        (
            "mbpp",
            "def f(x): return x",
            {"test_list": ["assert f(sqrt(4)) == 2"], "test_imports": ["from math import sqrt"]},
            {},
            "passed",
        ),
    ],
)
def test_assertions_must_be_reached_and_hold(source, text, gold, info, outcome):
    result = default_compute_score(source, text, gold, info)
    assert (result["outcome"], result["score"]) == (outcome, float(outcome == "passed"))


@pytest.mark.parametrize("gold", ["{", "{}", '{"inputs": ["1"], "outputs": []}', "[1]", {"inputs": []}])
def test_tests_that_are_none_are_an_error_and_no_score(gold):
    with pytest.raises(ValueError, match="ground_truth"):
        read_tests(gold)


def test_outcomes_have_the_names_users_see():
    assert {one.value for one in PROGRAM_OUTCOMES} == {
        *("passed", "wrong", "timeout", "memory", "processes", "crash", "output", "compile")
    }
