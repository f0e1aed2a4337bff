"""The driver's side of ``algorithm.rollout_correction``: which columns are read, and which are changed.

Weights are known once the old log-probs are; tokens are rejected only after the advantages, which see every response
and its reward. Reads and writes columns of a DataProto; knows nothing of workers.
"""

from __future__ import annotations

import inspect
from typing import Any

from verl.algorithms.advantage import get_adv_estimator_fn
from verl.algorithms.correction import importance_weights, kept_tokens
from verl.algorithms.policy_loss import get_policy_loss_fn
from verl.protocol import DataProto
from verl.trainer.ppo.experience import move_to_sampled_tokens, put_response_column, response_column

_KEY = "algorithm.rollout_correction"


def check_correction(config: Any) -> None:
    """Refuse functions that cannot do what ``algorithm.rollout_correction`` asks; built-in ones all can.

    Raises:
        ValueError: the policy loss takes no weights, or the estimator reads what ``bypass_mode`` leaves out.
    """
    options = config.algorithm.rollout_correction
    mode, estimator = config.actor_rollout_ref.actor.policy_loss.loss_mode, config.algorithm.adv_estimator
    if options.rollout_is and "rollout_is_weights" not in inspect.signature(get_policy_loss_fn(mode)).parameters:
        raise ValueError(
            f"{_KEY}.rollout_is={options.rollout_is} with actor_rollout_ref.actor.policy_loss.loss_mode={mode}: that "
            "function has no argument rollout_is_weights, so it would not weigh its tokens. Add the argument, (B, R) "
            "factors of each token's loss, or set rollout_is=null."
        )
    if options.bypass_mode:
        named = inspect.signature(get_adv_estimator_fn(estimator)).parameters
        missing = [name for name in ("entropys", "sum_pi_squared") if name in named]
        if missing:
            raise ValueError(
                f"{_KEY}.bypass_mode=true with algorithm.adv_estimator={estimator}: the estimator reads "
                f"{', '.join(missing)}, which come from the pass that is left out. Set bypass_mode=false, or choose "
                "another estimator."
            )


def bypass_old_log_probs(data: DataProto) -> None:
    """Take the sampler's log-probs for those of the policy that sampled: adds ``old_log_probs`` (B, R)."""
    _check_sampler_spoke(data, "bypass_mode=true")
    data.put("old_log_probs", data.ragged("rollout_log_probs"))


def weigh_tokens(data: DataProto, options: Any) -> dict[str, float]:
    """Add ``rollout_is_weights`` (B, R), if ``options.rollout_is`` asks for them; returns metrics.

    Reads ``old_log_probs``, ``rollout_log_probs`` and ``response_mask``, each (B, R).
    """
    if not options.rollout_is or options.bypass_mode:  # then the loss weighs by the ratio of the policy being trained
        return {}
    _check_sampler_spoke(data, f"rollout_is={options.rollout_is}")
    weights, metrics = importance_weights(
        *_compared(data), options.rollout_is, *options.weighting, options.rollout_is_batch_normalize
    )
    put_response_column(data, "rollout_is_weights", weights)
    return metrics


def reject_tokens(data: DataProto, options: Any) -> dict[str, float]:
    """Take tokens out of ``response_mask`` (B, R), as ``rollout_rs`` and the veto say; returns metrics.

    Call it after the advantages: they are estimated from all responses, rewards of rejected tokens included. The
    scores of rejected tokens move to those before them: losses that ask which response succeeded read them.
    """
    if not options.rejects or options.bypass_mode:
        return {}
    veto, metrics = options.rollout_token_veto_threshold, {}
    asked = f"rollout_rs={options.rollout_rs}" if options.rollout_rs else f"rollout_token_veto_threshold={veto}"
    _check_sampler_spoke(data, asked)
    old, rollout, mask = _compared(data)
    kept, several = mask, len(options.rejections) > 1
    for kind, upper, lower in options.rejections or [(None, 0.0, None)]:
        by_this, found = kept_tokens(old, rollout, mask, kind, upper, lower, veto)
        kept = kept * by_this
        metrics |= {f"{name}/{kind}" if several else name: value for name, value in found.items()}
    if several:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1 - (kept.sum() / mask.sum().clamp(min=1)).item()
    put_response_column(data, "response_mask", kept)
    if "token_level_scores" in data.keys():
        move_to_sampled_tokens(data, "token_level_scores")
    return metrics


def _compared(data: DataProto) -> list[Any]:
    return [response_column(data, name) for name in ("old_log_probs", "rollout_log_probs", "response_mask")]


def _check_sampler_spoke(data: DataProto, asked: str) -> None:
    if "rollout_log_probs" not in data.keys():
        raise ValueError(
            f"{_KEY}.{asked} needs the column 'rollout_log_probs', which this batch does not have; it has "
            f"{', '.join(sorted(data.keys()))}. Have what samples return its log-probs (an agent loop: "
            "response_logprobs), or leave the option out."
        )
