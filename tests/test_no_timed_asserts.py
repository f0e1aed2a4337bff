"""No assert of a test bounds seconds from above: on a machine under load it would fail though nothing is wrong.

A test states what happened, in which order, how often, or that two sides met: each waits for the other, as in
``tests/support/waiting.py``, with a limit that only guards against a hang. The order of two clock readings and a
duration that is *at least* what was promised are no bounds of this kind.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "default_timer", "getrusage", "cpu_times"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}

SECONDS = {"seconds", "elapsed", "elapsed_s", "duration"}
"""Attributes that hold what the code under test measured."""

READING, DURATION, DEADLINE, MEASURED = "reading", "duration", "deadline", "measured"
"""What an expression may depend on: a clock, a difference of readings, a reading and a limit, a measured time."""


class Function:
    """Kinds of the names in a test module's function, or in its top level, with those of functions within it."""

    def __init__(self, body: list[ast.stmt], outer: dict[str, set[str]]):
        self.body = body
        self.kinds: dict[str, set[str]] = defaultdict(set, {name: set(kinds) for name, kinds in outer.items() if kinds})
        before = None
        while before != (before := sum(map(len, self.kinds.values()))):  # a name may be used above its assignment
            for statement in body:
                self._read(statement)

    def _read(self, statement: ast.AST) -> None:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(target, node.value)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                self._assign(node.target, node.value)
            elif isinstance(node, ast.For | ast.comprehension):
                self._assign(node.target, node.iter)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                returned = [
                    one.value for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield) and one.value
                ]
                self.kinds[node.name] |= self.of(*returned)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            is_pairwise = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for place, one in enumerate(target.elts):
                self._assign(one, value.elts[place] if is_pairwise else value)
        elif isinstance(target, ast.Name):
            self.kinds[target.id] |= self.of(value)
        elif isinstance(target, ast.Attribute):
            self.kinds[target.attr] |= self.of(value)
        elif isinstance(target, ast.Subscript | ast.Starred):
            self._assign(target.value, value)

    def of(self, *nodes: ast.AST) -> set[str]:
        """Return what expressions may depend on."""
        return set().union(*map(self._of, nodes))

    def _of(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CLOCKS:
                return {READING}
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
            left, right = self.of(node.left), self.of(node.right)
            if READING in left | right:
                return {DURATION if isinstance(node.op, ast.Sub) else DEADLINE}
        if isinstance(node, ast.Compare):
            return set()
        found = self.of(*ast.iter_child_nodes(node))
        if isinstance(node, ast.Name):
            found |= self.kinds.get(node.id, set())
        elif isinstance(node, ast.Attribute):
            found |= self.kinds.get(node.attr, set()) | ({MEASURED} if node.attr in SECONDS else set())
        elif isinstance(node, ast.Subscript) and any(
            isinstance(part, ast.Constant) and str(part.value).startswith("timing") for part in ast.walk(node.slice)
        ):
            found |= {MEASURED}
        if isinstance(node, ast.Subscript) and getattr(node.value, "attr", getattr(node.value, "id", "")) == "timing":
            found |= {MEASURED}
        return found

    def timed_asserts(self) -> Iterator[int]:
        """Yield lines of asserts that bound a duration."""
        for statement in self.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.Assert) and any(map(self._is_timed, ast.walk(node.test))):
                    yield node.lineno

    def _is_timed(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Compare):
            return False
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                left, right = right, left
            elif not isinstance(operator, ast.Lt | ast.LtE):
                if isinstance(operator, ast.Eq) and DURATION in self.of(left, right):
                    return True
                continue
            bounded, bound = self.of(left), self.of(right)
            if DURATION in bounded or (READING in bounded and DEADLINE in bound):
                return True
            if MEASURED in bounded and (MEASURED not in bound or has_number(right)):
                return True
        return False


def has_number(node: ast.AST) -> bool:
    """Whether an expression has a number that is no index."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    children = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
    return any(map(has_number, children))


def timed_asserts(source: str) -> list[int]:
    """Return lines of asserts in a module that bound seconds from above."""
    module = ast.parse(source)
    is_function = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in module.body if isinstance(node, is_function)]
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            functions += [one for one in node.body if isinstance(one, is_function)]
    top = Function([node for node in module.body if not isinstance(node, ast.ClassDef | is_function)], {})
    for function in functions:  # what each returns: others call it, perhaps further up
        top.kinds[function.name] |= Function([function], top.kinds).kinds[function.name]
    return sorted({line for one in functions for line in Function(one.body, top.kinds).timed_asserts()})


TIMED = [
    "begin = time.monotonic(); work(); assert time.monotonic() - begin < 5",
    "begin = monotonic(); took = monotonic() - begin; assert 5 >= took and True",
    "def best(): return min(once() for _ in range(5))\n"
    "    def once():\n        begin = time.process_time(); return time.process_time() - begin\n"
    "    assert best() < 3 * best() + 1",
    "async def work(host):\n        begin = time.time(); return host, time.time() - begin\n"
    "    host, seconds = on_host(work)\n    assert seconds < 20",
    "deadline = time.monotonic() + 5\n    while not done():\n        assert time.monotonic() < deadline",
    "took = {}\n    took['a'] = round(time.time() - begin(), 2)\n    assert all(one < 2 for one in took.values())",
    "took = time.time() - start()\n    assert took == pytest.approx(0.5, abs=0.1)",
    "before = getrusage(SELF).ru_utime; work(); assert getrusage(SELF).ru_utime - before < 1.5",
    "assert ended.code == 3 and ended.seconds < 20",
    "assert steps[2]['timing_s/gen_wait'] < 0.5 * steps[2]['timing_s/gen']",
    "waited = trainer.timing['reward']; assert waited < 0.6 if background else waited >= 0.6",
]
UNTIMED = [
    "begin = time.monotonic(); work(); assert time.monotonic() - begin > 0.14",
    "first, second = (time.time(), time.time()), (time.time(), time.time()); assert first[0] < second[1]",
    "deadline = time.monotonic() + 5\n    while time.monotonic() < deadline:\n        work()",
    "assert steps[2]['timing_s/gen'] <= steps[2]['timing_s/step']",
    "assert call.seconds == 7.0 and count < 5",
    "begin = time.monotonic(); count = work(begin); assert len(count) < 5",
]


@pytest.mark.parametrize("body", TIMED)
def test_a_bound_on_seconds_is_found(body):
    assert timed_asserts(f"def test_it():\n    {body}\n")


@pytest.mark.parametrize("body", UNTIMED)
def test_what_no_slow_machine_can_fail_is_left_alone(body):
    assert not timed_asserts(f"def test_it():\n    {body}\n")


def test_no_test_is_a_timed_assert():
    texts = {path.relative_to(TESTS): path.read_text("utf-8") for path in sorted(TESTS.rglob("*.py"))}
    words = [*(f"{name}(" for name in CLOCKS), *(f".{name}" for name in SECONDS), "timing"]
    texts = {path: text for path, text in texts.items() if any(word in text for word in words)}
    found = [f"{path}:{line}" for path, text in texts.items() for line in timed_asserts(text)]
    assert not found, "state what happened, how often or in which order; tests/support/waiting.py waits for it"
