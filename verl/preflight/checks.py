"""From a composed configuration to a report: checks in the order in which a run would meet them."""

import os
from collections.abc import Iterable
from typing import NamedTuple

from verl.doctor import surroundings
from verl.preflight.preview import first_rows

from verl.config.base import ConfigError, Problem
from verl.config.files import missing_files
from verl.config.load import Loaded, load
from verl.config.model_checks import MODEL, facts_of, folders_without_model
from verl.config.ppo import PPOConfig
from verl.config.rules.base import ACTOR, ROLLOUT
from verl.config.unread import given_to, unread
from verl.preflight.advice import all_advice
from verl.preflight.arithmetic import derivation
from verl.preflight.data import DataFacts, read_data
from verl.preflight.memory import checkpoint_bytes, memory_plan
from verl.preflight.report import Finding, Report, shown_bytes
from verl.utils.process_memory import host_memory


class Hardware(NamedTuple):
    """What the memory estimate is held against."""

    gpu_bytes: int | None = None
    """Memory of one GPU; None: not known, and nothing is compared."""
    gpus: int | None = None
    """GPUs in place of ``trainer.n_gpus_per_node``."""


def examine(
    words: list[str],
    config_path: str | None = None,
    config_name: str = "ppo_trainer",
    config_dir: str | None = None,
    hardware: Hardware = Hardware(),  # noqa: B008 - immutable
) -> Report:
    """Everything there is to say about a command line.

    Args:
        words: ``key=value`` as after ``python -m verl.trainer.main_ppo``.
        config_path, config_name, config_dir: as the flags of the same names.
    """
    if hardware.gpus:
        words = [*words, f"trainer.n_gpus_per_node={hardware.gpus}"]
    try:
        loaded = load(words, config_path, config_name, config_dir=config_dir)
    except ConfigError as error:
        return Report([Finding("error", text) for text in error.problems])
    return examine_loaded(loaded, hardware)


def examine_loaded(loaded: Loaded, hardware: Hardware = Hardware()) -> Report:  # noqa: B008
    """The report of a configuration that is composed already."""
    report = Report(_findings("error", loaded.problems))
    report.findings += [Finding("warning", notice) for notice in loaded.notices]
    if loaded.problems:
        report.findings += _findings("error", missing_files(loaded.config))
        return report
    report.findings += _unread(loaded.config, loaded.given, loaded.notices)
    return _add_all(report, loaded.config, hardware)


def examine_config(config: PPOConfig, hardware: Hardware = Hardware()) -> Report:  # noqa: B008
    """The report of a configuration that has passed its checks."""
    return _add_all(Report(_unread(config, given_to(config), ())), config, hardware)


def _unread(config: PPOConfig, given: Iterable[str], notices: Iterable[str]) -> list[Finding]:
    """What the user set and nothing reads: a run would say so after its first update, or stop there."""
    levels = {"error": "error", "warn": "warning"}
    level = levels.get(config.trainer.unread_keys)
    return _findings(level, unread(config, given, notices)) if level else []


def _add_all(report: Report, config: PPOConfig, hardware: Hardware) -> Report:
    data = read_data(config)
    errors: list[Problem] = [
        *missing_files(config),
        *folders_without_model(config),
        *surroundings.unreachable_models(config),
        *data.problems,
        *surroundings.names_in_files(config),
        *surroundings.missing_packages(config),
        *surroundings.missing_services(config),
    ]
    report.findings += _findings("error", errors)
    for level, found in surroundings.room_for_checkpoints(config, checkpoint_bytes(config)):
        report.findings += _findings(level, [found])
    report.findings += _findings("warning", [*all_advice(config, data), *surroundings.engine_elsewhere(config)])
    report.derivation = derivation(config, data)
    _add_preview(report, config, data)
    _add_memory(report, config, hardware)
    return report


def _add_preview(report: Report, config: PPOConfig, data: DataFacts) -> None:
    """What the first rows look like and earn; the reward function is not called where something is wrong with it."""
    blamed = {key.partition(".")[0] for finding in report.errors for key in finding.keys}
    if not data.problems and config.data.custom_cls.path is None:
        is_scored = not blamed & {"custom_reward_function", "reward_model"}
        report.preview, findings = first_rows(config, list(data.columns), is_scored)
        report.findings += findings


def _add_memory(report: Report, config: PPOConfig, hardware: Hardware) -> None:
    report.memory = memory_plan(config, hardware.gpu_bytes)
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
    elif hardware.gpu_bytes:
        needed, there = worst.total, hardware.gpu_bytes
        report.memory_notes.append(
            f"  at most {needed / there:.0%} of a GPU with {shown_bytes(there)}, in phase {worst.phase}"
        )
        what, key = f"{shown_bytes(there)} of a GPU (--gpu-mem)", f"{ACTOR}.fsdp_config.param_offload"
    else:
        report.memory_notes.append("  say --gpu-mem 80GB (and --gpus 8) to hold this against a GPU")
        return
    if needed > there:
        text = (
            f"{MODEL}.path={config.actor_rollout_ref.model.path} needs about {shown_bytes(needed)} in phase "
            f"{worst.phase}, "
            f"more than the {what}. Most of it is {worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding("error", text, (f"{MODEL}.path", key, f"{ROLLOUT}.gpu_memory_utilization")))
    elif needed > 0.92 * there:
        text = (
            f"phase {worst.phase} needs about {shown_bytes(needed)} of the {what}: little is left for fragments. "
            f"{worst.largest}: {worst.way_out}."
        )
        report.findings.append(Finding("warning", text, (f"{MODEL}.path", key)))


def _findings(level: str, problems: Iterable[Problem]) -> list[Finding]:
    return [Finding(level, problem.text, (problem.key, *problem.also)) for problem in problems]


def gpu_memory_here() -> int | None:
    """Memory of this machine's first GPU, bytes; None without one. Asks the driver's own tool."""
    import shutil
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return None
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.split()
    return int(found[0]) << 20 if found and found[0].isdigit() else None
