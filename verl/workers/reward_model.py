"""The reward model's worker: prompts and responses in, one score each out, at the response's last token.

The model reads either the policy's token ids or, where its tokenizer is another, the conversation written in its
own chat template. The score is the model's output at the last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
import torch
from torch import Tensor

from verl.batch.ragged import Ragged
from verl.config.reward import RewardModelConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_users_modules
from verl.utils.process import no_collection
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine import Want
from verl.workers.model_worker import EngineWorker
from verl.workers.roles import model_spec

REWARD_COLUMNS = ("input_ids", "attention_mask", "prompts", "responses", "raw_prompt")
"""Columns scoring reads, those of them that there are."""


class ChatRetokenizer:
    """Conversations of the policy as the reward model's own tokens.

    Args:
        policy: tokenizer that made the responses.
        judge: the reward model's; it has a chat template.
        max_length: tokens to keep of a conversation, from its start; None keeps all.
    """

    def __init__(self, policy: Any, judge: Any, max_length: int | None = None) -> None:
        self.policy = policy
        self.judge = judge
        self.max_length = max_length

    def texts(self, prompts: Sequence[Any], responses: Sequence[Tensor]) -> list[str]:
        """Each prompt's messages with the response as the assistant's, in the judge's template.

        A response is the text that a reward function sees, special tokens left out; a prompt that is a plain text is a
        user's message.
        """
        # the judge must not see the policy's end-of-sequence token as text
        answers = self.policy.batch_decode([row.tolist() for row in responses], skip_special_tokens=True)
        chats = [[{"role": "user", "content": p}] if isinstance(p, str) else list(p) for p in prompts]
        texts = []
        for chat, answer in zip(chats, answers, strict=True):
            chat.append({"role": "assistant", "content": answer})
            try:
                texts.append(self.judge.apply_chat_template(chat, tokenize=False))
            except jinja2.TemplateError as error:
                roles = ", ".join(str(message.get("role")) for message in chat)
                raise ValueError(
                    f"reward_model.model.path={self.judge.name_or_path}: its chat template does not take a "
                    f"conversation of the roles {roles} ({error}). Leave out or rename such messages in the data, or "
                    "change the template."
                ) from error
        return texts

    def __call__(self, prompts: Sequence[Any], responses: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The judge's ids of each conversation, and of each (B,) how many there were before truncation."""
        ids = self.judge(self.texts(prompts, responses), add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(row[: self.max_length], dtype=torch.int64) for row in ids]
        return rows, torch.tensor([len(row) for row in ids])


class RewardModelWorker(EngineWorker):
    """The reward model."""

    role = "rm"
    config: RewardModelConfig

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the reward model; call once."""
        import_users_modules(self.config.model.external_lib)
        with no_collection(), self.ledger.phase("start"):
            self.start_process()
            self.init_reward_model()

    def init_reward_model(self) -> None:
        """Load the model, and the tokenizers if conversations are rewritten."""
        model = self.config.model
        spec = model_spec(model, self.config.sharding, "reward", remove_padding=model.use_remove_padding)
        self.reward_model = self.model_engine(spec, self.config, mesh="rm", train=False)
        self.retokenizer: ChatRetokenizer | None = None
        if model.input_tokenizer:
            policy, judge = (
                hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
                for path in (self.tokenizer_path or model.input_tokenizer, model.path)
            )
            max_length = max_input_tokens(self.config.max_length, self.reward_model.model_config)
            self.retokenizer = ChatRetokenizer(policy, judge, max_length)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, mesh="rm", reads=REWARD_COLUMNS)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Score every response: adds ``rm_scores`` (B, R), the score at the last response token and zero elsewhere.

        Also ``rm_tokens`` and ``rm_tokens_cut``, both (B,) int64: tokens the model read, and tokens left out because
        of ``max_length``. An empty response has no token to hold its score.
        """
        responses = data.ragged("responses")
        if self.retokenizer is None:
            rows = list(data.ragged("input_ids").rows())
            lengths = torch.tensor([len(row) for row in rows])
        else:
            rows, lengths = self.retokenizer(list(data.non_tensor_batch["raw_prompt"]), list(responses.rows()))
        with self.ledger.phase("rm_score"), self.reward_model.on_device():
            scores = self.reward_model.infer(last_token_batch(rows), Want.VALUES, self.config.forward_split)
        scored = DataProto.from_ragged({"rm_scores": scores_at_last_token(scores.ragged("values").values, responses)})
        read = torch.tensor([len(row) for row in rows])
        scored.put("rm_tokens", read)
        scored.put("rm_tokens_cut", lengths - read)
        return scored


def max_input_tokens(max_length: int | None, model_config: Any) -> int | None:
    """Tokens a reward model may read: ``max_length``, or as many as it has positions for."""
    return max_length or getattr(model_config.get_text_config(), "max_position_embeddings", None)


def last_token_batch(rows: Sequence[Tensor]) -> DataProto:
    """A batch of whole texts whose responses are the last token of each: where a score is read."""
    width = max(len(row) for row in rows)
    # padded on the left, so that the last token of every text is in the last column
    whole = Ragged.from_rows(list(rows), width, side="left")
    return DataProto.from_ragged(
        {
            "input_ids": whole,
            "attention_mask": whole.like(torch.ones_like(whole.values)),
            "responses": Ragged.from_rows([row[-1:] for row in rows], 1),
        }
    )


def scores_at_last_token(scores: Tensor, responses: Ragged) -> Ragged:
    """A column of the responses with one of ``scores`` (B,) at the last token of each."""
    layout = responses.layout
    has_tokens = layout.lengths > 0
    column = torch.zeros(layout.total)
    # empty responses keep zero scores: they have no last token
    column[layout.offsets[1:][has_tokens] - 1] = scores[has_tokens].float()
    return responses.like(column)
