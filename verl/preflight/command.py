"""Entry points of the checks: ``verl doctor``, ``verl check``, ``main_ppo --check``, ``trainer.dry_run=true``, a run.

Findings and exit codes are the same; the output differs. Exit codes: 0: it can run; 1: it can, and ``--strict`` has
warnings; 2: it cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verl.config.base import ConfigError
from verl.config.command_line import parse
from verl.telemetry.run_record import say_early
from verl.utils.process import plain_ending

if TYPE_CHECKING:
    from verl.preflight.machine import Machine
    from verl.preflight.report import Report

HELP = """\
usage: python -m verl.doctor [flags] key=value [key=value ...]

Say what a run would do and what would go wrong, in seconds. No model is opened; the reward function is tried
in a sandbox. The words are those of python -m verl.trainer.main_ppo; there, trainer.dry_run=true does the same.

flags:
  --gpu-mem 80GB     memory of one GPU to hold the estimate against; of this machine's, where it has one
  --gpus 8           as trainer.n_gpus_per_node=8
  --elsewhere        the run is for another machine: devices and packages of this one do not count (so with --gpu-mem)
  --json             the report as JSON
  --strict           exit code 1 if there are warnings
  --config-path, --config-name, --config-dir    as the main job takes them

exit codes: 0 it can run, 1 it can and --strict has warnings, 2 it cannot.
"""

CHECK_HELP = """\
Look at data files and rewards before a run does: rendered prompts, lengths, bad rows, what right answers earn.

    verl check train.parquet test.parquet model=Qwen/Qwen2.5-0.5B-Instruct
    verl check train.jsonl data.prompt_key=question custom_reward_function.path=my_reward.py
    verl check key=value ...

With files, or options of data, model and reward alone, these are what is checked; model= is short for
actor_rollout_ref.model.path=. With the words of a whole training everything is, as by verl doctor.

Exit codes: 0 it can run, 2 it cannot.
"""

_SHORT = {
    "model": "actor_rollout_ref.model.path",
    "tokenizer": "data.tokenizer",
    "reward": "custom_reward_function.path",
}
_READ = ("data.", "actor_rollout_ref.model.", "custom_reward_function.", "reward_model.")
_DRY = re.compile(r"\+{0,2}trainer\.dry_run=(true|yes|on|1)$", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


# -- verl doctor ---------------------------------------------------------------------------------------------------


@plain_ending()
def doctor(
    argv: Sequence[str] | None = None, *, config_name: str = "ppo_trainer", config_path: str | None = None
) -> int:
    """Check a command line, print the report, and return the exit code.

    Args:
        argv: words and flags. None: this process's.
        config_name, config_path: used unless the words name others.
    """
    try:
        own, rest = _own_flags(sys.argv[1:] if argv is None else list(argv))
        flags, words = parse(rest)
        if flags.get("help"):
            print(HELP, end="")
            return 0
        machine = _machine(own)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from verl.preflight.checks import examine

    report = examine(
        [word for word in words if not _DRY.match(word)],
        flags.get("config_path", config_path),
        flags.get("config_name", config_name),
        flags.get("config_dir"),
        machine,
    )
    return _print(report, "--json" in own, "--strict" in own)


def _print(report: Report, as_json: bool = False, strict: bool = False) -> int:
    print(json.dumps(report.to_dict(), indent=2) if as_json else report.to_text())
    return report.exit_code(strict)


def _own_flags(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the doctor's own flags with their values, and all other words."""
    own: dict[str, str] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, has_value, value = word.partition("=")
        if word in ("--json", "--strict", "--elsewhere"):
            own[word] = "true"
        elif name in ("--gpu-mem", "--gpus"):
            own[name] = value if has_value else next(words, "")
        elif word != "--check":  # a flag of the main job, implied here
            rest.append(word)
    if "--gpus" in own and not own["--gpus"].isdigit():
        raise ValueError(f"--gpus {own['--gpus']} is not a number of GPUs. Use --gpus 8.")
    return own, rest


def _machine(own: dict[str, str]) -> Machine:
    from verl.preflight.machine import Machine

    size = _bytes(own["--gpu-mem"]) if "--gpu-mem" in own else None
    is_this = "--elsewhere" not in own and size is None
    return Machine(size, int(own["--gpus"]) if "--gpus" in own else None, is_this, size is not None)


def _bytes(text: str) -> int:
    """Parse ``80GB``, ``80G``, ``81559MiB`` or a number of bytes."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"--gpu-mem {text} is not a size. Use --gpu-mem 80GB.")
    return int(float(match[1]) * _UNITS[match[2].upper()])


# -- the main job --------------------------------------------------------------------------------------------------


def asks_for_a_run(arguments: Sequence[str]) -> bool:
    """Whether these words start a training run, rather than print help or a report."""
    flags = [word for word in arguments if word.startswith("-") and not word.startswith(("--config", "-c"))]
    return not flags and not any(map(_DRY.match, arguments))


def run_or_examine(
    run: Callable[[Any], Any],
    arguments: Sequence[str],
    *,
    config_name: str = "ppo_trainer",
    config_path: str | None = None,
) -> Any:
    """Call ``run`` with the checked configuration; with ``--check`` or ``trainer.dry_run=true`` print a report instead.

    Raises:
        SystemExit: after a dry run with its exit code, and as ``run_from_command_line``.
    """
    from verl.config.load import run_from_command_line

    if any(map(_DRY.match, arguments)) and "--help" not in arguments and not any("--cfg" in one for one in arguments):
        raise SystemExit(doctor(arguments, config_name=config_name, config_path=config_path))

    return run_from_command_line(
        run, arguments, config_name=config_name, config_path=config_path, examine=_before_the_run
    )


def _before_the_run(loaded: Any, flags: dict[str, Any]) -> bool:
    """Check a composed command line and return whether the run is to start.

    Raises:
        SystemExit: after a dry run, with its exit code.
        ConfigError: it cannot run.
    """
    from verl.preflight.checks import examine_loaded, passed
    from verl.preflight.machine import Machine

    report = examine_loaded(loaded, Machine(is_this=not flags.get("elsewhere")))
    if not loaded.problems and loaded.config.trainer.dry_run:
        raise SystemExit(_print(report))
    starts = not report.errors and not flags.get("check")
    print_warnings(report, with_notes=bool(flags.get("check")), begins_log=starts)
    if report.errors:
        raise ConfigError([finding.text for finding in report.errors])
    if flags.get("check"):
        from verl.config.checks.batch import batch_plan

        print(batch_plan(loaded.config))
        print(report.totals)
        return False
    passed(loaded.config)
    return True


def print_warnings(report: Report, with_notes: bool = False, begins_log: bool = False) -> None:
    """Print the warnings about a run, or write them to the beginning of its log."""
    for finding in (*(report.notes if with_notes else ()), *report.warnings):
        line = f"{finding.level}: {finding.text}"
        if begins_log:
            say_early(line)
        else:
            print(line, file=sys.stderr)


# -- verl check ----------------------------------------------------------------------------------------------------


@plain_ending()
def check(argv: Sequence[str] | None = None) -> int:
    """Check data files, or everything a command line names; returns the exit code."""
    parser = _parser()
    options, words = parser.parse_known_args(list(sys.argv[1:] if argv is None else argv))
    files = [word for word in words if _is_file(word)]
    words = [word for word in words if word not in files]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from verl.preflight.checks import examine, examine_data

    limits = _limits(options)
    try:
        flags, words = parse(words)
        words = [_in_full(word) for word in words]
        is_data = bool(files) or not flags and all(word.lstrip("+~").startswith(_READ) for word in words)
        if not is_data:
            paths = (flags.get("config_path"), flags.get("config_name", "ppo_trainer"), flags.get("config_dir"))
            report = examine([word for word in words if not _DRY.match(word)], *paths, limits=limits)
        else:
            config, given = read_options([word for word in words if word.startswith(_READ) or "=" in word], files)
            if not files and not given & {"data.train_files", "data.val_files"}:
                parser.error("name data files, or give data.train_files=FILE")
            report = examine_data(config, frozenset(given), limits)
            for key in sorted(given):
                if not key.startswith(_READ):
                    report.notes += [_unread(key)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _show(report, options.json)


def _show(report: Report, as_json: bool) -> int:
    if report.data is None:
        return _print(report, as_json)
    from verl.preflight.report import show, to_json

    if as_json:
        print(json.dumps(to_json(report.data, report), ensure_ascii=False, indent=1, default=str))
    else:
        show(report.data, report)
    return report.exit_code()


def _unread(key: str) -> Any:
    from verl.preflight.report import Finding

    return Finding("note", f"{key} has no effect on data: it was not checked.", (key,))


def _is_file(word: str) -> bool:
    return not word.startswith("-") and ("=" not in word or os.path.exists(os.path.expanduser(word)))


def _in_full(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{_SHORT.get(key, key)}{equals}{value}"


def read_options(words: Sequence[str], files: Sequence[str] = ()) -> tuple[Any, set[str]]:
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
    for key in ("train_files", "val_files"):
        data.setdefault(key, [])
    config = build(PPOConfig(), tree, "", problems)
    if problems:
        raise ConfigError([problem.text for problem in problems])
    return config, checked.given


def _limits(options: argparse.Namespace) -> Any:
    from verl.preflight.data import Limits

    default = Limits()
    tokens = None if options.all else default.tokens if options.tokens is None else options.tokens
    rows = sys.maxsize if options.all else default.rows
    scored, patience = options.score, options.patience
    return Limits(
        default.prompts if options.prompts is None else options.prompts,
        tokens,
        default.scored if scored is None else scored,
        default.patience if patience is None else patience,
        rows,
        asks_judge=scored is not None,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "verl check",
        usage="%(prog)s [flags] [FILE...] [key=value ...]",
        description=CHECK_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--prompts", type=int, help="prompts to show")
    parser.add_argument("--tokens", type=int, help="prompts whose tokens are counted")
    parser.add_argument("--all", action="store_true", help="look closely at all rows, and count the tokens of all")
    parser.add_argument("--score", type=int, help="rows scored of each data source; 0: none. A judge is asked, too")
    parser.add_argument("--patience", type=float, help="seconds a reward may take")
    return parser
