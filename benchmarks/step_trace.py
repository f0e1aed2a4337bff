"""Trace one training step: the files from the command to ``loss.backward()``, and the functions of the policy's update.

``python -m benchmarks.step_trace`` runs two GRPO steps of a tiny random model (local controller, one rank, CPU) and
prints, for the second, what the update of the actor calls: distinct functions, files and calls in ``verl/``. With
``--readme`` the table of README's "Reading the code" is written from the stack at the first ``loss.backward()``, with
``--check`` it is compared with that stack instead (line counts to within a fifth).
Comprehensions, generator expressions, lambdas and module bodies are not counted as functions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "verl") + "/"
README = ROOT / "README.md"
BEGIN, END = "<!-- reading the code: python -m benchmarks.step_trace --readme -->", "<!-- end -->"


@dataclass
class StepTrace:
    """Calls within ``RayPPOTrainer.improve``, and the stack at its first ``Tensor.backward``."""

    calls: Counter[CodeType] = field(default_factory=Counter)
    stack: list[CodeType] = field(default_factory=list)
    """Code objects of ``verl/``, the command first; consecutive frames of one function count once."""

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count calls of functions of ``verl/``; for ``sys.setprofile``."""
        if event == "call" and _is_ours(frame.f_code):
            self.calls[frame.f_code] += 1

    def note_stack(self, frame: FrameType | None) -> None:
        if self.stack:
            return
        while frame is not None:
            if _is_ours(frame.f_code):
                self.stack.append(frame.f_code)
            frame = frame.f_back
        self.stack.reverse()

    @property
    def files(self) -> list[str]:
        """Files of the calls, in order of their first call."""
        return list(dict.fromkeys(_file(code) for code in self.calls))

    def path(self) -> dict[str, list[str]]:
        """Files on the stack in order, each with its functions in order."""
        found: dict[str, list[str]] = {}
        for code in self.stack:
            names = found.setdefault(_file(code), [])
            if code.co_name not in names:
                names.append(code.co_name)
        return found


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<")


def _file(code: CodeType) -> str:
    return code.co_filename.removeprefix(PACKAGE)


def trace_step() -> StepTrace:
    """Run two steps as the command does, and trace the second ``improve``."""
    import torch

    from tests.support.runs import make_task, overrides
    from verl.trainer import main_ppo
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trace = StepTrace()
    improve, backward = RayPPOTrainer.improve, torch.Tensor.backward

    def traced_improve(trainer: RayPPOTrainer, batch: Any) -> None:
        if trainer.global_steps < 2:  # the first step has work that later ones do not: lazy imports, caches
            return improve(trainer, batch)
        torch.Tensor.backward = noted_backward
        sys.setprofile(trace.profile)
        try:
            return improve(trainer, batch)
        finally:
            sys.setprofile(None)
            torch.Tensor.backward = backward

    def noted_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        trace.note_stack(sys._getframe(1))
        backward(loss, *args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = overrides(make_task(Path(folder)), trainer__total_training_steps=2, trainer__save_freq=-1)
        RayPPOTrainer.improve = traced_improve
        before, sys.argv = sys.argv, ["main_ppo", *arguments]
        try:
            main_ppo.main()
        finally:
            RayPPOTrainer.improve, sys.argv = improve, before
    return trace


def path_table(path: dict[str, list[str]]) -> str:
    """The table of README's "Reading the code"."""
    lines = ["| file of `verl/` | lines | functions on the way |", "|---|--:|---|"]
    for name, functions in path.items():
        count = (ROOT / "verl" / name).read_text(encoding="utf-8").count("\n")
        lines.append(f"| `{name}` | {count} | {', '.join(f'`{one}`' for one in functions)} |")
    return "\n".join(lines)


def readme_path(text: str) -> dict[str, tuple[int, list[str]]]:
    """Read the table back: file -> lines, functions."""
    rows = {}
    for line in text[text.index(BEGIN) : text.index(END, text.index(BEGIN))].splitlines():
        if line.startswith("| `"):
            name, count, functions = (cell.strip() for cell in line.strip("|").split("|"))
            rows[name.strip("`")] = (int(count), [one.strip("` ") for one in functions.split(",")])
    return rows


def write_readme(path: dict[str, list[str]]) -> None:
    """Replace the table between the markers of README.md."""
    text = README.read_text(encoding="utf-8")
    first = text.index(BEGIN) + len(BEGIN)
    README.write_text(f"{text[:first]}\n{path_table(path)}\n{text[text.index(END, first) :]}", encoding="utf-8")


def differences(path: dict[str, list[str]], text: str) -> list[str]:
    """Compare the traced path with the table in ``text``; one sentence each."""
    written = readme_path(text)
    if list(written) != list(path):
        return [f"README.md lists {', '.join(written)}; a step runs through {', '.join(path)}."]
    found = []
    for name, functions in path.items():
        lines, named = written[name]
        count = (ROOT / "verl" / name).read_text(encoding="utf-8").count("\n")
        if named != functions:
            found.append(f"README.md names {', '.join(named)} of {name}; a step runs {', '.join(functions)}.")
        if abs(count - lines) > lines / 5:
            found.append(f"README.md gives {name} {lines} lines; it has {count}.")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="write the table of README.md")
    parser.add_argument("--check", action="store_true", help="fail if the table of README.md differs")
    parser.add_argument("--files", action="store_true", help="also list the functions of the update by file")
    options = parser.parse_args(arguments)
    trace = trace_step()
    print(
        f"\nupdate of the actor: {len(trace.calls)} functions in {len(trace.files)} files, {trace.calls.total()} calls"
    )
    print(f"the command to loss.backward(): {len(trace.stack)} frames in {len(trace.path())} files\n")
    print(path_table(trace.path()))
    if options.files:
        for name in trace.files:
            print(f"{name:<48}", *(code.co_name for code in trace.calls if _file(code) == name))
    if options.readme:
        write_readme(trace.path())
    if options.check and (found := differences(trace.path(), README.read_text(encoding="utf-8"))):
        raise SystemExit("\n".join([*found, "Write it with: python -m benchmarks.step_trace --readme"]))


if __name__ == "__main__":
    main()
