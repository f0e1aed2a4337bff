"""``verl roll CONFIG.yaml``: show a ROLL configuration as a command line, or give it to the main job."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.config.base import ConfigError

HELP = """\
usage: verl roll CONFIG.yaml [--print] [key=value ...]

Read a configuration written for ROLL (RLVR or agentic) and train as it says. key=value are options of verl; they win
over the file, and settle what it asks for that is not built:
verl roll CONFIG.yaml actor_rollout_ref.actor.strategy=fsdp2

  --print    print the command line it amounts to, and stop
  --check    check it as main_ppo --check does, show the batch arithmetic, and stop

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
        print(f"error: {ConfigError([f'{text}' for text in translation.refusals])}", file=sys.stderr)
        return 2
    if "--print" not in flags:
        run([*translation.words, *(["--check"] if "--check" in flags else [])])
    return 0


def translate_file(path: str, words: Sequence[str] = ()) -> Any:
    """The ``Translation`` of a file."""
    from verl.config.roll.read import read_roll
    from verl.config.roll.translate import translate

    tree, referred = read_roll(path)
    return translate(tree, referred, words)


def command_line(words: Sequence[str]) -> str:
    """A shell command, a word a line."""
    return " \\\n    ".join(["python3 -m verl.trainer.main_ppo", *map(shlex.quote, words)])


def tables_page() -> str:
    """The tables of docs/roll.md: every key of the guides and what it becomes."""
    from verl.config.roll import strategies, table, workers

    titles = {
        "The run, batches, rewards, losses": table.TOP,
        "Workers (`actor_train`, `actor_infer`, `reference`, `critic`)": {
            **workers.WORKER,
            **workers.DATA,
            **workers.GENERATION,
        },
        "`strategy_config` of vLLM": strategies.VLLM,
        "`strategy_config` of SGLang": strategies.SGLANG,
        "`strategy_config` of Megatron, beside another `actor_rollout_ref.actor.strategy`": strategies.MEGATRON,
    }
    lines = []
    for title, rows in titles.items():
        lines += ["", f"**{title}**", "", "| ROLL | here |", "|---|---|"]
        for key, row in rows.items():
            options = [row.to] if isinstance(row.to, str) else list(row.to) if isinstance(row.to, tuple) else []
            named = ", ".join(f"`{option}`" for option in options)
            if named.startswith("`env."):
                lines.append(f"| `{key}` | not yet: environments are not built |")
                continue
            alone = "" if options or not row.harmless or callable(row.to) else "none: "
            default = f" ROLL's default: `{row.default}`." if row.default is not None else ""
            lines.append(f"| `{key}` | {alone}{'; '.join(filter(None, [named, row.note]))}.{default} |")
    return "\n".join(lines[1:])
