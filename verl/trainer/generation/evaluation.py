"""Scores of responses in a file, and their figures with confidence intervals.

The scorers are those of a run's reward manager, and the figures those of its validation
(`verl.trainer.ppo.metric_utils.process_validation_metrics`); ``pass@k`` and the intervals come on top. Letters: Q
prompts, n responses to each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np

from verl.data.table import DataError, RowTable
from verl.protocol import DataProto
from verl.rewards.functions.calling import Sample
from verl.rewards.managers.rule import RuleRewardManager
from verl.rewards.managers.scoring import (
    check_data_sources,
    error_counts,
    load_reward_manager,
    start_reward_functions,
)
from verl.telemetry.progress import Progress
from verl.trainer.generation.generator import FAILED
from verl.trainer.ppo.metric_utils import CORE_NAMES, name_metrics, process_validation_metrics, prompt_metrics

RESAMPLES = 2000
"""Of the prompts, for an interval."""

_AT_ONCE = 256  # responses scored between two steps of the progress bar
_DUMP = ("output", "gts")  # columns of the samples that a run writes


@dataclass
class Answers:
    """Responses to score: one entry of each list a response."""

    samples: list[Sample] = field(default_factory=list)
    uids: list[Any] = field(default_factory=list)
    """Equal for the responses to one prompt."""
    failed: int = 0
    """Responses that have no score, for their agent loop failed."""

    def add(self, uid: Any, texts: Sequence[Any], reasons: Sequence[Any], **of_row: Any) -> None:
        """Add the responses to one prompt, without those that failed."""
        for text, reason in zip(texts, reasons, strict=True):
            if reason == FAILED:
                self.failed += 1
                continue
            self.samples.append(Sample(solution_str=text, **of_row))
            self.uids.append(uid)


def has_responses(table: RowTable, data: Any) -> bool:
    """Whether rows hold responses: in the column ``data.response_key``, or as a run writes its samples."""
    return data.response_key in table.column_names or set(_DUMP) <= set(table.column_names)


def read_answers(table: RowTable, data: Any) -> Answers:
    """The responses of a file of `generate_file`'s, or of a run's ``trainer.validation_data_dir``.

    Raises:
        DataError: a row lacks what its responses are scored by; names the row.
    """
    answers = Answers()
    is_dump = data.response_key not in table.column_names
    table.require(data.reward_fn_key, "data.data_source_key")
    if not is_dump:
        table.require(data.reward_model_key, "data.reward_model_key")
    for row, record in enumerate(table):
        source = record[data.reward_fn_key]
        if is_dump:
            uid = record.get("uid") or record.get("input", row)
            truth, texts, reasons = record["gts"], [record["output"]], [record.get("status")]
        else:
            uid, truth, texts = row, record[data.reward_model_key], record[data.response_key]
            if isinstance(truth, Mapping):
                if "ground_truth" not in truth:
                    raise DataError(
                        f"{table.where(row)}: {data.reward_model_key!r} (data.reward_model_key) holds no ground_truth. "
                        'Write {"style": "rule", "ground_truth": ...}; it may be empty.'
                    )
                truth = truth["ground_truth"]
            texts = [texts] if isinstance(texts, str) else list(texts or ())
            reasons = record.get("finish_reasons") or [None] * len(texts)
        if not texts or not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{table.where(row)}: {data.response_key!r} (data.response_key) is {texts!r:.80}; it must be a "
                "text, or a list with at least one. Generate the responses again, or leave the row out."
            )
        if not isinstance(source, str):
            raise DataError(
                f"{table.where(row)}: {data.reward_fn_key!r} (data.data_source_key) is {source!r}, no text."
            )
        info = record.get("extra_info")
        info = {**(info if isinstance(info, Mapping) else {}), "num_turns": record.get("num_turns")}
        answers.add(uid, texts, reasons, data_source=source, ground_truth=truth, extra_info=info)
    if not answers.samples:
        raise DataError(f"{', '.join(table.names)}: there is no response to score.")
    return answers


@dataclass
class Scores:
    """Scored responses."""

    answers: Answers
    columns: dict[str, list[Any]]
    """``reward`` and what the scorer reports besides, one value a response."""

    @property
    def sources(self) -> list[str]:
        return [sample.data_source for sample in self.answers.samples]


def score_answers(config: Any, answers: Answers, table: RowTable) -> Scores:
    """Score responses as ``reward_model`` and ``custom_reward_function`` say, in the sandbox of a run.

    Raises:
        TypeError: the reward manager scores batches of tokens, and these are texts.
        RewardError, UnknownDataSource: as in a run.
    """
    start_reward_functions(config)
    manager = load_reward_manager(config, None, num_examine=0)
    if not isinstance(manager, RuleRewardManager) or type(manager).rewards is not RuleRewardManager.rewards:
        raise TypeError(
            f"reward_model.reward_manager={config.reward_model.reward_manager} ({type(manager).__name__}) scores "
            "batches of tokens, and evaluation has texts. Use naive, prime or batch; or main_ppo with val_only."
        )
    check_data_sources(config, manager, [SimpleNamespace(dataframe=table)])
    columns: dict[str, list[Any]] = {"reward": []}
    samples, count = answers.samples, len(answers.samples)
    with Progress(count, config.trainer.progress_bar and count > _AT_ONCE, unit="response") as progress:
        for start in range(0, count, _AT_ONCE):
            part = samples[start : start + _AT_ONCE]
            scores, extra = manager.score(part, DataProto(meta_info={"validate": True}))
            # rewards of a run are of this precision
            columns["reward"] += np.asarray(scores, dtype=np.float32).astype(float).tolist()
            for name, values in extra.items():
                if name != "reward":
                    columns.setdefault(name, [None] * start).extend(values)
            for values in columns.values():
                values += [None] * (start + len(part) - len(values))
            progress.update(start + len(part), {"critic/score/mean": sum(columns["reward"]) / len(columns["reward"])})
    return Scores(answers, columns)


# -- Figures -----------------------------------------------------------------------------------------------------------


def evaluate(scores: Scores, correct_from: float = 1.0, confidence: float = 0.95) -> dict[str, Any]:
    """Figures of scored responses, as JSON values.

    Returns:
        ``metrics``: the run's validation metrics by their names there (``val-core/...``, ``val-aux/...``).
        ``sources``: data source -> ``prompts``, ``responses`` and ``figures``: variable and metric -> ``value``,
        ``low`` and ``high``, the ends of its confidence interval. With several sources also ``all`` of them as one.
    """
    sources, uids, columns = scores.sources, scores.answers.uids, scores.columns
    correct = [float(value >= correct_from) for value in columns["reward"]]
    if "acc" in columns:
        correct = [own if acc is None else float(bool(acc)) for own, acc in zip(correct, columns["acc"], strict=True)]
    found = {}
    for name, members in {**{source: {source} for source in sources}, "all": set(sources)}.items():
        if name == "all" and len(members) == 1:
            continue
        rows = [i for i, source in enumerate(sources) if source in members]
        prompts = [(sources[i], uids[i]) for i in rows]
        own = {column: [values[i] for i in rows] for column, values in columns.items()}
        metrics = prompt_metrics([name] * len(rows), prompts, own)[name]
        metrics["correct"] = pass_at_k(prompts, [correct[i] for i in rows])
        found[name] = {
            "prompts": len(set(prompts)),
            "responses": len(rows),
            "figures": {
                f"{variable} {metric.removesuffix('/mean')}": _figure(values, confidence)
                for variable, own_metrics in metrics.items()
                for metric, values in own_metrics.items()
                if metric.startswith((*CORE_NAMES, "worst@", "pass@")) and not metric.endswith("/std")
            },
        }
    return {
        "metrics": name_metrics(process_validation_metrics(sources, uids, columns)) | error_counts(columns),
        "failed": scores.answers.failed,
        "confidence": confidence,
        "sources": found,
    }


def pass_at_k(uids: Sequence[Any], correct: Sequence[float]) -> dict[str, np.ndarray]:
    """The probability that one of k responses is correct: 1 - C(n - c, k) / C(n, k) of each prompt, c of n correct.

    k is 1, 2, 4, ... and n; a prompt with fewer than k responses has no such value. Source: Chen et al. 2021, Codex
    (arXiv:2107.03374).
    """
    by_prompt: dict[Any, list[float]] = {}
    for uid, value in zip(uids, correct, strict=True):
        by_prompt.setdefault(uid, []).append(value)
    most = max(len(values) for values in by_prompt.values())
    found = {}
    for k in sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | {most}):
        values = []
        for own in by_prompt.values():
            n, c = len(own), round(sum(own))
            if n >= k:
                # the product form: binomials of thousands overflow
                values.append(1.0 if n - c < k else 1 - float(np.prod(1 - k / np.arange(n - c + 1, n + 1))))
        found[f"pass@{k}"] = np.array(values)
    return found


def interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Ends of a confidence interval for the mean of independent prompts' values (Q,).

    Where all values are 0 or 1, Wilson's, which is honest where all are equal; else percentiles of the means of 2000
    bootstrap resamples of the prompts, with a fixed seed.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953; Efron 1979, doi:10.1214/aos/1176344552.
    """
    count = len(values)
    if np.isin(values, (0.0, 1.0)).all():
        z, share = NormalDist().inv_cdf(0.5 + confidence / 2), float(values.mean())
        middle = (share + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        return max(0.0, middle - half), min(1.0, middle + half)
    random, step = np.random.RandomState(42), max(1, 4_000_000 // count)
    means = [
        values[random.randint(0, count, (min(step, RESAMPLES - start), count))].mean(axis=1)
        for start in range(0, RESAMPLES, step)
    ]
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)


def _figure(values: np.ndarray, confidence: float) -> dict[str, float]:
    low, high = interval(values, confidence)
    return {"value": float(values.mean()), "low": low, "high": high}


def format_figures(report: Mapping[str, Any]) -> str:
    """The table of a report: the figures to look at, with their intervals."""
    lines = []
    for source, found in report["sources"].items():
        figures = found["figures"]
        variable = "acc" if any(name.startswith("acc ") for name in figures) else "reward"
        largest = max((int(name.split("@")[1]) for name in figures if name.startswith(f"{variable} ")), default=1)
        shown = [f"{variable} {kind}@{largest}" for kind in ("mean", "maj", "best")]
        shown += [name for name in figures if name.startswith("correct pass@")]
        lines.append(f"{source}: {found['prompts']} prompts, {found['responses']} responses")
        for name in (name for name in shown if name in figures):
            one = figures[name]
            lines.append(f"  {name:<20} {one['value']:8.4f}  [{one['low']:.4f}, {one['high']:.4f}]")
    lines.append(f"in brackets: {report['confidence']:.0%} confidence over prompts")
    if report["failed"]:
        lines.append(f"{report['failed']} responses failed and have no score")
    return "\n".join(lines)
