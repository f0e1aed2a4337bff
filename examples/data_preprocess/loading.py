"""Where the scripts of this folder get their examples: the Hugging Face hub, or a local folder or file in its layout.

A split is a table of the columns that the hub's data set has; images stay ``{bytes, path}``.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saving import add_output_options, save_splits

from verl.data.table import DataError, RowTable

_SUFFIXES = (".jsonl", ".json", ".parquet")

Example = dict[str, Any]
ToRow = Callable[[Example, str, int], Example | None]
"""(example, split, index) -> row; None leaves the example out."""


@dataclass(frozen=True)
class Hub:
    """A data set of the Hugging Face hub."""

    name: str
    config: str | None = None
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """Name of the split that is written -> name on the hub."""
    columns: tuple[str, ...] = ()
    """What a row has; for messages."""
    also: str = ""
    """Where else the data can be had; for who has no network."""


def make_parser(doc: str, default_folder: str) -> argparse.ArgumentParser:
    """A parser with ``--local_dataset_path`` and the options of :func:`saving.add_output_options`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dataset_path", default=None, help="folder (or file, of a single split) instead of the hub"
    )
    add_output_options(parser, default_folder)
    return parser


def convert(hub: Hub, to_row: ToRow, options: argparse.Namespace) -> None:
    """Load the splits of ``hub``, turn their examples into rows, and write these."""
    splits = load(hub, options.local_dataset_path)
    rows = {split: to_rows(examples, to_row, split, origin, hub.columns) for split, origin, examples in splits}
    save_splits(rows, options.local_save_dir, options.hdfs_dir)


def to_rows(
    examples: Iterable[Example], to_row: ToRow, split: str, origin: str, columns: Sequence[str] = ()
) -> list[Example]:
    """The rows of a split; an example that cannot be used is named with its place.

    Raises:
        DataError: a column is missing, or has not what it should.
    """
    rows = []
    for number, example in enumerate(examples):
        try:
            row = to_row(example, split, len(rows))
        except (KeyError, ValueError, TypeError, IndexError) as error:
            missing = isinstance(error, KeyError)
            what = f"no column {error}; there are {', '.join(example)}" if missing else str(error)
            expected = f"; a row is {{{', '.join(columns)}}}" if columns else ""
            raise DataError(f"{origin}, row {number}: {what}{expected}.") from error
        if row is not None:
            rows.append(row)
    if not rows:
        raise DataError(f"{origin} holds no rows that can be used.")
    return rows


def load(hub: Hub, local_path: str | None) -> Iterator[tuple[str, str, Iterable[Example]]]:
    """(split, where it is from, examples) of each split.

    Raises:
        FileNotFoundError: the local folder holds no file of a split.
        SystemExit: the hub cannot be reached; says how to go on without.
    """
    if local_path is None:
        yield from _from_hub(hub)
        return
    path = Path(local_path).expanduser()
    if (path / "dataset_dict.json").is_file():
        from datasets import load_from_disk

        saved = load_from_disk(str(path))
        for split, theirs in hub.splits.items():
            if theirs not in saved:
                raise FileNotFoundError(f"{path} holds no split {theirs!r}; it holds {', '.join(saved)}.")
            yield split, f"{path}, {theirs}", _examples(saved[theirs])
        return
    for split, theirs in hub.splits.items():
        files = [path] if path.is_file() and len(hub.splits) == 1 else _files_of(path, theirs, hub.config)
        if not files:
            kinds = ", ".join(suffix for suffix in _SUFFIXES if suffix != ".jsonl")
            raise FileNotFoundError(f"--local_dataset_path={path} holds no {theirs}.jsonl (nor {kinds}).")
        yield split, str(files[0] if len(files) == 1 else files[0].parent), RowTable.from_files(list(map(str, files)))


def _files_of(folder: Path, split: str, config: str | None) -> list[Path]:
    """``split.jsonl``, or the pieces ``split-00000-of-00003.parquet``, here or in ``data/`` or the config's folder."""
    for place in (folder, folder / "data", *([folder / config] if config else [])):
        for suffix in _SUFFIXES:
            if (place / f"{split}{suffix}").is_file():
                return [place / f"{split}{suffix}"]
            if pieces := sorted(place.glob(f"{split}-*-of-*{suffix}")):
                return pieces
    return []


def _from_hub(hub: Hub) -> Iterator[tuple[str, str, Iterable[Example]]]:
    from datasets import load_dataset

    try:
        dataset = load_dataset(hub.name, hub.config)
    except (ConnectionError, OSError, ValueError) as error:
        message = " ".join(str(error).split())
        also = f" ({hub.also})" if hub.also else ""
        files = ", ".join(f"{theirs}.jsonl" for theirs in hub.splits.values())
        raise SystemExit(
            f"{hub.name} cannot be loaded from the Hugging Face hub ({type(error).__name__}: {message[:300]}). Without "
            f"network, bring its files here{also} and name their folder with --local_dataset_path: {files} or "
            f".parquet, with the columns {', '.join(hub.columns)}. Where it was downloaded before, HF_HUB_OFFLINE=1 "
            "reads the cache."
        ) from error
    for split, theirs in hub.splits.items():
        yield split, f"{hub.name}, {theirs}", _examples(dataset[theirs])


def _examples(dataset: Any, size: int = 1000) -> Iterator[Example]:
    """Rows of a ``datasets`` split as its file has them: images are not decoded."""
    dataset = dataset.with_format("arrow")
    for start in range(0, len(dataset), size):
        yield from dataset[start : min(start + size, len(dataset))].to_pylist()
