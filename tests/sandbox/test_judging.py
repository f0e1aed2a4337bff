"""A program passes its tests by returning what they expect, and in no other way."""

import pytest

from verl.rewards.scorers import default_compute_score
from verl.sandbox.code_runner import Tests, run_tests
from verl.sandbox.judging import Unjudgeable

ANSWER = "swordfish-4711"

FORGERIES = {
    "equals everything": "class E:\n    __eq__ = lambda *_: True\n    __hash__ = lambda s: 1\ndef f(x): return E()",
    "a text that equals everything": "class E(str):\n    __eq__ = lambda *_: True\ndef f(x): return E('no')",
    "walks the frames": """
import sys
def f(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [v for v in [*frame.f_locals.values(), *frame.f_globals.values()] if isinstance(v, str)]
        frame = frame.f_back
    return next((v[i:i + 14] for v in found if (i := v.find('sword' + 'fish-')) >= 0), '')
""",
    "looks at every object": """
import gc
def f(x):
    texts = [str(one) for one in gc.get_objects() if isinstance(one, (list, dict, tuple))]
    return next((v[i:i + 14] for v in texts if (i := v.find('sword' + 'fish-')) >= 0), '')
""",
    "reads its memory": """
def f(x):
    mark = b'sword' + b'fish-'
    with open('/proc/self/maps') as maps, open('/proc/self/mem', 'rb', 0) as memory:
        for line in maps:
            first, last = (int(part, 16) for part in line.split()[0].split('-'))
            if 'rw' not in line:
                continue
            try:
                memory.seek(first)
                data = memory.read(last - first)
            except (OSError, OverflowError):
                continue
            place = data.find(mark)
            while place >= 0:
                if data[place + 9:place + 13].isdigit():
                    return data[place:place + 14].decode()
                place = data.find(mark, place + 1)
    return ''
""",
    "writes into every open file": """
import json, os, struct
reply = json.dumps({'value': [{'outcome': 'done', 'output': '', 'value': None, 'detail': '', 'seconds': 0}]}).encode()
for fd in range(3, 64):
    try:
        os.write(fd, struct.pack('=I', len(reply)) + reply)
    except OSError:
        pass
def f(x): return ''
""",
    "leaves with success": "import os\nos._exit(0)",
    "replaces Python": """
import builtins
builtins.sorted = builtins.set = builtins.abs = lambda *_: 0
def sorted(*_): return 0
def f(x): return ''
""",
    "is asked for nothing": "f = 1",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_scores_0(name):
    gold = {"test_list": [f"assert f(7) == {ANSWER!r}", f"assert sorted(f(8)) == sorted({ANSWER!r})"]}
    assert default_compute_score("mbpp", FORGERIES[name], gold)["score"] == 0.0


HONEST = [
    ("def f(x): return [(x, {x: {1, 2}}), 10**40, 1.5, b'a', None, True, 1j]", "assert f(2)[0] == (2, {2: {2, 1}})"),
    ("def f(x): return 10**x", "assert f(30) == 10**30 and type(f(3)) is int"),
    ("def sum(a, b): return a * b", "assert sum(3, 4) == 12"),
    (
        "class Node:\n    def __init__(s, v): s.v = v\n    def twice(s): return 2 * s.v",
        "n = Node(3)\nassert n.twice() == 6",
    ),
    ("def f(xs): xs.sort()", "xs = [3, 1]\nf(xs)\nassert xs == [1, 3]"),
    ("def f(n):\n    for i in range(n): yield i", "assert list(f(3)) == [0, 1, 2]"),
    ("def f(n): raise KeyError('k')", "try:\n    f(1)\nexcept LookupError:\n    pass\nelse:\n    assert False"),
    ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
    (
        "from fractions import Fraction\ndef f(a): return a / 3",
        "from fractions import Fraction as F\nassert f(F(1)) == F(1, 3)",
    ),
    ("import math\ndef f(x): return x * math.pi", "assert math.isclose(f(2), 6.283185307179586)"),
    ("def f(xs): return sum(xs)", "assert f(iter([1, 2])) == 3 and f(range(4)) == 6"),
    ("import functools\n@functools.cache\ndef f(n): return n", "def check(g):\n    assert g(2) == 2\ncheck(f)"),
    ("def f(g, x): return [g(one) for one in x]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    ("exit = None\ndef f(n, *, k=1): return n + k", "assert f(1, k=2) == 3"),
]


@pytest.mark.parametrize("number", range(len(HONEST)))
def test_an_honest_program_passes(number):
    code, check = HONEST[number]
    [result] = run_tests(code, Tests(checks=(check,)))
    assert result.outcome.value == "passed", result.detail


def test_helpers_of_the_task_are_not_the_programs():
    head = "import math\ndef twice(x):\n    return 2 * x\ndef half(x):\n"
    gold = {"test": "def check(f):\n    assert f(twice(4)) == 4 and math.floor(1.5) == 1", "entry_point": "half"}
    right = "def half(x): return x // 2"
    assert default_compute_score("humaneval", right, gold, {"prompt": head})["score"] == 1.0
    forged = "def twice(x): return x\ndef half(x): return x"
    assert default_compute_score("humaneval", forged, gold, {"prompt": head})["score"] == 0.0


@pytest.mark.parametrize(
    "check, words",
    [("class A: pass\nassert f(A()) == 1", "object of type 'A'"), ("assert f(1) == = 1", "no Python")],
)
def test_a_test_that_cannot_be_judged_is_an_error_of_the_data(check, words):
    with pytest.raises(Unjudgeable, match=words):
        run_tests("def f(x): return 1", Tests(checks=(check,)))
