"""Profiled steps, seen from the driver: which processes record them, and where their traces lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl.config.profiler import ProfilePlan
from verl.telemetry.profiler import DRIVER, TraceFile, process_trace

FOLDER = "profile"
"""Folder of the traces in that of the run."""

_PARTS = {
    "actor": ("actor",),
    "rollout": ("rollout",),
    "ref": ("ref",),
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("actor", "rollout", "ref"),
    "critic": ("critic",),
    "rm": ("reward_model",),
}
"""Role of a worker group -> the sections whose profiler it follows."""


def nsight_options(plan: ProfilePlan, options: Mapping[str, Any], run_folder: str | Path) -> dict[str, Any]:
    """Return the options of ``nsys profile`` for the workers of a run; empty if it is not asked for.

    Args:
        options: ``trainer.worker_nsight_options``.
    """
    if not plan.is_on or plan.tool != "nsys":
        return {}
    given = {name: value for name, value in options.items() if value is not None}
    # without a number nsys ends with the first range; a step has at most six calls of a worker
    calls = 6 if any(role.discrete for role in plan.roles.values()) else 1
    name = str(trace_folder(plan, run_folder) / "worker_process_%p")
    return {"o": name, "capture-range-end": f"repeat-shutdown:{calls * len(plan.steps)}", **given}


def trace_folder(plan: ProfilePlan, run_folder: str | Path) -> Path:
    """Return the folder of all traces of a run."""
    return Path(plan.save_path or Path(run_folder) / FOLDER).expanduser().absolute()


class StepProfiles:
    """Has the processes of a run record the steps of a plan.

    Args:
        run_folder: of the run; the traces of step 3 are in ``profile/step_3`` below it.
        say: prints a sentence for the user.
    """

    def __init__(self, plan: ProfilePlan, run_folder: str | Path, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.folder = trace_folder(plan, run_folder)
        self._recorded: list[Any] = []
        self._first: int | None = None
        """First step of the trace that is being made."""

    @contextmanager
    def step(self, step: int, groups: Mapping[Any, Any]) -> Iterator[None]:
        """Record the block if the plan names the step; with ``continuous`` the next step may go on with the trace.

        Args:
            groups: role -> worker group; those whose processes can answer a call.
        """
        if not self.plan.is_on or step not in self.plan.steps:
            yield
            return
        if self._first is None:
            self._begin(step, groups)
        try:
            yield
        except BaseException:
            process_trace.abandon()  # the workers may be gone, and their traces with them
            self._first = None
            raise
        if not (self.plan.continuous and step + 1 in self.plan.steps):
            self.end(step)

    def _begin(self, step: int, groups: Mapping[Any, Any]) -> None:
        plan = self.plan
        last = step
        while plan.continuous and last + 1 in plan.steps:
            last += 1
        folder = self.folder / (f"step_{step}" if last == step else f"steps_{step}-{last}")
        discrete = any(role.enabled and role.discrete for role in plan.roles.values())
        settings = {**plan.settings, "tool": plan.tool, "folder": str(folder), "discrete": discrete}
        self._first, self._recorded = step, []
        names = {str(name) for name in groups}
        enabled = {name for name, role in plan.roles.items() if role.enabled}
        for name, group in groups.items():
            played = {*_PARTS.get(str(name), (str(name),)), *(["ref"] if "ref" not in names else [])}
            parts = [part for part in _PARTS.get(str(name), ()) if part in enabled]
            if parts and hasattr(group, "begin_trace"):  # a user's workers may lack it
                ranks = [plan.roles[part].ranks for part in parts]
                chosen = None if None in ranks else sorted({rank for own in ranks for rank in own or ()})
                group.begin_trace(settings, chosen, sorted(played & enabled))
                self._recorded.append(group)
        # last, so that in a process that drives and trains the settings are the worker's
        if plan.tool != "nsys" and not discrete:
            process_trace.begin(DRIVER, 0, {**settings, "tool": "torch"})

    def end(self, step: int) -> None:
        """Have every process write what it recorded, and say where it is; nothing if none records."""
        if self._first is None:
            return
        first, self._first = self._first, None
        files: list[TraceFile] = [file for group in self._recorded for own in group.end_trace() for file in own]
        files += process_trace.end(DRIVER)
        steps = f"step {first}" if first == step else f"steps {first} to {step}"
        if self.plan.tool == "nsys":
            self.say(f"{steps}: recorded by Nsight Systems, which writes below {self.folder} when the workers end")
            return
        size, seconds = sum(file.bytes for file in files) / 2**20, max((file.seconds for file in files), default=0.0)
        names = ", ".join(Path(file.path).name for file in files[:4]) + (", ..." if len(files) > 4 else "")
        where = Path(files[0].path).parent if files else self.folder
        how = (
            "https://pytorch.org/memory_viz"
            if files and files[0].path.endswith(".pickle")
            else "https://ui.perfetto.dev"
        )
        self.say(
            f"{steps}: {size:.1f} MiB of traces in {where} ({names}), written in {seconds:.1f} s; open them in {how}"
        )
