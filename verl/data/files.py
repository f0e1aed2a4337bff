"""Open data files as one table of rows: paths, lists, globs, folders, remote paths, Hugging Face datasets.

    table = open_table(["train.jsonl", "more/*.parquet"])
    len(table), table[0], table.where(0)

The format follows from the file extension; the meaning of columns is defined elsewhere (``rl_dataset.py``).
"""

import fnmatch
import glob
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from verl.data.readers import (
    IN_MEMORY,
    csv_records,
    json_records,
    mapped_copy,
    read_arrow,
    read_parquet,
    saved_dataset_files,
    table_in_memory,
    write_arrow,
)
from verl.data.table import BadRow, DataError, FileTable, RowTable
from verl.utils.fs import copy_to_local, is_non_local, list_remote

logger = logging.getLogger(__name__)


CACHE_DIR = "~/.cache/verl/rlhf"


FORMATS = {".parquet": "parquet", ".arrow": "Arrow", ".json": "JSON", ".jsonl": "JSON lines", ".csv": "CSV"}


"""Extension -> name of the format in messages."""


_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}


_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))??(:(?P<split>[\w.-]+(\[[^\]]*\])?))?")


BadRows = Literal["refuse", "skip"]


def open_table(
    paths: str | Sequence[str],
    *,
    cache_dir: str | None = None,
    use_shm: bool = False,
    bad_rows: BadRows = "refuse",
    rows: int | None = None,
) -> RowTable:
    """Return the rows of all files named by ``paths``, in that order.

    Args:
        paths: one or several of: a file (``.parquet``, ``.arrow``, ``.json``, ``.jsonl``, ``.csv``); a glob; a folder
            of files of one format, or one that ``datasets`` saved; a remote path (``hdfs://``, ``s3://``, ``gs://``,
            ...); a data set of the Hugging Face hub, ``owner/name``, ``owner/name:split`` or
            ``owner/name:config:split``.
        cache_dir: folder for copies of remote and of large files; None: ``~/.cache/verl/rlhf``.
        use_shm: read copies in shared memory.
        bad_rows: ``refuse`` raises at a line that is not a record; ``skip`` leaves it out and lists it in
            ``table.skipped``.
        rows: read only the first rows of each file; None: all.

    Raises:
        FileNotFoundError: a file does not exist.
        DataError: a file is not in the format of its extension; or, with ``refuse``, a line is not a record.
    """
    cache_dir = os.path.expanduser(cache_dir or CACHE_DIR)
    entries = [str(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    # resolved first: a missing file is named before another one is downloaded
    found = [one for path in entries for one in resolve(path)]
    return read_files(found, [localized(path, cache_dir, use_shm) for path in found], cache_dir, bad_rows, rows)


def localized(path: str, cache_dir: str | None = None, use_shm: bool = False) -> str:
    """Return a local copy of a path found by :func:`resolve`; a dataset of the hub stays as it is."""
    if hub_parts(path) is not None or not (use_shm or is_non_local(path)):
        return path
    return copy_to_local(path, cache_dir=os.path.expanduser(cache_dir or CACHE_DIR), use_shm=use_shm)


def read_files(
    names: Sequence[str],
    local: Sequence[str],
    cache_dir: str | None = None,
    bad_rows: BadRows = "refuse",
    rows: int | None = None,
) -> RowTable:
    """Return the rows of local files and hub datasets; ``names`` are used for them in messages."""
    tables = []
    for name, path in zip(names, local, strict=True):
        hub = hub_parts(path)
        read = _hub_table(*hub, cache_dir or CACHE_DIR) if hub else read_file(path, cache_dir, bad_rows, name, rows)
        tables.append(read if rows is None else read._replace(table=read.table.slice(0, rows)))
    return RowTable.of(tables)


def resolve(path: str) -> list[str]:
    """Return the sorted files that one entry of ``data.train_files`` names; a dataset of the hub stays as it is.

    Raises:
        FileNotFoundError: the path does not exist.
        DataError: a glob or folder holds no data files, or files of several formats or splits.
    """
    if is_non_local(path):
        return _resolve_remote(path)
    if hub_parts(path) is not None:
        return [path]
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        saved = saved_dataset_files(path)
        return _in_folder(path, sorted(os.listdir(path))) if saved is None else saved
    # a file may have brackets in its name
    if not os.path.exists(path) and glob.has_magic(path):
        found = sorted(one for one in glob.glob(path, recursive=True) if os.path.isfile(one))
        if not found:
            raise FileNotFoundError(f"Data files {path!r}{_relative(path)}: no file matches. Correct the pattern.")
        return found
    return [path]


def _resolve_remote(path: str) -> list[str]:
    if glob.has_magic(path):
        found = list_remote(path)
        if not found:
            raise FileNotFoundError(f"Data files {path!r}: no file matches. Correct the pattern.")
        return found
    if Path(path).suffix.lower() in FORMATS:
        return [path]
    names = [os.path.basename(one) for one in list_remote(f"{path.rstrip('/')}/*")]
    return _in_folder(path.rstrip("/"), names)


def _in_folder(folder: str, names: Sequence[str]) -> list[str]:
    """Return the data files among the names in a folder; they must be of one format and one split."""
    # hidden files and _SUCCESS marks are no data
    found = [name for name in names if Path(name).suffix.lower() in FORMATS and name[0] not in "._"]
    formats = sorted({Path(name).suffix.lower() for name in found})
    splits = sorted({split for name in found for split in re.split(r"[^a-z]+", Path(name).stem.lower())} & _SPLITS)
    if not found:
        raise DataError(
            f"Data folder {folder!r}{_relative(folder)} holds no file ending in {', '.join(FORMATS)}. Name the folder "
            "of the files."
        )
    if len(formats) > 1 or len(splits) > 1:
        several = " and ".join(splits if len(splits) > 1 else formats)
        examples = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
        raise DataError(
            f"Data folder {folder!r} holds {several} files ({examples}), which would be read as one dataset. "
            f"Name the files to read, or a glob: {folder}/*{formats[0]}."
        )
    return [f"{folder.rstrip('/')}/{name}" for name in found]


def read_file(
    path: str,
    cache_dir: str | None = None,
    bad_rows: BadRows = "refuse",
    name: str | None = None,
    rows: int | None = None,
) -> FileTable:
    """Return the rows of one local file, called ``name`` in messages; large files may return more than ``rows``.

    See :func:`open_table`.
    """
    path = os.path.expanduser(path)
    suffix = _checked_suffix(path)
    cache_dir, name = cache_dir or CACHE_DIR, name or path
    try:
        if suffix == ".parquet":
            return FileTable(read_parquet(path, cache_dir, rows), name)
        if suffix == ".arrow":
            return FileTable(read_arrow(path), name)
        return _read_text(path, suffix, cache_dir, bad_rows, name, rows)
    except DataError:
        raise
    except PermissionError as error:
        raise DataError(f"{path} cannot be read: permission denied. Make it readable for this user.") from error
    # ArrowInvalid is a ValueError, ArrowIOError an OSError; others are only ArrowException
    except (pa.ArrowException, ValueError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as {FORMATS[suffix]}: {error}{_actual_format(path, suffix)}. Write the file again."
        ) from error


def _checked_suffix(path: str) -> str:
    if not os.path.isfile(path):
        kind = "is a folder" if os.path.isdir(path) else "is not a regular file" if os.path.exists(path) else None
        hint = "" if hub_parts(path) is None else "; open_table reads it as a dataset of the Hugging Face hub"
        raise FileNotFoundError(f"Data file {path!r}{_relative(path)} {kind or 'does not exist'}{hint}.")
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise DataError(
            f"{path} has no known format: its extension is {suffix or 'none'!r}. Rename it to match its content, "
            f"{', '.join(f'{end} ({name})' for end, name in FORMATS.items())}, or convert it"
            f"{_actual_format(path, suffix)}."
        )
    if os.path.getsize(path) == 0:
        raise DataError(f"{path} is empty (0 bytes) where {FORMATS[suffix]} was expected. Write the file again.")
    return suffix


def _actual_format(path: str, suffix: str) -> str:
    """Return the format that the first bytes of a file show, for a message, if it is not that of the extension."""
    with open(path, "rb") as file:
        start = file.read(8)
    for mark, kind, ends in (
        (b"PAR1", "parquet", ".parquet"),
        (b"ARROW1", "an Arrow file", ".arrow"),
        (b"\x1f\x8b", "compressed with gzip", ""),
        (b"PK\x03\x04", "a zip archive", ""),
        (b"version ", "a Git LFS pointer: the file itself was not downloaded (git lfs pull)", ""),
    ):
        if start.startswith(mark) and suffix != ends:
            return f" (by its content it is {kind})"
    return ""


def _relative(path: str) -> str:
    return "" if os.path.isabs(path) or is_non_local(path) else f" (relative to {os.getcwd()})"


# text -------------------------------------------------------------------------------------------------------------
def _read_text(path: str, suffix: str, cache_dir: str, bad_rows: BadRows, name: str, first: int | None) -> FileTable:
    skipped: list[tuple[int, BadRow]] = []
    was_read = False

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal was_read
        was_read = True
        for number, record in enumerate(csv_records(path) if suffix == ".csv" else json_records(path, suffix)):
            if record.row is not None:
                yield record.row
            elif bad_rows == "skip":
                skipped.append((number, BadRow(f"{name}, row {number}", f"line {record.line}: {record.why}")))
            else:
                raise DataError(
                    f"{name} cannot be read as {FORMATS[suffix]}: line {record.line} (row {number}): {record.why}. "
                    "Correct the line, or set data.bad_rows=skip to leave such rows out."
                )

    if first is not None or os.path.getsize(path) <= IN_MEMORY:
        table = table_in_memory(islice(rows(), first))
    else:
        table = mapped_copy(path, cache_dir, lambda target: write_arrow(rows(), target), bad_rows)
        if bad_rows == "skip" and not was_read:  # the copy existed; read once more to list the rows it skipped
            for _ in rows():
                pass
    if not skipped:
        return FileTable(table, name)
    # of the rows that are left, their number in the file
    left_out = [number for number, _ in skipped]
    numbers = np.delete(np.arange(table.num_rows + len(left_out)), left_out)
    return FileTable(table, name, numbers, tuple(row for _, row in skipped))


# the hub ----------------------------------------------------------------------------------------------------------
def hub_parts(path: str) -> tuple[str, str | None, str | None] | None:
    """Return (name, config, split) of a dataset of the Hugging Face hub, or None for the path of a file."""
    found = _HUB_NAME.fullmatch(path)
    # data/train.parquet has the form of owner/name, too
    if found is None or Path(found["name"]).suffix.lower() in FORMATS or os.path.exists(path) or path[0] in "./~":
        return None
    return found["name"], found["config"], found["split"]


def _hub_table(name: str, config: str | None, split: str | None, cache_dir: str) -> FileTable:
    """Load a dataset of the hub, or of its cache on this machine, with ``datasets``."""
    import datasets  # 0.8 CPU seconds, so only for datasets of the hub

    label = ":".join(filter(None, (name, config, split)))
    try:
        if split is None:
            # load_dataset without a split returns all of them in a dict
            splits = datasets.get_dataset_split_names(name, config)
            if len(splits) != 1:
                raise DataError(
                    f"{label} has the splits {', '.join(splits)}: name one, as {label}:{splits[0] if splits else 'x'}."
                )
            split = splits[0]
        loaded = datasets.load_dataset(name, config, split=split, cache_dir=os.path.join(cache_dir, "hub"))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        why = " ".join(str(error).split())[:300]
        raise DataError(
            f"{label} is not a file here (relative to {os.getcwd()}), and cannot be loaded as a dataset of the Hugging "
            f"Face hub: {type(error).__name__}: {why}. Check name, config and split (owner/name:config:split) and the "
            "connection, or save it elsewhere with save_to_disk and name that folder."
        ) from error
    # a selection of rows is an index over the table
    return FileTable(loaded.flatten_indices().data.table if loaded._indices else loaded.data.table, label)


# -- Rows of ROLL's shape (``tag``, ``domain``, ``ground_truth``, ``test_cases``, ...) in the standard columns -------


_CODE = ("test_cases", "case_type", "test_case_function")


_READ = ("domain", "ground_truth", "difficulty", "id", "source", "prompt", "messages", "question", *_CODE)


_TEST = re.compile(r"^(?:async\s+)?def\s+(test\w*)\s*\(\s*\)", re.MULTILINE)


_IMPORT = re.compile(r"^\s*(?:from\s+solution\s+import\b|import\s+solution\b).*$", re.MULTILINE)


def in_domains(table: RowTable, domains: Mapping[str, Sequence[str]], key: str) -> RowTable:
    """Return the rows that belong to a domain, in the standard columns; the others are left out and counted in the log.

    The column ``key`` becomes ``domain/value``. A row belongs to the domain its column ``domain`` names, else to the
    first that lists its value of ``key``, by name before by pattern. Where a file lacks them, ``reward_model`` is made
    of ``ground_truth`` or of the tests in ``test_cases``, and ``extra_info`` of ``id``, ``source``, ``difficulty`` and
    the question.

    Args:
        table: as it was read, no row left out.
        domains: domain -> values, or patterns such as ``aime*``.
        key: the column of the tag or data source; in a file without it ``data_source`` is read.

    Raises:
        DataError: no row belongs to a domain.
    """
    tables, numbers = [], []
    left_out: Counter[str] = Counter()
    start = 0
    for file, known in zip(table.tables, table.row_numbers, strict=True):
        block = range(start, start + file.num_rows)
        start += file.num_rows
        # files of one run may come from several sources
        column = key if key in file.column_names else "data_source"
        sources = _sources(table, block, column, domains, left_out)
        keep = np.flatnonzero([source is not None for source in sources])
        made = table_in_memory(_standard(table, block, sources, key, file.column_names))
        kept = file.drop_columns([name for name in made.column_names if name in file.column_names])
        for name, field in zip(made.column_names, made.schema, strict=True):
            kept = kept.append_column(field, made[name])
        tables.append(kept.take(pa.array(keep)) if len(keep) < file.num_rows else kept)
        numbers.append(keep if known is None else known[keep])
    if left_out:
        examples = ", ".join(f"{count} of {tag!r}" for tag, count in left_out.most_common(5))
        text = (
            f"{sum(left_out.values())} of {start} rows belong to no domain of data.domains={dict(domains)}: {examples}"
        )
        if not any(len(keep) for keep in numbers):
            raise DataError(f"{text}. List their {key} (data.reward_fn_key) below a domain; '*' takes all.")
        logger.warning("%s. They are left out.", text)
    return RowTable(tables, table.names, numbers, table.skipped)


def _sources(
    table: RowTable, block: range, key: str, domains: Mapping[str, Sequence[str]], left_out: Counter
) -> list[str | None]:
    """Return ``domain/tag`` of each row, or None if it belongs to no domain."""
    by_name = {name: domain for domain, names in domains.items() for name in names if "*" not in name}
    patterns = [(name, domain) for domain, names in domains.items() for name in names if "*" in name]
    sources: list[str | None] = []
    for part in _parts(block):
        for row in table.rows(part, [key, "domain"]):
            tag, own = row.get(key), row.get("domain")
            # names before patterns: '*' takes what is left
            domain = own if own in domains else by_name.get(str(tag))
            if domain is None:
                domain = next((of for name, of in patterns if fnmatch.fnmatchcase(str(tag), name)), None)
            if domain is None:
                left_out[str(own or tag)] += 1
            sources.append(None if domain is None else domain if tag is None else f"{domain}/{tag}")
    return sources


def _standard(
    table: RowTable, block: range, sources: Sequence[str | None], key: str, columns: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the columns made from those of ROLL, row by row."""
    for part in _parts(block):
        for row, source in zip(table.rows(part, _READ), sources[part.start - block.start :], strict=False):
            made: dict[str, Any] = {key: source}
            if "reward_model" not in columns:
                made["reward_model"] = {"style": "rule", "ground_truth": _ground_truth(row)}
            if "extra_info" not in columns:
                made["extra_info"] = {
                    "id": _text(row.get("id")),
                    "source": _text(row.get("source")),
                    "question": _question(row),
                }
            if "difficulty" in columns:
                made["difficulty"] = _number(row["difficulty"])
            yield made


def _parts(block: range, size: int = 1000) -> list[range]:
    return [range(begin, min(begin + size, block.stop)) for begin in range(block.start, block.stop, size)]


def _ground_truth(row: Mapping[str, Any]) -> str:
    """Return the ground truth as text; for a programming task, its tests as JSON."""
    cases = _json(row.get("test_cases"))
    if not isinstance(cases, list) or not cases:
        truth = row.get("ground_truth")
        return "" if truth is None else truth if isinstance(truth, str) else json.dumps(truth)
    # asserts are run as they are; stdin and stdout are compared
    if checks := [case["assert_code"] for case in cases if isinstance(case, Mapping) and case.get("assert_code")]:
        return json.dumps({"test_list": [_with_calls(check) for check in checks]})
    pairs = [(case.get("stdin", case.get("input")), case.get("expected_stdout", case.get("output"))) for case in cases]
    tests: dict[str, Any] = {"inputs": [stdin for stdin, _ in pairs], "outputs": [stdout for _, stdout in pairs]}
    name = row.get("test_case_function")
    return json.dumps(tests | ({"fn_name": name} if name and name != "None" else {}))


def _with_calls(check: str) -> str:
    """Return pytest functions together with the calls that run them."""
    # the solution stands in the same file as its tests
    check = _IMPORT.sub("", check)
    return "\n".join([check, *(f"{name}()" for name in _TEST.findall(check))])


def _question(row: Mapping[str, Any]) -> str | None:
    """Return the question a judge reads: the column ``question``, or the text of the last user message."""
    if isinstance(row.get("question"), str):
        return row["question"]
    for name in ("messages", "prompt"):
        messages = _json(row.get(name))
        messages = messages if isinstance(messages, list) else []
        contents = [one.get("content") for one in messages if isinstance(one, Mapping) and one.get("role") == "user"]
        if contents and isinstance(contents[-1], str):
            return contents[-1]
    return row["prompt"] if isinstance(row.get("prompt"), str) else None


def _json(value: Any) -> Any:
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _number(value: Any) -> float | None:
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
