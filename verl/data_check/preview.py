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
from verl.data_check.prompts import PromptReader, read_folder, template_marks
from verl.data_check.rendering import Prompts, processor_of
from verl.data_check.rows import RowFacts, open_files, prompt_column, read_prompt, walk
from verl.data_check.scoring import ScoredRow, SourceScores, reward_function, score_source
from verl.utils.dataset.table import DataError, RowTable

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
    """Seconds one call of the reward function may take."""


@dataclass(frozen=True)
class Finding:
    """Something to do about the data."""

    level: str
    """``error``: a run would stop, lose rows or learn nothing. ``warning``: look at it."""
    text: str


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
    """What scores: the user's function, or the built-in rules."""
    scores: list[SourceScores] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_rows(self) -> int:
        return sum(file.rows for file in self.rows.files)

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def error(self, text: str) -> None:
        self.findings.append(Finding("error", text))

    def warn(self, text: str) -> None:
        self.findings.append(Finding("warning", text))


def preview(config: Any, files: Sequence[str] | None = None, limits: Limits | None = None) -> Preview:
    """Look at data files as a run of this configuration would read them.

    Args:
        config: the tree of ``verl.config``. Read: ``data``, the tokenizer's place and template under
            ``actor_rollout_ref.model``, ``custom_reward_function``, ``reward_model.reward_manager``.
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
    table = open_files(files, config.data, found.rows)
    reader = _reader(config, found)
    walk(table, config.data, found.rows, template_marks(reader))
    _columns(config, table, found)
    _prompts(config, table, reader, found, limits)
    _row_findings(found)
    if limits.scored:
        _rewards(config, table, found, limits)
    found.seconds = time.monotonic() - begin
    return found


def _reader(config: Any, found: Preview) -> PromptReader | None:
    """The tokenizer of the run; a finding if there is none."""
    model = config.actor_rollout_ref.model
    try:
        reader = read_folder(
            config.data.tokenizer or model.path,
            model.custom_chat_template,
            config.data.apply_chat_template_kwargs,
            config.data.trust_remote_code or model.trust_remote_code,
        )
    except ValueError as error:
        found.warn(
            f"There is no tokenizer, so prompts are shown as they stand and counted in bytes: {error}. Give model=DIR."
        )
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
            found.error(f"{where}: no column {name!r} (there are: {has}). Set {option}, or write the files anew.")
        elif not config.custom_reward_function.path:
            option = f" ({option})" if option else ""
            found.warn(f"{where}: no column {name!r}{option}, which the built-in reward managers read.")


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
    prompts = Prompts(table, data, reader, _processor(config, found))
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
    _length_findings(config, found)


def _processor(config: Any, found: Preview) -> Any:
    """The model's processor, where rows show something; a finding if it has none."""
    data, model = config.data, config.actor_rollout_ref.model
    columns = [name for name in (data.image_key, data.video_key) if found.columns[name] != "none"]
    if not columns:
        return None
    shown = processor_of(model.path, model.trust_remote_code)
    if shown is None:
        found.warn(f"The model reads text only: {' and '.join(map(repr, columns))} are not shown to it, nor counted.")
    return shown


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m.get('content')}" for m in prompt)


def _length_findings(config: Any, found: Preview) -> None:
    data, lengths = config.data, found.lengths
    if lengths is None or not lengths.overlong:
        return
    how_many = f"{'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} of {len(found.rows.good)} prompts"
    longer = f"{how_many} exceed data.max_prompt_length={data.max_prompt_length} (the longest: {lengths.longest})"
    if data.filter_overlong_prompts:
        found.warn(f"{longer} and will be left out (data.filter_overlong_prompts=true).")
    elif data.truncation == "error":
        found.error(
            f"{longer}, and data.truncation=error stops the run. Raise the length, set "
            "data.filter_overlong_prompts=true, or data.truncation to left, right or middle."
        )
    else:
        found.warn(f"{longer} and will be cut (data.truncation={data.truncation}).")


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


def _rewards(config: Any, table: RowTable, found: Preview, limits: Limits) -> None:
    """Score right and wrong answers of some rows of each data source."""
    if not found.rows.rows_of:
        return
    if config.reward_model.enable:
        found.warn("Scores of a reward model (reward_model.enable=true) are not tried here; those of functions are.")
    try:
        function, found.reward = reward_function(config)
    except (FileNotFoundError, RuntimeError, AttributeError) as error:
        found.error(f"custom_reward_function: {error}")
        return
    for source, positions in found.rows.rows_of.items():
        chosen = [positions[i] for i in spread(len(positions), limits.scored)]
        rows = [_scored_row(table, position, source) for position in chosen]
        scores = score_source(function, source, rows, found.rows.sources[source], limits.patience)
        found.scores.append(scores)
        errors, warnings = scores.problems()
        if not scores.has_no_scorer:
            for text in errors:
                found.error(text)
            for text in warnings:
                found.warn(text)
    if unknown := [scores.data_source for scores in found.scores if scores.has_no_scorer]:
        shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        found.error(
            f"There is no built-in scorer for {config.data.reward_fn_key}={shown}. Name a function of your own with "
            "custom_reward_function.path, or correct the column."
        )


def _scored_row(table: RowTable, position: int, source: str) -> ScoredRow:
    row = table[position]
    info = row.get("extra_info")
    return ScoredRow(
        table.where(position), source, row["reward_model"]["ground_truth"], info if isinstance(info, dict) else {}
    )


def spread(count: int, wanted: int | None) -> list[int]:
    """At most ``wanted`` of ``count`` positions, evenly spread, the first among them."""
    if wanted is None or count <= wanted:
        return list(range(count))
    return [i * count // wanted for i in range(wanted)]
