"""Checks of rows when files are read: rows that training cannot use, each with its reason.

Columns are checked with Arrow; only suspicious rows become Python objects. No templates or files here.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from verl.data.table import BadRow, DataError, RowTable, is_json

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles accepted in any conversation; others must appear in the chat template."""

_QUOTED = re.compile(r"""['"]([\w-]+)['"]""")


def known_roles(chat_template: Any) -> set[str]:
    """Return the usual roles and the quoted words of a chat template, which compares its own roles by name."""
    templates = chat_template.values() if isinstance(chat_template, dict) else [chat_template]
    return {*ROLES, *(word for text in templates if isinstance(text, str) for word in _QUOTED.findall(text))}


def parse_messages(prompt: Any) -> Any:
    """Parse messages from JSON text; anything else is returned as it is.

    Raises:
        ValueError: the text is not JSON.
    """
    return json.loads(prompt) if isinstance(prompt, str) else prompt


def why_unusable(prompt: Any, roles: Collection[str], is_messages: bool = False) -> str | None:
    """Return what is wrong with a prompt, or None.

    Args:
        roles: allowed roles of a message.
        is_messages: the prompt must be messages, or their JSON text; else plain text is allowed too.
    """
    if is_messages and isinstance(prompt, str):
        try:
            prompt = json.loads(prompt)
        except ValueError as error:
            return f"is text that is not the JSON of messages: {error}"
        if isinstance(prompt, str):
            return "is a text where messages are expected"
    if prompt is None or isinstance(prompt, float) and math.isnan(prompt):
        return "is null" if prompt is None else "is NaN"
    if isinstance(prompt, str):
        return _why_no_text(prompt)
    if not isinstance(prompt, list | tuple | np.ndarray):
        return f"is {type(prompt).__name__}; a prompt is a text or a list of {{role, content}} messages"
    if not len(prompt):
        return "is an empty list"
    problems = (_why_no_message(message, number, roles) for number, message in enumerate(prompt))
    problem = next(filter(None, problems), None)
    if problem is None and all(
        _is_blank(message.get("content")) and not message.get("tool_calls") for message in prompt
    ):
        return "is empty: no message has a text"
    return problem


def _why_no_text(text: str) -> str | None:
    if not text.strip():
        return "is empty"
    return None if _is_unicode(text) else "is not valid Unicode"


def _why_no_message(message: Any, number: int, roles: Collection[str]) -> str | None:
    if not isinstance(message, dict):
        return f"has {type(message).__name__} as message {number} where {{role, content}} is expected"
    role, content = message.get("role"), message.get("content")
    if role is None:
        return f"has no role in message {number}"
    if not isinstance(role, str) or role not in roles:
        return (
            f"has the role {role!r} in message {number}, which is none of {', '.join(ROLES)} nor of the chat template"
        )
    if content is None:
        return None if message.get("tool_calls") else f"has no content in message {number}"
    if not isinstance(content, str | list):
        return f"has a content of type {type(content).__name__} in message {number}"
    if isinstance(content, str) and not _is_unicode(content):
        return f"is not valid Unicode in message {number}"
    return None


def _is_blank(content: Any) -> bool:
    return not content or isinstance(content, str) and not content.strip()


def _is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8; a lone surrogate, which JSON allows, cannot."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def bad_prompts(table: RowTable, key: str, roles: set[str], option: str, is_messages: bool) -> dict[int, str]:
    """Return position in a table as it was read -> what is wrong with the prompt there.

    Args:
        key: the column of prompts.
        option: the config key that names it.

    Raises:
        DataError: the column of a file is of a type that no prompt has.
    """
    bad: dict[int, str] = {}
    start = 0
    for file, name in zip(table.tables, table.names, strict=True):
        field = file.schema.field(key)
        if not is_json(field):
            _check_type(field.type, name, key, option)
        for batch in file.select([key]).to_batches():
            suspects = np.arange(len(batch)) if is_messages or is_json(field) else _suspects(batch.column(0), roles)
            prompts = batch.column(0).take(pa.array(suspects)).to_pylist() if len(suspects) else []
            for row, prompt in zip(suspects.tolist(), prompts, strict=True):
                prompt = json.loads(prompt) if is_json(field) and prompt is not None else prompt
                if why := why_unusable(prompt, roles, is_messages):
                    bad[start + row] = f"{key!r} ({option}) {why}"
            start += len(batch)
    return bad


def _check_type(kind: pa.DataType, path: str, key: str, option: str) -> None:
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_null(kind) or _is_text(text) or pa.types.is_string_view(text):
        return
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_struct(kind.value_type) or pa.types.is_null(kind.value_type)
    ):
        raise DataError(
            f"{path}: column {key!r} is of type {kind}; a prompt is a text or a list of {{role, content}} messages. "
            f"Name the right column with {option} or write the file again."
        )
    if pa.types.is_null(kind.value_type):
        return
    fields = [field.name for field in kind.value_type]
    missing = [name for name in ("role", "content") if name not in fields]
    if missing:
        raise DataError(
            f"{path}: the messages of column {key!r} have no {' and no '.join(missing)}; their fields are "
            f"{', '.join(fields) or 'none'}. A message is {{role, content}}: name the right column with {option} or "
            "write the file again."
        )


def _suspects(column: pa.Array, roles: set[str]) -> np.ndarray:
    """Return the rows of a column of texts or messages that may be bad; every bad row is among them."""
    if pa.types.is_null(column.type) or pa.types.is_null(getattr(column.type, "value_type", pa.int8())):
        return np.arange(len(column))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        return np.flatnonzero(_blank(column)) if _is_text(column.type) else np.arange(len(column))
    messages = pc.list_flatten(column)
    parents = pc.list_parent_indices(column).to_numpy()
    role, content = pc.struct_field(messages, "role"), pc.struct_field(messages, "content")
    if not _is_text(role.type):
        return np.arange(len(column))
    odd = ~_mask(pc.is_in(role, value_set=pa.array(sorted(roles), type=role.type)))
    blank = _blank(content) if _is_text(content.type) else np.ones(len(messages), bool)
    odd |= _mask(pc.is_null(content)) if _is_text(content.type) else True
    texts = np.bincount(parents[~blank], minlength=len(column))
    suspect = texts == 0
    suspect[parents[odd]] = True
    return np.flatnonzero(suspect)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _blank(texts: pa.Array) -> np.ndarray:
    """Return a mask of texts that are null, empty or only space."""
    empty = pc.equal(pc.binary_length(texts), 0)
    return ~_mask(pc.invert(pc.or_(empty, pc.utf8_is_space(texts))))


def _mask(values: pa.Array) -> np.ndarray:
    return pc.fill_null(values, False).to_numpy(zero_copy_only=False).copy()


def bad_ground_truths(table: RowTable) -> dict[int, str]:
    """Return position in a table as it was read -> the reason, of rows whose ``ground_truth`` is NaN."""
    bad: dict[int, str] = {}
    for item, truth in _ground_truths(table):
        if isinstance(truth, float) and math.isnan(truth):
            bad[item] = "'reward_model' has the ground_truth NaN"
    return bad


def _ground_truths(table: RowTable) -> Iterator[tuple[int, Any]]:
    start = 0
    for file in table.tables:
        if "reward_model" in file.column_names:
            field = file.schema.field("reward_model")
            if is_json(field):
                for row, cell in enumerate(file["reward_model"].to_pylist()):
                    value = json.loads(cell) if cell is not None else None
                    yield start + row, value.get("ground_truth") if isinstance(value, dict) else None
            elif pa.types.is_struct(field.type) and field.type.get_field_index("ground_truth") >= 0:
                truths = pc.struct_field(file["reward_model"], "ground_truth")
                if pa.types.is_floating(truths.type):
                    yield from ((start + row, math.nan) for row in np.flatnonzero(_mask(pc.is_nan(truths))).tolist())
        start += file.num_rows


def bad_ids(table: RowTable, key: str) -> dict[int, str]:
    """Return position -> what is wrong with the prompt id there: empty, or repeated."""
    bad: dict[int, str] = {}
    first: dict[str, int] = {}
    for item, value in enumerate(table.column(key)):
        if value is None or isinstance(value, float) and math.isnan(value) or str(value) == "":
            bad[item] = f"{key!r} (data.prompt_id_key) is empty"
        elif (earlier := first.setdefault(str(value), item)) != item:
            bad[item] = f"{key!r} (data.prompt_id_key) is {value!r}, as in {table.where(earlier)}"
    return bad


def long_ids(table: RowTable, key: str, limit: int, encode: Callable[[list[str]], list[list[int]]]) -> dict[int, str]:
    """Return position -> the reason, of prompt ids with more than ``limit`` tokens."""
    lengths = (len(encode([str(value)])[0]) for value in table.column(key))
    rule = f"tokens, more than data.max_prompt_id_length={limit}"
    return {item: f"{key!r} has {length} {rule}" for item, length in enumerate(lengths) if length > limit}


def first_bad_rows(bad: Sequence[BadRow], count: int = 5) -> str:
    """Return the first bad rows with their reasons, for a message."""
    first = "; ".join(f"{row.where}: {row.why}" for row in bad[:count])
    return f"{first}{'; ...' if len(bad) > count else ''}"


def refuse(table: RowTable, bad: Mapping[int, str]) -> RowTable:
    """Return the table if none of its rows is bad.

    Raises:
        DataError: some rows are bad; lists the first.
    """
    if not bad:
        return table
    first = first_bad_rows([BadRow(table.where(item), why) for item, why in sorted(bad.items())])
    raise DataError(
        f"{len(bad)} of {len(table)} rows cannot be used ({first}). Rows count from 0. Correct or remove them, or set "
        "data.bad_rows=skip to leave them out."
    )


def leave_out(table: RowTable, bad: Mapping[int, str]) -> RowTable:
    """Return the rows that are not bad; the others are added to ``skipped``.

    Raises:
        DataError: none is left.
    """
    if bad and len(bad) == len(table):
        first = first_bad_rows([BadRow(table.where(item), why) for item, why in sorted(bad.items())])
        raise DataError(f"data.bad_rows=skip leaves none of {len(table)} rows ({first}). Correct the files.")
    return table.without(dict(bad)) if bad else table
