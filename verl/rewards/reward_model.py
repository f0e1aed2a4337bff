"""Reward model, on the driver: checks before the run, the rows it scores, and its metrics."""

from typing import Any

import numpy as np

from verl.models.heads import reward_class, stored_shapes, stores_head
from verl.models.loader import ModelSpec, load_config
from verl.protocol import DataProto
from verl.utils.tokenizer import hf_tokenizer


def check_reward_model(config: Any, tokenizer: Any) -> None:
    """Check before any worker starts whether ``reward_model.model`` is one, and can read this policy's responses.

    Args:
        tokenizer: the policy's.

    Raises:
        ValueError: names the option to change.
    """
    model, rollout = config.reward_model.model, config.actor_rollout_ref.rollout
    key = f"reward_model.model.path={model.path}"
    spec = ModelSpec(model.path, "reward", trust_remote_code=model.trust_remote_code, external_lib=model.external_lib)
    try:
        model_config = load_config(spec)
        reward_class(model.path, model_config)
    except ValueError as error:
        raise ValueError(f"reward_model.{error}") from None
    # None: no safetensors files to read it from, which is no reason to refuse
    if stores_head(spec.folder) is False:
        raise ValueError(
            f"{key} holds no weights of a head with one output among its {len(stored_shapes(spec.folder))} tensors: "
            "its scores would be random. Name a checkpoint of a trained reward model."
        )
    if config.reward_model.runs_server and not str(model_config.architectures[0]).endswith("SequenceClassification"):
        raise ValueError(
            f"{key} holds {model_config.architectures[0]}, and reward_model.rollout.name="
            f"{config.reward_model.rollout['name']} scores with sequence classifiers only. Leave reward_model.rollout "
            "out: the training engine scores with it."
        )
    if model.input_tokenizer:
        # texts are tokenised anew: the checks behind this one are about the policy's token ids and lengths
        judge = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        if not judge.chat_template:
            raise ValueError(
                f"{key} has no chat template to write conversations in (reward_model.model.input_tokenizer="
                f"{model.input_tokenizer}). Put one into its folder as chat_template.jinja, or set "
                "input_tokenizer=null if it reads the policy's tokens."
            )
        return
    text = model_config.get_text_config()
    # len(), since `tokenizer.vocab_size` leaves added tokens out
    if text.vocab_size < len(tokenizer):
        raise ValueError(
            f"{key} knows {text.vocab_size} tokens and the policy {len(tokenizer)}: with "
            "reward_model.model.input_tokenizer=null it reads the policy's token ids. Set input_tokenizer to the "
            "policy's tokenizer, so that texts are written in the reward model's own tokens."
        )
    longest = rollout.prompt_length + rollout.response_length
    # a model without positions of its own (such as a state space model) takes any length
    positions = getattr(text, "max_position_embeddings", None) or longest
    if positions < longest:
        raise ValueError(
            f"{key} has positions for {positions} tokens, and prompt and response have up to {longest}. Shorten "
            "data.max_prompt_length or data.max_response_length."
        )


def check_texts(batch: DataProto) -> None:
    """Refuse rows with images, which the reward model would not see.

    Raises:
        ValueError: names a row.
    """
    rows = batch.non_tensor_batch.get("multi_modal_data", ())
    with_images = [i for i, row in enumerate(rows) if row]
    if with_images:
        raise ValueError(
            f"row {with_images[0]} of the batch has images, and reward_model.enable=true: reward models read texts "
            "only. Score these rows with a reward function, or leave them out."
        )


def is_judged(batch: DataProto) -> bool:
    """Whether the reward model scores these validation rows: ``reward_model.style`` of the first is ``model``."""
    # the first row is enough: validation batches are split `by_style` before
    return bool(_styles(batch)[0])


def by_style(batch: DataProto) -> list[DataProto]:
    """The rows that a function scores, and those that the reward model does, in parts that are not empty."""
    judged = _styles(batch)
    return [batch.select_idxs(np.flatnonzero(judged == kind)) for kind in (False, True) if (judged == kind).any()]


def _styles(batch: DataProto) -> np.ndarray:
    rows = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    return np.array([isinstance(row, dict) and row.get("style") == "model" for row in rows], dtype=bool)


def judge_metrics(batch: DataProto) -> dict[str, float]:
    """Return the reward model's scores of a batch as ``reward_model/*``; drops the columns it leaves for this."""
    scores = batch.ragged("rm_scores").trim_padding().sum(-1)
    metrics = {
        "reward_model/score/mean": scores.mean().item(),
        # correction=0: of one row the std is 0, not NaN
        "reward_model/score/std": scores.std(correction=0).item(),
        "reward_model/score/max": scores.max().item(),
        "reward_model/score/min": scores.min().item(),
    }
    if "rm_tokens" in batch.keys():
        tokens = batch.pop(batch_keys=["rm_tokens", "rm_tokens_cut"])
        metrics["reward_model/tokens/mean"] = tokens.column("rm_tokens").float().mean().item()
        metrics["reward_model/cut_share"] = (tokens.column("rm_tokens_cut") > 0).float().mean().item()
    return metrics
