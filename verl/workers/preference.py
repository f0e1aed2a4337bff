"""Verbs of models that learn from preference pairs: `PreferenceWorker`, and `RewardTrainWorker` of a reward model.

Rows come as pairs, the chosen one before the rejected one, and stay so in every rank's part and every micro-batch.
"""

from __future__ import annotations

from typing import Any

from verl.algorithms.losses.preference import PairwiseLoss, policy_pair_loss, reward_model_loss
from verl.algorithms.valid_tokens import valid_tokens
from verl.batch import MicroBatching
from verl.models.loader import ModelSpec
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine import Want
from verl.workers.roles import TOKENS
from verl.workers.supervised import SupervisedWorker

PAIR_COLUMNS = (*TOKENS, "ref_log_prob", "pairs", "margin")
"""Columns that a loss of pairs may read."""


class PreferenceWorker(SupervisedWorker):
    """One rank of a policy that learns from preference pairs, and of its reference."""

    loss: PairwiseLoss

    @property
    def rows_stay_together(self) -> bool:
        """Whether micro-batches hold whole pairs; not where a micro-batch can have one row only."""
        return not self.actor.one_row_per_micro_batch

    def build_loss(self) -> PairwiseLoss:
        """The loss of the section ``algorithm``."""
        return policy_pair_loss(self.config.actor.preference, self.rows_stay_together)

    @property
    def split(self) -> MicroBatching:
        """Limits of a micro-batch, which holds whole pairs."""
        return self.config.actor.update_split._replace(together=2)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_reference(self, before_training: bool) -> None:
        """Let `compute_ref_log_prob` score: with LoRA by the model below the adapter, else by a copy or another model.

        Args:
            before_training: it scores before the first step only, when the model is its own reference.
        """
        with self.ledger.phase("start"):
            if self.base_model_is_reference:
                self.use_base_model_as_reference()
            elif before_training and self.config.ref.own_path is None:
                self.reference = self.actor
                self.report_mesh("ref", self.actor)
            else:
                self.init_reference()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_reference(self) -> None:
        """Let go of the reference's weights."""
        self.reference = None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=PAIR_COLUMNS, balanced=True)
    def update_pairs(self, data: DataProto) -> DataProto:
        """Take one optimizer step on the pairs of all ranks; returns metrics only."""
        return self.take_step(data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="actor", reads=PAIR_COLUMNS, balanced=True)
    def measure_pairs(self, data: DataProto) -> DataProto:
        """Return of each row its ``score``, and of a policy ``log_prob`` and ``tokens`` of the response; (B,) each."""
        is_policy, split = self.loss.score != "value", self.split
        with self.ledger.phase("log_prob"), self.actor.on_device():
            scored = self.actor.infer(data, Want.LOG_PROBS if is_policy else Want.VALUES, split)
        outputs = scored.ragged("log_probs" if is_policy else "values").values.double()
        columns = {name: data.ragged(name) for name in ("response_mask", *self.loss.reference)}
        found = {"score": self.loss.scores(outputs, columns)}
        if is_policy:
            tokens = valid_tokens(columns["response_mask"])
            found |= {"log_prob": tokens.row_sum(tokens.pack(outputs)), "tokens": tokens.lengths}
        return DataProto.from_dict(tensors=found)


class RewardTrainWorker(PreferenceWorker):
    """One rank of a reward model that learns from preference pairs: a causal model with one score a text."""

    def build_loss(self) -> PairwiseLoss:
        """Bradley-Terry."""
        return reward_model_loss(self.config.actor.preference, self.rows_stay_together)

    def policy_spec(self) -> ModelSpec:
        """The body of a language model with a new head of one score, or a reward model to train further."""
        return self.spec_with_head("reward", new_head=True)

    def init_policy(self) -> None:
        """Load the model, and name a padding token by which other programs find the last token of a text."""
        super().init_policy()
        tokenizer, config = self.checkpoints.tokenizer, self.actor.module.config
        tokenizer.pad_token_id = padding_token(tokenizer)
        config.pad_token_id = config.get_text_config().pad_token_id = tokenizer.pad_token_id


def padding_token(tokenizer: Any) -> int:
    """A token that ends no text: classifiers of transformers score the last token that is not this one.

    Raises:
        ValueError: the tokenizer has none.
    """
    own, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    others = [i for i in tokenizer.all_special_ids if i not in (eos, tokenizer.bos_token_id)]
    for token in (own, tokenizer.unk_token_id, *others, tokenizer.bos_token_id):
        if token is not None and token != eos:
            return int(token)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} has no special token but {tokenizer.eos_token!r}, which ends texts: "
        "programs that read the reward model in padded batches would take it for padding. Add a pad_token to it."
    )
