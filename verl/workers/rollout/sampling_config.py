"""From the rollout section to the sampling of one response: what training and validation ask every engine for."""

from __future__ import annotations

from typing import Any

from verl.config.base import plain
from verl.workers.rollout.base import SamplingParams


def sampling_params(config: Any, eos_token_id: int, validate: bool = False, do_sample: bool = True) -> SamplingParams:
    """The sampling of a training or validation response.

    Validation draws by ``val_kwargs``; where that is null it follows training. Its first token is never hot.

    Args:
        config: ``actor_rollout_ref.rollout``.
        eos_token_id: the tokenizer's, which ends responses besides the tokens that the model's folder names.
        do_sample: False makes it greedy, whatever the section says.
    """
    source = config.val_kwargs if validate else config

    def followed(name: str) -> Any:
        return getattr(config, name) if getattr(source, name) is None else getattr(source, name)

    stop, hot = followed("stop"), config.use_fire_sampling and not validate
    extra = {**config.sampling_kwargs, **source.sampling_kwargs}
    return SamplingParams(
        max_tokens=config.response_length,
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        min_p=source.min_p,
        repetition_penalty=followed("repetition_penalty"),
        ignore_eos=config.ignore_eos,
        do_sample=source.do_sample and do_sample,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=(eos_token_id, *followed("stop_token_ids")),
        first_token_temperature=config.fire_temperature if hot else None,
        first_token_top_k=config.fire_top_k if hot and config.top_k <= 0 else -1,
        extra={name: plain(value) for name, value in extra.items() if value is not None},
        want_log_probs=config.calculate_log_probs and not validate,
    )
