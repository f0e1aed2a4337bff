"""What a run would make of its data: files, columns, rows it could not use, rendered prompts, lengths, rewards.

:func:`preview` takes a configuration and returns plain data; printing is the matter of ``report`` and ``picture``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.base import did_you_mean, get_path
from verl.config.rollout import SINGLE_TURN, needs_agent_loops
from verl.data.files import CACHE_DIR, hub_parts
from verl.data.table import DataError, RowTable
from verl.data.vision import MediaColumns, mismatched_image_rows, placeholder_mismatch
from verl.preflight.models import ask_hub, can_be_had, close_names, endpoint, is_offline
from verl.preflight.prompts import (
    Lengths,
    PromptReader,
    Prompts,
    in_bytes,
    measure,
    none_fits,
    processor_of,
    read_folder,
    template_marks,
)
from verl.preflight.report import Finding, Level
from verl.preflight.rewards import MANAGERS, scores_of_rows
from verl.preflight.rows import (
    RowFacts,
    look,
    look_at_goals,
    open_files,
    prompt_column,
    prompt_option,
    read_prompt,
    settle,
)
from verl.rewards.functions.trial import Trial

__all__ = ["Limits", "Preview", "Prompt", "preview"]

_IMAGE_ROWS = 64
"""Prompts with images whose tokens are counted."""


@dataclass(frozen=True)
class Limits:
    """How much of the data is looked at closely; every row is looked at for whether it can be used."""

    prompts: int = 3
    """Prompts that are shown."""
    tokens: int | None = 1000
    """Prompts whose tokens are counted, evenly spread; None: all. Those that may be too long are always counted, up to
    this many."""
    scored: int = 4
    """Rows of each data source whose answers are scored; 0: none."""
    patience: float = 2.0
    """Seconds one call of the reward function may take, but for the first, and a tenth of what those of a data source
    may take."""
    rows: int = 10_000
    """Rows of each file that are searched for duplicates, bad images and what a chat template writes."""
    asks_judge: bool = False
    """Whether answers are sent to ``reward_model.judge``."""


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

    rows: RowFacts = field(default_factory=RowFacts)
    prompts: list[Prompt] = field(default_factory=list)
    special_tokens: tuple[str, ...] = ()
    lengths: Lengths | None = None
    """None if there are no rows."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column that a run reads -> ``all`` files have it, ``some``, or ``none``."""
    overlong_of: dict[str, int] = field(default_factory=dict)
    """Option that names files -> prompts of theirs that are too long, of those counted."""
    usable: dict[str, int | None] = field(default_factory=dict)
    """Option that names files -> rows a run would take of them; None: not known."""
    reward: str = ""
    """What scores: the user's functions, or the built-in rules."""
    scores: list[Trial] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def train_rows(self) -> int | None:
        """Rows of an epoch; None: some file is remote, or a class of the user's reads it."""
        return self.usable.get("data.train_files")

    @property
    def num_rows(self) -> int:
        """Rows of all files, those that cannot be used included."""
        return sum(file.rows for file in self.rows.files)

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def say(self, level: Level, text: str, *keys: str) -> None:
        """Note a finding; a text that names none of its options begins with the first."""
        prefix = f"{keys[0]}: " if keys and level != "note" and not any(key in text for key in keys) else ""
        self.findings.append(Finding(level, f"{prefix}{text}", keys))

    def error(self, text: str, *keys: str) -> None:
        """A run would stop, or could not start."""
        self.say("error", text, *keys)

    def warn(self, text: str, *keys: str) -> None:
        """Something to look at."""
        self.say("warning", text, *keys)

    def note(self, text: str, *keys: str) -> None:
        """Something that was not looked at, or is as good as right."""
        self.say("note", text, *keys)


def preview(config: Any, limits: Limits | None = None, has_scorer: bool = True) -> Preview:
    """Look at the data files as a run of this configuration would read them.

    Args:
        config: the tree of ``verl.config``. Read: ``data``, the tokenizer's place and template under
            ``actor_rollout_ref.model``, ``custom_reward_function``, ``reward_model``, the names of agent loops.
        limits: how much to look at.
        has_scorer: False leaves out the reward function, about which something was found already.

    Returns:
        What was found. A file that cannot be read, a row that cannot be used, a reward function that fails are
        findings, not exceptions.
    """
    begin, limits, found = time.monotonic(), limits or Limits(), Preview()
    if config.data.custom_cls.path is not None:
        found.note(f"data.custom_cls.path={config.data.custom_cls.path} reads the data: they are not looked at here.")
        return found
    paths = dict(_paths(config, found))
    table = open_files(list(paths), config.data, found.rows)
    reader = _reader(config, found)
    has_prompts = _columns(config, table, found)
    if has_prompts:
        _rows(config, table, reader, found, limits)
        _prompts(config, table, reader, found, limits)
    _row_findings(config, paths, found, limits)
    _count_usable(config, found)
    if has_scorer and limits.scored:
        scores_of_rows(config, table, found, limits)
    _agents(config, found)
    found.seconds = time.monotonic() - begin
    return found


def _paths(config: Any, found: Preview) -> Iterator[tuple[str, str]]:
    """(path, option) of the files that can be looked at here; others are noted, and ``missing_files`` has the rest."""
    for key, files in config.data.files.items():
        for path in map(str, filter(None, files)):
            if "://" in path:
                found.note(f"{key}={path} is elsewhere: it is not looked at here.", key)
            elif hub_parts(path) is not None:
                if text := _no_hub_data(f"{key}={path}", path, config.data.cache_dir):
                    found.error(text, key)
                else:
                    found.note(f"{key}={path} is a data set of the hub: it is not looked at here.", key)
            elif any(mark in path for mark in "*?[") or os.path.exists(os.path.expanduser(path)):
                yield path, key


def _no_hub_data(shown: str, path: str, cache_dir: str | None) -> str | None:
    """What to say of a name that is neither a file nor a data set of the hub, or of its cache."""
    name = hub_parts(path)[0]
    cached = Path(cache_dir or CACHE_DIR).expanduser() / "hub" / name.replace("/", "___")
    if cached.exists():
        return None
    answer = "HF_HUB_OFFLINE is set" if is_offline() else ask_hub(name, "datasets")
    if answer == "yes" or answer.startswith("HF_") and not os.path.isdir(name.partition("/")[0]):
        return None  # the cache of datasets may lie elsewhere
    why = "has no such data set" if answer == "no" else f"cannot be asked ({answer})"
    return (
        f"{shown} does not exist: there is no such file or folder (looked from {os.getcwd()}){close_names(path)}, and "
        f"{endpoint()} {why}. Give a file, a glob or a folder, or a data set of the hub, openai/gsm8k:main:train."
    )


def _reader(config: Any, found: Preview) -> PromptReader | None:
    """The tokenizer of the run; None if there is none at hand, which ``models`` tells."""
    model = config.actor_rollout_ref.model
    place = config.data.tokenizer or model.path
    try:
        if not can_be_had(place):
            raise ValueError(f"{place} is not at hand")
        reader = read_folder(
            place,
            model.custom_chat_template,
            config.data.apply_chat_template_kwargs,
            config.data.trust_remote_code or model.trust_remote_code,
        )
    except (ValueError, OSError) as error:
        found.note(
            f"There is no tokenizer, so prompts are shown as they stand and counted in bytes: {error}. Give model=DIR."
        )
        return None
    found.special_tokens = reader.special_tokens
    return reader


def _columns(config: Any, table: RowTable, found: Preview) -> bool:
    """Whether all files have the column of prompts; says what else a run would miss."""
    data, rm = config.data, config.reward_model
    wanted = {prompt_column(data): prompt_option(data), data.reward_fn_key: "data.reward_fn_key", "reward_model": ""}
    optional = ("ability", "extra_info", data.image_key, data.video_key, "agent_name")
    for name in (*wanted, *optional):
        have = [name in part.column_names for part in table.tables]
        found.columns[name] = "none" if not any(have) else "all" if all(have) else "some"
    reads_goals = not rm.enable and rm.reward_manager in MANAGERS
    for name, option in wanted.items():
        if option != prompt_option(data) and not reads_goals:
            continue
        for part, path in zip(table.tables, table.names, strict=True):
            if name in part.column_names:
                continue
            key, has = _option_of(config, path, found), ", ".join(part.column_names)
            if option:
                hint = did_you_mean(name, part.column_names).rstrip("?")
                text = f"{option}={name} is no column of {path} ({key}){hint}; it has {has or 'none'}. Name the column"
                found.error(f"{text}, or write it into the file.", option, key)
            else:
                text = (
                    f"{key}={path} has no column 'reward_model', whose ground_truth reward_model.reward_manager="
                    f"{rm.reward_manager} hands to the reward function; it has {has or 'none'}. Write {{style: rule, "
                    "ground_truth: ...} into each row, as examples/data_preprocess does, or use a reward manager of "
                    "your own."
                )
                found.error(text, key, "reward_model.reward_manager")
    return found.columns[prompt_column(data)] == "all" and bool(table.tables)


def _option_of(config: Any, name: str, found: Preview) -> str:
    """The option that names a file."""
    for key, paths in config.data.files.items():
        if any(name in found.rows.keys.get(str(path), (path,)) for path in paths):
            return key
    return "data.train_files"


def _rows(config: Any, table: RowTable, reader: PromptReader | None, found: Preview, limits: Limits) -> None:
    """Find the rows that cannot be used."""
    data, rm = config.data, config.reward_model
    try:
        look(table, data, found.rows, reader and reader.template, template_marks(reader), limits.rows)
    except DataError as error:
        found.error(str(error), prompt_option(data))
    needs_goal = not rm.enable and rm.reward_manager in MANAGERS
    is_ours = not config.custom_reward_function.path and not rm.by_source and not rm.judge.url
    look_at_goals(table, data, found.rows, needs_goal, is_ours)
    try:
        shown = MediaColumns(_processor(config, found), {"image": data.image_key, "video": data.video_key})
        if reader is not None:
            shown.check_supported(table)
    except (DataError, NotImplementedError) as error:
        found.error(str(error), "data.image_key" if "image_key" in str(error) else "data.video_key")
    found.rows.odd |= {**_uneven(table, data), **found.rows.odd}
    settle(table, data, found.rows)


def _uneven(table: RowTable, data: Any) -> dict[int, str]:
    """Position -> what is wrong, of rows with more or fewer placeholders than images or videos."""
    start, found = 0, {}
    for part in table.tables:
        for kind, key in (("image", data.image_key), ("video", data.video_key)):
            if key in part.column_names:
                for row, places, held in mismatched_image_rows(part[prompt_column(data)], part[key], kind):
                    found[start + row] = placeholder_mismatch("", places, held, key, kind).removeprefix(": ")
        start += part.num_rows
    return found


def _processor(config: Any, found: Preview) -> Any:
    """The model's processor, where rows show something."""
    data, model = config.data, config.actor_rollout_ref.model
    if all(found.columns[name] == "none" for name in (data.image_key, data.video_key)):
        return None
    try:
        return processor_of(model.path, model.trust_remote_code)
    except (ImportError, ValueError, OSError) as error:
        found.note(f"Images and videos are not counted: {error}", "data.image_key")
        return None


def _prompts(config: Any, table: RowTable, reader: PromptReader | None, found: Preview, limits: Limits) -> None:
    """Render the first prompts, and count the tokens of many."""
    data, rows = config.data, found.rows
    if not len(rows.good):
        return
    shown = rows.good[: limits.prompts].tolist()
    if reader is None:
        for position, prompt in zip(shown, table.select(shown).column(prompt_column(data)), strict=True):
            found.prompts.append(Prompt(table.where(position), _plain(read_prompt(prompt, data)), None))
        found.lengths = in_bytes(rows.sizes)
        return
    prompts = Prompts(table, data, reader, _processor(config, found))
    wanted = limits.tokens if not prompts.keys or limits.tokens is None else min(limits.tokens, _IMAGE_ROWS)
    try:
        for position, text in zip(shown, prompts.texts(shown), strict=True):
            if isinstance(text, str):
                found.prompts.append(Prompt(table.where(position), text, prompts.lengths([position], [text])[0]))
        found.lengths, known, refused = measure(
            prompts, data.max_prompt_length, rows.good, rows.sizes, wanted, list(rows.kinds.values())
        )
    except DataError as error:
        found.error(f"{error}.", "data.train_files")
        return
    for position, why in refused:
        rows.refuse(table.where(position), why)
    _length_findings(config, table, prompts, found, known)


def _plain(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m.get('content')}" for m in prompt)


def _length_findings(config: Any, table: RowTable, prompts: Prompts, found: Preview, known: dict[int, int]) -> None:
    data, lengths, rows = config.data, found.lengths, found.rows
    if lengths is None or not lengths.overlong:
        return
    how_many = f"{'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} of {len(rows.good)} prompts"
    longer = f"{how_many} exceed data.max_prompt_length={data.max_prompt_length} (the longest: {lengths.longest})"
    key = "data.max_prompt_length"
    names = [name for name, part in zip(table.names, table.tables, strict=True) for _ in range(part.num_rows)]
    places = np.array(names, object)[rows.good]
    for option, paths in config.data.files.items():
        is_mine = np.isin(places, [name for path in paths for name in rows.keys.get(str(path), ())])
        mine = rows.good[is_mine]
        found.overlong_of[option] = sum(known.get(i, 0) > data.max_prompt_length for i in mine.tolist())
        if data.filter_overlong_prompts and none_fits(
            prompts, data.max_prompt_length, mine, rows.sizes[is_mine], known, _IMAGE_ROWS
        ):
            text = f"{longer}: with data.filter_overlong_prompts=true none of {option} would be left. Raise it."
            found.error(text, key, option)
            return
    if data.filter_overlong_prompts:
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


def _row_findings(config: Any, paths: dict[str, str], found: Preview, limits: Limits) -> None:
    rows = found.rows
    for path, why in rows.unreadable.items():
        found.error(why, paths.get(path, "data.train_files"))
    for file in rows.files:
        if not file.rows:
            found.error(f"{file.path} holds no rows.", _option_of(config, file.path, found))
    if rows.num_bad:
        key = _option_of(config, rows.bad[0].file, found)
        shown = "; ".join(map(str, rows.bad[:3])) + ("; ..." if rows.num_bad > 3 else "")
        text = f"{rows.num_bad} of {found.num_rows} rows cannot be used: {shown}."
        whole = next((f for f in rows.files if f.rows and rows.bad_of[f.path] >= f.rows), None)
        if config.data.bad_rows == "skip" and whole is None:
            found.warn(f"{text} They are left out (data.bad_rows=skip).", key, "data.bad_rows")
        else:
            found.error(f"{text} Correct or remove them, or set data.bad_rows=skip to leave them out.", key)
    first = "" if all(file.rows <= limits.rows for file in rows.files) else f" of the first {limits.rows} of each file"
    if rows.num_duplicates:
        again, before = rows.first_duplicate
        found.note(f"{rows.num_duplicates} prompts{first} stood before; the first is {again}, the same as {before}.")
    if rows.without_user:
        found.warn(
            f"{len(rows.without_user)} prompts{first} have no message of a user; the first is {rows.without_user[0]}.",
            prompt_option(config.data),
        )
    if rows.marks:
        mark, count = rows.marks.most_common(1)[0]
        found.warn(
            f"{count} prompts{first} have {mark!r} written out, as chat templates write it: the run's own template is "
            "put around that. If the prompts went through a template already, take the messages from before.",
            prompt_option(config.data),
        )


def _count_usable(config: Any, found: Preview) -> None:
    """Rows that a run would take of each option's files."""
    data, rows = config.data, found.rows
    of = {file.path: file.rows - rows.bad_of[file.path] for file in rows.files}
    for key, paths in data.files.items():
        named = [rows.keys.get(str(path)) for path in paths if path is not None]
        count = None if None in named else sum(of[name] for name in dict.fromkeys(sum(named, [])))
        cap, filters = get_path(config, key.replace("_files", "_max_samples")), data.filter_overlong_prompts
        if count is not None and filters and found.overlong_of.get(key):
            count = count - found.overlong_of[key] if found.lengths.is_overlong_exact and cap < 0 else None
        found.usable[key] = count if count is None or cap < 0 else min(count, cap)


def _agents(config: Any, found: Preview) -> None:
    """Names of agent loops that nobody makes known."""
    rollout, external = config.actor_rollout_ref.rollout, os.environ.get("VERL_USE_EXTERNAL_MODULES")
    if rollout.mode != "async":
        if text := needs_agent_loops(rollout.mode, found.rows.agents):
            found.error(text, "data.train_files", "actor_rollout_ref.rollout.mode")
        return
    if config.actor_rollout_ref.model.external_lib or external:
        return
    known, key, path = {SINGLE_TURN}, "actor_rollout_ref.rollout.agent", rollout.agent.agent_loop_config_path
    if path:
        file = Path(path).expanduser()
        if not file.is_file() or file.suffix not in (".yaml", ".yml"):
            return  # a Python file registers what it likes
        import yaml

        try:
            entries = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            found.error(f"{key}.agent_loop_config_path={path} is no YAML: {reason}.", f"{key}.agent_loop_config_path")
            return
        entries = entries if isinstance(entries, list) else [entries]
        known |= {entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)}
    said = f"known are {', '.join(sorted(known))}. Register yours in the file of {key}.agent_loop_config_path."
    name = rollout.agent.default_agent_loop
    if name not in known:
        hint = did_you_mean(name, sorted(known)).rstrip("?")
        text = f"{key}.default_agent_loop={name} is no known agent loop{hint}; {said}"
        found.error(text, f"{key}.default_agent_loop")
    for name, count in found.rows.agents.items():
        if name not in known:
            hint = did_you_mean(str(name), sorted(known)).rstrip("?")
            found.error(f"agent_name={name!r} of {count} rows is no known agent loop{hint}; {said}", "data.train_files")
