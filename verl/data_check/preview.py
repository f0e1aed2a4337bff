"""What a run would make of its data: rendered prompts, lengths in tokens, rows it could not use, rewards of answers.

:func:`preview` takes a configuration and returns plain data; printing is ``report``'s matter.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.data_check.lengths import Lengths, in_bytes, measure
from verl.data_check.prompts import PromptReader, is_light_folder, read_folder, template_marks
from verl.data_check.rendering import Prompts, processor_of
from verl.data_check.rewards import rewards
from verl.data_check.rows import RowFacts, open_files, prompt_column, read_prompt, walk
from verl.utils.dataset.table import DataError, RowTable
from verl.utils.reward_functions.trial import Trial

__all__ = ["Finding", "Limits", "Preview", "Prompt", "preview"]


@dataclass(frozen=True)
class Limits:
    """How much of the data is looked at closely; every row is looked at for whether it can be used."""

    prompts: int = 3
    """Prompts that are shown."""
    tokens: int | None = 1000
    """Prompts whose tokens are counted, evenly spread; None: all. Those that may be too long are always counted, up to
    this many."""
    scored: int = 64
    """Rows of each data source whose answers are scored; 0: none."""
    patience: float = 10.0
    """Seconds one call of the reward function may take, and a tenth of what those of a data source may take."""
    rows: int | None = None
    """Rows of each file that are looked at, its first; None: all."""
    is_light: bool = False
    """Load neither torch nor transformers, and ask no service and no hub: what would need them is left out, and
    said."""


@dataclass(frozen=True)
class Finding:
    """Something to do about the data."""

    level: str
    """``error``: a run would stop, lose rows or learn nothing. ``warning``: look at it. ``note``: was not looked at."""
    text: str
    keys: tuple[str, ...] = ()
    """Options it is about, the one to blame first."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    where: str
    text: str
    tokens: int | None
    """None without a tokenizer."""


@dataclass
class Preview:
    """All that was found; ``rows`` has the facts of every row."""

    rows: RowFacts
    prompts: list[Prompt] = field(default_factory=list)
    special_tokens: tuple[str, ...] = ()
    lengths: Lengths | None = None
    """None if there are no rows."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column that a run reads -> ``all`` files have it, ``some``, or ``none``."""
    reward: str = ""
    """What scores: the user's functions, or the built-in rules."""
    scores: list[Trial] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_rows(self) -> int:
        return sum(file.rows for file in self.rows.files)

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def error(self, text: str, *keys: str) -> None:
        self.findings.append(Finding("error", text, keys))

    def warn(self, text: str, *keys: str) -> None:
        self.findings.append(Finding("warning", text, keys))

    def note(self, text: str, *keys: str) -> None:
        self.findings.append(Finding("note", text, keys))


def preview(config: Any, files: Sequence[str] | None = None, limits: Limits | None = None) -> Preview:
    """Look at data files as a run of this configuration would read them.

    Args:
        config: the tree of ``verl.config``. Read: ``data``, the tokenizer's place and template under
            ``actor_rollout_ref.model``, ``custom_reward_function``, ``reward_model``.
        files: instead of ``data.train_files`` and ``data.val_files``.
        limits: how much to look at.

    Returns:
        What was found. A file that cannot be read, a row that cannot be used, a reward function that fails are
        findings, not exceptions.
    """
    begin = time.monotonic()
    limits = limits or Limits()
    if files is None:
        files = list(dict.fromkeys(path for paths in config.data.files.values() for path in paths))
    found = Preview(RowFacts())
    table = open_files(files, config.data, found.rows, limits.rows)
    reader = _reader(config, found, limits.is_light)
    walk(table, config.data, found.rows, template_marks(reader))
    _columns(config, table, found)
    _prompts(config, table, reader, found, limits)
    _row_findings(found)
    if limits.scored:
        rewards(config, table, found, limits)
    found.seconds = time.monotonic() - begin
    return found


def _reader(config: Any, found: Preview, is_light: bool) -> PromptReader | None:
    """The tokenizer of the run; a finding if there is none."""
    model = config.actor_rollout_ref.model
    try:
        if is_light and not is_light_folder(config.data.tokenizer or model.path):
            raise ValueError("there is no tokenizer.json at hand")
        reader = read_folder(
            config.data.tokenizer or model.path,
            model.custom_chat_template,
            config.data.apply_chat_template_kwargs,
            config.data.trust_remote_code or model.trust_remote_code,
        )
    except ValueError as error:
        say = found.note if is_light else found.warn
        say(f"There is no tokenizer, so prompts are shown as they stand and counted in bytes: {error}. Give model=DIR.")
        return None
    found.special_tokens = reader.special_tokens
    return reader


def _columns(config: Any, table: RowTable, found: Preview) -> None:
    """Which of the columns that a run reads are there."""
    data = config.data
    prompt_option = "data.messages_key" if data.messages_key else "data.prompt_key"
    wanted = {prompt_column(data): prompt_option, data.reward_fn_key: "data.reward_fn_key", "reward_model": None}
    optional = ("ability", "extra_info", data.image_key, data.video_key, "agent_name")
    for name in (*wanted, *optional):
        have = [name in part.column_names for part in table.tables]
        found.columns[name] = "none" if not any(have) else "all" if all(have) else "some"
    for name, option in wanted.items():
        without = [path for part, path in zip(table.tables, table.names, strict=True) if name not in part.column_names]
        if not without:
            continue
        where = f"{', '.join(without[:3])}{' ...' if len(without) > 3 else ''}"
        has = ", ".join(found.rows.files[table.names.index(without[0])].columns)
        if name == prompt_column(data):
            text = f"{where}: no column {name!r} (there are: {has}). Set {option}, or write the files anew."
            found.error(text, option)
        elif not config.custom_reward_function.path:
            keys, shown = ((option,), f" ({option})") if option else ((), "")
            found.warn(f"{where}: no column {name!r}{shown}, which the built-in reward managers read.", *keys)


def _prompts(config: Any, table: RowTable, reader: PromptReader | None, found: Preview, limits: Limits) -> None:
    """Render the first prompts, and count the tokens of many."""
    data, rows = config.data, found.rows
    if not rows.good:
        return
    shown = rows.good[: limits.prompts]
    if reader is None:
        for position, prompt in zip(shown, table.select(shown).column(prompt_column(data)), strict=True):
            found.prompts.append(Prompt(table.where(position), _plain(read_prompt(prompt, data)), None))
        found.lengths = in_bytes(np.array(rows.sizes))
        return
    prompts = Prompts(table, data, reader, _processor(config, found, limits.is_light))
    try:
        for position, text in zip(shown, prompts.texts(shown), strict=True):
            if isinstance(text, str):
                found.prompts.append(Prompt(table.where(position), text, prompts.lengths([position], [text])[0]))
        found.lengths, refused = measure(
            prompts, data.max_prompt_length, rows.good, np.array(rows.sizes), limits.tokens
        )
    except DataError as error:
        found.error(f"{error}.")
        return
    for position, why in refused:
        rows.refuse(table.where(position), why)
    _length_findings(config, found, limits)


def _processor(config: Any, found: Preview, is_light: bool) -> Any:
    """The model's processor, where rows show something; a finding if it has none."""
    data, model = config.data, config.actor_rollout_ref.model
    columns = [name for name in (data.image_key, data.video_key) if found.columns[name] != "none"]
    if not columns:
        return None
    if is_light:
        found.note(f"Tokens of {' and '.join(map(repr, columns))} are not counted; python -m verl.data_check does.")
        return None
    shown = processor_of(model.path, model.trust_remote_code)
    if shown is None:
        found.warn(f"The model reads text only: {' and '.join(map(repr, columns))} are not shown to it, nor counted.")
    return shown


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m.get('content')}" for m in prompt)


def _length_findings(config: Any, found: Preview, limits: Limits) -> None:
    data, lengths = config.data, found.lengths
    if lengths is None or not lengths.overlong:
        return
    prompts = f"{len(found.rows.good)} prompts" if limits.rows is None else f"the first {len(found.rows.good)} prompts"
    how_many = f"{'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} of {prompts}"
    longer = f"{how_many} exceed data.max_prompt_length={data.max_prompt_length} (the longest: {lengths.longest})"
    key = "data.max_prompt_length"
    if data.filter_overlong_prompts and lengths.overlong == len(found.rows.good):
        found.error(f"{longer}: with data.filter_overlong_prompts=true none of them would be left. Raise it.", key)
    elif data.filter_overlong_prompts:
        found.warn(f"{longer} and will be left out (data.filter_overlong_prompts=true).", key)
    elif data.truncation == "error":
        found.error(
            f"{longer}, and data.truncation=error stops the run. Raise the length, set "
            "data.filter_overlong_prompts=true, or data.truncation to left, right or middle.",
            key,
            "data.truncation",
        )
    else:
        found.warn(f"{longer} and will be cut (data.truncation={data.truncation}).", key, "data.truncation")


def _row_findings(found: Preview) -> None:
    rows = found.rows
    for why in rows.unreadable.values():
        found.error(why)
    for file in rows.files:
        if not file.rows:
            found.error(f"{file.path} holds no rows.")
    if rows.num_bad:
        shown = "; ".join(map(str, rows.bad[:3])) + ("; ..." if rows.num_bad > 3 else "")
        found.error(f"{rows.num_bad} of {found.num_rows} rows cannot be used: {shown}. Correct or remove them.")
    if rows.num_duplicates:
        again, before = rows.first_duplicate
        found.warn(f"{rows.num_duplicates} prompts stood before; the first is {again}, the same as {before}.")
    if rows.marks:
        mark, count = rows.marks.most_common(1)[0]
        found.warn(
            f"{count} prompts have {mark!r} written out, as chat templates write it: the run's own template is put "
            "around that. If the prompts went through a template already, take the messages from before."
        )
