"""``verl roll CONFIG.yaml``: show a ROLL configuration as a command line, or give it to the main job."""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import ConfigError
from verl.config.roll import read as pipelines
from verl.config.roll.rewards import REWARD
from verl.config.roll.strategies import STRATEGY
from verl.config.roll.table import TOP, Row
from verl.config.roll.workers import DATA, GENERATION, WORKER

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

    rows = fields()
    lines = [f"{one.section}.{one.name}: {one.kind}: {one.text}" for one in rows]
    counts = {kind: sum(one.kind == kind for one in rows) for kind in ("translated", "no effect", "not built")}
    return "\n".join([*lines, ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f", {len(rows)} fields"])


def tables_page() -> str:
    """The tables of docs/roll.md: every field of ROLL and what it becomes."""
    from verl.config.roll import strategies

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
        lines += [f"| `{key}` | {described(row)} |" for key, row in rows.items()]
    return "\n".join(lines[1:])


# -- Every field of ROLL's configuration classes at two releases, and what becomes of it here ------------------------


_WORKERS = {**WORKER, **DATA, **GENERATION, **STRATEGY}
_TABLES: dict[str, tuple[dict[str, Row], str]] = {
    "worker_config.StrategyArguments": (_WORKERS, "strategy_args."),
    "worker_config.WorkerConfig": (_WORKERS, ""),
    "worker_config.RouterReplayConfig": (_WORKERS, "router_replay."),
    "worker_config.SequencePackingConfig": (_WORKERS, "sequence_packing_args."),
    "model_args.LoraArguments": (_WORKERS, "model_args."),
    "model_args.ModelArguments": (_WORKERS, "model_args."),
    "data_args.DataArguments": (_WORKERS, "data_args."),
    "generating_args.GeneratingArguments": (_WORKERS, "generating_args."),
    "training_args.TrainingArguments": (_WORKERS, "training_args."),
    "rlvr_config.RewardConfig": (REWARD, ""),
    "rlvr_config.RewardFilterConfig": (REWARD, "query_filter_config."),
    "rlvr_config.DatasetFilterConfig": (TOP, "dataset_filter."),
    "base_config.RolloutMockConfig": (TOP, "rollout_mock."),
    "base_config.RouterArguments": (TOP, "router_args."),
    "base_config.TransferBackendArguments": (TOP, "transfer_backend."),
    "base_config.TrainInferISWeightConfig": (TOP, "train_infer_correction.is_weight."),
    "base_config.TrainInferCorrectionConfig": (TOP, "train_infer_correction."),
    **{f"base_config.{name}": (TOP, "") for name in ("ScheduleConfig", "BaseConfig", "PPOConfig")},
    "rlvr_config.RLVRConfig": (TOP, ""),
}
"""Class of ROLL -> the table that has its fields, and what stands before a field's name there."""

_FILTERS = "base_config.TrainInferFilterConfig"
_PIPELINES = {
    "agentic_config": pipelines.AGENTIC,
    "sft_config": pipelines.SFT,
    "dpo_config": pipelines.DPO,
    "distill_config": pipelines.DISTILL,
}


class Field(NamedTuple):
    """A field of ROLL and what becomes of it."""

    section: str
    name: str
    type: str
    first: str
    """Default at v0.1.0; ``-``: not there."""
    latest: str
    """Default at 2026-08."""
    kind: str
    """``translated``, ``no effect`` or ``not built``."""
    text: str
    """To what, why, or what to do instead."""


@cache
def fields() -> list[Field]:
    """All fields, class by class.

    Raises:
        KeyError: no table has a field.
    """
    import yaml

    found = []
    classes = yaml.safe_load((Path(__file__).parent / "fields.yaml").read_text(encoding="utf-8"))
    for section, entries in classes.items():
        for name, (kind, first, latest) in entries.items():
            verdict, text = _verdict(section, name)
            found.append(Field(section, name, kind, first or "-", latest or "-", verdict, text))
    return found


def _verdict(section: str, name: str) -> tuple[str, str]:
    pipeline = _PIPELINES.get(section.partition(".")[0])
    if pipeline is not None and not (section == "agentic_config.AgenticConfig" and name in TOP):
        return "not built", f"{pipeline.name}; {pipeline.instead[0].lower()}{pipeline.instead[1:]}"
    if section == _FILTERS:
        if name.startswith("diff_"):
            return "not built", "a bound on the difference of probabilities; bound their ratio with `ratio_high`"
        return "translated", "`algorithm.rollout_correction.rollout_rs`, and its thresholds"
    table, before = _TABLES.get(section, (TOP, ""))
    key = f"{before}{name}"
    if key not in table and any(other.startswith(f"{key}.") for other in table):
        return "translated", "a section: its fields are in a list of their own"
    return table[key].kind, described(table[key])


def described(row: Row) -> str:
    """A row in words: its options, then its note."""
    options = [row.to] if isinstance(row.to, str) else list(row.to) if isinstance(row.to, tuple) else []
    text = "; ".join(filter(None, [", ".join(f"`{option}`" for option in options), row.note]))
    return f"{text}. ROLL's default `{row.default}` is kept" if row.default is not None else text
