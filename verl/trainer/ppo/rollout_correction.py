"""Rollout correction on the driver (``algorithm.rollout_correction``): importance weights, rejection, mismatch.

Weights are known once the old log-probs are; tokens are rejected only after the advantages, which see every response
and its reward. Reads and writes columns of a DataProto; knows nothing of workers.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from verl.algorithms.advantages import get_adv_estimator_fn
from verl.algorithms.correction import importance_weights, kept_tokens, mismatch_metrics
from verl.algorithms.losses import get_policy_loss_fn
from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.experience import move_to_sampled_tokens, put_response_column, response_column
from verl.utils.torch_functional import PrecisionType

_KEY = "algorithm.rollout_correction"


def check_correction(config: PPOConfig) -> None:
    """Refuse functions that do not support the configured correction; built-in ones all do.

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
    """Use the rollout's log-probs as ``old_log_probs`` (B, R)."""
    _require_rollout_log_probs(data, "bypass_mode=true")
    data.put("old_log_probs", data.ragged("rollout_log_probs"))


def weigh_tokens(data: DataProto, options: RolloutCorrectionConfig) -> dict[str, float]:
    """Add ``rollout_is_weights`` (B, R), if ``options.rollout_is`` is set; return metrics.

    Reads ``old_log_probs``, ``rollout_log_probs`` and ``response_mask``, each (B, R).
    """
    if not options.rollout_is or options.bypass_mode:  # then the loss weighs by the ratio of the policy being trained
        return {}
    _require_rollout_log_probs(data, f"rollout_is={options.rollout_is}")
    weights, metrics = importance_weights(
        *_compared(data), options.rollout_is, *options.weighting, options.rollout_is_batch_normalize
    )
    put_response_column(data, "rollout_is_weights", weights)
    return metrics


def reject_tokens(data: DataProto, options: RolloutCorrectionConfig) -> dict[str, float]:
    """Remove tokens from ``response_mask`` (B, R) by ``rollout_rs`` and the veto; return metrics.

    Call it after the advantages: they are estimated from all responses, rewards of rejected tokens included. The
    scores of rejected tokens move to the tokens before them: losses that depend on success read them.
    """
    if not options.rejects or options.bypass_mode:
        return {}
    veto = options.rollout_token_veto_threshold
    metrics: dict[str, float] = {}
    option = f"rollout_rs={options.rollout_rs}" if options.rollout_rs else f"rollout_token_veto_threshold={veto}"
    _require_rollout_log_probs(data, option)
    old, rollout, mask = _compared(data)
    kept, several = mask, len(options.rejections) > 1
    only_veto: list[tuple[str | None, float, float | None]] = [(None, 0.0, None)]
    for kind, upper, lower in options.rejections or only_veto:
        kept_by_one, values = kept_tokens(old, rollout, mask, kind, upper, lower, veto)
        kept = kept * kept_by_one
        metrics |= {f"{name}/{kind}" if several else name: value for name, value in values.items()}
    if several:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1 - (kept.sum() / mask.sum().clamp(min=1)).item()
    put_response_column(data, "response_mask", kept)
    if "token_level_scores" in data.keys():
        move_to_sampled_tokens(data, "token_level_scores")
    return metrics


def _compared(data: DataProto) -> list[Any]:
    return [response_column(data, name) for name in ("old_log_probs", "rollout_log_probs", "response_mask")]


def _require_rollout_log_probs(data: DataProto, option: str) -> None:
    if "rollout_log_probs" not in data.keys():
        raise ValueError(
            f"{_KEY}.{option} needs the column 'rollout_log_probs', which this batch does not have; it has "
            f"{', '.join(sorted(data.keys()))}. Have rollouts return log-probs (an agent loop: "
            "response_logprobs), or leave the option out."
        )


# -- How far the rollout's log-probs are from training's: metrics, the worst tokens, one warning -----------------------


_ROLLOUT = "actor_rollout_ref.rollout"
_WEIGHS = "algorithm.rollout_correction.rollout_is=token"
_WORST = 5
"""Tokens written down of a step."""

FILE = "rollout_mismatch.jsonl"


class MismatchMonitor:
    """Compares ``rollout_log_probs`` with ``old_log_probs`` at every step.

    Args:
        config: the whole tree.
        decode: token ids -> text.
    """

    def __init__(self, config: PPOConfig, decode: Callable[[list[int]], str]):
        self.config = config
        self.decode = decode
        self.has_warned = False
        self.path = Path(config.trainer.default_local_dir).expanduser() / FILE

    def __call__(self, batch: DataProto, step: int) -> tuple[dict[str, float], str | None]:
        """The metrics of a batch, and the warning if it is due.

        A step whose mean difference is over ``rollout.mismatch_threshold`` is a line in ``rollout_mismatch.jsonl``
        next to the checkpoints; the first of them is the warning.
        """
        rollout, actor, mask = (batch.ragged(name) for name in ("rollout_log_probs", "old_log_probs", "response_mask"))
        sampled = mask.values.bool()
        metrics = mismatch_metrics(rollout.values[sampled], actor.values[sampled])
        mean = metrics.get("training/rollout_probs_diff_mean", 0.0)
        if mean <= self.config.actor_rollout_ref.rollout.mismatch_threshold:
            return metrics, None
        worst = worst_tokens(batch, step, self.decode)
        self._write({"step": step, "mean_difference": mean, "worst": worst})
        if self.has_warned:
            return metrics, None
        self.has_warned = True
        return metrics, self._warning(step, mean, worst)

    def _write(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _warning(self, step: int, mean: float, worst: list[dict[str, Any]]) -> str:
        limit = self.config.actor_rollout_ref.rollout.mismatch_threshold
        causes = [f"  {number}. {text}" for number, text in enumerate(likely_causes(self.config), 1)]
        lines = [
            f"WARNING: the rollout sampled tokens with probabilities that differ from the actor's by {mean:.4f} on "
            f"average in step {step}, more than {_ROLLOUT}.mismatch_threshold={limit:g}. The policy learns from text "
            f"that another distribution wrote; training may collapse.",
            "The worst tokens:",
            *(
                f"  {token['uid']}, response {token['row']}, token {token['position']} {token['text']!r}: the rollout "
                f"gave it {token['rollout_prob']:.3f}, the actor {token['actor_prob']:.3f}"
                for token in worst
            ),
            "Likely causes, the likeliest first:",
            *causes,
            "Not among them: weights that did not arrive. Every sync is confirmed by checksums read back from the "
            "engine.",
            f"This is printed once; every such step is a line in {self.path}.",
        ]
        return "\n".join(lines)


def worst_tokens(batch: DataProto, step: int, decode: Callable[[list[int]], str]) -> list[dict[str, Any]]:
    """The tokens with the largest difference of probabilities, one object each.

    Keys: step, uid (of the prompt), row (of the batch), position (in the response), token_id, text, rollout_prob,
    actor_prob.
    """
    rollout, actor = batch.ragged("rollout_log_probs"), batch.ragged("old_log_probs")
    mu, pi = rollout.values.float().exp(), actor.values.float().exp()
    difference = (mu - pi).abs() * batch.ragged("response_mask").values
    ids, offsets = batch.ragged("responses").values, rollout.layout.offsets
    worst = []
    for position in difference.topk(min(_WORST, len(difference))).indices.tolist():
        row = int(torch.searchsorted(offsets, position, right=True)) - 1
        token = int(ids[position])
        worst.append(
            {
                "step": step,
                "uid": str(batch.non_tensor_batch["uid"][row]) if "uid" in batch.non_tensor_batch else None,
                "row": row,
                "position": position - int(offsets[row]),
                "token_id": token,
                "text": decode([token]),
                "rollout_prob": mu[position].item(),
                "actor_prob": pi[position].item(),
            }
        )
    return worst


def likely_causes(config: PPOConfig) -> list[str]:
    """Return causes in the settings of a mismatch between rollout and trainer, the likeliest first."""
    return list(_causes(config.actor_rollout_ref))


def _causes(shared: ActorRolloutRefConfig) -> Iterator[str]:
    rollout = shared.rollout
    if rollout.skip_rollout:
        yield f"{_ROLLOUT}.skip_rollout=true reuses text that other weights may have generated: differences are normal."
    if rollout.staleness:
        yield (
            f"{_ROLLOUT}.max_staleness={rollout.staleness}: text is generated by older weights than the actor's, as "
            f"configured; {_WEIGHS} weighs it. Lower actor.optim.lr if the difference grows."
        )
    mode = (rollout.engine_kwargs.get("vllm") or {}).get("logprobs_mode")
    if rollout.name == "vllm" and mode not in (None, "processed_logprobs") and rollout.temperature != 1:
        yield (
            f"{_ROLLOUT}.engine_kwargs.vllm.logprobs_mode={mode} leaves out {_ROLLOUT}.temperature="
            f"{rollout.temperature}, by which the actor divides. Leave it out."
        )
    engine = dict(rollout.engine_kwargs.get(rollout.name) or {})
    for name in ("quantization", "kv_cache_dtype"):
        if engine.get(name) not in (None, "auto"):
            yield (
                f"{_ROLLOUT}.engine_kwargs.{rollout.name}.{name}={engine[name]} computes with fewer bits than "
                f"the actor. Leave it out."
            )
    truncating = {
        "top_p": rollout.top_p < 1,
        "top_k": rollout.top_k > 0,
        "min_p": rollout.min_p > 0,
        "repetition_penalty": rollout.repetition_penalty != 1,
        "use_fire_sampling": rollout.use_fire_sampling,
    }
    if named := [f"{_ROLLOUT}.{name}={rollout[name]}" for name, changes in truncating.items() if changes]:
        yield (
            f"{', '.join(named)}: the rollout samples from a changed distribution and reports its probabilities, the "
            f"actor's are of the whole one. Train without."
        )
    yield from _number_formats(shared)
    if rollout.name != "hf":
        yield (
            f"{rollout.name} computes this model otherwise than transformers: attention kernels, capped scores, "
            f"rotary scaling, expert routing. Compare a step with {_ROLLOUT}.name=hf."
        )
    yield (
        "the policy itself became so sharp, or its numbers so large, that rounding shows: look at actor/grad_norm and "
        f"actor/entropy of the last steps; {_WEIGHS} weighs the difference out."
    )


def _number_formats(shared: ActorRolloutRefConfig) -> Iterator[str]:
    rollout = PrecisionType.to_dtype(shared.rollout.dtype)
    actor = PrecisionType.to_dtype(shared.actor.sharding.compute_dtype)
    name = "megatron.dtype" if shared.actor.strategy == "megatron" else "fsdp_config.mixed_precision.param_dtype"
    key = f"actor_rollout_ref.actor.{name}"
    if rollout != actor:
        computes = str(actor).removeprefix("torch.")
        yield (
            f"{_ROLLOUT}.dtype={shared.rollout.dtype} but the actor computes in {computes} ({key}). Set both to one "
            "format."
        )
    elif rollout is torch.bfloat16:
        yield (
            f"both compute in bfloat16, with other kernels: 0.001 to 0.005 are usual, more with long responses. Set "
            f"{_ROLLOUT}.dtype and {key} to float16 or float32 and look whether it goes away."
        )
