"""Entry points of the checks: ``verl doctor``, ``verl check``, ``main_ppo --check``, ``trainer.dry_run=true``, a run.

Findings and exit codes are the same; the output differs. Exit codes: 0: it can run; 1: it can, and ``--strict`` has
warnings; 2: it cannot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.config.base import ConfigError
from verl.config.command_line import parse
from verl.telemetry.run_record import say_early
from verl.utils.process import plain_ending
from verl.version import __version__

if TYPE_CHECKING:
    from verl.config.load import LoadedConfig
    from verl.config.ppo import PPOConfig
    from verl.preflight.machine import Machine
    from verl.preflight.report import Report

_PROGRAMS = {
    "sft": ("verl.config.sft", "SFTConfig"),
    "dpo": ("verl.config.preference", "DPOConfig"),
    "rm": ("verl.config.preference", "RewardTrainConfig"),
}
"""First word after ``verl doctor`` -> module and class of the tree of a program that learns from examples."""

_SHORT = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "data.tokenizer",
    "reward": "custom_reward_function.path",
}
_READ = ("data.", "actor_rollout_ref.model.", "custom_reward_function.", "reward_model.")
_DRY = re.compile(r"\+{0,2}trainer\.dry_run=(true|yes|on|1)$", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _parser(name: str, usage: str, description: str, epilog: str, flags: dict[str, tuple[Any, str]]) -> ArgumentParser:
    """Return a parser of flags; one that is not given is no attribute of the result.

    Args:
        flags: ``--gpus 8``, the flag with an example of its value, or ``--json`` -> (type of the value or None, help).
    """
    parser = ArgumentParser(
        name,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,  # an unknown flag is the main job's
        add_help=False,  # --help is a flag of the main job, too
        exit_on_error=False,
    )
    for flag, (kind, text) in flags.items():
        flag, _, example = flag.partition(" ")
        if kind is None:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, type=kind, metavar=example, help=text)
    return parser


# -- verl doctor ---------------------------------------------------------------------------------------------------


def _bytes(text: str) -> int:
    """Parse ``80GB``, ``80G``, ``81559MiB`` or a number of bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ArgumentTypeError(f"{text} is not a size. Use --gpu-mem 80GB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _count(text: str) -> int:
    if not text.isdigit():
        raise ArgumentTypeError(f"{text} is not a number of GPUs. Use --gpus 8.")
    return int(text)


def _doctor_parser() -> ArgumentParser:
    return _parser(
        "verl doctor",
        "python -m verl.doctor [sft|dpo|rm] [flags] key=value [key=value ...]",
        "Say what a run would do and what would go wrong, in seconds. No model is opened; the reward function is\n"
        "tried in a sandbox. The words are those of python -m verl.trainer.main_ppo; there, trainer.dry_run=true does\n"
        "the same. After the word sft, dpo or rm they are those of that program, whose examples are looked at.",
        "  --config-path, --config-name, --config-dir    as the main job takes them\n\n"
        "exit codes: 0 it can run, 1 it can and --strict has warnings, 2 it cannot.",
        {
            "--gpu-mem 80GB": (
                _bytes,
                "memory of one GPU to compare the estimate with; default: this machine's",
            ),
            "--gpus 8": (_count, "as trainer.n_gpus_per_node=8"),
            "--elsewhere": (
                None,
                "the run is for another machine: devices and packages of this one do not count (so with --gpu-mem)",
            ),
            "--json": (None, "the report as JSON"),
            "--strict": (None, "exit code 1 if there are warnings"),
            "--check": (None, argparse.SUPPRESS),  # a flag of the main job, implied here
        },
    )


@plain_ending()
def doctor(
    argv: Sequence[str] | None = None,
    *,
    config_name: str = "ppo_trainer",
    config_path: str | None = None,
    root: type[PPOConfig] | None = None,
) -> int:
    """Check a command line, print the report, and return the exit code.

    Args:
        argv: words and flags. None: this process's.
        config_name, config_path: used unless the words name others.
        root: class of the tree. None: ``PPOConfig``.
    """
    parser = _doctor_parser()
    given = list(sys.argv[1:] if argv is None else argv)
    program = given.pop(0) if given and given[0] in _PROGRAMS else None
    try:
        options, rest = parser.parse_known_args(given)
        flags, words = parse(rest)
    except (ConfigError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if flags.get("help"):
        print(parser.format_help(), end="")
        return 0
    say_early(f"verl {__version__}: examining the configuration")
    from verl.preflight.checks import examine
    from verl.preflight.machine import Machine, containment_here
    from verl.preflight.report import Finding
    from verl.sandbox.containment import is_allowed

    size, gpus = getattr(options, "gpu_mem", None), getattr(options, "gpus", None)
    machine = Machine(size, gpus, "elsewhere" not in options and size is None, size is not None)
    if program is not None:
        report = _examine_program(program, words, flags, machine)
        return _print(report, "json" in options, "strict" in options)
    report = examine(
        [word for word in words if not _DRY.match(word)],
        flags.get("config_path", config_path),
        flags.get("config_name", config_name),
        flags.get("config_dir"),
        machine,
        root=root,
    )
    if report.config is None and any(word.lstrip("+").startswith(("model.", "engine.", "optim.")) for word in words):
        text = "The sections model, engine and optim are those of verl sft: for its words, `verl doctor sft ...`."
        report.notes.append(Finding("note", text))
    if report.config is not None and machine.is_this:
        allowed = bool(report.config.reward_model.sandbox.allow_uncontained_code) or is_allowed()
        report.notes.append(containment_here(allowed))
    return _print(report, "json" in options, "strict" in options)


def _examine_program(program: str, words: Sequence[str], flags: dict[str, Any], machine: Machine) -> Report:
    """The report of a program that learns from examples."""
    from verl.config.load import load
    from verl.preflight.examples import examine_examples
    from verl.preflight.report import Finding, Report

    module, name = _PROGRAMS[program]
    root = getattr(importlib.import_module(module), name)
    words = [*words, *([f"trainer.n_gpus_per_node={machine.gpus}"] if machine.gpus else [])]
    start = flags.get("config_name", root.config_name)
    try:
        loaded = load(words, flags.get("config_path"), start, config_dir=flags.get("config_dir"), root=root)
    except ConfigError as error:
        return Report([Finding("error", text) for text in error.problems])
    return examine_examples(loaded, machine)


def _print(report: Report, as_json: bool = False, strict: bool = False) -> int:
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())
    return report.exit_code(strict)


# -- the main job --------------------------------------------------------------------------------------------------


_HELP = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether these words only print help, or options with their values."""
    return any(word.partition("=")[0] in _HELP for word in arguments)


def asks_for_a_run(arguments: Sequence[str]) -> bool:
    """Whether these words start a training run or the checks before one, rather than print help or a report."""
    return not asks_for_help(arguments) and not any(map(_DRY.match, arguments))


def run_or_examine(
    run: Callable[[Any], Any],
    arguments: Sequence[str],
    *,
    config_name: str = "ppo_trainer",
    config_path: str | None = None,
    root: type[PPOConfig] | None = None,
) -> Any:
    """Call ``run`` with the checked configuration; with ``--check`` or ``trainer.dry_run=true`` print a report instead.

    Raises:
        SystemExit: after a dry run with its exit code, and as ``run_from_command_line``.
    """
    from verl.config.load import run_from_command_line
    from verl.config.ppo import PPOConfig

    root = root or PPOConfig
    if any(map(_DRY.match, arguments)) and "--help" not in arguments and not any("--cfg" in one for one in arguments):
        raise SystemExit(doctor(arguments, config_name=config_name, config_path=config_path, root=root))

    return run_from_command_line(
        run, arguments, config_name=config_name, config_path=config_path, root=root, examine=_before_the_run
    )


def _before_the_run(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    """Check a composed command line and return whether the run is to start.

    Raises:
        SystemExit: after a dry run, with its exit code.
        ConfigError: it cannot run.
    """
    from verl.preflight.checks import examine_loaded, passed
    from verl.preflight.machine import Machine

    report = examine_loaded(loaded, Machine(is_this=not flags.get("elsewhere")))
    # set in YAML, or by an interpolation
    if not loaded.problems and loaded.config.trainer.dry_run:
        raise SystemExit(_print(report))
    only_checks = bool(flags.get("check"))
    for finding in (*(report.notes if only_checks else ()), *report.warnings):
        line = f"{finding.level}: {finding.text}"
        if report.errors or only_checks:
            print(line, file=sys.stderr)
        else:
            say_early(line)  # to the beginning of the run's log, too
    if report.errors:
        raise ConfigError([finding.text for finding in report.errors])
    if only_checks:
        from verl.config.checks.batch import batch_plan

        print(batch_plan(loaded.config))
        print(report.totals)
        return False
    passed(loaded.config)
    return True


# -- verl check ----------------------------------------------------------------------------------------------------


def _check_parser() -> ArgumentParser:
    return _parser(
        "verl check",
        "%(prog)s [flags] [FILE...] [key=value ...]",
        "Look at data files and rewards before a run does: rendered prompts, lengths, bad rows, what right answers "
        "earn.\n\n"
        "    verl check train.parquet test.parquet model=Qwen/Qwen2.5-0.5B-Instruct\n"
        "    verl check train.jsonl data.prompt_key=question custom_reward_function.path=my_reward.py\n"
        "    verl check key=value ...\n\n"
        "With files, or options of data, model and reward alone, these are what is checked; model= is short for\n"
        "actor_rollout_ref.model.path=. With the words of a whole training everything is, as by verl doctor.",
        "Exit codes: 0 it can run, 2 it cannot.",
        {
            "--json": (None, "print one JSON object instead"),
            "--prompts 3": (int, "prompts to show"),
            "--tokens 1000": (int, "prompts whose tokens are counted"),
            "--all": (None, "look closely at all rows, and count the tokens of all"),
            "--score 4": (int, "rows scored of each data source; 0: none. A judge is asked, too"),
            "--patience 2": (float, "seconds a reward may take"),
        },
    )


@plain_ending()
def check(argv: Sequence[str] | None = None) -> int:
    """Check data files, or everything a command line names; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    given_words = list(sys.argv[1:] if argv is None else argv)
    if not asks_for_help(given_words):
        say_early(f"verl {__version__}: examining data and configuration")
    from verl.preflight.checks import examine, examine_data
    from verl.preflight.data import Limits
    from verl.preflight.report import Finding, show, to_json

    parser = _check_parser()
    try:
        options, words = parser.parse_known_args(given_words)
        given_limits = {name: value for name, value in vars(options).items() if name in Limits.__dataclass_fields__}
        if "score" in options:
            given_limits |= {"scored": options.score, "asks_judge": True}
        if "all" in options:
            given_limits |= {"tokens": None, "rows": sys.maxsize}
        limits = Limits(**given_limits)
        # a file whose name has an equals sign is one if it exists
        files = [word for word in words if _is_file(word)]
        flags, words = parse([word for word in words if word not in files])
        if flags.get("help"):
            print(parser.format_help(), end="")
            return 0
        words = [_in_full(word) for word in words]
        if files or not flags and all(word.lstrip("+~").startswith(_READ) for word in words):
            config, given = read_options(words, files)
            if not files and not given & {"data.train_files", "data.val_files"}:
                parser.error("name data files, or give data.train_files=FILE")
            report = examine_data(config, frozenset(given), limits)
            for key in sorted(given):
                if not key.startswith(_READ):
                    report.notes.append(Finding("note", f"{key} has no effect on data: it was not checked.", (key,)))
        else:
            paths = (flags.get("config_path"), flags.get("config_name", "ppo_trainer"), flags.get("config_dir"))
            report = examine([word for word in words if not _DRY.match(word)], *paths, limits=limits)
    except (ConfigError, argparse.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report.data is None:
        return _print(report, "json" in options)
    if "json" in options:
        print(json.dumps(to_json(report.data, report), ensure_ascii=False, indent=1, default=str))
    else:
        show(report.data, report)
    return report.exit_code()


def _is_file(word: str) -> bool:
    return not word.startswith("-") and ("=" not in word or os.path.exists(os.path.expanduser(word)))


def _in_full(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{_SHORT.get(key, key)}{equals}{value}"


def read_options(words: Sequence[str], files: Sequence[str] = ()) -> tuple[PPOConfig, set[str]]:
    """Return the configuration of ``key=value`` words about data, and the keys they set.

    Args:
        files: instead of ``data.train_files``.

    Raises:
        ConfigError: an unknown key or a value that does not fit; names the nearest key.
    """
    import yaml

    from verl.config.command_line import check_overrides
    from verl.config.ppo import PPOConfig
    from verl.config.tree import build

    checked = check_overrides([_in_full(word) for word in words], PPOConfig, lambda name: False)
    problems = list(checked.problems)
    tree: dict[str, Any] = {}
    for word in checked.overrides:
        key, _, text = word.lstrip("+~").partition("=")
        *path, last = key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
        try:
            section[last] = yaml.safe_load(text) if text else ""
        except yaml.YAMLError:  # a text with a colon, say
            section[last] = text
    data = tree.setdefault("data", {})
    if files:
        data["train_files"] = list(files)
    # the defaults name files that need not be there
    for key in ("train_files", "val_files"):
        data.setdefault(key, [])
    config = build(PPOConfig(), tree, "", problems)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    assert isinstance(config, PPOConfig)
    return config, checked.given
