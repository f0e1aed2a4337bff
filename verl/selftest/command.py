"""``verl selftest``: trials of this machine's device, kernels, engines and rollouts, each in a process of its own.

    verl selftest                      # everything, on CUDA where there is a device
    verl selftest --only attention,vllm
    verl selftest --json > report.json

A trial passes, fails, or says why it cannot run here. One that crashes, hangs or runs out of memory fails by itself;
the others go on. Modules of trials, and torch with them, are imported once the first line is on the screen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from verl.config.base import did_you_mean
from verl.preflight.command import asks_for_help
from verl.telemetry.run_record import say_early
from verl.version import __version__

if TYPE_CHECKING:
    from verl.selftest.base import Trial

_LIMIT_S = 600.0
_KEPT = 1 / 3  # of the limit, at most, for the figures that come last
_MAX_REASON = 500  # characters of a failure in the table


class Outcome(NamedTuple):
    """What became of a trial."""

    name: str
    verdict: str
    """``pass``, ``FAIL``, or ``none`` where it cannot run here."""
    text: str
    figures: dict[str, float] = {}
    seconds: float = 0.0


def run_trial(name: str, device: str, size: str, folder: str, timeout_s: float) -> Outcome:
    """Run one trial in a child process, and end the child with all it started."""
    command = [sys.executable, "-m", "verl.selftest.checks", name, device, size, folder, f"{timeout_s:.0f}"]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # a session of its own: an engine's processes must not outlive the trial
        child = subprocess.Popen(command, stdout=output, stderr=errors, text=True, start_new_session=True)
        try:
            timed_out = not _has_ended(child.pid, timeout_s)
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        seconds = time.monotonic() - start
        output.seek(0)
        errors.seek(0)
        printed, said = output.read().strip().splitlines(), errors.read()
    if timed_out:
        return Outcome(name, "FAIL", f"no end within {timeout_s:.0f} s; it was in {_innermost(said)}", {}, seconds)
    try:
        found = json.loads(printed[-1])
        return Outcome(name, found["verdict"], found["text"], found["figures"], seconds)
    except (IndexError, ValueError, KeyError, TypeError):
        last = (said.strip().splitlines() or ["it printed nothing"])[-1]
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        return Outcome(name, "FAIL", f"the process ended with {how}: {last}"[:_MAX_REASON], {}, seconds)


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for a child without reaping it, so that its process group is still its own when it is killed."""
    end = time.monotonic() + timeout_s
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _innermost(said: str) -> str:
    """The innermost frame of the stacks that a child prints before its deadline."""
    frames = [line.strip() for line in said.splitlines() if line.lstrip().startswith("File ")]
    return frames[0] if frames else "code that prints no Python stack"


def all_trials() -> Mapping[str, Trial]:
    """Import the modules of trials; returns them by name, in their order."""
    import verl.selftest.checks
    import verl.selftest.figures  # noqa: F401  both register their trials
    from verl.selftest.base import TRIALS

    return TRIALS


def seconds_kept(names: Sequence[str], trials: Mapping[str, Trial], limit_s: float) -> float:
    """Seconds of ``limit_s`` that comparisons leave to the figures among ``names``, which come after them."""
    return min(_KEPT * limit_s, sum(trials[name].seconds for name in names if trials[name].measures))


def run_trials(
    names: Sequence[str], device: str, size: str, limit_s: float, begins: Callable[[str], None]
) -> Iterator[Outcome]:
    """Run trials one after the other; those that do not fit into ``limit_s`` are named and left out.

    Args:
        begins: called with the name of each before it runs.
    """
    trials, end = all_trials(), time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="verl-selftest-") as folder:
        for number, name in enumerate(names):
            begins(name)
            left = end - time.monotonic()
            if not trials[name].measures:
                left -= seconds_kept(names[number:], trials, limit_s)
            if left < 5:
                yield Outcome(name, "none", f"not tried: its share of the {limit_s:.0f} s of --limit is over")
                continue
            yield run_trial(name, device, size, folder, min(left, trials[name].seconds))


def as_markdown(machine: str, outcomes: Sequence[Outcome]) -> str:
    """The table to paste into a report."""
    lines = [machine, "", "| trial | | s | |", "|---|---|---|---|"]
    for one in outcomes:
        text = " ".join(one.text.split()).replace("|", "/")
        lines.append(f"| {one.name} | {one.verdict} | {one.seconds:.0f} | {text} |")
    return "\n".join(lines)


def _parser(trials: Mapping[str, Trial]) -> argparse.ArgumentParser:
    from verl.utils.tiny_model import SIZES

    width = max(map(len, trials))
    parser = argparse.ArgumentParser(
        "verl selftest",
        description="Try what verl runs on: kernels against the CPU's numbers, training engines, rollout engines and "
        "their sleep, collectives, optional packages; then measure an update, decoding and a weight sync.",
        epilog="trials:\n" + "\n".join(f"  {name:<{width}}  {trial.about}" for name, trial in trials.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--only", default="", help="names of trials, separated by commas")
    parser.add_argument("--skip", default="", help="names of trials to leave out, separated by commas")
    parser.add_argument("--size", choices=SIZES, help="model of the figures (default: 0.5B on CUDA, 2.5M on a CPU)")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help=f"seconds for all ({_LIMIT_S:.0f})")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Names in a comma-separated option.

    Raises:
        ValueError: one of them is no trial.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"{option}={name} is no trial{did_you_mean(name, known)}. Trials: {', '.join(known)}")
    return names


def main(words: Sequence[str]) -> int:
    """Run ``verl selftest``; returns 0, or 1 where a trial failed."""
    if not asks_for_help(words):
        say_early(f"verl {__version__}: loading torch")
    trials = all_trials()
    from verl.selftest.base import describe_machine
    from verl.utils.device import cuda_problem, is_cuda_available

    parser = _parser(trials)
    options = parser.parse_args(list(words))
    known = list(trials)
    try:
        wanted = _chosen("--only", options.only, known) or known
        left_out = _chosen("--skip", options.skip, known)
    except ValueError as error:
        parser.error(str(error))
    device = options.device or ("cuda" if is_cuda_available else "cpu")
    if device == "cuda" and (problem := cuda_problem()):
        print(f"error: --device cuda: {problem}", file=sys.stderr)
        return 1
    size = options.size or ("0.5B" if device == "cuda" else "2.5M")
    names = [name for name in wanted if name not in left_out]
    outcomes: list[Outcome] = []
    width = max(map(len, names), default=0)
    stream = sys.stderr if options.json else sys.stdout

    def begins(name: str) -> None:
        print(f"{name:<{width}}  ", end="", file=stream, flush=True)  # its outcome ends the line

    for outcome in run_trials(names, device, size, options.limit, begins):
        outcomes.append(outcome)
        print(f"{outcome.verdict:<5}{outcome.seconds:5.0f} s  {outcome.text}", file=stream, flush=True)
    failed = sum(outcome.verdict == "FAIL" for outcome in outcomes)
    machine = describe_machine(device)
    if options.json:
        found: dict[str, Any] = {"machine": machine, "device": device, "size": size}
        print(json.dumps({**found, "trials": [one._asdict() for one in outcomes]}, indent=1))
    else:
        print(f"\n{as_markdown(machine, outcomes)}\n")
        passed = sum(outcome.verdict == "pass" for outcome in outcomes)
        print(f"{passed} passed, {failed} failed, {len(outcomes) - passed - failed} cannot run here.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
