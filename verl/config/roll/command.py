"""``verl roll CONFIG.yaml``: show a ROLL configuration as a command line, or give it to the main job."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from verl.config.base import ConfigError
from verl.config.roll.table import WORKER_TABLES, Row, listed, read_yaml, rows
from verl.config.roll.translate import Translation, is_ours, read_roll, translate

HELP = """\
usage: verl roll CONFIG.yaml [--print] [key=value ...]

Read a configuration written for ROLL (RLVR or agentic) and train as it says. key=value are options of verl, or keys of
the file; they win over it, and settle what it asks for that is not built:
verl roll CONFIG.yaml actor_rollout_ref.actor.strategy=fsdp2 rewards.llm_judge=null

  --print    print the command line it amounts to, and stop
  --check    check it as main_ppo --check does, show the batch arithmetic, and stop
  --fields   print all fields of ROLL's configuration, at two releases, and what each becomes, and stop

Exit code 2 if some key cannot be done; each is named with the reason. All keys: docs/roll.md.
"""


def main(arguments: Sequence[str], run: Callable[[list[str]], Any]) -> int:
    """Translate the file that ``arguments`` name, and give its words to ``run``; returns the exit code.

    Args:
        run: the main job; gets ``key=value`` words and flags.
    """
    flags = [text for text in arguments if text.startswith("-")]
    words = [text for text in arguments if not text.startswith("-") and "=" in text]
    files = [text for text in arguments if not text.startswith("-") and "=" not in text]
    if "--help" in flags or "-h" in flags:
        print(HELP, end="")
        return 0
    if "--fields" in flags:
        print(fields_table())
        return 0
    unknown = sorted(set(flags) - {"--print", "--check"})
    try:
        if unknown or len(files) != 1:
            raise ConfigError([f"{unknown[0]} is no flag" if unknown else "give one YAML file: verl roll CONFIG.yaml"])
        translation = translate_file(files[0], words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in translation.notes:
        print(f"note: {note}", file=sys.stderr)
    if "--print" in flags:
        print(command_line(translation.words))
    if translation.refusals:
        print(f"error: {ConfigError(translation.refusals)}", file=sys.stderr)
        if translation.added:
            added = [part if "=" in part else f"{part}=..." for text in translation.added for part in text.split()]
            print(f"To go on: {shlex.join(['verl', 'roll', files[0], *words, *added])}", file=sys.stderr)
        return 2
    # A variable that the user set goes before the secret in the file.
    for variable, value in translation.environment.items():
        os.environ.setdefault(variable, value)
    if "--print" not in flags:
        run([*translation.words, *(["--check"] if "--check" in flags else [])])
    return 0


def translate_file(path: str, words: Sequence[str] = ()) -> Translation:
    """The translation of a file; words of ours and of ROLL's are laid over it."""
    own = [text for text in words if is_ours(text.partition("=")[0].lstrip("+"))]
    tree, referred = read_roll(path, [text for text in words if text not in own])
    return translate(tree, referred, own)


def command_line(words: Sequence[str]) -> str:
    """A shell command, a word a line."""
    module = "main_agentic" if any(text.startswith("env.train.tags=") for text in words) else "main_ppo"
    return " \\\n    ".join([f"python3 -m verl.trainer.{module}", *map(shlex.quote, words)])


# -- Every field of ROLL's configuration classes at two releases, and what becomes of it here ------------------------


class Field(NamedTuple):
    """A field of ROLL and what becomes of it."""

    section: str
    name: str
    first: str
    """Default at v0.1.0; ``-``: not there."""
    latest: str
    """Default at 2026-08."""
    kind: str
    """``translated``, ``no effect`` or ``not built``."""
    text: str
    """To what, why, or what to do instead."""


def fields() -> list[Field]:
    """All fields, class by class.

    Raises:
        KeyError: no table has a field.
    """
    return [
        Field(section, name, first or "-", latest or "-", *_verdict(section, name))
        for section, entries in read_yaml("fields.yaml").items()
        for name, (_type, first, latest) in entries.items()
    ]


_FILTERS = "base_config.TrainInferFilterConfig"


def _verdict(section: str, name: str) -> tuple[str, str]:
    pipeline = listed("pipelines").get(section.partition("_config.")[0])
    if pipeline is not None:
        instead = pipeline["instead"]
        return "not built", f"{pipeline['name']}; {instead[0].lower()}{instead[1:]}"
    if section == _FILTERS:
        if name.startswith("diff_"):
            return "not built", "a bound on the difference of probabilities; bound their ratio with `ratio_high`"
        return "translated", "`algorithm.rollout_correction.rollout_rs`, and its thresholds"
    table, before = listed("classes").get(section, ("top", ""))
    known: dict[str, Row] = rows(*WORKER_TABLES, "strategy") if table == "worker" else rows(table)
    key = f"{before}{name}"
    if key not in known and any(other.startswith(f"{key}.") for other in known):
        return "translated", "a section: its fields are in a list of their own"
    return known[key].kind, known[key].described()


def fields_table() -> str:
    """Every field of ROLL's configuration classes as lines of text, and a count of the kinds."""
    every = fields()
    lines = [f"{one.section}.{one.name}: {one.kind}: {one.text}" for one in every]
    counts = {kind: sum(one.kind == kind for one in every) for kind in ("translated", "no effect", "not built")}
    counted = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return "\n".join([*lines, f"{counted}, {len(every)} fields"])


def tables_page() -> str:
    """The tables of docs/roll.md: every field of ROLL and what it becomes."""
    sections: dict[str, list[Field]] = {}
    for one in fields():
        sections.setdefault(one.section, []).append(one)
    lines = []
    for section, entries in sections.items():
        lines += ["", f"**{section}**", "", "| field | default, v0.1.0 | 2026-08 | | here |", "|---|---|---|---|---|"]
        lines += [f"| `{one.name}` | {one.first} | {one.latest} | {one.kind} | {one.text} |" for one in entries]
    for engine in ("vLLM", "SGLang", "Megatron"):
        lines += ["", f"**`strategy_config` of {engine}**", "", "| key | | here |", "|---|---|---|"]
        tables = ("megatron", "megatron_training") if engine == "Megatron" else (engine.lower(),)
        lines += [f"| `{key}` | {row.kind} | {row.described()} |" for key, row in rows(*tables).items()]
    return "\n".join(lines[1:])
