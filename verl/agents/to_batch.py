"""Outputs of agent loops as columns, and the spread of what they measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl.agents.base import AgentLoopOutput
from verl.protocol import DataProto
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion


def assemble_outputs(
    prompts: DataProto,
    outputs: Sequence[AgentLoopOutput],
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> DataProto:
    """The columns of `verl.workers.rollout.assemble`, from conversations.

    ``response_mask`` is each output's own. Adds ``rm_scores`` (B, R) float32, a row's reward on the last token the
    policy sampled (where it sampled none, on the last response token), if the loops know rewards; and as object
    columns ``__num_turns__`` and the outputs' ``extra_fields``. An output without response tokens gets one, padding
    that is masked, for its reward to stand on.

    Raises:
        ValueError: only some of the outputs have log-probs, or rewards, or a further field.
    """
    outputs = [output if output.response_ids else _with_a_token(output, pad_token_id) for output in outputs]
    has_log_probs = _all_or_none(outputs, "response_logprobs")
    completions = [
        Completion(list(o.response_ids), list(o.response_logprobs) if has_log_probs else None, "stop") for o in outputs
    ]
    batch = assemble(
        _with_prompts_of(prompts, outputs),
        completions,
        prompt_length=prompt_length,
        response_length=response_length,
        pad_token_id=pad_token_id,
    )
    responses = batch.ragged("responses")
    masks = [value for output in outputs for value in output.response_mask]
    batch.put("response_mask", responses.like(torch.tensor(masks, dtype=torch.int64)))
    if _all_or_none(outputs, "reward_score"):
        batch.put("rm_scores", responses.like(_on_last_tokens(outputs)))
    batch.non_tensor_batch = _object_columns(outputs)
    return batch


def check_images(output: AgentLoopOutput, row: Mapping[str, Any]) -> None:
    """See that a loop has shown the policy no images but those of its row, which the update will see.

    Raises:
        NotImplementedError: it has.
    """
    shown, own = (dict(held or {}) for held in (output.multi_modal_data, row.get("multi_modal_data")))
    for kind, things in shown.items():
        known = len(own.get(kind) or ())
        if len(things or ()) > known:
            raise NotImplementedError(
                f"AgentLoopOutput.multi_modal_data has {len(things)} of kind {kind!r}, the row {known}: "
                "what comes in while a loop runs is not built in this release, the update would not see it. Show the "
                "row's own images only."
            )


def spread(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """Seconds by name over the rows: ``agent_loop/{name}/{min,max,mean}``."""
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    found: dict[str, float] = {}
    for name in names:
        seconds = [float(output.metrics.get(name, 0.0)) for output in outputs]
        for kind, number in (("min", min(seconds)), ("max", max(seconds)), ("mean", sum(seconds) / len(seconds))):
            found[f"agent_loop/{name}/{kind}"] = number
    return found


def _all_or_none(outputs: Sequence[AgentLoopOutput], name: str) -> bool:
    given = [i for i, output in enumerate(outputs) if getattr(output, name) is not None]
    if given and len(given) < len(outputs):
        missing = next(i for i, output in enumerate(outputs) if getattr(output, name) is None)
        raise ValueError(
            f"AgentLoopOutput.{name} is given in row {given[0]} and missing in row {missing}: a batch has it for every "
            "row or for none. Let every agent loop of the data set it, or none."
        )
    return bool(given)


def _with_prompts_of(prompts: DataProto, outputs: Sequence[AgentLoopOutput]) -> DataProto:
    """The rows with the prompts that the loops say they read.

    A prompt that a loop left as it was given keeps the ids that the model reads: an image has one token in
    ``raw_prompt_ids``, and in ``input_ids`` as many as it has features.
    """
    said = [list(output.prompt_ids) for output in outputs]
    if "input_ids" in prompts.keys():
        read = [row.tolist() for row in prompts.ragged("input_ids").rows()]
        given = prompts.non_tensor_batch.get("raw_prompt_ids", read)
        said = [ids if mine == list(raw) else mine for mine, raw, ids in zip(said, given, read, strict=True)]
        if said == read:
            return prompts
    ids = np.empty(len(outputs), dtype=object)
    ids[:] = said
    return DataProto(non_tensor_batch={"raw_prompt_ids": ids})


def _with_a_token(output: AgentLoopOutput, pad_token_id: int) -> AgentLoopOutput:
    log_probs = None if output.response_logprobs is None else [0.0]
    return replace(output, response_ids=[pad_token_id], response_mask=[0], response_logprobs=log_probs)


def _on_last_tokens(outputs: Sequence[AgentLoopOutput]) -> torch.Tensor:
    rewards = []
    for output in outputs:
        row = [0.0] * len(output.response_ids)
        sampled = [place for place, is_own in enumerate(output.response_mask) if is_own]
        row[sampled[-1] if sampled else -1] = float(output.reward_score)
        rewards += row
    return torch.tensor(rewards, dtype=torch.float32)


def _object_columns(outputs: Sequence[AgentLoopOutput]) -> dict[str, np.ndarray]:
    columns = {"__num_turns__": np.array([output.num_turns for output in outputs], dtype=np.int32)}
    for name in outputs[0].extra_fields if outputs else ():
        if any(name not in output.extra_fields for output in outputs):
            raise ValueError(f"AgentLoopOutput.extra_fields: {name!r} is missing in some rows; give it in all.")
        columns[name] = np.empty(len(outputs), dtype=object)
        columns[name][:] = [output.extra_fields[name] for output in outputs]
    return columns
