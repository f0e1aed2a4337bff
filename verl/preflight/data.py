"""Preview of the data of a run: files, columns, unusable rows, rendered prompts, lengths, rewards.

:func:`preview` takes a configuration and returns plain data; ``report.py`` prints it. The reward function runs in the
sandbox of a run: if it hangs, exits or crashes, a process is lost and the row is named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partialmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.base import did_you_mean, get_path
from verl.config.ppo import PPOConfig
from verl.config.rollout import loops_may_reward
from verl.data.files import hub_parts
from verl.data.table import DataError, RowTable
from verl.data.vision import ImagePrompts, MediaColumns, mismatched_rows
from verl.preflight.agents import check_agents, check_users, shown_tools
from verl.preflight.models import is_available, missing_dataset
from verl.preflight.report import Finding, Level
from verl.preflight.rows import (
    Lengths,
    Prompts,
    RowStatistics,
    check_ground_truths,
    check_prompts,
    evenly_spaced,
    finish_checks,
    load_tokenizer,
    open_files,
    processor_of,
    prompt_column,
    prompt_option,
    read_prompt,
    special_tokens,
)
from verl.rewards.functions import calling
from verl.rewards.functions.trial import Trial, TrialRow, try_function
from verl.rewards.scorers import SOURCES, built_in_options
from verl.sandbox.outcomes import Outcome
from verl.sandbox.pool import SlowStart
from verl.utils.py_functional import convert_to_regular_types, nearest_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


__all__ = ["Limits", "Preview", "Prompt", "preview"]

MANAGERS = ("naive", "prime", "dapo", "batch")
"""Reward managers whose calls of a function are reproduced here."""

_IMAGE_ROWS = 64
"""Most prompts with images whose tokens are counted."""
_FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")
_START_S = 30.0
"""Timeout in seconds of loading the file of a reward function; a slower one is not tried."""
_LONGEST_S = 30.0
"""Seconds after which the rewards of no further data source are tried."""


@dataclass(frozen=True)
class Limits:
    """Limits of the closer checks; whether a row can be used is checked for every row."""

    prompts: int = 3
    """Prompts to print."""
    tokens: int | None = 1000
    """Prompts whose tokens are counted, evenly spaced; None: all. Prompts that may be too long are counted in addition,
    up to this many."""
    scored: int = 4
    """Rows of each data source with answers to score; 0: none."""
    patience: float = 2.0
    """Timeout in seconds of a call of the reward function, except the first; all calls of a data source may take ten
    times as long."""
    rows: int = 10_000
    """Rows of each file that are searched for duplicates, bad images and chat template markers."""
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
    """Result of :func:`preview`."""

    rows: RowStatistics = field(default_factory=RowStatistics)
    prompts: list[Prompt] = field(default_factory=list)
    special_tokens: tuple[str, ...] = ()
    lengths: Lengths | None = None
    """None if there are no rows."""
    columns: dict[str, str] = field(default_factory=dict)
    """Column that a run reads -> whether ``all``, ``some`` or ``none`` of the files have it."""
    overlong_of: dict[str, int] = field(default_factory=dict)
    """Option that names files -> overlong prompts in them, of those counted."""
    usable: dict[str, int | None] = field(default_factory=dict)
    """Option that names files -> rows a run would use; None: not known."""
    reward: str = ""
    """Name of the reward functions: user-defined, or the built-in rules."""
    scores: list[Trial] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def train_rows(self) -> int | None:
        """Rows of an epoch; None if a file is remote or read by a user-defined class."""
        return self.usable.get("data.train_files")

    @property
    def num_rows(self) -> int:
        """Rows of all files, including unusable ones."""
        return sum(file.rows for file in self.rows.files)

    @property
    def has_errors(self) -> bool:
        return any(finding.level == "error" for finding in self.findings)

    def add(self, level: Level, text: str, *keys: str) -> None:
        """Add a finding; a text that names none of its options is prefixed with the first."""
        prefix = f"{keys[0]}: " if keys and level != "note" and not any(key in text for key in keys) else ""
        self.findings.append(Finding(level, f"{prefix}{text}", keys))

    error = partialmethod(add, "error")
    """Add an error: a run would stop, or could not start."""
    warn = partialmethod(add, "warning")
    note = partialmethod(add, "note")
    """Add a note: something not checked, or harmless."""


def preview(config: PPOConfig, limits: Limits | None = None, has_scorer: bool = True) -> Preview:
    """Read the data files as a run of this configuration would.

    A file that cannot be read, a row that cannot be used, a reward function that fails are findings, not exceptions.

    Args:
        config: the configuration. Used: ``data``, the tokenizer and template of ``actor_rollout_ref.model``,
            ``custom_reward_function``, ``reward_model``, the names of agent loops.
        has_scorer: False does not call the reward function, for which there are errors already.
    """
    begin, limits, found = time.monotonic(), limits or Limits(), Preview()
    if config.data.custom_cls.path is not None:
        found.note(f"data.custom_cls.path={config.data.custom_cls.path} reads the data, which is not checked here.")
        return found
    if config.env.makes_rows:
        found.note("rows are environment groups (env.train.tags): no data files are read.", "env.train.tags")
        return found
    # a file named by both options is read once, for the second
    paths = dict(_paths(config, found))
    table = open_files(list(paths), config.data, found.rows)
    tokenizer = _tokenizer(config, found)
    if _columns(config, table, found):
        processor = _processor(config, found)
        _rows(config, table, tokenizer, processor, found, limits)
        if len(found.rows.good):
            _prompts(config, table, tokenizer, processor, found, limits)
    _row_findings(config, paths, found, limits)
    _count_usable(config, found)
    if has_scorer and limits.scored:
        _rewards(config, table, found, limits)
    check_agents(config, found)
    check_users(config, found)
    found.seconds = time.monotonic() - begin
    return found


def _paths(config: PPOConfig, found: Preview) -> Iterator[tuple[str, str]]:
    """Yield (path, option) of local files; remote ones get a note, missing ones are errors of ``missing_files``."""
    for key, files in config.data.files.items():
        for path in map(str, filter(None, files)):
            if "://" in path:
                found.note(f"{key}={path} is remote: it is not checked here.", key)
            elif hub_parts(path) is not None:
                if text := missing_dataset(f"{key}={path}", path, config.data.cache_dir):
                    found.error(text, key)
                else:
                    found.note(f"{key}={path} is a dataset of the hub: it is not checked here.", key)
            # a glob that matches nothing becomes an error when it is opened
            elif any(mark in path for mark in "*?[") or os.path.exists(os.path.expanduser(path)):
                yield path, key


def _tokenizer(config: PPOConfig, found: Preview) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the run, or None if it is not available, which ``models`` reports."""
    data, model = config.data, config.actor_rollout_ref.model
    path = data.tokenizer or model.path
    try:
        if not is_available(path):
            raise ValueError(f"{path} is not available")
        trusts = data.trust_remote_code or model.trust_remote_code
        tokenizer = load_tokenizer(path, model.custom_chat_template, trusts)
    except (ValueError, OSError) as error:
        why = str(error).rstrip(".")
        found.note(
            f"There is no tokenizer, so prompts are printed unrendered and counted in bytes: {why}. Give model=DIR."
        )
        return None
    found.special_tokens = special_tokens(tokenizer)
    return tokenizer


def _needs_truth(config: PPOConfig) -> bool:
    """Whether a function is called with the ground truths of the rows."""
    return not config.reward_model.enable and config.reward_model.reward_manager in MANAGERS


def _columns(config: PPOConfig, table: RowTable, found: Preview) -> bool:
    """Return whether all files have the prompt column; add findings about all missing columns."""
    data, manager = config.data, config.reward_model.reward_manager
    required = {prompt_column(data): prompt_option(data), data.reward_fn_key: "data.reward_fn_key", "reward_model": ""}
    for name in (*required, "ability", "extra_info", data.image_key, data.video_key, "agent_name"):
        have = [name in part.column_names for part in table.tables]
        found.columns[name] = "none" if not any(have) else "all" if all(have) else "some"
    # a manager of the user's may read any columns
    if not _needs_truth(config):
        required = {prompt_column(data): prompt_option(data)}
    for name, option in required.items():
        for part, path in zip(table.tables, table.names, strict=True):
            if name in part.column_names:
                continue
            key, has = _option_of(config, path, found), ", ".join(part.column_names) or "none"
            if option:
                hint = did_you_mean(name, part.column_names).rstrip("?")
                text = f"{option}={name} is not a column of {path} ({key}){hint}; it has {has}."
                found.error(f"{text} Name the column, or write it into the file.", option, key)
            else:
                found.error(
                    f"{key}={path} has no column 'reward_model', whose ground_truth reward_model.reward_manager="
                    f"{manager} hands to the reward function; it has {has}. Write {{style: rule, ground_truth: ...}} "
                    "into each row, as examples/data_preprocess does, or use a reward manager of your own.",
                    key,
                    "reward_model.reward_manager",
                )
    return found.columns[prompt_column(data)] == "all" and bool(table.tables)


def _option_of(config: PPOConfig, name: str, found: Preview) -> str:
    """Return the option that names a file."""
    for key, paths in config.data.files.items():
        if any(name in found.rows.keys.get(str(path), (path,)) for path in paths):
            return key
    return "data.train_files"


def _processor(config: PPOConfig, found: Preview) -> ImagePrompts | None:
    """Return the model's processor if rows have images or videos."""
    data, model = config.data, config.actor_rollout_ref.model
    if all(found.columns[name] == "none" for name in (data.image_key, data.video_key)):
        return None
    try:
        return processor_of(model.path, model.trust_remote_code)
    except (ImportError, ValueError, OSError) as error:
        found.note(f"Images and videos are not counted: {error}", "data.image_key")
        return None


def _rows(
    config: PPOConfig,
    table: RowTable,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: ImagePrompts | None,
    found: Preview,
    limits: Limits,
) -> None:
    """Find the rows that cannot be used."""
    data, rm, rows = config.data, config.reward_model, found.rows
    try:
        check_prompts(table, data, rows, tokenizer, limits.rows)
    except DataError as error:
        found.error(str(error), prompt_option(data))
    is_built_in = not config.custom_reward_function.path and not rm.by_source and not rm.judge.url
    check_ground_truths(table, data, rows, _needs_truth(config), is_built_in)
    columns = {"image": data.image_key, "video": data.video_key}
    try:
        # without a tokenizer the model is not there either: its processor is not missing but unknown
        if tokenizer is not None:
            MediaColumns(processor, columns).check_supported(table)
    except (DataError, NotImplementedError) as error:
        found.error(str(error), "data.image_key" if "image_key" in str(error) else "data.video_key")
    for position, why in mismatched_rows(table, prompt_column(data), columns):
        rows.bad_positions.setdefault(position, why)
    # last: only then are all bad rows known
    finish_checks(table, data, rows)


def _prompts(
    config: PPOConfig,
    table: RowTable,
    tokenizer: PreTrainedTokenizerBase | None,
    processor: ImagePrompts | None,
    found: Preview,
    limits: Limits,
) -> None:
    """Render the first prompts, and count the tokens of many."""
    data, rows = config.data, found.rows
    first = rows.good[: limits.prompts]
    if tokenizer is None:
        for position, value in zip(first.tolist(), table.select(first).column(prompt_column(data)), strict=True):
            prompt = read_prompt(value, data)
            lines = [prompt] if isinstance(prompt, str) else [f"{m['role']}: {m.get('content')}" for m in prompt]
            found.prompts.append(Prompt(table.where(position), "\n".join(lines), None))
        found.lengths = Lengths.of("bytes", rows.sizes, int(rows.sizes.max()))
        return
    prompts = Prompts(table, data, tokenizer, processor, shown_tools(config, found))
    # counting an image opens it
    num_counted = limits.tokens if not prompts.kinds or limits.tokens is None else min(limits.tokens, _IMAGE_ROWS)
    try:
        found.lengths = prompts.measure(rows.good, rows.sizes, num_counted, list(rows.kinds.values()))
        # after measuring: prompts that are only shown must not count as overlong
        prompts.count(first, rows.sizes[: limits.prompts])
    except DataError as error:
        found.error(f"{str(error).rstrip('.')}.", "data.train_files")
        return
    for position, text in prompts.texts(first.tolist()).items():
        found.prompts.append(Prompt(table.where(position), text, prompts.tokens[position]))
    for position, why in prompts.refused.items():
        rows.refuse(table.where(position), why)
    _length_findings(config, table, prompts, found)


def _length_findings(config: PPOConfig, table: RowTable, prompts: Prompts, found: Preview) -> None:
    data, lengths, rows = config.data, found.lengths, found.rows
    if lengths is None or not lengths.overlong:
        return
    how_many = f"{'' if lengths.is_overlong_exact else 'at least '}{lengths.overlong} of {len(rows.good)} prompts"
    longer = f"{how_many} exceed data.max_prompt_length={data.max_prompt_length} (the longest: {lengths.longest})"
    key = "data.max_prompt_length"
    # file of each good row; train and validation files are judged apart
    names = [name for name, part in zip(table.names, table.tables, strict=True) for _ in range(part.num_rows)]
    files = np.array(names, object)[rows.good]
    for option, paths in data.files.items():
        is_named = np.isin(files, [name for path in paths for name in rows.keys.get(str(path), ())])
        positions = rows.good[is_named]
        tokens = [prompts.tokens.get(position, 0) for position in positions.tolist()]
        found.overlong_of[option] = sum(count > data.max_prompt_length for count in tokens)
        if data.filter_overlong_prompts and prompts.none_fits(positions, rows.sizes[is_named], _IMAGE_ROWS):
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
        found.warn(f"{longer} and will be truncated (data.truncation={data.truncation}).", key, "data.truncation")


def _row_findings(config: PPOConfig, paths: dict[str, str], found: Preview, limits: Limits) -> None:
    rows = found.rows
    for path, why in rows.unreadable.items():
        found.error(why, paths.get(path, "data.train_files"))
    for file in rows.files:
        if not file.rows:
            found.error(f"{file.path} holds no rows.", _option_of(config, file.path, found))
    if rows.num_bad:
        key = _option_of(config, rows.bad[0].file, found)
        examples = "; ".join(map(str, rows.bad[:3])) + ("; ..." if rows.num_bad > 3 else "")
        text = f"{rows.num_bad} of {found.num_rows} rows cannot be used: {examples}."
        # a run stops at a file of which no row is left
        whole = next((f for f in rows.files if f.rows and rows.bad_of[f.path] >= f.rows), None)
        if config.data.bad_rows == "skip" and whole is None:
            found.warn(f"{text} They are left out (data.bad_rows=skip).", key, "data.bad_rows")
        else:
            found.error(f"{text} Correct or remove them, or set data.bad_rows=skip to leave them out.", key)
    first = "" if all(file.rows <= limits.rows for file in rows.files) else f" of the first {limits.rows} of each file"
    if rows.num_duplicates:
        repeated, original = rows.first_duplicate
        found.note(f"{rows.num_duplicates} prompts{first} are repeated; the first is {repeated}, same as {original}.")
    if rows.without_user:
        found.warn(
            f"{len(rows.without_user)} prompts{first} have no user message; the first is {rows.without_user[0]}.",
            prompt_option(config.data),
        )
    if rows.marks:
        mark, count = rows.marks.most_common(1)[0]
        found.warn(
            f"{count} prompts{first} contain {mark!r}, which chat templates write: the run would apply its own "
            "template again. If a template was applied to the prompts already, use the messages from before that.",
            prompt_option(config.data),
        )


def _count_usable(config: PPOConfig, found: Preview) -> None:
    """Count the rows that a run would use of the files of each option."""
    data, rows = config.data, found.rows
    # lines that are no records count as rows of the file, and as bad ones
    of = {file.path: file.rows - rows.bad_of[file.path] for file in rows.files}
    for key, paths in data.files.items():
        named = [rows.keys.get(str(path)) for path in paths if path is not None]
        count = None if None in named else sum(of[name] for name in dict.fromkeys(sum(named, [])))
        cap, filters = get_path(config, key.replace("_files", "_max_samples")), data.filter_overlong_prompts
        # of a sample of the rows it is not known how many are overlong
        if count is not None and filters and found.overlong_of.get(key):
            count = count - found.overlong_of[key] if found.lengths.is_overlong_exact and cap < 0 else None
        found.usable[key] = count if count is None or cap < 0 else min(count, cap)


# -- Rewards: the run's reward function on rows of each data source, with right and wrong answers ----------------------


def _rewards(config: PPOConfig, table: RowTable, found: Preview, limits: Limits) -> None:
    """Try the function on some rows of each data source."""
    rm, begin = config.reward_model, time.monotonic()
    if not config.asks_reward_function:
        found.note("Rewards are those of environments and users (env.reward=environment): no function is tried.")
        return
    if rm.reward_manager not in MANAGERS:
        found.note(f"reward_model.reward_manager={rm.reward_manager} is not tried: it is a user-defined manager.")
        return
    if rm.runs_judge:
        found.note("Scores of a judge that the run starts (reward_model.rollout) are not tried here.")
        return
    if rm.enable:
        found.note("Scores of a reward model (reward_model.enable=true) are not tried here; those of functions are.")
        if not config.custom_reward_function.path:
            return
    reward_kwargs = convert_to_regular_types(rm.reward_kwargs or {})
    reward_kwargs = {key: value for key, value in reward_kwargs.items() if key not in calling.MANAGERS_OWN}
    function = _reward_function(config, reward_kwargs, found)
    if function is None:
        return
    options = built_in_options(rm)
    rewards_itself = config.env.reward == "environment" or loops_may_reward(
        config.actor_rollout_ref.rollout, found.rows.agents
    )
    sources = [] if rm.enable else list(found.rows.sources)
    unscored = [source for source in sources if calling.lacks_scorer(function, source, options)]
    unknown = [] if rewards_itself else unscored
    # --score asks for it in spite of the option
    is_off = rm.self_test == "off" and not limits.asks_judge
    if is_off:
        found.note("The reward function is not tried (reward_model.self_test=off).")
    for source, positions in found.rows.rows_of.items():
        if source in unscored or is_off:
            continue
        if not limits.asks_judge and calling.is_judged(function, source, options):
            found.note(f"data_source={source!r} is scored by the judge, which is not called here.")
            continue
        if time.monotonic() - begin > _LONGEST_S:
            found.note(f"data_source={source!r} and those after it are not tried: scoring takes too long.")
            break
        rows = [_trial_row(table, int(positions[i]), source) for i in evenly_spaced(len(positions), limits.scored)]
        trial = try_function(
            function,
            source,
            rows,
            found.rows.sources[source],
            is_batch=rm.reward_manager == "batch",
            timeout_s=limits.patience,
            seconds=10 * limits.patience,
            reward_kwargs=reward_kwargs,
        )
        found.scores.append(trial)
        _trial_findings(config, function, trial, found)
    if unknown:
        names = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
        # a sample of the rows may not have this source
        level: Level = "error" if rm.on_error == "stop" and config.data.train_max_samples < 0 else "warning"
        positions = found.rows.rows_of.get(unknown[0], np.zeros(0, np.int64))
        first = f" (first: {table.where(int(positions[0]))})" if len(positions) else ""
        found.add(
            level,
            f"There is no built-in scorer for {config.data.reward_fn_key}={names}{first}."
            f"{nearest_name(str(unknown[0]), SOURCES)} Name a function of your own with custom_reward_function.path, "
            "for one source alone with reward_model.by_source, or correct the column (data.reward_fn_key).",
            "data.reward_fn_key",
        )


def _reward_options(config: PPOConfig) -> tuple[str, ...]:
    """Return the options that choose the function."""
    by_source = ("reward_model.by_source",) if config.reward_model.by_source else ()
    return (*(_FUNCTION if config.custom_reward_function.path else ()), *by_source)


def _reward_function(config: PPOConfig, reward_kwargs: Mapping[str, Any], found: Preview) -> calling.RawRewardFn | None:
    """Load the run's function in processes of its own; add a finding if it cannot be loaded or called."""
    section, manager = config.custom_reward_function, config.reward_model.reward_manager
    found.reward = f"{section.path}:{section.name}" if section.path else "built in, by data source"
    parameters = calling.BATCH_PARAMETERS if manager == "batch" else calling.PARAMETERS
    setting = f"custom_reward_function.name={section.name}"
    try:
        # one process is enough for a few answers
        function = calling.reward_function(config, workers=1, start_timeout_s=_START_S)
        for one in calling.functions_of(function):
            calling.check_signature(one, parameters, reward_kwargs, by_place=manager == "prime")
        return function
    # before RuntimeError, of which it is one: a run waits longer
    except SlowStart as error:
        found.warn(f"{setting} was not tried: {error}", *_FUNCTION)
    except (OSError, ImportError, RuntimeError, AttributeError, ValueError) as error:
        found.error(f"{setting} cannot be loaded: {error}", *dict.fromkeys((*_FUNCTION, *_reward_options(config))))
    except TypeError as error:
        found.error(f"reward_model.reward_manager={manager}: {error}", *_FUNCTION)
    return None


def _trial_row(table: RowTable, position: int, source: str) -> TrialRow:
    row = table[position]
    info = row.get("extra_info")
    info = info if isinstance(info, Mapping) else {}
    return TrialRow(table.where(position), source, row["reward_model"]["ground_truth"], info)


def _trial_findings(config: PPOConfig, function: calling.RawRewardFn, trial: Trial, found: Preview) -> None:
    """Add what a trial found: errors if a run would stop at it, else warnings, and notes."""
    rm, options = config.reward_model, _reward_options(config)
    errors, warnings = trial.problems()
    would_stop = rm.self_test == "stop"
    if trial.error:
        # a timeout here is no proof, as a run waits longer
        would_stop = trial.kind is not Outcome.TIMEOUT and rm.on_error == "stop" and not rm.max_errors
    for text in errors:
        if trial.error and trial.kind is not None and would_stop:
            is_own = not calling.is_built_in(calling.function_for(function, trial.data_source))
            key = "/".join(option for option in options if not option.endswith(".name")) if is_own else None
            text += (
                f"\n{calling.way_out_of(trial.kind, key)} If a function fails only on these made-up responses, set "
                "reward_model.self_test=off."
            )
        found.add("error" if would_stop else "warning", text, *options, "data.train_files")
    for text in warnings:
        found.note(text)
