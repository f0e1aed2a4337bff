"""What a worker writes to stderr reaches the driver's stderr, and its end is kept."""

import os
import sys

from verl.single_controller.errors import StderrTail
from verl.single_controller.processes import Child


def written_by(action, tmp_path):
    """The tail of a child that ran ``action``, and what was passed on."""
    with open(tmp_path / "out", "wb") as out:
        tail = StderrTail(out.fileno())

        def live():
            tail.adopt()
            action()

        child = Child(live)
        tail.started()
        child.outcome()
        lines = tail.end()
        return lines, (tmp_path / "out").read_bytes()


def test_python_libraries_and_a_crash_are_all_heard(tmp_path):
    def action():
        print("from python", file=sys.stderr)
        os.write(2, b"from a library\n")
        os.kill(os.getpid(), 9)

    lines, passed = written_by(action, tmp_path)
    assert lines == "from python\nfrom a library" and passed == lines.encode() + b"\n"


def test_the_stacks_of_a_crash_are_quoted_whole(tmp_path):
    def action():
        import faulthandler

        faulthandler.disable()  # Ray may have taken the signals over in the driver
        faulthandler.enable(file=2)
        print("before", file=sys.stderr)

        def crash(depth):
            if depth:
                crash(depth - 1)
            os.kill(os.getpid(), 11)

        crash(40)

    words, _ = written_by(action, tmp_path)
    assert "Fatal Python error: Segmentation fault" in words and words.count("in crash") == 41
    assert words.startswith("before")


def test_twenty_lines_are_quoted_and_all_are_passed_on(tmp_path):
    def action():
        for i in range(20000):
            print(f"line {i}", file=sys.stderr)

    lines, passed = written_by(action, tmp_path)
    assert lines.splitlines() == [f"line {i}" for i in range(19980, 20000)]
    assert passed.count(b"\n") == 20000
