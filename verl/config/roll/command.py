"""``verl roll CONFIG.yaml``: show a ROLL configuration as a command line, or give it to the main job."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.config.base import ConfigError

HELP = """\
usage: verl roll CONFIG.yaml [--print] [key=value ...]

Read a configuration written for ROLL (RLVR) and train as it says. key=value are options of verl, or keys of the file;
they win over it, and settle what it asks for that is not built:
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
    for variable, value in translation.environment.items():
        os.environ.setdefault(variable, value)
    if "--print" not in flags:
        run([*translation.words, *(["--check"] if "--check" in flags else [])])
    return 0


def translate_file(path: str, words: Sequence[str] = ()) -> Any:
    """The ``Translation`` of a file."""
    from verl.config.roll.read import read_roll
    from verl.config.roll.translate import is_ours, translate

    own = [text for text in words if is_ours(text.partition("=")[0].lstrip("+"))]
    tree, referred = read_roll(path, [text for text in words if text not in own])
    return translate(tree, referred, own)


def command_line(words: Sequence[str]) -> str:
    """A shell command, a word a line."""
    return " \\\n    ".join(["python3 -m verl.trainer.main_ppo", *map(shlex.quote, words)])


def fields_table() -> str:
    """Every field of ROLL's configuration classes as lines of text, and a count of the kinds."""
    from verl.config.roll.fields import fields

    rows = fields()
    lines = [f"{one.section}.{one.name}: {one.kind}: {one.text}" for one in rows]
    counts = {kind: sum(one.kind == kind for one in rows) for kind in ("translated", "no effect", "not built")}
    return "\n".join([*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {len(rows)} fields"])


def tables_page() -> str:
    """The tables of docs/roll.md: every field of ROLL and what it becomes."""
    from verl.config.roll import strategies
    from verl.config.roll.fields import fields, told

    sections: dict[str, list[Any]] = {}
    for one in fields():
        sections.setdefault(one.section, []).append(one)
    lines = []
    for section, rows in sections.items():
        lines += ["", f"**{section}**", "", "| field | default, v0.1.0 | 2026-08 | | here |", "|---|---|---|---|---|"]
        lines += [f"| `{one.name}` | {one.first} | {one.latest} | {one.kind} | {one.text} |" for one in rows]
    engines = {"vLLM": strategies.VLLM, "SGLang": strategies.SGLANG, "Megatron": strategies.MEGATRON}
    for engine, rows in engines.items():
        lines += ["", f"**`strategy_config` of {engine}**", "", "| key | here |", "|---|---|"]
        lines += [f"| `{key}` | {told(row)} |" for key, row in rows.items()]
    return "\n".join(lines[1:])
