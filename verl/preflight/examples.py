"""Checks of a run that learns from given examples: `verl doctor sft`.

Options, models, machine and memory are checked as those of ``main_ppo`` (``SFTConfig.as_ppo``), and named as they are
called here. Of the examples a sample is tokenized by the dataset of the run: which rows cannot be learned from, what is
learned of a row, and how long rows are.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl.config.base import Problem
from verl.config.checks.batch import counted
from verl.config.load import LoadedConfig
from verl.config.sft import SFTConfig
from verl.data.files import hub_parts
from verl.data.table import DataError
from verl.preflight.checks import add_memory
from verl.preflight.estimates import checkpoint_bytes, memory_plan
from verl.preflight.machine import Machine, missing_devices, missing_packages, room_for_checkpoints
from verl.preflight.models import missing_dataset, missing_models
from verl.preflight.report import Finding, Level, Number, PhaseMemory, Report
from verl.preflight.rows import Lengths, load_tokenizer
from verl.utils.py_functional import excerpt

if TYPE_CHECKING:
    from verl.data.sft_dataset import SFTDataset

_ROWS = 256
"""Rows that are tokenized of each option that names files."""

_PHASES = {"start": "start", "update actor": "update", "checkpoint": "checkpoint"}
"""Phases of main_ppo that a run on examples has too, and what they are called here."""


class Sample(NamedTuple):
    """What a sample of the rows of an option shows."""

    rows: int
    """In all files."""
    looked_at: int
    lengths: np.ndarray
    """Tokens of each row that can be used, before truncation."""
    learned: np.ndarray
    """Tokens learned of each, within ``data.max_length``."""


def examine_examples(loaded: LoadedConfig, machine: Machine) -> Report:
    """Check a configuration of `SFTConfig` that is composed already."""
    config: Any = loaded.config
    report = Report(_findings("error", loaded.problems), config=config, data_title="examples")
    report.findings += [Finding("warning", text) for text in loaded.warnings]
    checks = [missing(config)]
    tree = config.as_ppo()
    if not loaded.problems:
        checks += [config.here(missing_devices(tree, machine)), config.here(missing_packages(tree, machine))]
    for check in checks:
        report.findings += _findings("error", check)
    if loaded.problems:  # of options that contradict each other estimates would make no sense
        return report
    samples = {key: _look(config, key, report) for key in config.data.files}
    train = samples["data.train_files"]
    report.findings += _findings("warning", _advice(config, train))
    report.derivation = list(_derivation(config, train, report))
    found = Report(config=tree)
    found.findings += room_for_checkpoints(tree, checkpoint_bytes(tree))
    add_memory(found, tree, machine, lambda size: _memory(config, size))
    report.memory, report.memory_notes = found.memory, [config.words_here(note) for note in found.memory_notes]
    for level, text, keys in found.findings:
        report.findings.append(Finding(level, config.words_here(text), tuple(map(config.words_here, keys))))
    return report


def missing(config: SFTConfig) -> Iterator[Problem]:
    """Find files and models that the run reads and that are not there, or not whole."""
    yield from config.missing_files()
    yield from config.here(missing_models(config.as_ppo()))
    tokenizer = config.model.tokenizer_path
    if tokenizer and not os.path.isdir(os.path.expanduser(tokenizer)) and tokenizer.startswith(("/", ".", "~")):
        key = "model.tokenizer_path"
        yield Problem(key, f"{key}={tokenizer} is no folder. Name the one with tokenizer.json, or leave it out.")


def _memory(config: SFTConfig, gpu_bytes: int | None) -> list[PhaseMemory]:
    """The memory plan of main_ppo, without what samples and scores."""
    found = []
    for phase in memory_plan(config.as_ppo(), gpu_bytes):
        if phase.phase in _PHASES:
            parts = {name.removeprefix("actor "): size for name, size in phase.parts.items()}
            found.append(PhaseMemory(_PHASES[phase.phase], parts, config.words_here(phase.way_out)))
    return found


# -- the rows --------------------------------------------------------------------------------------------------------


def _look(config: SFTConfig, key: str, report: Report) -> Sample | None:
    """Tokenize a sample of the rows that an option names; None where none can be read here."""
    data, files = config.data, config.data.files[key]

    def note(text: str) -> None:
        report.notes.append(Finding("note", text, (key,)))

    if not files:
        return None
    if data.custom_cls.path:
        note(f"data.custom_cls.path={data.custom_cls.path} reads {key}, which is not checked here.")
        return None
    for path in files:
        if "://" in path or hub_parts(path) is not None:
            where = "remote" if "://" in path else "a dataset of the hub"
            if where != "remote" and (text := missing_dataset(f"{key}={path}", path, data.cache_dir)):
                report.findings.append(Finding("error", text, (key,)))
            else:
                note(f"{key}={path} is {where}: it is not checked here.")
            return None
    try:
        path = config.model.tokenizer_path or config.model.path
        tokenizer = load_tokenizer(path, config.model.custom_chat_template, config.model.trust_remote_code)
    except (ValueError, OSError) as error:
        note(f"There is no tokenizer, so examples are not looked at: {str(error).rstrip('.')}.")
        return None
    from verl.data.sft_dataset import SFTDataset
    from verl.utils.tokenizer import hf_processor

    # rows are refused and cut here, where all of them can be counted
    options = {**data, "bad_rows": "skip", "truncation": "right", "max_length": 1 << 30, "num_workers": 1}
    try:
        trusts = config.model.trust_remote_code
        processor = hf_processor(path, config.model.custom_chat_template, trust_remote_code=trusts)
        dataset = SFTDataset(files, tokenizer, options, _ROWS, processor)
    except (DataError, FileNotFoundError, ImportError) as error:
        if not any(key in finding.keys for finding in report.errors):  # a file that is missing is named already
            report.findings.append(Finding("error", _without_our_options(str(error)), (key,)))
        return None
    return _judge(config, key, dataset, tokenizer, report)


def _without_our_options(text: str) -> str:
    return text.replace("data.bad_rows=skip leaves none of", "none can be learned from, of")


def _judge(config: SFTConfig, key: str, dataset: SFTDataset, tokenizer: Any, report: Report) -> Sample:
    """Say what is wrong with the rows of a sample, and show the first of ``data.train_files``."""
    data, limit, skipped = config.data, config.data.max_length, dataset.dataframe.skipped
    masks = [dataset[item]["loss_mask"].numpy() for item in range(len(dataset))]
    lengths, looked_at = np.array([len(mask) for mask in masks]), len(dataset) + len(skipped)
    of = f"{looked_at:,} rows of {key}" + ("" if looked_at >= dataset.num_rows else " that were looked at")
    if skipped:
        level: Level = "warning" if data.bad_rows == "skip" else "error"
        fate = "They are left out." if data.bad_rows == "skip" else "Correct them, or set data.bad_rows=skip."
        first = f"{skipped[0].where}: {skipped[0].why}".rstrip(".")
        text = f"{len(skipped):,} of {of} cannot be learned from; the first is {first}. {fate}"
        report.findings.append(Finding(level, text, (key, "data.bad_rows")))
    overlong = lengths > limit
    if overlong.any():
        longest = int(lengths.max())
        text = f"data.max_length={limit} is less than the tokens of {int(overlong.sum()):,} of {of}; the longest has "
        text += f"{longest:,}"
        if data.truncation == "error":
            text += ". Raise it, or set data.truncation to left or right to cut them."
            report.findings.append(Finding("error", text, ("data.max_length", key, "data.truncation")))
        else:
            report.notes.append(Finding("note", f"{text}: they are cut (data.truncation={data.truncation}).", (key,)))
    kept = [mask[-limit:] if data.truncation == "left" else mask[:limit] for mask in masks]
    learned = np.array([int(mask.sum()) for mask in kept])
    if (empty := int((learned == 0).sum())) and not (overlong.any() and data.truncation == "error"):
        text = f"{empty:,} of {of} have no token to learn within data.max_length={limit}: they are left out."
        report.findings.append(Finding("warning", text, ("data.max_length", key)))
    texts = {dataset[item]["input_ids"].numpy().tobytes() for item in range(len(dataset))}
    if len(texts) < len(dataset):
        report.notes.append(Finding("note", f"{len(dataset) - len(texts):,} of {of} are repeated.", (key,)))
    if key == "data.train_files":
        report.preview += _shown(dataset[0]["input_ids"].numpy(), masks[0], tokenizer)
        report.preview += _histogram(lengths, limit)
    return Sample(dataset.num_rows, looked_at, lengths, learned)


def _shown(ids: np.ndarray, mask: np.ndarray, tokenizer: Any) -> list[str]:
    """An example, each stretch of it with whether it is learned."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    lines = []
    for start, end in zip(edges, edges[1:], strict=False):
        text = excerpt(tokenizer.decode(ids[start:end].tolist()), 160)
        lines.append(f"  {'learned' if mask[start] else 'shown'.ljust(7)} {text}")
    return lines[:8] + ([f"  ... {len(lines) - 8} more parts"] if len(lines) > 8 else [])


def _histogram(lengths: np.ndarray, limit: int) -> list[str]:
    found = Lengths.of("tokens", lengths, int(lengths.max()))
    tallest = max(count for *_, count in found.histogram)
    lines = [f"  tokens of {found.counted} examples (data.max_length={limit})"]
    for start, end, count in found.histogram:
        if count:
            lines.append(f"  {start:>6} to {end - 1:<6} {'#' * max(1, 40 * count // tallest)} {count}")
    return lines


# -- the arithmetic --------------------------------------------------------------------------------------------------


def _derivation(config: SFTConfig, train: Sample | None, report: Report) -> Iterator[Number]:
    """Yield the numbers of a step and of the run, each with the options that it depends on."""
    data, trainer = config.data, config.trainer
    size, world = data.train_batch_size, trainer.world_size
    sp = config.engine.ulysses_sequence_parallel_size
    workers = ("trainer.nnodes", "trainer.n_gpus_per_node")
    yield Number("examples", size, f"{counted(size, 'example')} a step", ("data.train_batch_size",))
    ranks = world // sp
    text = f"{counted(world, 'rank')} / {sp} to a sequence = {counted(ranks, 'data-parallel rank')}"
    text += f" on {trainer.device}; {config.engine.strategy}"
    yield Number("ranks", ranks, text, (*workers, "engine.ulysses_sequence_parallel_size"))
    rows = -(-size // ranks)
    if data.use_dynamic_bsz:
        key, budget = "data.max_token_len_per_gpu", data.token_budget * sp
        text = f"{counted(rows, 'example')} a rank, in micro-batches of up to {budget:,} tokens"
        if train is not None and len(train.lengths):
            mean = float(np.minimum(train.lengths, data.max_length).mean())
            count = max(1, round(rows * mean / budget + 0.49))
            text += f": about {count:,} of them, at {mean:.0f} tokens an example"
    else:
        key, each = "data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu
        text = f"{counted(rows, 'example')} a rank / {each} = {-(-rows // each):,} micro-batches"
    yield Number("micro-batches", rows, text, (key, "data.train_batch_size"))
    if train is None:
        return
    if len(train.lengths):
        share = float(train.learned.sum()) / max(1, int(np.minimum(train.lengths, data.max_length).sum()))
        text = f"{share:.0%} of the tokens are learned, {float(train.learned.mean()):.0f} of an example"
        yield Number("learned", share, text, ("data.train_files",))
    rows = train.rows if data.train_max_samples < 0 else min(train.rows, data.train_max_samples)
    steps = rows // size
    if not steps:
        text = f"data.train_batch_size={size} is larger than the {rows:,} rows of data.train_files: no batch could be "
        report.findings.append(Finding("error", f"{text}filled. Lower it or add examples.", ("data.train_batch_size",)))
        return
    yield Number("epoch", steps, f"{rows:,} rows / {size} = {counted(steps, 'step')} an epoch", ("data.train_files",))
    total, key = trainer.total_training_steps, "trainer.total_training_steps"
    if total:
        text = f"{counted(total, 'step')}, {total / steps:.2g} epochs"
    else:
        total, key = steps * trainer.total_epochs, "trainer.total_epochs"
        text = f"{steps:,} x {counted(trainer.total_epochs, 'epoch')} = {counted(total, 'step')}"
    yield Number("run", total, text, (key,))


def _advice(config: SFTConfig, train: Sample | None) -> Iterator[Problem]:
    """Find what a run would probably not want."""
    trainer, optim = config.trainer, config.optim
    if trainer.save_freq <= 0 and not trainer.export_model and not trainer.val_only:
        key = "trainer.save_freq"
        yield Problem(
            key,
            f"{key}={trainer.save_freq} with trainer.export_model=false: nothing is left of the run at its end. Set "
            "one of them.",
        )
    total = trainer.total_training_steps
    if total is None and train is not None:
        total = train.rows // config.data.train_batch_size * trainer.total_epochs
    if total and optim.lr_warmup_steps >= total:
        key = "optim.lr_warmup_steps"
        yield Problem(
            key,
            f"{key}={optim.lr_warmup_steps} is not less than the {total} steps of the run: the learning rate never "
            f"reaches optim.lr={optim.lr:g}. Lower it, or train longer.",
        )


def _findings(level: Level, problems: Iterable[Problem]) -> list[Finding]:
    return [Finding(level, problem.text, (problem.key, *problem.also)) for problem in problems]
