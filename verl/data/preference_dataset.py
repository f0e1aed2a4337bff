"""Preference pairs: rows of data files to two sequences of token ids each, the chosen one and the rejected one.

A pair stays one item of the dataset and two consecutive rows of a batch, the chosen one first. What of them is learned
is what follows their common beginning; of a reward model's, the last token, where its score is read.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
import torch
from torch import Tensor

from verl.data.sft_dataset import SFTDataset, _without_nulls, examples_to_batch
from verl.data.table import DataError, first_bad_rows, leave_out, why_unusable
from verl.data.templates import TemplateRefusal
from verl.data.tokenization import as_messages, encode
from verl.data.turns import MaskRefusal
from verl.protocol import DataProto

logger = logging.getLogger(__name__)

Sequences = list[tuple[list[int], list[bool]]]


class PreferenceDataset(SFTDataset):
    """Preference pairs of data files.

    ``dataset[i]`` has ``chosen`` and ``rejected``, each an item as of `SFTDataset`.

    A row is a prompt and two responses, as texts or as the messages that follow; or two whole conversations that begin
    alike.

    Args:
        scores: the last token of each sequence is marked, where a reward model's score is read, and a conversation is
            everything that its template writes. False: the tokens of the responses are.
    """

    sequences = 2

    def __init__(self, *args: Any, scores: bool = False, **kwargs: Any):
        self.scores = scores
        self.margins: np.ndarray | None = None
        """(pairs,) float64, or None where the column is missing."""
        self.ref_log_probs: list[list[Tensor]] = []
        """Of each pair, log-probabilities of the two responses under the reference, once they are known."""
        super().__init__(*args, **kwargs)

    @property
    def _keys(self) -> tuple[str, str, str]:
        names = ("prompt", "chosen", "rejected")
        prompt, chosen, rejected = (self._key(f"{name}_key", name) for name in names)
        return prompt, chosen, rejected

    def _reads_messages(self) -> bool:
        _, *sides = self._keys
        for key, name in zip(sides, ("data.chosen_key", "data.rejected_key"), strict=True):
            self.dataframe.require(key, name)
        return False

    # one row --------------------------------------------------------------------------------------------------------

    def sequences_of(self, row: Mapping[str, Any]) -> Sequences:
        """Return token ids and mask of the chosen and of the rejected sequence.

        Raises:
            ValueError: the row cannot be used; says why.
        """
        name, *keys = self._keys
        prompt, sides = row.get(name), [row.get(key) for key in keys]
        if len({isinstance(side, str) for side in sides}) > 1:
            raise MaskRefusal(f"{keys[0]!r} and {keys[1]!r} are of different kinds: both must be texts, or messages")
        if isinstance(sides[0], str):
            found = [self._text(prompt, name, side, key, row) for side, key in zip(sides, keys, strict=True)]
        else:
            found = self._conversations(prompt, name, sides, keys, row)
        if found[0][0] == found[1][0]:
            raise MaskRefusal(f"{keys[0]!r} and {keys[1]!r} are the same: there is nothing to prefer")
        return found

    def _text(self, prompt: Any, name: str, text: str, key: str, row: Mapping[str, Any]) -> tuple[list, list]:
        if prompt is None:
            raise MaskRefusal(
                f"{key!r} is a text and there is no prompt ({name!r}, data.prompt_key). Give prompts in a column, or "
                "whole conversations as messages"
            )
        if not text.strip():
            raise MaskRefusal(f"{key!r} is empty")
        if self.scores and self.tokenizer.chat_template:
            return self._scored([*(as_messages(prompt, self.tokenizer, ()) or ()), _answer(text)], row)
        if why := why_unusable(prompt, self._roles):
            raise MaskRefusal(f"the prompt ({name!r}) {why}")
        ids, mask = self._answered(as_messages(prompt, self.tokenizer, ()), name, text)
        return (ids, _last(ids)) if self.scores else (ids, mask)

    def _conversations(
        self, prompt: Any, name: str, sides: Sequence[Any], keys: Sequence[str], row: Mapping[str, Any]
    ) -> Sequences:
        chats = [self._chat(side, key) for side, key in zip(sides, keys, strict=True)]
        for number, (chat, key) in enumerate(zip(chats, keys, strict=True)):
            if chat[0].get("role") == "assistant":  # what follows the prompt
                if prompt is None:
                    raise MaskRefusal(f"{key!r} begins with the assistant and there is no prompt ({name!r})")
                chats[number] = [*self._chat(as_messages(prompt, self.tokenizer, ()), name), *chat]
            if chats[number][-1].get("role") != "assistant":
                raise MaskRefusal(f"{key!r} does not end with a turn of the assistant")
        pairs = zip(*chats, strict=False)
        shared = next((at for at, (one, other) in enumerate(pairs) if one != other), min(map(len, chats)))
        if not shared:
            raise MaskRefusal(f"{keys[0]!r} and {keys[1]!r} begin differently: a pair has one prompt")
        if self.scores:
            return [self._scored(chat, row) for chat in chats]
        turns, tools = self._turns_with(self._thinking(row)), self._tools(row)
        # what both have is the prompt, its earlier answers included
        shown = [[_unlearned(one) if at < shared else one for at, one in enumerate(chat)] for chat in chats]
        return [turns.encode(chat, tools) for chat in shown]

    def _chat(self, messages: Any, key: str) -> list[dict[str, Any]]:
        """The messages of a column, checked."""
        if why := why_unusable(messages, self._roles, is_messages=True):
            raise MaskRefusal(f"{key!r} {why}")
        messages = _without_nulls(messages)
        parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
        if any(part.get("type") not in (None, "text") for part in parts):
            raise MaskRefusal(f"{key!r} has images or videos, and preferences are learned from text alone")
        return messages

    def _scored(self, chat: list[dict[str, Any]], row: Mapping[str, Any]) -> tuple[list, list]:
        """All that the template writes of a conversation."""
        template = self._turns_with(self._thinking(row)).template
        try:
            text = template.render(chat, self._tools(row), generate=False)
        except jinja2.TemplateError as error:
            raise TemplateRefusal(f"the chat template refuses the conversation: {error}") from error
        (ids,) = encode([text], self.tokenizer)
        return ids, _last(ids)

    # all rows -------------------------------------------------------------------------------------------------------

    def _truncate(self) -> None:
        limit, side = self.config.get("max_length", 1024), self.config.get("truncation", "error")
        lengths = self._lengths.reshape(-1, 2)
        overlong = np.flatnonzero(lengths.max(1) > limit)
        if not len(overlong):
            return
        if side == "error":
            shown = "; ".join(
                f"{self.dataframe.where(int(i))} has {lengths[i, 0]} and {lengths[i, 1]} tokens" for i in overlong[:5]
            )
            raise DataError(
                f"{len(overlong)} of {len(self)} pairs have a sequence longer than data.max_length={limit} ({shown}"
                f"{'; ...' if len(overlong) > 5 else ''}). Raise it, leave them out with data.truncation=drop, or cut "
                "them with left or right."
            )
        if side == "drop":
            self._keep(np.setdiff1d(np.arange(len(self)), overlong), f"longer than data.max_length={limit}")
        elif side == "left":
            # the same tokens of both, so that they go on sharing their prompt
            cut = np.repeat(np.maximum(lengths.max(1) - limit, 0), 2)
            whole = np.array([self._first_learned(at) for at in range(len(self._lengths))])
            fits = (cut < whole).reshape(-1, 2).all(1)
            self._starts, self._lengths = self._starts + cut, self._lengths - cut
            self._keep(np.flatnonzero(fits), "without a token of their prompt left after data.truncation=left")
        elif side == "right":
            self._lengths = np.minimum(self._lengths, limit)
        else:
            raise ValueError(f"data.truncation={side!r} is not supported; use 'error', 'drop', 'left' or 'right'.")

    def _first_learned(self, at: int) -> int:
        """Place of the first token of the response; of a reward model's pair, where the two texts begin to differ."""
        if not self.scores:
            return int(self._mask(at).argmax())
        one, other = (self._tokens(side) for side in (at, at ^ 1))
        size = min(len(one), len(other))
        differ = np.flatnonzero(one[:size] != other[:size])
        return int(differ[0]) if len(differ) else size

    def _tokens(self, at: int) -> np.ndarray:
        first = int(self._starts[at])
        return self._ids[first : first + int(self._lengths[at])]

    def _mask(self, item: int) -> np.ndarray:
        """Of the sequence ``item``; of a reward model's, what is left of it decides where it ends."""
        if not self.scores:
            return super()._mask(item)
        mask = np.zeros(int(self._lengths[item]), bool)
        mask[-1:] = len(mask) > 1
        return mask

    def _drop_empty(self) -> None:
        """Leave out pairs of which a side has nothing learned left, or that have become equal; read margins."""
        counts = np.array([self._mask(at).sum() for at in range(len(self._lengths))]).reshape(-1, 2)
        same = [np.array_equal(self._tokens(at), self._tokens(at + 1)) for at in range(0, len(self._lengths), 2)]
        self._keep(np.flatnonzero(counts.all(1) & ~np.array(same)), "without a difference left after data.truncation")
        self._read_margins()
        self.num_tokens = int(self._lengths.sum())

    def _keep(self, rows: np.ndarray, why: str) -> None:
        """Go on with these pairs, and say how many are left out."""
        if len(rows) == len(self):
            return
        if not len(rows):
            raise DataError(
                f"all {len(self)} pairs are {why}. Raise data.max_length={self.config.get('max_length', 1024)}, or cut "
                "on the other side with data.truncation."
            )
        gone = np.setdiff1d(np.arange(len(self)), rows)
        logger.warning(
            "%d of %d pairs are %s: left out, %s first", len(gone), len(self), why, self.dataframe.where(int(gone[0]))
        )
        self.dataframe = self.dataframe.select(rows)
        self._lengths, self._starts = (one.reshape(-1, 2)[rows].reshape(-1) for one in (self._lengths, self._starts))

    def _read_margins(self) -> None:
        """Read the margins, and treat rows without a usable one as other bad rows."""
        key = self._key("margin_key", "margin")
        if not self.scores or key not in self.dataframe.column_names:
            return
        values, bad = self.dataframe.column(key), {}
        for item, value in enumerate(values):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                bad[item] = f"{key!r} (data.margin_key) is {value!r}; a margin is a number"
        kept = np.setdiff1d(np.arange(len(self)), list(bad))
        self.dataframe = leave_out(self.dataframe, bad, self.bad_rows)
        if bad:
            logger.warning("%d rows are left out: %s", len(bad), first_bad_rows(self.dataframe.skipped))
            self._lengths, self._starts = (
                one.reshape(-1, 2)[kept].reshape(-1) for one in (self._lengths, self._starts)
            )
        self.margins = np.array([values[item] for item in kept], np.float64)

    def __len__(self) -> int:
        return len(self._lengths) // 2

    def __getitem__(self, item: int) -> dict[str, Any]:
        found: dict[str, Any] = {"chosen": super().__getitem__(2 * item), "rejected": super().__getitem__(2 * item + 1)}
        if self.margins is not None:
            found["margin"] = float(self.margins[item])
        if self.ref_log_probs:
            found["ref_log_prob"] = self.ref_log_probs[item]
        return found

    @property
    def summary(self) -> str:
        """Sizes for the plan of a run."""
        return f"{len(self):,} pairs, {self.num_tokens:,} tokens, {int(self._lengths.max()):,} at most in a sequence"


def pairs_to_batch(items: Sequence[Mapping[str, Any]]) -> DataProto:
    """Join pairs into a batch of two consecutive rows each, the chosen one first.

    Column ``pairs`` (B,) is as of `PairwiseLoss`; ``margin`` (B,) is there if items have one; ``ref_log_prob`` (B, R),
    if items have that of each side.
    """
    sides = [item[side] for item in items for side in ("chosen", "rejected")]
    batch = examples_to_batch(sides)
    numbers = torch.arange(1, len(items) + 1)
    batch.put("pairs", torch.stack([numbers, -numbers], 1).reshape(-1))
    if any("margin" in item for item in items):
        margins = torch.tensor([float(item["margin"]) for item in items])
        batch.put("margin", margins.repeat_interleave(2))
    if items and "ref_log_prob" in items[0]:
        rows: list[Tensor] = [part for item in items for part in item["ref_log_prob"]]
        batch.put("ref_log_prob", batch.ragged("responses").like(torch.cat(rows)))
    return batch


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _unlearned(message: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in ("loss_mask", "weight")}
    return kept | {"weight": 0} if message.get("role") == "assistant" else kept


def _last(ids: Sequence[int]) -> list[bool]:
    return [False] * (len(ids) - 1) + [True] * bool(ids)
