"""Score responses: ``python -m verl.trainer.main_eval key=value ...`` and ``verl eval``.

The entry point only: of a file of responses, or of those that a model gives to data sets first.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.config.base import ConfigError
from verl.config.command_line import quoted
from verl.config.generation import EvaluationConfig, long_words
from verl.config.load import LoadedConfig, run_from_command_line
from verl.config.ppo import PPOConfig
from verl.config.unused_options import check_unused_options
from verl.preflight.command import asks_for_help
from verl.telemetry.run_record import say_early
from verl.trainer.main_generation import default_output, examine, listed, read_command, with_model
from verl.utils.process import plain_ending
from verl.version import __version__

HELP = """\
usage: verl eval RESPONSES [key=value ...]
       verl eval MODEL DATA [DATA ...] [key=value ...]
       python -m verl.trainer.main_eval data.path=RESPONSES [key=value ...]

Score a file of responses, or the responses that a model gives to data sets, and print the figures of each data source
with confidence intervals: mean, best and majority of k, pass@k. All of them go into a JSON file.

  RESPONSES  what verl generate wrote, a file with a column of responses, or a run's validation_data_dir/N.jsonl
  MODEL      a model in Hugging Face format, or the folder of a run: its newest checkpoint
  DATA       a data file, or one of {sets}

  custom_reward_function.path=FILE.py      score by a function of yours; default: the scorer of each data source
  data.response_key=responses data.data_source_key=data_source data.reward_model_key=reward_model       columns
  data.results_path=FILE.json              default: next to the responses
  data.confidence=0.95 data.correct_from=1.0
with a MODEL, sampled as a run validates (greedy unless given):
  data.n_samples=4 rollout.temperature=0.8 rollout.response_length=512 rollout.name=vllm data.output_path=FILE

All other options are those of main_ppo. Page: docs/evaluation.md.
"""

DATA_SETS = {
    "gsm8k": "gsm8k.py",
    "math": "math_dataset.py",
    "math500": "math_dataset.py --only_500",
    "aime2024": "aime.py --year 2024",
    "aime2025": "aime.py --year 2025",
    "geo3k": "geo3k.py",
    "hellaswag": "hellaswag.py",
    "mbpp": "mbpp.py",
    "humaneval": "humaneval.py",
    "ifeval": "ifeval.py",
}
"""Name of a data set whose answers a built-in scorer knows -> the script of examples/data_preprocess that makes it."""

_ENDINGS = (".parquet", ".jsonl", ".json", ".csv", ".arrow")


def data_file(name: str) -> str:
    """The test split of a known data set, in ``~/data/NAME``: made by its script where it is not there.

    Raises:
        ConfigError: the script is not here, or failed.
    """
    folder = Path("~/data").expanduser() / name
    path, script = folder / "test.parquet", DATA_SETS[name].split()
    if path.exists():
        return str(path)
    scripts = Path(__file__).parents[2] / "examples" / "data_preprocess"
    command = [sys.executable, str(scripts / script[0]), *script[1:], "--local_save_dir", str(folder)]
    if (scripts / script[0]).exists():
        print(f"{name}: making {path}", flush=True)
        if subprocess.run(command, check=False).returncode == 0 and path.exists():
            return str(path)
    raise ConfigError(
        [
            f"{name}: {path} does not exist, and examples/data_preprocess/{' '.join(script)} could not make it. Bring "
            "the file there, or name a data file in its place."
        ]
    )


def is_data(word: str) -> bool:
    """Whether a word names data rather than a model."""
    return word in DATA_SETS or word.endswith(_ENDINGS) or glob.has_magic(word)


def model_and_data(words: list[str]) -> list[str]:
    """RESPONSES, or MODEL DATA..., as options."""
    model = [f"model.path={quoted(words[0])}"] if words and not is_data(words[0]) else []
    data = [data_file(word) if word in DATA_SETS and not os.path.exists(word) else word for word in words[len(model) :]]
    return [*model, *([f"data.path={listed(data)}"] if data else [])]


def run(config: PPOConfig, checkpoint: str | None = None, has_model: bool = False) -> dict[str, Any]:
    """Evaluate as ``config`` says; prints the table, writes the JSON file and returns its content.

    Args:
        checkpoint: the run, step or role whose newest checkpoint is the model.
        has_model: generate the responses first.
    """
    from verl.data.files import open_table
    from verl.trainer.generation.evaluation import evaluate, format_figures, has_responses, read_answers, score_answers

    given, data = config, config.data  # type: Any, Any
    path = data.files["data.val_files"]
    about: dict[str, Any] = {}
    if has_model:
        from verl.trainer.generation.generator import generate_file

        config = with_model(config, checkpoint)
        file = generate_file(config, data.output_path or default_output(config), data.overwrite, validates=True)
        path, about = [str(file.path)], {"model": checkpoint or config.actor_rollout_ref.model.path, "data": path}
    table = open_table(path, cache_dir=data.cache_dir, bad_rows=data.bad_rows)
    if not has_responses(table, data):
        raise ConfigError(
            [
                f"data.path={', '.join(path)} has no column {data.response_key!r} (data.response_key); there are "
                f"{', '.join(table.column_names)}. Name its column of responses, or a model that generates them: "
                "verl eval MODEL DATA."
            ]
        )
    scores = score_answers(config, read_answers(table, data), table)
    report = {**about, "responses": path, **evaluate(scores, data.correct_from, data.confidence)}
    print(format_figures(report))
    results = Path(data.results_path or f"{path[0]}.eval.json").expanduser()
    was_there = results.exists()
    results.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"figures: {results}{' (replaced)' if was_there else ''}", flush=True)
    check_unused_options(given, (), say_early)
    return report


def _examine(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
    if not loaded.problems and loaded.config.reward_model.enable:
        raise ConfigError(
            [
                "reward_model.enable=true: evaluation scores texts by functions and judges, not by a reward model in "
                "workers. Run main_ppo with trainer.val_only=true."
            ]
        )
    return examine(loaded, flags)


def with_sampling(words: list[str]) -> list[str]:
    """Add ``do_sample=true`` to words that give a temperature and do not say otherwise."""
    place = "actor_rollout_ref.rollout.val_kwargs"
    given = dict(word.lstrip("+").partition("=")[::2] for word in long_words(words, EvaluationConfig.short_names))
    samples = given.get(f"{place}.temperature", "0").strip("0.") != ""
    return [*words, f"{place}.do_sample=true"] if samples and f"{place}.do_sample" not in given else words


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``RESPONSES key=value ...`` or ``MODEL DATA ... key=value ...``; None: the words of this process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["--help"], ["-h"]):
        print(HELP.format(sets=", ".join(DATA_SETS)), end="")
        return
    given: set[str] = set()

    def look(loaded: LoadedConfig, flags: dict[str, Any]) -> bool:
        given.update(loaded.given)
        return _examine(loaded, flags)

    if not asks_for_help(words):
        say_early(f"verl {__version__}: reading the configuration")
    with plain_ending():
        command = read_command(words, EvaluationConfig.short_names, model_and_data)
    run_from_command_line(
        lambda config: run(config, command.checkpoint, "actor_rollout_ref.model.path" in given),
        with_sampling(command.arguments),
        config_name=EvaluationConfig.config_name,
        root=EvaluationConfig,
        examine=look,
    )


if __name__ == "__main__":
    main()
