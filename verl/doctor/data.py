"""What the data files say without being read whole: rows and columns; and what is wrong with them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from verl.config.base import Problem, did_you_mean
from verl.config.ppo import PPOConfig

_FIRST_ROWS = 512


@dataclass
class DataFacts:
    """The files of ``data.train_files`` and ``data.val_files``, as far as they are at hand."""

    train_rows: int | None = None
    """None: some file is remote, of another kind, or a class of the user's reads it."""
    columns: dict[str, list[str]] = field(default_factory=dict)
    """File -> its columns."""
    problems: list[Problem] = field(default_factory=list)


def read_data(config: PPOConfig) -> DataFacts:
    """Look into the files; those that are not there are ``verl.config.files``' matter."""
    facts = DataFacts()
    if config.data.custom_cls.path is not None:
        return facts
    rows: dict[str, int | None] = {}
    for key, files in config.data.files.items():
        counts = []
        for path in files:
            file = Path(path).expanduser()
            if "://" in path or not file.is_file():
                counts.append(None)
                continue
            try:
                count, columns = _look(file)
            except (ValueError, OSError) as error:  # pyarrow's errors are ValueErrors
                reason = str(error).splitlines()[0]
                facts.problems.append(
                    Problem(key, f"{key}={path} cannot be read: {reason} Name a file of the format its name says.")
                )
                counts.append(None)
                continue
            counts.append(count)
            facts.columns[path] = columns
            facts.problems += _columns(config, key, path, columns)
        rows[key] = None if None in counts else sum(counts)
    facts.train_rows = rows["data.train_files"]
    facts.problems += _counts(config, rows)
    return facts


def _look(file: Path) -> tuple[int, list[str]]:
    """Rows and columns of a file."""
    if file.suffix.lower() in (".json", ".jsonl"):
        return _look_at_json(file)
    if file.suffix.lower() == ".parquet":
        import pyarrow.parquet as pq

        with pq.ParquetFile(file) as parquet:
            return parquet.metadata.num_rows, parquet.schema_arrow.names
    from verl.utils.dataset.files import read_file

    table = read_file(str(file), bad_rows="skip").table
    return table.num_rows, table.column_names


def _look_at_json(file: Path) -> tuple[int, list[str]]:
    """Records are counted by their lines: few of them are read."""
    with open(file, encoding="utf-8") as stream:
        if stream.read(1) == "[":
            stream.seek(0)
            rows = json.load(stream)
            first, count = rows[:_FIRST_ROWS], len(rows)
        else:
            stream.seek(0)
            lines = filter(str.strip, stream)
            first = [json.loads(line) for line in islice(lines, _FIRST_ROWS)]
            count = len(first) + sum(1 for _ in lines)
    return count, list(dict.fromkeys(name for row in first for name in row))


def _columns(config: PPOConfig, key: str, path: str, columns: list[str]) -> Iterator[Problem]:
    needed = {"data.prompt_key": config.data.prompt_key}
    if not config.reward_model.enable and config.reward_model.reward_manager in ("naive", "batch"):
        needed["data.reward_fn_key"] = config.data.reward_fn_key
        if "reward_model" not in columns and columns:
            yield Problem(
                key,
                f"{key}={path} has no column 'reward_model', whose ground_truth reward_model.reward_manager="
                f"{config.reward_model.reward_manager} hands to the reward function. Write "
                f"{{style: rule, ground_truth: "
                "...} into each row, as examples/data_preprocess does, or use a reward manager of your own.",
                ("reward_model.reward_manager",),
            )
    for option, name in needed.items():
        if name not in columns:
            hint = did_you_mean(name, columns).rstrip("?")
            yield Problem(
                option,
                f"{option}={name} is no column of {path} ({key}){hint}; it has {', '.join(columns) or 'none'}. Name "
                "the column, or write it into the file.",
                (key,),
            )


def _counts(config: PPOConfig, rows: dict[str, int | None]) -> Iterator[Problem]:
    batch = "data.gen_batch_size" if config.data.gen_batch_size else "data.train_batch_size"
    count, prompts = rows["data.train_files"], config.data.prompts_per_step
    if count is not None and count < prompts:
        yield Problem(
            batch,
            f"{batch}={prompts} is larger than the {count} rows of data.train_files: no batch could be filled. Lower "
            "it or add prompts.",
            ("data.train_files",),
        )
    if rows["data.val_files"] == 0 and config.data.has_validation:
        yield Problem("data.val_files", "data.val_files holds no rows. Name a file that does.")
