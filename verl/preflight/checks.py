"""List of all checks, in the order in which a run would meet what they find; shared by all entry points.

Reads a composed configuration; starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.config.base import ConfigError, Problem
from verl.config.checks import find
from verl.config.checks.run import missing_files
from verl.config.load import LoadedConfig, load
from verl.config.model_info import shape_of
from verl.config.ppo import ACTOR, MODEL, ROLLOUT, PPOConfig
from verl.config.unused_options import given_to, unused_in_source
from verl.preflight.environments import missing_environments
from verl.preflight.estimates import checkpoint_bytes, derivation, memory_plan, prompts_key, roles_memory, total_steps
from verl.preflight.machine import (
    Machine,
    gpu_memory_here,
    missing_devices,
    missing_modules,
    missing_packages,
    missing_services,
    names_in_files,
    room_for_checkpoints,
)
from verl.preflight.models import missing_models, missing_tokenizer
from verl.preflight.report import Finding, Level, PhaseMemory, Report, format_bytes, preview_lines, wrapped
from verl.telemetry.memory import host_memory
from verl.utils.py_functional import unchanged_environment

if TYPE_CHECKING:
    from verl.preflight.data import Limits, Preview

_THIS = Machine()
_CERTAIN = 1.25
"""Ratio of estimate to memory above which it is an error; estimates were within 0.8 to 1.2 of measurements."""
_PASSED = "_preflight"
"""Attribute of a configuration that passed the checks, so that the start of a run does not repeat them."""


def examine(
    words: list[str],
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
    config_dir: str | None = None,
    machine: Machine = _THIS,
    limits: Limits | None = None,
    root: type[PPOConfig] | None = None,
) -> Report:
    """Check a command line.

    Args:
        words: ``key=value`` as after ``python -m verl.trainer.main_ppo``.
        config_path, config_name, config_dir: as the flags of the same names.
        root: class of the tree. None: ``PPOConfig``.
    """
    # a later word wins
    if machine.gpus:
        words = [*words, f"trainer.n_gpus_per_node={machine.gpus}"]
    try:
        loaded = load(words, config_path, config_name, config_dir=config_dir, root=root or PPOConfig)
    except ConfigError as error:
        return Report([Finding("error", text) for text in error.problems])
    return examine_loaded(loaded, machine, limits)


def examine_loaded(loaded: LoadedConfig, machine: Machine = _THIS, limits: Limits | None = None) -> Report:
    """Check a configuration that is composed already."""
    config, report = loaded.config, Report(_findings("error", loaded.problems), config=loaded.config)
    report.findings += [Finding("warning", warning) for warning in loaded.warnings]
    if not loaded.problems:
        return _examine(report, config, loaded.given, loaded.warnings, machine, limits)
    # of options that contradict each other only the files and models are looked at: estimates would make no sense
    with _environment(config):
        report.findings += _findings("error", [*missing_files(config), *missing_models(config)])
    return report


def examine_config(config: PPOConfig, machine: Machine = _THIS, limits: Limits | None = None) -> Report:
    """Check a configuration that has passed its own validators."""
    return _examine(Report(config=config), config, given_to(config), (), machine, limits)


def examine_data(config: PPOConfig, given: frozenset[str], limits: Limits | None = None) -> Report:
    """Check data and rewards alone: no model except its tokenizer, no machine, no batch arithmetic."""
    sections = ("data.", "custom_reward_function.", "reward_model.")
    files = [problem for problem in missing_files(config) if problem.key.startswith(sections) and not problem.also]
    report = Report(_findings("error", [*files, *missing_tokenizer(config, given)]), config=config)
    _add_data(report, config, limits)
    return report


def refuse(config: PPOConfig) -> Report | None:
    """Check the configuration of a run that is about to start, unless the entry point did.

    Returns:
        The report; None if the configuration has passed before.

    Raises:
        ConfigError: the run would fail; lists every error.
    """
    if vars(config).get(_PASSED):
        return None
    report = examine_config(config)
    if report.errors:
        raise ConfigError([finding.text for finding in report.errors])
    passed(config)
    return report


def passed(config: PPOConfig) -> None:
    """Mark a configuration as checked."""
    object.__setattr__(config, _PASSED, True)  # a section refuses attributes that are no options


@contextmanager
def _environment(config: PPOConfig) -> Iterator[None]:
    """Set the environment variables of the run's workers inside the context, for its reward function."""
    given = {name: str(value) for name, value in config.ray_init.variables.items()}
    with unchanged_environment(*given):
        os.environ.update(given)
        yield


def _examine(
    report: Report,
    config: PPOConfig,
    given: Iterable[str],
    warnings: Iterable[str],
    machine: Machine,
    limits: Limits | None,
) -> Report:
    """Add the findings of every check.

    Args:
        given: options that the user set. One that nothing reads would be reported by a run after its first update.
        warnings: those of composing, not to be repeated.
    """
    levels: dict[str, Level] = {"error": "error", "warn": "warning"}
    if level := levels.get(config.trainer.unread_keys):
        report.findings += _findings(level, unused_in_source(config, given, warnings))
    with _environment(config):
        for check in (
            missing_files(config),
            missing_models(config),
            missing_devices(config, machine),
            missing_packages(config, machine),
            missing_environments(config),
            names_in_files(config),
            missing_modules(config),
            missing_services(config),
        ):
            report.findings += _findings("error", check)
        report.findings += room_for_checkpoints(config, checkpoint_bytes(config))
        data = _add_data(report, config, limits)
        report.findings += _findings("error", _unfilled_batch(config, data))
        report.findings += _findings("warning", find(config, "advice", total_steps=total_steps(config, data)))
        report.derivation = derivation(config, data)
        add_memory(report, config, machine)
    return report


def _unfilled_batch(config: PPOConfig, data: Preview) -> Iterator[Problem]:
    """Find a batch that is larger than the data; a run would stop."""
    key, count, prompts = prompts_key(config), data.train_rows, config.data.prompts_per_step
    if count is not None and 0 < count < prompts:
        yield Problem(
            key,
            f"{key}={prompts} is larger than the {count} rows of data.train_files: no batch could be filled. Lower "
            "it or add prompts.",
            ("data.train_files",),
        )


def _add_data(report: Report, config: PPOConfig, limits: Limits | None) -> Preview:
    """Add the preview of the data and its rewards; the reward function is not called if it has errors."""
    from verl.preflight.data import preview  # imports numpy and Arrow, which a command line with a typo does not need

    # its errors would only repeat those
    blamed = {key.partition(".")[0] for finding in report.errors for key in finding.keys}
    data = report.data = preview(config, limits, not blamed & {"custom_reward_function", "reward_model"})
    for finding in data.findings:
        (report.notes if finding.level == "note" else report.findings).append(finding)
    report.preview = preview_lines(data, config.data.max_prompt_length)
    return data


def add_memory(
    report: Report,
    config: PPOConfig,
    machine: Machine,
    plan: Callable[[int | None], list[PhaseMemory]] | None = None,
) -> None:
    """Add the memory plan to a report, and a finding if it exceeds the memory there is.

    Args:
        plan: memory of a GPU, or None -> the phases. None: those of ``config``.
    """
    on_cpu, path = config.trainer.device == "cpu", config.actor_rollout_ref.model.path
    gpu_bytes = machine.gpu_bytes
    if not gpu_bytes and machine.is_this and config.trainer.device == "cuda":
        gpu_bytes = gpu_memory_here()
    # a GPU's size is that of this machine only if the run is for it
    report.memory = plan(gpu_bytes) if plan is not None else memory_plan(config, gpu_bytes)
    model = shape_of(config, "actor")
    if not report.memory or model is None:
        report.memory_notes = [f"  not estimated: no local config.json of {MODEL}.path={path}"]
        return
    source = "counted from the weights' headers" if model.is_stored else "counted from config.json"
    report.memory_notes.append(f"  {model.parameters / 1e6:,.1f}M parameters, {source}")
    for role in roles_memory(config, gpu_bytes):
        report.memory_notes += [wrapped(f"  {role.name}: ", reason) for reason in role.sharding]
    worst = max(report.memory, key=lambda phase: phase.total)
    if on_cpu:
        # on a CPU every process has its own copy of everything in the same memory
        workers = config.trainer.n_gpus_per_node * (1 if config.actor_rollout_ref.hybrid_engine else 2)
        needed, available = worst.total * workers, host_memory()
        note = f"{workers} on this machine: {format_bytes(needed)} of {format_bytes(available)}"
        limit, key = f"{format_bytes(available)} of this machine", "trainer.n_gpus_per_node"
    elif gpu_bytes:
        needed, available = worst.total, gpu_bytes
        note = f"at most {needed / available:.0%} of a GPU with {format_bytes(available)}, in phase {worst.phase}"
        limit, key = f"{format_bytes(available)} of a GPU (--gpu-mem)", f"{ACTOR}.fsdp_config.param_offload"
    else:
        report.memory_notes.append("  add --gpu-mem 80GB (and --gpus 8) to compare this with a GPU")
        return
    report.memory_notes.append(f"  {note}")
    hint = f"{worst.largest}: {worst.way_out}."
    if needed > available:
        level: Level = "error" if machine.is_gpu_given or needed > _CERTAIN * available else "warning"
        text = (
            f"{MODEL}.path={path} needs about {format_bytes(needed)} in phase {worst.phase}, more than the {limit}. "
            f"Most of it is {hint}"
        )
        report.findings.append(Finding(level, text, (f"{MODEL}.path", key, f"{ROLLOUT}.gpu_memory_utilization")))
    # allocators need some room between blocks
    elif needed > 0.92 * available:
        needs = f"phase {worst.phase} needs about {format_bytes(needed)} of the {limit}"
        text = f"{needs}: fragmentation may exceed it. {hint}"
        report.findings.append(Finding("warning", text, (f"{MODEL}.path", key)))


def _findings(level: Level, problems: Iterable[Problem]) -> list[Finding]:
    return [Finding(level, problem.text, (problem.key, *problem.also)) for problem in problems]
