"""Outputs of agent loops to columns of a batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl.agents.base import STATUS_COLUMN, AgentLoopOutput, EpisodeStatus
from verl.protocol import DataProto
from verl.utils.exit_codes import ExitCode
from verl.workers.rollout.assemble import assemble
from verl.workers.rollout.base import Completion


def assemble_outputs(
    prompts: DataProto, outputs: Sequence[AgentLoopOutput], prompt_length: int, response_length: int, pad_token_id: int
) -> DataProto:
    """The columns of `verl.workers.rollout.assemble`, from conversations.

    ``response_mask`` is each output's own. Adds ``rm_scores`` (B, R) float32 if the loops know rewards: a row's reward
    on the last token the policy sampled (where it sampled none, on the last response token), and the rewards of turns
    on the last token of each. Object columns are ``__num_turns__``, ``episode_status``, those of `TURN_COLUMNS` that
    some output has, and the outputs' ``extra_fields``; a row without has None. An output without response tokens gets
    one, padding that is masked, for its reward to stand on.

    Raises:
        ValueError: only some of the outputs have log-probs or rewards. Failed ones (``status`` "error") need neither.
    """
    has_log_probs = _all_or_none(outputs, "response_logprobs")
    log_probs = [0.0] if has_log_probs else None
    padding: dict[str, Any] = {"response_ids": [pad_token_id], "response_mask": [0], "response_logprobs": log_probs}
    outputs = [output if output.response_ids else replace(output, **padding) for output in outputs]
    # a model reads something before the first token it scores; an episode that failed early has no prompt
    is_bare = [output.status == EpisodeStatus.ERROR and not output.prompt_ids for output in outputs]
    outputs = [
        replace(output, prompt_ids=[pad_token_id]) if bare else output
        for output, bare in zip(outputs, is_bare, strict=True)
    ]
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
        rewards = [reward for output in outputs for reward in token_rewards(output)]
        batch.put("rm_scores", responses.like(torch.tensor(rewards, dtype=torch.float32)))
    batch.non_tensor_batch = _object_columns(outputs)
    return batch


TURN_COLUMNS = ("turn_rewards", "turn_spans", "turn_state_ids", "messages")
"""Fields of `AgentLoopOutput` that become object columns."""


def token_rewards(output: AgentLoopOutput) -> list[float]:
    """Rewards of an output's response tokens: of each turn on its last token, of the episode on the last generated.

    Raises:
        ValueError: there is not one reward a turn.
    """
    rewards = [0.0] * len(output.response_ids)
    spans = turn_spans(output)
    if output.turn_rewards is not None:
        if len(output.turn_rewards) != len(spans):
            raise ValueError(
                f"AgentLoopOutput.turn_rewards has {len(output.turn_rewards)} entries and the response {len(spans)} "
                "turns. Give one for each turn of the policy: a run of ones in response_mask, or an entry of "
                "turn_spans."
            )
        for (_, last), reward in zip(spans, output.turn_rewards, strict=True):
            rewards[last - 1] += float(reward)
    sampled = [place for place, is_own in enumerate(output.response_mask) if is_own]
    rewards[sampled[-1] if sampled else -1] += float(output.reward_score or 0.0)
    return rewards


def turn_spans(output: AgentLoopOutput) -> Sequence[tuple[int, int]]:
    """Return first and last + 1 of the response tokens of each turn: as given, or the runs of ones in the mask."""
    if output.turn_spans is not None:
        return output.turn_spans
    edges = np.flatnonzero(np.diff([0, *(value != 0 for value in output.response_mask), 0]))
    return [(int(first), int(last)) for first, last in edges.reshape(-1, 2)]


def _has_turns(output: AgentLoopOutput) -> bool:
    is_told = output.turn_spans is not None or output.turn_rewards is not None
    return output.status != EpisodeStatus.ERROR and (is_told or output.num_turns > 2)


MEASURED = ("finish_reason", "rollout_version", "rollout_seconds", "episode_seconds", "agent_name")
"""Further fields that the manager adds to every output."""


def episode_info(output: AgentLoopOutput) -> dict[str, Any]:
    """Return what an output says of its episode: numbers among ``extra_fields``, and ``episode_info`` among them."""
    fields = {name: value for name, value in output.extra_fields.items() if name not in MEASURED}
    numbers = {name: value for name, value in fields.items() if isinstance(value, bool | int | float | np.number)}
    return {**numbers, **(fields.get("episode_info") or {})}


def _object_columns(outputs: Sequence[AgentLoopOutput]) -> dict[str, np.ndarray]:
    columns = {"__num_turns__": np.array([output.num_turns for output in outputs], dtype=np.int32)}
    values: dict[str, list[Any]] = {}
    if any(output.status is not None for output in outputs):
        values[STATUS_COLUMN] = [None if output.status is None else str(output.status) for output in outputs]
    for name in TURN_COLUMNS:
        if any(getattr(output, name) is not None for output in outputs):
            values[name] = [getattr(output, name) for output in outputs]
    if any(_has_turns(output) for output in outputs):
        # kept: the mask will also lose tokens that are left out of the loss
        values["turn_spans"] = [turn_spans(output) if _has_turns(output) else None for output in outputs]
    for name in dict.fromkeys(name for output in outputs for name in output.extra_fields):
        values[name] = [output.extra_fields.get(name) for output in outputs]
    infos = [episode_info(output) for output in outputs]
    if any(infos):
        values["episode_info"] = [info or None for info in infos]
    for name, column in values.items():
        columns[name] = np.empty(len(outputs), dtype=object)  # numpy would make a matrix of lists of one length
        columns[name][:] = column
    return columns


def check_images(output: AgentLoopOutput, row: Mapping[str, Any]) -> None:
    """Refuse images in an output other than those of its row, which are the only ones the update reads.

    Raises:
        NotImplementedError: it has.
    """
    in_output, in_row = (dict(data or {}) for data in (output.multi_modal_data, row.get("multi_modal_data")))
    for kind, items in in_output.items():
        known = len(in_row.get(kind) or ())
        if len(items or ()) > known:
            raise NotImplementedError(
                f"AgentLoopOutput.multi_modal_data has {len(items)} of kind {kind!r}, the row {known}: "
                "images that are added while a loop runs are not supported, the update would not read them. Use the "
                "row's own images only."
            )


def response_to_score(output: AgentLoopOutput | Sequence[AgentLoopOutput]) -> tuple[list[int], int] | None:
    """Return tokens and number of turns of a row that a reward function can score before the others of its batch end.

    None: it is scored with the batch, or not by a reward function.
    """
    if not isinstance(output, AgentLoopOutput) or not output.response_ids or output.status == EpisodeStatus.ERROR:
        return None
    if output.reward_score is not None or "reward_scores" in output.extra_fields:
        return None
    return output.response_ids, output.num_turns


def spread(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """Seconds by name over the rows: ``agent_loop/{name}/{min,max,mean}``."""
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for output in outputs for name in output.seconds):
        seconds = [float(output.seconds.get(name, 0.0)) for output in outputs]
        for kind, number in (("min", min(seconds)), ("max", max(seconds)), ("mean", sum(seconds) / len(seconds))):
            metrics[f"agent_loop/{name}/{kind}"] = number
    return metrics


def _all_or_none(outputs: Sequence[AgentLoopOutput], name: str) -> bool:
    counted = [i for i, output in enumerate(outputs) if output.status != EpisodeStatus.ERROR]
    present = [i for i in counted if getattr(outputs[i], name) is not None]
    if present and len(present) < len(counted):
        missing = next(i for i in counted if getattr(outputs[i], name) is None)
        raise ValueError(
            f"AgentLoopOutput.{name} is given in row {present[0]} and missing in row {missing}: a batch has it for "
            "every row or for none. Let every agent loop of the data set it, or none."
        )
    return bool(present)


def _with_prompts_of(prompts: DataProto, outputs: Sequence[AgentLoopOutput]) -> DataProto:
    """Return the rows with the prompts of the outputs.

    A prompt that a loop did not change keeps the ids that the model reads: an image has one token in
    ``raw_prompt_ids``, and in ``input_ids`` as many as it has features.
    """
    prompt_ids = [list(output.prompt_ids) for output in outputs]
    if "input_ids" in prompts.keys():
        read = [row.tolist() for row in prompts.ragged("input_ids").rows()]
        raw_ids = prompts.non_tensor_batch.get("raw_prompt_ids", read)
        rows = zip(prompt_ids, raw_ids, read, strict=True)
        prompt_ids = [ids if own == list(raw) else own for own, raw, ids in rows]
        if prompt_ids == read:
            return prompts
    ids = np.empty(len(outputs), dtype=object)
    ids[:] = prompt_ids
    return DataProto(non_tensor_batch={"raw_prompt_ids": ids})


# -- Rows that failed ------------------------------------------------------------------------------------------------


class EpisodeError(RuntimeError):
    """Too many agent loops failed; the message names the causes."""

    exit_class = ExitCode.DATA


def failed_output(row: Mapping[str, Any], name: str, cause: str, seconds: float) -> AgentLoopOutput:
    """Return the output of a row whose agent loop failed: its prompt, and no token that counts."""
    columns = {"episode_error": cause, "agent_name": name, "episode_seconds": seconds}
    prompt = list(row["raw_prompt_ids"]) if len(row["raw_prompt_ids"]) else []
    metrics = {"generate_sequences": seconds}
    return AgentLoopOutput(prompt, [], [], status=EpisodeStatus.ERROR, metrics=metrics, extra_fields=columns)


def check_failures(outputs: Sequence[AgentLoopOutput], max_share: float) -> dict[str, int]:
    """Return the causes of failures among ``outputs``, with their numbers.

    Raises:
        EpisodeError: more than ``max_share`` of them failed.
    """
    failed = [output for output in outputs if output.status == EpisodeStatus.ERROR]
    causes = Counter(str(output.extra_fields.get("episode_error")) for output in failed)
    if len(failed) > max_share * len(outputs):
        lines = "".join(f"\n  {count} times: {cause}" for cause, count in causes.most_common(5))
        raise EpisodeError(
            f"{len(failed)} of {len(outputs)} episodes failed, more than env.max_error_share={max_share:g} allows:"
            f"{lines}\nMend what they name, or raise env.max_error_share to train on the others."
        )
    return dict(causes)
