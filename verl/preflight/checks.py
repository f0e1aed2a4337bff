"""The one list of checks, in the order in which a run would meet what they find; all doors ask it.

Reads a composed configuration; starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl.config.base import ConfigError, Problem
from verl.config.checks import find
from verl.config.checks.base import ACTOR, ROLLOUT
from verl.config.files import missing_files
from verl.config.load import LoadedConfig, load
from verl.config.model_info import MODEL, facts_of
from verl.config.ppo import PPOConfig
from verl.config.unused_options import given_to, unused_in_source
from verl.preflight.arithmetic import derivation, total_steps
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
from verl.preflight.memory import checkpoint_bytes, memory_plan
from verl.preflight.models import missing_models, missing_tokenizer
from verl.preflight.report import Finding, Report, shown_bytes
from verl.telemetry.memory import host_memory
from verl.utils.py_functional import excerpt, unchanged_environment

if TYPE_CHECKING:
    from verl.preflight.data import Limits, Preview
    from verl.rewards.functions.trial import Trial

_THIS = Machine()
_SURE = 1.25
"""An estimate of memory this many times over what there is cannot be right by chance (0.8 to 1.2 were measured)."""
_BAR = 40
_PASSED = "_preflight"
"""Attribute of a tree that passed the check, so that the start of a run does not repeat it."""


def examine(
    words: list[str],
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
    config_dir: str | None = None,
    machine: Machine = _THIS,
    limits: Limits | None = None,
) -> Report:
    """Everything there is to say about a command line.

    Args:
        words: ``key=value`` as after ``python -m verl.trainer.main_ppo``.
        config_path, config_name, config_dir: as the flags of the same names.
    """
    if machine.gpus:
        words = [*words, f"trainer.n_gpus_per_node={machine.gpus}"]
    try:
        loaded = load(words, config_path, config_name, config_dir=config_dir)
    except ConfigError as error:
        return Report([Finding("error", text) for text in error.problems])
    return examine_loaded(loaded, machine, limits)


def examine_loaded(loaded: LoadedConfig, machine: Machine = _THIS, limits: Limits | None = None) -> Report:
    """The report of a configuration that is composed already."""
    report = Report(_findings("error", loaded.problems), config=loaded.config)
    report.findings += [Finding("warning", warning) for warning in loaded.warnings]
    if loaded.problems:
        with _environment(loaded.config):
            report.findings += _findings("error", [*missing_files(loaded.config), *missing_models(loaded.config)])
        return report
    report.findings += _unused_options(loaded.config, loaded.given, loaded.warnings)
    with _environment(loaded.config):
        return _add_all(report, loaded.config, machine, limits)


def examine_config(config: PPOConfig, machine: Machine = _THIS, limits: Limits | None = None) -> Report:
    """The report of a configuration that has passed its own checks."""
    with _environment(config):
        return _add_all(Report(_unused_options(config, given_to(config), ()), config=config), config, machine, limits)


def examine_data(config: PPOConfig, given: frozenset[str], limits: Limits | None = None) -> Report:
    """The same about data and rewards alone: no model but its tokenizer, no machine, no arithmetic."""
    wanted = ("data.", "custom_reward_function.", "reward_model.")
    files = [problem for problem in missing_files(config) if problem.key.startswith(wanted) and not problem.also]
    report = Report(_findings("error", [*files, *missing_tokenizer(config, given)]), config=config)
    _add_data(report, config, limits)
    return report


def refuse(config: PPOConfig) -> Report | None:
    """Examine the tree of a run that is about to start, unless a door did.

    Returns:
        The report; None if the tree has passed before.

    Raises:
        ConfigError: the run could not go on; with every error.
    """
    if vars(config).get(_PASSED):
        return None
    report = examine_config(config)
    if report.errors:
        raise ConfigError([finding.text for finding in report.errors])
    passed(config)
    return report


def passed(config: PPOConfig) -> None:
    """Remember that a tree was examined, and can run."""
    object.__setattr__(config, _PASSED, True)


@contextmanager
def _environment(config: PPOConfig) -> Iterator[None]:
    """Inside, the variables of a run's workers, which it sets before it loads anything: a reward function has them."""
    given = {name: str(value) for name, value in config.ray_init.variables.items()}
    with unchanged_environment(*given):
        os.environ.update(given)
        yield


def _unused_options(config: PPOConfig, given: Iterable[str], warnings: Iterable[str]) -> list[Finding]:
    """What the user set and nothing reads: a run would say so after its first update, or stop there."""
    levels = {"error": "error", "warn": "warning"}
    level = levels.get(config.trainer.unread_keys)
    return _findings(level, unused_in_source(config, given, warnings)) if level else []


def _add_all(report: Report, config: PPOConfig, machine: Machine, limits: Limits | None) -> Report:
    errors: list[Problem] = [
        *missing_files(config),
        *missing_models(config),
        *missing_devices(config, machine),
        *missing_packages(config, machine),
        *names_in_files(config),
        *missing_modules(config),
        *missing_services(config),
    ]
    report.findings += _findings("error", errors)
    for level, found in room_for_checkpoints(config, checkpoint_bytes(config)):
        report.findings += _findings(level, [found])
    data = _add_data(report, config, limits)
    report.findings += _findings("error", _unfilled_batch(config, data))
    report.findings += _findings("warning", find(config, "advice", total_steps=total_steps(config, data)))
    report.derivation = derivation(config, data)
    _add_memory(report, config, machine)
    return report


def _add_data(report: Report, config: PPOConfig, limits: Limits | None) -> Preview:
    """What the rows look like and earn; the reward function is not called where something is wrong with it."""
    from verl.preflight.data import preview  # numpy and Arrow; a command line with a typo does without

    blamed = {key.partition(".")[0] for finding in report.errors for key in finding.keys}
    data = report.data = preview(config, limits, not blamed & {"custom_reward_function", "reward_model"})
    report.findings += [finding for finding in data.findings if finding.level != "note"]
    report.notes += [finding for finding in data.findings if finding.level == "note"]
    report.preview = [f"  prompt  {excerpt(prompt.text, 160)}" for prompt in data.prompts]
    report.preview += _lengths(data, config.data.max_prompt_length)
    report.preview += [_reward(trial) for trial in data.scores if not trial.error]
    return data


def _unfilled_batch(config: PPOConfig, found: Preview) -> Iterator[Problem]:
    """A batch that is larger than the data."""
    batch = "data.gen_batch_size" if config.data.gen_batch_size else "data.train_batch_size"
    count, prompts = found.train_rows, config.data.prompts_per_step
    if count is not None and 0 < count < prompts:
        yield Problem(
            batch,
            f"{batch}={prompts} is larger than the {count} rows of data.train_files: no batch could be filled. Lower "
            "it or add prompts.",
            ("data.train_files",),
        )


def _lengths(data: Preview, limit: int) -> list[str]:
    """A histogram."""
    lengths = data.lengths
    if lengths is None:
        return []
    tallest = max(count for *_, count in lengths.histogram)
    of = f" of {len(data.rows.good)}" if lengths.counted < len(data.rows.good) else ""
    head = f"  {lengths.unit} of {lengths.counted}{of} prompts (data.max_prompt_length={limit})"
    return [head] + [
        f"  {start:>6} to {end - 1:<6} {'#' * max(1, _BAR * count // tallest)} {count}"
        for start, end, count in lengths.histogram
        if count
    ]


def _reward(trial: Trial) -> str:
    from verl.rewards.functions.trial import mean

    if not trial.known_good:
        known_bad = f"{mean(trial.known_bad):g} for known-bad answers"
        return f"  reward  {trial.data_source}: {known_bad}; the rows do not say what is right"
    right = f"{mean(trial.known_good):g} for known-good answers, written as {trial.form!r}"
    return f"  reward  {trial.data_source}: {right}; {mean(trial.known_bad):g} for known-bad answers"


def _add_memory(report: Report, config: PPOConfig, machine: Machine) -> None:
    gpu_bytes = machine.gpu_bytes or (
        gpu_memory_here() if machine.is_this and config.trainer.device == "cuda" else None
    )
    report.memory = memory_plan(config, gpu_bytes)
    if not report.memory:
        path = config.actor_rollout_ref.model.path
        report.memory_notes = [f"  not estimated: no config.json of {MODEL}.path={path} at hand"]
        return
    facts = facts_of(config, "actor")
    counted = "counted from the weights' headers" if facts.is_stored else "counted from config.json"
    report.memory_notes.append(f"  {facts.parameters / 1e6:,.1f}M parameters, {counted}")
    worst = max(report.memory, key=lambda phase: phase.total)
    if config.trainer.device == "cpu":
        workers = config.trainer.n_gpus_per_node * (1 if config.actor_rollout_ref.hybrid_engine else 2)
        needed, there = worst.total * workers, host_memory()
        report.memory_notes.append(f"  {workers} on this machine: {shown_bytes(needed)} of {shown_bytes(there)}")
        what, key = f"{shown_bytes(there)} of this machine", "trainer.n_gpus_per_node"
    elif gpu_bytes:
        needed, there = worst.total, gpu_bytes
        report.memory_notes.append(
            f"  at most {needed / there:.0%} of a GPU with {shown_bytes(there)}, in phase {worst.phase}"
        )
        what, key = f"{shown_bytes(there)} of a GPU (--gpu-mem)", f"{ACTOR}.fsdp_config.param_offload"
    else:
        report.memory_notes.append("  say --gpu-mem 80GB (and --gpus 8) to hold this against a GPU")
        return
    if needed > there:
        level = "error" if machine.is_gpu_given or needed > _SURE * there else "warning"
        text = (
            f"{MODEL}.path={config.actor_rollout_ref.model.path} needs about {shown_bytes(needed)} in phase "
            f"{worst.phase}, "
            f"more than the {what}. Most of it is {worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding(level, text, (f"{MODEL}.path", key, f"{ROLLOUT}.gpu_memory_utilization")))
    elif needed > 0.92 * there:
        text = (
            f"phase {worst.phase} needs about {shown_bytes(needed)} of the {what}: little is left for fragments. "
            f"{worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding("warning", text, (f"{MODEL}.path", key)))


def _findings(level: str, problems: Iterable[Problem]) -> list[Finding]:
    return [Finding(level, problem.text, (problem.key, *problem.also)) for problem in problems]
