"""Output of a run: the terminal, the loggers, the trace, and samples as text in a file of the step."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from verl.checkpoint.rank_files import full_disk_is_said
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.telemetry.profiler import marked_timer
from verl.telemetry.progress import Progress
from verl.telemetry.rollout_trace import Trace, open_trace
from verl.telemetry.tracking import Tracking, ValidationGenerationsLogger, check_backends
from verl.telemetry.trajectories import Style, number_text, shortened, visible
from verl.telemetry.trajectories import columns as aligned
from verl.trainer.buffer.over_sampling import FINISH_PLACE
from verl.trainer.ppo.episodes import FAILED, episodes_of, plain, trajectory_records
from verl.trainer.ppo.experience import response_column
from verl.trainer.run_folder import open_run_record
from verl.utils.config import typed_config
from verl.utils.fs import write_atomic


def texts(batch: DataProto, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Return prompts and responses as text, without special tokens."""
    columns = (batch.ragged(name).rows() for name in ("prompts", "responses"))
    decode = tokenizer.batch_decode
    inputs, outputs = (decode([row.tolist() for row in rows], skip_special_tokens=True) for rows in columns)
    return inputs, outputs


def reward_columns(batch: DataProto) -> list[str]:
    """Names of the columns that the reward function added."""
    return [name for name in batch.meta_info.get("reward_extra_keys", ()) if name in batch.non_tensor_batch]


def dump_batch(
    folder: str,
    step: int,
    batch: DataProto,
    tokenizer: Any,
    source_key: str = "data_source",
    tokens: Mapping[int, Mapping[str, list]] | None = None,
) -> Path:
    """Write the samples of a scored batch to ``{folder}/{step}.jsonl``; see `sample_rows_of_batch`."""
    return _write_samples(folder, step, sample_rows_of_batch(step, batch, tokenizer, source_key, tokens))


def sample_rows_of_batch(
    step: int,
    batch: DataProto,
    tokenizer: Any,
    source_key: str = "data_source",
    tokens: Mapping[int, Mapping[str, list]] | None = None,
) -> list[dict[str, Any]]:
    """Return the samples of a scored batch, as they are written to files.

    Besides the columns of `describe`, ``reward`` is what the advantages were estimated from (scores, shaped, less the
    KL penalty) and ``advantage`` their mean over the tokens the policy sampled. Trajectories have their turns besides
    (`trajectory_records`).

    Args:
        tokens: row -> its columns of tokens (`TokenColumns`), for the rows that have them in the file.
    """
    inputs, outputs = texts(batch, tokenizer)
    columns = describe(batch, source_key) | scored(batch)
    scores = columns.pop("score")
    names = [*reward_columns(batch), *([FINISH_PLACE] if FINISH_PLACE in batch.non_tensor_batch else [])]
    columns |= {name: batch.non_tensor_batch[name].tolist() for name in names}
    trajectories = trajectory_records(batch, episodes_of(batch, scores), tokenizer.batch_decode)
    return sample_rows(step, inputs, outputs, scores, ground_truths(batch), columns, trajectories, tokens or {})


def scored(batch: DataProto) -> dict[str, list[float]]:
    """Return score, reward and advantage of each row, of those that it has; see `dump_batch`."""
    columns = {"score": batch.row_sums("token_level_scores").tolist()}
    if "token_level_rewards" in batch.keys():
        columns["reward"] = batch.row_sums("token_level_rewards").tolist()
    if "advantages" in batch.keys():
        advantages, mask = response_column(batch, "advantages"), response_column(batch, "response_mask")
        columns["advantage"] = ((advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
    return columns


def sample_table(step: int, batch: DataProto, tokenizer: Any, width: int, count: int = 2) -> str:
    """Return a table of the ``count`` best and worst responses of a step, for a terminal of ``width`` columns.

    Score, parts of the reward that are numbers, advantage and length; below each the end of its prompt and its text.
    Failed episodes are left out.
    """
    numbers = scored(batch)
    scores, advantages = numbers["score"], numbers.get("advantage", [0.0] * len(batch))
    failed = {i for episode in episodes_of(batch, scores) if episode.failed for i in episode.rows}
    left = [i for i in range(len(batch)) if i not in failed]
    if not left:
        return f"samples of step {step}: none, since all episodes failed"
    order = sorted(left, key=lambda i: (math.isnan(scores[i]), -scores[i], -advantages[i], i))
    best = order[: min(count, (len(order) + 1) // 2)]
    chosen = best + order[len(best) :][-count:]
    for name in reward_columns(batch):
        values = [plain(value) for value in batch.non_tensor_batch[name]]
        if name not in numbers and all(isinstance(value, int | float) for value in values):
            numbers[name] = values
    names = [name for name in numbers if name == "score" or numbers[name] != scores][:6]
    lengths = batch.ragged("responses").layout.lengths.tolist()
    inputs, outputs = texts(batch.select_idxs(chosen), tokenizer)
    rows = [["", *names, "tokens"]]
    for place, i in enumerate(chosen):
        word = "best" if place < len(best) else "worst"
        rows.append([word, *(number_text(float(numbers[name][i])) for name in names), str(lengths[i])])
    lines = aligned(rows, Style(False), width, left=(0,)).split("\n")
    room = max(20, width - 13)
    for place in reversed(range(len(chosen))):
        prompt, response = (" ".join(visible(text).split()) for text in (inputs[place], outputs[place]))
        prompt = prompt if len(prompt) <= room else "..." + prompt[3 - room :]
        lines[place + 2 : place + 2] = [f"   prompt    {prompt}", f"   response  {shortened(response, room)}"]
    return "\n".join([f"samples of step {step}, by score", *lines])


class TokenColumns:
    """Response tokens with what is known of each, of as many rows as a limit allows: ``trainer.rollout_data_tokens``.

    Args:
        decode: lists of ids -> texts.
    """

    COLUMNS = {
        "log_probs": "old_log_probs",
        "rollout_log_probs": "rollout_log_probs",
        "advantages": "advantages",
        "mask": "response_mask",
    }
    """Names in the file -> columns of the batch; those that are not there are left out."""

    def __init__(self, decode: Callable[[list[list[int]]], list[str]]) -> None:
        self._decode = decode
        self._texts: dict[int, str] = {}

    def __call__(self, batch: DataProto, limit: int) -> dict[int, dict[str, list]]:
        """Return row -> its columns: whole groups in their order until ``limit`` tokens, and of the first what fits."""
        rows = self._chosen(batch, limit)
        if not rows:
            return {}
        responses = batch.ragged("responses").rows()
        ids = {row: responses[row].tolist() for row in rows}
        new = sorted({i for own in ids.values() for i in own} - self._texts.keys())
        if new:  # tokenizers decode an empty list to one text
            self._texts.update(zip(new, self._decode([[i] for i in new]), strict=True))
        found: dict[int, dict[str, list]] = {row: {"text": [self._texts[i] for i in ids[row]]} for row in rows}
        for name, column in self.COLUMNS.items():
            if column in batch.keys():
                values = batch.ragged(column).rows()
                for row in rows:
                    own = values[row].tolist()
                    found[row][name] = list(map(int, own)) if name == "mask" else [round(value, 4) for value in own]
        return found

    @staticmethod
    def _chosen(batch: DataProto, limit: int) -> list[int]:
        lengths = batch.ragged("responses").layout.lengths.tolist()
        groups: dict[Any, list[int]] = {}
        for row, uid in enumerate(batch.non_tensor_batch.get("uid", range(len(lengths)))):
            groups.setdefault(uid, []).append(row)
        chosen: list[int] = []
        for rows in groups.values():
            fits = [
                row for row, end in zip(rows, accumulate(lengths[row] for row in rows), strict=True) if end <= limit
            ]
            if len(fits) < len(rows) and chosen:
                break
            chosen += fits
            limit -= sum(lengths[row] for row in rows)
        return chosen


def describe(batch: DataProto, source_key: str = "data_source") -> dict[str, list]:
    """Return the columns of a sample other than its text and score, one value a row.

    ``uid`` is that of the prompt, and so of its group; lengths are tokens; ``finish_reason`` is the engine's: ``stop``,
    ``length`` or ``abort``. Where an agent loop returns none, a response that fills its window ended by ``length``.
    """
    rows, response = batch.non_tensor_batch, batch.ragged("responses").layout
    columns: dict[str, list] = {"uid": [str(uid) for uid in rows["uid"]]} if "uid" in rows else {}
    if source_key in rows:
        columns["data_source"] = rows[source_key].tolist()
    columns["prompt_length"] = (batch.ragged("attention_mask").layout.lengths - response.lengths).tolist()
    columns["response_length"] = response.lengths.tolist()
    reasons = rows.get("finish_reason", [None] * len(batch))
    columns["finish_reason"] = [
        reason or ("length" if length >= response.width else "stop")
        for reason, length in zip(reasons, columns["response_length"], strict=True)
    ]
    return columns


def ground_truths(batch: DataProto) -> list[Any]:
    """Each row's ``reward_model.ground_truth``, None where there is none."""
    rows = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    return [row.get("ground_truth") if isinstance(row, dict) else None for row in rows]


_NO_SAMPLES = "or keep no samples: trainer.rollout_data_dir=null trainer.validation_data_dir=null"


def dump_samples(
    folder: str | Path,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    scores: Sequence[float],
    gold: Sequence[Any],
    columns: Mapping[str, Sequence],
    trajectories: Sequence[tuple[Sequence[int], Mapping[str, Any]]] = (),
    tokens: Mapping[int, Mapping[str, list]] | None = None,
) -> Path:
    """Write ``{folder}/{step}.jsonl``, one object a sample; see `sample_rows`."""
    return _write_samples(folder, step, sample_rows(step, inputs, outputs, scores, gold, columns, trajectories, tokens))


def sample_rows(
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    scores: Sequence[float],
    gold: Sequence[Any],
    columns: Mapping[str, Sequence],
    trajectories: Sequence[tuple[Sequence[int], Mapping[str, Any]]] = (),
    tokens: Mapping[int, Mapping[str, list]] | None = None,
) -> list[dict[str, Any]]:
    """Return one object a sample: input, output, gts, score, step and each extra column.

    Args:
        tokens: sample -> the columns of its tokens; a trajectory of several rows has them in ``rows``.
        trajectories: rows and further values of each trajectory; it is one object, whatever its number of rows.
    """
    extra = {name: values for name, values in columns.items() if len(values) == len(inputs)}
    samples = []
    for i, (text, output, score, truth) in enumerate(zip(inputs, outputs, scores, gold, strict=True)):
        samples.append({"input": text, "output": output, "gts": truth, "score": score, "step": step})
        samples[i].update((name, values[i]) for name, values in extra.items() if name not in samples[i])
        if tokens and i in tokens:
            samples[i]["tokens"] = tokens[i]
    return join_trajectories(samples, trajectories, of_rows=("tokens",) if tokens else ())


def _write_samples(folder: str | Path, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"

    def write(part: Path) -> None:
        with open(part, "w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=plain) + "\n")

    with full_disk_is_said(path, way_out=_NO_SAMPLES):
        write_atomic(path, write)
    return path


def join_trajectories(
    samples: Sequence[dict[str, Any]],
    trajectories: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
    sums: Sequence[str] = ("score", "reward", "response_length"),
    of_rows: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Add to samples what is known of their trajectories; of several rows of one trajectory, one sample remains.

    A value of the reward function whose name a trajectory needs becomes ``reward/<name>``. A failed one has no score.

    Args:
        sums: keys whose values are added over the rows. ``advantage`` becomes their mean, ``finish_reason`` the last
            row's.
        of_rows: keys that a trajectory of several rows has for each, in a list ``rows``.
    """
    absorbed: set[int] = set()
    for rows, record in trajectories:
        first = samples[rows[0]]
        if len(rows) > 1:
            first |= {name: sum(samples[i][name] for i in rows) for name in sums if name in first}
            first |= {name: sum(samples[i][name] for i in rows) / len(rows) for name in {"advantage"} & first.keys()}
            first |= {"finish_reason": samples[rows[-1]].get("finish_reason")}
            if of_rows:
                first["rows"] = [{name: samples[i][name] for name in of_rows if name in samples[i]} for i in rows]
            for name in of_rows:
                first.pop(name, None)
        taken = {name: value for name, value in first.items() if name in record and name != "seconds"}
        first |= {**{f"reward/{name}": value for name, value in taken.items()}, **record}
        if record.get("status") == FAILED:
            first |= dict.fromkeys({"score", "reward", "advantage"} & first.keys())
        absorbed.update(rows[1:])
    return [sample for i, sample in enumerate(samples) if i not in absorbed]


# -- One record a sample of a scored batch, for the trace (`verl.telemetry.rollout_trace`) -----------------------------
_ROW_KEYS = ("prompt_ids", "response_ids", "prompt", "response", "versions", "response_mask", "response_logprobs")
"""Names in a record that are of tokens; a trajectory of several rows has them for each row."""

_RECORD_COLUMNS = {"finish_reason": "finish_reason", "version": "rollout_version", "seconds": "rollout_seconds"}
"""Names in a record -> columns that rollouts add."""


def sample_records(
    batch: DataProto,
    step: int,
    seconds: float,
    extra: Sequence[str] = (),
    decode: Callable[[list[list[int]]], list[str]] | None = None,
) -> list[dict[str, Any]]:
    """One record a sample: step, uid, prompt_ids, response_ids, score, finish_reason, version, seconds.

    ``version`` is that of the weights that generated the row, ``seconds`` its generation time; where one call generates
    the whole batch, the time of that. The rows of one uid follow one another. Trajectories also have what
    `trajectory_records` knows, ``response_mask`` and, if log-probs were kept, ``response_logprobs``; those of several
    rows are one record, with the ids of each row in ``rows``.

    Args:
        seconds: of the batch.
        extra: further columns to take along, those of the reward function.
        decode: also give ``prompt`` and ``response`` as text, special tokens included.
    """
    columns: dict[str, list[Any]] = {
        "uid": [str(uid) for uid in batch.non_tensor_batch["uid"]],
        "prompt_ids": [row.tolist() for row in batch.ragged("prompts").rows()],
        "response_ids": [row.tolist() for row in batch.ragged("responses").rows()],
        "score": batch.row_sums("token_level_scores").tolist(),
    }
    if decode is not None:
        columns |= {"prompt": decode(columns["prompt_ids"]), "response": decode(columns["response_ids"])}
    columns["seconds"] = [seconds] * len(batch)
    for name, column in _RECORD_COLUMNS.items():
        if column in batch.non_tensor_batch:
            columns[name] = batch.non_tensor_batch[column].tolist()
    if "rollout_versions" in batch:  # of each token, where weights changed under a response
        columns["versions"] = [row.tolist() for row in batch.ragged("rollout_versions").rows()]
    columns |= {name: [plain(value) for value in batch.non_tensor_batch[name]] for name in extra}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    trajectories = trajectory_records(batch, episodes_of(batch, columns["score"]), decode)
    tokens = {"response_mask": "response_mask", "response_logprobs": "rollout_log_probs"} if trajectories else {}
    for name, column in tokens.items():
        if column in batch.keys():
            values = batch.ragged(column).rows()
            for i in (i for own, _ in trajectories for i in own):
                rows[i][name] = values[i].tolist()
    rows = join_trajectories(rows, trajectories, ("score",), _ROW_KEYS)
    number = {uid: i for i, uid in enumerate(dict.fromkeys(columns["uid"]))}
    return [{"step": step, **row} for row in sorted(rows, key=lambda row: number[row["uid"]])]


class RunLog:
    """Loggers, trace and samples of a run: ``trainer.logger``, ``rollout.trace`` and the keys of samples.

    Args:
        config: the whole tree.
        tokenizer: of the policy.

    Attributes:
        progress: the terminal.
        places: label -> where the loggers that write files put them.

    Raises:
        ImportError: a package that a logger or the trace needs is missing.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any) -> None:
        check_backends(config.trainer.logger)
        self.config, self.tokenizer = config, tokenizer
        trace, trainer = config.actor_rollout_ref.rollout.trace, config.trainer
        self.trace: Trace | None = None
        if trace.backend is not None:
            folder = trace.dir or Path(trainer.default_local_dir) / "rollout_trace"
            self.trace = open_trace(trace.backend, trainer.project_name, trainer.experiment_name, folder)
        self.progress = Progress(0, enabled=False)
        self.places: dict[str, Any] = {}
        self._generations = ValidationGenerationsLogger()
        self._tracking: Tracking | None = None
        self._record: Any = None
        self.token_columns = TokenColumns(lambda ids: self.tokenizer.batch_decode(ids))

    def open(self, total_steps: int) -> None:
        """Begin the line of progress, and start the loggers."""
        keys = self.config.trainer
        self._record = open_run_record(self.config)  # of a script that drives a trainer of its own
        self.progress = Progress(total_steps, enabled=keys.progress_bar)
        self._tracking = Tracking(
            keys.project_name,
            keys.experiment_name,
            default_backend=keys.logger,
            config=typed_config(self.config).to_dict(),
        )
        self._generations = ValidationGenerationsLogger(tracking=self._tracking)
        places = {"metrics": ("file", "path"), "tensorboard": ("tensorboard", "folder")}  # logger and attribute
        loggers = self._tracking.logger
        self.places = {label: getattr(loggers[name], at) for label, (name, at) in places.items() if name in loggers}

    @contextmanager
    def timed(self, name: str, timing: dict[str, float]) -> Iterator[None]:
        """Count the seconds of a part of a step in ``timing``, and show it while it lasts."""
        with self.progress.phase(name), marked_timer(name, timing):
            yield

    def say(self, sentence: str) -> None:
        """Print a message above the line of progress."""
        self.progress.say(sentence)

    def step_done(self, step: int, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Show in the terminal how far the run is, and with ``trainer.show_samples`` what the policy writes."""
        self.progress.update(step, metrics)
        every = self.config.trainer.show_samples
        if every is None:
            every = 10 if sys.stdout.isatty() else 0
        if every and len(batch) and (step == 1 or step % every == 0):
            width = min(160, shutil.get_terminal_size((120, 24)).columns)
            self.say(sample_table(step, batch, self.tokenizer, width))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Give the numbers of a step to the loggers."""
        self._tracking.log(metrics, step=step)

    def dump(self, step: int, batch: DataProto) -> None:
        """Write the samples of a step to ``trainer.rollout_data_dir``."""
        trainer, key = self.config.trainer, self.config.data.reward_fn_key
        tokens = self.token_columns(batch, trainer.rollout_data_tokens)
        dump_batch(trainer.rollout_data_dir, step, batch, self.tokenizer, key, tokens)

    def record(self, step: int, batch: DataProto, seconds: float) -> None:
        """Give the samples of a step, which took so long, to ``rollout.trace``."""
        wants_text = self.config.actor_rollout_ref.rollout.trace.token2text
        decode = self.tokenizer.batch_decode if wants_text else None
        self.trace.log(step, sample_records(batch, step, seconds, reward_columns(batch), decode))

    def show(self, step: int, samples: Sequence[tuple[str, str, float]]) -> None:
        """Show ``trainer.log_val_generations`` of the samples in the loggers, the same prompts every time."""
        if count := self.config.trainer.log_val_generations:
            shuffled = sorted(samples, key=lambda sample: sample[0])
            np.random.RandomState(42).shuffle(shuffled)
            self._generations.log(self.config.trainer.logger, shuffled[:count], step)

    def close(self, failed: bool = False) -> None:
        """Finish all that is open; after an error only the terminal and the loggers."""
        if self.trace is not None and not failed:
            self.trace.finish()
        if self._tracking is not None:
            self._tracking.finish(failed)
        self.progress.finish()
        if self._record is not None and not failed:
            self._record.close()
