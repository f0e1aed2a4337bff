"""Generate responses into a file: ``python -m verl.trainer.main_generation key=value ...`` and ``verl generate``.

The entry point only. Words are those of ``main_ppo``, with the shorter names of ``verl.config.generation``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import ConfigError, Problem
from verl.config.command_line import parse, quoted
from verl.config.generation import GenerationConfig, long_words
from verl.config.load import LoadedConfig, run_from_command_line
from verl.config.ppo import PPOConfig
from verl.config.unused_options import check_unused_options
from verl.model_merger.__main__ import exported_model, find_checkpoint, is_checkpoint, merged_folder
from verl.preflight.command import asks_for_help
from verl.telemetry.run_record import say_early
from verl.utils.process import plain_ending
from verl.version import __version__

HELP = """\
usage: verl generate MODEL DATA [key=value ...]
       python -m verl.trainer.main_generation model.path=MODEL data.path=DATA [key=value ...]

Generate responses to every prompt of a data file, and write them next to its columns into a parquet file.

  MODEL   a model in Hugging Face format, or the folder of a run: its newest checkpoint
  DATA    parquet, JSON, CSV, Arrow: a file, a glob, a folder, or owner/name on the hub

  data.output_path=FILE      the file to write; default: named after DATA and MODEL, in this folder
  data.n_samples=5           responses to a prompt
  data.prompt_key=prompt     column of the prompts
  data.batch_size=128        prompts generated at a time, and written; a restart repeats at most these
  rollout.name=vllm          the engine: hf, vllm or sglang
  rollout.temperature=1.0 rollout.top_p=0.7 rollout.top_k=50
  rollout.prompt_length=1536 rollout.response_length=512      in tokens
  trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.device=cuda|cpu trainer.controller=ray|local
  data.overwrite=true        replace a file that is there

The same command continues a generation that was cut off. All other options are those of main_ppo, as
`--help actor_rollout_ref.rollout` lists them; --check looks at a configuration and stops. Page: docs/generation.md.
"""


class Command(NamedTuple):
    """A command line of generation or evaluation, its words without an equals sign taken apart."""

    arguments: list[str]
    """Flags and ``key=value``."""
    checkpoint: str | None
    """The run, step or role whose newest checkpoint is the model; None: the model is a model's folder."""


def read_command(arguments: Sequence[str], names: Any, place: Callable[[list[str]], list[str]]) -> Command:
    """Turn words such as MODEL and DATA into options, and a checkpoint into the folder of its config.

    ``rollout.temperature=0``, which training cannot have, becomes greedy sampling.

    Args:
        names: short names of options.
        place: words without an equals sign -> ``key=value``.

    Raises:
        ConfigError: there are too many of them.
    """
    flags, words = parse(arguments)
    if flags.get("help"):
        return Command(list(arguments), None)
    alone = [word for word in words if "=" not in word]
    rest = [word for word in arguments if word not in alone]
    rest = [*place(alone), *rest]
    checkpoint, key = None, "actor_rollout_ref.model.path"
    for i, (word, meant) in enumerate(zip(rest, long_words(rest, names), strict=False)):
        if re.fullmatch(r"\+*actor_rollout_ref\.rollout\.temperature=0(\.0*)?", meant):
            rest[i] = "actor_rollout_ref.rollout.do_sample=false"
        path = meant.lstrip("+").removeprefix(f"{key}=").strip("'\"")
        is_model = meant.lstrip("+").startswith(f"{key}=")
        if is_model and (exported := exported_model(path)):
            rest[i] = f"{word.partition('=')[0]}={quoted(exported)}"
        elif is_model and is_checkpoint(path):
            # its config and tokenizer, until it is known that everything else is in order
            checkpoint, rest[i] = path, f"{word.partition('=')[0]}={find_checkpoint(path)[0]}/huggingface"
    return Command(rest, checkpoint)


def model_and_data(words: list[str]) -> list[str]:
    """MODEL DATA... as options."""
    if len(words) > 1:
        return [f"model.path={quoted(words[0])}", f"data.path={listed(words[1:])}"]
    return [f"model.path={quoted(word)}" for word in words]


def listed(paths: Sequence[str]) -> str:
    """Paths as a list in hydra's grammar."""
    return f"[{','.join(map(quoted, paths))}]"


def examine(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    """Say the warnings; return whether to go on, which with ``--check`` is not so.

    Raises:
        ConfigError: with every problem, missing files included.
    """
    if not loaded.config.data.has_validation:
        raise ConfigError(["data.path is empty. Name a data file."])
    return examine_model(loaded, flags)


def examine_model(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    """As `examine`, without data."""
    from verl.config.checks.run import missing_files

    problems = list(loaded.problems)
    if not problems:
        problems = [found for found in missing_files(loaded.config) if found.key != "data.train_files"]
        if loaded.config.actor_rollout_ref.generates_ahead:
            key = "actor_rollout_ref.rollout.max_staleness"
            staleness = loaded.config.actor_rollout_ref.rollout.staleness
            problems.append(Problem(key, f"{key}={staleness}: nothing is trained meanwhile. Leave it out."))
    if problems:
        raise ConfigError([problem.text.replace("data.val_files", "data.path") for problem in problems])
    for message in (text for text in loaded.warnings if not text.endswith("so nothing is validated")):
        say_early(f"note: {message}")
    if flags.get("check"):
        print("The configuration is in order.")
    return not flags.get("check")


def with_model(config: PPOConfig, checkpoint: str | None) -> PPOConfig:
    """The configuration with the merged weights of a checkpoint as its model; as it is where the model is a folder."""
    if checkpoint is None:
        return config
    return config.with_values({"actor_rollout_ref.model.path": merged_folder(checkpoint)})  # type: ignore[return-value]


def default_output(config: PPOConfig) -> str:
    """``DATA.MODEL.parquet`` in the current folder."""
    model = Path(config.actor_rollout_ref.model.path)
    parts = [*(Path(path).name for path in config.data.files["data.val_files"]), *model.parts[-2:]]
    stems = [re.sub(r"\.(parquet|jsonl?|csv|arrow)$", "", part) for part in parts]
    return re.sub(r"[^\w.+-]+", "-", ".".join(stems)).strip("-.") + ".parquet"


def run(config: PPOConfig, checkpoint: str | None = None) -> Path:
    """Generate as ``config`` says; returns the file."""
    from verl.trainer.generation.generator import generate_file

    given, config = config, with_model(config, checkpoint)
    data: Any = config.data
    file = generate_file(config, data.output_path or default_output(config), data.overwrite)
    check_unused_options(given, (), say_early)
    print(f"responses: {file.path}", flush=True)
    return file.path


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``[MODEL DATA] key=value ...``; None: the words of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["--help"], ["-h"]):
        print(HELP, end="")
        return
    if not asks_for_help(words):
        say_early(f"verl {__version__}: reading the configuration")
    with plain_ending():
        command = read_command(words, GenerationConfig.short_names, model_and_data)
    run_from_command_line(
        lambda config: run(config, command.checkpoint),
        command.arguments,
        config_name=GenerationConfig.config_name,
        root=GenerationConfig,
        examine=examine,
    )


if __name__ == "__main__":
    main()
