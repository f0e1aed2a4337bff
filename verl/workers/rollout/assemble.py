"""Completions to columns: row 1 of the data flow of a PPO step, packed. Nothing else lays out responses.

Token ids only; no tokenizer, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl.batch.layout import Layout
from verl.batch.ragged import Ragged
from verl.batch.windows import join_windows
from verl.config.base import plain
from verl.config.rollout import RolloutConfig, SamplingConfig
from verl.protocol import DataProto
from verl.workers.rollout.base import Completion, SamplingParams


def assemble(
    prompts: DataProto,
    completions: Sequence[Completion],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    version: int | None = None,
) -> DataProto:
    """Put every prompt and its response into one row, prompts padded on the left, responses on the right.

    Reads ``input_ids`` with ``attention_mask`` (B, P), or ``raw_prompt_ids`` where there are none. Adds, all packed:

        prompts (B, P)      responses (B, R)      response_mask (B, R) int64, 1 on sampled tokens
        input_ids, attention_mask, position_ids (B, P + R) int64
        rollout_log_probs (B, R) float32, if the completions carry log-probabilities

    and, not tensors: ``finish_reason``, and ``rollout_version``, that of the weights that generated the row's last
    token.

    Args:
        prompts: one row per completion, in the same order.
        prompt_length: P, columns of the prompt window.
        response_length: R, columns of the response window.
        pad_token_id: value of padding in the id columns.
        version: of completions without a version of their own.

    Raises:
        ValueError: rows and completions differ in number, or a prompt or response does not fit its window.
    """
    if len(prompts) != len(completions):
        raise ValueError(f"assemble: {len(prompts)} prompts but {len(completions)} completions; there is one for each.")
    prompt = _packed_prompts(prompts, prompt_length, pad_token_id)
    response = Ragged.from_rows([c.token_ids for c in completions], response_length, "right", pad_token_id, torch.int64)
    columns = {
        "prompts": prompt,
        "responses": response,
        **join_windows(prompt, response),
        "response_mask": response.constant(1),
    }
    # all requests of a batch have one sampling, so the first speaks for all
    if completions and completions[0].log_probs is not None:
        log_probs = [log_prob for completion in completions for log_prob in completion.log_probs]
        columns["rollout_log_probs"] = response.like(torch.tensor(log_probs, dtype=torch.float32))
    metadata = {
        "finish_reason": [completion.finish_reason for completion in completions],
        "rollout_version": [
            version if completion.version is None else completion.version for completion in completions
        ],
    }
    return DataProto.from_ragged(columns, non_tensors=metadata, meta_info={"pad_token_id": pad_token_id})


def _packed_prompts(prompts: DataProto, prompt_length: int, pad_token_id: int) -> Ragged:
    if "input_ids" not in prompts.keys():
        rows = list(prompts.non_tensor_batch["raw_prompt_ids"])
        return Ragged.from_rows(rows, prompt_length, "left", pad_token_id, torch.int64)
    packed = prompts.ragged("input_ids")
    lengths = packed.layout.lengths
    if len(lengths) and int(lengths.max()) > prompt_length:
        row = int(lengths.argmax())
        raise ValueError(
            f"assemble: prompt {row} has {int(lengths[row])} tokens, more than rollout.prompt_length={prompt_length}. "
            "Raise data.max_prompt_length, or set data.filter_overlong_prompts or data.truncation."
        )
    return Ragged(packed.values, Layout(prompt_length - lengths, lengths, prompt_length), pad_token_id)


# -- Sampling parameters of training and validation from the rollout section -------------------------------------------


def sampling_params(
    config: RolloutConfig, eos_token_id: int, validate: bool = False, do_sample: bool = True
) -> SamplingParams:
    """The sampling of a training or validation response.

    Validation samples by ``val_kwargs``; where that is null it follows training. FIRE's hot first token is for
    training.

    Args:
        config: the rollout section.
        eos_token_id: the tokenizer's, which ends responses besides the tokens that the model's folder names.
        do_sample: False makes it greedy, whatever the section's value.
    """
    source: RolloutConfig | SamplingConfig = config.val_kwargs if validate else config

    def value_of(name: str) -> Any:
        return getattr(config, name) if getattr(source, name) is None else getattr(source, name)

    # FIRE explores: validation measures the plain policy
    stop, hot = value_of("stop"), config.use_fire_sampling and not validate
    extra = {**config.sampling_kwargs, **source.sampling_kwargs}
    return SamplingParams(
        max_tokens=config.response_length,
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        repetition_penalty=value_of("repetition_penalty"),
        ignore_eos=config.ignore_eos,
        do_sample=source.do_sample and do_sample,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=(eos_token_id, *value_of("stop_token_ids")),
        first_token_temperature=config.fire_temperature if hot else None,
        first_token_top_k=config.fire_top_k if hot and config.top_k <= 0 else -1,
        extra={name: plain(value) for name, value in extra.items() if value is not None},
        want_log_probs=config.calculate_log_probs,
    )
