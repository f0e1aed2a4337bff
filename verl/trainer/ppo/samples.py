"""Samples a person can read: prompts and responses as text, in a file of the step and in the loggers.

Knows batches, a tokenizer and files; not what made the samples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.trainer.buffer.long_tails import PLACE
from verl.trainer.ppo.experience import response_column


def texts(batch: DataProto, tokenizer: Any) -> tuple[list[str], list[str]]:
    """Prompts and responses as text, special tokens left out."""
    columns = (batch.ragged(name).rows() for name in ("prompts", "responses"))
    decode = tokenizer.batch_decode
    inputs, outputs = (decode([row.tolist() for row in rows], skip_special_tokens=True) for rows in columns)
    return inputs, outputs


def reward_columns(batch: DataProto) -> list[str]:
    """Names of the columns that the reward function added."""
    return [name for name in batch.meta_info.get("reward_extra_keys", ()) if name in batch.non_tensor_batch]


def dump_batch(folder: str, step: int, batch: DataProto, tokenizer: Any, source_key: str = "data_source") -> Path:
    """Write the samples of a scored batch to ``{folder}/{step}.jsonl``.

    Beside what `describe` gives, ``reward`` is what the advantages were estimated from (scores, shaped, less the KL
    penalty) and ``advantage`` their mean over the tokens the policy sampled.
    """
    inputs, outputs = texts(batch, tokenizer)
    scores = response_column(batch, "token_level_scores").sum(-1).tolist()
    columns = describe(batch, source_key)
    if "token_level_rewards" in batch.keys():
        columns["reward"] = response_column(batch, "token_level_rewards").sum(-1).tolist()
    if "advantages" in batch.keys():
        advantages, mask = response_column(batch, "advantages"), response_column(batch, "response_mask")
        columns["advantage"] = ((advantages * mask).sum(-1) / mask.sum(-1).clamp(min=1)).tolist()
    names = [*reward_columns(batch), *([PLACE] if PLACE in batch.non_tensor_batch else [])]
    columns |= {name: batch.non_tensor_batch[name].tolist() for name in names}
    return dump_samples(folder, step, inputs, outputs, scores, ground_truths(batch), columns)


def describe(batch: DataProto, source_key: str = "data_source") -> dict[str, list]:
    """What a sample is, but for its text and score, one value a row.

    ``uid`` is that of the prompt, and so of its group; lengths are tokens; ``finish_reason`` is the engine's: ``stop``,
    ``length`` or ``abort``. Where an agent loop says none, a response that fills its window ended by ``length``.
    """
    rows, response = batch.non_tensor_batch, batch.ragged("responses").layout
    columns = {"uid": [str(uid) for uid in rows["uid"]]} if "uid" in rows else {}
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


def shown_samples(samples: Sequence[tuple[str, str, float]], count: int) -> list[tuple[str, str, float]]:
    """Some of the validation samples for the loggers, those of the same prompts every time."""
    shuffled = sorted(samples, key=lambda sample: sample[0])
    np.random.RandomState(42).shuffle(shuffled)
    return shuffled[:count]


def ground_truths(batch: DataProto) -> list[Any]:
    """Each row's ``reward_model.ground_truth``, None where there is none."""
    rows = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    return [row.get("ground_truth") if isinstance(row, dict) else None for row in rows]


def dump_samples(
    folder: str | Path,
    step: int,
    inputs: list[str],
    outputs: list[str],
    scores: list[float],
    gold: list[Any],
    columns: dict[str, list],
) -> Path:
    """Write ``{folder}/{step}.jsonl``, one object a sample: input, output, gts, score, step and each extra column."""
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{step}.jsonl"
    extra = {name: values for name, values in columns.items() if len(values) == len(inputs)}
    part = path.with_suffix(".part")
    with open(part, "w", encoding="utf-8") as file:
        for i, (text, output, score, truth) in enumerate(zip(inputs, outputs, scores, gold, strict=True)):
            row = {"input": text, "output": output, "gts": truth, "score": score, "step": step}
            row.update((name, values[i]) for name, values in extra.items() if name not in row)
            file.write(json.dumps(row, ensure_ascii=False, default=_json_value) + "\n")
    os.replace(part, path)
    return path
