"""Rows of ROLL's shape (``tag``, ``domain``, ``ground_truth``, ``test_cases``, ...) in the standard columns."""

import fnmatch
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from verl.data.readers import table_in_memory
from verl.data.table import DataError, RowTable

logger = logging.getLogger(__name__)

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
    tables, numbers, left_out = [], [], Counter()
    start = 0
    for file, known in zip(table.tables, table.row_numbers, strict=True):
        block = range(start, start + file.num_rows)
        start += file.num_rows
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
    if checks := [case["assert_code"] for case in cases if isinstance(case, Mapping) and case.get("assert_code")]:
        return json.dumps({"test_list": [_with_calls(check) for check in checks]})
    pairs = [(case.get("stdin", case.get("input")), case.get("expected_stdout", case.get("output"))) for case in cases]
    tests: dict[str, Any] = {"inputs": [stdin for stdin, _ in pairs], "outputs": [stdout for _, stdout in pairs]}
    name = row.get("test_case_function")
    return json.dumps(tests | ({"fn_name": name} if name and name != "None" else {}))


def _with_calls(check: str) -> str:
    """Return pytest functions together with the calls that run them."""
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
