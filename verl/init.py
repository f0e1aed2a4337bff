"""``verl init``: a folder to start from, with a commented configuration, a reward function, rows, and a first command.

    verl init my_run --model Qwen/Qwen2.5-0.5B-Instruct --data questions.csv --task math

On a terminal, what no flag says is asked; elsewhere, and with ``--yes``, defaults are taken. Nothing is overwritten.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl.config.base import ConfigError
from verl.utils.process import plain_ending

TINY = "tiny"
"""Model of random weights that is made on the spot."""

ALGORITHMS = {
    "grpo": "no critic: the responses to a prompt are compared with each other",
    "rloo": "no critic: each response is compared with the mean of the others",
    "reinforce_plus_plus": "no critic, no groups: advantages are normalized over the batch",
    "gae": "PPO: a critic, as large as the policy, estimates the value of every token",
}

_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "input", "messages")
_ANSWER_COLUMNS = ("ground_truth", "answer", "solution", "target", "label", "output", "response")

_HEAD = '''"""Reward of this run: {about}.

Called once for each response; see docs/reward_function.md. Return a number, or a dict with a "score" whose other
entries become columns of the samples.
"""

import re

'''


class Task(NamedTuple):
    """What responses are rewarded for."""

    about: str
    code: str
    """Body of the reward file."""
    instruction: str
    """What prompts of the sample data ask for."""


TASKS = {
    "math": Task(
        "1 for the right number at the end of a response, 0.1 for any number",
        """
def last_number(text):
    numbers = re.findall(r"-?\\d+(?:\\.\\d+)?", str(text).replace(",", ""))
    return float(numbers[-1]) if numbers else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = last_number(solution_str)
    if answer is None:
        return 0.0
    return 1.0 if answer == last_number(ground_truth) else 0.1
""",
        "Answer with a number.",
    ),
    "text": Task(
        "1 for a response that holds the right answer, whatever its case and punctuation",
        """
def plain(text):
    return " ".join(re.findall(r"\\w+", str(text).lower()))


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if f" {plain(ground_truth)} " in f" {plain(solution_str)} " else 0.0
""",
        "Answer in a word.",
    ),
    "tags": Task(
        "1 for the right answer between <answer> and </answer>, 0.1 for the form alone",
        """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if not found:
        return 0.0
    return 1.0 if found[-1].strip() == str(ground_truth).strip() else 0.1
""",
        "Think first, and put the answer between <answer> and </answer>.",
    ),
}

_CONFIG = """\
# A run of verl. Every option: `verl config --explain KEY`, or docs/keys.md; what is not here has its default.
# Start it:        bash run.sh
# Check it only:   bash run.sh --check
# Change an option for one run:   bash run.sh trainer.seed=2
defaults:
  - ppo_trainer
  - _self_

algorithm:
  adv_estimator: {algorithm}  # {about}

data:
  train_files: {train}
  val_files: {val}
  train_batch_size: {batch}  # prompts of one training step
  max_prompt_length: {prompt_length}  # tokens; longer prompts are left out
  max_response_length: {response_length}  # tokens
  filter_overlong_prompts: true

actor_rollout_ref:
  model:
    path: {model}{packed}
  actor:
    strategy: {strategy}
    ppo_mini_batch_size: {batch}  # prompts of one optimizer step
    use_dynamic_bsz: true  # micro-batches by tokens: ppo_max_token_len_per_gpu of them on a device
    ppo_max_token_len_per_gpu: {tokens}
    optim:
      lr: {lr}
  rollout:
    name: hf  # what generates; vllm and sglang are faster: bash scripts/install_engines.sh vllm
    n: {n}  # responses to a prompt
{critic}
custom_reward_function:
  path: reward.py

trainer:
  device: {device}
  n_gpus_per_node: {devices}
  controller: {controller}  # local: without Ray, on one machine
  {length}
  test_freq: 10  # steps between two validations
  save_freq: 10  # steps between two checkpoints; the same command goes on from the newest
  logger: [file]  # also console, tensorboard, wandb
  default_local_dir: run
  rollout_data_dir: run/samples
  validation_data_dir: run/validation
"""

_PACKED = """
    use_remove_padding: true  # no padding between rows; false for models with recurrent layers, such as Mamba"""

_CRITIC = """
critic:
  strategy: {strategy}
  model:
    path: {model}{packed}
  ppo_max_token_len_per_gpu: {tokens}
  optim:
    lr: {critic_lr}
"""

_RUN = """\
#!/usr/bin/env bash
# Train as config.yaml says. Further options may follow: bash run.sh trainer.seed=2
set -euo pipefail
cd "$(dirname "$0")"
exec "${{PYTHON:-{python}}}" -m verl ppo --config-path "$PWD" --config-name config "$@"
"""


# -- what the user wants ----------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "verl init",
        description="Make a folder to start from: a commented configuration, a reward function, rows, a first command.",
        epilog="On a terminal, what no flag says is asked. Nothing is overwritten.",
    )
    parser.add_argument("folder", nargs="?", help="default: my_run")
    parser.add_argument("--task", choices=TASKS, help="; ".join(f"{name}: {one.about}" for name, one in TASKS.items()))
    parser.add_argument("--model", help=f"folder or hub name; {TINY}: random weights, to try everything in seconds")
    parser.add_argument(
        "--data", action="append", metavar="FILE", help="rows to train on; default: additions, made here"
    )
    parser.add_argument("--val-data", action="append", metavar="FILE", help="rows to validate with; default: 1 in 20")
    parser.add_argument("--prompt-column", help=f"default: the first of {', '.join(_PROMPT_COLUMNS)}")
    parser.add_argument("--answer-column", help=f"default: the first of {', '.join(_ANSWER_COLUMNS)}")
    parser.add_argument("--algorithm", choices=ALGORITHMS, help="default: grpo")
    parser.add_argument("--gpus", type=int, help="devices; 0: the CPU. Default: those that are here")
    parser.add_argument("-y", "--yes", action="store_true", help="ask nothing")
    return parser


def _complete(options: argparse.Namespace) -> argparse.Namespace:
    """Ask for what no flag says, where somebody can answer; else the defaults."""
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not options.yes

    def ask(text: str, default: str, choices: Sequence[str] = ()) -> str:
        while asks:
            answer = input(f"{text} [{default}]: ").strip() or default
            if not choices or answer in choices:
                return answer
            print(f"  one of: {', '.join(choices)}")
        return default

    from verl.preflight.machine import cuda_devices

    if options.folder is None:
        options.folder = ask("folder", "my_run")
    if options.data is None:
        given = ask("file of rows to train on (parquet, jsonl, json, csv); empty: additions, made here", "")
        options.data = [given] if given else []
    if options.task is None:
        for name, task in TASKS.items() if asks else ():
            print(f"  {name}: {task.about}")
        options.task = ask("task", "math", list(TASKS))
    if options.gpus is None:
        options.gpus = int(ask("GPUs (0: the CPU)", str(cuda_devices() or 0), [str(number) for number in range(1025)]))
    if options.model is None:
        default = "Qwen/Qwen2.5-0.5B-Instruct" if options.gpus else TINY
        options.model = ask(f"model (folder, hub name, or {TINY} for random weights)", default)
    if options.algorithm is None:
        for name, about in ALGORITHMS.items() if asks else ():
            print(f"  {name}: {about}")
        options.algorithm = ask("algorithm", "grpo", list(ALGORITHMS))
    return options


# -- rows -------------------------------------------------------------------------------------------------------------


def _additions(task: Task, rows: int) -> list[dict[str, Any]]:
    pairs = [(one, other) for one in range(2, 50) for other in range(2, 50)]
    random.Random(0).shuffle(pairs)
    return [_row(f"What is {a} + {b}? {task.instruction}", str(a + b), i) for i, (a, b) in enumerate(pairs[:rows])]


def _row(prompt: Any, answer: Any, number: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    goal = {"style": "rule", "ground_truth": answer}
    return {"data_source": "my_data", "prompt": prompt, "reward_model": goal, "extra_info": {"index": number}}


class Rows(NamedTuple):
    """Rows of a data set: files as they are, or rows that are written to the folder."""

    files: list[str]
    rows: list[dict[str, Any]]


def _read(files: Sequence[str], options: argparse.Namespace) -> Rows:
    """The files, if their columns are those that training reads; else their rows, in these columns.

    Raises:
        ConfigError: no column holds the prompts or the answers.
    """
    from verl.data.files import open_table

    table = open_table(files)
    columns = table.column_names
    if not options.prompt_column and not options.answer_column and {"prompt", "reward_model"} <= set(columns):
        return Rows([_absolute(file) for file in files], [])
    prompt = _column(columns, options.prompt_column, _PROMPT_COLUMNS, "prompts", "--prompt-column")
    answer = _column(columns, options.answer_column, _ANSWER_COLUMNS, "answers", "--answer-column", but=prompt)
    rows = [_row(row.get(prompt), row.get(answer), number) for number, row in enumerate(table)]
    if empty := [i for i, row in enumerate(rows) if not row["prompt"] or row["reward_model"]["ground_truth"] is None]:
        raise ConfigError(
            [f"{table.where(empty[0])} and {len(empty) - 1} more have an empty {prompt} or {answer}. Take them out."]
        )
    return Rows([], rows)


def _column(
    columns: Sequence[str], given: str | None, usual: Sequence[str], what: str, flag: str, but: str | None = None
) -> str:
    found = given if given is not None else next((name for name in usual if name in columns and name != but), None)
    if found is None or found not in columns:
        text = f"{flag}={given} is no column" if given is not None else f"no column for {what} was found"
        raise ConfigError([f"{text}: there are {', '.join(columns)}. Name one by {flag}."])
    return found


# -- the folder -------------------------------------------------------------------------------------------------------


def make_folder(options: argparse.Namespace) -> list[Path]:
    """Write the folder; returns its files.

    Raises:
        ConfigError: a file is there already, the data cannot be used, or what was asked for would be refused.
    """
    folder, task = Path(options.folder).expanduser(), TASKS[options.task]
    names = ["config.yaml", "reward.py", "run.sh", "data"] + [TINY] * (options.model == TINY)
    if there := [name for name in names if (folder / name).exists()]:
        raise ConfigError([f"{folder / there[0]} is there already, and nothing is overwritten. Name another folder."])
    train = _read(options.data, options) if options.data else Rows([], _additions(task, 576))
    val = _read(options.val_data, options) if options.val_data else None
    if val is None:
        held_out = max(0, min(64, max(1, len(train.rows) // 20), len(train.rows) - 1))
        val = Rows([], train.rows[len(train.rows) - held_out :])
        train = Rows(train.files, train.rows[: len(train.rows) - held_out])
    folder.mkdir(parents=True, exist_ok=True)
    texts = {}
    places = {}
    for name, part in (("train", train), ("test", val)):
        places[name] = part.files
        if part.rows:
            places[name] = [f"data/{name}.jsonl"]
            texts[f"data/{name}.jsonl"] = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part.rows)
    texts["reward.py"] = _HEAD.format(about=task.about) + task.code
    texts["config.yaml"] = _config_text(options, places, len(train.rows))
    texts["run.sh"] = _RUN.format(python=shlex.quote(sys.executable or "python3"))
    written = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    if options.model == TINY:
        from verl.utils.tiny_model import make_tiny_model

        make_tiny_model(folder / TINY)
        written.append(folder / TINY)
    _check(folder)
    return written


def _config_text(options: argparse.Namespace, places: Mapping[str, list[str]], rows: int) -> str:
    on_cpu, is_tiny = options.gpus == 0, options.model == TINY
    is_sample = not options.data
    batch = 8 if on_cpu else 64
    if rows:
        batch = max(1, min(batch, rows))
    response = 16 if is_tiny else 64 if on_cpu else 512
    values: dict[str, Any] = {
        "algorithm": options.algorithm,
        "about": ALGORITHMS[options.algorithm],
        "train": json.dumps(places["train"]),
        "val": json.dumps(places["test"]) + ("" if places["test"] else "  # none: nothing is validated"),
        "batch": batch,
        "prompt_length": 128 if is_sample else 512,
        "response_length": response,
        "model": json.dumps(TINY if is_tiny else _absolute(options.model)),
        "packed": "" if on_cpu else _PACKED,
        "strategy": "local" if on_cpu else "fsdp2",
        "tokens": 4096 if on_cpu else 16384,
        "lr": "1.0e-3" if is_tiny else "1.0e-5" if on_cpu else "1.0e-6",
        "critic_lr": "1.0e-3" if is_tiny else "1.0e-5",
        "n": 8 if options.algorithm != "gae" else 1,
        "device": "cpu" if on_cpu else "cuda",
        "devices": options.gpus or 1,
        "controller": "local" if options.gpus <= 1 else "ray",
        "length": "total_training_steps: 20" if is_sample else "total_epochs: 1",
    }
    values["critic"] = _CRITIC.format(**values) if options.algorithm == "gae" else ""
    return _CONFIG.format(**values)


def _absolute(path: str) -> str:
    """The path for a run that is started elsewhere; what is no path here, a name on the hub, stays."""
    here = Path(path).expanduser()
    return str(here.absolute()) if here.exists() else path


def _check(folder: Path) -> None:
    """Compose what was written: a template that is refused is found here."""
    from verl.config.load import load

    if problems := load([], str(folder.absolute()), "config").problems:
        raise ConfigError([problem.text for problem in problems])


@plain_ending()
def main(words: list[str]) -> int:
    """Run ``verl init ...``; returns the exit code."""
    try:
        options = _complete(_parser().parse_args(words))
        written = make_folder(options)
    except (ConfigError, FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print("error: no answer: give flags instead, as `verl init --help` shows them", file=sys.stderr)
        return 2
    for line in _last_words(options, written):
        print(line)
    return 0


def _last_words(options: argparse.Namespace, written: Sequence[Path]) -> Iterator[str]:
    folder = shlex.quote(options.folder)
    yield f"wrote {', '.join(map(str, written))}"
    if options.model == TINY:
        yield f"{options.folder}/{TINY} has random weights, to try the whole path; model.path says which to train."
    yield ""
    yield f"  bash {folder}/run.sh --check    # what it will do, and whether it can"
    yield f"  bash {folder}/run.sh            # train"
