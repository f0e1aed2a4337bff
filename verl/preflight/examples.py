"""Checks of a run that learns from given examples or preference pairs: `verl doctor sft`, `dpo` and `rm`.

Options, models, machine and memory are checked as those of ``main_ppo`` (``SFTConfig.as_ppo``), and named as they are
called here. Of the examples a sample is tokenized by the dataset of the run: which rows cannot be learned from, what is
learned of a row, how long rows are, and what truncation leaves of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl.config.base import Problem
from verl.config.checks.batch import counted
from verl.config.engine import backend_of
from verl.config.load import LoadedConfig
from verl.config.preference import DPOConfig
from verl.config.sft import SFTConfig
from verl.config.supervised import ExamplesConfig
from verl.data.files import hub_parts
from verl.data.table import DataError
from verl.preflight.checks import add_memory
from verl.preflight.estimates import checkpoint_bytes, memory_plan
from verl.preflight.machine import Machine, missing_devices, missing_packages, room_for_checkpoints
from verl.preflight.models import missing_dataset, missing_models
from verl.preflight.report import Finding, Level, Number, PhaseMemory, Report, format_bytes
from verl.preflight.rows import Lengths, load_tokenizer
from verl.utils.py_functional import excerpt

if TYPE_CHECKING:
    from verl.data.sft_dataset import SFTDataset

_ROWS = 256
"""Rows that are tokenized of each option that names files."""

_PHASES = {"start": "start", "ref log-probs": "reference", "update actor": "update", "checkpoint": "checkpoint"}
"""Phases of main_ppo that a run on examples has too, and what they are called here."""


class Sample(NamedTuple):
    """What a sample of the rows of an option shows."""

    rows: int
    """In all files."""
    looked_at: int
    lengths: np.ndarray
    """Tokens of the sequences of each row that can be used, after truncation; (rows, sequences)."""
    learned: np.ndarray
    """Tokens learned of each; (rows, sequences)."""


def examine_examples(loaded: LoadedConfig, machine: Machine) -> Report:
    """Check a configuration of `SFTConfig` that is composed already."""
    config: Any = loaded.config
    report = Report(_findings("error", loaded.problems), config=config, data_title=config.data.noun)
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
            if config.scores:  # one number of each text
                parts.pop("logits", None)
            if isinstance(config, DPOConfig) and config.algorithm.precompute_ref:
                # the reference scores before the first step, and is not held afterwards
                gone = ("optimizer", "gradients") if phase.phase == "ref log-probs" else ("reference weights",)
                parts = {name: size for name, size in parts.items() if name not in gone or phase.phase == "start"}
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
    if data.sequences == 1 and data.custom_cls.path:
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
        note(f"There is no tokenizer, so {data.noun} are not looked at: {str(error).rstrip('.')}.")
        return None
    from verl.data.preference_dataset import PreferenceDataset
    from verl.data.sft_dataset import SFTDataset
    from verl.utils.tokenizer import hf_processor

    # rows are refused and cut here, where all of them can be counted
    options = {**data, "bad_rows": "skip", "truncation": "right", "max_length": 1 << 30, "num_workers": 1}
    try:
        trusts = config.model.trust_remote_code
        processor = hf_processor(path, config.model.custom_chat_template, trust_remote_code=trusts)
        if data.sequences == 1:
            dataset = SFTDataset(files, tokenizer, options, _ROWS, processor)
        else:
            dataset = PreferenceDataset(files, tokenizer, options, _ROWS, processor, scores=config.scores)
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
    items = [_sequences(dataset[item]) for item in range(len(dataset))]
    lengths, looked_at = _count("input_ids", items), len(dataset) + len(skipped)
    of = f"{looked_at:,} rows of {key}" + ("" if looked_at >= dataset.num_rows else " that were looked at")
    if skipped:
        level: Level = "warning" if data.bad_rows == "skip" else "error"
        fate = "They are left out." if data.bad_rows == "skip" else "Correct them, or set data.bad_rows=skip."
        first = f"{skipped[0].where}: {skipped[0].why}".rstrip(".")
        text = f"{len(skipped):,} of {of} cannot be learned from; the first is {first}. {fate}"
        report.findings.append(Finding(level, text, (key, "data.bad_rows")))
    kept, overlong = items, int((lengths.max(1) > limit).sum())
    if overlong:
        side = "" if data.sequences == 1 else "a side of "
        text = f"data.max_length={limit} is less than the tokens of {side}{overlong:,} of {of}; the longest has "
        text += f"{int(lengths.max()):,}"
        if data.truncation == "error":
            ways = "left or right to cut them" if data.sequences == 1 else "drop to leave them out, or left or right"
            text += f". Raise it, or set data.truncation to {ways}."
            report.findings.append(Finding("error", text, ("data.max_length", key, "data.truncation")))
        else:
            fate = f"they are {'left out' if data.truncation == 'drop' else 'cut'} (data.truncation={data.truncation})"
            report.notes.append(Finding("note", f"{text}: {fate}.", (key,)))
            kept = _truncated(config, key, dataset, of, overlong, report)
    noted = len({tuple(_bytes(one) for one in item) for item in items})
    if noted < len(items):
        report.notes.append(Finding("note", f"{len(items) - noted:,} of {of} are repeated.", (key,)))
    if data.sequences == 2:
        sides = {(_bytes(chosen), _bytes(rejected)) for chosen, rejected in items}
        if both := sum((rejected, chosen) in sides for chosen, rejected in sides) // 2:
            text = f"{both:,} of the pairs of {key} are there in both orders: one of the two is the wrong way round."
            report.findings.append(Finding("warning", text, (key,)))
    if key == "data.train_files":
        report.preview += _shown(items[0], tokenizer, config.scores)
        report.preview += _histogram(lengths.reshape(-1), data)
    return Sample(dataset.num_rows, looked_at, _count("input_ids", kept), _count("loss_mask", kept))


def _sequences(item: dict[str, Any]) -> list[dict[str, Any]]:
    """The sequences of an item: one, or the two of a pair."""
    return [item] if "input_ids" in item else [item["chosen"], item["rejected"]]


def _bytes(sequence: dict[str, Any]) -> bytes:
    return sequence["input_ids"].numpy().tobytes()


def _count(column: str, items: list[list[dict[str, Any]]]) -> np.ndarray:
    """Tokens of each sequence, or those that are learned; (items, sequences)."""
    counts = [[len(one[column]) if column == "input_ids" else int(one[column].sum()) for one in item] for item in items]
    return np.array(counts, np.int64).reshape(len(items), len(items[0]) if items else 1)


def _truncated(
    config: SFTConfig, key: str, dataset: SFTDataset, of: str, overlong: int, report: Report
) -> list[list[dict[str, Any]]]:
    """What ``data.truncation`` leaves of the items of a dataset, and what it leaves none of."""
    data, keys = config.data, ("data.max_length", key)
    try:
        cut = dataset.truncated(data.max_length, data.truncation)
    except DataError as error:
        report.findings.append(Finding("error", f"Of {of}, {error}", keys))
        return []
    lost = len(dataset) - len(cut) - (overlong if data.truncation == "drop" else 0)
    if lost:
        what = "no token to learn" if data.sequences == 1 else "nothing to learn"
        text = f"{lost:,} of {of} have {what} within data.max_length={data.max_length}: they are left out."
        report.findings.append(Finding("warning", text, keys))
    return [_sequences(cut[item]) for item in range(len(cut))]


def _shown(item: list[dict[str, Any]], tokenizer: Any, scores: bool) -> list[str]:
    """An example, each stretch of it with whether it is learned."""
    lines = []
    for number, sequence in enumerate(item):
        ids, mask = (sequence[name].numpy() for name in ("input_ids", "loss_mask"))
        edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
        parts = []
        for start, end in zip(edges, edges[1:], strict=False):
            text = excerpt(tokenizer.decode(ids[start:end].tolist()), 160)
            what = ("scored" if scores else "learned") if mask[start] else "shown"
            parts.append(f"  {what.ljust(7)} {text}")
        lines += [f"  {('chosen', 'rejected')[number]}"] if len(item) > 1 else []
        lines += parts[:8] + ([f"  ... {len(parts) - 8} more parts"] if len(parts) > 8 else [])
    return lines


def _histogram(lengths: np.ndarray, data: ExamplesConfig) -> list[str]:
    found = Lengths.of("tokens", lengths, int(lengths.max()))
    tallest = max(count for *_, count in found.histogram)
    of = data.noun if data.sequences == 1 else "sequences"
    lines = [f"  tokens of {found.counted} {of} (data.max_length={data.max_length})"]
    for start, end, count in found.histogram:
        if count:
            lines.append(f"  {start:>6} to {end - 1:<6} {'#' * max(1, 40 * count // tallest)} {count}")
    return lines


# -- the arithmetic --------------------------------------------------------------------------------------------------


def _derivation(config: SFTConfig, train: Sample | None, report: Report) -> Iterator[Number]:
    """Yield the numbers of a step and of the run, each with the options that it depends on."""
    data, trainer = config.data, config.trainer
    size, world, noun = data.train_batch_size, trainer.world_size, data.noun.removesuffix("s")
    sp = config.engine.ulysses_sequence_parallel_size
    workers = ("trainer.nnodes", "trainer.n_gpus_per_node")
    yield Number(data.noun, size, f"{counted(size, noun)} a step", ("data.train_batch_size",))
    ranks = world // sp
    text = f"{counted(world, 'rank')} / {sp} to a sequence = {counted(ranks, 'data-parallel rank')}"
    text += f" on {trainer.device}; {backend_of(config.engine.strategy, trainer.device, world)}"
    yield Number("ranks", ranks, text, (*workers, "engine.ulysses_sequence_parallel_size"))
    rows = -(-size // ranks)
    if data.use_dynamic_bsz:
        key, budget = "data.max_token_len_per_gpu", data.token_budget * sp
        text = f"{counted(rows, noun)} a rank, in micro-batches of up to {budget:,} tokens"
        if train is not None and len(train.lengths):
            mean = float(train.lengths.sum(1).mean())
            count = max(1, round(rows * mean / budget + 0.49))
            article = "an" if noun == "example" else "a"
            text += f": about {count:,} of them, at {mean:.0f} tokens {article} {noun}"
    else:
        key, each = "data.micro_batch_size_per_gpu", data.micro_batch_size_per_gpu
        text = f"{counted(rows, noun)} a rank / {each} = {-(-rows // each):,} micro-batches"
    yield Number("micro-batches", rows, text, (key, "data.train_batch_size"))
    if isinstance(config, DPOConfig):
        yield _reference(config, train)
    if train is None:
        return
    if len(train.lengths):
        yield _learned(config, train)
    rows = train.rows if data.train_max_samples < 0 else min(train.rows, data.train_max_samples)
    steps = rows // size
    if not steps:
        text = f"data.train_batch_size={size} is larger than the {rows:,} rows of data.train_files: no batch could be "
        text += f"filled. Lower it or add {data.noun}."
        report.findings.append(Finding("error", text, ("data.train_batch_size",)))
        return
    yield Number("epoch", steps, f"{rows:,} rows / {size} = {counted(steps, 'step')} an epoch", ("data.train_files",))
    total, key = trainer.total_training_steps, "trainer.total_training_steps"
    if total:
        text = f"{counted(total, 'step')}, {total / steps:.2g} epochs"
    else:
        total, key = steps * trainer.total_epochs, "trainer.total_epochs"
        text = f"{steps:,} x {counted(trainer.total_epochs, 'epoch')} = {counted(total, 'step')}"
    yield Number("run", total, text, (key,))


def _learned(config: SFTConfig, train: Sample) -> Number:
    """The tokens that are learned; of a pair, those of its two sides, whose difference may be learned instead."""
    key = ("data.train_files",)
    if config.data.sequences == 1:
        share = float(train.learned.sum()) / int(train.lengths.sum())
        text = f"{share:.0%} of the tokens are learned, {float(train.learned.mean()):.0f} of an example"
        return Number("learned", share, text, key)
    counts = train.lengths if config.scores else train.learned
    longer = float((counts[:, 0] > counts[:, 1]).mean())
    chosen, rejected = counts.mean(0).tolist()
    what = "texts" if config.scores else "responses"
    text = f"chosen {what} have {chosen:.0f} tokens on average and rejected ones {rejected:.0f}; the chosen one is the "
    return Number("lengths", longer, f"{text}longer one in {longer:.0%} of pairs", key)


def _reference(config: DPOConfig, train: Sample | None) -> Number:
    """The model that log-ratios are taken to, and when it scores."""
    loss = config.algorithm
    if not loss.uses_reference:
        key = "algorithm.reference_free" if loss.reference_free else "algorithm.loss_type"
        return Number("reference", False, "none: the loss reads none", (key,))
    below = "the model below the adapter" if config.model.lora_rank else "the model before its first step"
    text, keys = config.ref.path or below, ("ref.path", "algorithm.precompute_ref")
    if not loss.precompute_ref:
        copied = "" if config.ref.path or config.model.lora_rank else ", a copy of it"
        return Number("reference", True, f"{text}{copied}; scores the pairs of each step", keys)
    text += "; scores all pairs once, before the first step"
    if train is not None and len(train.lengths):
        # fp32, from the first learned token to the last
        size = format_bytes(4 * float(train.learned.sum(1).mean()) * train.rows)
        text += f", and about {size} of log-probs are kept"
    return Number("reference", True, text, keys)


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
